"""Uneven shards: choose how much state each rank holds, and move rows when that changes."""
