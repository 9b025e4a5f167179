"""Sequence parallelism: each rank computes on a piece of the sequence, attention on some heads."""
