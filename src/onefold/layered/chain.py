"""Cut a model into a chain of segments at the borders of its blocks, as it runs.

A forward halts before and after each block. There its graph is cut: a tensor that requires a
gradient goes on as a leaf of the same values, and its gradient is passed on by hand. That is exact.
The tensor is cut once, however often it is used later, so encoder outputs and outputs of blocks
that skip units work as well. A graph that crosses a border in no argument or output of a block is
found by its age, and refused.

Source: layered gradient accumulation, arXiv 2106.02679, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from onefold.engine.forward_threads import ForwardThread, current_forward
from onefold.engine.watch import now

Pairs = list[tuple[Tensor, Tensor]]
"""Tensors of one border, each with the leaf that goes on in its place."""


class NotAChain(Exception):
    """The module is no chain of blocks; the message says why."""


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

    def check_border(self) -> None:
        """Check the segment that has just ended."""
        self.check([tensor for tensor, _ in self.borders[-1]])

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
            hooks = _BlockHooks(name, cuts)
            before = block.register_forward_pre_hook(hooks.enter, prepend=True, with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(block.register_forward_hook(hooks.leave).remove)
        yield


class _BlockHooks:
    """The two hooks of one block. They do nothing in recompute, which runs in no forward thread."""

    def __init__(self, name: str, cuts: Mapping[ForwardThread, Cuts]) -> None:
        self._name = name
        self._cuts = cuts

    @torch._disable_dynamo  # [Note: torch.compile] in engine/hooks.py
    def enter(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        return self._cut((args, kwargs), f"before {self._name}")

    @torch._disable_dynamo
    def leave(self, _: nn.Module, args: Any, outputs: Any) -> Any:
        return self._cut(outputs, f"after {self._name}")

    def _cut(self, value: Any, at: str) -> Any:
        thread = current_forward()
        if thread is None:
            return None
        cuts = self._cuts[thread]
        if torch.is_grad_enabled():
            value = cuts.cut(value, at)
        else:
            cuts.cut(None, at)
            tensors: list[Tensor] = []
            tree_map_only(Tensor, tensors.append, value)
            if any(tensor.requires_grad for tensor in tensors):
                raise NotAChain(
                    f"{self._name} runs without a graph, as in a checkpoint with use_reentrant=True"
                )
        cuts.halt(thread)
        return value
