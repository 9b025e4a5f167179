"""Where Linux's own calls are missing, as on macOS, a module trains on the CPU, saves and loads.

A process that has lost these calls stands for another system: none runs here.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forking import HANG_S
from tests.support.rows import again_but

SCRIPT = """
import os, pathlib, sys
import numpy, torch, torch.distributed, torch.distributed.checkpoint, torch.distributed.tensor
import sysconfig, torch._dynamo, torch.utils.data
sysconfig.get_config_vars()

NAMES = ("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "posix_fallocate", "O_DIRECT",
         "O_TMPFILE", "POSIX_FADV_DONTNEED", "memfd_create", "pidfd_open", "setns", "unshare")
for name in NAMES:
    if name in vars(os):
        delattr(os, name)
import mmap
for name in ("MADV_HUGEPAGE", "MAP_POPULATE"):
    if name in vars(mmap):
        delattr(mmap, name)
sys.platform = "darwin"
before = pathlib.Path.open

def opened(self, *args, **options):
    if str(self).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "No such file or directory", str(self))
    return before(self, *args, **options)

pathlib.Path.open = opened

import onefold
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters())
onefold.shard(model, optimizer, stage=3, offload=sys.argv[2] or None)
for _ in range(2):
    model(torch.ones(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
onefold.save(sys.argv[1] + "/saved", model, optimizer)
onefold.load(sys.argv[1] + "/saved", model, optimizer)
with onefold.record(model) as recording:
    model(torch.ones(4, 64)).square().mean().backward()
    optimizer.step()
onefold.save_pretrained(model, sys.argv[1] + "/pretrained")
print("predicted", onefold.report(model).verdict)
"""


@again_but("disk")
@pytest.mark.process
@pytest.mark.parametrize("offload", ["", "optimizer", "disk"])
def test_a_module_trains_saves_and_loads_without_the_calls_of_linux(offload, tmp_path):
    tier = f"disk:{tmp_path}" if offload == "disk" else offload
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), tier], capture_output=True, text=True,
        timeout=HANG_S, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "within 5 %" in done.stdout
