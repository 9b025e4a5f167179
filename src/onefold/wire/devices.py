"""Which device a rank computes on."""

import os
import socket
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from onefold.errors import ConfigError
from onefold.layout.units import Owned
from onefold.tier import accelerator
from onefold.wire import launcher
from onefold.wire.collectives import Group
from onefold.wire.interfaces import GLOO

SHARE = "ONEFOLD_SHARE_DEVICES"
"""Environment variable: "1" lets ranks share a device, for tests over gloo. NCCL refuses it."""


def device_of(
    parameters: Sequence[Owned], group: Group, mesh: DeviceMesh | None = None
) -> torch.device:
    """The device that a module is sharded on.

    Parameters on the CPU, or on `meta`, go to this rank's accelerator, unless the mesh or the
    process group is for CPUs. Raises `ConfigError` for parameters on several other devices.
    """
    cpu = torch.device("cpu")
    names: dict[torch.device, str] = {}  # of one parameter on each device
    for owned in parameters:
        if not owned.parameter.is_meta:
            names.setdefault(owned.parameter.device, owned.fqn)
    devices = names.keys()
    if not devices or cpu in devices:
        devices = (devices - {cpu}) | {_accelerator(group, mesh) or cpu}
    if len(devices) > 1:
        got = ", ".join(f"{fqn!r} on {device}" for device, fqn in names.items())
        hint = "move the module to one device before onefold.shard"
        raise ConfigError("all parameters on one device", got, hint=hint)
    (device,) = devices
    return device


def _accelerator(group: Group, mesh: DeviceMesh | None) -> torch.device | None:
    """This rank's accelerator, where there is one that the ranks can send from."""
    kind = accelerator.kind()
    if kind is None or (mesh is not None and mesh.device_type == "cpu"):
        return None
    if group.handle is not None and f"{kind}:" not in _backends(group.handle):
        return None
    return torch.device(kind, accelerator.current_index())


def _backends(handle: dist.ProcessGroup) -> str:
    """The backend of each kind of device, as in "cpu:gloo,cuda:nccl"."""
    return str(dist.get_backend_config(handle))


def take_own_device() -> torch.device:
    """Make this rank's accelerator the current one, and return it; the CPU where there is none."""
    kind = accelerator.kind()
    if kind is None:
        return torch.device("cpu")
    device = torch.device(kind, own_device_index())
    accelerator.use(device)
    return device


def backends_for(device: torch.device) -> str:
    """The backends of a group that sends tensors of the device and of the CPU."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def variable_for(device: torch.device) -> str:
    """Return the environment variable that names the interface for messages of a device."""
    return "NCCL_SOCKET_IFNAME" if device.type == "cuda" else GLOO


def own_device_index() -> int:
    """The number of this rank's accelerator on its host: the launcher's number of this rank there.

    A launcher that does not say is taken to number ranks host by host, one for each device.
    `check_devices` refuses two ranks that took the same one.
    """
    count, index = accelerator.count(), launcher.local_rank()
    if index is None:
        index = int(os.environ.get("RANK", "0")) % count
    if index >= count and _may_share():
        return index % count
    if index >= count:
        raise ConfigError(
            f"at most {count} ranks on this host, one for each device",
            f"local rank {index} (LOCAL_RANK, or its like of MPI or SLURM)",
            hint=f"start {count} ranks, or hide devices (CUDA_VISIBLE_DEVICES=) to use CPUs",
        )
    return index


def check_devices(device: torch.device, group: Group) -> None:
    """See that ranks do not share an accelerator, and that all compute on the same kind.

    A collective of five messages at most. Rank 0 alone reads where all ranks are, and tells the
    others of two that share a device. Raises `ConfigError` on every rank. Warns a lone rank that
    leaves devices idle.
    """
    if group.world_size == 1:
        if device.type != "cpu" and not dist.is_torchelastic_launched():
            _warn_of_idle(device)
        return
    kinds = group.gather(device.type)
    other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), 0)
    if other:
        names = group.gather(str(device))
        got = f"{names[0]} on rank 0 and {names[other]} on rank {other}"
        hint = "every rank moves its module to its own device, or leaves it on the CPU"
        raise ConfigError("the same kind of device on every rank", got, hint=hint)
    if device.type == "cpu":
        return
    places = group.gather_at_first((socket.gethostname(), str(device)))
    if shared := group.take_first(None if _may_share() else _shared(places)):
        hint = "use the device of LOCAL_RANK: "
        hint += "torch.accelerator.set_device_index(int(os.environ['LOCAL_RANK'])); for a test "
        hint += f"over gloo, {SHARE}=1 lets ranks share one"
        raise ConfigError("each rank on a device of its own", shared, hint=hint)


def _shared(places: Sequence[tuple[str, str]]) -> str | None:
    """The first two ranks with one device, of the host and the device of each; None: no two."""
    holders: dict[tuple[str, str], int] = {}
    for rank, (host, name) in enumerate(places):
        if (other := holders.setdefault((host, name), rank)) != rank:
            return f"{name} on ranks {other} and {rank}, both on host {host!r}"
    return None


def _may_share() -> bool:
    return os.environ.get(SHARE) == "1"


def _warn_of_idle(device: torch.device) -> None:
    count = accelerator.count()
    if count > 1:
        warnings.warn(
            f"1 of {count} {device.type} devices is used: start the script with "
            f"torchrun --nproc-per-node {count}",
            stacklevel=6,
        )
