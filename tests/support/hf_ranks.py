"""Ranks for Hugging Face libraries, which keep state in globals: forks of this process."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.commands import forget_accelerate
from tests.support.ports import free_port
from tests.support.ranks import run_processes


def run_forks(world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `body(rank, *args)` in processes that have the variables of a launcher.

    Returns their results, in rank order.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_processes(world_size, _fork, world_size, free_port(), Path(folder), body, args)
        return [
            torch.load(Path(folder) / f"{rank}.pt", weights_only=False)
            for rank in range(world_size)
        ]


def _fork(
    rank: int, world_size: int, port: int, folder: Path, body: Callable[..., Any], args: Any
) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update(MASTER_ADDR="localhost", LOCAL_WORLD_SIZE=str(world_size))
    warnings.simplefilter("ignore")  # of libraries, in a process of its own
    forget_accelerate()
    torch.save(body(rank, *args), folder / f"{rank}.pt")
