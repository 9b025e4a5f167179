"""Draw the README's badges from pyproject.toml: docs/assets/{python,torch,license}.svg.

python docs/tools/badges.py            write them
python docs/tools/badges.py --check    exit 1 if they differ
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from made_files import write_or_check

ROOT = Path(__file__).parent.parent.parent
ASSETS = ROOT / "docs" / "assets"
CHAR, PADDING = 6.6, 8


def badge(name: str, value: str) -> str:
    """One badge: the name on grey, the value on green."""
    left, right = (round(len(word) * CHAR + 2 * PADDING) for word in (name, value))
    font = "font-family='Verdana, Geneva, sans-serif' font-size='11' fill='#fff'"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{left + right}' height='20' role='img' "
        f"aria-label='{name}: {value}'>\n"
        f"<clipPath id='r'><rect width='{left + right}' height='20' rx='3'/></clipPath>\n"
        f"<g clip-path='url(#r)'><rect width='{left}' height='20' fill='#555'/>"
        f"<rect x='{left}' width='{right}' height='20' fill='#0b7285'/></g>\n"
        f"<text x='{left / 2:g}' y='14' text-anchor='middle' {font}>{name}</text>\n"
        f"<text x='{left + right / 2:g}' y='14' text-anchor='middle' {font}>{value}</text>\n"
        "</svg>\n"
    )


def badges() -> dict[str, str]:
    """File names and drawings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch = next(each for each in project["dependencies"] if each.startswith("torch"))
    oldest, above = re.findall(r"2\.(\d+)", torch)
    return {
        "python": badge("python", project["requires-python"].removeprefix(">=") + "+"),
        "torch": badge("torch", f"2.{oldest}-2.{int(above) - 1}"),
        "license": badge("license", project["license"]),
    }


def main(arguments: list[str]) -> int:
    """Write or check the badges."""
    wanted = {ASSETS / f"{name}.svg": text for name, text in badges().items()}
    return write_or_check(wanted, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
