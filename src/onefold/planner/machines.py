"""Machines as data: peak speeds from data sheets, links from measurements, three fitted constants.

machines.toml has the figures and their sources, and users' files have its form.
docs/measurements/published-runs.md says how far runs are from them. No figure is measured here:
`onefold.fit.rates` measures the machine that it runs on.
"""

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any

from onefold.errors import ConfigError
from onefold.pages import page


@dataclass(frozen=True, slots=True)
class Link:
    """`nbytes_per_second` of one rank in one direction; `latency`: seconds of one hop of a ring."""

    nbytes_per_second: float
    latency: float


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The shares of a data sheet that runs reach, between 0 and 1.

    `matmul` and `attention` (a fused kernel) are shares of the peak FLOP/s, `memory` of the memory
    bandwidth, `link` of both links'. `contention` is the share of its speed that compute loses
    while a collective runs.
    """

    matmul: float
    attention: float
    contention: float = 0.0
    memory: float = 0.85
    link: float = 1.0


@dataclass(frozen=True, slots=True)
class Machine:
    """One kind of node and the network between nodes; rates in bytes per second of one rank.

    flops: dense peak per dtype, in FLOP/s.
    inside, outside: bus bandwidth of a collective in the node; a rank's share of network cards.
    host_rate: one direction between device and host.
    cpu_rate, disk_rate: a rank's share of what all cores read and write, and of the disks.
    host_memory_rate: peak of a node's memory, which all its ranks share.
    numa_nodes: parts of that memory, each beside its own cores; the memory of a rank lies in one.
    kernel_seconds: host time of one kernel launch, which hides behind the kernel before.
    operation_seconds: host time of an operation of a model, with its modules and autograd.
    call_seconds: host time of one of Onefold's own Python calls. Both were measured on the host of
        one H200 (docs/measurements/gpu.md), and stand for hosts that nobody measured.
    spread: standard deviation of a rank's compute time relative to its mean, for stragglers.
    source: where peaks and memory are published.
    device: a regular expression for the name by which torch knows the GPU; empty: not known.
    """

    name: str
    flops: Mapping[str, float]
    memory_rate: float
    memory_nbytes: float
    inside: Link
    outside: Link
    efficiency: Efficiency
    ranks_per_node: int = 8
    host_rate: float = 25e9
    cpu_rate: float = 20e9
    host_memory_rate: float = 410e9
    numa_nodes: int = 1
    disk_rate: float = 2e9
    kernel_seconds: float = 5e-6
    operation_seconds: float = 43e-6
    call_seconds: float = 1.2e-6
    spread: float = 0.0
    source: str = ""
    device: str = ""

    def peak(self, dtype: str) -> float:
        """Return the dense peak of `dtype` in FLOP/s; `ConfigError` for an unknown one."""
        if dtype not in self.flops:
            known = f"a dtype that {self.name} has a peak for: {', '.join(self.flops)}"
            hint = "name the dtype of matrix products, as in Conditions(dtype='bf16')"
            raise ConfigError(known, repr(dtype), hint=hint)
        return self.flops[dtype]


FITS: Mapping[str, Efficiency] = MappingProxyType(
    {
        "FSDP 2023, H100": Efficiency(0.80, 0.16, 0.95, 0.26),
        "FSDP 2023, A100": Efficiency(0.87, 0.33, 0.95, 0.25),
        "FSDP2 2024, H100": Efficiency(0.47, 0.35, 0.50, 0.54),
        "ZeRO-3 2021, A100": Efficiency(0.59, 0.33, 0.15, 0.50, link=0.11),
    }
)
"""Fits by benchmarks/published.py to runs in docs/measurements/published-runs.md."""

_SHORT = {"a100": "a100-80", "h100": "h100-80"}
"""The usual variant of a machine that has several."""

_NAME = re.compile("[a-z][a-z0-9._-]*")
_PAGE = "docs/guides/choose-a-stage.md#other-gpus"
"""It lists the fields."""

_MOST = 1e30
"""More than any rate, size or time: a number above it is a slip."""

_Row = dict[str, Any]
"""The fields of a machine as in machines.toml; a peak is a field `flops.DTYPE`."""
_DTYPES = ("fp8", "bf16", "fp16", "tf32", "fp32")
_NEEDED = ("flops.bf16", "flops.fp32", "memory_rate", "memory_nbytes", "inside_rate",
           "outside_rate", "fit")  # fmt: skip
_DEFAULTS: Mapping[str, Any] = {"inside_latency": 4e-6, "outside_latency": 20e-6}
"""Seconds of a hop over NVLink and the network; see docs/measurements/machines.md."""


def _hint() -> str:
    return f"{page(_PAGE)} lists the fields"


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _MOST


_RATE = ("a number above 0", lambda value: _is_number(value) and value > 0)
_SECONDS = ("a number of at least 0", _is_number)
_COUNT = ("a whole number above 0", lambda value: type(value) is int and value > 0)
_TEXT = ("a text", lambda value: isinstance(value, str))
_FIELDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "like": _TEXT,
    "source": _TEXT,
    "device": _TEXT,
    **dict.fromkeys((f"flops.{dtype}" for dtype in _DTYPES), _RATE),
    **dict.fromkeys(("memory_rate", "memory_nbytes", "inside_rate", "outside_rate"), _RATE),
    **dict.fromkeys(("host_rate", "cpu_rate", "host_memory_rate", "disk_rate"), _RATE),
    **dict.fromkeys(("inside_latency", "outside_latency", "kernel_seconds", "spread"), _SECONDS),
    **dict.fromkeys(("operation_seconds", "call_seconds"), _SECONDS),
    **dict.fromkeys(("ranks_per_node", "numa_nodes"), _COUNT),
    "fit": (f"one of {', '.join(map(repr, FITS))}", lambda value: value in [*FITS]),
}
"""What the value of each field has to be, in words and as a check."""


def machine_of(name: str, machines: Mapping[str, Machine] | None = None) -> Machine:
    """Return the machine called `name`, in any case; `ConfigError` lists the known ones.

    machines: those that `read_machines` returned; default: those that are known without a file.
    """
    machines = known_machines() if machines is None else machines
    return machines[_found(name, machines)]


def peak_of(name: str, dtype: str) -> float:
    """Return the dense peak in FLOP/s of the device that torch calls `name`; inf if not known."""
    found = (m for m in known_machines().values() if m.device and re.fullmatch(m.device, name))
    machine = next(found, None)
    return inf if machine is None else machine.flops.get(dtype, inf)


@cache
def known_machines() -> Mapping[str, Machine]:
    """Return the machines of machines.toml, by name."""
    return _machines(_known_rows())


def read_machines(path: str | os.PathLike[str]) -> Mapping[str, Machine]:
    """Return the known machines and those of a TOML file, by name in lower case.

    Each table of the file is a machine: its fields as in `planner/machines.toml`. With `like`, the
    name of a known machine or of one above it, all fields but `source` may be left out.

    Raises:
        ConfigError: no such file, or no TOML; a name that exists already; a field that is unknown,
            is missing or has a wrong value. The message names file, machine and field.
    """
    return _machines(_rows(Path(path), _known_rows()))


@cache
def _known_rows() -> Mapping[str, _Row]:
    return _rows(Path(__file__).with_name("machines.toml"), {})


def _rows(path: Path, known: Mapping[str, _Row]) -> Mapping[str, _Row]:
    """Return the known rows and those of a file, checked and whole."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"a TOML file at {str(path)!r}", error, hint=_hint()) from error
    rows = dict(known)
    for name, table in tables.items():
        key, where = name.lower(), f"{path}, [{name}]"
        if not isinstance(table, dict):
            wanted = "a table of fields for each machine, such as [my-gpu]"
            raise ConfigError(wanted, f"{name} = {table!r}", where=str(path), hint=_hint())
        if not _NAME.fullmatch(key):
            hint = "a name begins with a letter, and has letters, digits and . _ - alone"
            raise ConfigError("the name of a machine", repr(name), where=str(path), hint=hint)
        if key in rows or key in _SHORT:
            hint = f"take another name, and like = {name!r} for what stays the same"
            raise ConfigError("the name of a new machine", repr(name), where=where, hint=hint)
        rows[key] = _whole(table, rows, where)
    return rows


def _whole(table: Mapping[str, Any], rows: Mapping[str, _Row], where: str) -> _Row:
    """Return the row of a table of the file, with the fields of the row that it is like."""
    row: _Row = {}
    for key, value in table.items():
        inner = value.items() if isinstance(value, dict) else ()
        row |= {f"{key}.{part}": each for part, each in inner} or {key: value}
    for key, value in row.items():
        if key not in _FIELDS:
            hint = _nearest(key, _FIELDS, _hint())
            raise ConfigError("fields of a machine", repr(key), where=where, hint=hint)
        wanted, holds = _FIELDS[key]
        if not holds(value):
            hint = _nearest(str(value), FITS if key == "fit" else (), _hint())
            raise ConfigError(f"{key} to be {wanted}", repr(value), where=where, hint=hint)
    if "like" in row:
        known = rows[_found(row.pop("like"), rows, f"{where} like")]
        row = {**known, "source": "", "device": "", **row}
    lacking = [key for key in _NEEDED if key not in row]
    if lacking:
        hint = 'like = "h100-80" takes what is missing from that machine'
        wanted = f"{' and '.join(lacking)} of the machine"
        raise ConfigError(wanted, "a table without", where=where, hint=hint)
    return row


def _machines(rows: Mapping[str, _Row]) -> Mapping[str, Machine]:
    """Return the machines of whole rows."""
    machines: dict[str, Machine] = {}
    for name, row in rows.items():
        fields = {**_DEFAULTS, **row}
        flops = {each: fields.pop(f"flops.{each}", None) for each in _DTYPES}
        peaks = {dtype: peak for dtype, peak in flops.items() if peak is not None}
        links = {
            place: Link(fields.pop(f"{place}_rate"), fields.pop(f"{place}_latency"))
            for place in ("inside", "outside")
        }
        fit = FITS[fields.pop("fit")]
        machines[name] = Machine(name, MappingProxyType(peaks), efficiency=fit, **links, **fields)
    return MappingProxyType(machines)


def _found(name: str, known: Iterable[str], where: str = "") -> str:
    """Return the name of a known machine that a user's `name` means."""
    names, key = list(known), name.strip().lower()
    key = _SHORT.get(key, key)
    if key not in names:
        hint = _nearest(
            key, names, "onefold plan --machines FILE, or read_machines, takes any other"
        )
        raise ConfigError(f"a GPU among {', '.join(names)}", repr(name), where=where, hint=hint)
    return key


def _nearest(word: str, known: Iterable[str], other: str) -> str:
    """Return a hint that names the closest of `known`, else the other hint."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else other
