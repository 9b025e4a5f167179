"""Ranks of drawn programs as gloo processes, with what each one returned or how it ended."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support.forking import await_ended_threads
from tests.support.programs.verdicts import Ended, of_exception

TIMEOUT_S = 20.0


def run_gloo_ranks(world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """`run_ranks` for processes; raises `Ended` with the verdict of the first rank that failed."""
    await_ended_threads()
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _process, (world_size, folder, body, args), world_size, join=False, start_method="fork"
        )
        assert context is not None
        while not context.join(timeout=1):
            pass
        results = [torch.load(f"{folder}/{r}", weights_only=False) for r in range(world_size)]
    failed = [verdict for verdict, _ in results if verdict is not None]
    if failed:
        first = min(failed, key=lambda verdict: "WireError" in verdict.text)
        raise Ended(first, [verdict for verdict, _ in results])
    return [notes for _, notes in results]


def _process(rank: int, world_size: int, folder: str, body: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    url, timeout = f"file://{folder}/store", timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", url, timeout, rank=rank, world_size=world_size)
    try:
        answer = (None, body(rank, *args))
    except Exception as error:
        answer = (of_exception(error), None)
    torch.save(answer, f"{folder}/{rank}")
    if answer[0] is None:
        dist.barrier()
        dist.destroy_process_group()
