"""The examples run as written, and one line is all that shards the plain script."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def output(*command: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def torchrun(script: str, ranks: int = 2) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return output(*launcher, f"--nproc-per-node={ranks}", str(EXAMPLES / script))


def test_the_sharded_script_differs_from_the_plain_one_in_one_line():
    plain = (EXAMPLES / "train_plain.py").read_text().splitlines()
    sharded = (EXAMPLES / "train_sharded.py").read_text().splitlines()
    changes = [line for line in difflib.ndiff(plain, sharded) if line[0] in "+-"]
    assert len(changes) == 1
    assert "onefold.shard(model, optimizer, stage=3)" in changes[0]


@pytest.mark.process
def test_the_sharded_script_reaches_the_loss_of_the_plain_one_alone_and_under_torchrun():
    plain = output(sys.executable, str(EXAMPLES / "train_plain.py"))
    assert plain.startswith("loss ")
    assert output(sys.executable, str(EXAMPLES / "train_sharded.py")) == plain
    both = torchrun("train_sharded.py")  # two ranks write at once: line ends may change places
    assert both.replace("\n", "") == plain.strip() * 2


@pytest.mark.process
def test_two_models_with_one_loss_train():
    assert torchrun("gan.py") == output(sys.executable, str(EXAMPLES / "gan.py"))


@pytest.mark.process
def test_a_llama_from_its_config_trains_in_bf16():
    assert "stage 3, rank 0 of 2, 10 steps" in torchrun("llama.py")
