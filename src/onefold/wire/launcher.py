"""What a launcher says of this rank, by the variables that torch's `init_process_group()` reads.

torchrun sets them all. Wrappers around srun and mpirun, PyTorchJob, `accelerate launch` and workers
of Ray set at least `NAMES`.
"""

import os
import warnings
from datetime import timedelta

from onefold.errors import ConfigError, expected
from onefold.pages import page

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

ALONE = (
    "to train in one process alone, unset WORLD_SIZE, pass mesh= a group of this rank alone, or "
    "first call torch.distributed."
    'init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)'
)

_STARTERS = {  # by its variable for the rank: those for the world size and the local rank
    "OMPI_COMM_WORLD_RANK": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "MV2_COMM_WORLD_RANK": ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    "PMI_RANK": ("PMI_SIZE", "MPI_LOCALRANKID"),
    "SLURM_PROCID": ("SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}


def world_size() -> int:
    """Return WORLD_SIZE, 1 where it is not set. Raises `ConfigError` for anything but a count."""
    text = os.environ.get("WORLD_SIZE") or "1"
    if not (text.isdecimal() and int(text)):
        hint = f"the launcher sets it to the number of ranks; {ALONE}"
        raise ConfigError("WORLD_SIZE to be a positive number", repr(text), hint=hint)
    return int(text)


def check() -> None:
    """Raise `ConfigError` unless the environment describes this rank as torch expects it."""
    missing = [name for name in NAMES if not os.environ.get(name)]
    if missing:
        hint = (
            "start ranks with torchrun, or set "
            f"{', '.join(missing)} in the launcher's script; {ALONE}"
        )
        wanted = f"{', '.join(NAMES)} in the environment of a rank"
        raise ConfigError(wanted, f"no {', '.join(missing)}", hint=hint)
    limits = {"RANK": world_size(), "MASTER_PORT": 1 << 16}
    for name, limit in limits.items():
        text = os.environ[name]
        if not text.isdecimal() or int(text) >= limit:
            wanted = f"{name} to be a number from 0 to {limit - 1}"
            hint = f"WORLD_SIZE is {world_size()}: set {name} on each rank; {ALONE}"
            raise ConfigError(wanted, repr(text), hint=hint)


def local_rank() -> int | None:
    """Return the number of this rank on its host; None if no variable says it.

    MPI's and SLURM's own numbers count only where their rank is RANK: one task of srun may have
    started several ranks, which share its number.
    """
    text = os.environ.get("LOCAL_RANK", "")
    for rank, (_, local) in _STARTERS.items():
        if not text and os.environ.get(rank) == os.environ.get("RANK"):
            text = os.environ.get(local, "")
    return int(text) if text.isdecimal() else None


def local_place() -> tuple[int, int] | None:
    """Return the local rank and the local world size; None unless variables say both."""
    local, size = local_rank(), os.environ.get("LOCAL_WORLD_SIZE", "")
    is_known = local is not None and size.isdecimal() and local < int(size)
    return (local, int(size)) if is_known else None  # type: ignore[return-value]


def warn_of_others() -> None:
    """Warn a process that will train alone, though mpirun or srun started several."""
    if os.environ.get("WORLD_SIZE"):
        return
    for rank, (size, _) in _STARTERS.items():
        count = os.environ.get(size, "")
        if count.isdecimal() and int(count) > 1 and rank in os.environ:
            warnings.warn(
                f"this process trains alone, though {size}={count}: for ranks that train together "
                f"set {', '.join(NAMES)} from {rank} and {size}",
                stacklevel=9,  # of the line that calls `shard`
            )


def not_met(got: str, timeout: timedelta, variable: str) -> str:
    """Say that ranks did not find each other; `variable` names the backend's interface."""
    interface = os.environ.get(variable) or "not set"
    return expected(
        f"rank {os.environ['RANK']} to meet the other ranks, {os.environ['WORLD_SIZE']} in all, "
        f"within {timeout.total_seconds():g} s",
        f"{got} ({variable} is {interface})",
        hint=f"start every host; {variable} names the interface that leads to the others "
        f"({page('docs/guides/clusters.md')}); {ALONE}",
    )


def store_holder() -> str:
    """The process that holds the store by which the ranks of the job meet, for messages."""
    return "the launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
