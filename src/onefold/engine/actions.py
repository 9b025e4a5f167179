"""The actions that a schedule returns, executed on tensors, on byte counters or on clocks."""

from __future__ import annotations

from enum import IntEnum, auto


class Verb(IntEnum):
    """One thing to do with one unit; with `NO_UNIT`, with none."""

    FETCH = auto()  # bring this rank's rows near, if they rest in another tier
    FILL = auto()  # begin to fill the node's second shard of weights
    GATHER = auto()  # begin to gather the unsharded weights
    SHOW = auto()  # wait for that gather, let modules see unsharded parameters
    HIDE = auto()  # let modules see sharded parameters again
    FREE = auto()  # hide, and free the unsharded weights
    INVALIDATE = auto()  # hide; unsharded weights may not be read until the next gather
    REDUCE = auto()  # begin the reduction of gradients
    LAND = auto()  # wait for its first hop
    KEEP_SUMS = auto()  # the node's sums rest until the last micro-batch
    FOLLOW = auto()  # show the averaged gradient, or begin the second hop
    FINISH = auto()  # wait for the second hop, show the averaged gradient
    WAIT_STEP = auto()  # wait for the background step of the unit
    STEP = auto()  # begin the step of the unit in the background
    REST = auto()  # no message follows for now: free the buffers kept for the next


Action = tuple[Verb, int]

NO_UNIT = -1
