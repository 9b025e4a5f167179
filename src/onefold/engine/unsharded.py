"""Show unsharded parameters to the user: `onefold.unsharded`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from weakref import ref

import torch
from torch import Tensor, nn

from onefold.engine.engine import Engine
from onefold.engine.structure import is_frozen
from onefold.engine.watch import in_backward
from onefold.errors import StateError
from onefold.layout.ledger import Kind
from onefold.unit import refusals, user_hooks
from onefold.unit.buffer import Buffer
from onefold.unit.parameter import UnitParameter
from onefold.unit.shortage import explained
from onefold.unit.unit import Unit, unit_of
from onefold.wire.together import announcing


@contextmanager
def unsharded(engine: Engine, *, writeback: bool) -> Iterator[None]:
    """Modules show plain, unsharded parameters in their own dtype; `writeback` keeps edits.

    The buffers are temporary, and not those of compute: tensors that a graph refers to stay as they
    are, and without `writeback` every edit is dropped. Gradients of backwards inside are reduced at
    the end.
    """
    shown: dict[UnitParameter, nn.Parameter] = {}
    gradients = _Gradients()
    with announcing(engine.group), explained(engine.ledger, "onefold.unsharded"):
        _check_moment(engine)
        buffers = [] if engine.is_unsharded else _show_all(engine, shown)
    if engine.is_unsharded:
        yield
        return
    gradients.watch(shown)
    try:
        with engine.driven(is_suspended=True):
            yield
        gradients.take_off(shown)
    except BaseException:
        gradients.lose()
        raise
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
    gradients.add(engine)


class _Gradients:
    """What backwards inside the block leave on plain parameters, and what `.grad` shows of it.

    An optimizer clears the sharded parameter's gradient, so that has one as soon as a backward
    brings it: a stand-in, unless an earlier mean is there.
    """

    def __init__(self) -> None:
        self._seen: dict[UnitParameter, Tensor] = {}  # the sharded parameters' own, last seen
        self._stand_ins: dict[UnitParameter, Tensor] = {}
        self._taken: dict[UnitParameter, Tensor] = {}  # [all rows]
        self._is_over = False

    def watch(self, shown: dict[UnitParameter, nn.Parameter]) -> None:
        for parameter, plain in shown.items():
            if plain.requires_grad:
                plain.register_hook(partial(self._follow_clear, parameter, ref(plain)))
                plain.register_post_accumulate_grad_hook(partial(self._note_grad, parameter))

    def _follow_clear(self, parameter: UnitParameter, plain: ref[Tensor], _: Tensor) -> None:
        """Before a gradient is added: `optimizer.zero_grad` knows the sharded parameter alone."""
        with torch._C.DisableTorchFunctionSubclass():
            found = plain()
            if found is not None and parameter in self._seen and parameter.sharded._grad is None:
                found.grad = None

    def _note_grad(self, parameter: UnitParameter, _: Tensor) -> None:
        if unit_of(parameter).is_tiled or self._is_over:
            refused = refusals.LATE_BACKWARD if self._is_over else refusals.TILED_INSIDE
            raise refused(parameter.fqn, where=parameter.spec.context.where)
        sharded = parameter.sharded
        with torch._C.DisableTorchFunctionSubclass():
            if sharded._grad is None:
                stand_in = parameter.no_mean(refusals.NO_MEAN_INSIDE)
                sharded._grad = self._stand_ins[parameter] = stand_in
            self._seen[parameter] = sharded._grad

    def take_off(self, shown: dict[UnitParameter, nn.Parameter]) -> None:
        """Take the gradients off, but those that were cleared in one form or the other."""
        self._is_over = True
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in shown:
                sharded = parameter.sharded
                plain = parameter.current() if parameter.places else None  # else its module is gone
                is_cleared = parameter in self._seen and sharded._grad is None
                if sharded._grad is self._stand_ins.get(parameter):
                    sharded._grad = None
                if plain is not None and plain.grad is not None and not is_cleared:
                    self._taken[parameter] = plain.grad

    def lose(self) -> None:
        """The block has failed: a step raises until the gradients to which it added are cleared."""
        self._is_over = True
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, seen in self._seen.items():
                if parameter.sharded._grad is seen:
                    parameter.sharded._grad = parameter.lost_mean
                    unit_of(parameter).gradient.drop_cleared()

    def add(self, engine: Engine) -> None:
        """Reduce them, as a backward does at its end. A collective."""
        if not self._taken:
            return
        for unit in engine.units:
            unit.gradient.begin()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for parameter, grad in self._taken.items():
                _add_partial(parameter, grad)
                unit_of(parameter).gradient.partial.note([parameter])
        engine.complete()
        with torch.no_grad():
            for parameter in reversed(self._taken):
                if parameter.spec.computes_on_sharded:  # autograd itself calls their hooks
                    user_hooks.call(parameter)


def _add_partial(parameter: UnitParameter, grad: Tensor) -> None:
    """Add a plain parameter's gradient to this rank's partial gradient."""
    before = parameter.partial_grad
    grad = (grad.to_dense() if grad.is_sparse else grad).to(parameter.unsharded.dtype)
    if parameter.model is None:
        parameter.set_partial_grad(grad)
    else:
        parameter.unsharded.grad = grad
        parameter.fit_grad()
    if before is not None and (added := parameter.partial_grad) is not None:
        parameter.set_partial_grad(before.add_(added))


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
        shows_grads = any(p.sharded._grad is not None for p in engine.by_sharded.values())
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
            unit_of(parameter).gather.forget_base()
