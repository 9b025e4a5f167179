"""Checkpoints: about parameters and their names, never about how they happened to be cut."""
