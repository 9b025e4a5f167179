"""Calibrate: run one model on the CPU ranks of this machine, and derive rates from it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from onefold.config import Precision
from onefold.errors import ConfigError
from onefold.planner.calibration import Calibration, Speeds, with_whole_steps
from onefold.planner.models.loader import build_model, described, recompute, refuse
from onefold.planner.search import DTYPES
from onefold.planner.trace import Untraceable, tokens_of, trace
from onefold.text import format_bytes
from onefold.tier.host import free_host_nbytes, measure_disk, usable_cores
from onefold.wire.local_ranks import run_local

ENTRY = "onefold.app.tools.calibration_rank:main"
WORDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: None}
HELD_NBYTES = 8
"""Copies of the weights in a rank of a calibration: weights and gradients of a plain module, the
same of a sharded one, and this rank's rows of both and of two moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A model, by name or as a module, and a micro-batch of rows of `seq` tokens."""

    model: nn.Module | str
    seq: int = 128
    rows: int = 4
    precision: Precision | None = None
    recompute: bool = False


def calibrate(
    sample: Sample, worlds: Sequence[int] = (1, 2), *, patience: float = 1.0, runs: int = 3
) -> Calibration:
    """Measure CPU ranks of this machine in each world of `worlds`, for up to a minute each.

    Every rank gets its share of the cores as threads, as `onefold train` gives it. `patience` is
    a factor of that minute: at 0 every median is of as few passes as possible. The passes are
    spread over `runs`, each in fresh processes, and the run with the median micro-batch counts:
    the placement of memory and threads makes one process up to a fifth faster than the next.

    Raises:
        ConfigError: a model that cannot be built, does not fit, or does not run.
    """
    name, module = _look_at(sample, max(worlds))
    numel = sum(parameter.numel() for parameter in module.parameters())
    itemsize = next((parameter.itemsize for parameter in module.parameters()), 4)
    word = None
    if sample.precision is not None and sample.precision.compute is not None:
        word, itemsize = WORDS[sample.precision.compute], sample.precision.compute.itemsize
    request = {
        "name": name, "pickled": None, "seq": sample.seq, "rows": sample.rows, "precision": word,
        "recompute": sample.recompute, "dtype": DTYPES.get(itemsize, "fp32"),
        "patience": patience / runs,
    }  # fmt: skip

    def run(ranks: int) -> Speeds:
        threads = max(1, usable_cores() // ranks)
        return Speeds.of(run_local(ENTRY, request, ranks=ranks, threads=threads))

    with tempfile.TemporaryDirectory(prefix="onefold_") as folder:
        if isinstance(sample.model, nn.Module):
            request["pickled"] = _pickled(sample.model, Path(folder, "module.pt"))
        tokens = sample.rows * sample.seq
        try:
            micro = trace(module, tokens_of(sample.rows, sample.seq), precision=sample.precision)
            work = micro.work(tokens)
        except Untraceable:  # a plan would only estimate the work
            work = None
        middles = (middle([run(ranks) for _ in range(runs)]) for ranks in worlds)
        speeds = tuple(with_whole_steps(of_world, work) for of_world in middles)
        return Calibration(name, numel, tokens, speeds, measure_disk(folder))


def middle(runs: Sequence[Speeds]) -> Speeds:
    """Return the run with the median micro-batch; of an even number the faster of the two."""
    return sorted(runs, key=lambda speeds: speeds.seconds)[(len(runs) - 1) // 2]


def _look_at(sample: Sample, ranks: int) -> tuple[str, nn.Module]:
    """Return the name of a model that fits, and the model, without values if it was named."""
    module = sample.model
    if isinstance(module, str):
        refuse(module, sample.seq)
        with torch.device("meta"):
            module = build_model(module, sample.seq)
        if sample.recompute:
            recompute(module, str(sample.model))
    weights = sum(parameter.nbytes for parameter in module.parameters())
    name = sample.model if isinstance(sample.model, str) else type(module).__name__
    if (needed := HELD_NBYTES * weights * ranks) > (free := free_host_nbytes()):
        raise ConfigError(
            f"{name} to fit into memory once for each of {ranks} ranks, with Adam's states",
            f"{format_bytes(needed)} where {format_bytes(free)} are free",
            hint="calibrate at a smaller model: rates carry over to other sizes",
        )
    return name, module


def _pickled(module: nn.Module, path: Path) -> str:
    try:
        torch.save(module, path)
    except Exception as error:
        raise ConfigError(
            f"{type(module).__name__} to be pickled, so that other processes can run it",
            described(error),
            hint="name the model instead: module:function, a config.json or a preset",
        ) from error
    return str(path)
