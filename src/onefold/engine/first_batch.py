"""Compare the first batches of all ranks: equal ones mean that ranks train on the same rows.

Without a `DistributedSampler`, or rows picked by rank, N ranks do the work of one and nothing else
shows it. The same holds for dropout: ranks with equal generators drop the same elements.
"""

import hashlib
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.hooks import RemovableHandle

from onefold.compat import LEARN_SHAPES, untraced
from onefold.engine.pipelined import calling_stage
from onefold.engine.watch import tensors_in
from onefold.layout.model_axes import local_of
from onefold.tier import accelerator
from onefold.wire.collectives import Group

_SAME_BATCH = (
    "got the same first batch: give each rank its own rows, as "
    "torch.utils.data.DistributedSampler does"
)
_SAME_SEED = (
    "drop the same elements, as their generators are equal: call torch.manual_seed(seed + rank) "
    "after onefold.shard"
)
_SAMPLE_NBYTES = 1 << 20  # of each tensor: batches that differ differ early


class _FirstBatch:
    """The pre-forward hook that compares once."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.handle: RemovableHandle | None = None

    @untraced  # as the hooks of hooks.py
    def __call__(self, root: nn.Module, args: object, kwargs: object) -> None:
        if self.handle is None or not torch.is_grad_enabled():
            return
        if LEARN_SHAPES.intersection(calling_stage()):
            return
        if peek_interpreter_stack() is not None:  # tensors of torch.func have no bytes
            return
        self.handle.remove()
        self.handle = None
        _warn_of_others(root, (args, kwargs), self._group)
        _compare_batches(self._group, digest_of((args, kwargs)), _generator_of(root))


def compare_first_batches(module: nn.Module, group: Group) -> None:
    """Compare in the first forward that trains, once. Rank 0 warns."""
    if group.world_size > 1:
        hook = _FirstBatch(group)
        hook.handle = module.register_forward_pre_hook(hook, with_kwargs=True)


def compare_now(module: nn.Module, args: object, kwargs: object) -> None:
    """Compare before the module runs, in the thread that a group of ranks belongs to."""
    for hook in list(module._forward_pre_hooks.values()):
        if isinstance(hook, _FirstBatch):
            hook(module, args, kwargs)


def _warn_of_others(root: nn.Module, arguments: object, group: Group) -> None:
    """Warn, on rank 0, of an input that a parameter of no sharded module has made.

    A frozen module is trained through, as with prompts that are learned. Nobody averages their
    gradients, unless another library does.
    """
    if group.rank != 0 or any(parameter.requires_grad for parameter in root.parameters()):
        return
    nodes = [tensor.grad_fn for tensor in tensors_in(arguments) if tensor.requires_grad]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and getattr(leaf, "_onefold_owner", None) is None:
            warnings.warn(
                f"a parameter {list(leaf.shape)} outside of the sharded module trains through it, "
                "and each rank has a gradient of its own: add learned prompts before "
                "onefold.shard, and shard the whole model",
                stacklevel=2,
            )
            return
        inputs = [before for before, _ in getattr(node, "next_functions", ())]
        nodes += [before for before in inputs if before not in seen]
        seen.update(inputs)


def _compare_batches(group: Group, batch: str, generator: str) -> None:
    everyone = group.gather((batch, generator))
    if group.rank != 0:
        return
    for values, advice in zip(zip(*everyone, strict=True), (_SAME_BATCH, _SAME_SEED), strict=True):
        twins = _first_equal(values)
        if twins:
            warnings.warn(f"ranks {twins[0]} and {twins[1]} {advice}", stacklevel=2)


def _first_equal(values: Iterable[str]) -> tuple[int, int] | None:
    """The first two ranks with the same value; "" is equal to none."""
    seen: dict[str, int] = {}
    for rank, value in enumerate(values):
        if value and seen.setdefault(value, rank) != rank:
            return seen[value], rank
    return None


def digest_of(arguments: object) -> str:
    """A digest of the tensors in a forward's arguments; "" if there are none."""
    digest = hashlib.blake2b(digest_size=8)
    is_empty = True
    for tensor in tensors_in(arguments):
        if tensor.numel() and not tensor.is_meta and tensor.layout is torch.strided:
            digest.update(_bytes_of(tensor))
            is_empty = False
    return "" if is_empty else digest.hexdigest()


def _bytes_of(tensor: Tensor) -> bytes:
    tensor = local_of(tensor)
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    first = real.detach().reshape(-1)[: _SAMPLE_NBYTES // real.element_size()]
    return first.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def has_dropout(module: nn.Module) -> bool:
    """True if a Dropout layer inside will draw random numbers."""
    return any(isinstance(m, _DropoutNd) and m.p > 0 and m.training for m in module.modules())


def seed_ranks(root: nn.Module, group: Group) -> None:
    """Give each rank a seed of its own, if a Dropout will draw and generators are equal.

    A collective. Ranks that the user has seeded apart stay as they are.
    """
    everyone = group.gather(_generator_of(root))
    if _first_equal(everyone):
        torch.manual_seed(torch.initial_seed() + group.rank)


def _generator_of(root: nn.Module) -> str:
    """A digest of the generator's state, where dropout will draw from it; "" elsewhere."""
    if not has_dropout(root):
        return ""
    state = torch.get_rng_state()
    device = next((p.device for p in root.parameters() if p.device.type != "cpu"), None)
    if device is not None:
        state = torch.cat([state, accelerator.rng_state(device)])
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()
