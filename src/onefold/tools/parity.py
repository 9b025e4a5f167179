"""Law 1 on a module of the user's: do all stages compute what one process does?

The module is built anew for every run, trained on the same global batch each step: once whole, by
rank 0 alone and without Onefold, then at stages 0-3, where each rank takes its rows. Stages must
agree with one another bit for bit, and with the one process to RELATIVE per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import onefold
from onefold.errors import ConfigError, expected
from onefold.mesh.world import World
from onefold.models.gpt import GPT, PRESETS, VOCAB
from onefold.models.loader import call_function, load_function, logits_of
from onefold.train.corpus import own_rows

STAGES = (0, 1, 2, 3)

RELATIVE = 1e-6
"""How far a step's loss may be from one process: sums have another order there."""

WEIGHTS_RELATIVE = 2e-5
"""The same for weights, of the largest value in each parameter and per step."""

ROWS_PER_RANK, SEQ = 2, 32
"""Synthetic tokens, where the user's function gives no batch."""

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Difference:
    """The parameter that is furthest from where it should be."""

    parameter: str
    largest: float  # absolute difference of one element
    relative: float  # the same over the largest absolute value of the parameter
    num_differing: int  # parameters that differ, this one included


@dataclass(frozen=True, slots=True)
class StageVerdict:
    """How one stage compares."""

    stage: int
    losses: list[float]
    loss_relative: float  # worst step, against one process
    loss_is_close: bool
    weights: Difference | None  # against one process; None: no parameter differs at all
    weights_are_close: bool
    bits: Difference | None  # against stage 0; None: bit for bit the same
    same_losses: bool  # bit for bit those of stage 0
    rank_differs: str  # a parameter that ranks do not agree on, or empty

    @property
    def passes(self) -> bool:
        return (
            self.loss_is_close
            and self.weights_are_close
            and self.bits is None
            and self.same_losses
            and not self.rank_differs
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a check; the same on every rank."""

    world_size: int
    steps: int
    num_parameters: int
    losses: list[float]  # of one process
    stages: list[StageVerdict]
    hint: str

    @property
    def passes(self) -> bool:
        return all(stage.passes for stage in self.stages)


@dataclass(frozen=True, slots=True)
class _Run:
    """What one training run leaves."""

    losses: Tensor  # [steps], float64, mean over ranks
    weights: dict[str, Tensor]


def check(model: str | None, *, steps: int, seed: int, world: World) -> Verdict:
    """Train the module in one process and at every stage, and compare. A collective.

    `model` is None for the tiny GPT, or `module:function`. The function returns a module that takes
    byte tokens, or (module, batch, loss_fn): the batch is a tensor, or a tuple or dict of tensors,
    cut by rows, and `loss_fn(module, batch)` is a mean over rows.
    """
    with _repeatable(world.device):
        reference = _train_whole(model, steps, seed, world) if world.rank == 0 else None
        first: _Run | None = None
        verdicts: list[StageVerdict] = []
        for stage in STAGES:
            run = _train_sharded(model, stage, steps, seed, world)
            disagreement = _disagreement(run, world)
            first = first or run
            if reference is not None:
                verdicts.append(_judge(stage, run, reference, first, disagreement))
    module, _, _ = _case(model, seed, world)
    verdict = None
    if reference is not None:
        verdict = Verdict(
            world_size=world.world_size,
            steps=steps,
            num_parameters=sum(parameter.numel() for parameter in module.parameters()),
            losses=reference.losses.tolist(),
            stages=verdicts,
            hint=_hint(module),
        )
    shared = world.gather(verdict)[0]
    assert isinstance(shared, Verdict), "rank 0 has judged"
    return shared


def _case(model: str | None, seed: int, world: World) -> tuple[nn.Module, Any, Loss]:
    """A fresh module, the global batch, the loss."""
    torch.manual_seed(seed)
    if model is None:
        made: Any = GPT(PRESETS["tiny"], SEQ)
    else:
        made = call_function(model, load_function(model), (nn.Module, tuple))
    if isinstance(made, nn.Module):
        generator = torch.Generator().manual_seed(seed)
        shape = (ROWS_PER_RANK * world.world_size, SEQ + 1)
        made = made, torch.randint(0, VOCAB, shape, generator=generator), next_token_loss
    if len(made) != 3 or not isinstance(made[0], nn.Module) or not callable(made[2]):
        kinds = ", ".join(type(part).__name__ for part in made)
        raise ConfigError(
            expected(
                f"{model}() to return a module, or (module, batch, loss_fn)",
                f"({kinds})",
                hint="loss_fn(module, batch) returns the loss, a mean over rows of the batch",
            )
        )
    module, batch, loss = made
    _check_rows(batch, world.world_size)
    return module.to(world.device), _map(batch, lambda tensor: tensor.to(world.device)), loss


def next_token_loss(module: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of each token given those before it, tokens [B, T + 1]."""
    logits = logits_of(module, tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def _train_whole(model: str | None, steps: int, seed: int, world: World) -> _Run:
    module, batch, loss_fn = _case(model, seed, world)
    optimizer = _optimizer(module)
    torch.manual_seed(seed)
    losses = [_step(module, optimizer, loss_fn, batch) for _ in range(steps)]
    return _Run(torch.tensor(losses, dtype=torch.float64), _copied(module))


def _train_sharded(model: str | None, stage: int, steps: int, seed: int, world: World) -> _Run:
    module, batch, loss_fn = _case(model, seed, world)
    optimizer = _optimizer(module)
    onefold.shard(module, optimizer, stage=stage)
    own = _map(batch, lambda tensor: _rows(tensor, world))
    torch.manual_seed(seed)
    losses = [_step(module, optimizer, loss_fn, own) for _ in range(steps)]
    with onefold.unsharded(module):
        weights = _copied(module)
    return _Run(torch.tensor(world.mean(losses), dtype=torch.float64), weights)


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """AdamW with an eps that keeps rounding small.

    A gradient that is zero but for rounding, as that of a bias of attention keys, would otherwise
    be scaled up to a full step in a random direction.
    """
    return torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-3)


def _step(module: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Loss, batch: Any) -> float:
    loss = loss_fn(module, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().cpu().clone() for name, p in module.named_parameters()}


def _map(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {name: _map(value, function) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(_map(value, function) for value in batch)
    return batch


def _rows(tensor: Tensor, world: World) -> Tensor:
    if tensor.dim() == 0:
        return tensor
    own = own_rows(len(tensor), world.rank, world.world_size)
    return tensor[own.start : own.stop]


def _check_rows(batch: Any, world_size: int) -> None:
    def look(tensor: Tensor) -> Tensor:
        if tensor.dim() and len(tensor) % world_size:
            raise ConfigError(
                expected(
                    f"a batch whose rows divide by {world_size} ranks",
                    f"{len(tensor)} rows",
                    hint="return a larger batch, or pass --ranks",
                )
            )
        return tensor

    _map(batch, look)


@contextmanager
def _repeatable(device: torch.device) -> Iterator[None]:
    """Kernels that give the same bits each time; only on a GPU has torch others."""
    before = torch.are_deterministic_algorithms_enabled()
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


# comparing


def _judge(stage: int, run: _Run, reference: _Run, first: _Run, disagreement: str) -> StageVerdict:
    steps = torch.arange(1, len(run.losses) + 1)
    relative = (run.losses - reference.losses).abs() / reference.losses.abs().clamp_min(1e-12)
    weights = difference(run.weights, reference.weights)
    allowed = WEIGHTS_RELATIVE * len(run.losses)
    return StageVerdict(
        stage=stage,
        losses=run.losses.tolist(),
        loss_relative=float(relative.max()),
        loss_is_close=bool((relative <= RELATIVE * steps).all()),
        weights=weights,
        weights_are_close=weights is None or weights.relative <= allowed,
        bits=difference(run.weights, first.weights),
        same_losses=torch.equal(run.losses, first.losses),
        rank_differs=disagreement,
    )


def difference(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> Difference | None:
    """The parameter with the largest relative difference, or None where all bits are the same.

    A value that is not a number counts as infinitely far away.
    """
    worst: Difference | None = None
    count = 0
    for name, right in wanted.items():
        left = got[name]
        if torch.equal(left, right):
            continue
        count += 1
        gap = (left.double() - right.double()).abs().nan_to_num(nan=float("inf"))
        largest = float(gap.max()) if gap.numel() else 0.0
        scale = float(right.double().abs().max()) if right.numel() else 0.0
        relative = largest / max(scale, 1e-3)
        if worst is None or relative > worst.relative:
            worst = Difference(name, largest, relative, count)
    if worst is None:
        return None
    return Difference(worst.parameter, worst.largest, worst.relative, count)


def _disagreement(run: _Run, world: World) -> str:
    """The first parameter whose gathered values are not the same on every rank, or nothing."""
    mine = {
        name: sha256(weight.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, weight in run.weights.items()
        if weight.numel()
    }
    everywhere = world.gather(mine)
    return next((name for name in mine if len({each[name] for each in everywhere}) > 1), "")


def _hint(module: nn.Module) -> str:
    """Why a module cannot pass, where its parts tell."""
    dropout = nn.modules.dropout._DropoutNd
    batch_norm = nn.modules.batchnorm._BatchNorm
    for name, part in module.named_modules():
        if part.training and isinstance(part, dropout) and part.p > 0:
            return f"{name!r} is a dropout in training mode: return the module in eval() mode"
        if part.training and isinstance(part, batch_norm):
            return f"{name!r} takes statistics from each rank's rows: return it in eval() mode"
    for name, parameter in module.named_parameters():
        if parameter.dtype != torch.float32:
            return (
                f"{name!r} is {parameter.dtype}, and the law speaks of fp32: return module.float()"
            )
    return ""
