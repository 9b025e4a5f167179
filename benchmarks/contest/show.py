"""The comparison in the terminal: one table a case, its targets, its loss curves."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from contest.case import Case
from contest.laws import laws
from contest.summary import (
    LOSS_TOLERANCE,
    PEAK,
    STEADY,
    WALL,
    Round,
    Verdict,
    base_of,
    curve,
    disagreement,
    engines_of,
    ratio,
    values,
    verdicts,
)


def show_case(console: Console, case: Case, rounds: list[Round]) -> None:
    """Print everything there is to say about one case."""
    if not rounds:
        console.print(f"{case.name}: no round was finished")
        return
    console.print(_costs(case, rounds))
    judged = verdicts(case.as_dict(), rounds)
    if judged:
        console.print(targets_table(judged))
    for law in laws(case, rounds[0]):
        console.print(
            f"{law.engine}: {law.what} {law.found:.3f} bytes per parameter, closed form "
            f"{law.wanted:.3f}: {law.ratio:.4f}, {'holds' if law.holds else 'MISSED'}"
        )
    console.print(_losses(case, rounds))


def _costs(case: Case, rounds: list[Round]) -> Table:
    base = base_of(rounds[0])
    numel = next(iter(rounds[0].values()))[0]["numel"]
    table = Table(
        title=f"{case.name}: {numel / 1e6:.1f} M parameters, {len(rounds)} rounds",
        caption=f"ratios to {base}: median of the rounds, lowest and highest; bytes per parameter",
        title_justify="left",
    )
    table.add_column("engine", no_wrap=True)
    for heading in ("step s", "ratio", "CPU-s", "ratio", "peak B", "rest B", "sent B", "ledger B"):
        table.add_column(heading, justify="right", no_wrap=True)
    for engine in engines_of(rounds):
        wall, cpu = (ratio(rounds, engine, base, what) for what in (WALL, STEADY))
        last = next(found[engine] for found in reversed(rounds) if engine in found)
        peaks = [rank["ledger"].get("peak", 0) / numel for rank in last]
        table.add_row(
            engine,
            f"{median(values(rounds, engine, WALL)):.3f}",
            str(wall),
            f"{median(values(rounds, engine, STEADY)):.3f}",
            str(cpu),
            *(f"{median(values(rounds, engine, what)):.1f}" for what in (PEAK, "resident")),
            f"{median(values(rounds, engine, 'sent')):.2f}",
            f"{max(peaks):.2f}" if max(peaks) else "",
        )
    return table


def targets_table(judged: list[Verdict]) -> Table:
    """What had to be reached, and was or was not."""
    table = Table(title="targets", title_justify="left")
    for heading in ("ratio", "of", "at most", "CPU-seconds", "wall", "peak bytes", ""):
        table.add_column(heading, no_wrap=True)
    for verdict in judged:
        target = verdict.target
        cells: list[Any] = [verdict.cpu, verdict.wall, verdict.peak]
        table.add_row(
            f"{target.ours} / {target.peer}",
            target.measure,
            f"{target.at_most:.2f}",
            *("" if cell is None else str(cell) for cell in cells),
            "holds" if verdict.holds else "MISSED",
        )
    return table


def _losses(case: Case, rounds: list[Round]) -> Table:
    apart = disagreement(rounds)
    worst = max(apart.values())
    allowed = LOSS_TOLERANCE[case.dtype]
    verdict = "agree" if worst <= allowed else "DO NOT AGREE"
    table = Table(
        title=f"losses {verdict}: at most {worst:.1e} apart, {allowed:.0e} allowed",
        title_justify="left",
    )
    num_steps = len(curve(next(iter(rounds[0].values()))))
    shown = sorted({round(i * (num_steps - 1) / 5) for i in range(6)})
    table.add_column("engine", no_wrap=True)
    for step in shown:
        table.add_column(f"step {step + 1}", justify="right")
    for engine in apart:
        losses = curve(next(found[engine] for found in rounds if engine in found))
        table.add_row(engine, *(f"{losses[step]:.5f}" for step in shown))
    return table
