"""Edits of weights, options and hooks in a running program, written once for plain and sharded."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import onefold
from tests.support.programs.frame import BUILDING, Process
from tests.support.programs.operations import read_gradients


def values(shape: torch.Size, like: Tensor) -> Tensor:
    """A plain tensor of the whole shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.rand(shape, generator=generator).to(like.dtype) - 0.5


def numeric(p: Process) -> list[nn.Parameter]:
    return [q for q in p.parameters if q.is_floating_point() or q.is_complex()]


@torch.no_grad()
def edit_all(p: Process, how: str = "mul_") -> None:
    """The same edit of every weight, by numbers and by plain tensors."""
    for q in numeric(p):
        if how == "mul_":
            q.mul_(0.9)
        elif how == "clamp_":
            if not q.is_complex():
                q.clamp_(-0.3, 0.3)
        elif how == "add_":
            q.add_(values(q.shape, q), alpha=0.1)
        elif how == "copy_":
            q.copy_(values(q.shape, q))
        elif how == "lerp_":
            q.lerp_(values(q.shape, q), 0.25)
        elif how == "iadd":
            q += 0.05
        elif how == "data":
            q.data.mul_(0.8)
        elif how == "data.copy_":
            q.data.copy_(values(q.shape, q))
        elif how == "sub_":
            q.sub_(q * 0.1)
        elif how == "zero_":
            q.zero_()


def edit_one(p: Process, how: str = "constant_", number: int = 0) -> None:
    """An edit of one weight."""
    chosen = numeric(p)
    q = chosen[number % len(chosen)]
    if how == "constant_":
        torch.nn.init.constant_(q, 0.2)
    elif how == "normal_":
        # shards are contiguous, and numbers are drawn in the order of memory
        out = torch.empty_like(q, memory_format=torch.contiguous_format) if p.is_plain else q
        torch.nn.init.normal_(out, std=0.1, generator=torch.Generator().manual_seed(7))
        with torch.no_grad():
            q.copy_(out)
    elif how == "first row":
        if q.dim() and len(q):
            with torch.no_grad():
                q[0] = values(q.shape[1:], q)
    elif how == "last column":
        if q.dim() > 1 and q.shape[-1]:
            with torch.no_grad():
                q[..., -1] = 0.1
    elif how == "masked_fill_":
        with torch.no_grad():
            q.masked_fill_(values(q.shape, torch.ones(())) > 0, 0.1)
    elif how == "data":
        q.data = q.data * 0.5


def edit_unsharded(p: Process, writeback: bool = True) -> None:
    """Edit whole weights; without writeback the edit does not last."""
    with p.unsharded(writeback), torch.no_grad():
        for q in numeric(p):
            if p.is_plain and not writeback:
                continue
            q.mul_(0.7).add_(values(q.shape, q), alpha=0.05)


@torch.no_grad()
def copy_from_another(p: Process) -> None:
    """Weights of a plain module with other values."""
    with BUILDING:
        torch.manual_seed(5)
        other = p.program.build()
    for q, new in zip(p.parameters, other.parameters(), strict=True):
        q.copy_(new)


@torch.no_grad()
def interpolate(p: Process) -> None:
    """An average by hand: copies taken before and written back after an edit."""
    kept = [q.detach().clone() for q in numeric(p)]
    for q in numeric(p):
        q.mul_(0.5)
    for q, mean in zip(numeric(p), kept, strict=True):
        mean.lerp_(q, 0.5) if not q.is_complex() else mean.mul_(0.75)
        q.copy_(mean)


def freeze(p: Process, number: int = 0, frozen: bool = True) -> None:
    """Freeze or train one block."""
    blocks = list(p.model.blocks)
    for q in blocks[number % len(blocks)].parameters():
        if q.is_floating_point() or q.is_complex():
            q.requires_grad_(not frozen)


def change_rate(p: Process, factor: float = 0.5) -> None:
    """What a scheduler does."""
    for optimizer in p.optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= factor


def change_decay(p: Process) -> None:
    """Another hyper-parameter."""
    for optimizer in p.optimizers:
        for group in optimizer.param_groups:
            if "weight_decay" in group:
                group["weight_decay"] = 0.05


def train_with_gradient_hooks(p: Process, kind: str = "post accumulate") -> None:
    """A step with hooks on parameters that halve gradients.

    Reentrant recompute runs a backward for the rows of each rank, and so the plain hooks.
    """
    is_once = not any(getattr(module, "reentrant", False) for module in p.model.modules())
    for q in p.parameters if is_once else ():
        if q.requires_grad and kind == "post accumulate":
            p.hooks.append(q.register_post_accumulate_grad_hook(halve))
        elif q.requires_grad:
            p.hooks.append(q.register_hook(lambda grad: grad / 2))
    p.loss(p.batch()).backward()
    read_gradients(p)
    p.step()
    while p.hooks:
        p.hooks.pop().remove()


def halve(q: Tensor) -> None:
    """See `train_with_gradient_hooks`."""
    assert q.grad is not None
    q.grad.mul_(0.5)


def train_with_stepping_hooks(p: Process, by: str = "parameter") -> None:
    """Optimizers that hooks of gradients step inside backward: one a parameter, or one a block.

    Reentrant recompute runs a backward for the rows of each rank, and so the plain hooks.
    """
    parts = [[q] for q in p.parameters]
    if by == "block":
        parts = [list(block.parameters()) for block in p.model.blocks]
    known: set[Tensor] = set()
    if not any(getattr(module, "reentrant", False) for module in p.model.modules()):
        for part in parts:
            mine = [q for q in dict.fromkeys(part) if q.requires_grad and q not in known]
            known.update(mine)
            if mine:
                step_in_hooks(p, mine)
    for _ in range(2):
        loss = p.loss(p.batch())
        loss.backward()
        p.note_mean("loss", loss)
    while p.hooks:
        p.hooks.pop().remove()
    p.clear()


def step_in_hooks(p: Process, parameters: list[nn.Parameter]) -> None:
    """An optimizer that steps once all of its parameters have their gradient."""
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    left = set(parameters)

    def step(q: Tensor) -> None:
        left.discard(q)
        if not left:
            optimizer.step()
            optimizer.zero_grad()
            left.update(parameters)

    p.hooks += [q.register_post_accumulate_grad_hook(step) for q in parameters]


def hook_steps(p: Process, kind: str = "pre") -> None:
    """Hooks on optimizers that scale gradients before, or weights after a step."""

    def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for q in group["params"]:
                if q.grad is not None:
                    q.grad.mul_(2)

    @torch.no_grad()
    def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for q in group["params"]:
                q.mul_(0.99)

    for optimizer in p.optimizers:
        if kind == "pre":
            p.hooks.append(optimizer.register_step_pre_hook(before))
        else:
            p.hooks.append(optimizer.register_step_post_hook(after))


def hook_modules(p: Process, kind: str = "forward") -> None:
    """Hooks on a block and on the root, registered after `shard`."""
    block = p.model.blocks[0]
    if kind == "forward":
        p.hooks.append(block.register_forward_hook(lambda module, args, out: out * 0.9))
    elif kind == "pre":
        p.hooks.append(p.model.register_forward_pre_hook(lambda module, args: (args[0] * 1.1,)))
    else:
        p.hooks.append(block.register_full_backward_hook(lambda module, into, out: None))


def reshare(p: Process, *weights: int) -> None:
    """Other shares of state between two steps; gradients do not last."""
    p.model.zero_grad()
    if not p.is_plain:
        onefold.mixed.reshare(p.model, list(weights[-p.world_size :]))


def change_optimizer(p: Process) -> None:
    """Optimizers that are built after `shard`, in the place of the first ones."""
    p.optimizers = p.program.optimizers(p.model)
    if p.program.schedule is not None:
        p.schedules = [p.program.schedule(optimizer) for optimizer in p.optimizers]


def clear_states(p: Process) -> None:
    """Begin again without moments."""
    for optimizer in p.optimizers:
        optimizer.state.clear()
