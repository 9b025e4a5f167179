"""Folders of torch.distributed.checkpoint (DCP) that nobody saved, of format 1 and of others.

`CASES`: name -> what to do to a good folder of format 1. None may be accepted; each ends in a
`CheckpointError`, soon, and runs no code.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from onefold.checkpoint.contents import random_states
from onefold.engine.registry import engine_of
from tests.support.hostile import (
    BLOCK,
    PWNED,
    manifest_of,
    record_of,
    rewrite,
    save_good,
    write_manifest,
)

META, DATA = ".metadata", "__0_0.distcp"


class Boom:
    """Creates a file where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder / PWNED),)


def save_format_1(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Save the good checkpoint of one process, as format 1 did: by torch, with a manifest."""
    module, optimizer = save_good(folder.parent / "format-2")
    names = dict(module.named_parameters())
    states = {name: dict(optimizer.state[p]) for name, p in names.items()}
    (group,) = optimizer.param_groups
    own = {"extra": {"a": 1}, "random": random_states(engine_of(module)), "buffers": {}}
    own["modules"] = [{"own": [{}], "common": [{}], "companions": {}}]
    state = {
        "model": {name: p.detach() for name, p in names.items()},
        "optim": {"state": states, "param_groups": [{**group, "params": [*names]}]},
        "rank": {"0": (own,)},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    metadata = pickle.loads((folder / META).read_bytes())
    metadata.storage_meta.modules = ["onefold"]
    (folder / META).write_bytes(pickle.dumps(metadata))
    files = {name: record_of((folder / name).read_bytes()) for name in (META, DATA)}
    write_manifest(folder, {**manifest_of(folder.parent / "format-2"), "files": files, "format": 1})
    return module, optimizer


CASES: dict[str, Callable[[Path], None]] = {}


def case(act: Callable[[Path], None]) -> Callable[[Path], None]:
    CASES[act.__name__] = act
    return act


def pickle_case(name: str, data: Callable[[Path], bytes]) -> None:
    CASES[f"pickle {name}"] = lambda folder: rewrite(folder, META, data(folder))


def metadata_case(name: str, change: Callable[[Any], Any]) -> None:
    def act(folder: Path) -> None:
        metadata = pickle.loads((folder / META).read_bytes())
        change(metadata)
        rewrite(folder, META, pickle.dumps(metadata))

    CASES[f"metadata {name}"] = act


def infos_case(name: str, **changes: Any) -> None:
    """Change the place of every piece."""

    def changed(info: Any) -> Any:
        own = {k: v(info) if callable(v) else v for k, v in changes.items()}
        return dataclasses.replace(info, **own)

    def change(metadata: Any) -> None:
        metadata.storage_data = {i: changed(s) for i, s in metadata.storage_data.items()}

    metadata_case(name, change)


def tensors_case(name: str, change: Callable[[Any], Any]) -> None:
    """Change the description of every tensor."""

    def act(metadata: Any) -> None:
        for saved in metadata.state_dict_metadata.values():
            if hasattr(saved, "chunks"):
                change(saved)

    metadata_case(name, act)


# pickles

pickle_case("call", lambda f: pickle.dumps(Boom(f)))
metadata_case("call inside", lambda m: m.planner_data.update(x=Boom(Path("/nowhere"))))
pickle_case("empty", lambda f: b"")
pickle_case("text", lambda f: b"hello")
pickle_case("number", lambda f: pickle.dumps(5))
pickle_case("cut", lambda f: (f / META).read_bytes()[:-10])
pickle_case("deep lists", lambda f: b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".")
pickle_case("deep tuples", lambda f: b"\x80\x04)" + b"\x85" * 200_000 + b".")
pickle_case("huge memo", lambda f: b"\x80\x04Nr\xff\xff\xff\xff0N.")
pickle_case("huge bytes", lambda f: b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".")
pickle_case("huge bytearray", lambda f: b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".")
pickle_case("large bytearray", lambda f: b"\x80\x05\x96" + struct.pack("<Q", 1 << 31) + b".")
pickle_case("huge frame", lambda f: b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N.")
_TWICE = b"\x94h%c\x86"  # memoize, get it, make a tuple of both
pickle_case(
    "tuples of tuples as a key",
    lambda f: b"\x80\x04}N" + b"".join(_TWICE % i for i in range(60)) + b"Ns.",
)
pickle_case("persistent id", lambda f: b"\x80\x04NQ.")
pickle_case("extension", lambda f: b"\x80\x04\x82\x01.")


# metadata

infos_case("offset negative", offset=-100)
infos_case("offset huge", offset=1 << 60)
infos_case("offset behind", offset=lambda s: 1 << 20)
infos_case("offset one further", offset=lambda s: s.offset + 1)
infos_case("length huge", length=1 << 60)
infos_case("length 40 GB", length=40 << 30)
infos_case("length negative", length=-1)
infos_case("length zero", length=0)
infos_case("length NaN", length=float("nan"))
infos_case("length text", length="x")
infos_case("length short", length=lambda s: s.length // 2)
infos_case("path absolute", relative_path="/etc/passwd")
infos_case("path up", relative_path="../../x")
infos_case("path up and back", relative_path="../good/" + DATA)
infos_case("path number", relative_path=5)
infos_case("path of metadata", relative_path=META)
infos_case("one place for all", offset=0, length=4000)
infos_case("packed by torch", transform_descriptors=["zstd"])
tensors_case("without chunks", lambda t: setattr(t, "chunks", []))
tensors_case("chunks none", lambda t: setattr(t, "chunks", None))
tensors_case("chunks twice", lambda t: setattr(t, "chunks", [*t.chunks, *t.chunks]))


def _each_chunk(name: str, **of: Callable[[Any], Any]) -> None:
    def change(saved: Any) -> None:
        for chunk in saved.chunks:
            for key, value in of.items():
                setattr(chunk, key, value(chunk))

    tensors_case(name, change)


_each_chunk("chunk negative", offsets=lambda c: torch.Size([-3] * len(c.offsets)))
_each_chunk("chunk huge", sizes=lambda c: torch.Size([1 << 40] * len(c.sizes)))
_each_chunk("chunk smaller", sizes=lambda c: torch.Size([max(1, n // 2) for n in c.sizes]))
_each_chunk("chunk of more dimensions", sizes=lambda c: torch.Size([*c.sizes, 1]))
_each_chunk("chunk of text", sizes=lambda c: "64")
tensors_case("size huge", lambda t: setattr(t, "size", torch.Size([1 << 40])))
tensors_case("size of many dimensions", lambda t: setattr(t, "size", torch.Size([1] * 1000)))
tensors_case("dtype float64", lambda t: setattr(t.properties, "dtype", torch.float64))
tensors_case("dtype int32", lambda t: setattr(t.properties, "dtype", torch.int32))
metadata_case("names none", lambda m: setattr(m, "state_dict_metadata", None))
metadata_case("names number", lambda m: m.state_dict_metadata.update({3: 4}))
metadata_case("names fewer", lambda m: m.state_dict_metadata.pop("model.0.weight"))
metadata_case("storage none", lambda m: setattr(m, "storage_data", None))
metadata_case("storage empty", lambda m: m.storage_data.clear())
metadata_case(
    "rank state without a place",
    lambda m: [m.storage_data.pop(i) for i in list(m.storage_data) if i.fqn.startswith("rank.")],
)
metadata_case("storage list", lambda m: setattr(m, "storage_data", [1]))
metadata_case(
    "keys numbers", lambda m: setattr(m, "planner_data", dict.fromkeys(m.planner_data, 5))
)
metadata_case(
    "keys deep", lambda m: setattr(m, "planner_data", dict.fromkeys(m.planner_data, ("a", ("b",))))
)
metadata_case(
    "group of a huge number",
    lambda m: m.planner_data.update(
        {k: (*p[:2], 10**9, *p[3:]) for k, p in m.planner_data.items() if p[1] == "param_groups"}
    ),
)


# archives


def archive_case(name: str, wanted: str, change: Callable[[bytes], bytes]) -> None:
    """Append a changed archive to the data, and let the name `wanted` point there."""

    def act(folder: Path) -> None:
        metadata = pickle.loads((folder / META).read_bytes())
        data = (folder / DATA).read_bytes()
        for index, info in list(metadata.storage_data.items()):
            if index.fqn == wanted:
                own = change(data[info.offset : info.offset + info.length])
                place = {"offset": len(data), "length": len(own)}
                metadata.storage_data[index] = dataclasses.replace(info, **place)
                data += own
        rewrite(folder, META, pickle.dumps(metadata))
        rewrite(folder, DATA, data)

    CASES[f"archive {name}"] = act


def _object(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _zip(data: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", b"3\n")
    return file.getvalue()


class _Bytes:
    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, (1 << 40,)


WEIGHT, OWN = "model.0.weight", "rank.0"
archive_case("zeros", WEIGHT, lambda data: bytes(len(data)))
archive_case("of an object", WEIGHT, lambda data: _object({"a": 1}).ljust(len(data), b"\0"))
archive_case("of float64", WEIGHT, lambda data: _object(torch.zeros(64, 64, dtype=torch.float64)))
archive_case("of another shape", WEIGHT, lambda data: _object(torch.zeros(32, 128)))
archive_case("without its end", WEIGHT, lambda data: data[: len(data) // 2])
archive_case("call in extra", OWN, lambda data: _object([{"extra": Boom(Path("/nowhere"))}]))
archive_case("extra a number", OWN, lambda data: _object(5))
archive_case("extra a list", OWN, lambda data: _object([1, 2]))
archive_case("extra without random", OWN, lambda data: _object(({"extra": 1},)))
archive_case(
    "modules that are none", OWN,
    lambda data: _object(({"extra": 1, "random": {}, "buffers": {}, "modules": [5]},)),
)  # fmt: skip
archive_case(
    "random that is none", OWN,
    lambda data: _object(({"extra": 1, "random": {"torch": 1}, "buffers": {}, "modules": [{}]},)),
)  # fmt: skip
archive_case("extra zeros", OWN, lambda data: bytes(1000))
archive_case("extra packed", OWN, lambda data: _zip(b"0" * 10_000_000, zipfile.ZIP_DEFLATED))
archive_case(
    "extra of lists in lists", OWN,
    lambda data: _zip(b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."),
)  # fmt: skip
_LIST_OF_TWO = b"]q%c(h%ch%ce"  # a new list, memoized, of the one before twice
archive_case(
    "extra of lists twice in lists", OWN,
    lambda data: _zip(
        b"\x80\x02]q\0" + b"".join(_LIST_OF_TWO % (i, i - 1, i - 1) for i in range(1, 60)) + b"."
    ),
)  # fmt: skip
archive_case("extra of many bytes", OWN, lambda data: _object(({"extra": _Bytes()},)))
archive_case("extra cut", OWN, lambda data: data[:-40])
archive_case("lr text", "optim.param_groups.0.params", lambda data: _object("x"))
archive_case("params numbers", "optim.param_groups.0.params", lambda data: _object([1, 2]))


@case
def metadata_is_a_pipe_without_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / META).unlink()
    os.mkfifo(folder / META)


@case
def metadata_is_a_folder_without_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / META).unlink()
    (folder / META).mkdir()


@case
def a_piece_behind_the_last_block(folder: Path) -> None:
    """A file of whole blocks with one checksum more, and pieces at its end."""
    data = (folder / DATA).read_bytes()
    data += bytes(-len(data) % BLOCK)
    metadata = pickle.loads((folder / META).read_bytes())
    metadata.storage_data = {
        index: dataclasses.replace(info, offset=len(data), length=10)
        for index, info in metadata.storage_data.items()
    }
    rewrite(folder, META, pickle.dumps(metadata))
    rewrite(folder, DATA, data)
    fields = manifest_of(folder)
    fields["files"][DATA]["blocks"] += "00000000"
    write_manifest(folder, fields)


def _as_foreign(folder: Path, change: Callable[[Any], Any]) -> None:
    """Without a manifest, as another library saves; with another place for every piece."""
    (folder / "manifest.json").unlink()
    metadata = pickle.loads((folder / META).read_bytes())
    metadata.storage_meta.modules = []
    metadata.storage_data = {i: change(s) for i, s in metadata.storage_data.items()}
    (folder / META).write_bytes(pickle.dumps(metadata))


@case
def foreign_call(folder: Path) -> None:
    data = _object(Boom(folder))
    (folder / "evil").write_bytes(data)
    place = {"relative_path": "evil", "offset": 0, "length": len(data)}
    _as_foreign(folder, lambda info: dataclasses.replace(info, **place))


@case
def foreign_path_out(folder: Path) -> None:
    shutil.copyfile(folder / DATA, folder.parent / "outside")
    _as_foreign(folder, lambda info: dataclasses.replace(info, relative_path="../outside"))


@case
def foreign_data_is_a_pipe(folder: Path) -> None:
    _as_foreign(folder, lambda info: info)
    (folder / DATA).unlink()
    os.mkfifo(folder / DATA)
