"""Count what a steady step asks of the host, next to FSDP2, on the simulated device.

    python benchmarks/device_costs.py

Waits of the host, messages and kernels of the last of four steps on rank 0 of three, as a table
in Markdown. Counts, unlike seconds, are those of a GPU, but for kernels that Triton fuses there.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.sim.counting import CASES, Cost, costs
from tests.sim.ranks import run_sim


def cells(cost: Cost | None) -> str:
    """Waits, messages and kernels, as three cells of the table."""
    if cost is None:
        return "- | - | -"
    return f"{cost.waits.total()} | {cost.messages.total()} | {cost.kernels}"


def main() -> None:
    """Print the table."""
    compared = [name for name, case in CASES.items() if case["stage"] >= 2]
    found = run_sim(3, costs, compared, checks_races=False)[0]
    units = next(iter(found.values()))[0].units
    print(f"A model of {units} units, three ranks:\n")
    print("| | host waits | messages | kernels | FSDP2: host waits | messages | kernels |")
    print("|---|---|---|---|---|---|---|")
    for name, (own, peer) in found.items():
        print(f"| {name} | {cells(own)} | {cells(peer)} |")


if __name__ == "__main__":
    main()
