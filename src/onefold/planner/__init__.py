"""Predict memory, traffic and time before a run."""
