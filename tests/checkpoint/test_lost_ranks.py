"""Law 5 inside `save` and `load`: a rank that is lost ends the others, by name and in time."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

import onefold
from onefold.checkpoint.contents import Contents
from onefold.checkpoint.rank_files import RankFiles
from onefold.checkpoint.source import Source
from tests.support.models import Model
from tests.support.ranks import run_processes, seeded, shorten_timeout
from tests.support.rows import again_but

TIMEOUT_S = 4

PLACES = {
    "save prepares": ("save", Contents, "from_models"),
    "save agrees": ("save", Contents, "facts"),
    "save writes": ("save", RankFiles, "write_files"),
    "load compares": ("load", Source, "rank_state"),
    "load reads": ("load", Source, "fill"),
}


def lose_a_rank(rank: int, place: str, how: str, folder: str) -> None:
    module = seeded(Model)
    optimizer = torch.optim.AdamW(module.parameters())
    onefold.shard(module, optimizer, stage=3)
    onefold.save(f"{folder}/first", module, optimizer)
    shorten_timeout(TIMEOUT_S)
    call, owner, name = PLACES[place]

    def leave(*_: object, **__: object) -> None:
        while how == "stops" and not all(os.path.exists(f"{folder}/{other}") for other in (0, 2)):
            time.sleep(0.05)  # it is there until they have given up
        os._exit(0)

    if rank == 1:
        setattr(owner, name, leave)
    start = time.monotonic()
    try:
        if call == "save":
            onefold.save(f"{folder}/second", module, optimizer)
        else:
            onefold.load(f"{folder}/first", module, optimizer)
    except onefold.WireError as error:
        Path(folder, str(rank)).write_text(f"{time.monotonic() - start:.1f}\n{error}")
    os._exit(0)


@again_but("save prepares-dies", "load compares-dies", "save writes-stops", "load reads-stops")
@pytest.mark.process
@pytest.mark.parametrize(("place", "how"), [
    *((place, "dies") for place in PLACES), ("save writes", "stops"), ("load reads", "stops"),
])  # fmt: skip
def test_a_rank_lost_in_save_or_load_is_a_wire_error_that_names_the_collective(
    place, how, tmp_path
):
    run_processes(3, lose_a_rank, place, how, str(tmp_path))
    for rank in (0, 2):
        seconds, *message = (tmp_path / str(rank)).read_text().splitlines()
        text = "\n".join(message)
        assert float(seconds) < TIMEOUT_S + 60  # a busy machine is late, a hang later
        assert "a message to all ranks to complete" in text, text
        assert "hint:" in text, text
        if how == "stops":
            assert f"rank {rank}: onefold.{place.split()[0]}" in text, text
            assert "rank 1: no collective" in text, text
    assert not (tmp_path / "second").exists()
