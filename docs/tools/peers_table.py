"""Write the tables of runs that `onefold.load` goes on with, by loading each; `--check` compares.

The folders are those in tests/foreign/data, which the programs wrote.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import onefold
from docs.tools.made_files import write_or_check
from tests.foreign import test_deepspeed
from tests.foreign.test_peers import RUNS, fresh
from tests.support.deepspeed_runs import built
from tests.support.peer_runs import STEPS

DOCS = Path(__file__).parents[1]
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
    "stage1": "ZeRO stage 1", "stage2": "ZeRO stage 2", "stage3": "ZeRO stage 3",
    "universal-stage1": "universal folder of stage 1",
    "universal-stage3": "universal folder of stage 3",
}  # fmt: skip
PAGES: dict[str, Callable[[str], bool]] = {
    "guides/checkpoints.md": lambda name: name in RUNS,
    "coming-from/ddp.md": lambda name: name in ("plain", "wrapped"),
    "coming-from/fsdp2.md": lambda name: name.startswith(("dcp", "rank-files")),
    "coming-from/accelerate.md": lambda name: name.startswith(("accelerate", "trainer")),
    "coming-from/deepspeed.md": lambda name: name not in RUNS,
}
HEAD = ("saved by", "weights", "moments", "steps", "scheduler", "position", "also returned")
POSITIONS = {
    "epoch", "global_step", "global_steps", "global_samples", "loops", "trainer_state",
    "train_state",
}  # fmt: skip


def loaded(name: str) -> tuple[Any, dict[str, Any], int]:
    """An optimizer, loaded with its model; what `load` returned; how many weights have changed."""
    if name in RUNS:
        path, (model, optimizer) = RUNS[name][0], fresh(name)
    else:
        path = test_deepspeed.DATA / f"deepspeed-{name}" / "t"
        model, optimizer = built(seed=1)
    onefold.shard(model, optimizer)
    before = {key: value.clone() for key, value in onefold.full_state_dict(model).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        extra = onefold.load(path, model, optimizer)
    after = onefold.full_state_dict(model)
    return optimizer, extra, sum(not before[key].equal(v) for key, v in after.items())


def row(name: str) -> str:
    optimizer, extra, changed = loaded(name)
    states = [state for state in optimizer.state.values() if state]
    schedulers = [key for key in extra if "sched" in key]
    positions = [key for key in extra if key in POSITIONS]
    more = [key for key in extra if key not in (*schedulers, *positions)]
    kept = (bool(changed), any("exp_avg" in state for state in states),
            any(int(state.get("step", 0)) == STEPS for state in states))  # fmt: skip
    cells = [NAMES[name], *("yes" if each else "no" for each in kept)]
    return f"| {' | '.join([*cells, *map(_keys, (schedulers, positions, more))])} |"


def _keys(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys) or "-"


def main(arguments: Sequence[str]) -> int:
    rows = {name: row(name) for name in NAMES}
    texts = {}
    for page, shows in PAGES.items():
        before, _, rest = (DOCS / page).read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
        lines += [line for name, line in rows.items() if shows(name)]
        texts[DOCS / page] = "\n".join([f"{before}{BEGIN}", *lines, f"{END}{after}"])
    return write_or_check(texts, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
