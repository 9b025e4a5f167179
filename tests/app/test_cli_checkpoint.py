"""`onefold train --checkpoint`, `inspect` and `export`, as a user meets them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold as sharding
from onefold.app.cli.config_file import COPY
from onefold.app.cli.main import main
from tests.support import crash_loop
from tests.support.commands import begin, onefold
from tests.support.rows import again_but

SMALL = ["--batch", "2", "--seq", "16", "--ranks", "2", "--sample", "0"]
EIGHT_STEPS = ["--steps", "8", "--every", "2", "--keep", "2", "--json"]


def train(*flags: str) -> subprocess.CompletedProcess[str]:
    return onefold("train", *SMALL, *flags)


@dataclass(frozen=True)
class Saved:
    """What a run left in its folder, and what it told as JSON."""

    folder: Path
    told: dict[str, Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Saved:
    folder = tmp_path_factory.mktemp("cli") / "runs"
    done = train(*EIGHT_STEPS, "--checkpoint", str(folder))
    assert done.returncode == 0, done.stderr
    return Saved(folder, json.loads(done.stdout))


def test_a_run_that_was_cut_in_two_is_the_run_that_was_not(saved, tmp_path):
    """Same losses, step by step, as JSON has them; old checkpoints go."""
    whole = train("--steps", "8", "--json")
    losses = json.loads(whole.stdout)["losses"]
    assert saved.told["losses"] == losses
    assert sorted(os.listdir(saved.folder)) == [COPY, "step-00000006", "step-00000008"]
    # the schedule depends on the steps of the whole run, so the first half is stopped, not shorter
    folder = tmp_path / "runs"
    shutil.copytree(saved.folder, folder)
    (folder / "step-00000008" / "manifest.json").unlink()
    second = train(*EIGHT_STEPS, "--checkpoint", str(folder), "--resume")
    told = json.loads(second.stdout)
    assert told["first_step"] == 6
    assert told["losses"] == losses[6:]
    assert told["held_out"] == json.loads(whole.stdout)["held_out"]
    assert "passed over step-00000008" in second.stderr


def begin_and_stop(folder: Path, stop: signal.Signals, *flags: str) -> tuple[int, str]:
    """A run of two ranks that is stopped once it trains: the step it saved, what it told."""
    process = begin("train", *SMALL, "--steps", "150", "--checkpoint", str(folder), *flags)
    process.until(lambda told: " loss " in told)
    os.kill(process.pid, stop)
    done = process.end()
    assert done.returncode == 128 + stop
    saved = max(folder.iterdir())
    step = int(saved.name.removeprefix("step-"))
    assert f"stopped after step {step:,d}, saved as {saved}; --resume goes on there" in done.stderr
    return step, done.stdout


def test_a_signal_saves_within_the_step_and_resume_goes_on(tmp_path):
    """SIGTERM, and SIGINT to the run that resumes the first."""
    step, _ = begin_and_stop(tmp_path / "runs", signal.SIGTERM)
    later, told = begin_and_stop(tmp_path / "runs", signal.SIGINT, "--resume")
    assert f"goes on after step {step:,d}" in told
    assert later > step


def test_a_second_signal_stops_at_once(tmp_path):
    """Also a rank that waits for one that will never answer."""
    module = tmp_path / "sleepy.py"
    module.write_text(
        "import os, time, torch\nfrom onefold.planner.models.gpt import GPT, PRESETS\n"
        "class Sleepy(GPT):\n"
        "    def forward(self, tokens):\n"
        "        if self.training and os.environ['RANK'] == '1':\n"
        "            open('asleep', 'w').close()\n"
        "            time.sleep(600)\n"
        "        return super().forward(tokens)\n"
        "def build(): return Sleepy(PRESETS['tiny'], 16)\n"
    )
    job = ["train", *SMALL, "--model", "sleepy:build", "--checkpoint", "runs"]
    process = begin(*job, cwd=tmp_path)
    process.until(lambda _: (tmp_path / "asleep").exists())
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(1.5)  # sooner, it would be the same request once more
    assert process.poll() is None  # it waits for the step to end
    os.kill(process.pid, signal.SIGTERM)
    assert process.end().returncode == 143  # long before the rank would wake up
    assert os.listdir(tmp_path / "runs") == [COPY], "the folder was tried, and no step saved"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--every", "2"], "--checkpoint with --every"),
        (["--resume"], "--checkpoint with --resume"),
        (["--checkpoint", "file"], "to be a directory"),
        (["--checkpoint", "full"], "to be empty"),
        (["--checkpoint", "new", "--every", "0"], "--every to be a whole number of at least 1"),
        (["--checkpoint", "new", "--keep", "0"], "--keep to be a whole number of at least 1"),
    ],
)
def test_what_cannot_work_is_refused_before_ranks_start(tmp_path, monkeypatch, capfd, flags, told):
    (tmp_path / "file").write_text("")
    (tmp_path / "full" / "step-00000003").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    assert main(["train", *SMALL, *flags]) == 2
    assert told in capfd.readouterr().err


def test_inspect_shows_what_a_checkpoint_holds(saved, capsys):
    assert main(["inspect", str(saved.folder)]) == 0
    told = capsys.readouterr().out
    assert "step 8, saved at stage 3 by 2 ranks" in told
    assert "verified: no" in told
    lines = [line for line in told.splitlines() if "up.weight" in line]
    assert [line.split() for line in lines] == [["blocks.*.up.weight", "4", "512x128", "3,145,744"]]
    assert "saved of each parameter: weight, exp_avg, exp_avg_sq, step\n" in told
    assert "dtype of all weights: float32\n" in told
    assert "extra: step=8, windows={generator=uint8 [5056]}, scaler={}\n" in told
    assert main(["inspect", str(saved.folder), "--json", "--verify"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["world_size"], told["verified"]) == (8, 2, True)
    assert {row["kind"] for row in told["tensors"]} == {"weight", "exp_avg", "exp_avg_sq", "step"}
    assert told["optimizers"] == ["torch.optim.adamw.AdamW"]
    assert told["extra"]["step"] == 8


class Tied(nn.Module):
    """Three equal blocks and a wider one, between a table and the head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 6)])
        self.layers[3].bias.requires_grad_(False)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def test_inspect_counts_tied_weights_once_and_equal_blocks_in_one_line(tmp_path, capsys):
    wrapper = "a_wrapper_whose_name_takes_half_of_a_line"
    module = nn.ModuleDict({wrapper: Tied()})
    numel = sum(p.numel() for p in module.parameters())
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], momentum=0.9)
    sharding.shard(module, optimizer)
    sum(p.full_tensor().sum() for p in optimizer.param_groups[0]["params"]).backward()
    optimizer.step()
    sharding.save(tmp_path / "runs", module, optimizer)
    assert main(["inspect", str(tmp_path / "runs")]) == 0
    told = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in told.splitlines() if line}
    assert f"names begin with {wrapper}.\n" in told
    assert rows["embed.weight"] == ["1", "8x4", f"{32 * 8}"]
    assert rows["head.weight"] == ["1", "8x4", "as", "above"]
    assert f"head.weight: tied to {wrapper}.embed.weight, saved once" in " ".join(told.split())
    assert rows["layers.*.weight"] == ["3", "4x4", f"{3 * 16 * 8}"]
    assert rows["layers.3.weight"] == ["1", "6x4", f"{24 * 8}"]
    assert "saved of layers.3.bias: weight\n" in told
    assert rows["all"] == ["weights", "alone", "9", f"{4 * numel:,d}"]
    assert main(["inspect", str(tmp_path / "runs"), "--json"]) == 0
    tied = [t for t in json.loads(capsys.readouterr().out)["tensors"] if t["tied_to"]]
    assert [t["tied_to"] for t in tied] == [f"{wrapper}.embed.weight"]


def test_inspect_reads_what_export_writes(saved, tmp_path, capsys):
    assert main(["export", str(saved.folder), str(tmp_path / "out")]) == 0
    assert main(["inspect", str(saved.folder)]) == main(["inspect", str(tmp_path / "out")]) == 0
    sums = [s for s in capsys.readouterr().out.splitlines() if s.startswith("all weights alone")]
    assert len(sums) == 2
    assert sums[0].split() == sums[1].split()


def test_inspect_names_the_file_that_is_damaged(saved, capfd):
    data = saved.folder / "step-00000008" / "rank-00001.safetensors"
    before = data.read_bytes()
    data.write_bytes(before[:-100] + b"x" + before[-99:])
    try:
        assert main(["inspect", str(saved.folder)]) == 0  # sizes are right
        assert main(["inspect", str(saved.folder), "--verify"]) == 1
        assert "rank-00001.safetensors" in capfd.readouterr().err
    finally:
        data.write_bytes(before)


def test_export_writes_safetensors(saved, tmp_path, capsys):
    assert main(["export", str(saved.folder), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    assert "37 tensors" in capsys.readouterr().out
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 1_700_000
    flags = ["--max-shard-size", "500KB", "--json"]
    assert main(["export", str(saved.folder), str(tmp_path / "more"), *flags]) == 0
    assert len(json.loads(capsys.readouterr().out)["files"]) > 3


@again_but("flags2-with a unit")
@pytest.mark.parametrize(
    ("flags", "told"),
    [(["--dtype", "int3"], "--dtype to be fp32 or"), (["--max-shard-size", "9XB"], "with a unit"),
     (["--max-shard-size", "0MB"], "with a unit")],
)  # fmt: skip
def test_export_refuses_flags_it_does_not_know(saved, tmp_path, capsys, flags, told):
    assert main(["export", str(saved.folder), str(tmp_path / "out"), *flags]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.again(
    "tests/app/test_cli_checkpoint.py::test_a_run_that_was_cut_in_two_is_the_run_that_was_not"
)
@pytest.mark.process
@pytest.mark.timeout(180)
def test_killed_again_and_again_a_run_ends_as_if_it_never_was(tmp_path):
    """The short form of `python tests/support/crash_loop.py`, which kills 200 times."""
    hit = crash_loop.loop(tmp_path, kills=8, steps=12, seed=3, is_async=True)
    assert sum(hit.values()) == 8
