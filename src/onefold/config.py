"""A user's choices as frozen values: `Stage`, `Precision`, `Offload`. `Wire` is in wire_config.py.

Words and presets become values here, and values that cannot work are refused. compose/resolve.py
puts them into a `Recipe`; rooms below never see a user's words.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Literal, TypeVar

import torch

from onefold.errors import ConfigError

T = TypeVar("T")


class Placement(StrEnum):
    """How the ranks hold one kind of state."""

    REPLICATE = "replicate"  # every rank holds the whole tensor
    PARTIAL = "partial"  # every rank holds its own summand of the whole tensor
    SHARD = "shard"  # every rank holds its rows


@dataclass(frozen=True, slots=True)
class Stage:
    """One row of the ZeRO table (arXiv 1910.02054, section 5): the placement of each kind of state.

    `number` is for people: reports and errors. `parameter` is the placement between forward and
    backward, `gradient` between micro-batches, `optimizer` that of masters and moments at any time.
    """

    number: int
    parameter: Placement
    gradient: Placement
    optimizer: Placement


STAGES = {
    0: Stage(0, Placement.REPLICATE, Placement.PARTIAL, Placement.REPLICATE),
    1: Stage(1, Placement.REPLICATE, Placement.PARTIAL, Placement.SHARD),
    2: Stage(2, Placement.REPLICATE, Placement.SHARD, Placement.SHARD),
    3: Stage(3, Placement.SHARD, Placement.SHARD, Placement.SHARD),
}


StageNumber = Literal[0, 1, 2, 3]
StageChoice = StageNumber | Literal["auto"]


def stage_of(number: object) -> Stage:
    """Return the row of the stage table, or raise `ConfigError`."""
    if isinstance(number, int) and not isinstance(number, bool) and number in STAGES:
        return STAGES[number]
    hint = "0 replicates everything, 1 shards the optimizer, 2 also gradients, "
    hint += '3 also parameters; "auto" is the lowest that fits'
    raise ConfigError('stage to be 0, 1, 2, 3 or "auto"', repr(number), hint=hint)


def value_of(
    choice: object, kind: type[T], known: Mapping[str, T], name: str, hint: str, *,
    guesses: bool = True,
) -> T:  # fmt: skip
    """Return the value that None, a word of `known` or a value stands for, or raise `ConfigError`.

    `hint` is for a choice that is close to no word, or any with `guesses` False.
    """
    if choice is None:
        return kind()
    if isinstance(choice, kind):
        return choice
    if isinstance(choice, str) and choice in known:
        return known[choice]
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    wanted = f"{name} to be None, {', '.join(map(repr, known))} or {article} {kind.__name__}"
    guess = nearest_word(choice, known) if guesses else ""
    raise ConfigError(wanted, repr(choice), hint=guess or hint)


def check_word(name: str, word: object, known: Sequence[str], hint: str) -> None:
    """Raise `ConfigError` unless a word is one of `known`; `hint` as in `value_of`."""
    if word not in known:
        wanted = f"{name} to be one of {', '.join(map(repr, known))}"
        raise ConfigError(wanted, repr(word), hint=nearest_word(word, known) or hint)


def nearest_word(word: object, known: Iterable[str]) -> str:
    """Return a hint that names the closest of `known`, or an empty string."""
    close = get_close_matches(str(word), list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else ""


@dataclass(frozen=True, slots=True)
class Precision:
    """dtypes of compute, master weights, gradient sums and buffers.

    Args:
        compute: dtype of forward and backward; None: each parameter's own.
        master: dtype that the optimizer steps, where it is wider than the parameter's own.
        reduce: dtype in which gradients of the ranks are summed. They travel in `compute`.
        buffers: dtype to which floating-point buffers are cast once; None leaves them alone.
        frozen: "int8" or "int4": frozen weights of Linears rest and travel in this codec, and are
            decoded into `compute` while their modules run. None leaves them as they are.
    """

    compute: torch.dtype | None = None
    master: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    buffers: torch.dtype | None = None
    frozen: Literal["int8", "int4"] | None = None

    def __post_init__(self) -> None:
        if self.frozen not in (None, "int8", "int4"):
            hint = nearest_word(self.frozen, ("int8", "int4"))
            hint = hint or "NF4 is for weights that bitsandbytes has packed: load them so"
            wanted = 'Precision.frozen to be None, "int8" or "int4"'
            raise ConfigError(wanted, repr(self.frozen), hint=hint)
        for name in ("compute", "master", "reduce", "buffers"):
            dtype = getattr(self, name)
            optional = name in ("compute", "buffers")
            if dtype is None and optional:
                continue
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                wanted = f"Precision.{name} to be a floating-point torch.dtype"
                hint = 'for example Precision(compute=torch.bfloat16), or just "bf16"'
                raise ConfigError(wanted, repr(dtype), hint=hint)


PRECISIONS = {
    "fp32": Precision(compute=torch.float32),
    "bf16": Precision(compute=torch.bfloat16),
    "fp16": Precision(compute=torch.float16),
}


PrecisionWord = Literal["fp32", "bf16", "fp16"]
PrecisionChoice = PrecisionWord | torch.dtype | Precision | None


def precision_of(choice: object) -> Precision:
    """Return the `Precision` that None, a name, torch's dtype or a `Precision` stands for."""
    if isinstance(choice, torch.dtype):
        choice = next((word for word, p in PRECISIONS.items() if p.compute is choice), choice)
    otherwise = "None computes in the parameters' own dtype"
    if isinstance(choice, str) and choice.lower().startswith(("fp8", "float8")):
        otherwise = f"there is no training in float8; {otherwise}"
    return value_of(choice, Precision, PRECISIONS, "precision", otherwise)


Tier = Literal["device", "cpu", "disk"]
TIERS: tuple[Tier, ...] = ("device", "cpu", "disk")
Stepper = Literal["auto", "cpu", "device"]
STEPPERS: tuple[Stepper, ...] = ("auto", "cpu", "device")


@dataclass(frozen=True, slots=True)
class Offload:
    """The tier of each kind of state: "device" (which computes), "cpu" (its memory) or "disk".

    Args:
        optimizer: tier of masters and moments. Off the device they are stepped in the background:
            `optimizer.step()` returns early, and each unit's next use waits for its own step.
        parameters: tier of the shards of weights (stage 3 only).
        activations: tier of the tensors that backward needs from forward.
        fraction: share of the optimizer state that leaves the device; the rest is stepped there at
            the same time (Twin-Flow). "auto": as little as the free memory allows.
        disk: one folder, or several whose bandwidths add.
        step_in_backward: step each unit as soon as its gradient is reduced, and free the gradient,
            as if `zero_grad()` followed every step. Nothing can look at all gradients then: no
            clipping, no loss scaling. All optimizers of a unit step it, so each has to be called
            after each backward.
        step: which processor steps states in CPU memory: "cpu", or "device", to which they are
            streamed. Both give the same bits. "auto" measures which is faster.
        tile: bytes above which the weight of a Linear or Embedding is gathered, used and reduced
            in row blocks of about that size, so that it is never whole (stage 3).
    """

    optimizer: Tier = "device"
    parameters: Tier = "device"
    activations: Tier = "device"
    fraction: float | Literal["auto"] = 1.0
    disk: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None
    step_in_backward: bool = False
    step: Stepper = "auto"
    tile: int | None = None

    def __post_init__(self) -> None:
        for name in ("optimizer", "parameters", "activations"):
            otherwise = "the folder for 'disk' is Offload.disk"
            check_word(f"Offload.{name}", getattr(self, name), TIERS, otherwise)
        share: object = self.fraction
        is_real = isinstance(share, int | float) and not isinstance(share, bool)
        if share != "auto" and not (is_real and 0 <= float(self.fraction) <= 1):
            wanted = "Offload.fraction to be between 0 and 1, or 'auto'"
            hint = "0.5 keeps half of the optimizer state on the device"
            raise ConfigError(wanted, repr(share), hint=hint)
        check_word("Offload.step", self.step, STEPPERS, '"auto" takes what is faster')
        if self.step == "device" and not self.may_stream:
            raise ConfigError(
                'Offload(step="device") with states in CPU memory, and no parameters on disk',
                f"optimizer={self.optimizer!r}, parameters={self.parameters!r}",
                hint='optimizer="cpu", or step="cpu": what is in files the CPU steps',
            )
        if self.tile is not None and (type(self.tile) is not int or self.tile < 1):
            wanted = "Offload.tile to be a number of bytes, or None"
            hint = "64 << 20 uses weights above 64 MiB in row blocks of that size"
            raise ConfigError(wanted, repr(self.tile), hint=hint)
        wants_disk = "disk" in (self.optimizer, self.parameters, self.activations)
        if wants_disk and not self.paths:
            hint = 'offload="disk:/path/on/a/fast/disk", or Offload(..., disk=...)'
            raise ConfigError("a folder for the disk tier", "none", hint=hint)

    @property
    def may_stream(self) -> bool:
        """True if a device may step the states: they lie in CPU memory, and no weights in files.

        Where the device is the CPU, it streams only if `step` names it.
        """
        return self.optimizer == "cpu" and self.parameters != "disk" and self.step != "cpu"

    @property
    def paths(self) -> list[Path]:
        """The folders of the disk tier."""
        folders = self.disk
        if folders is None:
            return []
        several = [folders] if isinstance(folders, str | os.PathLike) else list(folders)
        return [Path(os.path.abspath(folder)) for folder in several]


@dataclass(frozen=True, slots=True)
class Inference:
    """A module that evaluates and never trains, as `onefold.stream` makes it.

    Args:
        budget: bytes of device memory for weights, those at rest there included.
        room: the part of it for unsharded weights, once it is known what rests on the device.
        prefetch: units that are gathered ahead of the one that computes.
        reads_files: weights rest in the files of `onefold.load_pretrained`, and in no copy.
    """

    budget: int
    room: int = 0
    prefetch: int = 2
    reads_files: bool = False


OffloadChoice = Literal["optimizer", "cpu", "disk:PATH"] | str | Offload | None
"""A word, "disk:" with a folder, or an `Offload`."""


OFFLOADS = {
    "optimizer": Offload(optimizer="cpu"),
    "cpu": Offload(optimizer="cpu", parameters="cpu"),
    "disk:PATH": Offload(optimizer="disk", parameters="disk", disk="PATH"),
}


def offload_of(choice: object) -> Offload:
    """Return the `Offload` that a choice of `shard(offload=)` stands for.

    Args:
        choice: None, "optimizer", "cpu", "disk:PATH" (or several paths, by ":") or an `Offload`.
    """
    if isinstance(choice, str) and choice.partition(":")[0] == "disk":
        paths = [path for path in choice.split(":")[1:] if path]
        return Offload(optimizer="disk", parameters="disk", disk=paths or None)
    hint = '"disk:/mnt/nvme" offloads to that folder; None keeps all state on the device'
    guesses = choice not in ("gpu", "cuda", "device", "none")  # "cpu" would be the nearest word
    return value_of(choice, Offload, OFFLOADS, "offload", hint, guesses=guesses)


def check_offload(offload: Offload, stage: Stage) -> None:
    """Raise `ConfigError` for tiers that a stage cannot have."""
    leaves = offload.optimizer != "device"
    if offload.tile is not None and stage.parameter is not Placement.SHARD:
        got = f"tile={offload.tile} at a stage that keeps them whole"
        hint = "stage=3, or no tile"
        raise ConfigError("stage=3 for weights that are used in tiles", got, hint=hint)
    if offload.parameters != "device" and stage.parameter is not Placement.SHARD:
        got = f"parameters={offload.parameters!r} at a stage that keeps them whole"
        hint = f"stage=3, or Offload(optimizer={offload.optimizer!r}), which every stage has"
        raise ConfigError("stage=3 for parameters off the device", got, hint=hint)
    if leaves and stage.optimizer is not Placement.SHARD:
        wanted = "stage 1, 2 or 3 for optimizer state off the device"
        hint = "stage=1 shards it at no further cost"
        raise ConfigError(wanted, "stage 0, which keeps all of it on every rank", hint=hint)
    if offload.step_in_backward and not leaves:
        wanted = "optimizer state off the device, to be stepped in backward"
        hint = "Offload(optimizer='cpu', step_in_backward=True)"
        raise ConfigError(wanted, "optimizer='device'", hint=hint)
