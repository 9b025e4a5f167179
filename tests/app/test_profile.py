"""`--profile DIR`: three steps of each rank in torch.profiler, and links to them on the page."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from onefold.app.cli.console import FinetuneLines, Lines
from onefold.app.tools.step_profile import StepProfile
from onefold.app.train.job import Job
from onefold.app.train.loop import preflight, train
from onefold.app.train.run_record import Progress, TrainObserver
from onefold.errors import ConfigError
from onefold.recording.page import read_report
from onefold.text import WIDTH
from onefold.tier import accelerator
from onefold.wire.collectives import Group
from onefold.wire.world import World

CPU = torch.device("cpu")


class Notes(TrainObserver):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.progress: list[Progress] = []

    def noted(self, note: str) -> None:
        self.notes.append(note)

    def stepped(self, progress: Progress) -> None:
        self.progress.append(progress)


def steps_in(path: Path) -> int:
    """Steps of the optimizer in a trace."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sum(event.get("name") == "Optimizer.step#AdamW.step" for event in events)


@pytest.fixture
def _nothing_was_compiled(monkeypatch):
    from torch._dynamo.utils import counters

    monkeypatch.setitem(counters, "frames", type(counters["frames"])())


@pytest.mark.usefixtures("_nothing_was_compiled")
def test_a_run_profiles_three_steps_counts_flops_and_its_page_links_to_the_trace(tmp_path):
    for number in range(40):
        (tmp_path / f"file{number}.txt").write_text(f"This is file number {number}.\n" * 3)
    out = tmp_path / "out"
    job = Job(data=str(tmp_path), steps=7, seq=16, rows=2, sample=0, report=str(out),
              profile=str(out))  # fmt: skip
    observer = Notes()
    train(job, World(Group.from_handle(None), CPU), observer)
    (note,) = observer.notes
    assert "steps 4 to 6" in note
    assert "no memory snapshot: only GPUs have one" in note
    assert steps_in(out / "profile-rank0.json.gz") == 3
    assert '"profiles":["profile-rank0.json.gz"]' in (out / "index.html").read_text()
    flops = read_report(out).rates["model_flops_per_s"]
    assert observer.progress[-1].flops_per_s == pytest.approx(flops)
    assert flops > 0


def test_a_page_without_profiles_has_no_link(tmp_path):
    from onefold.recording.page import write_report
    from tests.support import made_up

    write_report(tmp_path, made_up.report(), [made_up.record()])
    assert '"profiles":[]' in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize(
    ("first", "steps", "traced"),
    [(0, 1, [0]), (0, 2, [0, 1]), (0, 4, [1, 2, 3]), (0, 9, [3, 4, 5]), (5, 9, [6, 7, 8])],
)
def test_runs_of_any_length_are_traced(first, steps, traced, tmp_path, monkeypatch):
    seen = []
    profile = StepProfile(str(tmp_path), rank=3, device=CPU, first=first, steps=steps)
    for step in range(first, steps):
        profile.begin(step)
        if profile._running is not None:
            seen.append(step)
        profile.end(step)
    assert seen == traced
    assert [path.name for path in tmp_path.iterdir()] == ["profile-rank3.json.gz"]


def test_on_a_gpu_a_snapshot_of_memory_is_written_and_recording_ends(monkeypatch):
    calls: list[Any] = []

    class History:
        def _record_memory_history(self, *, device: Any, **options: Any) -> None:
            calls.append(("record", options))

        def _dump_snapshot(self, path: str) -> None:
            calls.append(("dump", path))

    monkeypatch.setattr(torch.cuda, "memory", History())
    write = accelerator.record_memory(torch.device("cuda", 0))
    assert write is not None
    write("out.pickle")
    assert calls == [("record", {}), ("dump", "out.pickle"), ("record", {"enabled": None})]
    assert accelerator.record_memory(CPU) is None


def test_a_folder_that_cannot_be_written_to_is_refused_before_training(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="a directory to write a profile to"):
        preflight(Job(profile=str(tmp_path / "file")), 1)


@pytest.mark.parametrize(
    ("flops", "mfu", "word"),
    [(98.76e12, 0.0, "98.8 TFLOP/s"), (400e12, 0.404, "40.4 % MFU"), (0.0, 0.0, "")],
)
def test_lines_of_progress_tell_the_work_within_80_columns(flops, mfu, word):
    stream = io.StringIO()
    lines = Lines(stream)
    lines._steps = 10_000
    lines.stepped(Progress(10_000, 5.545, 1_234_567.0, 3600.0, flops, mfu))
    tuning = FinetuneLines(stream)
    tuning.begin(10_000)
    numbers = {"tokens_per_s": 123_456.0, "peak_bytes": 123 << 30, "model_flops_per_s": flops}
    numbers |= {"mfu": mfu} if mfu else {}
    tuning.advanced(10_000, 12.345, {f"onefold_{name}": n for name, n in numbers.items()})
    for line in stream.getvalue().splitlines():
        assert word in line
        assert ("FLOP" in line or "MFU" in line) == bool(word)
        assert len(line) <= WIDTH
