"""A plan on several kinds of devices beside the equal split, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from onefold.planner.mixed import KindPlan, MixedJob, MixedSplit
from onefold.planner.search import Row, Search
from onefold.text import columns, counted, format_bytes, format_seconds, format_share, wrapped


@dataclass(frozen=True, slots=True)
class MixedPlan:
    """The split of a plan, and the split that gives all ranks the same.

    largest, equal_largest: parameters of the largest model at these rows; None: no limit is known.
    fewer_rows: rows of a rank in the mean with which the job fits, where it does not; 0: none.
    more: devices of each kind with which it fits.
    """

    split: MixedSplit
    equal: MixedSplit
    largest: int | None
    equal_largest: int | None
    fewer_rows: int = 0
    more: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def of(search: Search, row: Row) -> MixedPlan:
        """Compare the split of a row with the equal one, and look for remedies if it misses."""
        assert row.mixed is not None, "a row on several kinds of devices has a split"
        job, split = search.job(row.forecast.recipe, row.rows), row.mixed
        equal, numel = job.equal(), search.one.numel
        largest = _grown(numel, job.growth(split, is_even=False))
        compared = MixedPlan(split, equal, largest, _grown(numel, job.growth(equal, is_even=True)))
        if split.fits:
            return compared
        return replace(compared, fewer_rows=_fewer(job), more=tuple(job.more(split).items()))

    def as_dict(self) -> dict[str, Any]:
        """Return plain dicts and numbers, for JSON."""
        return {
            **self.split.as_dict(),
            "largest_parameters": self.largest,
            "equal": {**self.equal.as_dict(), "largest_parameters": self.equal_largest},
            "would_fit": None
            if self.split.fits
            else {"rows": self.fewer_rows, "parameters": self.largest, "more": dict(self.more)},
        }

    @property
    def shares(self) -> str:
        """The weights of all ranks, as Python; empty where all hold the same."""
        return "" if self.split.weights is None else runs_of(self.split.weights)

    def lines(self) -> Iterator[str]:
        """Yield a table of the kinds, the comparison, and the remedies."""
        heads = ("devices", "ranks", "rows", "states", "at rest", "peak", "of", "step")
        yield from ("", "one rank of each kind, at its fullest:")
        yield from columns([heads, *map(self._cells, self.split.kinds)], "<<>")
        yield ""
        tightest = self.split.tightest
        free = -max(tightest.missing.values())
        ends = f"{format_bytes(free)} free" if free >= 0 else f"{format_bytes(-free)} short"
        yield from wrapped(f"tightest: rank {tightest.kind.first} ({tightest.kind.name}), {ends}")
        for line in self._comparison():
            yield from wrapped(line)
        if not self.split.fits:
            yield from wrapped(f"it would fit with {' or with '.join(self._remedies())}")

    def _cells(self, plan: KindPlan) -> tuple[str, ...]:
        kind, step = plan.kind, plan.step
        last = kind.first + kind.ranks - 1
        own = self.split.rows[kind.first : last + 1]
        rows = str(plan.rows) if min(own) == plan.rows else f"{min(own)}-{plan.rows}"
        return (
            kind.name, f"{kind.first}-{last}" if kind.ranks > 1 else str(last), rows,
            format_share(plan.share), format_bytes(plan.at_rest_nbytes),
            format_bytes(plan.needs["device"]), format_bytes(kind.room["device"]),
            format_seconds(step.seconds) if step else "",
        )  # fmt: skip

    def _comparison(self) -> Iterator[str]:
        fits = "" if self.equal.fits else f", but {_short(self.equal)}"
        step, equal = self.split.step, self.equal.step
        if step is not None and equal is not None:
            times = equal.seconds / step.seconds
            slower = f"{format_seconds(equal.seconds)} a step, {times:.2f} x as long"
            yield f"an equal split takes {slower}{fits}"
        elif fits:
            yield f"an equal split does not fit: {_short(self.equal)}"
        if self.largest and self.equal_largest is not None:
            yield (
                f"largest model at these rows: about {_count(self.largest)} parameters; with an "
                f"equal split {_count(self.equal_largest)}"
            )

    def _remedies(self) -> list[str]:
        remedies = [f"--batch {self.fewer_rows}"] * (self.fewer_rows > 0)
        remedies += [f"{count} more {name}" for name, count in self.more]
        if self.largest:
            remedies.append(f"a model of about {_count(self.largest)} parameters")
        return remedies or ["a smaller model"]


def runs_of(numbers: tuple[int, ...]) -> str:
    """Write a list as Python, with repeated numbers as products.

    >>> runs_of((3, 3, 1))
    '[3] * 2 + [1]'
    """
    runs = [(number, len(list(run))) for number, run in groupby(numbers)]
    return " + ".join(f"[{number}] * {n}" if n > 1 else f"[{number}]" for number, n in runs)


def sampler_of(split: MixedSplit) -> str:
    """The line of a script that deals the rows of a split; empty where all ranks take the same."""
    if len(set(split.rows)) == 1:
        return ""
    return f"onefold.RowSampler(dataset, rows={sum(split.rows)}, shares={runs_of(split.rows)})"


def row_lines(split: MixedSplit) -> list[str]:
    """Say which ranks take how many rows of each micro-batch."""
    counts: list[str] = []
    first = 0
    for rows, run in groupby(split.rows):
        last = first + len(list(run)) - 1
        ranks = f"ranks {first}-{last}" if last > first else f"rank {first}"
        counts.append(f"{counted(rows, 'row')} on {ranks}")
        first = last + 1
    return wrapped(f"rows of each micro-batch: {', '.join(counts)}")


def _short(split: MixedSplit) -> str:
    tightest = split.tightest
    place, nbytes = max(tightest.missing.items(), key=lambda pair: pair[1])
    return f"{format_bytes(nbytes)}{'' if place == 'device' else f' of {place}'} short " + (
        f"on {tightest.kind.name}"
    )


def _count(numel: int) -> str:
    return f"{numel / 1e9:,.1f} billion" if numel >= 1e9 else f"{numel / 1e6:,.1f} million"


def _grown(numel: int, times: float | None) -> int | None:
    return None if times is None else int(numel * times)


def _fewer(job: MixedJob) -> int:
    """Return the most rows in the mean with which the job fits; 0: none."""
    quick, most, least = replace(job, exact=job.near), 0, job.rows
    while least - most > 1:
        middle = (most + least) // 2
        fits = replace(quick, rows=middle).best().fits
        most, least = (middle, least) if fits else (most, middle)
    while most and not replace(job, rows=most).best().fits:  # an extrapolation is off by a little
        most -= 1
    return most
