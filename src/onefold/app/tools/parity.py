"""Compare all stages with one process on a user's module (law 1).

Every run builds the module anew and trains it on the same global batch each step: once on rank 0
without Onefold, then at stages 0-3, where each rank takes its rows. Stages must give the same bits
as one another, and agree with the one process to RELATIVE per step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

import onefold
from onefold.app.train.corpus import own_rows
from onefold.config import StageNumber
from onefold.errors import ConfigError, OnefoldError
from onefold.planner.models.gpt import GPT, PRESETS, VOCAB
from onefold.planner.models.loader import call_function, described, load_function, logits_of
from onefold.wire.world import World

STAGES: tuple[StageNumber, ...] = (0, 1, 2, 3)

RELATIVE = 1e-6
"""Largest relative difference of a step's loss from one process, where sums have another order."""

WEIGHTS_RELATIVE = 2e-5
"""The same for weights, relative to the largest value of each parameter, and per step."""

ROWS_PER_RANK, SEQ = 2, 32
"""Synthetic tokens, where the user's function returns no batch."""

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Difference:
    """The parameter with the largest relative difference."""

    parameter: str
    largest: float  # absolute difference of one element
    relative: float  # the same over the largest absolute value of the parameter
    num_differing: int  # parameters that differ, this one included


@dataclass(frozen=True, slots=True)
class StageVerdict:
    """The comparison of one stage."""

    stage: int
    losses: list[float]
    loss_relative: float  # worst step, against one process
    loss_is_close: bool
    weights: Difference | None  # against one process; None: every parameter is equal
    weights_are_close: bool
    bits: Difference | None  # against stage 0; None: bit for bit the same
    same_losses: bool  # bit for bit those of stage 0
    rank_differs: str  # a parameter on which ranks disagree, or empty

    @property
    def passes(self) -> bool:
        is_close = self.loss_is_close and self.weights_are_close
        is_same = self.bits is None and self.same_losses and not self.rank_differs
        return is_close and is_same


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check; the same on every rank."""

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
class _Case:
    """One module to compare: a user's function, or None for the tiny GPT."""

    model: str | None
    steps: int
    seed: int
    world: World

    def build(self) -> tuple[nn.Module, Any, Loss]:
        """Return a fresh module, the global batch and the loss, on this rank's device."""
        world_size, device = self.world.world_size, self.world.device
        torch.manual_seed(self.seed)
        if self.model is None:
            parts: Any = GPT(PRESETS["tiny"], SEQ)
        else:
            parts = call_function(self.model, load_function(self.model), (nn.Module, tuple))
        if isinstance(parts, nn.Module):
            generator = torch.Generator().manual_seed(self.seed)
            shape = (ROWS_PER_RANK * world_size, SEQ + 1)
            parts = parts, torch.randint(0, VOCAB, shape, generator=generator), next_token_loss
        if len(parts) != 3 or not isinstance(parts[0], nn.Module) or not callable(parts[2]):
            wanted = f"{self.model}() to return a module, or (module, batch, loss_fn)"
            kinds = ", ".join(type(part).__name__ for part in parts)
            hint = "loss_fn(module, batch) returns the loss, a mean over rows of the batch"
            raise ConfigError(wanted, f"({kinds})", hint=hint)
        module, batch, loss_fn = parts
        loss_fn = partial(self._loss, loss_fn)

        def to_device(tensor: Tensor) -> Tensor:
            if tensor.dim() and len(tensor) % world_size:
                wanted = f"a batch whose rows divide by {world_size} ranks"
                hint = "return a larger batch, or pass --ranks"
                raise ConfigError(wanted, f"{len(tensor)} rows", hint=hint)
            return tensor.to(device)

        return module.to(device), tree_map_only(Tensor, to_device, batch), loss_fn

    def _loss(self, loss_fn: Loss, module: nn.Module, batch: Any) -> Tensor:
        """Call the user's `loss_fn`; what it raises names its line, and not those of ranks."""
        try:
            return loss_fn(module, batch)
        except OnefoldError:
            raise
        except Exception as error:
            hint = "loss_fn takes the module and a batch of this rank's rows"
            raise ConfigError(
                "loss_fn(module, batch) to run", described(error), hint=hint
            ) from error

    def own_rows(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows of a tensor of the global batch."""
        if tensor.dim() == 0:
            return tensor
        own = own_rows(len(tensor), self.world.rank, self.world.world_size)
        return tensor[own.start : own.stop]


@dataclass(frozen=True, slots=True)
class _Trained:
    """Losses and weights of one training run."""

    losses: Tensor  # [steps], float64, mean over ranks
    weights: dict[str, Tensor]


def check(model: str | None, *, steps: int, seed: int, world: World) -> Verdict:
    """Train the module in one process and at every stage, and compare. A collective.

    `model` is None for the tiny GPT, or `module:function`. The function returns a module that takes
    byte tokens, or (module, batch, loss_fn): the batch is a tensor, or a tuple or dict of tensors,
    cut by rows, and `loss_fn(module, batch)` is a mean over rows.
    """
    case = _Case(model, steps, seed, world)
    verdicts: list[StageVerdict] = []
    with _repeatable(world.device):
        reference = _train(case, None) if world.rank == 0 else None
        first: _Trained | None = None
        for stage in STAGES:
            trained = _train(case, stage)
            disagreement = _disagreement(trained, world)
            first = first or trained
            if reference is not None:
                verdicts.append(_judge(stage, trained, reference, first, disagreement))
    module, _, _ = case.build()
    verdict = None
    if reference is not None:
        numel = sum(parameter.numel() for parameter in module.parameters())
        losses = reference.losses.tolist()
        verdict = Verdict(world.world_size, steps, numel, losses, verdicts, _hint(module))
    shared = world.group.gather(verdict)[0]
    assert isinstance(shared, Verdict), "rank 0 has compared"
    return shared


def _train(case: _Case, stage: StageNumber | None) -> _Trained:
    """Train at a stage, or without Onefold if `stage` is None."""
    module, batch, loss_fn = case.build()
    # a gradient that is zero except for rounding, as that of a bias of attention keys, would become
    # a full step in a random direction with the usual eps
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-3)
    if stage is not None:
        onefold.shard(module, optimizer, stage=stage)
        batch = tree_map_only(Tensor, case.own_rows, batch)
    torch.manual_seed(case.seed)
    losses: list[float] = []
    for _ in range(case.steps):
        loss = loss_fn(module, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if stage is not None:
        losses = case.world.mean(losses)
    with nullcontext() if stage is None else onefold.unsharded(module):
        weights = {name: p.detach().cpu().clone() for name, p in module.named_parameters()}
    return _Trained(torch.tensor(losses, dtype=torch.float64), weights)


def next_token_loss(module: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of each token given the tokens before it; tokens [B, T + 1]."""
    logits = logits_of(module, tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@contextmanager
def _repeatable(device: torch.device) -> Iterator[None]:
    """Use kernels that return the same bits each time; on a CPU all of torch's do."""
    before = torch.are_deterministic_algorithms_enabled()
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


# comparing


def _judge(
    stage: int, trained: _Trained, reference: _Trained, first: _Trained, disagreement: str
) -> StageVerdict:
    losses, wanted = trained.losses, reference.losses
    relative = (losses - wanted).abs() / wanted.abs().clamp_min(1e-12)
    allowed = RELATIVE * torch.arange(1, len(losses) + 1)
    weights = difference(trained.weights, reference.weights)
    return StageVerdict(
        stage=stage,
        losses=losses.tolist(),
        loss_relative=float(relative.max()),
        loss_is_close=bool((relative <= allowed).all()),
        weights=weights,
        weights_are_close=weights is None or weights.relative <= WEIGHTS_RELATIVE * len(losses),
        bits=difference(trained.weights, first.weights),
        same_losses=torch.equal(losses, first.losses),
        rank_differs=disagreement,
    )


def difference(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> Difference | None:
    """Return the parameter with the largest relative difference; None if all bits are equal.

    A NaN counts as infinitely far away.
    """
    differences: list[Difference] = []
    for name, right in wanted.items():
        if torch.equal(got[name], right):
            continue
        gap = (got[name].double() - right.double()).abs().nan_to_num(nan=float("inf"))
        largest = float(gap.max()) if gap.numel() else 0.0
        scale = float(right.double().abs().max()) if right.numel() else 0.0
        differences.append(Difference(name, largest, largest / max(scale, 1e-3), 0))
    if not differences:
        return None
    worst = max(differences, key=lambda difference: difference.relative)
    return replace(worst, num_differing=len(differences))


def _disagreement(trained: _Trained, world: World) -> str:
    """Return the first parameter whose gathered values differ between ranks, or nothing."""
    own = {
        name: sha256(weight.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, weight in trained.weights.items()
        if weight.numel()
    }
    everywhere = world.group.gather(own)
    return next((name for name in own if len({digests[name] for digests in everywhere}) > 1), "")


def _hint(module: nn.Module) -> str:
    """Return why a module cannot pass, if its parts show it."""
    dropout = nn.modules.dropout._DropoutNd
    batch_norm = nn.modules.batchnorm._BatchNorm
    for name, part in module.named_modules():
        if part.training and isinstance(part, dropout) and part.p > 0:
            return f"{name!r} is a dropout in training mode: return the module in eval() mode"
        if part.training and isinstance(part, batch_norm):
            return f"{name!r} takes statistics from each rank's rows: return it in eval() mode"
    for name, parameter in module.named_parameters():
        if parameter.dtype != torch.float32:
            return f"{name!r} is {parameter.dtype}, the bounds hold for fp32: return module.float()"
    return ""
