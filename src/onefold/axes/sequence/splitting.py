"""`onefold.split_sequence`: a module whose forward runs on one piece of the sequence a rank.

[Note: recompute] Activation checkpointing runs parts of the forward inside backward, outside of
the root's forward. So each module that may hold attention enters the mode there, if no module
around it has. A recomputed function that calls attention in no module would not: torch's check of
recomputed shapes ends it with an error. See docs/adr/0023.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from itertools import islice
from typing import Any
from weakref import ref

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from onefold.axes.sequence.attention import LABEL, AttentionMode, SplitAttention
from onefold.axes.sequence.attention_calls import (
    Calls,
    SequencePieces,
    main_tensor,
    positional_names,
)
from onefold.compat import untraced
from onefold.engine.engine import Engine
from onefold.engine.first_batch import digest_of
from onefold.engine.forward_threads import ThreadStack
from onefold.engine.registry import ENGINE, find_engine
from onefold.engine.watch import in_backward
from onefold.errors import ConfigError, StateError
from onefold.layout.module_tree import uncompiled
from onefold.wire import ranks as meshes
from onefold.wire.collectives import Group
from onefold.wire.moves import gathered

MARK = "_onefold_sequence"
"""The attribute of a module that is split."""

_MIXERS = (nn.RNNBase, nn.MultiheadAttention)


def split_sequence(
    module: nn.Module,
    mesh: meshes.MeshChoice = None,
    *,
    positions: str | None = "position_ids",
    inputs: bool = True,
) -> SequenceSplit:
    """Split the sequences of a module's forward over ranks, in place.

    Each rank then computes on its piece of the positions. At each
    `F.scaled_dot_product_attention` ranks exchange: whole sequences of some heads, and back. The
    module is called with whole rows, the same on all ranks of `mesh`, and returns the outputs of
    this rank's positions. A causal language model of transformers also takes whole labels; its
    loss averages, over the ranks of `onefold.shard`, to the mean over all tokens.

    A collective at its first forward. Call it before or after `onefold.shard`, whose `mesh=` holds
    the ranks of data and sequence together.

    Args:
        module: calls `scaled_dot_product_attention`, and mixes positions nowhere else; or a model
            of transformers.
        mesh: the ranks that share a sequence: a `DeviceMesh` of one axis, a `ProcessGroup`, or
            None, the whole world.
        positions: the argument of a plain module's forward that takes global positions, int64
            [1, positions]. They are passed if the caller does not. None: the module needs none.
        inputs: False leaves the forward's arguments as they are, for a stage of a pipeline: the
            caller cuts tokens by `split`.

    Returns:
        A handle that cuts labels and other tensors, gathers outputs, and undoes the split by
        `remove()` or as a context manager.

    Raises:
        ConfigError: a module or mesh that cannot work; on every rank.

    Example:
        >>> mesh = init_device_mesh("cuda", (dp, cp), mesh_dim_names=("dp", "cp"))
        >>> onefold.shard(model, optimizer)  # with more axes: mesh["dp", "cp"]._flatten("data")
        >>> sequence = onefold.split_sequence(model, mesh["cp"])
        >>> logits = model(tokens)
        >>> labels = sequence.labels(tokens)
        >>> loss_sum = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        >>> onefold.weigh(loss_sum, (labels != -100).sum()).backward()

    Source: DeepSpeed-Ulysses, arXiv 2309.14509.
    """
    module = uncompiled(module)
    if isinstance(mesh, DeviceMesh) and mesh.ndim != 1:
        wanted = "the axis of the sequence, a mesh of one axis"
        raise ConfigError(wanted, f"shape {tuple(mesh.shape)}", hint='mesh["cp"]')
    group = meshes.resolve(mesh).everyone
    _check_can_split(module, group)
    return SequenceSplit(module, group, _calls_of(module, group, positions, inputs))


def _calls_of(module: nn.Module, group: Group, positions: str | None, inputs: bool) -> Calls | None:
    """How the module is called; None if the caller cuts the inputs."""
    if "transformers" in sys.modules:
        theirs = import_module("onefold.axes.sequence.transformers_split")
        calls = theirs.calls_of(module, group, inputs)
        if calls is not None:
            return calls
    return Calls(module, positions) if inputs else None


def _check_can_split(module: nn.Module, group: Group) -> None:
    """Raise `ConfigError` for a module that cannot be split over these ranks."""
    for name, part in module.named_modules():
        is_wide = isinstance(part, nn.Conv1d) and part.kernel_size > (1,)
        if group.world_size > 1 and (is_wide or isinstance(part, _MIXERS)):
            wanted = "positions to be mixed by F.scaled_dot_product_attention alone"
            hint = "it would see this rank's positions alone"
            raise ConfigError(wanted, f"torch.nn.{type(part).__name__} at {name!r}", hint=hint)
        if MARK in part.__dict__:
            wanted = "a module that is not split yet"
            hint = "keep the handle of the first call; sequence.remove() undoes it"
            raise ConfigError(wanted, f"one split at {name!r}", hint=hint)
    if group.handle is None:
        return
    mine, rank = dist.get_process_group_ranks(group.handle), dist.get_rank()
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and getattr(parameter, "_onefold_owner", None) is None:
            shared = set(parameter.device_mesh.mesh.flatten().tolist()) & set(mine) - {rank}
            if shared:
                wanted = "axes of sequence and tensors that share no other rank"
                got = f"ranks {sorted(shared)} in both, at parameter {name!r}"
                raise ConfigError(wanted, got, hint="make a mesh with one axis for each")


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
        self._attention = SplitAttention(group)
        self._hooks = _AttentionHooks(self._attention)
        self._module = ref(module)
        self._checked: Callable[[], Engine | None] = lambda: None
        self._has_compared = self._has_looked = False
        self._frames = ThreadStack[tuple[AbstractContextManager[object], int]]()
        self._handles = list(self._install(module))
        module.__dict__[MARK] = True

    def split(self, tensor: Tensor, dim: int = 1, pad: float = 0) -> Tensor:
        """Return this rank's piece of a whole tensor; the last pieces end in `pad`.

        Args:
            tensor: equal on all ranks that share the sequence.
            dim: the axis of positions.
        """
        pieces = self._own_pieces(tensor.shape[dim])
        if self._calls is None and pieces.padding:
            wanted = f"a length that {self.parts} ranks divide, where the caller cuts inputs"
            hint = "pad the rows, with -100 for labels, and mask padding where attention sees it"
            raise ConfigError(wanted, pieces.length, hint=hint)
        return pieces.cut(tensor, dim, pad)

    def labels(self, labels: Tensor, *, shift: bool = True) -> Tensor:
        """Return the labels of this rank's positions; -100 where there are none.

        Args:
            labels: whole rows of tokens [rows, positions], as the model reads them.
            shift: each position's label is the next token, also where that is another rank's.
                False for labels of the positions themselves, as in masked language models.
        """
        return self._own_pieces(labels.shape[1]).labels(labels, shift=shift)

    def gather(self, piece: Tensor, dim: int = 1, length: int | None = None) -> Tensor:
        """Concatenate the ranks' pieces along an axis. A collective, and differentiable.

        Every rank gets all positions. In backward the gradients of all ranks are added up, so
        ranks may compute losses of their own from it, or the same loss, weighed by
        `onefold.weigh`.

        Args:
            piece: of this rank, as long as those of the others.
            length: of the whole sequence, to leave the padding out.
        """
        whole = gathered(self._group, dim, piece, LABEL) if self.parts > 1 else piece
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

    @untraced
    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._check_ranks(module)
        if self._calls is None:
            self._begin_split(module, nullcontext())
            return None
        names = [*islice(positional_names(module), len(args))]
        whole = dict(zip(names, args, strict=True)) | kwargs
        main = main_tensor(whole)
        self._compare_first_batch(main)
        pieces = self._own_pieces(main.shape[1])
        local = self._calls.local(whole, pieces)
        self._attention.pad(0 if self._calls.has_own_masks else pieces.padding)
        self._begin_split(module, self._calls.around(whole, pieces))
        return tuple(local.pop(name) for name in names), local

    def _begin_split(self, module: nn.Module, around: AbstractContextManager[object]) -> None:
        around.__enter__()
        self._frames.entries.append((around, self._attention.num_calls))
        if self.parts > 1:
            self._hooks.enter(module)

    @untraced
    def _after(self, module: nn.Module, _: object, outputs: Any) -> Any:
        self._hooks.leave(module)
        self._attention.pad(0)
        frames = self._frames.entries
        if not frames:  # the cut has failed
            return None
        around, before = frames.pop()
        around.__exit__(None, None, None)
        if sys.exception() is not None or self._calls is None:
            return None
        if self.parts > 1 and self._attention.num_calls == before:
            wanted = "a forward of a split sequence to call F.scaled_dot_product_attention"
            hint = "attention by other functions sees this rank's positions alone"
            raise StateError(wanted, f"no call in {type(module).__name__}", hint=hint)
        return self._calls.outputs(outputs)

    def _own_pieces(self, length: int) -> SequencePieces:
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
        mine, others = set(self._group.global_ranks()), set(engine.group.global_ranks())
        if not mine <= others:
            raise ConfigError(
                "mesh= of onefold.shard to contain the ranks that share a sequence",
                f"ranks {sorted(others)} without {sorted(mine - others)}",
                hint="shard over the axes of data and sequence together, such as "
                'mesh=mesh["dp", "cp"]._flatten("data"): gradients are averaged over both',
            )
        self._checked = ref(engine)

    def _compare_first_batch(self, main: Tensor) -> None:
        """Compare the first batch: ranks that share a sequence must be given the same rows."""
        if self._has_compared or self.parts == 1:
            return
        mine = digest_of(main), list(main.shape)
        everyone = self._group.gather(mine)
        if any(rows != everyone[0] for rows in everyone):
            shapes = [shape for _, shape in everyone]
            wanted = "the same whole rows on all ranks that share a sequence"
            hint = "pick rows by the rank in the data axis, not by the global rank"
            raise ConfigError(wanted, f"others, of shapes {shapes}", hint=hint)
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
            is_own = type(module).__module__.startswith("torch.nn.")  # calls no attention
            if module is not root and (not is_own or any(module.children())):
                yield module.register_forward_pre_hook(self._before)
                yield module.register_forward_hook(self._after, always_call=True)

    @untraced
    def _before(self, module: nn.Module, _: Any) -> None:
        if in_backward():
            self.enter(module)

    @untraced
    def _after(self, module: nn.Module, *_: Any) -> None:
        self.leave(module)
