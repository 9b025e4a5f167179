"""Islands for tests: ranks in threads, and the same method in one plain process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from tests.support.ranks import run_ranks, seeded

WIDTH = 8


def build() -> nn.Module:
    """Four Linears, fp64: units of matrices and vectors."""
    layers = [nn.Linear(WIDTH, 16), nn.Linear(16, 16), nn.Linear(16, 12), nn.Linear(12, 4)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2], layers[3]).double()


def averaging(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The outer optimizer that takes over the mean of all islands."""
    return torch.optim.SGD(parameters, lr=1.0)


def batches(steps: int, rows: int = 12) -> list[tuple[Tensor, Tensor]]:
    """Global batches, one a step."""
    made = torch.Generator().manual_seed(1)
    options: dict[str, Any] = {"generator": made, "dtype": torch.float64}
    return [
        (torch.randn(rows, WIDTH, **options), torch.randn(rows, 4, **options)) for _ in range(steps)
    ]


@dataclass
class IslandRun:
    """A run of islands with these numbers of ranks."""

    sizes: Sequence[int] = (1, 1)
    every: Any = 1
    steps: int = 6
    stage: int = 3
    outer: Any = averaging
    codec: str | None = None
    build: Callable[[], nn.Module] = build
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1)
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    batches: list[tuple[Tensor, Tensor]] | None = None

    @property
    def data(self) -> list[tuple[Tensor, Tensor]]:
        return self.batches or batches(self.steps)


@dataclass
class Trained:
    """One rank at the end."""

    weights: dict[str, Tensor]
    losses: list[float]
    handle: Any
    report: Any
    units: dict[str, int] = field(default_factory=dict[str, int])  # of each parameter


@dataclass
class IslandRank:
    """One rank of a run: its module, optimizer and handle."""

    run: IslandRun
    rank: int
    module: nn.Module
    optimizer: torch.optim.Optimizer
    handle: Any = None

    @staticmethod
    def start(rank: int, run: IslandRun, **arguments: Any) -> IslandRank:
        """Shard over the island's ranks, and make islands."""
        groups, first = [], 0
        for size in run.sizes:
            groups.append(dist.new_group(list(range(first, first + size))))
            first += size
        own = groups[island_of(rank, run.sizes)]
        module = seeded(run.build)
        found = IslandRank(run, rank, module, run.optimizer(module.parameters()))
        onefold.shard(module, found.optimizer, stage=run.stage, mesh=own, **run.options)
        options = {"every": run.every, "outer": run.outer, "codec": run.codec, **arguments}
        found.handle = onefold.islands(module, found.optimizer, **options)
        return found

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of this rank's rows of a global batch."""
        x, y = (each.chunk(sum(self.run.sizes))[self.rank] for each in batch)
        return (self.module(x) - y).pow(2).mean()

    def train(self, data: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
        """Some steps; their losses on this rank."""
        losses = []
        for batch in data:
            loss = self.loss(batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.handle.step()
            losses.append(loss.item())
        return losses

    def weights(self) -> dict[str, Tensor]:
        """All weights, as plain tensors."""
        with onefold.unsharded(self.module):
            return {name: p.detach().clone() for name, p in self.module.named_parameters()}

    def ended(self, losses: list[float]) -> Trained:
        """The rank's result."""
        units = {
            p.fqn: index
            for index, share in enumerate(self.handle._anchors.shares)
            for p in share.parameters
        }
        report = onefold.report(self.module)
        return Trained(self.weights(), losses, self.handle, report, units)


def island_of(rank: int, sizes: Sequence[int]) -> int:
    """The island of a rank."""
    return next(k for k in range(len(sizes)) if rank < sum(sizes[: k + 1]))


def train_islands(run: IslandRun) -> list[Trained]:
    """The run on threads; every rank's result."""
    return run_ranks(sum(run.sizes), _train, run)


def _train(rank: int, run: IslandRun) -> Trained:
    found = IslandRank.start(rank, run)
    return found.ended(found.train(run.data))


def train_plain(run: IslandRun) -> dict[str, Tensor]:
    """The whole batches in one process, without islands."""
    module = seeded(run.build)
    optimizer = run.optimizer(module.parameters())
    for x, y in run.data:
        (module(x) - y).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in module.named_parameters()}


def simulate(run: IslandRun, units: dict[str, int]) -> list[dict[str, Tensor]]:
    """The run's method written out in one process: the weights of each island.

    An island's gradient is that of its ranks' rows together. `units` numbers the parameters' units.
    """
    Periods = onefold.islands.Periods
    every = run.every if isinstance(run.every, Periods) else Periods(run.every)
    modules = [seeded(run.build) for _ in run.sizes]
    optimizers = [run.optimizer(module.parameters()) for module in modules]
    anchors = {n: nn.Parameter(p.detach().clone()) for n, p in modules[0].named_parameters()}
    outer = run.outer(list(anchors.values()))
    shares = [size / sum(run.sizes) for size in run.sizes]
    waiting: tuple[int, dict[tuple[str, str], Tensor]] | None = None
    for step, (x, y) in enumerate(run.data, 1):
        rows = [len(x) // sum(run.sizes) * size for size in run.sizes]
        for module, optimizer, a, b in zip(
            modules, optimizers, x.split(rows), y.split(rows), strict=True
        ):
            (module(a) - b).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        due = every.due(step)
        if waiting is not None and step == waiting[0]:
            _merge(waiting[1], modules, optimizers, anchors, outer, every.keep)
            waiting = None
        if due is not None:
            means = {
                (kind, name): sum(
                    share * _value(kind, name, module, optimizer, anchors)
                    for share, module, optimizer in zip(shares, modules, optimizers, strict=True)
                )
                for kind in due[1]
                for name in anchors
                if units[name] % every.fragments == due[0]
            }
            waiting = (step + every.delay, means)
            if every.delay == 0:
                _merge(means, modules, optimizers, anchors, outer, every.keep)
                waiting = None
    return [{n: p.detach() for n, p in module.named_parameters()} for module in modules]


def _value(kind: str, name: str, module: Any, optimizer: Any, anchors: Any) -> Tensor:
    parameter = module.get_parameter(name)
    if kind == "weights":
        return anchors[name].detach() - parameter.detach()
    return optimizer.state[parameter][kind]


def _merge(
    means: Any, modules: Any, optimizers: Any, anchors: Any, outer: Any, keep: float
) -> None:
    for (kind, name), mean in means.items():
        if kind == "weights":
            anchors[name].grad = mean.clone()
    outer.step()
    outer.zero_grad()
    for kind, name in means:
        new = anchors[name].detach() if kind == "weights" else means[kind, name]
        for module, optimizer in zip(modules, optimizers, strict=True):
            parameter = module.get_parameter(name)
            place = parameter.data if kind == "weights" else optimizer.state[parameter][kind]
            place.copy_(keep * place + (1 - keep) * new)
