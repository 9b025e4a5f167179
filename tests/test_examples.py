"""The examples run as written, and one line is all that shards the plain script."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from tests.commands import script, torchrun

EXAMPLES = Path(__file__).parent.parent / "examples"


def alone(name: str) -> str:
    done = script(EXAMPLES / name)
    assert done.returncode == 0, done.stderr
    return done.stdout


def under_torchrun(name: str, *, forks_ranks: bool = True) -> str:
    done = torchrun(str(EXAMPLES / name), forks_ranks=forks_ranks)
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
    """Under torchrun here in processes of their own from the start, as a user's are."""
    told = alone("train_plain.py")
    assert told.startswith("loss ")
    assert alone("train_sharded.py") == told
    both = under_torchrun("train_sharded.py", forks_ranks=False)
    assert both.replace("\n", "") == told.strip() * 2  # two ranks write: line ends change places


@pytest.mark.process
def test_two_models_with_one_loss_train():
    assert under_torchrun("gan.py") == alone("gan.py")


@pytest.mark.process
def test_a_llama_from_its_config_trains_in_bf16():
    assert "stage 3, rank 0 of 2, 10 steps" in under_torchrun("llama.py")
