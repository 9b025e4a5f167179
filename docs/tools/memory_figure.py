"""Draw docs/assets/memory-light.svg and memory-dark.svg: training states by stage.

    python docs/tools/memory_figure.py            write both
    python docs/tools/memory_figure.py --check    exit 1 if they differ

The numbers are the closed forms of docs/concepts/memory.md for bf16 weights, fp32 masters and Adam.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from made_files import write_or_check

ASSETS = Path(__file__).parent.parent / "assets"
BILLIONS, RANKS = 7, 8

LABELS = ("weights", "gradients", "Adam moments and fp32 masters")
WIDTH, LEFT, RIGHT, TOP, BAR, STEP = 760, 112, 92, 72, 30, 50


@dataclass(frozen=True)
class Theme:
    """Colours of one drawing."""

    text: str
    faint: str
    weights: str
    gradients: str
    optimizer: str


THEMES = {
    "light": Theme("#1f2328", "#59636e", "#0b7285", "#e8871e", "#4263eb"),
    "dark": Theme("#e6edf3", "#9198a1", "#3bc9db", "#ffa94d", "#748ffc"),
}


def states(ranks: int) -> dict[str, tuple[float, float, float]]:
    """Bytes per parameter on each rank between micro-batches: weights, gradients, optimizer states.

    At stages 1 and 2 a rank holds the gathered bf16 copy (2 bytes) beside its shard of weights. At
    stages 0 and 1 it holds whole gradients beside the memory of their means.
    """
    return {
        "stage 0": (2.0, 2.0 + 2.0, 12.0),
        "stage 1": (2.0 + 2 / ranks, 2.0 + 2 / ranks, 12 / ranks),
        "stage 2": (2.0 + 2 / ranks, 2 / ranks, 12 / ranks),
        "stage 3": (2 / ranks, 2 / ranks, 12 / ranks),
    }


def drawn(theme: Theme) -> str:
    """The whole SVG."""
    rows = states(RANKS)
    scale = (WIDTH - LEFT - RIGHT) / sum(rows["stage 0"])
    colours = (theme.weights, theme.gradients, theme.optimizer)
    height = TOP + STEP * len(rows) + 8
    font = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"
    title = (
        f"Memory per rank: {BILLIONS} billion parameters on {RANKS} ranks, accumulating gradients"
    )
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' "
        f"height='{height}' role='img' aria-label='{title}' {font}>",
        f"<text x='0' y='20' font-size='16' font-weight='600' fill='{theme.text}'>{title}</text>",
    ]
    at = 0
    for name, colour in zip(LABELS, colours, strict=True):
        lines += [
            f"<rect x='{at}' y='37' width='12' height='12' rx='2' fill='{colour}'/>",
            f"<text x='{at + 18}' y='48' font-size='13' fill='{theme.faint}'>{name}</text>",
        ]
        at += 40 + 7 * len(name)
    for index, (name, parts) in enumerate(rows.items()):
        top = TOP + STEP * index
        middle = top + BAR / 2 + 5
        lines.append(f"<text x='0' y='{middle:g}' font-size='15' fill='{theme.text}'>{name}</text>")
        at = LEFT
        for part, colour in zip(parts, colours, strict=True):
            width = part * scale
            lines.append(
                f"<rect x='{at:.1f}' y='{top}' width='{width:.1f}' height='{BAR}' fill='{colour}'/>"
            )
            at += width
        total = f"{sum(parts) * BILLIONS:.0f} GB"
        lines.append(
            f"<text x='{at + 10:.1f}' y='{middle:g}' font-size='15' font-weight='600' "
            f"fill='{theme.text}'>{total}</text>"
        )
    return "\n".join([*lines, "</svg>", ""])


def main(arguments: list[str]) -> int:
    """Write or check both drawings."""
    wanted = {ASSETS / f"memory-{name}.svg": drawn(theme) for name, theme in THEMES.items()}
    return write_or_check(wanted, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
