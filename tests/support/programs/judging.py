"""Run a drawn program plain and sharded, and judge it.

right       the notes are those of plain torch, and of the same program at another stage
refused     an `OnefoldError` says what was expected, what came, and what to write instead; one of
            the wire counts where ranks took other branches, if each of them raises by name
redrawn     plain torch itself cannot run it, or rounding alone changes its result
wrong       a note differs and nobody said so
raw         another exception, or a named error without a hint
hang, abort a rank does not end, or its process dies: benchmarks/programs.py sees these
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from onefold.errors import OnefoldError
from tests.support.programs.branches import takes_other_branches
from tests.support.programs.drawing import REDRAWN, Drawn, DrawnLeg, draw
from tests.support.programs.frame import Value, differences, distance, run_plain, run_rank
from tests.support.programs.gloo import run_gloo_ranks
from tests.support.programs.rounding import asks_for_bfloat16, run_noisy, run_wide
from tests.support.programs.verdicts import Ended, Verdict, of_exception

Notes = dict[str, Value]
RunRanks = Callable[..., list[Notes]]

SHIFT, LOSSY_SHIFT = 1e-6, 4e-3
"""Noise in initial weights: a note may differ by what this noise makes of it. bfloat16 rounds by
the larger one, which may send a row to another expert."""
ROUNDED = 4.0
"""Exact programs, too, round at every step: a note may be off by so many times what noise of that
size makes of it. An edit of all weights ends what the noise in initial ones would tell."""
SENSITIVE, SENSITIVE_LOSSY = 1e-3, 0.05
"""Relative: a program of which rounding alone changes a result by more is drawn again."""
RELATIVE = 1e-6
NOISY_RUNS, DEVIATIONS, LOUDER, TAIL = 4, 10, 5.0, 2.0
"""Lossy programs: a note may be off by so many times what noise makes of it (rounding.py), as a
mean over so many runs, and by what so much louder noise makes of it: this one crosses the steps of
a program (signs, branches, rows of experts) that are near. `TAIL` times the larger one: of hundreds
of notes some meet the tail of four runs (2 of 130 programs were 1.2 times as far off)."""


class Judge:
    """Judges programs on ranks that `run_ranks(world_size, body, *args)` starts.

    Threads end with the first of them that raises. So `run_processes` looks whether all ranks of a
    program that takes other branches on some raise an error by name.
    """

    def __init__(self, run_ranks: RunRanks, run_processes: RunRanks = run_gloo_ranks) -> None:
        self._run_ranks, self._run_processes = run_ranks, run_processes

    def judge(self, drawn: Drawn, compares: bool = True) -> Verdict:
        """Run a program; `compares` it with a sibling that has to give the same bits, too."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                reference = plain(drawn)
            except Redrawn as error:
                return Verdict("redrawn", str(error))
            try:
                got = self._run(drawn)
                lines = reference.differences(got)
                if lines and drawn.is_lossy:  # four runs with noise may miss what forty show
                    lines = plain(drawn, 10 * NOISY_RUNS).differences(got)
                if lines:
                    return Verdict("wrong", "\n".join(lines[:12]))
                other = self._sibling(drawn) if compares else None
                if other is not None:
                    lines = differences(self._run(other), got, {})
            except Exception as error:
                return self._looked_into(drawn, of_exception(error))
        if lines:
            legs = "".join(leg.text for leg in other.legs) if other else ""
            return Verdict("wrong", "\n".join([f"other bits than\n{legs}", *lines[:12]]))
        return Verdict("right")

    def _sibling(self, drawn: Drawn) -> Drawn | None:
        return sibling(drawn)

    def _looked_into(self, drawn: Drawn, verdict: Verdict) -> Verdict:
        """A named error of the wire on every rank refuses ranks that took other branches.

        Threads that meet in two collectives may fail in the double of torch's process group.
        """
        if verdict.kind == "refused" or not takes_other_branches(drawn):
            return verdict
        try:
            Judge(self._run_processes)._run(drawn)
        except Ended as ended:
            if all(end is not None and end.is_named for end in ended.of_ranks):
                return replace(verdict, kind="refused")
        return verdict

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


@dataclass(frozen=True)
class Reference:
    """Notes of plain torch, and how far each may be off.

    `wide` are those of a bfloat16 program in fp32: Onefold keeps masters, plain torch does not, and
    either is right. (torch's fused SGD computes wrong bfloat16 weights beyond 32 elements.)
    """

    notes: Notes
    bounds: dict[str, float]
    wide: Notes

    def differences(self, got: Notes) -> list[str]:
        """Sentences on notes that are near neither."""
        lines = differences(got, self.notes, self.bounds)
        if not lines or self.wide is self.notes:
            return lines
        return [line for line in lines if not self._is_near_wide(name_in(line), got)]

    def _is_near_wide(self, name: str, got: Notes) -> bool:
        mine, value = got.get(name), self.wide.get(name)
        return is_like(mine, value) and distance(mine, value) <= self.bounds.get(name, 0.0)


def is_like(one: Value, other: Value) -> bool:
    """True for tensors of one shape."""
    return isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape


def name_in(line: str) -> str:
    """The note of a sentence of `differences`."""
    return re.split(" is | differs by ", line)[0]


def plain(drawn: Drawn, num_noisy: int = NOISY_RUNS) -> Reference:
    """Run plain torch: twice, and with noise where rounding is asked for."""
    if drawn.is_lossy and any("orthogonal" in block for block in drawn.blocks):
        raise Redrawn("torch's orthogonal weights are not finite in bfloat16")
    noisy, louder, narrow = list[Notes](), list[Notes](), Notes()
    with scratch() as folder:
        try:
            wanted = wide = run_plain(drawn.program(), folder)
            noise = LOSSY_SHIFT if drawn.is_lossy else SHIFT
            shifted = run_plain(drawn.program(), folder, noise)
            noisy = [run_noisy(drawn, folder, seed) for seed in range(num_noisy)]
            if drawn.is_lossy:
                wide = run_wide(drawn, folder)
                # Rprop jumps where noise turns a sign, which few runs may show
                runs = range(4 * num_noisy if "Rprop" in drawn.optimizer else num_noisy)
                louder = [run_noisy(drawn, folder, seed, LOUDER) for seed in runs]
                if asks_for_bfloat16(drawn):
                    looped = drawn.optimizer.replace("fused=True", "fused=False")
                    with suppress(Exception):
                        narrow = run_plain(
                            replace(drawn, dtype="bfloat16", optimizer=looped).program(), folder
                        )
        except OnefoldError:
            raise
        except Exception as error:
            raise Redrawn(f"plain torch: {type(error).__name__}: {error}") from error
    bounds: dict[str, float] = {}
    # rounding errors of one kind may all have one sign; and sums cancel at one step or another
    coherent = defaultdict[str, float](float)
    for name in filter(lambda name: is_like(narrow.get(name), wide.get(name)), wanted):
        kind = name.partition(" ")[2]
        coherent[kind] = max(coherent[kind], 2 * distance(narrow[name], wide[name]))
    for name, value in wanted.items():
        if not isinstance(value, Tensor) or not value.numel():
            continue
        if not value.isfinite().all():
            raise Redrawn(f"plain torch: {name} is not finite")
        off = [distance(notes[name], wide[name]) for notes in noisy]
        bounds[name] = bound(name, value, shifted[name], off, drawn)
        if drawn.is_lossy:
            steps = max(distance(notes[name], wide[name]) for notes in louder)
            lossy = lossy_bound(name, value, off, drawn)
            bounds[name] = TAIL * max(steps, lossy, coherent[name.partition(" ")[2]])
    return Reference(wanted, bounds, wide)


def bound(name: str, value: Tensor, shifted: Value, off: list[float], drawn: Drawn) -> float:
    """How far a note may be from that of plain torch, if the program is exact.

    `off`: how far runs with noise are.
    """
    scale = max(value.abs().max().item(), 1e-2)
    sensitivity, rounding = distance(value, shifted), 0.0 if drawn.is_lossy else max(off)
    most = SENSITIVE_LOSSY if drawn.is_lossy else SENSITIVE
    if max(sensitivity, rounding) > most * scale:
        raise Redrawn(f"rounding alone changes {name} by {max(sensitivity, rounding):.3g}")
    return max(20 * sensitivity + 20 * RELATIVE * scale, ROUNDED * rounding)


def lossy_bound(name: str, value: Tensor, off: list[float], drawn: Drawn) -> float:
    """How far a note may be off, if runs with noise are off by so much."""
    scale = max(value.abs().max().item(), 1e-2)
    deviation = (sum(one**2 for one in off) / len(off)) ** 0.5
    if drawn.is_narrow and deviation > SENSITIVE_LOSSY * scale and not drawn.is_quantized:
        raise Redrawn(f"rounding alone changes {name} by {deviation:.3g}")
    # a note of bfloat16 is rounded itself, by a unit in its last place
    resting = 2.0**-7 if drawn.is_narrow else 20 * RELATIVE
    if drawn.is_frozen_in_bytes and name.endswith("weight"):  # read as it rests, in no forward
        resting += 1 / 127
    return DEVIATIONS * deviation + resting * scale


def sibling(drawn: Drawn) -> Drawn | None:
    """The same program at other stages and without tiers, which has to give the same bits."""
    calls = [call for leg in drawn.legs for call in leg.operations]
    # torch 2.13 rounds `add_(bfloat16, alpha=)` otherwise in the last elements of a tensor
    adds = drawn.is_narrow and any("how='add_'" in call for call in calls)
    if adds or any(has_own_bits(leg) for leg in drawn.legs):
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
        drawn = draws(seed + attempt * REDRAWN)
        verdict = judge.judge(drawn, compares=seed % 2 == 0)
        if verdict.kind != "redrawn":
            return drawn, verdict
    return drawn, verdict
