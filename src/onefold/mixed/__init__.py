"""Ranks that differ: shares of the state by memory, rows of the batch by speed."""

from onefold.mixed.resharing import reshare
from onefold.mixed.sampler import RowSampler

__all__ = ["RowSampler", "reshare"]
