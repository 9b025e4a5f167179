"""What is run to hold predicted step times against measured ones, and the run itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import onefold
from onefold.app.tools.calibration_rank import train_once
from onefold.planner.models.gpt import GPT, PRESETS, GPTConfig
from onefold.planner.trace import default_loss

CALIBRATED = "mini"
ROWS, SEQ, VOCAB = 4, 128, 256
STAGES = (0, 1, 2, 3)
REFERENCES = 6
SHORT_S = 1.0
"""Steps below this are taken twice a turn and the second counts, as a training run makes the same
step again and again: the first of a turn finds in the cache what another stage has left there."""


def _gpt(layers: int, width: int, heads: int) -> Callable[[bool], nn.Module]:
    def build(recomputes: bool) -> nn.Module:
        module = GPT(GPTConfig(layers, width, heads, lr=3e-4), SEQ)
        module.recomputes = recomputes
        return module

    return build


def _config(kind: str, name: str, **options: Any) -> Callable[[bool], nn.Module]:
    """A Hugging Face model of random weights."""

    def build(recomputes: bool) -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(vocab_size=1000, **options)
        config.use_cache = False
        module = getattr(transformers, name)(config)
        if recomputes:
            module.gradient_checkpointing_enable()
        return module

    return build


_WIDTH = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6}
MODELS: dict[str, Callable[[bool], nn.Module]] = {
    "gpt 3M": _gpt(4, 256, 8),
    "gpt 14M": _gpt(8, 384, 6),
    "gpt 57M": _gpt(8, 768, 12),
    "llama 11M": _config("Llama", "LlamaForCausalLM", intermediate_size=1024, **_WIDTH),
    "bert 11M": _config("Bert", "BertForMaskedLM", intermediate_size=1536, **_WIDTH),
}


@dataclass(frozen=True)
class Case:
    """One model in one setting, at which the four stages are ranked."""

    model: str
    ranks: int
    accumulate: int = 1
    recompute: bool = False

    def __str__(self) -> str:
        words = [self.model, f"{self.ranks} rank{'s' * (self.ranks > 1)}"]
        words += [f"{self.accumulate} micro-batches"] * (self.accumulate > 1)
        return ", ".join(words + ["recompute"] * self.recompute)

    def build(self) -> nn.Module:
        """The module, on the CPU, ready to train."""
        torch.manual_seed(0)
        return MODELS[self.model](self.recompute).train()


CASES = [
    *(Case(model, ranks) for model in MODELS for ranks in (1, 2, 4)),
    *(Case(model, 2, accumulate=4) for model in ("gpt 3M", "gpt 14M", "llama 11M")),
    *(Case(model, 2, recompute=True) for model in ("gpt 14M", "llama 11M", "bert 11M")),
]
"""Every model on one rank, on as many as cores, and on more; and what else a step depends on."""


def train(rank: int, case: Case, number: int) -> dict[str, Any]:
    """Round `number` on this rank: a step of each stage in turn; seconds from barrier to barrier,
    and what this rank's threads computed meanwhile.
    """
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // case.ranks))
    if case.ranks > 1:
        dist.init_process_group("gloo")
    steps = {stage: _step_of(case, stage, rank) for stage in STAGES}
    begun = time.perf_counter()
    for step in steps.values():
        step()
    is_short = _longest(time.perf_counter() - begun) < SHORT_S * len(STAGES)
    reference = GPT(PRESETS[CALIBRATED], SEQ)
    tokens = torch.randint(VOCAB, (ROWS, SEQ))
    passes = [_timed(lambda: train_once(reference, tokens))[0] for _ in range(REFERENCES)]
    beside = median(passes[1:])
    walls, cpus = {}, {}
    for turn in range(len(STAGES)):
        stage = STAGES[(number + turn) % len(STAGES)]  # nobody is always first
        if is_short:
            steps[stage]()
        walls[stage], cpus[stage] = _timed(steps[stage])
    return {"seconds": walls, "cpu_seconds": cpus, "reference": beside}


def _timed(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds until all ranks have done `work`, and what this rank's threads computed for it."""
    _barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    computed = time.process_time() - cpu
    _barrier()
    return time.perf_counter() - wall, computed


def _step_of(case: Case, stage: int, rank: int) -> Callable[[], None]:
    module = case.build()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    onefold.shard(module, optimizer, stage=stage)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(VOCAB, (ROWS, SEQ), generator=generator)

    def step() -> None:
        for number in range(case.accumulate):
            is_last = number == case.accumulate - 1
            with nullcontext() if is_last else onefold.accumulate(module):
                default_loss(module(tokens)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _longest(seconds: float) -> float:
    """Of all ranks, so that they decide alike."""
    told = torch.tensor(seconds)
    if dist.is_initialized():
        dist.all_reduce(told, dist.ReduceOp.MAX)
    return told.item()


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
