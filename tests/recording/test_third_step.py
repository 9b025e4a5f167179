"""A loop that a library drives records what a plain loop does: the same step, events and files."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.errors import ConfigError
from onefold.recording.third_step import ThirdStep
from tests.support.ranks import run_processes, run_ranks, seeded

FILES = ["index.html", "report.json", "trace.json"]


def events(folder: Path) -> tuple[Any, ...]:
    """The files of a report, the step that it records, and what was done for each unit."""
    report = json.loads((folder / "report.json").read_text())
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    spans = sorted(
        (event["cat"], event["name"])
        for event in trace
        if event["ph"] == "X" and not event["name"].startswith("wait")  # as time has it
    )
    counters = {name for event in trace if event["ph"] == "C" for name in event["args"]}
    (view,) = report["views"]
    about = report["about"]
    files = sorted(path.name for path in folder.iterdir())
    return files, view["recorded"], view["line"]["rank"], about, spans, counters


def plain(model: nn.Module, batches: list[Any], folder: Path, **choices: Any) -> None:
    """The plain loop of the guide."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    onefold.shard(model, optimizer, stage=3, **choices)
    for number, batch in enumerate(batches):
        if number == 2:
            with onefold.record(model) as recording:
                _step(model, optimizer, batch)
            if onefold.report(model).rank == 0:
                recording.save(folder)
        else:
            _step(model, optimizer, batch)
        optimizer.zero_grad()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    loss = model(**batch).loss if isinstance(batch, dict) else model(batch).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@pytest.mark.process
def test_a_callback_of_trainer_records_what_a_plain_loop_records(tmp_path):
    pytest.importorskip("transformers")
    from tests.support.hf_ranks import run_forks

    run_forks(2, _under_trainer, tmp_path)
    assert events(tmp_path / "trainer") == events(tmp_path / "plain")
    assert events(tmp_path / "plain")[0] == FILES


def _under_trainer(rank: int, folder: Path) -> None:
    from onefold.hf import Callback
    from tests.support.trainers import llama, rows, trainer_of

    model = seeded(llama)
    trainer = trainer_of(folder, Callback(stage=3, record=folder / "trainer"), model=model)
    trainer.train()
    data = rows()
    batch = {key: torch.stack([row[key] for row in data[:2]]) for key in data[0]}
    plain(seeded(llama), [batch] * 4, folder / "plain")


@pytest.mark.process
def test_a_strategy_of_lightning_records_what_a_plain_loop_records(tmp_path):
    pytest.importorskip("lightning.pytorch")
    run_processes(2, _under_lightning, tmp_path)
    assert events(tmp_path / "lightning") == events(tmp_path / "plain")


class Net(nn.Sequential):
    """Two blocks, which Lightning holds inside a module of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Linear(8, 8))


def _under_lightning(rank: int, folder: Path) -> None:
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0",
        MASTER_ADDR="localhost", MASTER_PORT="0", TORCHELASTIC_RUN_ID="test",
    )  # fmt: skip
    warnings.simplefilter("ignore")  # Lightning's own

    from onefold.lightning import Strategy

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = seeded(Net)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = seeded(Net)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    trainer = pl.Trainer(
        strategy=Strategy(stage=3, record=folder / "lightning"), devices=2, max_steps=4,
        gradient_clip_val=1.0, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Lit(), DataLoader(torch.ones(8, 8), batch_size=2))
    plain(Plain(), [torch.ones(2, 8)] * 4, folder / "plain")


def test_a_run_of_two_steps_records_its_last_and_a_failed_step_leaves_no_recording(tmp_path):
    def body(rank: int) -> None:
        model = seeded(Net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        onefold.shard(model, optimizer)
        recorded = ThirdStep(tmp_path / "out")
        for number in range(2):
            recorded.begin(model, number, 2)
            recorded.begin(model, number, 2)  # another micro-batch
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorded.end()
        again = ThirdStep(tmp_path / "failed")
        again.begin(model, 2, 3)
        again.close()
        with onefold.record(model):  # the other has ended
            model(torch.ones(2, 8)).sum().backward()
        again.end()
        assert not any((tmp_path / "failed").iterdir())

    run_ranks(2, body)
    assert events(tmp_path / "out")[:3] == (FILES, 2, 0)


def test_a_folder_that_cannot_be_written_to_is_refused_before_training(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="a directory to write a report to"):
        ThirdStep(tmp_path / "file")


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_a_folder_for_a_loop_of_fabric_is_refused_with_what_to_write_instead(tmp_path):
    fabric = pytest.importorskip("lightning.fabric")
    from onefold.lightning import Strategy

    with pytest.raises(ConfigError, match=r"(?s)no record= with Fabric.*onefold\.record"):
        fabric.Fabric(accelerator="cpu", devices=1, strategy=Strategy(record=tmp_path))
