"""Compare simulated step times with published runs; write the tables of docs/measurements/.

Rows with model axes go to benchmarks/results/2026-11-23-published-axes.json, too.

python benchmarks/published.py            write them
python benchmarks/published.py --check    exit 1 if they say something else
python benchmarks/published.py --fit      search for each class's constants again (a minute)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from published_runs.fits import CLASSES, search
from published_runs.tables import ROWS, blocks, composed_results

FOLDER = Path(__file__).parent.parent / "docs" / "measurements"
PAGE = FOLDER / "time.md"
PARTS = {
    "time": ("drawing",),
    "time-formulas": ("memory",),
    "machines": ("machines", "links"),
    "published-runs": ("constants", "summary"),
    "published-axes": ("axes", "axes rows"),
    "scaling": ("scaling", "stragglers", "failures"),
    **{f"rows-{name}": (f"rows {name}",) for name in ROWS},
}
"""The generated parts of each page."""

RESULT = Path(__file__).parent / "results" / "2026-11-23-published-axes.json"


def filled(page: str, made: dict[str, list[str]]) -> str:
    """A page with its generated parts made anew."""
    text = (FOLDER / f"{page}.md").read_text()
    for name in PARTS[page]:
        lines = made[name]
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise SystemExit(f"expected {begin} and {end} in {page}.md, got none")
        text = "\n".join((before + begin, *lines, end + after))
    return text


def main(arguments: list[str]) -> int:
    """Write or check the page, or fit."""
    if "--fit" in arguments:
        for fit in CLASSES:
            print(f"{fit.name}: {search(fit)}")
        return 0
    made = blocks()
    wanted = {FOLDER / f"{page}.md": filled(page, made) for page in PARTS}
    rows = json.dumps(composed_results(), indent=1) + "\n"
    if "--check" in arguments:
        is_old = any(path.read_text() != text for path, text in wanted.items())
        return int(is_old or RESULT.read_text() != rows)
    for path, text in wanted.items():
        path.write_text(text)
    RESULT.write_text(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
