"""Scripts that run plain in one process and sharded over ranks.

A *script* is an ordinary training loop, written once against `Process`. Run plain it computes whole
batches; run sharded, each rank computes its part of them. What it notes on the way (losses,
gradients, weights, in full) has to be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import onefold
from tests.support.ranks import run_ranks, seeded
from tests.support.training import cut

WIDTH = 8
ROWS = 12
STAGES = (0, 1, 2, 3)
STAGES_AT = {1: (3,), 2: (0, 2), 3: (1, 3), 4: (3,)}
"""By world size: in all every stage, in two worlds two of them, which must agree bit for bit; each
world is compared with one process."""
RELATIVE = 1e-6

SUMS = ((0,), (1, 2, 3))
"""Groups of stages for `law_1`, where several backwards add up: stage 0 may round otherwise."""
every_stage = pytest.mark.parametrize("stage", [0, 1, 3])  # 2 differs where micro-batches add up


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """AdamW whose epsilon does not turn rounding noise in zero gradients into whole steps."""
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def adamw_of_trainable(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)


def each_module(module: nn.Module) -> bool:
    """A `units` predicate: every submodule is a unit of its own."""
    return True


@dataclass
class Process:
    """What a script sees: its part of every batch, and whether it is sharded."""

    rank: int = 0
    world_size: int = 1
    stage: int | None = None  # None: plain, in one process
    options: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, Tensor | None] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)  # names of values of which it saw its own
    # piece, and the dimension that is cut

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.world_size}, stage {self.stage}"

    @property
    def is_plain(self) -> bool:
        return self.stage is None

    def ready(
        self,
        build: Callable[[], nn.Module],
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        **options: Any,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A module with its optimizer, sharded unless this process is the plain one."""
        module = seeded(build)
        made = optimizer(module)
        if self.stage is not None:
            onefold.shard(module, made, stage=self.stage, **{**self.options, **options})
        return module, made

    def parts(self, batch: Any) -> list[Any]:
        """What this process computes of a global batch: its own part, or (plain) all of it.

        Plain with a world size, the parts of the ranks one by one: for what depends on the cut.
        """
        cuts = cut(batch, self.world_size)
        return cuts if self.is_plain else [cuts[self.rank]]

    def mean(self, loss_of: Callable[[Any], Tensor], batch: Any) -> Tensor:
        losses = [loss_of(part) for part in self.parts(batch)]
        return torch.stack(losses).mean() if len(losses) > 1 else losses[0]

    def accumulating(self, module: nn.Module) -> AbstractContextManager[None]:
        return nullcontext() if self.is_plain else onefold.accumulate(module)

    def note(self, name: str, value: Tensor | None) -> None:
        """Keep a value that is the same on every rank, or a rank's rows of it."""
        assert name not in self.seen, f"{name} is noted twice"
        if isinstance(value, DTensor):
            placement = value.placements[0]
            is_cut = isinstance(placement, Shard)
            if is_cut:
                self.cut[name] = placement.dim
            value = value.to_local() if is_cut else value.full_tensor()
        self.seen[name] = None if value is None else value.detach().clone()

    def note_mean(self, name: str, value: Tensor) -> None:
        """Keep the mean over ranks of a value, such as a loss."""
        total = value.detach().clone()
        if not self.is_plain and self.world_size > 1:
            dist.all_reduce(total)
            total /= self.world_size
        self.note(name, total)

    def note_grads(self, label: str, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            self.note(f"{label} grad of {name}", parameter.grad)

    def note_weights(self, module: nn.Module, label: str = "final") -> None:
        for name, parameter in module.named_parameters():
            self.note(f"{label} {name}", parameter)

    def step(
        self,
        label: object,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_of: Callable[[Any], Tensor],
        batch: Any,
    ) -> None:
        """One ordinary step: forward, backward, step, zero_grad."""
        loss = self.mean(loss_of, batch)
        loss.backward()
        self.note_mean(f"{label} loss", loss)
        self.update(label, module, optimizer)

    def update(self, label: object, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Note the gradients of a backward, step, and clear them."""
        self.note_grads(f"{label}", module)
        optimizer.step()
        optimizer.zero_grad()

    def steps(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, count: int = 2
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the number and batch of each step, then take it; note the weights at the end."""
        for index, batch in enumerate(rows(count)):
            yield index, batch
            self.step(index, module, optimizer, squared(module), batch)
        self.note_weights(module)


Script = Callable[[Process], None]


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def squared(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The loss of most scripts: outputs should be ones."""
    return lambda part: (module(part) - 1).square().mean()


def training(
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module], Callable[[Any], Tensor]] = squared,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    batches: Sequence[Any] | None = None,
    **options: Any,
) -> Script:
    """The ordinary script: a few steps, then the weights."""

    def script(process: Process) -> None:
        module, made = process.ready(build, optimizer, **options)
        for index, batch in enumerate(rows() if batches is None else batches):
            process.step(f"step {index}", module, made, loss(module), batch)
        process.note_weights(module)

    return script


def rows(steps: int = 2, width: int = WIDTH, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, width, generator=generator) for _ in range(steps)]


def tokens(steps: int = 2, length: int = 5, vocabulary: int = 20, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (ROWS, length), generator=generator) for _ in range(steps)]


def run_plain(script: Script, world_size: int = 1) -> dict[str, Tensor | None]:
    """The script in one process, on the parts of `world_size` ranks."""
    process = Process(world_size=world_size)
    script(process)
    return process.seen


def run_sharded(
    script: Script, world_size: int, stage: int, **options: Any
) -> dict[str, Tensor | None]:
    """The script on ranks; their notes in full, after those of all ranks were compared."""

    def body(rank: int) -> Process:
        process = Process(rank, world_size, stage, options)
        script(process)
        return process

    first, *others = run_ranks(world_size, body)
    for other in others:
        assert other.cut == first.cut, f"{other} saw rows of other values than rank 0"
        both = {name: value for name, value in other.seen.items() if name not in first.cut}
        assert_same_notes(both, {name: first.seen[name] for name in both}, f"{other}, rank 0")
        assert list(other.seen) == list(first.seen), f"{other} against rank 0"
    joined = {name: join(name, [first, *others]) for name in first.cut}
    return {name: joined.get(name, value) for name, value in first.seen.items()}


def join(name: str, processes: Sequence[Process]) -> Tensor:
    """A value of which each process saw its own piece."""
    pieces = [process.seen[name] for process in processes]
    dim = processes[0].cut.get(name, 0)
    return torch.cat([piece for piece in pieces if piece is not None], dim)


def law_1(
    world_size: int,
    script: Script,
    *,
    relative: float = RELATIVE,
    stages: Sequence[Any] | None = None,
    fine_units: bool = True,
    by_part: bool = False,
    may_fail: tuple[type[onefold.OnefoldError], str] | None = None,
) -> None:
    """Stages, and stage 3 with every module a unit, agree bitwise; and with one process.

    `stages`: or groups of stages, if only those of a group agree bitwise; units of one module go
    with the last. `by_part`: the one process computes the parts of all ranks one after the other.
    `may_fail`: a group may be refused by an error of this class, whose text names this.
    """
    plain = run_plain(script, world_size if by_part else 1)
    stages = STAGES_AT[world_size] if stages is None else stages
    groups = stages if isinstance(stages[0], tuple) else (stages,)
    for group in groups:
        try:
            runs = {f"stage {stage}": run_sharded(script, world_size, stage) for stage in group}
            if fine_units and world_size == 3 and group is groups[-1]:
                runs["stage 3 in fine units"] = run_sharded(
                    script, world_size, 3, units=each_module
                )
        except onefold.OnefoldError as error:
            if may_fail is None or not isinstance(error, may_fail[0]):
                raise
            assert may_fail[1] in str(error)
            assert "hint:" in str(error)
            continue
        (first, wanted), *others = runs.items()
        assert_close_notes(wanted, plain, relative, f"{first} against one process")
        for name, run in others:
            assert_same_notes(run, wanted, f"{name} against {first}")


def assert_same_notes(
    got: dict[str, Tensor | None], wanted: dict[str, Tensor | None], what: str
) -> None:
    """Equal bit for bit, and None where None."""
    assert list(got) == list(wanted), what
    for name, value in wanted.items():
        mine = got[name]
        if value is None or mine is None:
            assert mine is value, f"{what}: {name} is {mine}, expected {value}"
            continue
        assert mine.dtype == value.dtype, f"{what}: {name} is {mine.dtype}, expected {value.dtype}"
        assert torch.equal(mine, value), f"{what}: {name} differs by {_distance(mine, value)}"


def assert_close_notes(
    got: dict[str, Tensor | None], wanted: dict[str, Tensor | None], relative: float, what: str
) -> None:
    """Law 1 against one process: to `relative` of the largest element, for each step so far."""
    steps = 1 + sum(name.endswith("loss") for name in wanted)
    assert list(got) == list(wanted), what
    for name, value in wanted.items():
        mine = got[name]
        if value is None or mine is None:
            assert mine is value, f"{what}: {name} is {mine}, expected {value}"
            continue
        assert mine.shape == value.shape, f"{what}: {name} has shape {tuple(mine.shape)}"
        assert mine.dtype == value.dtype, f"{what}: {name} is {mine.dtype}, expected {value.dtype}"
        if not value.numel():
            continue
        scale = max(value.abs().max().item(), 1e-2)
        bound = relative * steps * scale * (1 if name.endswith("loss") else 20)
        assert _distance(mine, value) <= bound, (
            f"{what}: {name} differs by {_distance(mine, value)}, expected at most {bound}"
        )


def _distance(one: Tensor, other: Tensor) -> float:
    wide = torch.complex128 if one.is_complex() else torch.float64
    return (one.to(wide) - other.to(wide)).abs().max().item() if one.numel() else 0.0
