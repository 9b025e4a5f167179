"""Checkpoints and weight files that nobody saved: each is a good one with one thing changed.

`CASES`: name -> what to do to a good folder of `onefold.save`. `PRETRAINED`: the same for a folder
of `onefold.save_pretrained`. None may be accepted; each ends in a `CheckpointError`, soon.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onefold
from onefold import CheckpointError
from onefold.checkpoint.offline import export, inspect
from onefold.foreign import PEERS

BLOCK = 1 << 20
DATA, OWN = "rank-00000.safetensors", "rank-00000.json"
PWNED = "ran"


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
    record = {"nbytes": len(data), "blocks": "".join(f"{zlib.crc32(b):08x}" for b in blocks)}
    length = 8 + int.from_bytes(data[:8], "little")
    is_listing = length <= len(data) and data[8:9] in (b"{", b"[")
    return record | {"head": f"{length}:{zlib.crc32(data[:length]):08x}" if is_listing else ""}


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


LIMIT_S = 5


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


def refusals(
    good: Path, cases: dict[str, Callable[[Path], None]], module: nn.Module,
    optimizer: torch.optim.Optimizer, folder: Path, may_pass: Callable[[str], bool],
) -> list[str]:  # fmt: skip
    """Which cases were not refused by `load`, `inspect` or `export`.

    `may_pass`: those that `inspect` may accept.
    """
    wrong = []
    for number, (name, act) in enumerate(cases.items()):
        path = folder / str(number) / "made-up"
        shutil.copytree(good, path)
        act(path)
        ends = {"load": outcome(lambda p=path: onefold.load(p, module, optimizer))}
        ends["newest"] = outcome(lambda p=path: onefold.load(p.parent, module, optimizer))
        ends["inspect"] = outcome(lambda p=path: inspect(p, PEERS, verify=True))
        for call, end in ends.items():
            is_known = call == "inspect" and end == "accepted" and may_pass(name)
            if end != "refused" and not is_known:
                wrong.append(f"{name}: {call}: {end}")
        end = outcome(lambda p=path: export(p, p.parent / "exported", PEERS))
        if end not in ("refused", "accepted"):
            wrong.append(f"{name}: export: {end}")
        assert not list(folder.rglob(PWNED)), name
    return wrong


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


# the manifest

fields_case("without format", lambda j: j.pop("format") and j)
fields_case("format text", lambda j: {**j, "format": "x"})
fields_case("format negative", lambda j: {**j, "format": -1})
body_case("format NaN", lambda body: body.replace('"format": 2', '"format": NaN'))
body_case("size NaN", lambda body: re.sub(r'"nbytes": \d+', '"nbytes": NaN', body))
fields_case("files list", lambda j: {**j, "files": []})
fields_case("files none", lambda j: {**j, "files": None})
fields_case("files empty", lambda j: {**j, "files": {}})
fields_case("record of more", lambda j: j["files"][OWN].update(evil=1))
fields_case("negative size", lambda j: j["files"][OWN].update(nbytes=-5))
fields_case("huge size", lambda j: j["files"][OWN].update(nbytes=1 << 62))
fields_case("size true", lambda j: j["files"][OWN].update(nbytes=True))
fields_case("size of another", lambda j: j["files"][OWN].update(nbytes=17))
fields_case("checksums number", lambda j: j["files"][OWN].update(blocks=5))
fields_case("checksums none", lambda j: j["files"][OWN].update(blocks=""))
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
fields_case("without metadata", lambda j: j["files"].pop(OWN) and j)
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


# headers


def parts_of(data: bytes) -> tuple[Any, Any, bytes]:
    """The header of a file of a rank, what it says of pieces, and the tensors' bytes."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    about = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    return header, about, data[8 + length :]


def joined(header: Any, about: Any, data: bytes) -> bytes:
    """The file of a rank, of its parts."""
    if isinstance(header, dict) and isinstance(header.get("__metadata__"), dict):
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(about)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def rank_case(name: str, change: Callable[[Any, Any], Any], more: bytes = b"") -> None:
    """Change the header, or what it says of pieces; `change` may return another header."""

    def act(folder: Path) -> None:
        header, about, data = parts_of((folder / DATA).read_bytes())
        header = change(header, about) or header
        rewrite(folder, DATA, joined(header, about, data + more))

    CASES[f"header {name}"] = act


def weight_case(name: str, **changes: Any) -> None:
    """Change what the header says of one weight."""
    rank_case(name, lambda h, a: h[WEIGHT].update(changes))


def piece_case(name: str, **changes: Any) -> None:
    """Change what is said of where one weight's piece lies in the tensor."""
    rank_case(f"piece {name}", lambda h, a: a[WEIGHT].update(changes))


WEIGHT = "model.0.weight"
NBYTES = 64 * 64 * 4


def _places(header: Any) -> tuple[int, int]:
    return tuple(header[WEIGHT]["data_offsets"])


rank_case("list", lambda h, a: [1])
rank_case("empty", lambda h, a: {"__metadata__": h["__metadata__"]})
rank_case("without metadata", lambda h, a: h.pop("__metadata__") and None)
rank_case("metadata number", lambda h, a: h.update(__metadata__=5))
rank_case("metadata without pieces", lambda h, a: a.clear())
rank_case("pieces of other names", lambda h, a: a.update({"x": a.pop(WEIGHT)}))
rank_case("entry list", lambda h, a: h.update({WEIGHT: [1]}))
rank_case("entry gone", lambda h, a: h.pop(WEIGHT) and None)
rank_case(
    "entry more",
    lambda h, a: h.update({"model.more": h[WEIGHT]}) or a.update({"model.more": a[WEIGHT]}),
)
rank_case(
    "of one place for two",
    lambda h, a: h["model.1.weight"].update(data_offsets=h["model.0.bias"]["data_offsets"]),
)
rank_case("longer file", lambda h, a: None, more=b"\0" * 8)
weight_case("offsets negative", data_offsets=[-4, NBYTES - 4])
weight_case("offsets huge", data_offsets=[1 << 60, (1 << 60) + NBYTES])
weight_case("offsets backwards", data_offsets=[NBYTES, 0])
weight_case("offsets short", data_offsets=[0, 8])
weight_case("offsets text", data_offsets="ab")
weight_case("offsets three", data_offsets=[0, 1, 2])
weight_case("offsets true", data_offsets=[False, NBYTES])
weight_case("offsets of fractions", data_offsets=[0.5, NBYTES + 0.5])
rank_case(
    "offsets one further", lambda h, a: h[WEIGHT].update(data_offsets=[n + 1 for n in _places(h)])
)
weight_case("shape larger", shape=[64, 65])
weight_case("shape huge", shape=[1 << 40, 1 << 40])
weight_case("shape negative", shape=[-64, -64])
weight_case("shape text", shape="64")
weight_case("shape number", shape=64)
weight_case("shape of many dimensions", shape=[1] * 1000)
weight_case("shape flat", shape=[64 * 64])
weight_case("dtype F64", dtype="F64")
weight_case("dtype X", dtype="X")
weight_case("dtype list", dtype=[1])
piece_case("behind", saved_offsets=[64, 0])
piece_case("negative", saved_offsets=[-1, 0])
piece_case("huge", saved_offsets=[1 << 70, 0])
piece_case("of one dimension", saved_offsets=[0])
piece_case("text", saved_offsets="00")
piece_case("none", saved_offsets=None)
piece_case("of a larger tensor", shape=[128, 64])
piece_case("of a smaller tensor", shape=[32, 64])
piece_case("of a tensor without shape", shape=None)


def file_case(name: str, change: Callable[[bytes], bytes]) -> None:
    """Change the bytes of the file of a rank."""
    CASES[f"file {name}"] = lambda f: rewrite(f, DATA, change((f / DATA).read_bytes()))


file_case("empty", lambda data: b"")
file_case("text", lambda data: b"hello")
file_case("cut", lambda data: data[:-4])
file_case("huge header", lambda data: b"\xff" * 8 + data[8:])
file_case("header of no bytes", lambda data: bytes(8) + data[8:])
file_case("deep header", lambda data: (200_000).to_bytes(8, "little") + b"[" * 200_000)
file_case("deep dicts", lambda data: (600_000).to_bytes(8, "little") + b'{"a":1'[:5] * 120_000)


def _second(folder: Path, change: Callable[[Any, Any, bytes], bytes]) -> None:
    """Add the file of another rank."""
    data = change(*parts_of((folder / DATA).read_bytes()))
    fields = manifest_of(folder)
    fields["files"]["rank-00001.safetensors"] = record_of(data)
    (folder / "rank-00001.safetensors").write_bytes(data)
    write_manifest(folder, fields)


@case
def two_files_with_the_same_rows(folder: Path) -> None:
    def own(header: Any, about: Any, data: bytes) -> bytes:
        start, stop = _places(header)
        one = {"__metadata__": header["__metadata__"], WEIGHT: header[WEIGHT]}
        one[WEIGHT]["data_offsets"] = [0, stop - start]
        return joined(one, {WEIGHT: about[WEIGHT]}, data[start:stop])

    _second(folder, own)


@case
def rows_that_another_file_says_it_has_of_another_shape(folder: Path) -> None:
    def own(header: Any, about: Any, data: bytes) -> bytes:
        start, stop = _places(header)
        one = {"__metadata__": header["__metadata__"], WEIGHT: header[WEIGHT]}
        one[WEIGHT]["data_offsets"] = [0, stop - start]
        about = {WEIGHT: {"saved_offsets": [64, 0], "shape": [128, 64]}}
        return joined(one, about, data[start:stop])

    _second(folder, own)


@case
def rows_that_nobody_has(folder: Path) -> None:
    header, about, data = parts_of((folder / DATA).read_bytes())
    start, stop = _places(header)
    cut = (stop - start) // 2
    header[WEIGHT].update(shape=[32, 64], data_offsets=[start, stop - cut])
    for name, entry in header.items():
        if name[:2] != "__" and entry["data_offsets"][0] >= stop:
            entry["data_offsets"] = [n - cut for n in entry["data_offsets"]]
    rewrite(folder, DATA, joined(header, about, data[: stop - cut] + data[stop:]))


@case
def a_rank_without_its_files(folder: Path) -> None:
    fields = manifest_of(folder)
    fields["files"] = {OWN: fields["files"][OWN]}
    write_manifest(folder, fields)


# JSON


def json_case(name: str, change: Callable[[Any], Any]) -> None:
    """Change the JSON of a rank; `change` may return another."""

    def act(folder: Path) -> None:
        document = json.loads((folder / OWN).read_text())
        rewrite(folder, OWN, json.dumps(change(document) or document).encode())

    CASES[f"json {name}"] = act


def text_case(name: str, text: bytes) -> None:
    CASES[f"json {name}"] = lambda folder: rewrite(folder, OWN, text)


def rank_state_case(name: str, **changes: Any) -> None:
    json_case(name, lambda j: j["objects"]["rank.0"].update(changes))


text_case("empty", b"")
text_case("text", b"hello")
text_case("list", b"[1]")
text_case("no UTF-8", b"\xff\xfe{}")
text_case("deep", b"[" * 100_000)
text_case("a long number", b'{"objects": ' + b"9" * 10_000 + b"}")
json_case("objects list", lambda j: j.update(objects=[1]))
json_case("objects none", lambda j: j.update(objects=None))
json_case("without the rank", lambda j: j["objects"].pop("rank.0") and None)
json_case("rank list", lambda j: j["objects"].update({"rank.0": [1]}))
json_case("rank number", lambda j: j["objects"].update({"rank.0": 5}))
json_case("an object with a tensor's name", lambda j: j["objects"].update({WEIGHT: 5}))
json_case("paths list", lambda j: j.update(paths=[1]))
json_case("path of dicts", lambda j: j.update(paths={WEIGHT: ["model", {}]}))
json_case("path number", lambda j: j.update(paths={WEIGHT: 5}))
json_case("path of a huge number", lambda j: j.update(paths={WEIGHT: ["model", 10**9]}))
json_case("alias of nothing", lambda j: j.update(aliases={"model.more": "model.nothing"}))
json_case(
    "alias of another alias", lambda j: j.update(aliases={"model.a": "model.b", "model.b": WEIGHT})
)
json_case("alias in place of a weight", lambda j: j.update(aliases={WEIGHT: "model.1.weight"}))
json_case("alias number", lambda j: j.update(aliases={"model.a": 5}))
json_case("aliases list", lambda j: j.update(aliases=["model.a"]))
json_case("dtype of another size", lambda j: j.update(dtypes={WEIGHT: "complex128"}))
json_case("dtype that is none", lambda j: j.update(dtypes={WEIGHT: "nn"}))
json_case("dtype number", lambda j: j.update(dtypes={WEIGHT: 5}))
rank_state_case("extra of an unknown type", extra={"!module": "os"})
rank_state_case("extra of two types", extra={"!tuple": [], "!set": []})
rank_state_case("extra of a type and a key", extra={"!tuple": [], "a": 1})
rank_state_case("extra of a tensor that is not there", extra={"!tensor": "rank.0.999"})
rank_state_case("extra of a tensor by number", extra={"!tensor": 5})
rank_state_case("extra of a dtype that is a function", extra={"!dtype": "load"})
rank_state_case("extra of no device", extra={"!device": "nowhere"})
rank_state_case("extra of pairs that are none", extra={"!dict": [1]})
rank_state_case("extra of keys that are lists", extra={"!dict": [[[1], 2]]})
rank_state_case("extra of a set of lists", extra={"!set": [[1]]})
rank_state_case("extra of a size of words", extra={"!Size": ["a"]})
rank_state_case("extra of a number that is none", extra={"!float": "x"})
rank_state_case("extra of bytes that are none", extra={"!bytes": "abc"})
rank_state_case("random number", random=5)
rank_state_case("random of another kind", random={"torch": 1})
rank_state_case("modules that are none", modules=[5])
rank_state_case("buffers list", buffers=[1])
json_case("params number", lambda j: j["objects"].update({"optim.param_groups.0.params": [1, 2]}))
json_case("params text", lambda j: j["objects"].update({"optim.param_groups.0.params": "x"}))


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
@case
def a_draft_without_its_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


@case
def manifest_of_format_1(folder: Path) -> None:
    write_manifest(folder, {**manifest_of(folder), "format": 1})


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
