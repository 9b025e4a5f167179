"""Measure how much of this machine's rates the engine reaches, next to the rates themselves."""

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onefold
from onefold.compose.tiers import is_memory
from onefold.config import Offload
from onefold.engine.blocks import BLOCK_NUMEL
from onefold.engine.registry import engine_of
from onefold.errors import ConfigError
from onefold.fit import rates
from onefold.fit.rates import ADAM_NBYTES, Rate, RateRow, in_rounds
from onefold.tier import accelerator
from onefold.tier.disk import DiskStore, SwapFile
from onefold.tier.host import cores_of, versions
from onefold.wire.world import World

ROW = 1024
"""Elements in a row of a measured weight: one page of fp32, so no block is padded."""

UNIT_ROWS = 4 * BLOCK_NUMEL // ROW
"""Rows of a stepped unit. As in training, blocks of the next unit follow while this one ends."""

STATE_NBYTES = 12
"""Bytes on disk per parameter: fp32 weight, exp_avg, exp_avg_sq. A step reads and writes all."""

MOVED_NBYTES = {
    "adam": ADAM_NBYTES, "step_fp32": ADAM_NBYTES, "step_bf16": ADAM_NBYTES,
    "step": 2 * STATE_NBYTES,
}  # fmt: skip
"""Bytes that a step moves per parameter."""

CEILINGS = {
    "step_fp32": "adam", "step_bf16": "adam", "step": "mixed",
    "gather": "exchange", "reduce_scatter": "exchange",
}  # fmt: skip
"""The rate that bounds another."""

LR = 1e-9
"""A learning rate so small that any number of steps leaves the weights in place."""

Measured = dict[str, Any]
"""A result of `onefold bench`, as its JSON."""


class Stepped:
    """A module whose optimizer the engine steps off the device, as in training."""

    def __init__(self, nbytes: int, dtype: torch.dtype, offload: Offload | str) -> None:
        """`nbytes`: of its optimizer's state, at least one row."""
        rows = max(1, nbytes // STATE_NBYTES // ROW)
        self.numel = rows * ROW
        self.module = nn.ModuleList(
            nn.Linear(ROW, min(UNIT_ROWS, rows - start), bias=False, dtype=dtype)
            for start in range(0, rows, UNIT_ROWS)
        )
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=LR)
        with warnings.catch_warnings():  # a note of the result says the same
            warnings.filterwarnings("ignore", message="the disk tier at .* lies in memory")
            onefold.shard(self.module, self.optimizer, units=list(self.module), offload=offload)
        for parameter in self.module.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.units = engine_of(self.module).units

    def row(self, name: str) -> RateRow:
        """Return the row of its step."""
        nbytes = MOVED_NBYTES[name] * self.numel
        return RateRow(name, nbytes, self.optimizer.step, finish=self.await_steps)

    def await_steps(self) -> None:
        """Wait until every unit is stepped and back in its tier. Raises `TierError`."""
        for unit in self.units:
            unit.wait_step()


def measure_cpu(seconds: float) -> Measured:
    """Measure memory, products, AdamW and the host, and the engine's steps on the CPU."""
    cpu, nbytes = torch.device("cpu"), rates.beyond_caches()
    wide = Stepped(nbytes, torch.float32, "optimizer")
    narrow = Stepped(nbytes, torch.bfloat16, "optimizer")
    table = [
        rates.copy(cpu), rates.products(cpu), rates.launch(), rates.call(),
        rates.adam(cores_of(0, 1)), wide.row("step_fp32"), narrow.row("step_bf16"),
    ]  # fmt: skip
    return _result("cpu", in_rounds(table, seconds))


def measure_disk(paths: Sequence[Path], seconds: float) -> Measured:
    """Measure folders. The files there have no names: they vanish with this process.

    Raises `TierError` for a folder that cannot be written to.
    """
    tier = Offload(optimizer="disk", parameters="disk", disk=list(paths))
    stepped = Stepped(rates.DISK_NBYTES, torch.float32, tier)
    store = stepped.units[0].context.tiers.state
    assert isinstance(store, DiskStore), "the optimizer's states are on disk"
    files = store.files
    for _ in range(2):  # blocks that no step has written read as zeros without a request
        stepped.optimizer.step()
        stepped.await_steps()
    for file in files:
        os.fsync(file.fd)  # the first weights went through the page cache
    table = [rates.blocks_of(files, name) for name in ("read", "write", "mixed")]
    table += [stepped.row("step"), rates.durable(paths[0])]
    result = _result("disk", in_rounds(table, seconds))
    return {**result, "paths": list(map(str, paths)), "notes": list(_path_notes(files))}


def _path_notes(files: Sequence[SwapFile]) -> Iterator[str]:
    for file in files:
        if is_memory(file.path):
            yield f"{file.path} lies in memory (tmpfs): name a folder on a disk with --path"
        elif not file.is_direct:
            yield f"{file.path} refuses O_DIRECT: rates may be those of the page cache"


def measure_link(world: World, seconds: float) -> Measured:
    """Measure gathers and reductions as units do them; a collective.

    A rate counts the bytes that one rank receives. Its ceiling is a bare exchange of as many bytes.
    """
    group = world.group
    if world.world_size == 1:
        hint = "run it without torchrun, which starts two, or with more processes"
        raise ConfigError("at least 2 ranks with a link between them", "1", hint=hint)
    probe = onefold.shard(nn.Linear(1, 1, device=world.device), mesh=group.handle)
    others = [rank for rank in range(world.world_size) if rank != world.rank]
    bare = rates.exchange(group, world.device, others)
    messages = rates.unit_messages(engine_of(probe).context.transport, world.device)
    found = in_rounds([bare, *messages], seconds, lambda rounds: max(group.gather(rounds)))
    backend = "nccl" if group.is_nccl else "gloo"
    return {**_result("link", found), "ranks": world.world_size, "backend": backend}


def measure_copies(seconds: float) -> Measured:
    """Measure copies between page-locked memory and a GPU, if there is one."""
    kind = accelerator.kind()
    if kind is None:
        return {}
    device = torch.device(kind)
    return _rate_rows(in_rounds([rates.crossing(device, way) for way in rates.WAYS], seconds))


def _result(target: str, found: Mapping[str, Rate]) -> Measured:
    return {"target": target, "rates": _rate_rows(found), "notes": [], "versions": versions()}


def _rate_rows(found: Mapping[str, Rate]) -> Measured:
    """Return rates as plain values, with parameters a second and the share of a ceiling."""
    rows: Measured = {}
    for name, rate in found.items():
        nbytes, of = MOVED_NBYTES.get(name), CEILINGS.get(name)
        rows[name] = {
            **asdict(rate), "of": of, "share": of and rate.per_s / found[of].per_s,
            "parameters_per_s": nbytes and rate.per_s / nbytes,
        }  # fmt: skip
    return rows
