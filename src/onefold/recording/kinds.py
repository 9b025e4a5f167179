"""What kinds of bytes and verbs are called on a page, in which order and colour they come."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.recording.step_record import TORCH, Series

KINDS = {
    "weight": "weights at rest",
    "master": "fp32 masters",
    "optimizer": "optimizer states",
    "grad": "gradients, reduced",
    "partial_grad": "gradients, not yet reduced",
    "feedback": "rounded off gradients, kept",
    "secondary": "weights kept for the node",
    "unsharded": "whole weights, gathered",
    "activation": "activations, offloaded",
    "staging": "slots on the way to far tiers",
    "wire": "buffers of collectives",
    TORCH: "activations and temporaries (torch)",
}
"""By kind, from the bottom of the stack up: what rests, gradients, then what comes and goes."""

TIERS = {"device": "In the device's memory", "cpu": "In CPU memory", "disk": "On disk"}

VERBS = {
    "forward": "forward",
    "recompute": "forward again (recompute)",
    "backward": "backward",
    "wait": "waiting for a collective",
    "await_step": "waiting for a step in the background",
    "unpack": "unpacking what was gathered",
    "average": "averaging what was received",
    "gather": "gather of weights",
    "reduce_scatter": "reduce-scatter of gradients",
    "fetch": "fetch from a far tier",
    "flush": "flush to a far tier",
    "step": "optimizer step",
}

STREAMS = {
    "phase": "phases",
    "compute": "compute",
    "gather": "gather",
    "reduce": "reduce",
    "tier": "far tiers",
    "background": "far steps",
}


def ordered(series: Sequence[Series], tier: str) -> list[int]:
    """Indices of a tier's series, from the bottom of the stack up."""
    known = list(KINDS)
    here = [index for index, each in enumerate(series) if each.tier == tier]
    return sorted(
        here,
        key=lambda index: (
            known.index(series[index].kind) if series[index].kind in known else len(known)
        ),
    )


def tiers_of(series: Sequence[Series]) -> list[str]:
    """Tiers in the order of panels."""
    found = dict.fromkeys(each.tier for each in series)
    known = [tier for tier in TIERS if tier in found]
    return known + [tier for tier in found if tier not in known]


def css_name(word: str, known: dict[str, str]) -> str:
    """The class that colours it; unknown words are one class."""
    return word if word in known else "other"
