"""Trackers get the numbers of `scalars()`: the lines of the guide run, and their files are read."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorboard")
pytest.importorskip("wandb")

pytestmark = pytest.mark.process
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "report-page.md"

GIVEN = """
import json, torch, onefold
from torch import nn

model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
onefold.shard(model, optimizer)
loader = [torch.arange(8).view(2, 4)] * 3
seen, report = [], onefold.report

def keeping(model):
    seen.append(report(model))
    return seen[-1]

onefold.report = keeping

def train_step(model, batch):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

READ = {
    "tensorboard": """
writer.close()
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

events = EventAccumulator("runs").Reload()
found = [{} for _ in loader]
for tag in events.Tags()["scalars"]:
    for event in events.Scalars(tag):
        found[event.step][tag.removeprefix("onefold/")] = event.value
""",
    "wandb": """
run.finish()
wandb.teardown()
import pathlib, struct, time
from wandb.proto.wandb_internal_pb2 import Record

def history():
    data = next(pathlib.Path("wandb").glob("offline-run-*/*.wandb")).read_bytes()
    at, found = 7, []  # a header, then records of a LevelDB log: crc, length, kind
    while at + 7 <= len(data):
        _, length, kind = struct.unpack_from("<IHB", data, at)
        assert kind == 1, "a record in one piece"
        if at + 7 + length > len(data):
            break
        record = Record.FromString(data[at + 7 : at + 7 + length])
        at += 7 + length
        if record.WhichOneof("record_type") == "history":
            items = {item.key or item.nested_key[0]: json.loads(item.value_json)
                     for item in record.history.item}
            found.append({k: v for k, v in items.items() if not k.startswith("_")})
    return found

until = time.monotonic() + 120
while len(found := history()) < len(loader) and time.monotonic() < until:
    time.sleep(0.1)  # another process writes it, on a full machine after `finish` (wandb 0.31)
""",
}


def lines_of(tracker: str) -> str:
    """The block of the guide that imports the tracker."""
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.S | re.M)
    (block,) = [block for block in blocks if re.search(rf"^(from|import) .*{tracker}", block)]
    return block


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_the_lines_of_the_guide_write_the_numbers_of_scalars(tracker, tmp_path):
    block = lines_of(tracker)
    assert len([line for line in block.splitlines() if line]) <= 6  # five, and the import
    end = "\nprint('FOUND', json.dumps([found, [each.scalars() for each in seen]]))\n"
    (tmp_path / "script.py").write_text(GIVEN + block + READ[tracker] + end)
    ended = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert ended.returncode == 0, ended.stderr
    found, wanted = json.loads(ended.stdout.partition("FOUND ")[2].splitlines()[0])
    assert [set(numbers) for numbers in found] == [set(numbers) for numbers in wanted]
    assert "model_flops_per_s" in found[-1]
    for got, numbers in zip(found, wanted, strict=True):
        assert got == pytest.approx(numbers, rel=1e-6)  # TensorBoard keeps fp32
