"""Tokens/s of a KV cache on disk, beside `DynamicCache` and beside what the disk permits.

    python benchmarks/kv_cache.py --folder /path/on/a/disk         2 minutes
    python benchmarks/kv_cache.py --context 4096 --rounds 2 --tokens 4

A Llama-shaped model with random weights decodes after a context eight times larger than the budget.
The context is random keys and values, so no prefill is timed. Each round times the same tokens with
both caches, and reads as many bytes as one pass needs from a plain file, past the page cache, in
requests of 4 MiB on four threads. The bound is that read plus `DynamicCache`'s pass, one after the
other; read-ahead may beat it. `apart` counts tokens that differ. The result goes to
`benchmarks/results/DATE-kv-cache.json`.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from contest.results import RESULTS, provenance, rounded
from rich.console import Console
from torch import Tensor
from transformers import DynamicCache

import onefold.hf

REQUEST_NBYTES, NUM_THREADS = 4 << 20, 4
TIMES_BUDGET = 8
TARGET = 0.9
"""Share of the bound's tokens/s to be reached."""


def build(layers: int) -> Any:
    """A Llama-shaped model: 4 KiB of keys and values a token and layer."""
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=512, intermediate_size=1536, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=1 << 20,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def fill(cache: Any, layers: int, context: int) -> None:
    """Give every layer the same random context."""
    generator = torch.Generator().manual_seed(0)
    for start in range(0, context, 2048):
        shape = 1, 8, min(2048, context - start), 64
        for layer in range(layers):
            keys, values = (torch.randn(shape, generator=generator) for _ in "kv")
            cache.update(keys, values, layer)


def decode(model: Any, cache: Any, tokens: int) -> tuple[float, list[int]]:
    """Decode greedily, then forget: seconds of a pass, and the tokens."""
    token, found = torch.tensor([[1]]), list[int]()
    with torch.no_grad():
        start = time.perf_counter()
        for _ in range(tokens):
            logits: Tensor = model(token, past_key_values=cache, use_cache=True).logits
            token = logits[:, -1:].argmax(-1)
            found.append(int(token))
        seconds = (time.perf_counter() - start) / tokens
    cache.crop(-tokens)
    return seconds, found


class PlainFile:
    """A file of as many bytes as a pass reads."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.path = folder / "onefold-plain"
        self._starts = range(0, max(nbytes, REQUEST_NBYTES) // REQUEST_NBYTES * REQUEST_NBYTES,
                             REQUEST_NBYTES)  # fmt: skip
        self._rooms = [mmap.mmap(-1, REQUEST_NBYTES) for _ in range(NUM_THREADS)]
        with self.path.open("wb") as file:
            for _ in self._starts:
                file.write(os.urandom(REQUEST_NBYTES))
            os.fsync(file.fileno())

    def rate(self) -> float:
        """Bytes a second, read in order."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT)

        def read(thread: int) -> None:
            for start in self._starts[thread::NUM_THREADS]:
                if os.preadv(fd, [self._rooms[thread]], start) != REQUEST_NBYTES:
                    raise OSError(f"a short read of {self.path}")

        begun = time.perf_counter()
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(read, range(NUM_THREADS)))
        seconds = time.perf_counter() - begun
        os.close(fd)
        return len(self._starts) * REQUEST_NBYTES / seconds


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All rounds."""
    model, layers = build(options.layers), options.layers
    context_nbytes = layers * options.context * 2 * 8 * 64 * 4
    budget = context_nbytes // TIMES_BUDGET
    ours, theirs = onefold.hf.KVCache(budget, disk=folder, config=model.config), DynamicCache()
    for cache in (ours, theirs):
        fill(cache, layers, options.context)
        decode(model, cache, 2)
    plain, rounds = PlainFile(folder, context_nbytes - budget), list[dict[str, Any]]()
    for _ in range(options.rounds):
        before = ours.report().read_nbytes
        seconds, tokens = decode(model, ours, options.tokens)
        read_nbytes = (ours.report().read_nbytes - before) / options.tokens
        resident, wanted = decode(model, theirs, options.tokens)
        rate = plain.rate()
        bound = read_nbytes / rate + resident
        rounds.append({
            "seconds": seconds, "dynamic_seconds": resident, "disk_rate": rate,
            "read_nbytes": read_nbytes, "bound_seconds": bound, "share_of_bound": bound / seconds,
            "apart": sum(a != b for a, b in zip(tokens, wanted, strict=True)),
        })  # fmt: skip
    case = {"layers": layers, "context": options.context, "tokens": options.tokens}
    sizes = {"context_nbytes": context_nbytes, "budget": budget}
    return {"case": case | sizes, "rounds": rounds, "report": asdict(ours.report())}


def show(console: Console, result: dict[str, Any]) -> None:
    """Medians, and whether the target was reached."""
    rounds = result["rounds"]

    def median(name: str) -> float:
        return statistics.median(each[name] for each in rounds)

    share, apart = median("share_of_bound"), sum(each["apart"] for each in rounds)
    console.print(f"KVCache       {1 / median('seconds'):8.3f} tokens/s")
    console.print(f"DynamicCache  {1 / median('dynamic_seconds'):8.3f} tokens/s")
    console.print(f"bound         {1 / median('bound_seconds'):8.3f} tokens/s")
    console.print(
        f"disk {median('disk_rate') / 1e9:.2f} GB/s, {median('read_nbytes'):,.0f} bytes a pass"
    )
    verdict = "reached" if share >= TARGET and apart == 0 else "MISSED"
    console.print(f"{share:.2f} of the bound, at least {TARGET}; {apart} tokens differ: {verdict}")


def main() -> None:
    """Measure, print, write one result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=16384, help="tokens")
    parser.add_argument("--tokens", type=int, default=12, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--threads", type=int, default=1, help="that compute; others read")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console(width=None if sys.stdout.isatty() else 100)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = measure(options, Path(folder))
    show(console, result)
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"{date.today().isoformat()}-kv-cache.json"
    path.write_text(json.dumps(provenance() | rounded(result), indent=1) + "\n")
    console.print(f"written: {path.name}")


if __name__ == "__main__":
    main()
