"""How a script ends that leaves its module, its group or its saves to the interpreter."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fresh import run_scripts
from tests.support.rows import again_but, worlds_in_turn

GROUP = """
import atexit, torch, onefold
import torch.distributed as dist
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
atexit.register(lambda: print("initialized", dist.is_initialized()))  # runs last
onefold.shard(torch.nn.Linear(8, 8))
"""

PLAIN = """
import torch, onefold
from torch import nn
if {world_size} > 1:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    dist.init_process_group("fake", rank=0, world_size={world_size}, store=FakeStore())
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
onefold.shard(model, optimizer)
with torch.no_grad():
    model(torch.randn(2, 8))
if {world_size} == 1:
    model(torch.randn(2, 8)).sum().backward()
    if not {ends_in_backward}:
        optimizer.step()
print("done")
"""

SAVE = """
import torch, onefold
m = torch.nn.Linear(1024, 2048)
o = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9); onefold.shard(m, o)
onefold.save({path!r}, m, o, wait=False, keep=1)
"""

ENDS = [(world_size, in_backward) for world_size in (1, 2) for in_backward in (False, True)]


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[Any, Any]:
    """The scripts, once they have ended, and where one has saved."""
    folder = tmp_path_factory.mktemp("saved")
    scripts = {"group": GROUP, "save": SAVE.format(path=str(folder / "a"))}
    scripts |= {end: PLAIN.format(world_size=end[0], ends_in_backward=end[1]) for end in ENDS}
    found = dict(zip(scripts, run_scripts(list(scripts.values())), strict=True))
    return found | {"saved": folder / "a"}


def test_a_gloo_group_that_the_user_started_is_destroyed_at_exit(ended):
    """Its threads may end the process with SIGABRT otherwise, one exit in six of a Trainer."""
    done = ended["group"]
    assert (done.returncode, done.stdout, done.stderr) == (0, "initialized False\n", "")


@again_but("2-True")
@worlds_in_turn
@pytest.mark.parametrize(("world_size", "ends_in_backward"), ENDS)
def test_a_plain_script_prints_nothing_at_exit(ended, world_size, ends_in_backward):
    """The module lives at module level until the interpreter ends."""
    done = ended[world_size, ends_in_backward]
    assert (done.stdout, done.returncode) == ("done\n", 0)
    assert "Exception ignored" not in done.stderr


def test_a_script_that_ends_with_a_background_save_completes_it(ended):
    assert (ended["save"].returncode, ended["save"].stderr) == (0, "")
    assert (ended["saved"] / "manifest.json").exists()
