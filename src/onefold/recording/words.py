"""Names and numbers as people read them on the page of a report and in the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from onefold.recording.step_record import TORCH

KINDS = {
    "weight": "weights at rest",
    "master": "fp32 master weights",
    "optimizer": "optimizer states",
    "ema": "moving averages of weights",
    "anchor": "anchors of islands",
    "grad": "gradients, reduced",
    "partial_grad": "gradients, not yet reduced",
    "feedback": "error feedback of coded gradients",
    "secondary": "secondary weight shards of the node",
    "unsharded": "unsharded weights, gathered",
    "activation": "activations, offloaded",
    "kv_cache": "keys and values of past tokens",
    "staging": "staging slots of offload tiers",
    "wire": "buffers of collectives",
    TORCH: "activations and temporaries (torch)",
}
"""Kinds of bytes from the bottom of the stack up: states, gradients, short-lived buffers."""

TIERS = {"device": "device memory", "cpu": "CPU memory", "disk": "disk"}

VERBS = {
    "forward": "forward",
    "recompute": "forward again (recompute)",
    "backward": "backward",
    "wait": "waiting for a collective",
    "wait_step": "waiting for a background step",
    "unpack": "unpacking gathered weights",
    "average": "averaging received gradients",
    "gather": "gather of weights",
    "reduce_scatter": "reduce-scatter of gradients",
    "fetch": "fetch from an offload tier",
    "flush": "flush to an offload tier",
    "step": "optimizer step",
}

STREAMS = {
    "phase": "phase",
    "compute": "compute",
    "gather": "gather weights",
    "reduce": "reduce gradients",
    "tier": "fetch and flush (offload)",
    "background": "optimizer steps in the background",
}

COLLECTIVES = {
    "gather": "weights (gather)",
    "reduce_scatter": "gradients (reduce-scatter)",
    "control": "flags and 0-dim parameters",
    "whole_matrix": "matrices of matrix optimizers",
}


def known_first(words: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the distinct words: known ones in the order of `known`, then the others."""
    found = dict.fromkeys(words)
    first = [word for word in known if word in found]
    return first + [word for word in found if word not in first]


def format_bytes(nbytes: float) -> str:
    """Format bytes in the largest binary unit that leaves a whole part: `12.3 MiB`."""
    amount, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    unit = units.pop(0)
    while abs(amount) >= 0.9995 * 1024 and units:
        amount, unit = amount / 1024, units.pop(0)
    return f"{amount:,.0f} {unit}" if unit == "bytes" else f"{_three_digits(amount)} {unit}"


def format_seconds(seconds: float) -> str:
    """Format a duration in s, ms or us: `12.3 ms`."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(seconds) * factor >= 1:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds * 1e6)} \N{MICRO SIGN}s" if seconds else "0 ms"


def format_share(share: float) -> str:
    """Format a share of one as a percentage."""
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.1f} %"


def _three_digits(amount: float) -> str:
    size = abs(amount)
    return f"{amount:,.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"
