"""A run of DeepSpeed goes on: weights, optimizer state and `extra` of folders that it wrote.

`tests/support/deepspeed_runs.py` made the folders, with the losses of the peer that goes on.
"""

from __future__ import annotations

import json
import threading
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import onefold
from onefold.checkpoint.listing import Wanted
from onefold.checkpoint.offline import export
from onefold.foreign import PEERS
from onefold.foreign.deepspeed_export import export_deepspeed
from onefold.foreign.trees import _TreeFile
from tests.support.deepspeed_runs import NUM_NEXT, NUM_STEPS, built, rows_of
from tests.support.ranks import run_ranks

DATA = Path(__file__).parent / "data"
FOLDERS = (
    "stage1", "stage2", "stage3", "stage1-bf16", "stage3-bf16",
    "universal-stage1", "universal-stage3",
)  # fmt: skip


def wanted_of(name: str) -> list[float]:
    """The losses of DeepSpeed, which went on from a folder."""
    return json.loads((DATA / f"deepspeed-{name}" / "next.json").read_text())


def go_on(
    rank: int, nets: list, folder: Path, num_ranks: int, options: dict
) -> tuple[list[float], dict]:
    """Load a folder into a module of other weights, and train."""
    net, optimizer = nets[rank]
    onefold.shard(net, optimizer, **options)
    extra = onefold.load(folder, net, optimizer)
    return train(rank, net, optimizer, num_ranks, NUM_STEPS, NUM_NEXT), extra


def train(
    rank: int, net: nn.Module, optimizer: torch.optim.Optimizer, num_ranks: int, first: int,
    number: int,
) -> list[float]:  # fmt: skip
    """Train as DeepSpeed does, which clips at 1.0 unless its config says otherwise."""
    losses = []
    for step in range(first, first + number):
        rows, labels = rows_of(step, rank, num_ranks)
        loss = nn.functional.cross_entropy(net(rows), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses_on(num_ranks: int, folder: Path, **options: object) -> tuple[list[float], dict]:
    """The mean losses of ranks that go on from a folder, and the `extra`."""
    nets = [built(seed=1) for _ in range(num_ranks)]
    results = run_ranks(num_ranks, go_on, nets, folder, num_ranks, options)
    by_rank = torch.tensor([losses for losses, _ in results], dtype=torch.float64)
    return by_rank.mean(0).tolist(), results[0][1]


@pytest.mark.parametrize("name", FOLDERS)
def test_the_next_losses_are_those_of_deepspeed(name):
    precision = "bf16" if name.endswith("bf16") else "fp32"
    bound = 2e-2 if precision == "bf16" else 1e-6
    for num_ranks, stage, offload in product((2, 3), (1, 3), (None, "optimizer")):
        losses, _ = losses_on(
            num_ranks, DATA / f"deepspeed-{name}" / "t", stage=stage, precision=precision,
            offload=offload,
        )  # fmt: skip
        assert losses == pytest.approx(wanted_of(name), rel=bound), (num_ranks, stage, offload)


@pytest.mark.parametrize("name", ["stage1", "stage3"])
def test_its_scheduler_steps_and_client_state_come_back(name):
    _, extra = losses_on(2, DATA / f"deepspeed-{name}" / "t", stage=3)
    assert extra["lr_scheduler"]["last_epoch"] == extra["global_steps"] == NUM_STEPS
    assert extra["epoch"] == 7


def save_and_go_on(rank: int, nets: list, folder: Path) -> list[float]:
    net, optimizer = nets[rank]
    onefold.shard(net, optimizer, stage=3)
    train(rank, net, optimizer, 2, 0, NUM_STEPS)
    onefold.save(folder, net, optimizer, extra={"lr_scheduler": {"last_epoch": 3}, "epoch": 7})
    return train(rank, net, optimizer, 2, NUM_STEPS, NUM_NEXT)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A universal folder that Onefold wrote of its own run, and the losses that follow."""
    folder = tmp_path_factory.mktemp("exported")
    results = run_ranks(2, save_and_go_on, [built() for _ in range(2)], folder / "own")
    export_deepspeed(folder / "own", folder / "t")
    return folder / "t", torch.tensor(results, dtype=torch.float64).mean(0).tolist()


def test_a_universal_folder_of_ours_goes_on_where_we_stopped(exported):
    folder, wanted = exported
    losses, extra = losses_on(3, folder, stage=1)
    assert losses == pytest.approx(wanted, rel=1e-6)
    assert (extra["lr_scheduler"], extra["epoch"]) == ({"last_epoch": 3}, 7)
    assert extra["global_steps"] == NUM_STEPS


def test_each_rank_reads_its_rows_and_no_more_than_one_parameter(monkeypatch):
    read: dict[int, int] = {}
    whole = _TreeFile.read_elements

    def counted(self: _TreeFile, wanted: Wanted, out: memoryview) -> None:
        ident = threading.get_ident()
        read[ident] = read.get(ident, 0) + len(out)
        whole(self, wanted, out)

    monkeypatch.setattr(_TreeFile, "read_elements", counted)
    losses_on(3, DATA / "deepspeed-stage3" / "t", stage=3)
    net, _ = built()
    numels = [p.numel() for p in net.parameters()]
    states = 3 * 4  # bytes of a weight and two moments
    rows = sum(numels) * states / 3
    assert len(read) == 3
    assert max(read.values()) <= rows + max(numels) * states


def test_a_folder_of_deepspeed_is_exported_for_other_programs(tmp_path):
    """Tied weights too, at which DeepSpeed's own export as safetensors fails."""
    export(DATA / "deepspeed-stage3" / "t", tmp_path / "hf", PEERS)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    model = torch.load(DATA / "deepspeed-stage1" / "t" / "mp_rank_00_model_states.pt")["module"]
    assert {*weights} == {*model} - {"head.weight"}
    assert all(torch.allclose(model[name], value, atol=1e-6) for name, value in weights.items())
    export_deepspeed(DATA / "deepspeed-stage3" / "t", tmp_path / "back")
    losses, extra = losses_on(2, tmp_path / "back", stage=2)
    assert losses == pytest.approx(wanted_of("stage3"), rel=1e-6)
    assert extra["epoch"] == 7
