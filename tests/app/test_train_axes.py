"""`onefold train --tp --pp --cp`: the losses of one rank, whatever the axes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onefold.app.cli.main import main
from tests.support.commands import onefold
from tests.support.rows import again_but

STEPS, ROWS = 4, 16


def trained(cwd: Path, *flags: str, steps: int = STEPS) -> Any:
    given = ("--steps", str(steps), "--sample", "0", "--json")
    done = onefold("train", *flags, *given, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trained(tmp_path_factory.mktemp("alone"), "--ranks", "1", "--batch", str(ROWS), steps=2)


@again_but("--ranks 8 --tp 2 --pp 2 --cp 2 --accumulate 4 --batch 4 --recompute")
@pytest.mark.process
@pytest.mark.parametrize("flags", [
    "--ranks 2 --tp 2 --batch 16",
    "--ranks 3 --cp 3 --batch 16 --stage 2",  # which divides neither 64 positions nor 4 heads
    "--ranks 8 --tp 2 --pp 2 --cp 2 --accumulate 4 --batch 4 --recompute",
])  # fmt: skip
def test_losses_are_those_of_one_rank(flags, alone, tmp_path):
    found = trained(tmp_path, *flags.split(), steps=2)
    assert found["losses"] == pytest.approx(alone["losses"], rel=2e-6)
    assert found["held_out"] == pytest.approx(alone["held_out"], rel=2e-6)
    assert found["num_parameters"] == alone["num_parameters"]
    assert [each["rank"] for each in found["memory"]] == list(range(found["ranks"]))
    for each in found["memory"]:
        assert {kind: each["now"].get(kind, 0) for kind in each["expected"]} == each["expected"]


@pytest.mark.again(
    "tests/axes/test_pipeline_checkpoint.py::test_checkpoints_move_between_pipelines_ranks_of_data_and_one_process"
)
@pytest.mark.process
def test_a_run_goes_on_with_other_axes(tmp_path):
    flags = ("--checkpoint", str(tmp_path / "saved"), "--every", "2")
    first = trained(tmp_path, "--ranks", "4", "--tp", "2", "--pp", "2", "--accumulate", "4",
                    "--batch", "4", *flags)  # fmt: skip
    newest = tmp_path / "saved" / f"step-{STEPS:08d}"
    newest.rename(tmp_path / "last")
    second = trained(tmp_path, "--ranks", "2", "--batch", "8", "--resume", *flags)
    assert second["first_step"] == 2
    assert second["losses"] == pytest.approx(first["losses"][2:], rel=2e-6)
    newest.rename(tmp_path / "again")
    third = trained(tmp_path, "--ranks", "2", "--pp", "2", "--accumulate", "2", "--batch", "8",
                    "--resume", *flags)  # fmt: skip
    assert third["losses"] == pytest.approx(first["losses"][2:], rel=2e-6)


@pytest.mark.parametrize(("flags", "message"), [
    ("--ranks 4 --pp 3 --accumulate 3", "expected --tp 1 --pp 3 --cp 1 to divide the ranks"),
    ("--ranks 3 --tp 3", "expected --tp to divide the 4 heads of tiny, got 3"),
    ("--ranks 5 --pp 5 --accumulate 5", "expected --pp of at most 4, the blocks of tiny, got 5"),
    ("--ranks 2 --pp 2", "expected --accumulate of at least --pp 2"),
    ("--ranks 2 --pp 2 --accumulate 2 --compile", "expected no --compile with --pp"),
    ("--ranks 2 --cp 2 --seq 1", "expected --cp of at most --seq 1, got 2"),
    ("--ranks 6 --pp 2 --cp 3 --accumulate 2", "expected --cp to divide --seq 64 with --pp"),
    ("--ranks 2 --tp 2 --model tests.support.models:Model",
     "expected --model tiny, mini, small, large"),
    ("--tp 0", "expected --tp to be"),
    ("--tp two", "expected --tp to be"),
])  # fmt: skip
def test_axes_that_cannot_work_are_refused_before_any_rank_starts(flags, message, capsys):
    assert main(["train", *flags.split()]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
