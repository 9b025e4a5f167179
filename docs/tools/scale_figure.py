"""Draw docs/assets/scale-light.svg and scale-dark.svg: host time of a unit over the ranks.

    python docs/tools/scale_figure.py            write both
    python docs/tools/scale_figure.py --check    exit 1 if they differ

The numbers are those of the newest `benchmarks/results/*-host-overhead.json`.
"""

from __future__ import annotations

import json
import sys
from math import log2
from pathlib import Path

from made_files import write_or_check
from memory_figure import ASSETS, THEMES, Theme

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 330, 44, 150, 56, 40
LINES = (("fsdp2", "even"), ("fsdp2", "uneven"), ("onefold 3", "even"), ("onefold 3", "uneven"))
NAMES = {"fsdp2": "FSDP2", "onefold 3": "Onefold"}


def measured() -> dict[tuple[str, str], list[tuple[int, float]]]:
    """(Ranks, milliseconds a unit) of each line, by engine and kind of rows."""
    newest = max(RESULTS.glob("*-host-overhead.json"))
    found: dict[tuple[str, str], list[tuple[int, float]]] = {line: [] for line in LINES}
    for name, by_engine in json.loads(newest.read_text())["ms"].items():
        ranks, kind = int(name.split()[0]), name.rpartition("(")[2].rstrip(")")
        for engine, ms in by_engine.items():
            if (engine, kind) in found:
                found[engine, kind].append((ranks, ms))
    return found


def drawn(theme: Theme) -> str:
    """The whole SVG."""
    lines = measured()
    ranks = sorted({at for points in lines.values() for at, _ in points})
    most = max(ms for points in lines.values() for _, ms in points)
    step = 1 if most < 6 else 2
    top_ms = step * (int(most // step) + 1)

    def x(at: int) -> float:
        first, last = log2(ranks[0]), log2(ranks[-1])
        return LEFT + (WIDTH - LEFT - RIGHT) * (log2(at) - first) / (last - first)

    def y(ms: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * ms / top_ms

    title = "Host time of a unit, forward and backward, in ms"
    font = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' "
        f"height='{HEIGHT}' role='img' aria-label='{title}, by ranks' {font}>",
        f"<text x='0' y='20' font-size='16' font-weight='600' fill='{theme.text}'>{title}</text>",
    ]
    faint = f"font-size='13' fill='{theme.faint}'"
    for ms in range(0, top_ms + 1, step):
        parts.append(
            f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y(ms):.1f}' y2='{y(ms):.1f}' "
            f"stroke='{theme.faint}' stroke-opacity='0.25'/>"
        )
        parts.append(
            f"<text x='{LEFT - 10}' y='{y(ms) + 4:.1f}' {faint} text-anchor='end'>{ms}</text>"
        )
    for at in ranks:
        where = f"x='{x(at):.1f}' y='{HEIGHT - BOTTOM + 20}'"
        parts.append(f"<text {where} {faint} text-anchor='middle'>{at:,}</text>")
    parts.append(
        f"<text x='{WIDTH - RIGHT}' y='{HEIGHT - 4}' {faint} text-anchor='end'>ranks</text>"
    )
    ends = _apart({line: y(points[-1][1]) for line, points in lines.items()})
    for (engine, kind), points in lines.items():
        colour = theme.gradients if engine == "fsdp2" else theme.weights
        path = " ".join(f"{x(at):.1f},{y(ms):.1f}" for at, ms in points)
        dash = " stroke-dasharray='5 4'" if kind == "uneven" else ""
        parts.append(
            f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2.5'{dash}/>"
        )
        parts.append(
            f"<text x='{WIDTH - RIGHT + 10}' y='{ends[engine, kind] + 4:.1f}' font-size='13' "
            f"fill='{colour}'>{NAMES[engine]}, {kind}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def _apart(wanted: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """Heights of labels near the wanted ones, 16 apart, from the top down."""
    found, last = dict[tuple[str, str], float](), 0.0
    for line, height in sorted(wanted.items(), key=lambda item: item[1]):
        last = found[line] = max(height, last + 16)
    return found


def main(arguments: list[str]) -> int:
    """Write or check both drawings."""
    wanted = {ASSETS / f"scale-{name}.svg": drawn(theme) for name, theme in THEMES.items()}
    return write_or_check(wanted, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
