"""How ranks end: by an error on every rank that names the rank that is gone, never by SIGABRT."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from tests.support.fresh import run_scripts
from tests.support.ports import free_port
from tests.support.ranks import run_processes, seeded

pytestmark = pytest.mark.process

KILLS = Path(__file__).parents[2] / "benchmarks" / "kills.py"
GONE_S = 5.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
"""Five seconds on a machine that is not busy."""


class Routed(nn.Module):
    """The data choose one of three experts, no two of one size."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 6)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 7**n), nn.Linear(7**n, 6)) for n in (1, 2, 3)
        )
        self.head = nn.Linear(6, 6)

    def forward(self, rows):
        expert = self.experts[int(rows[0, 0])]
        return self.head(rows + expert(self.gate(rows)))


def rows_for(expert):
    return torch.full((4, 6), float(expert))


def start(folder, **options):
    module = seeded(Routed)
    optimizer = torch.optim.AdamW(module.parameters())
    units = [module.gate, *module.experts, module.head]
    onefold.shard(module, optimizer, stage=3, units=units, timeout=60, **options)
    return module, optimizer


def step(module, optimizer, *experts):
    for expert in experts:
        module(rows_for(expert)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def other_experts(rank, module, optimizer, folder):
    step(module, optimizer, rank)


def other_experts_later(rank, module, optimizer, folder):
    step(module, optimizer, 0)
    step(module, optimizer, 1)
    step(module, optimizer, 0)
    step(module, optimizer, int(rank == 2))  # others repeat: they send before they compare


def other_experts_in_layered_order(rank, module, optimizer, folder):
    batches = [rows_for(0), rows_for(rank), rows_for(2)]
    onefold.accumulate_layers(module, batches, lambda out, _: out.pow(2).mean())


def other_calls(rank, module, optimizer, folder):
    if rank == 0:
        onefold.save(f"{folder}/checkpoint", module, optimizer)
    else:
        with onefold.unsharded(module):
            pass


def other_evaluations(rank, module, optimizer, folder):
    with torch.no_grad():
        module(rows_for(rank))


DIFFERENCES = {
    other_experts: "gather of unit 'experts.",
    other_experts_later: "rank 2: forward, gather of unit '",
    other_experts_in_layered_order: "of unit 'experts.",
    other_calls: "rank 0: onefold.save",
    other_evaluations: "evaluation forward, gather of unit 'experts.",
}


def differ(rank, folder):
    for body, words in DIFFERENCES.items():
        module, optimizer = start(folder)
        with pytest.raises(onefold.WireError) as raised:
            body(rank, module, optimizer, folder)
        said = [""] * 3
        dist.all_gather_object(said, str(raised.value))
        if not all("expected all ranks in the same collective" in each for each in said):
            raise AssertionError(f"{body.__name__}: {said}")
        (listed,) = [each for each in said if "ranks that wait for one another" in each]
        if words not in listed:
            raise AssertionError(f"{body.__name__}: {listed}")
        begun = time.monotonic()
        del module, optimizer, raised
        gc.collect()
        assert time.monotonic() - begun < GONE_S, body
        dist.barrier()


def test_ranks_that_begin_different_messages_raise_and_let_go_at_once(tmp_path):
    """gloo ends a process in which a longer message arrives than it waits for."""
    run_processes(3, differ, str(tmp_path))


RAISES = """
import json, os, sys, time
import torch, onefold
import torch.distributed.checkpoint as dcp
folder, ranks = {folder!r}, dict()
for rank in range(3):
    pid = os.fork()
    if pid == 0:
        break
    ranks[pid] = rank
else:
    ends = [0.0, 0.0, 0.0]
    while ranks:
        ends[ranks.pop(os.wait()[0])] = time.monotonic()
    print(json.dumps(ends))
    sys.exit()
os.environ.update(RANK=str(rank), WORLD_SIZE="3", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="3")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="{port}")
os.dup2(os.open(f"{{folder}}/{{rank}}", os.O_CREAT | os.O_WRONLY), 2)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
onefold.shard(model, optimizer, stage=3)
for step in range(3):
    loss = model(torch.randn(2, 8)).sum()
    if rank == 1 and step == 2:
        raise ValueError("a bad row")
    if rank == 2 and step == 2:
        dcp.save(model.state_dict(), checkpoint_id=f"{{folder}}/dcp")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_rank_that_raises_is_named_by_the_others_and_all_are_gone_in_seconds(tmp_path):
    """Its peers wait for its backward; gloo's destructor would wait for theirs."""
    (done,) = run_scripts([RAISES.format(folder=str(tmp_path), port=free_port())])
    ends = json.loads(done.stdout)
    assert "ValueError: a bad row" in (tmp_path / "1").read_text()
    text = (tmp_path / "0").read_text()
    error = next(line for line in text.splitlines() if "Error: " in line)
    assert "of unit '" in error, text
    assert error.endswith("to complete, got rank 1 ended: ValueError: a bad row"), text
    text = (tmp_path / "2").read_text()  # torch waited for rank 0, whose store is gone, or not yet
    assert re.search("^onefold: rank [01] ended", text, re.M), text
    assert max(ends) - ends[1] < 2 * GONE_S, text


@pytest.mark.again(
    "tests/laws/test_processes.py::test_a_lost_rank_ends_the_others_in_time_and_names_unit_and_collective"
)
def test_a_rank_killed_at_work_is_named_by_the_others():
    """The short form of `python benchmarks/kills.py`, which kills 100 times."""
    command = [sys.executable, str(KILLS), "--kills", "3", "--works"]
    done = subprocess.run([*command, "generate", "disk", "load"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'survivors': 6, 'unnamed': 0" in done.stdout
