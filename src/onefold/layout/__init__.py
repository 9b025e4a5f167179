"""Decide, in integers, the units, the places of parameters in flat buffers, the ranks of pieces.

Nothing here allocates memory or uses a process group, so tests need no ranks.
"""
