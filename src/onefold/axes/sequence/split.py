"""A module whose forward runs on one piece of the sequence a rank.

[Note: recompute] Activation checkpointing runs parts of the forward inside backward, outside of
the root's forward. So each module that may hold attention enters the mode there, if no module
around it has. A recomputed function that calls attention in no module would not: torch's check of
recomputed shapes ends it with an error.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onefold.axes.sequence.attention import AttentionMode, SplitAttention
from onefold.axes.sequence.attention_calls import Calls, Names, SequencePieces, main_tensor
from onefold.axes.sequence.head_exchange import Gather
from onefold.engine.engine import Engine
from onefold.engine.first_batch import digest_of
from onefold.engine.forward_threads import ThreadStack
from onefold.engine.registry import ENGINE, find_engine
from onefold.engine.watch import in_backward
from onefold.errors import ConfigError, StateError
from onefold.wire.collectives import Group

MARK = "_onefold_sequence"
"""The attribute of a module that is split."""


class SequenceSplit:
    """What `onefold.split_sequence` returns: pieces of tensors, labels, and the way back.

    Attributes:
        rank: which piece this rank has.
        parts: how many there are.
    """

    def __init__(self, module: nn.Module, group: Group, calls: Calls | None) -> None:
        self.rank, self.parts = group.rank, group.world_size
        self._group = group
        self._calls = calls
        self._names = Names.of(module)
        self._attention = SplitAttention(group)
        self._hooks = _AttentionHooks(self._attention)
        self._module = ref(module)
        self._checked: Callable[[], Engine | None] = lambda: None
        self._has_compared = self._has_looked = False
        self._frames = ThreadStack[tuple[AbstractContextManager[object] | None, int]]()
        self._handles = list(self._install(module))
        module.__dict__[MARK] = True

    def split(self, tensor: Tensor, dim: int = 1, pad: float = 0) -> Tensor:
        """Return this rank's piece of a whole tensor; the last pieces end in `pad`.

        Args:
            tensor: equal on all ranks that share the sequence.
            dim: the axis of positions.
        """
        pieces = self._pieces(tensor.shape[dim])
        if self._calls is None and pieces.padding:
            wanted = f"a length that {self.parts} ranks divide, where the caller cuts inputs"
            hint = (
                "pad the rows, with -100 for labels, and mask the padding where attention sees it"
            )
            raise ConfigError(wanted, pieces.length, hint=hint)
        return pieces.cut(tensor, dim, pad)

    def labels(self, labels: Tensor, *, shift: bool = True) -> Tensor:
        """Return the labels of this rank's positions; -100 where there are none.

        Args:
            labels: whole rows of tokens [rows, positions], as the model reads them.
            shift: each position's label is the next token, also where that is another rank's.
                False for labels of the positions themselves, as in masked language models.
        """
        return self._pieces(labels.shape[1]).labels(labels, shift=shift)

    def gather(self, piece: Tensor, dim: int = 1, length: int | None = None) -> Tensor:
        """Concatenate the ranks' pieces along an axis. A collective, and differentiable.

        Every rank gets all positions. In backward the gradients of all ranks are added up, so
        ranks may compute losses of their own from it, or the same loss, weighed by
        `onefold.weigh`.

        Args:
            piece: of this rank, as long as those of the others.
            length: of the whole sequence, to leave the padding out.
        """
        whole = Gather.apply(self._group, dim, piece) if self.parts > 1 else piece
        return whole if length is None else whole.narrow(dim, 0, length)

    def remove(self) -> None:
        """Let the module run on whole sequences again."""
        module = self._module()
        for handle in self._handles:
            handle.remove()
        if module is not None and module.__dict__.pop(MARK, False) and self._calls is not None:
            self._calls.remove()

    def __enter__(self) -> SequenceSplit:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _install(self, module: nn.Module) -> Iterator[RemovableHandle]:
        yield module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        yield module.register_forward_hook(self._after, always_call=True)
        if self.parts > 1:
            yield from self._hooks.install(module)

    @torch._disable_dynamo
    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._check_ranks(module)
        if self._calls is None:
            self._begin(module, None)
            return None
        whole = self._names.join(args, kwargs)
        main = main_tensor(whole)
        self._compare(main)
        pieces = self._pieces(main.shape[1])
        local = self._calls.local(whole, pieces)
        self._attention.pad(0 if self._calls.has_own_masks else pieces.padding)
        self._begin(module, self._calls.around(whole, pieces))
        return self._names.part(local, len(args))

    def _begin(self, module: nn.Module, around: AbstractContextManager[object] | None) -> None:
        if around is not None:
            around.__enter__()
        self._frames.entries.append((around, self._attention.num_calls))
        if self.parts > 1:
            self._hooks.enter(module)

    @torch._disable_dynamo
    def _after(self, module: nn.Module, _: object, outputs: Any) -> Any:
        self._hooks.leave(module)
        self._attention.pad(0)
        frames = self._frames.entries
        if not frames:  # the cut has failed
            return None
        around, before = frames.pop()
        if around is not None:
            around.__exit__(None, None, None)
        if sys.exception() is not None or self._calls is None:
            return None
        if self.parts > 1 and self._attention.num_calls == before:
            raise StateError(
                "a forward of a split sequence to call F.scaled_dot_product_attention",
                f"no call in {type(module).__name__}",
                hint="attention by other functions sees this rank's positions alone",
            )
        return self._calls.outputs(outputs)

    def _pieces(self, length: int) -> SequencePieces:
        if length < self.parts:
            wanted = f"a sequence of at least {self.parts} positions, one for each rank"
            hint = "use a smaller axis for the sequence, or pad the rows"
            raise ConfigError(wanted, length, hint=hint)
        return SequencePieces(length, self.parts, self.rank)

    def _check_ranks(self, module: nn.Module) -> None:
        """The ranks of a sharded module must contain those that share the sequence."""
        engine = module.__dict__.get(ENGINE)
        if engine is None and not self._has_looked:  # a wrapper may hold the sharded module
            engine, self._has_looked = find_engine(module), True
        if engine is None or engine is self._checked() or self.parts == 1:
            return
        mine, others = _ranks_of(self._group), _ranks_of(engine.group)
        if not mine <= others:
            raise ConfigError(
                "mesh= of onefold.shard to contain the ranks that share a sequence",
                f"ranks {sorted(others)} without {sorted(mine - others)}",
                hint="shard over the axes of data and sequence together, such as "
                'mesh=mesh["dp", "cp"]._flatten("data"): gradients are averaged over both',
            )
        self._checked = ref(engine)

    def _compare(self, main: Tensor) -> None:
        """Compare the first batch: ranks that share a sequence must be given the same rows."""
        if self._has_compared or self.parts == 1:
            return
        mine = digest_of(main), list(main.shape)
        everyone = self._group.gather(mine)
        if any(rows != everyone[0] for rows in everyone):
            shapes = [shape for _, shape in everyone]
            raise ConfigError(
                "the same whole rows on all ranks that share a sequence",
                f"others, of shapes {shapes}",
                hint="pick rows by the rank in the data axis, not by the global rank",
            )
        self._has_compared = True


class _AttentionHooks(threading.local):
    """Enter and leave the mode on this thread; its hooks take no part in graphs."""

    def __init__(self, attention: SplitAttention) -> None:
        self._mode = AttentionMode(attention)
        self._owner: nn.Module | None = None  # whose forward entered the mode
        self._depth = 0

    def enter(self, module: nn.Module) -> None:
        """Enter the mode, unless a module around this one has."""
        if self._owner is None:
            self._mode.__enter__()
            self._owner = module
        self._depth += self._owner is module

    def leave(self, module: nn.Module) -> None:
        """Leave it with the module that has entered it, also where its forward failed."""
        if self._owner is module:
            self._depth -= 1
            if self._depth == 0:
                self._owner = None
                self._mode.__exit__(None, None, None)

    def install(self, root: nn.Module) -> Iterator[RemovableHandle]:
        """Hook the parts that may hold attention; the root is hooked by the caller."""
        for module in root.modules():
            if module is not root and not _is_plain_leaf(module):
                yield module.register_forward_pre_hook(self._before)
                yield module.register_forward_hook(self._after, always_call=True)

    @torch._disable_dynamo
    def _before(self, module: nn.Module, _: Any) -> None:
        if in_backward():
            self.enter(module)

    @torch._disable_dynamo
    def _after(self, module: nn.Module, *_: Any) -> None:
        self.leave(module)


def _is_plain_leaf(module: nn.Module) -> bool:
    """True for torch's own layers, which call no attention."""
    return type(module).__module__.startswith("torch.nn.") and not any(module.children())


def _ranks_of(group: Group) -> set[int]:
    if group.handle is None:
        return {dist.get_rank() if dist.is_initialized() else 0}
    return set(dist.get_process_group_ranks(group.handle))
