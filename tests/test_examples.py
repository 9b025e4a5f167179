"""The examples run as written, and one line is all that shards the plain script."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import torchrun

LIMIT_S = 110
EXAMPLES = Path(__file__).parent.parent / "examples"


def begin(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def output(begun: subprocess.Popen[str]) -> str:
    out, err = begun.communicate(timeout=LIMIT_S)
    assert begun.returncode == 0, err
    return out


def under_torchrun(script: str) -> str:
    done = torchrun(str(EXAMPLES / script), timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_sharded_script_differs_from_the_plain_one_in_one_line():
    plain = (EXAMPLES / "train_plain.py").read_text().splitlines()
    sharded = (EXAMPLES / "train_sharded.py").read_text().splitlines()
    changes = [line for line in difflib.ndiff(plain, sharded) if line[0] in "+-"]
    assert len(changes) == 1
    assert "onefold.shard(model, optimizer, stage=3)" in changes[0]


@pytest.mark.process
def test_the_sharded_script_reaches_the_loss_of_the_plain_one_alone_and_under_torchrun():
    plain, sharded = begin("train_plain.py"), begin("train_sharded.py")
    told = output(plain)
    assert told.startswith("loss ")
    assert output(sharded) == told
    both = under_torchrun("train_sharded.py")  # two ranks write at once: line ends change places
    assert both.replace("\n", "") == told.strip() * 2


@pytest.mark.process
def test_two_models_with_one_loss_train():
    alone = begin("gan.py")
    assert under_torchrun("gan.py") == output(alone)


@pytest.mark.process
def test_a_llama_from_its_config_trains_in_bf16():
    assert "stage 3, rank 0 of 2, 10 steps" in under_torchrun("llama.py")
