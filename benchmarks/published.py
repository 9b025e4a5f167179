"""Compare simulated step times with published runs; write docs/measurements/time.md's tables.

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
from published_runs.tables import blocks, composed_results

PAGE = Path(__file__).parent.parent / "docs" / "measurements" / "time.md"
RESULT = Path(__file__).parent / "results" / "2026-11-23-published-axes.json"


def filled(text: str) -> str:
    """The page with every generated part made anew."""
    for name, lines in blocks().items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise SystemExit(f"expected {begin} and {end} in {PAGE}, got none")
        text = "\n".join((before + begin, *lines, end + after))
    return text


def main(arguments: list[str]) -> int:
    """Write or check the page, or fit."""
    if "--fit" in arguments:
        for fit in CLASSES:
            print(f"{fit.name}: {search(fit)}")
        return 0
    text = PAGE.read_text()
    wanted, rows = filled(text), json.dumps(composed_results(), indent=1) + "\n"
    if "--check" in arguments:
        return int(text != wanted or RESULT.read_text() != rows)
    PAGE.write_text(wanted)
    RESULT.write_text(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
