"""Which ranks and which device: from a mesh, a process group, or what the launcher left behind."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from onefold.errors import ConfigError, expected
from onefold.layout.axes import Axes
from onefold.layout.units import Owned
from onefold.mesh.interfaces import use_link_to_hosts
from onefold.wire.collectives import Group

MeshChoice = DeviceMesh | dist.ProcessGroup | None


@dataclass(frozen=True, slots=True)
class Ranks:
    """Who trains together: everyone, and on a mesh of two axes this rank's node and its peers.

    `inside` are the ranks of this rank's node, `between` those in its place of every node; `mesh`
    is one axis of all ranks, if a mesh was given. `is_flat`: a mesh of two axes was given, one of
    which is 1 long: a cluster of one node, or nodes of one rank.
    """

    everyone: Group
    mesh: DeviceMesh | None = None
    inside: Group | None = None
    between: Group | None = None
    is_flat: bool = False

    @property
    def axes(self) -> Axes | None:
        """The two axes, if there are."""
        if self.inside is None or self.between is None:
            return None
        return Axes(self.between.world_size, self.inside.world_size, self.everyone.rank)

    def shards(self, *, are_replicas: bool) -> Group:
        """The ranks over which resting state is cut: all, or those of a node that is a replica."""
        return self.inside if self.inside and are_replicas else self.everyone

    def facts(self) -> list[str]:
        """What must be the same on every rank."""
        axes = self.axes
        return [
            f"mesh of {axes.nodes} nodes x {axes.local_world_size} ranks" if axes else "one axis"
        ]


def resolve(mesh: MeshChoice) -> Ranks:
    """The ranks to shard over."""
    if isinstance(mesh, DeviceMesh) and mesh.ndim == 2:
        return _two_axes(mesh)
    handle, device_mesh = _group_of(mesh)
    return Ranks(Group.of(handle), device_mesh)


def _two_axes(mesh: DeviceMesh) -> Ranks:
    if mesh.get_coordinate() is None:
        raise ConfigError(_not_in("mesh"))
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ConfigError(
            expected(
                "a mesh whose ranks ascend along the nodes, as init_device_mesh makes it",
                f"{mesh.mesh.tolist()}",
                hint="init_device_mesh(device, (nodes, ranks of a node))",
            )
        )
    if len(ranks) == dist.get_world_size():
        found = Ranks(Group.of(dist.group.WORLD))
    elif mesh.mesh_dim_names:
        whole = mesh._flatten()
        found = Ranks(Group.of(whole.get_group()), whole)
    else:
        raise ConfigError(
            expected(
                "axes with names, of a mesh that is not the whole world",
                f"{mesh}",
                hint='init_device_mesh(..., mesh_dim_names=("node", "rank"))',
            )
        )
    if 1 in mesh.shape:  # one node, or one rank on each: one axis does it
        return replace(found, is_flat=True)
    inside, between = Group.of(mesh.get_group(1)), Group.of(mesh.get_group(0))
    return replace(found, inside=inside, between=between)


def two_axes_of_launcher(ranks: Ranks, device: torch.device) -> Ranks:
    """Axes as torchrun started the world: hosts, and the processes of each; as it was if one host.

    A collective. Raises `ConfigError` on every rank if hosts have different numbers of processes,
    or a number that the world is no multiple of.
    """
    is_given = ranks.axes is not None or ranks.is_flat
    if ranks.everyone.world_size == 1 or is_given or not dist.is_initialized():
        return ranks
    if ranks.mesh is not None or ranks.everyone.handle is not dist.group.WORLD:
        return ranks
    local = local_place(ranks.everyone)[1]
    everyone = ranks.everyone.all_gather_object(local)
    if len(set(map(str, everyone))) > 1 or ranks.everyone.world_size % local:
        raise ConfigError(
            expected(
                "as many ranks on every host, for a wire that knows hosts",
                f"{everyone} by rank",
                hint="start equal numbers with torchrun --nproc-per-node, or pass mesh=",
            )
        )
    if local == ranks.everyone.world_size:
        return ranks
    return resolve(init_device_mesh(device.type, (ranks.everyone.world_size // local, local)))


def _group_of(mesh: MeshChoice) -> tuple[dist.ProcessGroup | None, DeviceMesh | None]:
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ConfigError(
                expected(
                    "a mesh of one axis, or of two: (nodes, ranks of a node)",
                    f"one of {mesh.ndim}: {tuple(mesh.shape)}",
                    hint="pass one or two axes of it, such as mesh['node', 'rank']",
                )
            )
        if mesh.get_coordinate() is None:
            raise ConfigError(_not_in("mesh"))
        return mesh.get_group(), mesh
    if isinstance(mesh, dist.ProcessGroup):
        if dist.get_rank(mesh) < 0:
            raise ConfigError(_not_in("process group"))
        return mesh, None
    if mesh is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(_not_in("process group"))
    if mesh is not None:
        raise ConfigError(
            expected(
                "mesh to be a DeviceMesh, a ProcessGroup or None",
                f"a {type(mesh).__name__}",
                hint="mesh=None shards over the whole world",
            )
        )
    if not dist.is_available():
        return None, None
    if not dist.is_initialized():
        join_launcher()
    return (dist.group.WORLD, None) if dist.is_initialized() else (None, None)


def _not_in(what: str) -> str:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return expected(
        f"a {what} that contains this rank",
        f"one without rank {rank}",
        hint="only the ranks of the mesh call onefold.shard with it",
    )


def join_launcher() -> None:
    """Initialise the default process group when torchrun started several processes.

    A plain script under `torchrun` thereby needs one line only. Nothing happens without a launcher.
    """
    if not dist.is_torchelastic_launched() or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    else:
        use_link_to_hosts()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    atexit.register(_leave)


def local_place(group: Group) -> tuple[int, int]:
    """This rank's number among the group's on its host, and how many they are; as launched."""
    if group.world_size == 1:
        return 0, 1
    known = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    if all(value is not None and value.isdigit() for value in known):
        local_rank, local_world_size = (int(value or 0) for value in known)
        if local_rank < local_world_size:
            return local_rank, local_world_size
    return group.rank, group.world_size  # without a launcher they are processes of one host


def _leave() -> None:
    # gloo's thread lets go of the last tensors a moment after their wait returned, for which it
    # needs the interpreter: without this pause it may find one that is shutting down, and abort
    time.sleep(0.05)
    if dist.is_initialized():
        dist.destroy_process_group()


def device_of(parameters: Sequence[Owned], group: Group) -> torch.device:
    """The one device all parameters are on; for `meta` the accelerator of the group, or the CPU."""
    found: dict[torch.device, str] = {}
    for owned in parameters:
        if not owned.parameter.is_meta:
            found.setdefault(owned.parameter.device, owned.fqn)
    if len(found) > 1:
        raise ConfigError(
            expected(
                "all parameters on one device",
                ", ".join(f"{fqn!r} on {device}" for device, fqn in found.items()),
                hint="move the module to one device before onefold.shard",
            )
        )
    if found:
        return next(iter(found))
    if torch.cuda.is_available() and (group.handle is None or group.is_nccl):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
