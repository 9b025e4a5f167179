"""Run a drawn program plain and sharded, and judge it.

right       the notes are those of plain torch, and of the same program at another stage
refused     an `OnefoldError` says what was expected, what came, and what to write instead
redrawn     plain torch itself cannot run it, or rounding alone changes its result
wrong       a note differs and nobody said so
raw         another exception, or a named error without a hint
hang, abort a rank does not end, or its process dies: benchmarks/programs.py sees these
"""

from __future__ import annotations

import re
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from onefold.errors import OnefoldError, WireError
from tests.support.programs.drawing import Drawn, DrawnLeg, draw
from tests.support.programs.frame import Value, differences, distance, run_plain, run_rank

Notes = dict[str, Value]
RunRanks = Callable[..., list[Notes]]

SHIFT, LOSSY_SHIFT = 1e-6, 4e-3
"""Noise in initial weights: a note may differ by what this noise makes of it. bfloat16 rounds by
the larger one, which may send a row to another expert."""
SENSITIVE, SENSITIVE_LOSSY = 1e-3, 0.05
"""Relative: a program of which rounding alone changes a result by more is drawn again."""
RELATIVE, LOSSY, MOVED = 1e-6, 0.1, 2.0
DEFECTS = ("wrong", "raw", "hang", "abort")


@dataclass(frozen=True)
class Verdict:
    """How a program ended, and the sentences that say why."""

    kind: str
    text: str = ""

    @property
    def key(self) -> str:
        """The same for programs that end alike: the kind and the first line, names left out."""
        line = re.sub(r"'[^']*'|[0-9][0-9.e+-]*", "_", self.text.partition("\n")[0])
        is_numbers = self.kind == "wrong" and "differs by" in line
        return f"{self.kind} {'numbers' if is_numbers else line[:160]}"

    @property
    def is_defect(self) -> bool:
        return self.kind in DEFECTS


class Ended(Exception):
    """The verdict of a rank that is a process."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.text)
        self.verdict = verdict


class Judge:
    """Judges programs on ranks that `run_ranks(world_size, body, *args)` starts."""

    def __init__(self, run_ranks: RunRanks) -> None:
        self._run_ranks = run_ranks

    def judge(self, drawn: Drawn, compares: bool = True) -> Verdict:
        """Run a program; `compares` it with a sibling that has to give the same bits, too."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                wanted, bounds = plain(drawn)
            except Redrawn as error:
                return Verdict("redrawn", str(error))
            try:
                got = self._run(drawn)
                lines = differences(got, wanted, bounds)
                if lines:
                    return Verdict("wrong", "\n".join(lines[:12]))
                other = sibling(drawn) if compares else None
                if other is not None:
                    lines = differences(self._run(other), got, {})
            except Exception as error:
                return of_exception(error)
        if lines:
            legs = "".join(leg.text for leg in other.legs) if other else ""
            return Verdict("wrong", "\n".join([f"other bits than\n{legs}", *lines[:12]]))
        return Verdict("right")

    def _run(self, drawn: Drawn) -> Notes:
        """All legs on ranks; ranks have to agree."""
        program, notes = drawn.program(), Notes()
        with scratch() as folder:
            for number, leg in enumerate(drawn.legs):
                ranks = self._run_ranks(leg.world_size, run_rank, program, folder, number)
                for rank, other in enumerate(ranks[1:], 1):
                    if lines := differences(other, ranks[0], {}):
                        raise AssertionError(f"rank {rank} differs from rank 0: {lines[:6]}")
                notes |= ranks[0]
        return notes


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for checkpoints and for the disk tier, in memory where that can be had."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)


class Redrawn(Exception):
    """Plain torch cannot run the program, or not twice with the same result."""


def plain(drawn: Drawn) -> tuple[Notes, dict[str, float]]:
    """Notes of plain torch, and how far each may be off."""
    if drawn.is_lossy and any("orthogonal" in block for block in drawn.blocks):
        raise Redrawn("torch's orthogonal weights are not finite in bfloat16")
    with scratch() as folder:
        try:
            wanted = run_plain(drawn.program(), folder)
            noise = LOSSY_SHIFT if drawn.is_lossy else SHIFT
            shifted = run_plain(drawn.program(), folder, noise)
        except OnefoldError:
            raise
        except Exception as error:
            raise Redrawn(f"plain torch: {type(error).__name__}: {error}") from error
    bounds: dict[str, float] = {}
    for name, value in wanted.items():
        if not isinstance(value, Tensor) or not value.numel():
            continue
        if not value.isfinite().all():
            raise Redrawn(f"plain torch: {name} is not finite")
        bounds[name] = bound(name, value, shifted[name], drawn)
    return wanted, bounds


def bound(name: str, value: Tensor, shifted: Value, drawn: Drawn) -> float:
    """How far a note may be from that of plain torch."""
    scale = max(value.abs().max().item(), 1e-2)
    sensitivity = distance(value, shifted)
    if sensitivity > (SENSITIVE_LOSSY if drawn.is_lossy else SENSITIVE) * scale:
        raise Redrawn(f"rounding alone changes {name} by {sensitivity:.3g}")
    if drawn.is_lossy:
        return max(scale, 1.0) if "grad" in name or " of " in name else MOVED * LOSSY * scale + 0.3
    return 20 * sensitivity + 20 * RELATIVE * scale


def of_exception(error: BaseException) -> Verdict:
    """A refusal says what was expected and gives a hint; an error of the wire is none."""
    if isinstance(error, Ended):
        return error.verdict
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, TimeoutError) and not isinstance(error, OnefoldError):
        return Verdict("hang", text)
    if isinstance(error, AssertionError):
        return Verdict("wrong", text)
    is_named = isinstance(error, OnefoldError) and "expected" in text and "hint:" in text
    if is_named and not isinstance(error, WireError):
        return Verdict("refused", text)
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    return Verdict("raw", text + "\n" + "".join(traceback.format_list(frames)))


def sibling(drawn: Drawn) -> Drawn | None:
    """The same program at other stages and without tiers, which has to give the same bits."""
    if any(has_own_bits(leg) for leg in drawn.legs):
        return None
    legs = tuple(replace(leg, options=other_options(leg)) for leg in drawn.legs)
    return None if legs == drawn.legs else replace(drawn, legs=legs)


def has_own_bits(leg: DrawnLeg) -> bool:
    """True where sums are taken in another order than at stage 3, or notes differ."""
    options = dict(leg.options)
    sums = any(word in call for call in leg.operations for word in SUMS)
    offload = options.get("offload", "")  # gradients are freed, or products are summed in tiles
    differs = "step_in_backward" in offload or "tile" in offload
    differs = differs or bool({"nodes", "islands", "tp", "stream", "trainer"} & options.keys())
    differs = differs or any("by_layers" in call for call in leg.operations)  # with tied weights
    return leg.is_lossy or differs or (options["stage"] in "01" and sums)


SUMS = ("micros", "retained", "twice", "jointly", "zero=None", "clip", "layers", "assigned",
        "input_gradient", "skip_step", "read_numbers")  # fmt: skip


def other_options(leg: DrawnLeg) -> tuple[tuple[str, str], ...]:
    """Stage 2 in place of 3, else stage 3; on the device, and with an exact wire on one axis."""
    options = dict(leg.options)
    same = {name: options[name] for name in ("units", "shares") if name in options}
    return tuple({"stage": "2" if options["stage"] == "3" else "3", **same}.items())


def judge_seed(
    seed: int, judge: Judge, draws: Callable[[int], Drawn] = draw
) -> tuple[Drawn, Verdict]:
    """Draw by a seed until plain torch can run the program, and judge it."""
    for attempt in range(20):
        drawn = draws(seed + attempt * 1_000_003)
        verdict = judge.judge(drawn, compares=seed % 2 == 0)
        if verdict.kind != "redrawn":
            return drawn, verdict
    return drawn, verdict
