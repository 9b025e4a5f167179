"""Show unsharded parameters to the user: `onefold.unsharded`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from onefold.engine.engine import Engine
from onefold.engine.structure import is_frozen
from onefold.engine.watch import in_backward
from onefold.errors import StateError
from onefold.layout.ledger import Kind
from onefold.unit.buffer import Buffer
from onefold.unit.parameter import UnitParameter
from onefold.unit.unit import Unit
from onefold.wire.together import announcing


@contextmanager
def unsharded(engine: Engine, *, writeback: bool) -> Iterator[None]:
    """Modules show plain, unsharded parameters in their own dtype; `writeback` keeps edits.

    The buffers are temporary, and not those of compute: tensors that a graph refers to stay as they
    are, and without `writeback` every edit is dropped.
    """
    shown: dict[UnitParameter, nn.Parameter] = {}
    with announcing(engine.group):
        _check_moment(engine)
        buffers = [] if engine.is_unsharded else _show_all(engine, shown)
    if engine.is_unsharded:
        yield
        return
    try:
        with engine.driven(is_suspended=True):
            yield
    finally:
        _forget_removed(engine, shown)
        edited = [(p, p.current()) for p in shown if p.places]
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, current in edited:
                if current is not None and current is shown[parameter]:  # may be frozen inside
                    parameter.sharded.requires_grad_(current.requires_grad)
        for unit in engine.units:
            unit.end_edits()
        if writeback:
            _write_back(edited)
        shown.clear()
        buffers.clear()
    engine.note_structure()


def _check_moment(engine: Engine) -> None:
    if engine.schedule.forward_depth > 0 or in_backward():
        wanted = "onefold.unsharded outside forward and backward"
        got = "a call from within one"
        hint = "modules that run already see unsharded parameters"
        raise StateError(wanted, got, where=f"rank {engine.group.rank}", hint=hint)


def _show_all(engine: Engine, shown: dict[UnitParameter, nn.Parameter]) -> list[Buffer]:
    """Gather all units, and keep what is `shown`; a collective."""
    for unit in engine.units:
        unit.reshard(release=False)
        unit.join_step()
        unit.gradient.drop_cleared()
    engine.note_structure()  # an adapter may have been deleted since the last forward
    buffers = [_show_unsharded(unit, shown) for unit in engine.units]
    engine.context.routes.rest()
    with torch._C.DisableTorchFunctionSubclass():
        shows_grads = any(p.sharded.grad is not None for p in engine.by_sharded.values())
    engine.facts.note_shown(
        sum(buffer.tensor.nbytes for buffer in buffers), shows_grads=shows_grads
    )
    return buffers


def _forget_removed(engine: Engine, shown: Iterable[UnitParameter]) -> None:
    """Take places off parameters that were removed, as adapters are; see engine/structure.py."""
    is_partly_frozen = any(is_frozen(parameter) for parameter in engine.by_sharded.values())
    for parameter in shown if is_partly_frozen else ():
        if not parameter.is_table:  # a new weight may hold its tables itself
            parameter.drop_empty_places()


def _show_unsharded(unit: Unit, shown: dict[UnitParameter, nn.Parameter]) -> Buffer:
    """Gather a unit into a buffer of its own and show plain parameters over it."""
    unit.check_untouched()
    context = unit.context
    numel = unit.gather.full_numel
    buffer = Buffer(numel, unit.dtype, Kind.UNSHARDED, context.store, context.ledger)
    unit.exact_gather.start(buffer).wait()
    unit.exact_gather.check(buffer)
    with torch._C.DisableTorchFunctionSubclass():
        for parameter in unit.parameters:
            view = buffer.view(parameter.slot.full_offset, parameter.slot.shape)
            parameter.show(shown.setdefault(parameter, parameter.plain(view)))
    unit.begin_edits()
    return buffer


def _write_back(edited: list[tuple[UnitParameter, Tensor | None]]) -> None:
    """Keep this rank's rows of every parameter; write nothing unless all shapes fit."""
    rows: list[tuple[UnitParameter, Tensor]] = []
    for parameter, current in edited:
        context = parameter.unit.context
        own = parameter.rows_of(current)
        if own is None:
            wanted = f"parameter {parameter.fqn!r} to keep shape {list(parameter.shape)}"
            got = "none" if current is None else f"shape {list(current.shape)}"
            hint = "resize or remove parameters before onefold.shard"
            raise StateError(wanted, got, where=context.where, hint=hint)
        rows.append((parameter, own))
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for parameter, own in rows:
            parameter.local.copy_(own)
            parameter.unit.gather.forget_base()
