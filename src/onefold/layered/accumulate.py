"""`onefold.accumulate_layers`: forward and backward of all micro-batches of a step, in an order.

At stage 3, with m micro-batches, one gather of all weights of g bytes and one reduction of r bytes:

    order           sends            holds besides
    plain           m (2 g + r)      nothing
    keep            g + r            unsharded weights of all units, and their gradients
    layers          2 g + r          tensors between blocks of all micro-batches

"keep" keeps a window of units, as a pipeline does. Other units are sent as in the plain order. The
order is chosen from free memory; the report has its costs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from onefold.engine.engine import Engine
from onefold.engine.first_batch import compare_now
from onefold.engine.pipelined import calling_stage
from onefold.engine.registry import engine_of
from onefold.engine.watch import in_backward
from onefold.errors import ConfigError, StateError
from onefold.fit.kept_units import gathered_units, memory_of, trained_units
from onefold.layered.orders import Forward, Layered, NotAChain, RandomStreams, run_loop
from onefold.layout.ledger import Kind, Traffic
from onefold.layout.module_tree import uncompiled
from onefold.layout.units import repeated_blocks
from onefold.text import format_bytes
from onefold.unit.shortage import explained

Loss = Callable[[Any, Any], Tensor]


def accumulate_layers(
    module: nn.Module,
    microbatches: Iterable[Any],
    loss: Loss | None = None,
    *,
    order: Order = "layers",
) -> Tensor:
    """Run forward and backward of all micro-batches of a step, unit by unit.

    At stage 3 each unit is gathered twice and reduced once, whatever the number of micro-batches.
    A loop with `onefold.accumulate` does so for each of them. From a disk each weight is read
    twice. In exchange the activations of all micro-batches live at the same time: turn on
    recompute, so that only inputs of blocks are left. A collective: ranks may have different
    numbers of micro-batches.

    The gradient is that of the mean loss. It is summed over micro-batches in their order, in the
    dtype of the compute, then over ranks: as `onefold.accumulate` does at stages 0 and 1, bit for
    bit. A weight that is used at both ends, as a tied head, is equal up to rounding. Each
    micro-batch draws random numbers from a stream of its own (docs/guides/accumulation.md).

    A model that is no sequence of blocks runs in the plain order, and the report says why.

    Args:
        module: one that `shard` has sharded.
        microbatches: inputs of any shapes, one entry a micro-batch: a tensor; a tuple, of which the
            module gets as many entries as its forward takes; or a mapping of keyword arguments, of
            which it gets those that its forward names.
        loss: takes the module's output and the micro-batch, whole; returns one number. None:
            `output.loss`, or the output itself.
        order: "layers"; "keep" runs one micro-batch after the other and keeps unsharded weights
            and gradients; "plain" is the loop; "auto" takes, on all ranks alike, "keep" if all
            units fit into free memory, else "layers" if the tensors between blocks do. Else, and
            for a model that is no chain, it keeps as many units as fit.

    Returns:
        The mean loss of this rank's micro-batches, detached.

    Raises:
        ConfigError: no micro-batch, an unknown order, or a loss that is not one number.
        StateError: inside a forward, a backward or `torch.no_grad`; or a stage of a pipeline, whose
            schedule accumulates.

    Example:
        >>> loss = onefold.accumulate_layers(model, batches, lambda out, batch: out.mean())
        >>> optimizer.step()
    """
    engine, batches = engine_of(module), list(microbatches)
    _check_batches(engine, batches, order)
    known = engine.facts.about(Accumulation)
    compare_now(_root(engine), *_arguments(module, batches[0]))
    forwards = [partial(_forward, module, batch, loss, len(batches)) for batch in batches]
    streams = RandomStreams(len(batches), engine.context.store.device, module)
    try:
        with explained(engine.ledger):
            total = known.run_micro_batches(engine, order, forwards, streams)
    finally:
        streams.end()
    return total


def _root(engine: Engine) -> nn.Module:
    root = engine.module()
    assert root is not None, "the caller holds it"
    return root


def _refusal(engine: Engine) -> str | None:
    """Why the module cannot be cut, if that shows before it runs."""
    if not repeated_blocks(_root(engine)):
        return "it has no list of repeated blocks"
    return None if engine.saved is None else "its activations leave the device"


def _check_batches(engine: Engine, batches: Sequence[Any], order: str) -> None:
    where = f"rank {engine.group.rank}"
    if not batches:
        hint = "a rank without rows runs a micro-batch of zero weight: loss * 0"
        raise ConfigError("at least one micro-batch", "none", where=where, hint=hint)
    if order not in ("auto", "layers", "keep", "plain"):
        names = '"auto", "layers", "keep" or "plain"'
        hint = '"layers" sends the least that one unit at a time allows'
        raise ConfigError(f"order to be {names}", repr(order), where=where, hint=hint)
    if engine.pipeline is not None or calling_stage():
        hint = "schedule.step runs micro-batches; onefold.pipeline gathers each unit once a step"
        raise StateError(
            "a module that no pipeline schedule runs", "a stage", where=where, hint=hint
        )
    is_inside = engine.schedule.forward_depth > 0 or in_backward()
    if is_inside or not torch.is_grad_enabled() or engine.is_inference or engine.is_unsharded:
        got = "a call from within one" if is_inside else "a module that records no graph now"
        wanted = "onefold.accumulate_layers outside forward and backward, with gradients"
        hint = "call it where the loop would call the module"
        raise StateError(wanted, got, where=where, hint=hint)


def _forward(module: nn.Module, batch: Any, loss: Loss | None, number: int) -> Tensor:
    """One micro-batch up to its part of the mean loss."""
    args, kwargs = _arguments(module, batch)
    output = module(*args, **kwargs)
    value = loss(output, batch) if loss is not None else _loss_of(output)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        got = type(value).__name__
        if isinstance(value, Tensor):
            graph = "with" if value.requires_grad else "without"
            got = f"a tensor {list(value.shape)} {graph} a graph"
        hint = "pass loss=, a function of the output and the micro-batch"
        raise ConfigError("a loss that is one number with a graph", got, hint=hint)
    return value.reshape(()) / number


def _loss_of(output: Any) -> Any:
    if isinstance(output, Mapping):
        return output.get("loss")
    return output if isinstance(output, Tensor) else getattr(output, "loss", None)


def _arguments(module: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that the module's forward takes of a micro-batch."""
    if not isinstance(batch, tuple | list | Mapping):
        return (batch,), {}
    parameters = list(inspect.signature(uncompiled(module).forward).parameters.values())
    kinds = {parameter.kind for parameter in parameters}
    if isinstance(batch, Mapping):
        names = {parameter.name for parameter in parameters}
        takes_all = inspect.Parameter.VAR_KEYWORD in kinds
        return (), {name: batch[name] for name in batch if takes_all or name in names}
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    number = sum(parameter.kind in positional for parameter in parameters)
    return tuple(batch if inspect.Parameter.VAR_POSITIONAL in kinds else batch[:number]), {}


Order = Literal["auto", "layers", "keep", "plain"]


@dataclass(slots=True)
class Accumulation:
    """What is known of a module's accumulation, for the next step and the report."""

    refused: str | None = None  # why the module is no chain; None where it may be one
    is_proved: bool = False  # it was a chain
    order: Order = "layers"  # of the last step
    num_microbatches: int = 0
    border_nbytes: int = 0  # of tensors between blocks, of all micro-batches of the last step
    sent_nbytes: tuple[int, int] = (0, 0)  # by gathers and reductions of the last step
    window: frozenset[int] = frozenset()  # units that "keep" keeps
    kept: frozenset[int] = frozenset()  # units that some step has kept
    _picked: Order | None = None
    _num_picks: int = 0

    def run_micro_batches(
        self, engine: Engine, order: Order, forwards: Sequence[Forward], streams: RandomStreams
    ) -> Tensor:
        """Run all micro-batches of a step, in a loop where the module is no chain."""
        order, before, total = self._choose(engine, order), _sent_nbytes(engine), None
        if order == "layers":
            self.refused = self.refused or _refusal(engine)
            total = None if self.refused else self._run_layers(engine, forwards, streams)
            if total is None:
                order = self._loop_order()
        self.order = order
        if total is None:
            self.window = frozenset() if order == "plain" else self.window
            self.kept |= self.window
            total = run_loop(engine, forwards, streams, self.window)
        after, self.num_microbatches = _sent_nbytes(engine), len(forwards)
        self.sent_nbytes = after[0] - before[0], after[1] - before[1]
        return total

    def _run_layers(
        self, engine: Engine, forwards: Sequence[Forward], streams: RandomStreams
    ) -> Tensor | None:
        """Run in layered order; None, with nothing changed, where the module is no chain."""
        root = _root(engine)
        names = {part: name for name, part in root.named_modules()}
        blocks = {names[block]: block for block in repeated_blocks(root)}
        kept = [] if self.is_proved else [(b, b.clone()) for b in root.buffers()]
        layered = Layered(engine, forwards, streams, blocks, is_proved=self.is_proved)
        try:
            total = layered.run_by_layers()
        except NotAChain as why:
            self.refused = str(why)
            streams.undo()
            with torch.no_grad():
                for buffer, value in kept:
                    buffer.copy_(value)
            return None
        self.is_proved, self.border_nbytes = True, layered.border_nbytes
        return total

    def _choose(self, engine: Engine, order: Order) -> Order:
        """Return the order to run, and choose the window for it."""
        if order != "auto":
            self.window = gathered_units(engine).everyone if order == "keep" else frozenset()
            return order
        if not engine.policy.frees_after_forward:
            return "plain"  # it gathers once
        if self._picked is None or self._num_picks < 2:
            self._num_picks += 1
            self._picked = self._pick(engine)
        return self._picked

    def _pick(self, engine: Engine) -> Order:
        """Pick an order for all ranks; again in the second step, when activations are known."""
        room = memory_of(engine).room_to_keep()
        self.window = trained_units(engine).window(room)
        needs = engine.group.gather(self.border_nbytes)
        if self.window == gathered_units(engine).everyone:
            return "keep"
        if self.refused is None and all(need <= room for need in needs):
            return "layers"
        return self._loop_order()

    def _loop_order(self) -> Order:
        return "keep" if self.window else "plain"

    def describe(self, engine: Engine) -> list[str]:
        """Return lines for the report: the order of the last step, and the costs of all orders."""
        if not self.num_microbatches:
            return []
        line = f"accumulation: {self.order!r} order, {self.num_microbatches} micro-batches"
        if self.order == "keep":
            line += f", {len(self.window)} of {len(gathered_units(engine).everyone)} units kept"
        if self.refused is not None:
            line += f", as the module is no sequence of blocks: {self.refused}"
        tiled = any(unit.is_tiled for unit in engine.units)  # gathered for each use in every order
        if engine.policy.frees_after_forward and engine.group.world_size > 1 and not tiled:
            line += f". Sent {format_bytes(sum(self.sent_nbytes))} a step; {self._costs(engine)}"
        return [line]

    def _costs(self, engine: Engine) -> str:
        """Bytes that each order sends and holds, from those of the last step."""
        number, (gathered, reduced) = self.num_microbatches, self.sent_nbytes
        units = trained_units(engine)
        everything = units.nbytes_of(gathered_units(engine).everyone)
        share = units.nbytes_of(self.window) / max(1, everything)
        kept = share + (1 - share) * 2 * number, share + (1 - share) * number
        passes = {"layers": (2, 1), "keep": kept, "plain": (2 * number, number)}
        gathers, reductions = passes[self.order]
        gather, reduction = int(gathered / gathers), int(reduced / reductions)
        borders = (
            format_bytes(self.border_nbytes) if self.is_proved else "an unknown number of bytes"
        )
        costs = [
            ("plain", number * (2 * gather + reduction), "nothing"),
            ("keep", gather + reduction, format_bytes(everything)),
            ("layers", 2 * gather + reduction, borders),
        ]
        if self.refused is not None:
            del costs[-1]
        return ", ".join(
            f"{name!r} sends {format_bytes(sent)} and holds {held} more"
            for name, sent, held in costs
        )


def _sent_nbytes(engine: Engine) -> tuple[int, int]:
    """The bytes that gathers and reductions have sent so far."""
    traffic, none = engine.ledger.traffic, Traffic()
    gathered, reduced = (traffic.get(name, none) for name in ("gather", "reduce_scatter"))
    return gathered.sent_nbytes, reduced.sent_nbytes


def with_kept(engine: Engine, peaks: dict[str, int]) -> dict[str, int]:
    """Return predicted peaks with those of a step that kept a window of weights and gradients."""
    known = engine.facts.about(Accumulation)
    if not (peaks and known.kept):
        return peaks
    trained = {
        i: sum(parameter.full_nbytes for parameter in unit.gradient.trainable())
        for i, unit in enumerate(engine.units)
    }
    more = sum(trained[i] for i in known.kept), sum(trained.values())
    most = {
        Kind.UNSHARDED: gathered_units(engine).most(known.kept),
        Kind.PARTIAL_GRAD: min(peaks.get(Kind.PARTIAL_GRAD, 0) + more[0], more[1]),
    }
    predicted = peaks | {kind: max(peaks.get(kind, 0), nbytes) for kind, nbytes in most.items()}
    if not engine.policy.defers_reduction:
        # reduced gradients come as the others go
        kinds = sum(nbytes for kind, nbytes in predicted.items() if kind not in ("all", Kind.GRAD))
        predicted["all"] = max(peaks["all"], kinds)
    return predicted


def describe_accumulation(engine: Engine) -> list[str]:
    """Return lines for the report of a module: orders, and their costs."""
    return engine.facts.about(Accumulation).describe(engine)
