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
    "optimizer_sum": "sums over all elements (Prodigy, D-Adaptation)",
}


def known_first(words: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the distinct words: known ones in the order of `known`, then the others."""
    found = dict.fromkeys(words)
    first = [word for word in known if word in found]
    return first + [word for word in found if word not in first]
