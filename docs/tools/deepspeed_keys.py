"""Write the tables of docs/coming-from/deepspeed.md from the keys that the code reads.

python docs/tools/deepspeed_keys.py            write them
python docs/tools/deepspeed_keys.py --check    exit 1 if they differ
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from onefold.adapters.deepspeed.keys import SECTIONS, ConfigKey

PAGE = Path(__file__).parent.parent / "coming-from" / "deepspeed.md"
BEGIN, END = "<!-- keys: docs/tools/deepspeed_keys.py writes them -->\n", "<!-- end of keys -->"


def tables() -> str:
    """The headings and tables; keys with one answer share a row."""
    parts = []
    for title, keys in SECTIONS.items():
        rows = [
            f"| {', '.join(f'`{name(key)}`' for key in same)} | {here} |"
            for here, same in groupby(keys, lambda key: key.here)
        ]
        parts.append("\n".join([f"### {title}", "", "| key | Onefold |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def name(key: ConfigKey) -> str:
    """The name as the page has it: sections of ZeRO without their common beginning."""
    return key.name.removesuffix(".*").removeprefix("zero_optimization.")


def page() -> str:
    """The whole page, with the tables of now."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.partition(END)[2]}"


def main(arguments: list[str]) -> int:
    """Write or check the page."""
    if "--check" in arguments:
        return int(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
