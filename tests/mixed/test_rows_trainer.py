"""Trainer's own token counts are exact for uneven rows."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import Trainer, default_data_collator

import onefold
import onefold.hf
from tests.support.trainers import logs, on_ranks, trainer_of, weights

pytestmark = pytest.mark.process


class Uneven(Trainer):
    """Deals rows 3 : 1, or 2 : 1 : 1."""

    def get_train_dataloader(self):
        world = dist.get_world_size() if dist.is_initialized() else 1
        shares = {1: None, 2: [3, 1], 3: [2, 1, 1]}[world]
        sampler = onefold.mixed.RowSampler(self.train_dataset, 4, shares=shares, seed=2)
        return DataLoader(
            self.train_dataset, batch_sampler=sampler, collate_fn=default_data_collator
        )


class Prepared(Uneven):
    """Lets Accelerate deal them once more, as Trainer's own loader does."""

    def get_train_dataloader(self):
        return self.accelerator.prepare(super().get_train_dataloader())


def _train(rank: int, folder: Path, name: str) -> None:
    stage = 0 if name == "alone" else 3
    kind = Prepared if name == "prepared" else Uneven
    trainer = trainer_of(folder, onefold.hf.Callback(stage=stage), kind=kind, optim="sgd")
    trainer.train()
    found = logs(trainer), weights(trainer.model)
    if rank == 0:
        torch.save(found, folder / name)


def test_a_trainer_with_uneven_rows_trains_as_one_process(tmp_path):
    on_ranks(1, _train, tmp_path, "alone")
    on_ranks(2, _train, tmp_path, "uneven")
    on_ranks(3, _train, tmp_path, "prepared")
    wanted = torch.load(tmp_path / "alone")
    for found in (torch.load(tmp_path / name) for name in ("uneven", "prepared")):
        assert len(found[0]) == 4
        torch.testing.assert_close(
            torch.tensor(found[0]), torch.tensor(wanted[0]), rtol=2e-6, atol=1e-6
        )
        for name, weight in wanted[1].items():
            torch.testing.assert_close(found[1][name], weight, rtol=0, atol=2e-5, msg=name)
