"""Which rows constants are fitted on, and how: by a search on a grid, the same every time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from onefold.planner.machines import FITS, Efficiency
from published_runs.rows import Row, all_rows

GRID = 0.01
COARSE = 0.08  # the first stride of the search


@dataclass(frozen=True, slots=True)
class Fit:
    """One class of machine and software: at most three constants, fitted on a stated part.

    `most` bounds the share of the peak that products may reach: the best that anybody measured.
    """

    name: str
    part: str  # the fitted rows, in words
    constants: tuple[str, ...]
    start: Efficiency
    most: float
    belongs: Callable[[Row], bool]
    is_fitted: Callable[[Row], bool]

    @property
    def efficiency(self) -> Efficiency:
        """The constants that were found, as the planner has them."""
        return FITS[self.name]

    def rows(self) -> list[Row]:
        """The fitted rows."""
        return [row for row in all_rows() if self.belongs(row) and self.is_fitted(row)]

    def others(self) -> list[Row]:
        """The rows that are predicted."""
        return [row for row in all_rows() if self.belongs(row) and not self.is_fitted(row)]

    def neighbours(self, efficiency: Efficiency, stride: float) -> list[Efficiency]:
        """One constant more or less by a stride, inside the bounds."""
        found = []
        for constant in self.constants:
            for step in (stride, -stride):
                value = round(getattr(efficiency, constant) + step, 2)
                most = self.most if constant == "matmul" else 0.95
                if GRID <= value <= most:
                    found.append(replace(efficiency, **{constant: value}))
        return found


def loss(rows: Sequence[Row], efficiency: Efficiency) -> float:
    """Mean squared error."""
    return mean(row.error(efficiency) ** 2 for row in rows)


def search(fit: Fit) -> Efficiency:
    """Walk downhill over the grid from the start, in strides that shrink to one hundredth."""
    rows, best, stride = fit.rows(), fit.start, COARSE
    lowest = loss(rows, best)
    while stride >= GRID:
        tried = [(loss(rows, each), each) for each in fit.neighbours(best, stride)]
        least, at = min(tried, key=lambda pair: pair[0])
        if least < lowest:
            lowest, best = least, at
        else:
            stride /= 2
    return best


def _is_foundry(machine: str) -> Callable[[Row], bool]:
    return lambda row: row.source == "llm-foundry" and row.machine.startswith(machine)


def _one_node(machine: str) -> Callable[[Row], bool]:
    return lambda row: (
        row.machine == machine
        and row.dtype == "bf16"
        and row.ranks == 8
        and row.model in ("1b", "7b", "13b")
    )


FOUNDRY_PART = "1b, 7b and 13b on one node, bf16"
OVERLAP = ("matmul", "memory", "contention")
CLASSES = (
    Fit("FSDP 2023, H100", FOUNDRY_PART, OVERLAP, Efficiency(0.6, 0.16, 0.5, 0.5), 0.80,
        _is_foundry("h100"), _one_node("h100-80")),
    Fit("FSDP 2023, A100", FOUNDRY_PART, OVERLAP, Efficiency(0.6, 0.33, 0.5, 0.5), 0.87,
        _is_foundry("a100"), _one_node("a100-80")),
    Fit("FSDP2 2024, H100", "Llama 8B on one node", ("matmul", "memory"),
        Efficiency(0.6, 0.35, 0.5, 0.5), 0.80,
        lambda row: row.source == "torchtitan", lambda row: row.ranks == 8),
    Fit("ZeRO-3 2021, A100", "175B", ("matmul", "link"),
        Efficiency(0.6, 0.33, 0.15, 0.5, link=0.5), 0.87,
        lambda row: row.source == "megatron", lambda row: row.model == "175B"),
)  # fmt: skip
