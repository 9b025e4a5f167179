"""Inference of modules larger than memory: weights come and go, results stay (`onefold.stream`)."""

from __future__ import annotations

import errno
import os
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import onefold
from onefold import ConfigError, StateError, TierError
from onefold.compose import tiers
from onefold.config import Inference, Offload
from onefold.engine.registry import engine_of
from onefold.fit.kept_units import with_residents
from onefold.layout.ledger import Kind
from onefold.recipe import Member, Recipe, UnitRecipe
from onefold.tier import disk
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import every_rank, run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn

BLOCKS = 6
BLOCK_NBYTES = 4 * 1280  # of a block's unsharded weights, gaps between parameters included


def plain(tied: bool = False) -> nn.Module:
    return seeded(Model, BLOCKS, tied).eval()


def nbytes_of(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def unsharded_peak(module: nn.Module) -> int:
    usage = engine_of(module).ledger.usage
    return sum(use.peak for (kind, _), use in usage.items() if kind is Kind.UNSHARDED)


def read_nbytes(module: nn.Module) -> int:
    for unit in engine_of(module).units:
        unit._await_gather()  # of the next pass
    files = engine_of(module).context.tiers.weight.files
    return sum(file.read_nbytes for file in files)


def streamed(module: nn.Module, share: float, offload: Any, **options: Any) -> nn.Module:
    budget = int(share * 2 * nbytes_of(module)) + 4 * BLOCK_NBYTES
    return onefold.stream(module, budget=budget, offload=offload, **options)


def stays(module: nn.Module) -> list[bool]:
    return [unit.stays for unit in engine_of(module).recipe.units]


# results


@worlds_in_turn
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@every_rank()
def test_outputs_are_bitwise_those_of_the_resident_module(rank, world_size, share, tied, tmp_path):
    resident, module = plain(tied), plain(tied)
    streamed(module, share, f"disk:{tmp_path}")
    with torch.no_grad():
        for batch in token_batches(4):
            mine = batch[rank::world_size]
            assert torch.equal(module(mine), resident(mine))


@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("offload", ["cpu", None])
@every_rank()
def test_weights_that_rest_in_memory_stream_as_well(rank, offload, world_size):
    resident, module = plain(), plain()
    onefold.stream(module, offload=offload, budget=2 * nbytes_of(module))
    with torch.no_grad():
        for batch in token_batches(2):
            assert torch.equal(module(batch), resident(batch))


@pytest.mark.parametrize("world_size", [1, 2])
@every_rank()
def test_weights_that_a_forward_reads_one_by_one_are_those_of_the_resident_module(rank, world_size):
    """A read that changed what modules show would bring a tied weight twice."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)
            self.head.weight = self.table.weight

        def forward(self, tokens: Tensor) -> Tensor:
            halves = [weight * 0.5 for _, weight in self.named_parameters()]
            assert len(halves) == 2
            return F.linear(self.table(tokens), *halves)

    resident, module = seeded(Reads), seeded(Reads)
    onefold.stream(module, offload="cpu", budget=2 * nbytes_of(module) + (1 << 20))
    with torch.no_grad():
        for _ in range(2):
            tokens = torch.arange(8)
            assert torch.equal(module(tokens), resident(tokens))


class LateEvent:
    """The end of copies, which run when somebody waits for it."""

    def __init__(self, due: list[tuple[Tensor, Tensor]]) -> None:
        self._due = due

    def query(self) -> bool:
        return not self._due

    def synchronize(self) -> None:
        for target, source in self._due:
            target.copy_(source)
        self._due = []


class LateCopies:
    """A copy stream as on an accelerator: nothing has arrived before somebody waits for it.

    `sends`: messages follow on the stream, so they are behind its copies.
    """

    sends = False

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, Tensor]] = []
        self.num_copies = self.num_contexts = 0

    def __enter__(self) -> None:
        self.num_contexts += 1

    def __exit__(self, *error: object) -> None:
        pass

    def copy(self, into: list[Tensor], sources: list[Tensor]) -> None:
        for target, source in zip(into, sources, strict=True):
            target.fill_(torch.nan)
            self._pending.append((target, source))
            self.num_copies += 1
        if self.sends:
            self.mark().synchronize()

    def mark(self) -> LateEvent:
        due, self._pending = self._pending, []
        return LateEvent(due)

    def follow(self, copied: LateEvent) -> None:
        copied.synchronize()


@again_but("2")
@pytest.mark.parametrize("world_size", [1, 2])
def test_copies_to_a_device_may_arrive_late(world_size, tmp_path, monkeypatch):
    """Weights are read, and the memory they come from is reused, behind the wait for the copy."""
    monkeypatch.setattr(tiers, "copies_for", lambda _: LateCopies())
    monkeypatch.setattr(Recipe, "reads_directly", property(lambda _: False))
    monkeypatch.setattr(LateCopies, "sends", world_size > 1)

    def body(rank: int) -> None:
        resident, module = plain(), plain()
        streamed(module, 0.2, f"disk:{tmp_path}")
        trained, reference = seeded(Model, BLOCKS), seeded(Model, BLOCKS)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (trained, reference)]
        onefold.shard(trained, optimizers[0], offload=f"disk:{tmp_path}")
        for batch in token_batches(3):
            with torch.no_grad():
                assert torch.equal(module(batch), resident(batch))
            losses = [next_token_loss(each, batch) for each in (trained, reference)]
            for loss, optimizer in zip(losses, optimizers, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            assert torch.equal(*losses) if world_size == 1 else torch.allclose(*losses)
        for each in (module, trained):
            copies = engine_of(each).context.tiers.copies
            assert isinstance(copies, LateCopies)
            assert 0 < copies.num_contexts <= copies.num_copies

    run_ranks(world_size, body)


def test_a_slow_disk_of_one_rank_delays_all_and_changes_nothing(tmp_path, monkeypatch):
    read = disk.SwapFile.read_block

    def slowly(self: Any, offset: int, into: memoryview) -> None:
        if self._rank == 1:
            time.sleep(0.02)
        read(self, offset, into)

    monkeypatch.setattr(disk.SwapFile, "read_block", slowly)

    def body(rank: int) -> list[Tensor]:
        resident, module = plain(), plain()
        streamed(module, 0.0, f"disk:{tmp_path}")
        found = []
        with torch.no_grad():
            for batch in token_batches(2):
                found.append(module(batch))
                assert torch.equal(found[-1], resident(batch))
        return found

    run_ranks(2, body)


@pytest.mark.parametrize("world_size", [1, 2])
@every_rank()
def test_parts_have_hooks_only_while_weights_have_yet_to_come(rank, world_size, tmp_path):
    resident, module = plain(), plain()
    streamed(module, 1.0, f"disk:{tmp_path}")
    batch = token_batches(1)[0]
    blocks = list(module.blocks)

    def check(*, are_hooked: bool) -> None:
        assert any(block._forward_hooks for block in blocks) == are_hooked
        assert any(block._forward_pre_hooks for block in blocks) == are_hooked

    check(are_hooked=True)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(module(batch), resident(batch))
            check(are_hooked=False)
        with onefold.unsharded(module):
            pass
        assert torch.equal(module(batch), resident(batch))
        check(are_hooked=False)
        for part, plain_part in zip(blocks, resident.blocks, strict=True):
            x = torch.randn(2, 3, 16)
            assert torch.equal(part(x), plain_part(x))
    with pytest.raises(StateError, match=r"onefold\.stream"):
        module(batch).sum().backward()


def test_parts_of_the_module_may_be_called_alone(tmp_path):
    resident, module = plain(), plain()
    streamed(module, 0.2, f"disk:{tmp_path}")
    x = torch.randn(2, 3, 16)
    with torch.no_grad():
        for _ in range(2):
            for index in (3, 0, 5):
                assert torch.equal(module.blocks[index](x), resident.blocks[index](x))
            batch = token_batches(1)[0]
            assert torch.equal(module(batch), resident(batch))


def test_a_promised_module_on_meta_reads_its_files(tmp_path):
    resident = plain()
    shards = onefold.shard(plain(), stage=3)
    onefold.save_pretrained(shards, tmp_path / "saved")
    with torch.device("meta"):
        module = Model(BLOCKS).eval()
    onefold.load_pretrained(module, tmp_path / "saved")
    streamed(module, 0.2, f"disk:{tmp_path}")
    batch = token_batches(1)[0]
    with torch.no_grad():
        assert torch.equal(module(batch), resident(batch))


def test_unsharded_parameters_and_saved_files_are_those_of_the_module(tmp_path):
    resident, module = plain(), plain()
    streamed(module, 0.3, f"disk:{tmp_path}")
    batch = token_batches(1)[0]
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(module(batch), resident(batch))
        with onefold.unsharded(module):
            for mine, other in zip(module.parameters(), resident.parameters(), strict=True):
                assert torch.equal(mine, other)
    onefold.save_pretrained(module, tmp_path / "saved")
    with torch.no_grad():
        for parameter in resident.parameters():
            parameter.add_(1.0)
    onefold.save_pretrained(onefold.shard(resident, stage=3), tmp_path / "other")
    onefold.load_pretrained(module, tmp_path / "other")  # weights that stay are read anew, too
    with torch.no_grad():
        assert torch.equal(module(batch), resident(batch))


# bytes


@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 1.0])
def test_unsharded_weights_never_exceed_the_budget(share, tmp_path):
    module = plain()
    budget = int(share * nbytes_of(module)) + 4 * BLOCK_NBYTES
    onefold.stream(module, budget=budget, offload=f"disk:{tmp_path}")
    with torch.no_grad():
        for batch in token_batches(3):
            module(batch)
    assert unsharded_peak(module) <= budget
    ledger = engine_of(module).ledger
    assert ledger.total.peak - ledger.usage[Kind.WEIGHT, "disk"].now <= budget


def test_a_pass_reads_each_unit_that_does_not_stay_once_and_no_other(tmp_path):
    module = plain()
    streamed(module, 0.2, f"disk:{tmp_path}")
    engine, batch = engine_of(module), token_batches(1)[0]
    pages = [-(-unit.weight.tensor.nbytes // 4096) * 4096 for unit in engine.units]
    ahead = engine.recipe.inference.prefetch
    with torch.no_grad():
        for _ in range(3):  # the first reads all, the third reads what it prefetches as well
            module(batch)
        before = read_nbytes(module)
        for _ in range(5):
            module(batch)
    moving = [n for n, is_kept in zip(pages, stays(module), strict=True) if not is_kept]
    assert any(stays(module))
    assert len(moving) > ahead
    assert read_nbytes(module) - before == 5 * sum(moving)


def test_a_budget_for_everything_reads_each_unit_once(tmp_path):
    module = plain()
    streamed(module, 1.0, f"disk:{tmp_path}")
    batch = token_batches(1)[0]
    with torch.no_grad():
        module(batch)
        before = read_nbytes(module)
        module(batch)
    assert all(stays(module))
    assert read_nbytes(module) == before
    assert engine_of(module).is_settled(range(len(engine_of(module).units)))


sizes = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@given(sizes, st.floats(0.0, 1.5))
def test_units_that_stay_and_the_ring_fit_into_any_budget(numels, share):
    units = tuple(
        UnitRecipe(str(i), (Member(str(i), (64 * n,), torch.float32, torch.float32, False),))
        for i, n in enumerate(numels)
    )
    nbytes = [256 * n for n in numels]
    ring = 2 * max(nbytes)
    budget = ring + int(share * sum(nbytes))
    offload = Offload(parameters="disk", disk="/somewhere")
    recipe = with_residents(Recipe(units=units, offload=offload, inference=Inference(budget)))
    kept = [n for n, unit in zip(nbytes, recipe.units, strict=True) if unit.stays]
    ahead = recipe.inference.prefetch
    assert 1 <= ahead <= 2
    if sum(nbytes) <= budget:
        assert len(kept) == len(numels)
    else:
        assert sum(kept) + (1 + ahead) * max(nbytes) <= budget
        assert sum(kept) >= min(sum(nbytes), budget - (1 + ahead) * max(nbytes) - 2 * max(nbytes))


def test_units_that_stay_are_spread_evenly():
    units = tuple(
        UnitRecipe(str(i), (Member(str(i), (64,), torch.float32, torch.float32, False),))
        for i in range(40)
    )
    offload = Offload(parameters="disk", disk="/somewhere")
    for kept in range(0, 36, 5):
        inference = Inference((kept + 3) * 256)
        recipe = with_residents(Recipe(units=units, offload=offload, inference=inference))
        at = [index for index, unit in enumerate(recipe.units) if unit.stays]
        assert len(at) in (kept, kept - 1)
        gaps = [after - before for before, after in pairwise(at)]
        assert not gaps or max(gaps) - min(gaps) <= 1


# bad input


def test_backward_through_a_streamed_module_is_an_error_that_names_it(tmp_path):
    module = plain()
    streamed(module, 0.3, f"disk:{tmp_path}")
    for _ in range(2):
        outputs = module(token_batches(1)[0])
        with pytest.raises(StateError, match="a backward through it"):
            outputs.sum().backward()


def test_an_optimizer_on_a_streamed_module_is_an_error_that_names_it(tmp_path):
    module = plain()
    streamed(module, 0.3, f"disk:{tmp_path}")
    early = torch.optim.AdamW(module.parameters())
    module(token_batches(1)[0])
    late = torch.optim.AdamW(module.parameters())  # of weights that have come to stay
    for optimizer in (early, late):
        with pytest.raises(StateError, match=r"onefold\.stream"):
            optimizer.step()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_budget_that_is_too_small_says_how_much_is_needed(world_size, tmp_path):
    def body(rank: int) -> int:
        module = plain()
        with pytest.raises(ConfigError, match="a budget of at least") as caught:
            onefold.stream(module, budget=BLOCK_NBYTES, offload=f"disk:{tmp_path}")
        needed = int(str(caught.value).split("at least ")[1].split(" ")[0].replace(",", ""))
        onefold.stream(plain(), budget=needed, offload=f"disk:{tmp_path}")
        with pytest.raises(ConfigError, match="a budget of at least"):
            onefold.stream(plain(), budget=needed - 1, offload=f"disk:{tmp_path}")
        return needed

    assert len(set(run_ranks(world_size, body))) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "2 apples"}, "budget to be a number above 0 with a unit"),
        ({"budget": 0}, "a budget in bytes, from 1 on"),
        ({"budget": True}, "a budget in bytes, from 1 on"),
        ({"rest": "int3"}, "rest to be None"),
        ({"offload": 7}, "offload to be None"),
        ({"offload": "gpu"}, "offload to be None"),
        ({"offload": "disk:"}, "a folder for the disk tier"),
    ],
)
def test_arguments_that_cannot_work_are_errors_that_name_them(options, message):
    module = plain()
    before = [parameter.requires_grad for parameter in module.parameters()]
    with pytest.raises(ConfigError, match=message):
        onefold.stream(module, **options)
    assert [parameter.requires_grad for parameter in module.parameters()] == before


def test_a_path_that_is_not_there_is_an_error_that_names_it(tmp_path):
    with pytest.raises(TierError, match="nowhere"):
        onefold.stream(plain(), offload=f"disk:{tmp_path}/nowhere", budget=1 << 20)


def test_a_streamed_module_is_not_streamed_or_sharded_again(tmp_path):
    module = plain()
    streamed(module, 0.3, f"disk:{tmp_path}")
    with pytest.raises(ConfigError, match="not sharded yet"):
        onefold.stream(module)
    with pytest.raises(ConfigError, match="not sharded yet"):
        onefold.shard(module)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_disk_that_fails_in_a_pass_is_a_named_error_on_every_rank(
    world_size, tmp_path, monkeypatch
):
    failing = [False]
    real = os.preadv

    def read(fd: int, buffers: Any, offset: int) -> int:
        if failing[0]:
            raise OSError(errno.EIO, "made up")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)

    def body(rank: int) -> None:
        module = plain()
        streamed(module, 0.0, f"disk:{tmp_path}")
        batch = token_batches(1)[0]
        with torch.no_grad():
            module(batch)
            failing[0] = True
            with pytest.raises(TierError, match="EIO"):
                for _ in range(2):
                    module(batch)

    run_ranks(world_size, body)


def test_a_disk_that_recovers_serves_the_next_pass(tmp_path, monkeypatch):
    resident, module = plain(), plain()
    streamed(module, 0.0, f"disk:{tmp_path}")
    batch = token_batches(1)[0]
    real = os.preadv

    def broken(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.EIO, "made up")

    with torch.no_grad():
        module(batch)
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(TierError, match="EIO"):
            for _ in range(2):
                module(batch)
        monkeypatch.setattr(os, "preadv", real)
        assert torch.equal(module(batch), resident(batch))


def test_tensors_without_numbers_pass_through(tmp_path):
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(BLOCKS)

        def forward(self, tokens: Tensor) -> dict[str, Any]:
            logits = self.model(tokens)
            return {"tokens": logits.argmax(-1), "logits": logits, "note": "a word"}

    module = seeded(Tokens).eval()
    streamed(module, 0.3, f"disk:{tmp_path}")
    found = module(token_batches(1)[0])
    assert not found["tokens"].requires_grad
    assert found["logits"].requires_grad  # as of the plain module, outside of no_grad
    assert found["note"] == "a word"


# weights that rest in the files of a checkpoint


def saved(folder: Any) -> nn.Module:
    """A plain module, whose weights lie in `folder`."""
    onefold.save_pretrained(onefold.shard(plain(), stage=3), folder)
    return plain()


def promised(folder: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.device("meta"):
        module = Model(BLOCKS).eval().to(dtype)
    return onefold.load_pretrained(module, folder)


@again_but("0.0-3", "0.3-2")
@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_weights_stream_from_a_checkpoint_without_a_copy(share, world_size, tmp_path):
    resident = saved(tmp_path / "saved")
    before = {path: path.read_bytes() for path in (tmp_path / "saved").iterdir()}

    def body(rank: int) -> None:
        module = promised(tmp_path / "saved")
        streamed(module, share, "disk")
        assert engine_of(module).ledger.usage[Kind.WEIGHT, "disk"].now > 0
        with torch.no_grad():
            for batch in token_batches(3):
                assert torch.equal(module(batch), resident(batch))
        with onefold.unsharded(module):
            for mine, other in zip(module.parameters(), resident.parameters(), strict=True):
                assert torch.equal(mine, other)
        onefold.save_pretrained(module, tmp_path / "again")

    run_ranks(world_size, body)
    assert {path: path.read_bytes() for path in (tmp_path / "saved").iterdir()} == before
    again = promised(tmp_path / "again")
    onefold.stream(again, offload="cpu")
    with torch.no_grad():
        batch = token_batches(1)[0]
        assert torch.equal(again(batch), resident(batch))


def test_an_edit_of_weights_in_files_is_an_error_that_names_it(tmp_path):
    saved(tmp_path / "saved")
    module = promised(tmp_path / "saved")
    streamed(module, 0.0, "disk")
    with torch.no_grad():
        module.blocks[1].up.weight.add_(1.0)
        with pytest.raises(StateError, match=r"'blocks\.1'.* as their files have them"):
            module(token_batches(1)[0])


def test_files_that_cannot_be_streamed_are_errors_that_name_them(tmp_path):
    saved(tmp_path / "saved")
    with pytest.raises(ConfigError, match="a folder for the disk tier"):
        onefold.stream(plain(), offload="disk")
    with pytest.raises(ConfigError, match="a folder for the disk tier"):
        onefold.stream(promised(tmp_path / "saved"), offload="disk", rest="int8")
    with pytest.raises(ConfigError, match=r"'embed\.weight' in the dtype of its file, float32"):
        onefold.stream(promised(tmp_path / "saved", torch.bfloat16), offload="disk", budget=1 << 20)


def test_a_file_that_is_cut_while_it_is_read_is_a_named_error(tmp_path):
    saved(tmp_path / "saved")
    module = promised(tmp_path / "saved")
    streamed(module, 0.0, "disk")
    batch = token_batches(1)[0]
    with torch.no_grad():
        module(batch)
        os.truncate(tmp_path / "saved" / "model.safetensors", 4096)
        with pytest.raises(TierError, match=r"model\.safetensors"):
            for _ in range(2):
                module(batch)


# tables and heads


class Wide(nn.Module):
    """Tables and a head of more bytes than a block, as of a large vocabulary."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(9001, 64)
        self.positions = nn.Embedding(5000, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))
        self.head = nn.Linear(64, 9001, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@again_but("1-False-disk:PATH", "2-False-disk", "3-True-disk:PATH")
@worlds_in_turn
@pytest.mark.parametrize("offload", ["disk:PATH", "disk"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rows_of_tables_alone_are_read_and_heads_come_in_row_blocks(
    world_size, tied, offload, tmp_path
):
    resident = seeded(Wide, tied).eval()
    if offload == "disk":
        onefold.save_pretrained(onefold.shard(seeded(Wide, tied), stage=3), tmp_path / "saved")

    def body(rank: int) -> tuple[int, int]:
        module = seeded(Wide, tied).eval()
        if offload == "disk":
            with torch.device("meta"):
                module = Wide(tied).eval()
            onefold.load_pretrained(module, tmp_path / "saved")
        tiers = offload.replace("PATH", str(tmp_path))
        onefold.stream(module, budget=3 << 20, offload=tiers)
        generator = torch.Generator().manual_seed(rank)
        read = 0
        with torch.no_grad():
            for length in (7, 7, 1, 0):  # the ranks' tokens differ
                tokens = torch.randint(0, 9001, (2, length), generator=generator)
                before = read_nbytes(module)
                found = module(tokens)
                read = max(read, read_nbytes(module) - before)
                assert torch.allclose(found, resident(tokens), rtol=1e-5, atol=1e-6)
            with pytest.raises(IndexError, match="out of range"):
                module(torch.tensor([[9001]]))
        return read, unsharded_peak(module)

    head = 9001 * 64 * 4
    for read, peak in run_ranks(world_size, body):
        rows = 21 * world_size * (2 * 4096 + 256 * 64)
        assert read <= (head + 5 * 20480 + head // 8) / world_size + rows
        assert peak <= 3 << 20


class Deep(nn.Module):
    """A table of fewer bytes than a block, as of a block of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, 640)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(640, 640), nn.Linear(640, 640)) for _ in range(3)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_table_smaller_than_a_block_needs_room_for_itself_alone(world_size, tmp_path):
    resident, offload = seeded(Deep).eval(), f"disk:{tmp_path}"

    def body(rank: int) -> tuple[int, int]:
        with pytest.raises(ConfigError, match="a budget of at least") as caught:
            onefold.stream(seeded(Deep), budget=1, offload=offload)
        needed = int(str(caught.value).split("at least ")[1].split(" ")[0].replace(",", ""))
        module = onefold.stream(seeded(Deep).eval(), budget=needed, offload=offload)
        tokens = torch.randint(0, 500, (2, 5), generator=torch.Generator().manual_seed(rank))
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(module(tokens), resident(tokens))
        return needed, unsharded_peak(module)

    table, block = nbytes_of(resident.embed), nbytes_of(resident.blocks[0])
    for needed, peak in run_ranks(world_size, body):
        assert 2 * (block + table) <= needed < 2.1 * (block + table)
        assert peak <= needed


def test_the_report_says_what_streams_and_what_rests_exact(tmp_path):
    module = plain(tied=True)
    streamed(module, 0.3, f"disk:{tmp_path}", rest="int8")
    found = onefold.report(module)
    lines = str(found).splitlines()
    assert lines[0] == "streamed for inference, rank 0 of 1, 0 steps"
    kept = sum(stays(module))
    assert lines[1].endswith(f"on disk; {kept} of {len(stays(module))} units stay in device memory")
    assert any("embed.weight stays exact: an embedding" in note for note in found.notes)
    assert "backwards" not in str(found)
