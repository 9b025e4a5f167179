"""Write the newest results of benchmarks/peers.py into the README, between its two markers.

python benchmarks/readme.py            replace the table
python benchmarks/readme.py --check    exit 1 if the README says something else
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

from contest.results import read_newest
from contest.summary import PEAK, STEADY, WALL, base_of, engines_of, ratio, values

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"


def table() -> str:
    """One block of rows for each case: ratios to DDP in one run, bytes per parameter."""
    lines = []
    for name, result in sorted(read_newest().items()):
        rounds = result["rounds"]
        base = base_of(rounds[0])
        lines += [
            f"**{name}** (rounds: {len(rounds)}, {result['date']}, commit {result['commit']})",
            "",
            f"| engine | step / {base} | CPU-seconds / {base} | peak B/param | sent B/param |",
            "|---|---|---|---|---|",
        ]
        for engine in engines_of(rounds):
            wall, cpu = (ratio(rounds, engine, base, what) for what in (WALL, STEADY))
            peak, sent = (median(values(rounds, engine, what)) for what in (PEAK, "sent"))
            lines.append(f"| {engine} | {wall} | {cpu} | {peak:.1f} | {sent:.2f} |")
        lines.append("")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Replace or check what stands between the markers."""
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = f"{before}{BEGIN}\n{table()}{END}{after}"
    if "--check" in arguments:
        return int(wanted != text)
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
