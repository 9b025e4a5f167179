"""Estimate which share of a run's time becomes progress, between failures and checkpoints.

Each device fails at exponential times, so N devices fail N times as often. A failure loses the work
since the last checkpoint. The model is Daly's complete one: J. T. Daly, "A higher order estimate of
the optimum checkpoint interval for restart dumps", FGCS 22 (2006). No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, sqrt

from onefold.errors import ConfigError

HOUR = 3600.0
LLAMA3_DEVICE_MTBF = 54 * 24 * HOUR * 16384 / 419
"""Seconds: 419 unexpected interruptions of 16,384 H100 in 54 days (Llama 3, arXiv 2407.21783,
section 3.3.4), hosts, network and software included."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """The `share` of the time that becomes progress, with a save every `interval` seconds of work.

    `steps` is that interval in steps, `mtbf` the seconds between two failures of the whole run.
    """

    share: float
    interval: float
    steps: float
    mtbf: float


def goodput(
    step_seconds: float, *, world_size: int, checkpoint_seconds: float,
    restart_seconds: float = 0.0, device_mtbf: float = LLAMA3_DEVICE_MTBF,
    interval: float | None = None,
) -> Goodput:  # fmt: skip
    """Estimate the goodput at the best interval between checkpoints, or at a given one, in seconds.

    Args:
        step_seconds: of one step.
        world_size: devices that may fail.
        checkpoint_seconds: how long a checkpoint stops training; in the background, its copy alone.
        restart_seconds: from a failure to the first new step.
        device_mtbf: mean time between failures of one device.
        interval: seconds of work between two checkpoints.
    """
    if min(step_seconds, checkpoint_seconds, device_mtbf, world_size) <= 0:
        wanted = "step_seconds, checkpoint_seconds, device_mtbf and world_size above 0"
        got = f"{step_seconds}, {checkpoint_seconds}, {device_mtbf}, {world_size}"
        hint = "a checkpoint's seconds are its bytes over the rate of its storage"
        raise ConfigError(wanted, got, hint=hint)
    mtbf = device_mtbf / world_size
    if interval is None:
        interval = _best_interval(checkpoint_seconds, mtbf)
    exponent = (interval + checkpoint_seconds) / mtbf
    share = 0.0
    if exponent + restart_seconds / mtbf <= 700:  # beyond that any float overflows
        # M e^(R/M) (e^((t+d)/M) - 1) seconds pass for t seconds of work: an interval, its
        # checkpoint, and the retries of both until one holds
        share = interval / (mtbf * exp(restart_seconds / mtbf) * expm1(exponent))
    return Goodput(share, interval, interval / step_seconds, mtbf)


def _best_interval(checkpoint_seconds: float, mtbf: float) -> float:
    """Find the zero of t/M - 1 + e^(-(t+d)/M), where the share is highest, by Newton's method.

    A restart scales every interval's share alike and does not move the best one.
    """
    ratio = checkpoint_seconds / mtbf
    at = min(sqrt(2 * ratio), 1 + ratio)
    for _ in range(60):
        decay = exp(-(at + ratio))
        step = (at - 1 + decay) / (1 - decay)
        at -= step
        if abs(step) < 1e-14 * at:
            break
    return at * mtbf
