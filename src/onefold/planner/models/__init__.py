"""The models that commands know by name, and how other models are loaded."""
