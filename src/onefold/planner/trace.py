"""One micro-batch of a model on `meta`: what is alive when, which unit works, how much it computes.

Nothing is computed and no weight is held. The module is copied without its values, run forward and
backward once, and every tensor that torch makes on the way is counted from its first moment to its
last. The units announce themselves through the same hooks as in training (engine/hooks.py), so a
trace is the list of an engine's verbs with the activations between them. `planner/memory.py` plays
it back under any stage, tier and number of ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onefold.config import Precision
from onefold.engine.hooks import install
from onefold.engine.watch import tensors_in
from onefold.errors import OnefoldError
from onefold.layout.units import UnitChoice, UnitPlan, plan_units
from onefold.planner.storages import Storages, Untraceable, WorkDone
from onefold.recipe import Member

Inputs = Mapping[str, Any] | tuple[Any, ...]
"""Arguments of the module's forward: by name, or in order."""

Loss = Callable[[Any], Tensor]
"""From what the module returns to the scalar that backward starts from."""


class Heard(StrEnum):
    """Which of the engine's events torch announced."""

    ENTER = "enter"  # a module that uses a unit starts, in forward
    AGAIN = "again"  # or in a recompute, which belongs to backward
    LEAVE = "leave"  # it is over
    END_FORWARD = "end_forward"
    EXPECT = "expect"  # its outputs are watched
    BACKWARD = "backward"  # autograd reaches them
    GRAD = "grad"  # a gradient of one parameter is there
    END = "end"  # of backward


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a schedule (engine/schedule.py), and the bytes that torch held until then."""

    heard: Heard
    unit: int  # position among the units; -1: none
    call: int  # which forward of a module it is about; of `GRAD`: which parameter; -1: none
    now: int  # activations and temporaries, at the event
    peak: int  # the most of them since the event before
    logits: int  # of `peak`: the module's outputs and tensors that the loss made of them
    module: int = -1  # of `LEAVE`: which module
    num_modules: int = 1  # of `LEAVE`: how many modules use the unit


@dataclass(slots=True)
class Tally:
    """The work of one pass: FLOPs of products and of attention, bytes moved by everything else,
    random numbers drawn.
    """

    flops: float = 0.0
    attention_flops: float = 0.0
    nbytes: float = 0.0
    drawn: float = 0.0
    num_kernels: int = 0

    def scaled(self, two: Tally, rows: int) -> Tally:
        """The work of `rows` rows, where this is that of one and `two` that of two."""

        def line(one: float, two: float) -> float:
            return one + (two - one) * (rows - 1)

        return Tally(
            line(self.flops, two.flops), line(self.attention_flops, two.attention_flops),
            line(self.nbytes, two.nbytes), line(self.drawn, two.drawn), self.num_kernels,
        )  # fmt: skip


@dataclass(slots=True)
class UnitTrace:
    """One unit, and what a micro-batch asks of it."""

    name: str
    members: tuple[Member, ...]
    forward: Tally = field(default_factory=lambda: Tally())
    backward: Tally = field(default_factory=lambda: Tally())  # recompute included

    @property
    def numel(self) -> int:
        return sum(member.numel for member in self.members)

    def scaled(self, two: UnitTrace, rows: int) -> UnitTrace:
        """What `rows` rows ask of it, where this is for one and `two` for two."""
        return UnitTrace(
            self.name, self.members, self.forward.scaled(two.forward, rows),
            self.backward.scaled(two.backward, rows),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trace:
    """A micro-batch as an engine would see it. `kept`: activations at the end of forward."""

    units: tuple[UnitTrace, ...]
    events: tuple[Event, ...]
    batch_nbytes: int  # the inputs
    buffers_nbytes: int

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)

    @property
    def peak(self) -> int:
        """The most that torch holds besides parameters and their gradients."""
        return max((event.peak for event in self.events), default=0)


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
    precision: Precision | None = None, device_type: str = "cpu", tile_nbytes: int = 0,
) -> Trace:  # fmt: skip
    """Trace one micro-batch of `module`, whose values are neither read nor changed.

    Shapes and dtypes of `inputs` count, their values do not. `device_type` says whose attention
    kernels are meant. Raises `Untraceable` where the forward looks at values.
    """
    chosen = precision or Precision()
    skeleton = without_values(module)
    inputs = _on_meta(inputs)
    plans = plan_units(skeleton, units, tile_nbytes)
    tracer = _Tracer(skeleton, plans, chosen)
    live = tracer.live = Storages(device_type, tracer.note_work)
    for tensor in (*skeleton.parameters(), *skeleton.buffers(), *tensors_in(inputs)):
        live.ignore(tensor)
    with torch.enable_grad(), live.watching():
        try:
            _run(skeleton, inputs, loss, tracer)
        except (OnefoldError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, Untraceable):
                raise
            raise Untraceable(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    return Trace(
        units=tuple(tracer.units),
        events=tuple(tracer.events),
        batch_nbytes=sum(tensor.nbytes for tensor in tensors_in(inputs)),
        buffers_nbytes=sum(buffer.nbytes for buffer in skeleton.buffers()),
    )


def _run(module: nn.Module, inputs: Inputs, loss: Loss, tracer: _Tracer) -> None:
    outputs = module(**inputs) if isinstance(inputs, Mapping) else module(*inputs)
    total = loss(outputs)
    del outputs
    # past the functions that hide what follows from a mode: a recompute runs attention too
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(  # type: ignore[attr-defined]
        (total,), (torch.ones_like(total),), False, False, (), allow_unreachable=True,
        accumulate_grad=True,
    )  # fmt: skip
    tracer.end_backward()


def without_values(module: nn.Module) -> nn.Module:
    """A copy of `module` whose parameters and buffers lie on `meta`; ties are kept."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        shape, dtype = tuple(parameter.shape), parameter.dtype
        empty = torch.empty(shape, dtype=dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


def _on_meta(inputs: Inputs) -> Inputs:
    def moved(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) else value

    if isinstance(inputs, Mapping):
        return {name: moved(value) for name, value in inputs.items()}
    return tuple(moved(value) for value in inputs)


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Call:
    """One forward of a module that uses a unit."""

    unit: int
    number: int


@dataclass(slots=True)
class _Context:
    compute: torch.dtype | None


class _Tracer:
    """Stands where the engine stands, and writes down what it is told."""

    def __init__(self, module: nn.Module, plans: list[UnitPlan], precision: Precision) -> None:
        self.context, self._precision = _Context(precision.compute), precision
        self.saved, self.ledger, self.is_summoned = None, None, False
        self.units: list[UnitTrace] = []
        self.events: list[Event] = []
        self.live: Storages
        self._num_calls = self._depth = 0
        self._working: list[int] = []  # units whose modules run, the innermost last
        self._reached = -1  # the unit that autograd reached last
        self._is_backward = False
        for index, plan in enumerate(plans):
            self.units.append(self._unit(index, plan))
        users = {index: plan.modules for index, plan in enumerate(plans)}
        install(self, module, users)

    def _unit(self, index: int, plan: UnitPlan) -> UnitTrace:
        members: list[Member] = []
        for position, owned in enumerate(plan.members):
            parameter = owned.parameter
            member = Member.of(owned.fqn, parameter, self._precision)
            if member.compute_dtype != member.dtype:
                parameter.data = parameter.data.to(member.compute_dtype)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._on_grad(index, position))
            members.append(member)
        return UnitTrace(plan.name, tuple(members))

    def _on_grad(self, unit: int, member: int) -> Callable[[Tensor], None]:
        tracer = ref(self)

        def note(parameter: Tensor) -> None:
            alive = tracer()
            if alive is not None:
                alive._note(Heard.GRAD, unit, member)
            parameter.grad = None  # from here on it is counted as a gradient

        return note

    def _note(
        self,
        heard: Heard,
        unit: int = -1,
        call: int = -1,
        *,
        module: int = -1,
        num_modules: int = 1,
    ) -> None:
        peak, logits = self.live.take_peak()
        now = self.live.now
        self.events.append(Event(heard, unit, call, now, peak, logits, module, num_modules))

    def note_work(self, done: WorkDone) -> None:
        """An operation has run: it belongs to the innermost unit at work."""
        if self._is_backward and self._reached >= 0:
            tally = self.units[self._reached].backward
        elif self._working:
            tally = self.units[self._working[-1]].forward
        else:
            return
        tally.num_kernels += 1
        tally.flops += done.flops
        tally.attention_flops += done.attention_flops
        tally.nbytes += done.nbytes
        tally.drawn += done.drawn

    # what hooks tell an engine

    def begin_forward(self) -> None:
        """The root's forward starts."""
        self._depth += 1

    def enter(self, index: int) -> _Call:
        """A module that uses the unit starts."""
        self._num_calls += 1
        self._working.append(index)
        self._note(Heard.AGAIN if self._is_backward else Heard.ENTER, index, self._num_calls)
        return _Call(index, self._num_calls)

    def leave(self, call: _Call, module: nn.Module | None, num_modules: int) -> None:
        """It is over."""
        self._working.pop()
        self._note(Heard.LEAVE, call.unit, call.number, module=id(module), num_modules=num_modules)

    def end_forward(self) -> None:
        """The root's forward is over: its outputs, and tensors of the loss, are the logits."""
        self._depth -= 1
        if self._depth == 0 and not self._is_backward:
            self._note(Heard.END_FORWARD)
            self.live.is_loss = True

    def hold_alias(self, tensor: Tensor) -> None:
        """A module gave out a weight."""

    def hold_hidden(self, index: int) -> None:
        """A forward showed no tensor for backward to come by."""

    def begin_backward(self) -> None:
        """Autograd is about to run the first node."""
        self._is_backward = True

    def expect_backward(self, call: _Call) -> None:
        """Backward will come by."""
        self._note(Heard.EXPECT, call.unit, call.number)

    def enter_backward(self, call: _Call) -> None:
        """Autograd reaches the outputs of `call`."""
        self.live.is_loss = False
        self._reached = call.unit
        self._note(Heard.BACKWARD, call.unit, call.number)

    def end_backward(self) -> None:
        """Autograd is done."""
        self._note(Heard.END)
