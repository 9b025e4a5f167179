"""`onefold train --offload`: what a user sees, and what is refused before any rank starts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from onefold.app.train.job import Job
from tests.support.commands import onefold

SMALL = ("--steps", "3", "--batch", "2", "--seq", "16", "--sample", "0")


@pytest.mark.again(
    "tests/engine/test_offload.py::test_optimizer_states_in_any_tier_give_the_bits_of_the_device"
)
@pytest.mark.process
def test_states_on_disk_train_as_on_the_device_and_are_told_where_they_rest(tmp_path: Path):
    found = []
    for flags in ((), ("--offload", f"disk:{tmp_path}", "--recompute")):
        done = onefold("train", *SMALL, "--clip", "0", *flags, "--json")
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    device, disk = found
    assert disk["losses"] == device["losses"]
    assert disk["held_out"] == device["held_out"]
    assert disk["text"] == ""
    for memory in disk["memory"]:
        assert memory["tiers"]["weight"] == memory["tiers"]["optimizer"] == ["disk"]
        assert memory["now"].get("grad", 0) == 0
        assert {k: memory["now"].get(k, 0) for k in memory["expected"]} == memory["expected"]
        assert memory["resident_peak"] > 0
    assert "bytes on disk; 100 % of the optimizer state is off the device" in disk["offload"]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--offload", "disk"), "a folder"), (("--offload", "dsk:/tmp"), "offload to be"),
        (("--offload", "cpu", "--stage", "2"), "stage=3"), (("--fraction", "0.5"), "--offload"),
        (("--offload", "optimizer", "--fraction", "2"), "--fraction"),
        (("--sample", "-1"), "--sample"),
    ],
)  # fmt: skip
def test_what_cannot_be_offloaded_is_one_line_and_exit_2(flags, words):
    done = onefold("train", *SMALL, *flags)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "hint:" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.process
def test_a_folder_that_is_not_there_is_told_by_every_rank_and_exits_with_an_error(tmp_path: Path):
    done = onefold("train", *SMALL, "--offload", f"disk:{tmp_path}/none")
    assert done.returncode != 0
    assert "nothing there" in done.stderr
    assert "Traceback" not in done.stderr


def test_units_are_stepped_in_backward_only_where_nothing_looks_at_all_gradients():
    assert Job(offload="cpu", clip=0).steps_in_backward
    assert not Job(offload="cpu", clip=1.0).steps_in_backward
    assert not Job(offload="cpu", clip=0, precision="fp16").steps_in_backward
    assert not Job(clip=0).steps_in_backward
