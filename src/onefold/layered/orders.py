"""Run the micro-batches of a step: in layered order, or one after the other.

In layered order every unit is gathered for all micro-batches at once. The stages of one step:

    forward    all micro-batches run the stem, then all run the first block, and so on
    head       each micro-batch runs the rest of its forward and its loss, and backward up to there
    backward   all micro-batches run backward through the last block, then the one before it

The engine sees one forward and one backward. Weights stay for all micro-batches of a stage. The
first one gathers them, so ranks may have different numbers of micro-batches. Gradients are summed
over micro-batches, in their order, in `.grad` of the unsharded weights. A unit is reduced when
backward enters the one before it.

A model is cut into a chain of segments at the borders of its blocks, as it runs: a forward halts
before and after each block. There its graph is cut: a tensor that requires a gradient goes on as a
leaf of the same values, and its gradient is passed on by hand. That is exact. The tensor is cut
once, however often it is used later, so encoder outputs and outputs of blocks that skip units work
as well. A graph that crosses a border in no argument or output of a block is found by its age, and
refused.

Source: layered gradient accumulation, arXiv 2106.02679, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from threading import current_thread, main_thread
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from onefold.compat import untraced
from onefold.engine.driving import Drive
from onefold.engine.engine import Engine
from onefold.engine.first_batch import has_dropout
from onefold.engine.forward_threads import OF_THREAD, ForwardThread, thread_of
from onefold.engine.watch import now
from onefold.errors import StateError
from onefold.tier import accelerator

Forward = Callable[[], Tensor]
"""One micro-batch: its forward and its part of the mean loss."""


def run_loop(
    engine: Engine, forwards: Sequence[Forward], streams: RandomStreams, window: frozenset[int]
) -> Tensor:
    """Run micro-batches one after the other, as a loop with `onefold.accumulate`.

    Units in `window` stay unsharded until the last backward, and so do their partial gradients.
    """
    before, losses = replace(engine.schedule.driven, keeps=frozenset()), list[Tensor]()
    apart = replace(before, walks_apart=bool(window))
    first = replace(apart, keeps=window, rests=window, accumulates=True)
    try:
        for number, forward in enumerate(forwards):
            is_last = number == len(forwards) - 1
            engine.drive(first)
            with streams.of_micro_batch(number):
                loss = forward()
            if is_last:
                engine.drive(replace(apart, frees_in_backward=True))
            loss.backward()
            losses.append(loss.detach())
            del loss
    except BaseException:
        if window:  # keep nothing unsharded
            if engine.schedule.is_backward:
                engine.abort_backward()
            engine.rest()
        raise
    finally:
        engine.drive(before)
    return _sum(losses)


class Layered:
    """One step in layered order."""

    def __init__(
        self, engine: Engine, forwards: Sequence[Forward], streams: RandomStreams,
        blocks: Mapping[str, nn.Module], *, is_proved: bool = False,
    ) -> None:  # fmt: skip
        """`is_proved`: the module was a chain before, so one micro-batch is looked at."""
        self._engine = engine
        self._forwards = forwards
        self._streams = streams
        self._blocks = blocks
        self._is_proved = is_proved
        self._cuts: dict[ForwardThread, Cuts] = {}
        self._all = frozenset(range(len(engine.units)))
        self._losses: list[Tensor] = []
        self._base = Drive(joins_backwards=True)
        self.border_nbytes = 0

    def run_by_layers(self) -> Tensor:
        """Run forward and backward; return the sum of the losses, detached.

        Raises `NotAChain` before any backward, and leaves nothing behind but changed buffers.
        """
        with self._driving(), ExitStack() as stack:
            threads = [stack.enter_context(thread_of(forward)) for forward in self._forwards]
            self._cuts = {thread: Cuts() for thread in threads}
            stack.enter_context(cutting(self._blocks, self._cuts))
            while not threads[0].is_over:
                self._run_stage(threads)
            losses = _sum(self._losses)
            for border in reversed(range(len(self._cuts[threads[0]].borders))):
                for number, thread in enumerate(threads):
                    self._drive(repeats=number > 0)
                    self._cuts[thread].backward(border)
            if self._engine.schedule.is_backward:
                self._engine.end_backward()
        return losses

    def _run_stage(self, threads: Sequence[ForwardThread]) -> None:
        """Run all micro-batches up to their next border, or to their end and back."""
        last = len(threads) - 1
        for number, thread in enumerate(threads):
            self._drive(keeps=self._all, repeats=number > 0)
            first, mine = self._cuts[threads[0]], self._cuts[thread]
            with self._streams.of_micro_batch(number):
                self._resume(thread, mine)
            if mine.at != first.at or thread.is_over != threads[0].is_over:
                self._refuse_paths(number, first, mine)
            if thread.is_over:
                mine.end_forward()
                self.border_nbytes += mine.nbytes
                self._run_back(thread, mine, is_first=number == 0, is_last=number == last)
            elif number == 0 or not self._is_proved:
                mine.check([tensor for tensor, _ in mine.borders[-1]])  # of the segment that ended
        if not threads[0].is_over:
            self._free_used()

    def _resume(self, thread: ForwardThread, cuts: Cuts) -> None:
        """Run one micro-batch to its next border, or to its end."""
        try:
            thread.resume()
        except RuntimeError as error:
            if "leaf Variable" not in str(error) or self._engine.schedule.is_backward:
                raise
            raise NotAChain(f"the part {cuts.at} changes its input in place") from error

    def _free_used(self) -> None:
        """Free units all of whose modules have run; others, as of a tied head, are used again."""
        schedule = self._engine.schedule
        over = {unit for unit in self._all - schedule.ahead if schedule.uses.is_between(unit)}
        self._drive(keeps=self._all - over)

    def _run_back(
        self, thread: ForwardThread, cuts: Cuts, *, is_first: bool, is_last: bool
    ) -> None:
        """Run one micro-batch backward from its loss to the last border."""
        schedule, loss = self._engine.schedule, thread.take_result()
        if is_first:
            cuts.check([loss])
            self._drive(keeps=self._all - schedule.ahead)  # no forward follows
        # more micro-batches will call units of the head: keep these, and do not reduce them
        self._drive(repeats=not is_first, more_to_come=not is_last, frees_in_backward=True)
        loss.backward()
        self._losses.append(loss.detach())

    def _refuse_paths(self, number: int, first: Cuts, mine: Cuts) -> None:
        """Micro-batches go different ways through the module."""
        if self._engine.schedule.is_backward:
            wanted = "all micro-batches to call the same blocks"
            got = f"micro-batch 0 {first.at!r} and micro-batch {number} {mine.at!r}"
            hint = 'order="plain" runs them one after the other'
            raise StateError(wanted, got, where=f"rank {self._engine.group.rank}", hint=hint)
        raise NotAChain(f"micro-batch 0 is {first.at} where micro-batch {number} is {mine.at}")

    @contextmanager
    def _driving(self) -> Iterator[None]:
        """One forward and one backward of the engine, whatever runs in this block."""
        engine, schedule = self._engine, self._engine.schedule
        engine.begin_forward()
        before, depth = schedule.driven, schedule.forward_depth
        self._base = replace(before, joins_backwards=True)
        is_over = False
        try:
            yield
            is_over = True
        finally:
            engine.drive(before)
            if schedule.is_backward:
                engine.abort_backward()
            if schedule.forward_depth >= depth:
                engine.end_forward()
            if not is_over:
                engine.rest()

    def _drive(self, **choices: Any) -> None:
        self._engine.drive(replace(self._base, **choices))


def _sum(losses: Sequence[Tensor]) -> Tensor:
    """Add in the order of micro-batches, in fp32 at least."""
    with torch.no_grad():
        total = losses[0].to(torch.promote_types(losses[0].dtype, torch.float32), copy=True)
        for loss in losses[1:]:
            total += loss
        return total


def seeds_of(number: int) -> list[int]:
    """Return the seeds of micro-batches 1 to `number - 1`, and leave the generator as it is."""
    copy = torch.Generator()
    copy.set_state(torch.default_generator.get_state())
    return torch.randint(2**62, (max(0, number - 1),), generator=copy).tolist()


class RandomStreams:
    """The generators of the CPU and of one device, as each micro-batch has left them.

    The first micro-batch goes on with the generator as it is. Each other one has a seed, drawn from
    a copy of that generator. So dropout is the same in every order. It is that of a loop which
    calls `torch.manual_seed(seed)` before each micro-batch but the first.

    All threads share the generators. So another thread than the main one takes them only for a
    module that has Dropout layers.
    """

    def __init__(self, number: int, device: torch.device, module: nn.Module) -> None:
        is_taken = current_thread() is main_thread() or has_dropout(module)
        self._generators = [torch.default_generator] if is_taken else []
        own = accelerator.generator(device)
        if own is not None and is_taken:
            self._generators.append(own)
        begun = self._states()
        self._left: list[list[Tensor]] = [begun]
        for seed in seeds_of(number):
            seeded = [torch.Generator(g.device).manual_seed(seed) for g in self._generators]
            self._left.append([generator.get_state() for generator in seeded])
        self._begun = list(self._left)

    @contextmanager
    def of_micro_batch(self, number: int) -> Iterator[None]:
        """Draw from the stream of one micro-batch in this block."""
        self._set(self._left[number])
        try:
            yield
        finally:
            self._left[number] = self._states()

    def end(self) -> None:
        """Go on where the first micro-batch has stopped: nowhere else, if nothing is drawn."""
        self._set(self._left[0])

    def undo(self) -> None:
        """Set the generators, and all streams, to what they were."""
        self._left = list(self._begun)
        self._set(self._begun[0])

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


Pairs = list[tuple[Tensor, Tensor]]
"""Tensors of one border, each with the leaf that goes on in its place."""


class NotAChain(Exception):
    """The module is no sequence of blocks; the message says why."""


class Cuts:
    """The borders of one micro-batch."""

    def __init__(self) -> None:
        self.borders: list[Pairs] = []
        self.at = ""  # the border where it halts
        self._since = 0  # the first autograd node of the segment that runs
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}  # keeps tensors, and so their ids

    def cut(self, value: Any, at: str) -> Any:
        """Begin a border: return `value` with leaves in place of tensors that need a gradient."""
        self.at = at
        self.borders.append([])
        return tree_map_only(Tensor, self._leaf, value)

    def halt(self, thread: ForwardThread) -> None:
        """Halt at the border that has begun; the next segment follows."""
        thread.halt()
        self._since = now()

    def _leaf(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad or tensor.is_leaf:
            return tensor
        known = self._leaves.get(id(tensor))
        if known is None:
            known = tensor, tensor.detach().requires_grad_()
            self._leaves[id(tensor)] = known
            self.borders[-1].append(known)
        return known[1]

    def check(self, outputs: Sequence[Tensor]) -> None:
        """Raise `NotAChain` if `outputs` depend on a graph that began before the last border."""
        nodes = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            if node._sequence_nr() < self._since:
                raise NotAChain(f"a skip connection: {node.name()} ends after a later block")
            before = [n for n, _ in node.next_functions if n is not None and n not in seen]
            seen.update(before)
            nodes += before

    def end_forward(self) -> None:
        """Let go of tensors that are needed only to recognise them."""
        self._leaves.clear()

    def backward(self, border: int) -> None:
        """Run the segment before a border backward, and free its graph."""
        pairs, self.borders[border] = self.borders[border], []
        reached = [(tensor, leaf.grad) for tensor, leaf in pairs if leaf.grad is not None]
        if not reached:
            return
        # a tensor that skips blocks has a gradient of a later one: sums begin with it, as in a loop
        earlier = [leaf for border in self.borders for _, leaf in border if leaf.grad is not None]
        reached += [(leaf, leaf.grad) for leaf in earlier]
        for leaf in earlier:
            leaf.grad = None
        tensors, gradients = zip(*reached, strict=True)
        del pairs, reached
        torch.autograd.backward(tensors, gradients)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors at all borders, which live from forward to backward."""
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for border in self.borders
            for tensor, _ in border
        }
        return sum(storages.values())


@contextmanager
def cutting(blocks: Mapping[str, nn.Module], cuts: Mapping[ForwardThread, Cuts]) -> Iterator[None]:
    """Halt forwards before and after each block in this block, and cut their graphs there."""
    with ExitStack() as stack:
        for name, block in blocks.items():
            enter, leave = (
                partial(_cut_at_block, cuts, f"{side} {name}") for side in ("before", "after")
            )
            before = block.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(block.register_forward_hook(leave).remove)
        yield


@untraced  # [Note: torch.compile] in engine/hooks.py
def _cut_at_block(
    cuts: Mapping[ForwardThread, Cuts], at: str, _: nn.Module, args: Any, value: Any
) -> Any:
    """A hook before or after a block; nothing in recompute, which runs in no forward thread.

    `value`: before a block its keyword arguments, after it its outputs.
    """
    thread = OF_THREAD.forward
    if thread is None:
        return None
    side, name = at.split(" ", 1)
    value = (args, value) if side == "before" else value
    if torch.is_grad_enabled():
        value = cuts[thread].cut(value, at)
    else:
        cuts[thread].cut(None, at)
        tensors: list[Tensor] = []
        tree_map_only(Tensor, tensors.append, value)
        if any(tensor.requires_grad for tensor in tensors):
            raise NotAChain(
                f"{name} runs without a graph, as in a checkpoint with use_reentrant=True"
            )
    cuts[thread].halt(thread)
    return value
