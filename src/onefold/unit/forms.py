"""Form: what a parameter object is now, by its class; one table, one function that assigns it.

    form        object      values that may be read            bytes that it holds
    SHARDED     sharded     own rows, or all by a gather       own rows, a view of the weight
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

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from onefold.errors import StateError
from onefold.unit import dtensors
from onefold.unit.decoded import PackedMatrix


class Form(Enum):
    """The forms of a parameter object: class, whether values may be read, whether it has bytes."""

    SHARDED = dtensors.ShardedParameter, True, True
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


def take_form(
    form: Form, parameters: Iterable[Tensor], library: type[Tensor] | None = None
) -> None:
    """Let parameter objects take a form, each of their unit; `library`: the class of LIBRARY."""
    kind: Any = form.kind or library
    for parameter in parameters:
        parameter.__class__ = kind


def invalidate(parameter: nn.Parameter, why: Callable[[], StateError]) -> Form:
    """Make every later use of the object a `StateError` that says `why`; return its form."""
    form = Form.STALE_AXES if isinstance(parameter, DTensor) else Form.STALE
    take_form(form, (parameter,))
    setattr(parameter, "_why", why)  # noqa: B010 - the class is new, the object is not
    return form
