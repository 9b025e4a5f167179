"""Codecs on one core: GB/s of fp32 packed and unpacked, beside memcpy; and what they lose.

    python benchmarks/codec.py
    python benchmarks/codec.py --numel 16 --rounds 21

Rounds interleave all contestants, so that whatever else runs meets all of them; rates are medians
of the rounds' rates. "there and back" counts an fp32 byte once for both ways. `C` is the kernel,
where it was compiled, `torch` the same codec without it, with the same bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import codec_errors
import torch
from contest.results import RESULTS, provenance, rounded
from rich.console import Console
from rich.table import Table
from torch import Tensor

from onefold.wire import codec as codecs
from onefold.wire.codec import Codec, codec_of
from onefold.wire.native import kernel

WORDS = ["int8", "int4", "int8+h", "int4+h"]
TARGETS = {"int8, C": 1.5, "int4, C": 1.0}
"""GB/s of fp32 there and back that a codec is to reach."""


@contextmanager
def way(name: str) -> Iterator[None]:
    """With the kernel, if there is one, or without."""
    found = kernel() if name == "C" else None
    with mock.patch.object(codecs, "kernel", return_value=found):
        yield


class Contestant:
    """One codec, one way, over the same values as the others."""

    def __init__(self, codec: Codec, way: str, values: Tensor, out: Tensor) -> None:
        self.codec, self.way, self.values, self.out = codec, way, values, out
        self.message = torch.zeros(codec.nbytes(len(values)), dtype=torch.uint8)

    def calls(self) -> dict[str, Callable[[], object]]:
        """What is timed, by name."""
        return {
            "encode": lambda: self.codec.encode(self.values, self.message),
            "decode": lambda: self.codec.decode(self.message, self.out),
            "add": lambda: self.codec.add(self.message, self.out),
        }

    def seconds(self) -> dict[str, float]:
        """Of one round."""
        with way(self.way):
            return {name: timed(call) for name, call in self.calls().items()}


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(numel: int, rounds: int) -> dict[str, Any]:
    """Seconds of every call of every contestant in every round."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    out, copy = torch.zeros(numel), torch.zeros(numel)
    pairs = [(word, "torch") for word in WORDS]
    if kernel() is not None:
        pairs += [(word, "C") for word in WORDS]
    field = {f"{w}, {how}": Contestant(codec_of(w), how, values, out) for w, how in pairs}
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in ["memcpy", *field]}
    for turn in range(-1, rounds):
        found = {"memcpy": {"copy": timed(lambda: copy.copy_(values))}}
        found |= {name: contestant.seconds() for name, contestant in field.items()}
        if turn >= 0:
            for name, one in found.items():
                seconds[name].append(one)
    found = kernel()
    return {"numel": numel, "kernel": found.name if found else None, "seconds": seconds}


def rates(case: dict[str, Any], name: str) -> dict[str, float]:
    """Medians over the rounds, in GB/s of fp32."""
    nbytes = 4 * case["numel"] / 1e9
    found = case["seconds"][name]
    result = {call: statistics.median(nbytes / one[call] for one in found) for call in found[0]}
    if "encode" in result:
        both = [nbytes / (one["encode"] + one["decode"]) for one in found]
        result["there and back"] = statistics.median(both)
    return result


def show(console: Console, case: dict[str, Any]) -> None:
    """The table of speeds, and whether targets were reached."""
    title = f"GB/s of fp32, one core, {case['numel'] / 2**20:g} Mi elements, C: {case['kernel']}"
    columns = ["encode", "decode", "add", "there and back"]
    table = Table("codec", *columns, "bytes an element", title=title)
    for name in case["seconds"]:
        found = rates(case, name)
        if name == "memcpy":
            table.add_row(name, f"{found['copy']:.2f}", "", "", "", "4")
            continue
        per_element = codec_of(name.split(",")[0]).nbytes(1 << 20) / 2**20
        table.add_row(name, *(f"{found[c]:.2f}" for c in columns), f"{per_element:.4g}")
    console.print(table)
    for name, least in TARGETS.items():
        if name in case["seconds"]:
            got = rates(case, name)["there and back"]
            verdict = "reached" if got >= least else "MISSED"
            console.print(f"{name}: {got:.2f} GB/s there and back, at least {least}: {verdict}")


def main() -> None:
    """Measure, print, write one result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=int, default=8, help="Mi elements")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 100)
    case = measure(options.numel << 20, options.rounds)
    show(console, case)
    errors = codec_errors.measured()
    codec_errors.show(console, errors)
    case["rates"] = {name: rates(case, name) for name in case["seconds"]}
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"{date.today().isoformat()}-codec.json"
    result = provenance() | rounded({"speed": case, "errors": errors})
    path.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"written: {path.name}")


if __name__ == "__main__":
    main()
