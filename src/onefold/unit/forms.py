"""Form: what a parameter object is now, by its class, which `take_form` alone assigns.

    form        object      values that may be read            bytes that it holds
    SHARDED     sharded     own rows, or all by a gather       own rows, a view of the weight
    GATHERED    sharded     `.data`: all rows, in a copy       own rows, and the copy
    REPLICATED  sharded     all rows, as they rest             all rows, a view of the weight
    WATCHED     both        all rows; edits are counted        all rows, a view of the weight
    UNSHARDED   unsharded   all rows in the compute dtype      none: a view of the full buffer
    OVER_AXES   unsharded   a piece, as a DTensor              none: a view of the full buffer
    MATRIX      unsharded   none, or decoded when asked for    none: the message has them
    LIBRARY     unsharded   bytes, as its library reads them   none: a view of the full buffer
    STALE       unsharded,  none: every use is an error        none
                or replaced
    STALE_AXES  the same over model axes

An object that has no form keeps the class that users gave it: one process computes with it as it
rests. A class decides what a read does, so that a read of unsharded values costs nothing. See
docs/adr/0004.
"""

from enum import Enum
from typing import NamedTuple

from torch import Tensor

from onefold.unit import dtensors
from onefold.unit.decoded import PackedMatrix


class Form(Enum):
    """The forms of a parameter object: class, whether values may be read, whether it has bytes."""

    SHARDED = dtensors.ShardedParameter, True, True
    GATHERED = dtensors.GatheredParameter, True, True
    REPLICATED = dtensors.ReplicatedParameter, True, True
    WATCHED = dtensors.PlainSharded, True, True
    UNSHARDED = dtensors.UnshardedParameter, True, False
    OVER_AXES = dtensors.UnshardedDTensor, True, False
    MATRIX = PackedMatrix, True, False
    LIBRARY = None, True, False  # the class that the library of a packed weight gave it
    STALE = dtensors.StaleParameter, False, False
    STALE_AXES = dtensors.StaleDTensor, False, False

    def __init__(self, kind: type[Tensor] | None, is_readable: bool, has_bytes: bool) -> None:
        self.kind, self.is_readable, self.has_bytes = kind, is_readable, has_bytes


class Forms(NamedTuple):
    """The forms of an unsharded parameter: while its values are there, and while they are not."""

    shown: Form
    stale: Form
    library: type[Tensor] | None = None  # the class of LIBRARY
