"""Any bytes in place of another program's checkpoint are a `CheckpointError`, and run no code."""

from __future__ import annotations

import pickle
import shutil
import sys
import types
from pathlib import PosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp

import onefold
from onefold.checkpoint.offline import export, inspect
from onefold.foreign import PEERS
from tests.support.hostile import outcome, refusals, rewrite
from tests.support.hostile_dcp import CASES, META, save_format_1


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile") / "good"
    return folder, *save_format_1(folder)


def test_a_good_folder_of_format_1_is_loaded_inspected_and_exported(good, tmp_path):
    folder, module, optimizer = good
    wanted = onefold.full_state_dict(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    assert onefold.load(folder, module, optimizer) == {"a": 1}
    found = onefold.full_state_dict(module)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert inspect(folder, PEERS, verify=True).is_verified
    export(folder, tmp_path / "out", PEERS)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("home", ["pathlib", "pathlib._local"])
def test_a_folder_names_its_path_as_any_python_does(home, tmp_path, monkeypatch):
    """Python 3.13 pickles paths by another name than 3.11 does."""
    named = types.ModuleType(home)
    named.PosixPath = PosixPath
    monkeypatch.setitem(sys.modules, home, named)
    monkeypatch.setattr(PosixPath, "__module__", home)
    module = torch.nn.Linear(3, 2)
    dcp.save({"model": module.state_dict()}, checkpoint_id=PosixPath(tmp_path))
    assert home.encode() in (tmp_path / ".metadata").read_bytes()
    seen = inspect(tmp_path, PEERS, verify=True)
    assert len(seen.rows) == 2


# what no list of a checkpoint's parts shows: `inspect` has no module to compare with
MISSING = {
    "metadata names fewer", "metadata group of a huge number", "archive lr text",
    "archive params numbers", "metadata dtype int32",
    "archive modules that are none", "archive random that is none",
}  # fmt: skip


def test_every_hostile_folder_is_refused_in_time(good, tmp_path):
    """By `load`, `inspect` and `export`; and the good one loads afterwards."""
    folder, module, optimizer = good

    def may_pass(name: str) -> bool:  # tensors are read through their checksums, which are right
        is_unread = name.startswith("archive ") and "extra" not in name
        return is_unread or name in MISSING

    wrong = refusals(folder, CASES, module, optimizer, tmp_path, may_pass)
    assert not wrong, "\n".join(wrong)
    assert len(CASES) >= 50
    assert onefold.load(folder, module, optimizer) == {"a": 1}


def test_a_part_of_the_metadata_that_no_load_needs_may_be_gone(good, tmp_path):
    folder, module, optimizer = good
    shutil.copytree(folder, tmp_path / "a")
    metadata = pickle.loads((folder / META).read_bytes())
    del metadata.storage_meta
    rewrite(tmp_path / "a", META, pickle.dumps(metadata))
    assert onefold.load(tmp_path / "a", module, optimizer) == {"a": 1}


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize(
    "place",
    [
        "unpickling._Machine.load",
        "unpickling.torch.load",
        "metadata._checked_metadata",
        "archives.sizes_of",
    ],
)
def test_an_error_that_says_nothing_of_the_bytes_is_not_told_as_damage(
    good, monkeypatch, place, error
):
    folder, module, optimizer = good

    def fail(*_: object, **__: object) -> None:
        raise error("made up")

    with monkeypatch.context() as patched:
        patched.setattr(f"onefold.foreign.{place}", fail)
        with pytest.raises(error, match="made up"):
            onefold.load(folder, module, optimizer)
    assert onefold.load(folder, module, optimizer) == {"a": 1}
    assert outcome(lambda: onefold.load(folder, module, optimizer)) == "accepted"
