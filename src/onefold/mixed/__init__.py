"""Ranks that differ: shares of the state by memory, rows of the batch by speed."""
