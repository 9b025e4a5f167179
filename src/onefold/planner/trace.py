"""Trace one micro-batch of a model on `meta`: its events, its activations and its work.

Nothing is computed and no weight is held. The module is copied without its values and run forward
and backward once. Every tensor that torch makes is counted from its first moment to its last. The
units announce themselves through the hooks of training (engine/hooks.py). So a trace is the list of
an engine's events, with the activations between them. `planner/memory.py` plays the events back
under any stage, tier and number of ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from onefold.compose.quantizing import quantize_frozen, without_reading
from onefold.config import Precision
from onefold.engine.hooks import PartHooks, hook, keep_dtypes
from onefold.engine.walks import Call
from onefold.engine.watch import tensors_in
from onefold.errors import OnefoldError
from onefold.layout.module_tree import ModuleTree, uncompiled
from onefold.layout.one_rank import of_one_rank
from onefold.layout.units import UnitChoice, UnitPlan, plan_units
from onefold.planner.storages import Storages, Untraceable
from onefold.planner.work import Event, EventKind, ModelWork, UnitWork, Work
from onefold.recipe import Member

Inputs = Mapping[str, Any] | tuple[Any, ...]
"""Arguments of the module's forward: by name, or in order."""

Loss = Callable[[Any], Tensor]
"""Turns the module's outputs into the scalar that backward starts from."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A micro-batch as an engine would see it."""

    units: tuple[UnitWork, ...]
    events: tuple[Event, ...]
    batch_nbytes: int  # the inputs
    buffers_nbytes: int
    num_parameters: int = 0  # before weights are quantized; 0: as units have elements

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        return self.num_parameters or sum(unit.numel for unit in self.units)

    def work(self, tokens: int) -> ModelWork:
        """Return the work for the simulator; `tokens` of the micro-batch."""
        return ModelWork(self.units, tokens)

    def at_rows(self, two: Trace, rows: int) -> Trace:
        """Extrapolate to `rows` rows, where `self` is the trace of one row and `two` of two."""
        if rows == 1:
            return self

        def line(first: int, two: int) -> int:
            return int(first + (two - first) * (rows - 1))

        events = tuple(
            replace(
                first, now=line(first.now, second.now), peak=line(first.peak, second.peak),
                logits=line(first.logits, second.logits),
            )
            for first, second in zip(self.events, two.events, strict=True)
        )  # fmt: skip
        units = tuple(
            replace(
                first, forward=first.forward.at_rows(second.forward, rows),
                backward=first.backward.at_rows(second.backward, rows),
            )
            for first, second in zip(self.units, two.units, strict=True)
        )  # fmt: skip
        batch = line(self.batch_nbytes, two.batch_nbytes)
        return Trace(units, events, batch, self.buffers_nbytes, self.num_parameters)


def tokens_of(batch: int, seq: int) -> Inputs:
    """Rows of tokens [batch, seq], as every language model takes them."""
    return (torch.zeros(batch, seq, dtype=torch.int64, device="meta"),)


def default_loss(outputs: Any) -> Tensor:
    """`outputs.loss` if the model made one, else cross-entropy of its logits [..., V] in fp32."""
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    logits = getattr(outputs, "logits", outputs)
    if not isinstance(logits, Tensor):
        logits = next(tensors_in(outputs))
    del outputs
    flat = logits.flatten(0, -2)
    labels = torch.zeros(len(flat), dtype=torch.int64, device=flat.device)
    return F.cross_entropy(flat.float(), labels, reduction="sum")


def trace(
    module: nn.Module, inputs: Inputs, *, loss: Loss = default_loss, units: UnitChoice = None,
    precision: Precision | None = None, device_type: str = "cpu", is_alone: bool = False,
) -> Trace:  # fmt: skip
    """Trace one micro-batch of `module`, whose values are neither read nor changed.

    Shapes and dtypes of `inputs` count, their values do not. `device_type` decides which attention
    kernels run. `is_alone`: for a recipe that is (`Recipe.is_alone`), which has other units.
    Raises `Untraceable` where the forward depends on values.
    """
    skeleton = without_values(module)
    inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
    inputs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), inputs)
    tree, precision = ModuleTree.from_root(skeleton), precision or Precision()
    plans, twins = traced_units(tree, units, precision, is_alone=is_alone)
    tracer = _Tracer(tree, plans, twins, precision)
    if precision.compute is not None:
        keep_dtypes(tree.modules, precision.compute)
    storages = tracer.storages = Storages(device_type, tracer.note_work)
    for tensor in (*skeleton.parameters(), *skeleton.buffers(), *tensors_in(inputs)):
        storages.ignore(tensor)
    with torch.enable_grad(), storages.watching():
        try:
            _run_traced(skeleton, inputs, loss, tracer)
        except (OnefoldError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, Untraceable):
                raise
            raise Untraceable(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    return Trace(
        units=tracer.units(),
        events=tuple(tracer.events),
        batch_nbytes=sum(tensor.nbytes for tensor in tensors_in(inputs)),
        buffers_nbytes=sum(buffer.nbytes for buffer in skeleton.buffers()),
        num_parameters=sum(parameter.numel() for parameter in skeleton.parameters()),
    )


def _run_traced(module: nn.Module, inputs: Inputs, loss: Loss, tracer: _Tracer) -> None:
    outputs = module(**inputs) if isinstance(inputs, Mapping) else module(*inputs)
    total = loss(outputs)
    del outputs
    # not through Tensor.backward, which hides a recompute's attention from the function mode
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(  # type: ignore[attr-defined]
        (total,), (torch.ones_like(total),), False, False, (), allow_unreachable=True,
        accumulate_grad=True,
    )  # fmt: skip
    tracer.end_backward()


def traced_units(
    tree: ModuleTree, units: UnitChoice, precision: Precision, *, is_alone: bool = False
) -> tuple[list[UnitPlan], Mapping[nn.Module, nn.Module]]:
    """Return the units, and modules of `tree` by theirs: a copy's, where weights are quantized.

    The trace runs with exact weights: what decoding takes is counted with the unit.
    """
    planned, twins = tree, dict[nn.Module, nn.Module]()
    if precision.frozen is not None:
        planned = ModuleTree.from_root(without_values(tree.root))
        with without_reading(planned):
            quantize_frozen(planned, [], precision.frozen)
        twins = dict(zip(planned.root.modules(), tree.root.modules(), strict=True))
    plans = plan_units(planned, units, precision=precision)
    return of_one_rank(plans, planned.root) if is_alone and units is None else plans, twins


def without_values(module: nn.Module) -> nn.Module:
    """Copy `module` with parameters and buffers on `meta`, not compiled; ties are kept."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        shape, dtype = tuple(parameter.shape), parameter.dtype
        empty = torch.empty(shape, dtype=dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    copied = copy.deepcopy(uncompiled(module), memo)  # which drops what `Module.compile` made
    for part in list(copied.modules()):
        for name, child in part.named_children():
            part._modules[name] = uncompiled(child)
    return copied


class _Tracer:
    """Takes the place of the engine: writes down the events that hooks announce."""

    def __init__(
        self, tree: ModuleTree, plans: list[UnitPlan], twins: Mapping[nn.Module, nn.Module],
        precision: Precision,
    ) -> None:  # fmt: skip
        """`twins`: modules of `tree` by those of the plans, where these are another module's."""
        self.context = SimpleNamespace(compute=precision.compute)
        self.saved, self.ledger, self.is_unsharded = None, None, False
        self.events: list[Event] = []
        self.storages: Storages
        self._num_calls = self._depth = 0
        self._working: list[int] = []  # units whose modules run, the innermost last
        self._reached = -1  # the unit that autograd reached last
        self._is_backward = False
        traced = {fqn: parameter for fqn, parameter, *_ in tree.parameters()} if twins else {}
        self._units = [self._unit(i, plan, traced, precision) for i, plan in enumerate(plans)]
        self._forward, self._backward = ([Work()] * len(plans) for _ in range(2))
        users = {i: [twins.get(m, m) for m in plan.modules] for i, plan in enumerate(plans)}
        hook(self, users, root=tree.root)
        if precision.compute is not None:
            parts = {i: [twins.get(m, m) for m in plan.parts] for i, plan in enumerate(plans)}
            hook(self, parts, kind=PartHooks)

    def _unit(
        self, index: int, plan: UnitPlan, traced: Mapping[str, nn.Parameter], precision: Precision
    ) -> UnitWork:
        members: list[Member] = []
        for position, owned in enumerate(plan.members):
            parameter = traced.get(owned.fqn, owned.parameter)
            member = owned.member(precision.compute)
            if member.compute_dtype != member.dtype:
                parameter.data = parameter.data.to(member.compute_dtype)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._on_grad(index, position))
            members.append(member)
        numel = sum(member.numel for member in members)
        return UnitWork(plan.name, numel, members=tuple(members))

    def _on_grad(self, unit: int, member: int) -> Callable[[Tensor], None]:
        tracer = ref(self)

        def note(parameter: Tensor) -> None:
            alive = tracer()
            if alive is not None:
                alive._note_event(EventKind.GRAD, unit, member)
            parameter.grad = None  # from here on the planner counts it as a gradient

        return note

    def _note_event(self, kind: EventKind, unit: int = -1, call: int = -1, **modules: int) -> None:
        peak, logits = self.storages.take_peak()
        self.events.append(Event(kind, unit, call, self.storages.now, peak, logits, **modules))

    def note_work(self, work: Work) -> None:
        """Add the work of an operation to the innermost unit at work."""
        if self._is_backward and self._reached >= 0:
            self._backward[self._reached] = self._backward[self._reached].plus(work)
        elif self._working:
            unit = self._working[-1]
            self._forward[unit] = self._forward[unit].plus(work)

    def units(self) -> tuple[UnitWork, ...]:
        """Return the units with all work noted so far."""
        works = zip(self._units, self._forward, self._backward, strict=True)
        return tuple(replace(unit, forward=a, backward=b) for unit, a, b in works)

    # the events that hooks announce

    def begin_forward(self) -> None:
        """The root's forward starts."""
        self._depth += 1

    def enter(self, index: int) -> Call:
        """A module that uses the unit starts."""
        self._num_calls += 1
        self._working.append(index)
        kind = EventKind.AGAIN if self._is_backward else EventKind.ENTER
        self._note_event(kind, index, self._num_calls)
        return Call(index, self._num_calls)

    def leave(self, call: Call, module: nn.Module | None, num_modules: int) -> None:
        """The module's forward is over."""
        self._working.pop()
        self._note_event(
            EventKind.LEAVE, call.unit, call.started, module=id(module), num_modules=num_modules
        )

    def end_forward(self) -> None:
        """The root's forward is over: its outputs, and tensors of the loss, are the logits."""
        self._depth -= 1
        if self._depth == 0 and not self._is_backward:
            self._note_event(EventKind.END_FORWARD)
            self.storages.count_as(is_loss=True)

    def are_shown(self, indices: Iterable[int]) -> bool:
        """True while the root runs, which brings the units of its parts."""
        return self._depth > 0 or self._is_backward

    def hold_alias(self, tensor: Tensor) -> None:
        """A module returned a weight: a trace has none to keep."""

    def hold_hidden(self, index: int) -> None:
        """No output of the module announces its backward."""

    def begin_backward(self) -> None:
        """Autograd is about to run the first node."""
        self._is_backward = True

    def expect_backward(self, call: Call) -> None:
        """The outputs of `call` are watched."""
        self._note_event(EventKind.EXPECT, call.unit, call.started)

    def enter_backward(self, call: Call) -> None:
        """Autograd reaches the outputs of `call`."""
        self.storages.count_as(is_loss=False)
        self._reached = call.unit
        self._note_event(EventKind.BACKWARD, call.unit, call.started)

    def end_backward(self) -> None:
        """Autograd is done."""
        self._note_event(EventKind.END)
