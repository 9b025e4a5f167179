"""Tokens a second of weights that rest packed, beside bf16; and what the formats lose.

    python benchmarks/packed.py
    python benchmarks/packed.py --hidden 1024 --layers 4 --threads 1 --rounds 31
    python benchmarks/packed.py --only loss

decode   a Llama-shaped model with random weights decodes one token at batch 1: plain in bf16, and
         sharded in a world of one with int8 and int4 at rest. Rounds interleave the three, so that
         whatever else runs meets all of them; the ratio is the median of the rounds' ratios. With
         one thread, the ratio of CPU seconds says how it would be on an idle machine.
prefill  the same models read a prompt of 256 tokens.
loss     the byte model of `onefold train` learns the standard library's sources for a minute; its
         held-out perplexity in bf16, int8 and int4.

The bound: a token reads each matrix once, so a format of b bits a weight can gain 16 / b at most
where bf16's product reads memory as fast as a kernel of packed weights: 2.0 for int8 (8.03 bits),
3.6 for int4 (4.5 bits). Wanted are 1.7 and 3.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contest.results import RESULTS, provenance, rounded
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import onefold
from onefold.app.train.corpus import Windows, open_corpus
from onefold.compose.quantizing import quantize_for_products
from onefold.planner.models.gpt import GPT, PRESETS

WANTED = {"int8": 1.7, "int4": 3.0}
BOUND = {"int8": 2.0, "int4": 3.6}
RESTS = ["bf16", "int8", "int4"]
PROMPT = 256
Times = tuple[float, float]
"""Wall and CPU seconds."""


def llama(hidden: int, layers: int) -> Any:
    """A model in bf16 with random weights, as large as Llama's of that width."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=hidden // 128, num_key_value_heads=hidden // 128, vocab_size=1024,
    )  # fmt: skip
    config.dtype = torch.bfloat16
    return LlamaForCausalLM(config).bfloat16().eval().requires_grad_(False)


def at_rest(module: nn.Module, rest: str) -> nn.Module:
    """The module with its weights packed; as it is for bf16."""
    if rest == "bf16":
        return module
    quantize_for_products(module, rest)
    return onefold.shard(module, stage=3)


def seconds(run: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    start, used = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start, time.process_time() - used


@torch.inference_mode()
def time_models(models: dict[str, Any], rounds: int) -> dict[str, dict[str, list[Times]]]:
    """Seconds of one token and of a prompt, by what rests, for every round."""
    prompt = torch.randint(1024, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    token = prompt[:, :1]
    caches = {rest: each(prompt[:, :16], use_cache=True) for rest, each in models.items()}
    runs = {
        "decode": lambda rest: models[rest](token, past_key_values=caches[rest].past_key_values),
        "prefill": lambda rest: models[rest](prompt),
    }
    found: dict[str, dict[str, list[Times]]] = {}
    for part, run in runs.items():
        times: dict[str, list[Times]] = {rest: [] for rest in models}
        for _ in range(rounds if part == "decode" else max(3, rounds // 5)):
            for rest in models:
                run(rest)  # another model was there: caches hold none of this one
                times[rest].append(seconds(partial(run, rest)))
        found[part] = times
    return found


def ratios(times: dict[str, list[Times]], clock: int) -> dict[str, float]:
    """Medians of the rounds' ratios of wall (0) or CPU seconds (1): how much faster than bf16."""
    return {
        rest: statistics.median(
            a[clock] / b[clock] for a, b in zip(times["bf16"], times[rest], strict=True)
        )
        for rest in times
    }


def perplexities(train_seconds: float) -> dict[str, Any]:
    """Held-out perplexity a byte of a byte model that was trained for some CPU seconds."""
    corpus, seq = open_corpus(None, 256), 256
    torch.manual_seed(0)
    module = GPT(PRESETS["tiny"], seq)
    optimizer = torch.optim.AdamW(module.parameters(), lr=PRESETS["tiny"].lr / 2)
    batches = Windows(corpus.train, rows=8, seq=seq, seed=0, own=range(8))
    steps, until = 0, time.process_time() + train_seconds
    while time.process_time() < until:
        loss_of(module, next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    module = module.bfloat16().requires_grad_(False)
    held_out = Windows(corpus.held_out, rows=16, seq=seq, seed=1, own=range(16))
    texts = [next(held_out) for _ in range(4)]
    found: dict[str, Any] = {"steps": steps}
    for rest in RESTS:
        packed = at_rest(copy.deepcopy(module), rest)
        with torch.no_grad():
            losses = [loss_of(packed, text).item() for text in texts]
        found[rest] = math.exp(statistics.mean(losses))
    return found


def loss_of(module: nn.Module, text: Tensor) -> Tensor:
    """Mean cross entropy of the next byte."""
    return F.cross_entropy(module(text[:, :-1]).flatten(0, 1).float(), text[:, 1:].flatten())


def nbytes_at_rest(module: nn.Module) -> int:
    """Bytes of the weights."""
    return sum(p.numel() * p.itemsize for p in module.parameters())


def main() -> int:
    """Measure, print, and keep the result; 1 if a ratio is below what is wanted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--train-seconds", type=float, default=60.0)
    parser.add_argument("--only", choices=["speed", "loss"])
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    result: dict[str, Any] = provenance() | {"bound": BOUND, "wanted": WANTED}
    console, is_short = Console(), False
    if asked.only != "loss":
        models = {rest: at_rest(llama(asked.hidden, asked.layers), rest) for rest in RESTS}
        result["model"] = {
            "hidden": asked.hidden, "layers": asked.layers, "threads": asked.threads,
            "rounds": asked.rounds,
            "nbytes": {rest: nbytes_at_rest(each) for rest, each in models.items()},
        }  # fmt: skip
        times = time_models(models, asked.rounds)
        table = Table(
            "part", "rest", "ms, median", "ms, least", "times bf16", "of CPU", "wanted", "bound"
        )
        for part, by_rest in times.items():
            gains, of_cpu = ratios(by_rest, 0), ratios(by_rest, 1)
            result[part] = {"seconds": by_rest, "gain": gains, "gain of CPU seconds": of_cpu}
            for rest, each in by_rest.items():
                is_judged = part == "decode" and rest in WANTED
                is_short |= is_judged and gains[rest] < WANTED[rest]
                walls = [wall for wall, _ in each]
                table.add_row(
                    part, rest, f"{statistics.median(walls) * 1e3:.1f}", f"{min(walls) * 1e3:.1f}",
                    f"{gains[rest]:.2f}", f"{of_cpu[rest]:.2f}",
                    f"{WANTED[rest]}" if is_judged else "", f"{BOUND[rest]}" if is_judged else "",
                )  # fmt: skip
        console.print(table)
    if asked.only != "speed":
        result["perplexity"] = perplexities(asked.train_seconds)
        console.print("perplexity a byte", rounded(result["perplexity"]))
    asked.results.mkdir(parents=True, exist_ok=True)
    path = asked.results / f"{date.today().isoformat()}-packed.json"
    path.write_text(json.dumps(rounded(result)) + "\n")
    return int(is_short)


if __name__ == "__main__":
    sys.exit(main())
