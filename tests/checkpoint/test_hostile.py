"""Any bytes in place of a checkpoint are a `CheckpointError`, soon, and run no code."""

from __future__ import annotations

import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import onefold
from onefold import CheckpointError
from onefold.checkpoint.offline import export, inspect
from tests.support.hostile import CASES, META, PRETRAINED, PWNED, built, rewrite, save_good

LIMIT_S = 5


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile") / "good"
    module, optimizer = save_good(folder)
    onefold.save_pretrained(module, folder.parent / "pretrained")
    return folder, module, optimizer


def outcome(act: Callable[[], object]) -> str:
    """The name of what a call ends in."""
    start = time.monotonic()
    try:
        act()
    except CheckpointError:
        end = "refused"
    except BaseException as error:
        end = f"{type(error).__name__}: {str(error)[:200]}"
    else:
        end = "accepted"
    return end if time.monotonic() - start < LIMIT_S else f"{end} late"


def test_the_good_checkpoint_is_accepted(good):
    folder, module, optimizer = good
    assert onefold.load(folder, module, optimizer) == {"a": 1}
    assert inspect(folder, verify=True).is_verified
    onefold.load_pretrained(module, folder.parent / "pretrained")


# what no list of a checkpoint's parts shows: `inspect` has no module to compare with
MISSING = {
    "metadata names fewer", "metadata group of a huge number", "archive lr text",
    "archive params numbers", "metadata dtype int32",
    "archive modules that are none", "archive random that is none",
}  # fmt: skip


def test_every_hostile_checkpoint_is_refused_in_time(good, tmp_path):
    """By `load`, `inspect` and `export`; and the good one loads afterwards."""
    folder, module, optimizer = good
    wrong = []
    for number, (name, act) in enumerate(CASES.items()):
        path = tmp_path / str(number) / "made-up"
        shutil.copytree(folder, path)
        act(path)
        ends = {"load": outcome(lambda p=path: onefold.load(p, module, optimizer))}
        ends["newest"] = outcome(lambda p=path: onefold.load(p.parent, module, optimizer))
        ends["inspect"] = outcome(lambda p=path: inspect(p, verify=True))
        for call, end in ends.items():
            if end != "refused" and not (end == "accepted" and _may_pass(name, call)):
                wrong.append(f"{name}: {call}: {end}")
        end = outcome(lambda p=path: export(p, p.parent / "exported"))
        if end not in ("refused", "accepted"):
            wrong.append(f"{name}: export: {end}")
        assert not list(tmp_path.rglob(PWNED)), name
    assert not wrong, "\n".join(wrong)
    assert len(CASES) >= 61
    assert onefold.load(folder, module, optimizer) == {"a": 1}


def _may_pass(name: str, call: str) -> bool:
    """`inspect` reads no tensors but through their checksums, which are right here."""
    is_unread = name.startswith("archive ") and "extra" not in name
    return call == "inspect" and (is_unread or name in MISSING)


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
    """A tensor without pieces is no tensor to load: the weights stay, and nobody calls it done."""
    folder, module, optimizer = good
    path: Path = tmp_path / "a"
    shutil.copytree(folder, path)
    CASES["metadata without chunks"](path)
    before = onefold.full_state_dict(module)
    with pytest.raises(CheckpointError, match="do not cover"):
        onefold.load(path, module, optimizer)
    for name, value in onefold.full_state_dict(module).items():
        assert torch.equal(value, before[name]), name


def test_a_part_of_the_metadata_that_no_load_needs_may_be_gone(good, tmp_path):
    folder, module, optimizer = good
    shutil.copytree(folder, tmp_path / "a")
    metadata = pickle.loads((folder / META).read_bytes())
    del metadata.storage_meta
    rewrite(tmp_path / "a", META, pickle.dumps(metadata))
    wanted = onefold.full_state_dict(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    assert onefold.load(tmp_path / "a", module, optimizer) == {"a": 1}
    found = onefold.full_state_dict(module)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize(
    "place",
    [
        "directory.json.loads", "unpickling._Machine.load", "unpickling.torch.load",
        "metadata._checked", "archives.extents", "load.spread_ties",
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
        _raising(patched, "torch", "save", error)
        with pytest.raises(error, match="made up"):
            onefold.save(folder.parent / "other", module, optimizer, extra={"a": [{1}]})


def _raising(patched: pytest.MonkeyPatch, path: str, name: str, error: type) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error("made up")

    patched.setattr(f"{path}.{name}", fail)
    return fail
