"""Accumulation that adapts: the order in which micro-batches of a step pass through the units."""
