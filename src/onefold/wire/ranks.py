"""Find the ranks to shard over: from a mesh, a process group, or the launcher; and let them meet.

Ranks that have met are connected by lanes, and answer roll calls.
"""

import atexit
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from typing import cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from onefold.errors import ConfigError, WireError
from onefold.layout.two_axes import Axes
from onefold.wire import launcher
from onefold.wire.collectives import Group, named, splits_world
from onefold.wire.devices import backends_for, take_own_device, variable_for
from onefold.wire.interfaces import use_link_to_hosts
from onefold.wire.lanes import Lanes, PhaseNow, absent
from onefold.wire.peers import Peers
from onefold.wire.roll_call import RollCall
from onefold.wire.together import announcing, read_refusal, refusing
from onefold.wire.watching import DeviceBackend, DeviceWatch

TIMEOUT = timedelta(minutes=5)
"""How long ranks wait for one another in a process group that Onefold starts."""

_MESHES = WeakKeyDictionary[dist.ProcessGroup, DeviceMesh]()
"""By world: its hosts, and the ranks of each, where NCCL splits the world's communicator."""

MeshChoice = DeviceMesh | dist.ProcessGroup | None


@dataclass(frozen=True, slots=True)
class Ranks:
    """The groups that train together: all ranks, and on a mesh of two axes also two parts of it.

    `inside` is this rank's node, `between` the ranks with its local rank on every node. `mesh` is
    one axis of all ranks, if a mesh was given. `is_flat`: the given mesh had two axes, one of which
    has length 1.
    """

    everyone: Group
    mesh: DeviceMesh | None = None
    inside: Group | None = None
    between: Group | None = None
    is_flat: bool = False
    phase: PhaseNow = field(default_factory=PhaseNow)

    @property
    def axes(self) -> Axes | None:
        """The two axes, or None on a mesh of one axis."""
        if self.inside is None or self.between is None:
            return None
        return Axes(self.between.world_size, self.inside.world_size, self.everyone.rank)

    def shards(self, *, are_replicas: bool) -> Group:
        """Return the ranks that share the state: all, or one node if nodes are replicas."""
        return self.inside if self.inside and are_replicas else self.everyone

    def facts(self) -> list[str]:
        """Describe the mesh; it must be the same on every rank."""
        axes = self.axes
        if axes is None:
            return ["one axis"]
        return [f"mesh of {axes.nodes} nodes x {axes.local_world_size} ranks"]


def resolve(mesh: MeshChoice, timeout: timedelta = TIMEOUT) -> Ranks:
    """Return the ranks to shard over; `timeout` is for a process group that has to be started."""
    if isinstance(mesh, DeviceMesh) and mesh.ndim == 2:
        return _two_axes(mesh)
    handle, device_mesh = _group_of(mesh, timeout)
    return Ranks(Group.from_handle(handle), device_mesh)


def of_axis(mesh: object, about: str = "units={...: mesh}") -> Ranks:
    """Return the ranks of one axis; `about` says what for, in errors."""
    if not isinstance(mesh, DeviceMesh | dist.ProcessGroup):
        wanted = f"a DeviceMesh of one axis, or a ProcessGroup, for {about}"
        raise ConfigError(wanted, f"a {type(mesh).__name__}", hint=_SLICE)
    if isinstance(mesh, DeviceMesh) and mesh.ndim != 1:
        wanted, got = f"a mesh of one axis for {about}", f"one of {mesh.ndim}: {tuple(mesh.shape)}"
        raise ConfigError(wanted, got, hint=_SLICE)
    handle, device_mesh = _group_of(mesh, TIMEOUT)
    return Ranks(Group.from_handle(handle), device_mesh)


_SLICE = 'pass one axis of a mesh, such as mesh["replica"]'


def of_tokens(mesh: MeshChoice) -> Group:
    """Return the ranks of a mesh of one axis, or of the whole world, as `resolve` finds it."""
    if mesh is not None:
        return of_axis(mesh, "the ranks whose tokens count").everyone
    return resolve(None).everyone


def _two_axes(mesh: DeviceMesh) -> Ranks:
    if mesh.get_coordinate() is None:
        raise _not_in("mesh")
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        wanted = "a mesh whose ranks ascend along the nodes, as init_device_mesh makes it"
        hint = "init_device_mesh(device, (nodes, ranks of a node))"
        raise ConfigError(wanted, mesh.mesh.tolist(), hint=hint)
    if len(ranks) == dist.get_world_size():
        whole = Ranks(Group.from_handle(dist.group.WORLD))
    elif mesh.mesh_dim_names:
        flat = mesh._flatten()
        whole = Ranks(Group.from_handle(flat.get_group()), flat)
    else:
        wanted = "axes with names, of a mesh that is not the whole world"
        hint = 'init_device_mesh(..., mesh_dim_names=("node", "rank"))'
        raise ConfigError(wanted, mesh, hint=hint)
    if 1 in mesh.shape:  # one node, or one rank on each
        return replace(whole, is_flat=True)
    inside, between = Group.from_handle(mesh.get_group(1)), Group.from_handle(mesh.get_group(0))
    return replace(whole, inside=inside, between=between)


def two_axes_of_launcher(ranks: Ranks, device: torch.device, *, is_asked: bool = True) -> Ranks:
    """Return the axes of the world as it was launched: hosts, and the ranks of each. A collective.

    Returns `ranks` if there is one host, or if the user passed a mesh or a group. Raises
    `ConfigError` on every rank if hosts have different numbers of ranks, or take turns. Where
    nobody `is_asked` for hosts, the mesh may be the whole world, and such ranks stay as they are.
    """
    world_size = ranks.everyone.world_size
    is_given = ranks.axes is not None or ranks.is_flat or (is_asked and ranks.mesh is not None)
    if world_size == 1 or is_given or not dist.is_initialized():
        return ranks
    is_world = ranks.everyone.global_ranks() == list(range(dist.get_world_size()))
    if not (ranks.everyone.handle is dist.group.WORLD if is_asked else is_world):
        return ranks
    place = local_place(ranks.everyone)
    local = place[1]
    mine = (place == (ranks.everyone.rank % local, local), local)  # mostly the same on all ranks
    is_even = ranks.everyone.gather(mine) == [(True, local)] * world_size
    if not is_asked and not (is_even and world_size % local == 0 and local > 1):
        return ranks
    if not is_even or world_size % local:
        wanted = "as many ranks on every host, host after host, for a wire that knows hosts"
        places = ranks.everyone.gather(place)
        got = f"{places}, (local rank, ranks of its host) by rank"
        hint = "start equal numbers with torchrun --nproc-per-node, or pass mesh="
        raise ConfigError(wanted, got, hint=hint)
    if local == world_size:
        return ranks
    if local == 1:
        return replace(ranks, is_flat=True)
    inside, between = _groups_of_hosts(world_size, local, device.type)
    return replace(ranks, inside=inside, between=between)


def _groups_of_hosts(world_size: int, local: int, kind: str) -> tuple[Group, Group]:
    """This host's ranks, and those with its local rank on all hosts. A collective of the world.

    They are made once. A rank joins two groups, whatever the number of hosts.
    """
    rank = dist.get_rank()
    first = rank - rank % local
    inside, between = [*range(first, first + local)], [*range(rank % local, world_size, local)]
    if not splits_world():
        return Group.over(inside), Group.over(between)
    if (mesh := _MESHES.get(world := cast("dist.ProcessGroup", dist.group.WORLD))) is None:
        mesh = _MESHES[world] = init_device_mesh(kind, (world_size // local, local))
    return Group.from_handle(mesh.get_group(1)), Group.from_handle(mesh.get_group(0))


def _group_of(
    mesh: MeshChoice, timeout: timedelta
) -> tuple[dist.ProcessGroup | None, DeviceMesh | None]:
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            wanted = "a mesh of one axis, or of two: (nodes, ranks of a node)"
            hint = "pass one or two axes of it, such as mesh['node', 'rank']"
            raise ConfigError(wanted, f"one of {mesh.ndim}: {tuple(mesh.shape)}", hint=hint)
        if mesh.get_coordinate() is None:
            raise _not_in("mesh")
        return mesh.get_group(), mesh
    if mesh is dist.GroupMember.NON_GROUP_MEMBER:
        raise _not_in("process group")
    if isinstance(mesh, dist.ProcessGroup):
        if dist.get_rank(mesh) < 0:
            raise _not_in("process group")
        return mesh, None
    if mesh is not None:
        wanted = "mesh to be a DeviceMesh, a ProcessGroup or None"
        hint = "mesh=None shards over the whole world"
        raise ConfigError(wanted, f"a {type(mesh).__name__}", hint=hint)
    return (_whole_world(timeout) if dist.is_available() else None), None


def _whole_world(timeout: timedelta) -> dist.ProcessGroup | None:
    """Return the default group; start it where a launcher asks for one."""
    if not dist.is_initialized():
        join_launcher(timeout)
    elif dist.get_backend() == "gloo":  # Accelerate's, say, which leaves it to the exit
        _leave_at_exit()
    return dist.group.WORLD if dist.is_initialized() else None


def num_processes() -> int:
    """Return the size of the default group; 1 if there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _not_in(kind: str) -> ConfigError:
    rank = dist.get_rank() if dist.is_initialized() else 0
    hint = "only the ranks of the mesh call onefold.shard with it"
    return ConfigError(f"a {kind} that contains this rank", f"one without rank {rank}", hint=hint)


def join_launcher(timeout: timedelta = TIMEOUT) -> None:
    """Initialise the default process group if a launcher started several processes.

    A plain script under `torchrun`, or any launcher with torch's variables, then needs one line
    only. Raises `ConfigError` for variables that are missing or malformed, and `WireError` if the
    ranks do not find each other within `timeout`.
    """
    if launcher.world_size() == 1:
        launcher.warn_of_others()
    else:
        launcher.check()
        start_group(take_own_device(), timeout)
        _leave_at_exit()


def start_group(device: torch.device, timeout: timedelta) -> None:
    """Initialise the default process group of the launcher's ranks, for messages of `device`.

    Raises `WireError` if the ranks do not find each other.
    """
    if device.type == "cpu":
        use_link_to_hosts()
    try:
        # a bound device: NCCL connects here, not in the first forward, and barriers know the device
        bound = None if device.type == "cpu" else device
        dist.init_process_group(backends_for(device), timeout=timeout, device_id=bound)
    except RuntimeError as error:  # of the store, of gloo, of NCCL
        reason = str(error).splitlines()[0]
        raise WireError(launcher.not_met(reason, timeout, variable_for(device))) from error


def with_hosts(group: Group) -> Group:
    """Learn which ranks share a host: from the launcher, or else by the hosts' names. A collective.

    One launcher that does not say is enough for names to count on every rank.
    """
    if group.world_size == 1:
        return group
    place = launcher.local_place()
    if any(group.gather(place is None)):
        host = socket.gethostname()
        hosts = group.gather(host)
        place = hosts[: group.rank].count(host), hosts.count(host)
    return replace(group, local=place)


def local_place(group: Group) -> tuple[int, int]:
    """Return the local rank and the local world size: see `with_hosts`."""
    if group.world_size == 1:
        return 0, 1
    # ranks that have not met are taken for ranks of one host
    return group.local or launcher.local_place() or (group.rank, group.world_size)


def find_and_meet(mesh: MeshChoice, timeout: object = None) -> Ranks:
    """Find the ranks to shard over, and let them meet. A collective.

    If one rank raises, those that wait for it raise too.
    """
    with refusing():
        limit = as_timeout(timeout)
        return meet(resolve(mesh, limit or TIMEOUT), limit)


def meet(ranks: Ranks, timeout: timedelta | None = None) -> Ranks:
    """Connect the ranks of every group that have not met, and learn their hosts. A collective.

    Raises `WireError` if a rank does not come in time. Groups without gloo stay as they are: a
    world of one, and test doubles.
    """
    holder = launcher.store_holder()
    hint = f"{holder} holds the store by which ranks meet, and may have ended: look for its error"
    with named("the ranks to meet", hint=hint):
        everyone = _connected(ranks.everyone, ranks.phase, None, timeout)
    with announcing(everyone):
        everyone = with_hosts(everyone)
        if everyone.peers is None:
            return replace(ranks, everyone=everyone)
        roll_call, timeout = everyone.peers.roll_call, everyone.peers.timeout
        return replace(
            ranks,
            everyone=everyone,
            inside=ranks.inside and _connected(ranks.inside, ranks.phase, roll_call, timeout),
            between=ranks.between and _connected(ranks.between, ranks.phase, roll_call, timeout),
        )


def meet_part(group: Group, ranks: Ranks) -> Group:
    """Connect a part of ranks that have met. A collective of that part."""
    peers = ranks.everyone.peers
    if peers is None:
        return group
    return _connected(group, ranks.phase, peers.roll_call, peers.timeout)


def _connected(
    group: Group, phase: PhaseNow, roll_call: RollCall | None, timeout: timedelta | None
) -> Group:
    handle = group.handle
    if group.world_size == 1 or group.peers is not None or handle is None or not _has_gloo(handle):
        return group
    store, members = handle.get_group_store(), (group.rank, group.world_size)
    # every rank shards in the same order: its n-th meeting is the n-th of all
    meetings = f"onefold/meetings/{group.rank}"
    name = f"onefold/{store.add(meetings, 1)}"
    if roll_call is not None:  # lanes of parts have names of their own: answers compare them
        name += f" {handle.group_name}"
    limit, begun = timeout or _timeout_of(handle), list[str]()

    def await_all(prefix: str) -> None:
        _await_ranks(group, store, prefix, limit)
        begun.append(prefix)

    try:
        lanes = Lanes.connect(store, name, members, phase, limit, await_all)
    except BaseException:
        if roll_call is None and not begun:  # the next meeting has this name
            with suppress(RuntimeError):  # the store's host has ended
                store.add(meetings, -1)
        raise
    if roll_call is None:
        turns = PrefixStore(f"{name}/roll call", store.clone())  # type: ignore[attr-defined]
        is_whole_job = group.world_size == dist.get_world_size()
        roll_call = RollCall(turns, *members, owner=phase, is_whole_job=is_whole_job)
    roll_call.lanes.extend(lanes.all.values())

    def time_limit() -> float:
        return (timeout or _timeout_of(handle)).total_seconds()

    group = replace(group, peers=Peers(lanes, roll_call, timeout, time_limit))
    await_all(f"{name}/met")  # a rank that fails from now on can announce it
    if not group.is_nccl:
        return group
    watch = DeviceWatch(DeviceBackend(handle), roll_call, phase, name, time_limit)
    roll_call.lanes.append(watch.lane)
    return replace(group, watch=watch)


def _await_ranks(group: Group, store: Store, name: str, timeout: timedelta) -> None:
    """Wait until all ranks are here. Raises the error of one that refuses, or for those absent."""
    here, until, pause_s = f"{name}/here", time.monotonic() + timeout.total_seconds(), 0.001
    if refusal := read_refusal(group):  # that rank may wait for this one in its next call already
        raise refusal.error()
    store.add(here, 1)
    while (count := store.add(here, 0)) < group.world_size:
        refusal = read_refusal(group)
        if refusal is not None or time.monotonic() > until:
            store.add(here, -1)
            members = group.rank, group.world_size
            raise refusal.error() if refusal else absent(members, timeout, f"{count} of them")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)


def _has_gloo(handle: dist.ProcessGroup) -> bool:
    return "gloo" in dist.get_backend_config(handle)


def _timeout_of(handle: dist.ProcessGroup) -> timedelta:
    """The timeout of the group that the user, or a launcher, started; it may change."""
    return handle._get_backend(torch.device("cpu")).options._timeout


def as_timeout(choice: object) -> timedelta | None:
    """`shard(timeout=)` as a timedelta; `ConfigError` unless it is positive."""
    is_number = isinstance(choice, int | float) and not isinstance(choice, bool)
    limit = timedelta(seconds=choice) if is_number else choice  # type: ignore[arg-type]
    if limit is None or (isinstance(limit, timedelta) and limit > timedelta()):
        return limit
    wanted = "timeout to be a positive number of seconds, a timedelta or None"
    hint = "onefold.shard(module, optimizer, timeout=600)"
    raise ConfigError(wanted, repr(choice), hint=hint)


@cache
def _leave_at_exit() -> None:
    """Destroy the process group when the interpreter exits, if nobody has by then."""
    atexit.register(_leave_world)


def _leave_world() -> None:
    # gloo's thread frees the last tensors a moment after their wait returned, and aborts if the
    # interpreter is shutting down by then
    time.sleep(0.05)
    if dist.is_initialized():
        dist.destroy_process_group()
