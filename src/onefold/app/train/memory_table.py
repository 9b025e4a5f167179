"""Compare the bytes that `onefold.report` counted on the ranks with the closed form.

For fp32 parameters of n elements over N ranks, by ZeRO stage (arXiv 1910.02054, section 5); where
nodes are replicas, N is the number of ranks of a node:

    stage      weight    grad     AdamW's two moments
    0          4n        4n       8n
    1, 2, 3    4n / N    4n / N   8n / N

At stages 1 and 2 the unsharded weights ("unsharded", not "weight") stay until the step. Between
micro-batches stages 0 and 1 also hold whole gradients, 4n ("partial_grad").
"""

import resource
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onefold.recipe import Recipe
from onefold.recording.recorder import expected_nbytes
from onefold.recording.report import Report
from onefold.text import columns, common_unit, in_unit, wrapped

TableRow = tuple[str, Sequence[int], *tuple[str | int, ...]]
"""A name, the bytes of each rank, and cells behind them: bytes or words."""


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """Bytes on one rank at the end of a step, before `zero_grad`, and at the peak."""

    rank: int
    now: dict[str, int]  # by kind
    peak: dict[str, int]
    total_peak: int  # in memory
    resident_peak: int  # of the whole process, by the system's count
    expected: dict[str, int]  # by kind, from the closed form
    tiers: dict[str, list[str]]  # tiers by kind

    def held(self, kind: str) -> int:
        """Return the bytes of a kind at the end of the step."""
        return self.now.get(kind, 0)


def measure(recipe: Recipe, report: Report) -> MeasuredMemory:
    """Return the bytes of a rank's report compared with the closed form."""
    return MeasuredMemory(
        rank=report.rank,
        now={kind: report.nbytes(kind) for kind in report.memory},
        peak={
            kind: sum(usage.peak for usage in tiers.values())
            for kind, tiers in report.memory.items()
        },
        total_peak=report.memory_peak,
        resident_peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        expected=expected_nbytes(recipe, report.shard),
        tiers={
            kind: [tier for tier, usage in tiers.items() if usage.now]
            for kind, tiers in report.memory.items()
        },
    )


def compared(memory: Sequence[MeasuredMemory], kind: str) -> str | int:
    """Return "equal" where all ranks hold a kind as expected, or the bytes expected of the first.

    These are the bytes at the end of the step.
    """
    is_equal = all(rank.held(kind) == rank.expected[kind] for rank in memory)
    return "equal" if is_equal else memory[0].expected[kind]


def rank_table(
    memory: Sequence[MeasuredMemory], rows: Iterable[TableRow], notes: Iterable[str],
    *, heads: Sequence[str], largest: int, most: int,
) -> list[str]:  # fmt: skip
    """Return a table of bytes with a column for each of the first `most` ranks, and notes below.

    Args:
        memory: of all ranks.
        rows: of the table.
        notes: lines below it.
        heads: of the columns behind those of the ranks.
        largest: bytes of the table's largest cell, which decide its unit.
        most: ranks that are shown.
    """
    name, unit = common_unit(largest)
    shown = memory[:most]
    cells = [[f"memory in {name}", *(f"rank {rank.rank}" for rank in shown), *heads]]
    for row, nbytes, *last in rows:
        last += [""] * (len(heads) - len(last))
        values = [*nbytes[: len(shown)], *last]
        words = (value if isinstance(value, str) else in_unit(value, unit) for value in values)
        cells.append([row, *words])
    lines = [part for note in notes for part in wrapped(note)]
    if len(memory) > most:
        lines.append(f"(the first {most} of {len(memory)} ranks; --json has all)")
    return [*columns(cells, "<>"), *lines]
