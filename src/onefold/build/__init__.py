"""The composition root: from arguments to a recipe (resolve.py), from a recipe to objects."""
