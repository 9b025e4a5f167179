"""Write the table of runs that `onefold.load` goes on with, by loading each; `--check` compares.

The folders are those in tests/foreign/data, which the programs wrote.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import onefold
from docs.tools.made_files import write_or_check
from tests.foreign.test_peers import RUNS, fresh

PAGE = Path(__file__).parents[1] / "guides" / "checkpoints.md"
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
NAMES = {
    "plain": "`torch.save`, under keys of your own", "wrapped": "`torch.save`, names of DDP",
    "accelerate": "Accelerate `save_state`", "accelerate-fsdp2": "Accelerate `save_state`, FSDP2",
    "lightning": "Lightning `.ckpt`", "trainer": "Trainer `checkpoint-N`",
    "rank-files": "one pickled file a rank, as verl", "dcp-nested": "DCP, `model` and `optim`",
    "dcp-app": "DCP, torch's tutorial", "dcp-flattened": "DCP, flattened optimizer",
    "dcp-optimizer": "DCP, `model` and `optimizer`",
    "lightning-fsdp2": "Lightning, FSDP2",
    "dcp-torchtitan": "DCP, as torchtitan writes it", "dcp-numbers": "DCP, states by number",
}  # fmt: skip


def table() -> str:
    lines = ["| saved by | weights | moments | also returned |", "|---|---|---|---|"]
    for name, (path, _) in RUNS.items():
        model, optimizer = fresh(name)
        onefold.shard(model, optimizer)
        before = {key: value.clone() for key, value in onefold.full_state_dict(model).items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            extra = onefold.load(path, model, optimizer)
        after = onefold.full_state_dict(model)
        weights = sum(not before[key].equal(value) for key, value in after.items())
        moments = sum("exp_avg" in state for state in optimizer.state.values())
        more = ", ".join(f"`{key}`" for key in extra) or "-"
        shown = ("yes" if weights else "no", "yes" if moments else "no", more)
        lines.append(f"| {NAMES.get(name, name)} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    text = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    return write_or_check({PAGE: text}, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
