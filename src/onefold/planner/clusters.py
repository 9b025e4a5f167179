"""The devices to plan for: one kind of them, or several side by side."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onefold.config import Precision
from onefold.errors import ConfigError
from onefold.planner.machines import Machine, machine_of
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
        """Bytes of each "device", and of each "host" and its "disk" for all ranks of the host."""
        memory = self.memory
        if memory is None:
            known = self.described.memory_nbytes if self.described else 0
            memory = int(known) or free_host_nbytes() // self.ranks
        room = {"device": memory, "host": self.host_memory, "disk": self.disk}
        names = {"device": "memory", "host": "host_memory", "disk": "disk"}
        return {
            place: parse_nbytes(f"Cluster.{names[place]}", size) if isinstance(size, str) else size
            for place, size in room.items()
            if size is not None
        }


ClusterChoice = Cluster | Mapping[str, Any] | str | Sequence[Cluster | Mapping[str, Any]] | None
"""One kind of devices (the fields of `Cluster`), several, or a text such as `EXAMPLE`."""


def clusters_of(choice: ClusterChoice, world_size: int) -> tuple[Cluster, ...]:
    """Return the kinds of devices of a choice; None: `world_size` ranks of this machine."""
    if choice is None:
        return (_this_machine(world_size),)
    if isinstance(choice, Cluster | Mapping):
        choice = [choice]
    kinds = parsed(choice) if isinstance(choice, str) else tuple(map(_cluster_of, choice))
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


def _this_machine(world_size: int) -> Cluster:
    if accelerator.kind() is not None:
        memory = accelerator.memory().total
        return Cluster(ranks=world_size, memory=memory, host_memory=free_host_nbytes())
    share = free_host_nbytes() // max(1, world_size)
    return Cluster(ranks=world_size, device_type="cpu", memory=share)
