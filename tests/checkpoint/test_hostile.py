"""Any bytes in place of a checkpoint are a `CheckpointError`, soon, and run no code."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import onefold
from onefold import CheckpointError
from onefold.checkpoint.offline import inspect
from tests.support.hostile import CASES, PRETRAINED, built, outcome, refusals, save_good


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile") / "good"
    module, optimizer = save_good(folder)
    onefold.save_pretrained(module, folder.parent / "pretrained")
    return folder, module, optimizer


def test_the_good_checkpoint_is_accepted(good):
    folder, module, optimizer = good
    assert onefold.load(folder, module, optimizer) == {"a": 1}
    assert inspect(folder, verify=True).is_verified
    onefold.load_pretrained(module, folder.parent / "pretrained")


# what no list of a checkpoint's parts shows: `inspect` has no module to compare with
MISSING = {
    "json modules that are none", "json params number", "json params text",
    "json random of another kind", "json path of dicts", "header entry more",
}  # fmt: skip


def test_every_hostile_checkpoint_is_refused_in_time(good, tmp_path):
    """By `load`, `inspect` and `export`; and the good one loads afterwards."""
    folder, module, optimizer = good
    wrong = refusals(folder, CASES, module, optimizer, tmp_path, lambda name: name in MISSING)
    assert not wrong, "\n".join(wrong)
    assert len(CASES) >= 100
    assert onefold.load(folder, module, optimizer) == {"a": 1}


@pytest.mark.parametrize("sharded", [True, False])
def test_every_hostile_file_of_weights_is_refused_in_time(good, tmp_path, sharded):
    folder, _, _ = good
    wrong = []
    for number, (name, act) in enumerate(PRETRAINED.items()):
        path = tmp_path / str(number)
        shutil.copytree(folder.parent / "pretrained", path)
        act(path)
        module = built()[0] if sharded else _plain()
        end = outcome(lambda m=module, p=path: onefold.shard(onefold.load_pretrained(m, p)))
        if end != "refused":
            wrong.append(f"{name}: {end}")
    assert not wrong, "\n".join(wrong)


def _plain() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))


def test_old_values_are_not_kept_where_a_checkpoint_lacks_rows(good, tmp_path):
    """Rows that nobody has are no tensor to load: the weights stay, and nobody calls it done."""
    folder, module, optimizer = good
    path: Path = tmp_path / "a"
    shutil.copytree(folder, path)
    CASES["rows_that_nobody_has"](path)
    before = onefold.full_state_dict(module)
    with pytest.raises(CheckpointError, match="do not cover"):
        onefold.load(path, module, optimizer)
    for name, value in onefold.full_state_dict(module).items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize(
    "place",
    [
        "directory.json.loads", "listing.json.loads", "listing.extents", "listing.tiles",
        "source.untagged", "load.spread_ties",
    ],
)  # fmt: skip
def test_an_error_that_says_nothing_of_the_bytes_is_not_told_as_damage(
    good, monkeypatch, place, error
):
    folder, module, optimizer = good
    path, name = f"onefold.checkpoint.{place}".rsplit(".", 1)
    with monkeypatch.context() as patched:
        _raising(patched, path, name, error)
        with pytest.raises(error, match="made up"):
            onefold.load(folder, module, optimizer)
    assert onefold.load(folder, module, optimizer) == {"a": 1}


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_error_that_says_nothing_of_the_bytes_of_weights_is_not_told_as_damage(
    good, monkeypatch, error
):
    folder, module, optimizer = good
    for name in ("safe_open", "nbytes_of"):
        with monkeypatch.context() as patched:
            _raising(patched, "onefold.checkpoint.safetensors", name, error)
            with pytest.raises(error, match="made up"):
                onefold.shard(onefold.load_pretrained(built()[0], folder.parent / "pretrained"))
    with monkeypatch.context() as patched:
        _raising(patched, "onefold.checkpoint.held", "tagged", error)
        with pytest.raises(error, match="made up"):
            onefold.save(folder.parent / "other", module, optimizer, extra={"a": [{1}]})


def _raising(patched: pytest.MonkeyPatch, path: str, name: str, error: type) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error("made up")

    patched.setattr(f"{path}.{name}", fail)
    return fail
