"""The devices to plan for: one kind of them, or several side by side."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from onefold.config import Precision
from onefold.errors import ConfigError
from onefold.planner.machines import Machine, machine_of, read_machines
from onefold.planner.mixed import DeviceKind
from onefold.planner.planned_axes import ModelAxes
from onefold.recipe import Recipe
from onefold.text import parse_nbytes
from onefold.tier import accelerator
from onefold.tier.host import free_host_nbytes

EXAMPLE = "8xh100-80 + 16xa100-40"
_KIND = re.compile(r"\s*([0-9]+)\s*[xX]\s*([^\s+]+)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The devices to plan for: `ranks` on each of `nodes`, which compute on "cuda" or "cpu".

    `memory`: of each device, or CPU rank; `host_memory` and `disk`: of each node, for all its
    ranks: bytes, or a text such as "80GB" or "80GiB". `machine`: the machine of step times, by name
    such as "h100" (`planner/machines.toml`) or described; CPU ranks have none.
    """

    ranks: int = 1
    nodes: int = 1
    device_type: str = "cuda"
    memory: int | str | None = None
    host_memory: int | str | None = None
    disk: int | str | None = None
    machine: str | Machine | None = None

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return self.ranks * self.nodes

    @property
    def described(self) -> Machine | None:
        """The machine of step times."""
        return machine_of(self.machine) if isinstance(self.machine, str) else self.machine

    @property
    def room(self) -> dict[str, int]:
        """Bytes of each "device", and of each "host" and its "disk" for all ranks of the host.

        Raises: ConfigError: GPUs whose memory nobody knows, which no plan could check.
        """
        memory = self.memory
        if memory is None and self.device_type == "cpu":
            memory = free_host_nbytes() // max(1, self.ranks)
        elif memory is None:
            memory = _memory_of(self.described)
        room = {"device": memory, "host": self.host_memory, "disk": self.disk}
        names = {"device": "memory", "host": "host_memory", "disk": "disk"}
        return {
            place: parse_nbytes(f"Cluster.{names[place]}", size) if isinstance(size, str) else size
            for place, size in room.items()
            if size is not None
        }


ClusterChoice = Cluster | Mapping[str, Any] | str | Sequence[Cluster | Mapping[str, Any]] | None
"""One kind of devices (the fields of `Cluster`), several, or a text such as `EXAMPLE`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Devices in the words of `onefold plan` and `onefold.plan`.

    `gpus` or CPU `ranks` of a node; `mem` of a GPU, or of all CPU ranks of a node; `host_mem` and
    `disk` of a node. Sizes are bytes, or a text such as "80GiB". None and 1: what is here.
    `machines`: a TOML file of more GPUs, as `read_machines` takes it.
    """

    gpus: int | None = None
    ranks: int | None = None
    nodes: int = 1
    mem: int | str | None = None
    host_mem: int | str | None = None
    disk: int | str | None = None
    machines: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.ranks is not None and self.gpus is not None:
            raise _not_both("ranks alone", "gpus, too")

    def nbytes(self, name: str) -> int | None:
        """Return the bytes of a size."""
        size = getattr(self, name)
        return parse_nbytes(name, size) if isinstance(size, str) else size

    def refuse(self, names: Sequence[str], wanted: str, hint: str) -> None:
        """Raise `ConfigError` if one of these was said."""
        said = next((n for n in names if getattr(self, n) not in (None, n == "nodes")), None)
        if said is not None:
            raise ConfigError(wanted, f"{said} too", hint=f"leave {said} out: {hint}")

    @property
    def known(self) -> Mapping[str, Machine] | None:
        """The machines that may be named; None: those that are known without a file."""
        return None if self.machines is None else read_machines(self.machines)

    def on(self, name: str | None, world_size: int) -> Cluster:
        """Return the devices: of a machine, or for None of this one, with `world_size` ranks.

        Raises: ConfigError: GPUs whose memory is not known, CPU ranks of a machine with GPUs, and
            a file of machines of which none is named.
        """
        if self.machines is not None and name is None:
            hint = "--gpu NAME, with a name of the file; cluster='NAME' in Python"
            raise ConfigError("the name of a GPU with machines", "machines alone", hint=hint)
        if self.ranks is not None and name is not None:
            raise _not_both("ranks alone", "a machine with GPUs, too")
        machine = None if name is None else machine_of(name, self.known)
        is_here = self.gpus is None and machine is None
        on_gpus = self.ranks is None and (not is_here or accelerator.kind() is not None)
        default = world_size if machine is None else machine.ranks_per_node
        count = next(n for n in (self.gpus, self.ranks, default) if n is not None)
        memory = self.nbytes("mem")
        host_memory = self.nbytes("host_mem")
        if host_memory is None and on_gpus and is_here:
            host_memory = free_host_nbytes()
        if not on_gpus:
            memory = (memory or free_host_nbytes()) // max(1, count)
        elif memory is None:
            memory = _memory_of(machine)
        return Cluster(
            ranks=count, nodes=self.nodes, device_type="cuda" if on_gpus else "cpu",
            memory=memory, host_memory=host_memory, disk=self.nbytes("disk"), machine=machine,
        )  # fmt: skip


def _not_both(wanted: str, got: str) -> ConfigError:
    hint = "leave one of the two out: ranks plans for processes on the CPU"
    return ConfigError(wanted, got, hint=hint)


def _memory_of(machine: Machine | None) -> int:
    """Return the bytes of a GPU: of a machine, else of this one's."""
    if machine is not None:
        return int(machine.memory_nbytes)
    if accelerator.kind() is None:
        hint = 'mem="80GiB" (--mem 80GiB), or a machine (--gpu h100-80)'
        wanted = "mem with gpus: nothing can be checked without the memory of a GPU"
        raise ConfigError(wanted, "none, and no GPU here", hint=hint)
    return accelerator.memory().total


def clusters_of(
    choice: ClusterChoice, world_size: int, devices: Devices | None = None
) -> tuple[Cluster, ...]:
    """Return the kinds of devices of a choice; None: `world_size` ranks of this machine.

    `devices` says more about a machine, or about this one.
    """
    devices = devices or Devices()
    if choice is None or (isinstance(choice, str) and not names_kinds(choice)):
        return (devices.on(choice, world_size),)
    others = ("gpus", "ranks", "mem", "nodes")
    if isinstance(choice, str):
        hint = "nodes and memory are those of the machines"
        devices.refuse(others, "cluster with counts alone", hint)
        room = {"host_memory": devices.nbytes("host_mem"), "disk": devices.nbytes("disk")}
        return parsed(choice, devices.known, **room)
    devices.refuse((*others, "host_mem", "disk", "machines"), "cluster alone", "its fields say it")
    if isinstance(choice, Cluster | Mapping):
        choice = [choice]
    kinds = tuple(map(_cluster_of, choice))
    if not kinds:
        hint = f"onefold.plan(model, cluster={EXAMPLE!r})"
        raise ConfigError("at least one kind of devices", "none", hint=hint)
    if any(kind.machine is not None and kind.device_type == "cpu" for kind in kinds):
        hint = "leave the machine out: CPU ranks have no step times"
        raise ConfigError("device_type='cuda' with a machine", repr("cpu"), hint=hint)
    return kinds


def _cluster_of(kind: Cluster | Mapping[str, Any]) -> Cluster:
    """Raises `ConfigError` for a field that devices do not have."""
    try:
        return kind if isinstance(kind, Cluster) else Cluster(**kind)
    except TypeError as error:
        hint = 'cluster={"ranks": 8, "nodes": 2, "machine": "h100-80"}'
        raise ConfigError("fields of a kind of devices", error, hint=hint) from error


def names_kinds(text: str) -> bool:
    """Return True for a text such as `EXAMPLE`, and False for the name of one machine."""
    return "+" in text or _KIND.fullmatch(text) is not None


def parsed(
    text: str, machines: Mapping[str, Machine] | None = None, **room: Any
) -> tuple[Cluster, ...]:
    """Return the kinds of devices of a text such as `EXAMPLE`, in the order of their ranks.

    A kind that is named twice is one kind. Devices fill whole nodes, or a part of a single one.
    `machines`: as in `machine_of`. `room`: `host_memory` and `disk` of each node, as `Cluster`
    takes them.
    """
    counts: dict[str, int] = {}
    for part in text.split("+"):
        match = _KIND.fullmatch(part)
        if match is None or int(match[1]) < 1:
            hint = f'for example --cluster "{EXAMPLE}"'
            wanted = "kinds of devices as COUNTxMACHINE, joined by +"
            raise ConfigError(wanted, repr(part.strip()), where=repr(text), hint=hint)
        name = machine_of(match[2], machines).name
        counts[name] = counts.get(name, 0) + int(match[1])
    kinds = list[Cluster]()
    for name, count in counts.items():
        machine = machine_of(name, machines)
        ranks = min(count, machine.ranks_per_node)
        if count % ranks:
            hint = "describe other nodes with {'ranks': ..., 'nodes': ..., 'machine': ...}"
            wanted = f"whole nodes of {ranks} {name}, or a part of one"
            raise ConfigError(wanted, f"{count} of them", hint=hint)
        kinds.append(Cluster(ranks=ranks, nodes=count // ranks, machine=machine, **room))
    return tuple(kinds)


def recipe_of(kinds: Sequence[Cluster], precision: Precision) -> Recipe:
    """Return the recipe of all ranks, on nodes as small as the smallest of any kind."""
    return Recipe(
        world_size=sum(kind.world_size for kind in kinds),
        local_world_size=min(kind.ranks for kind in kinds),
        has_hosts=_have_even_hosts(kinds),
        precision=precision,
        device_type=kinds[0].device_type,
    )


def _have_even_hosts(kinds: Sequence[Cluster]) -> bool:
    """True if accelerators lie on several hosts, equally many on each: as a run sees its launcher.

    A run knows no kinds of devices (`wire/ranks.py`), so their names and number do not count.
    """
    sizes = {kind.ranks for kind in kinds}
    is_accelerator = all(kind.device_type != "cpu" for kind in kinds)
    is_even = len(sizes) == 1 and min(sizes) > 1
    return is_accelerator and is_even and sum(kind.nodes for kind in kinds) > 1


def check_mixed(kinds: Sequence[Cluster], axes: ModelAxes, wire: object) -> None:
    """Refuse choices that no mixed cluster has."""
    types = sorted({kind.device_type for kind in kinds})
    refused = {
        "axes of the model": axes.are_used,
        f"wire {wire!r}": wire not in ("auto", "exact", None),
        f"devices of types {' and '.join(types)}": len(types) > 1,
    }
    got = [words for words, is_there in refused.items() if is_there]
    if got:
        hint = "leave it out, or plan each kind of devices for itself"
        wanted = "a cluster of several kinds with the exact wire, and nothing else"
        raise ConfigError(wanted, f"it with {got[0]}", hint=hint)


def device_kinds(kinds: Sequence[Cluster]) -> tuple[DeviceKind, ...]:
    """Return the kinds of a mixed cluster with their ranks; none where there is one alone."""
    if len(kinds) == 1:
        return ()
    devices: list[DeviceKind] = []
    first = 0
    for index, kind in enumerate(kinds):
        machine = kind.described
        name = machine.name if machine is not None else f"kind {index}"
        devices.append(DeviceKind(name, first, kind.world_size, kind.ranks, kind.room, machine))
        first += kind.world_size
    return tuple(devices)
