"""Decide in integers where parameters lie in flat buffers, who holds which piece, what is a unit.

Nothing here allocates memory or knows a process group, so tests need no ranks.
"""
