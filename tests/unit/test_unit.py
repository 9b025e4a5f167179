"""Laws of units: empty shards reduce, writes stay, units never mix."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import onefold
from onefold.errors import WireError
from onefold.layout.ledger import Kind, Ledger
from onefold.tier.device import DeviceStore
from onefold.unit.buffer import Buffer, _own_references
from onefold.unit.gather import UnitGather
from onefold.wire import digest
from tests.support.programs.blocks import Chain
from tests.support.ranks import every_rank, run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn

WORLDS = pytest.mark.parametrize("world_size", [2, 3, 4])
SHARDED = pytest.mark.parametrize("stage", [1, 3])


class Uneven(nn.Module):
    """Parameters with fewer rows than ranks, as many, and more."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(1, 3))
        self.few = nn.Parameter(torch.randn(2, 3))
        self.many = nn.Parameter(torch.randn(9, 3))
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.one.t()).sum(1) + (x @ self.few.t()).sum(1) + (x @ self.many.t()).sum(1)
        return y * self.gain


def sharded(stage: int = 3) -> tuple[Uneven, torch.optim.Optimizer]:
    module = seeded(Uneven)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    onefold.shard(module, optimizer, stage=stage)
    return module, optimizer


def number(value: Tensor) -> float:
    value = value.detach()
    return float(value.full_tensor() if isinstance(value, DTensor) else value)


@worlds_in_turn
@WORLDS
@SHARDED
@pytest.mark.parametrize("norm_type", [float("inf"), 2.0])
def test_gradients_are_clipped_where_a_rank_has_no_rows(world_size, stage, norm_type):
    plain = seeded(Uneven)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    plain(x).sum().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type=norm_type)

    def body(rank: int) -> None:
        module, _ = sharded(stage)
        for foreach in (None, False):
            module.zero_grad()
            module(x).sum().backward()
            found = nn.utils.clip_grad_norm_(
                module.parameters(), 0.5, norm_type=norm_type, foreach=foreach
            )
            torch.testing.assert_close(number(found), number(expected), rtol=1e-5, atol=0)
            for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
                assert p.grad is not None
                whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                torch.testing.assert_close(whole, q.grad, msg=name)

    run_ranks(world_size, body)


BOUNDS: dict[str, Any] = {
    "max": lambda t: t.max(),
    "min": lambda t: t.min(),
    "amax": lambda t: t.amax(),
    "amin": lambda t: t.amin(),
    "torch.max": torch.max,
    "argmax": lambda t: t.argmax(),
    "aminmax": lambda t: torch.aminmax(t).max,
    "max of columns": lambda t: t.amax(0).sum(),
    "inf norm": lambda t: torch.linalg.vector_norm(t, float("inf")),
    "norm(inf)": lambda t: t.norm(float("inf")),
    "abs().max()": lambda t: t.abs().max(),
}


@again_but("parameter-2", "gradient-4", "in grad mode-2")
@worlds_in_turn
@WORLDS
@pytest.mark.parametrize("of", ["parameter", "data", "gradient", "in grad mode"])
def test_bounds_of_tensors_are_right_where_a_rank_has_no_rows(world_size, of):
    plain = seeded(Uneven)
    x = torch.ones(2, 3)
    plain(x).sum().backward()

    def taken(module: nn.Module, bound: str) -> list[float]:
        found: list[float] = []
        for name, p in module.named_parameters():
            if name == "gain" and bound == "max of columns":
                continue
            tensor = {"data": p.data, "gradient": p.grad}.get(of, p)
            with torch.set_grad_enabled(of == "in grad mode"):
                found.append(number(BOUNDS[bound](tensor)))
        return found

    def body(rank: int) -> None:
        module, _ = sharded()
        module(x).sum().backward()
        for bound in BOUNDS:
            torch.testing.assert_close(taken(module, bound), taken(plain, bound), msg=bound)

    run_ranks(world_size, body)


def rows_of(module: nn.Module) -> dict[str, Tensor]:
    with onefold.unsharded(module):
        return {name: p.detach().clone() for name, p in module.named_parameters()}


ASSIGNMENTS: dict[str, Any] = {
    "a row": lambda p: p.__setitem__(0, 0.5),
    "an element": lambda p: p.__setitem__((0, 1), 0.3),
    "a column": lambda p: p.__setitem__((slice(None), 1), 0.3),
    "a tensor": lambda p: p.__setitem__(0, torch.tensor([1.0, 2.0, 3.0])),
    "rows by number": lambda p: p.__setitem__(torch.tensor([0, -1]), 2.0),
    "a mask": lambda p: p.__setitem__(torch.ones(p.shape, dtype=torch.bool), 2.0),
    "a computed row": lambda p: p.__setitem__(0, p[0] + 1),
    "the column of a view": lambda p: p[:, 1].zero_(),
    "data": lambda p: p.data.__setitem__(0, 0.5),
}


@worlds_in_turn
@pytest.mark.parametrize(
    ("how", "world_size", "stage"),
    [(how, world_size, 1 + (index + world_size) % 3) for index, how in enumerate(ASSIGNMENTS)
     for world_size in (2, 3, 4)],
)  # fmt: skip
def test_indexed_assignments_write_to_the_parameter(world_size, stage, how):
    plain = seeded(Uneven)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        for name, p in plain.named_parameters():
            if name != "gain":
                ASSIGNMENTS[how](p)

    def body(rank: int) -> None:
        module, _ = sharded(stage)
        module(x)
        with torch.no_grad():
            for name, p in module.named_parameters():
                if name != "gain":
                    ASSIGNMENTS[how](p)
        found = rows_of(module)
        for name, p in plain.named_parameters():
            assert torch.equal(found[name], p), name
        torch.testing.assert_close(module(x), plain(x))

    run_ranks(world_size, body)


def twins() -> nn.Module:
    """Two units of equal sizes."""
    return Chain(nn.Linear(4, 4), nn.Linear(4, 4))


def test_tags_are_compared_once_a_gather(monkeypatch):
    """Units that show weights again which are there already compare none."""
    compared: list[int] = []
    check = UnitGather.check
    monkeypatch.setattr(
        UnitGather, "check", lambda gather, full: (compared.append(1), check(gather, full))[1]
    )

    def body(rank: int) -> None:
        module = seeded(twins)
        onefold.shard(module, stage=3)
        unit = module.__dict__["_onefold_engine"].units[0]
        for releases in (False, False, True, False):
            unit.unshard()
            unit.reshard(release=releases)

    run_ranks(2, body)
    assert len(compared) == 2 * 2, "of two gathers, on two ranks"


def sharded_twins() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Two equal units, trained for two steps with an evaluation after each."""
    module = seeded(twins)
    optimizer = torch.optim.AdamW(module.parameters())
    onefold.shard(module, optimizer)
    for _ in range(2):
        module(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        with torch.inference_mode():
            module(torch.ones(1, 4))
    return module, optimizer, module.__dict__["_onefold_engine"]


@worlds_in_turn
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("phase", ["gather", "reduce_scatter"])
@pytest.mark.parametrize("notices", ["step", "save"])
def test_units_that_mix_where_no_lane_compares_them_are_an_error_of_the_step(
    world_size, phase, notices, tmp_path
):
    """Threads have no lanes. The digest names the first message that differs, on every rank."""

    def body(rank: int) -> str:
        module, optimizer, engine = sharded_twins()
        unit = engine.units[min(rank, 1)]  # ranks but the first use the second unit
        if phase == "gather":
            unit.unshard()
            unit.reshard(release=True)
        else:
            gradient = unit.gradient
            ones = [torch.ones(p.slot.numel) for p in unit.parameters]
            mean = gradient.mean_rows(unit.parameters)
            gradient.reduction.start((0, 1), ones, [True, True], mean).wait()
        with pytest.raises(WireError) as error:
            if notices == "save":
                onefold.save(tmp_path / "checkpoint", module, optimizer)
            optimizer.step()
        assert not (tmp_path / "checkpoint").exists()
        optimizer.step()  # nothing is left of it
        return str(error.value)

    for rank, message in enumerate(run_ranks(world_size, body)):
        own, other = min(rank, 1), int(rank == 0)
        assert message.startswith(f"expected {phase} of unit 'blocks.{own}' on every rank, ")
        assert f"got {phase} of unit 'blocks.{other}' on rank {other} (rank {rank})\n" in message


def test_a_loop_without_steps_finds_units_that_mix(monkeypatch):
    monkeypatch.setattr(digest, "MOST_LOGGED", 8)

    def body(rank: int) -> str:
        _, _, engine = sharded_twins()
        first, second = engine.units[:2]
        for _ in range(2):
            for unit in (first, second) if rank == 0 else (second, first):
                unit.unshard()
                unit.reshard(release=True)
        with pytest.raises(WireError, match=r"gather of unit 'blocks\.\d'") as error:
            for _ in range(8):
                first.unshard()
                first.reshard(release=True)
        return str(error.value)

    run_ranks(2, body)


def test_messages_after_the_last_one_of_a_rank_are_named():
    class Ranks(SimpleNamespace):
        rank, watch = 1, None

        def gather(self, value: Any) -> list[Any]:
            return [["one", "two"], value]

    ranks: Any = Ranks(global_ranks=lambda: [4, 6])
    message = str(digest._first_difference(ranks, ["one"]))
    assert message.startswith("expected no message on every rank, got two on rank 4 (rank 6)\nhint")


def own_rows(tensor: Tensor) -> Tensor:
    """The rows of this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


KEPT: dict[str, Any] = {
    "the gradient": lambda g: g,
    "its shard": own_rows,
    "a view": lambda g: own_rows(g).view(-1)[:1],
    "a storage": lambda g: own_rows(g).untyped_storage(),
}


@worlds_in_turn
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("stage", [0, 1, 3])
@every_rank(2)
def test_a_gradient_that_a_user_keeps_is_not_overwritten(rank, stage, kept):
    """Its bytes would be those of the next backward. Otherwise they are used again, or freed."""
    module, _ = sharded(stage)
    ledger = module.__dict__["_onefold_engine"].ledger
    module(torch.ones(2, 3)).sum().backward()
    assert module.many.grad is not None
    mine = KEPT[kept](module.many.grad)
    before = [list(mine)] if isinstance(mine, torch.UntypedStorage) else mine.clone()
    module.zero_grad()
    module(torch.full((2, 3), 5.0)).sum().backward()
    if isinstance(mine, torch.UntypedStorage):
        assert [list(mine)] == before
    else:
        assert torch.equal(own_rows(mine), own_rows(before))
    del mine
    module.zero_grad()
    module(torch.ones(2, 3))
    held = sum(usage.now for (kind, _), usage in ledger.usage.items() if kind is Kind.GRAD)
    assert (held == 0) == (stage > 0)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_users_of_a_buffer_are_counted_inside_a_transform_of_torch_func():
    """The first gradients that are freed may be those of a step with `torch.func.jvp`."""
    _own_references.cache_clear()
    buffer = Buffer(4, torch.float32, Kind.GRAD, DeviceStore(torch.device("cpu")), Ledger())
    counts: list[int] = []

    def counted(x: Tensor) -> Tensor:
        counts.append(buffer.num_users)
        return x

    torch.func.jvp(counted, (torch.ones(2),), (torch.ones(2),))
    assert counts == [buffer.num_users] == [1]
