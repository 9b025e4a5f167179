"""Checkpoints and weight files that nobody saved: each is a good one with one thing changed.

`CASES`: name -> what to do to a good folder of `onefold.save`. `PRETRAINED`: the same for a folder
of `onefold.save_pretrained`. None may be accepted; each ends in a `CheckpointError`, soon.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onefold

BLOCK = 1 << 20
META = ".metadata"
DATA = "__0_0.distcp"
PWNED = "ran"


class Boom:
    """Creates a file where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder / PWNED),)


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The module that the good checkpoint is of."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(module.parameters())
    onefold.shard(module, optimizer, stage=3)
    return module, optimizer


def save_good(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Save the good checkpoint, after a step."""
    module, optimizer = built()
    module(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    onefold.save(folder, module, optimizer, extra={"a": 1})
    return module, optimizer


def record_of(data: bytes) -> dict[str, Any]:
    """What a manifest says of a file."""
    blocks = (data[i : i + BLOCK] for i in range(0, len(data), BLOCK))
    return {"nbytes": len(data), "blocks": "".join(f"{zlib.crc32(b):08x}" for b in blocks)}


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text().partition("\n")[2].removesuffix("}\n"))


def write_manifest(folder: Path, fields: Any, body: str | None = None) -> None:
    """Write a manifest whose checksum is right."""
    body = json.dumps(fields) if body is None else body
    head = f'{{"crc32":"{zlib.crc32(body.encode()):08x}","manifest":'
    (folder / "manifest.json").write_text(f"{head}\n{body}}}\n")


def rewrite(folder: Path, name: str, data: bytes) -> None:
    """Replace a file, with checksums that are right."""
    (folder / name).write_bytes(data)
    fields = manifest_of(folder)
    fields["files"][name] = record_of(data)
    write_manifest(folder, fields)


CASES: dict[str, Callable[[Path], None]] = {}
PRETRAINED: dict[str, Callable[[Path], None]] = {}


def case(act: Callable[[Path], None]) -> Callable[[Path], None]:
    CASES[act.__name__] = act
    return act


def fields_case(name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    def act(folder: Path) -> None:
        fields = manifest_of(folder)
        write_manifest(folder, change(fields) or fields)

    CASES[f"manifest {name}"] = act


def body_case(name: str, change: Callable[[str], str]) -> None:
    CASES[f"manifest {name}"] = lambda f: write_manifest(
        f, None, change(json.dumps(manifest_of(f)))
    )


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


# the manifest

fields_case("without format", lambda j: j.pop("format") and j)
fields_case("format text", lambda j: {**j, "format": "x"})
fields_case("format negative", lambda j: {**j, "format": -1})
body_case("format NaN", lambda body: body.replace('"format": 1', '"format": NaN'))
body_case("size NaN", lambda body: re.sub(r'"nbytes": \d+', '"nbytes": NaN', body))
fields_case("files list", lambda j: {**j, "files": []})
fields_case("files none", lambda j: {**j, "files": None})
fields_case("files empty", lambda j: {**j, "files": {}})
fields_case("record of more", lambda j: j["files"][META].update(evil=1))
fields_case("negative size", lambda j: j["files"][META].update(nbytes=-5))
fields_case("huge size", lambda j: j["files"][META].update(nbytes=1 << 62))
fields_case("size true", lambda j: j["files"][META].update(nbytes=True))
fields_case("size of another", lambda j: j["files"][META].update(nbytes=17))
fields_case("checksums number", lambda j: j["files"][META].update(blocks=5))
fields_case("checksums none", lambda j: j["files"][META].update(blocks=""))
fields_case("checksums short", lambda j: j["files"][DATA].update(blocks="0"))
fields_case("body list", lambda j: [1, 2])
body_case("body deep", lambda body: "[" * 100_000 + "]" * 100_000)
body_case("body deep dicts", lambda body: '{"a":' * 100_000 + "1" + "}" * 100_000)
body_case("body text", lambda body: '"x"')
body_case("body long number", lambda body: body.replace('"step": 1', f'"step": {"9" * 10_000}'))
fields_case("path out", lambda j: j["files"].update({"../" * 9 + "etc/passwd": record_of(b"x")}))
fields_case("path absolute", lambda j: j["files"].update({"/etc/passwd": record_of(b"x")}))
fields_case("path dot dot", lambda j: j["files"].update({"..": record_of(b"x")}))
fields_case("path NUL", lambda j: j["files"].update({"a\0b": record_of(b"x")}))
fields_case("path long", lambda j: j["files"].update({"a" * 5000: record_of(b"x")}))
fields_case("path empty", lambda j: j["files"].update({"": record_of(b"x")}))
fields_case("without metadata", lambda j: j["files"].pop(META) and j)
fields_case("without data", lambda j: j["files"].pop(DATA) and j)
fields_case("optimizers", lambda j: {**j, "optimizers": [{"kind": 1}]})
fields_case("optimizers text", lambda j: {**j, "optimizers": "x"})
fields_case("optimizer groups", lambda j: j["optimizers"][0].update(num_groups="x"))
fields_case("another field", lambda j: {**j, "evil": 1})
fields_case("step text", lambda j: {**j, "step": "x"})
fields_case("step none", lambda j: {**j, "step": None})
fields_case("step fraction", lambda j: {**j, "step": 1.5})
fields_case("world text", lambda j: {**j, "world_size": "many"})
fields_case("world zero", lambda j: {**j, "world_size": 0})
fields_case("config list", lambda j: {**j, "config": [1]})
fields_case("frozen text", lambda j: {**j, "frozen": "no"})
fields_case("versions list", lambda j: {**j, "versions": ["1"]})
fields_case("surrogate", lambda j: {**j, "save_id": "\ud800"})


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


# files


@case
def data_is_a_link_out(folder: Path) -> None:
    (folder / DATA).unlink()
    (folder / DATA).symlink_to("/etc/passwd")


@case
def data_is_a_folder(folder: Path) -> None:
    (folder / DATA).unlink()
    (folder / DATA).mkdir()


@case
def data_is_a_link_to_itself(folder: Path) -> None:
    (folder / DATA).unlink()
    (folder / DATA).symlink_to(folder / DATA)


@case
def data_is_a_pipe(folder: Path) -> None:
    (folder / DATA).unlink()
    os.mkfifo(folder / DATA)


@case
def data_is_a_device(folder: Path) -> None:
    (folder / DATA).unlink()
    (folder / DATA).symlink_to("/dev/zero")


@case
def manifest_is_a_pipe(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


@case
def manifest_is_a_device(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").symlink_to("/dev/zero")


@case
def manifest_is_a_folder(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()


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


# safetensors

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def header_case(name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    def act(folder: Path) -> None:
        data = (folder / FILE).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        text = json.dumps(change(header) or header).encode()
        data = len(text).to_bytes(8, "little") + text + data[8 + length :]
        (folder / FILE).write_bytes(data)

    PRETRAINED[f"header {name}"] = act


def bytes_case(name: str, change: Callable[[bytes], bytes]) -> None:
    def act(folder: Path) -> None:
        (folder / FILE).write_bytes(change((folder / FILE).read_bytes()))

    PRETRAINED[f"file {name}"] = act


def index_case(name: str, index: Any) -> None:
    def act(folder: Path) -> None:
        text = index if isinstance(index, str) else json.dumps(index)
        (folder / INDEX).write_text(text)

    PRETRAINED[f"index {name}"] = act


bytes_case("empty", lambda data: b"")
bytes_case("text", lambda data: b"hello")
bytes_case("cut", lambda data: data[:-1])
bytes_case("longer", lambda data: data + b"\0")
bytes_case("huge header", lambda data: b"\xff" * 8 + data[8:])
bytes_case("deep header", lambda data: (200_000).to_bytes(8, "little") + b"[" * 200_000)
header_case("negative", lambda h: h["0.weight"].update(data_offsets=[-4, 10]))
header_case("behind", lambda h: h["0.weight"].update(data_offsets=[0, 1 << 40]))
header_case("dtype", lambda h: h["0.weight"].update(dtype="F64"))
header_case("no dtype", lambda h: h["0.weight"].update(dtype="X"))
header_case("shape", lambda h: h["0.weight"].update(shape=[1 << 40, 1 << 40]))
header_case("shape of text", lambda h: h["0.weight"].update(shape="x"))
header_case("one place", lambda h: h["0.weight"].update(data_offsets=[0, 4]))
header_case("list", lambda h: [1])
index_case("text", "hello")
index_case("list", [1])
index_case("deep", "[" * 100_000)
index_case("no map", {"weight_map": 5})
index_case("path out", {"weight_map": {"0.weight": "../../x.safetensors"}})
index_case("path absolute", {"weight_map": {"0.weight": "/etc/passwd"}})
index_case("number", {"weight_map": {"0.weight": 5}})
index_case("NUL", {"weight_map": {"0.weight": "a\0b"}})
index_case("another name", {"weight_map": dict.fromkeys(["0.weight", "0.bias", "1.weight"], FILE)})
index_case("a name that the file lacks", {"weight_map": dict.fromkeys(
    ["0.weight", "0.bias", "1.weight", "1.bias"], "other.safetensors"
)})  # fmt: skip


def _pipe(name: str) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return act


PRETRAINED["file a pipe"], PRETRAINED["index a pipe"] = _pipe(FILE), _pipe(INDEX)
