"""Uneven rows: ranks of different speed take different numbers of rows of each global batch."""
