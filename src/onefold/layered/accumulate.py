"""`onefold.accumulate_layers`: forward and backward of all micro-batches of a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onefold.engine.engine import Engine
from onefold.engine.first_batch import compare_now
from onefold.engine.pipelined import calling_stage
from onefold.engine.registry import engine_of
from onefold.engine.watch import in_backward
from onefold.errors import ConfigError, StateError
from onefold.layered.chain import NotAChain
from onefold.layered.choice import Accumulation, Order
from onefold.layered.orders import Forward, Layered, RandomStreams, run_loop
from onefold.layout.module_tree import uncompiled
from onefold.layout.units import repeated_blocks

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

    A model that is no chain of blocks is found out: it runs in the plain order, and the report says
    why.

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
    _check(engine, batches, order)
    known = engine.facts.about(Accumulation)
    compare_now(_root(engine), *_arguments(module, batches[0]))
    forwards = [partial(_forward, module, batch, loss, len(batches)) for batch in batches]
    streams = RandomStreams(len(batches), engine.context.store.device, module)
    chosen = known.choose(engine, order)
    before = known.sent(engine)
    try:
        total = _run(engine, known, chosen, forwards, streams)
    finally:
        streams.end()
    known.note(engine, before, len(batches))
    if engine.hands.noise is not None and known.order == "layers":
        engine.hands.noise.note_more(len(batches) - 1)
    return total


def _run(
    engine: Engine, known: Accumulation, order: Order, forwards: Sequence[Forward],
    streams: RandomStreams,
) -> Tensor:  # fmt: skip
    """Run all micro-batches; in the plain order where the module is no chain."""
    root = _root(engine)
    if order == "layers":
        known.refuse(known.refused or _refusal(engine, root))
        if known.refused is None:
            names = {part: name for name, part in root.named_modules()}
            blocks = {names[block]: block for block in repeated_blocks(root)}
            kept = [] if known.is_proved else [(b, b.clone()) for b in root.buffers()]
            run = Layered(engine, forwards, streams, blocks, is_proved=known.is_proved)
            try:
                total = run.run()
            except NotAChain as why:
                known.refuse(str(why))
                streams.undo()
                with torch.no_grad():
                    for buffer, value in kept:
                        buffer.copy_(value)
            else:
                known.prove(run.border_nbytes)
                return total
        order = known.loop_order()
    return run_loop(engine, forwards, streams, known.begin_loop(order))


def _root(engine: Engine) -> nn.Module:
    root = engine.module()
    assert root is not None, "the caller holds it"
    return root


def _refusal(engine: Engine, root: nn.Module) -> str | None:
    """Why the module cannot be cut, if that shows before it runs."""
    if not repeated_blocks(root):
        return "it has no list of repeated blocks"
    if engine.saved is not None:
        return "its activations leave the device"
    return None


def _check(engine: Engine, batches: Sequence[Any], order: str) -> None:
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
        raise StateError(
            "onefold.accumulate_layers outside forward and backward, with gradients",
            got,
            where=where,
            hint="call it where the loop would call the module",
        )


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
