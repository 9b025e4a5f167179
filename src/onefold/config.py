"""What a user may choose, as frozen values: `Precision`, `Offload`, `Wire` and the stage table.

Validated here, turned into objects in `api`; the runtime never sees these classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum

import torch

from onefold.errors import ConfigError, expected


class Placement(StrEnum):
    """Who holds a piece of state."""

    REPLICATE = "replicate"  # every rank holds all of it
    PARTIAL = "partial"  # every rank holds its own summand of it
    SHARD = "shard"  # every rank holds its rows of it


@dataclass(frozen=True, slots=True)
class Placements:
    """Where each kind of state rests: one row of the ZeRO table (arXiv 1910.02054, section 5).

    `parameter` is the placement between forward and backward; `gradient` the one between the
    micro-batches of an accumulation; `optimizer` that of masters and moments, always.
    """

    parameter: Placement
    gradient: Placement
    optimizer: Placement


STAGES = {
    0: Placements(Placement.REPLICATE, Placement.PARTIAL, Placement.REPLICATE),
    1: Placements(Placement.REPLICATE, Placement.PARTIAL, Placement.SHARD),
    2: Placements(Placement.REPLICATE, Placement.PARTIAL, Placement.SHARD),
    3: Placements(Placement.SHARD, Placement.SHARD, Placement.SHARD),
}


def placements_of(stage: object) -> Placements:
    """The row of the stage table, or `ConfigError`."""
    if isinstance(stage, int) and not isinstance(stage, bool) and stage in STAGES:
        return STAGES[stage]
    raise ConfigError(
        expected(
            "stage to be 0, 1, 2 or 3",
            repr(stage),
            hint="0 replicates everything, 1 shards the optimizer, 2 also gradients, "
            "3 also parameters",
        )
    )


@dataclass(frozen=True, slots=True)
class Precision:
    """dtypes of compute, master weights, gradient sums and buffers.

    `compute`: what forward and backward see; None is each parameter's own dtype. `master`: the
    dtype the optimizer steps in, where it is wider than the parameter's own. `reduce`: dtype in
    which gradients of the ranks are summed; they travel in the compute dtype. `buffers`: dtype
    floating-point buffers are cast to once, None leaves them alone.
    """

    compute: torch.dtype | None = None
    master: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    buffers: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("compute", "master", "reduce", "buffers"):
            dtype = getattr(self, name)
            optional = name in ("compute", "buffers")
            if dtype is None and optional:
                continue
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise ConfigError(
                    expected(
                        f"Precision.{name} to be a floating-point torch.dtype",
                        repr(dtype),
                        hint='for example Precision(compute=torch.bfloat16), or just "bf16"',
                    )
                )


PRECISIONS = {
    "fp32": Precision(compute=torch.float32),
    "bf16": Precision(compute=torch.bfloat16),
    "fp16": Precision(compute=torch.float16),
}


def precision_of(choice: object) -> Precision:
    """A `Precision` from None, a name or a `Precision`."""
    if choice is None:
        return Precision()
    if isinstance(choice, Precision):
        return choice
    if isinstance(choice, str) and choice in PRECISIONS:
        return PRECISIONS[choice]
    raise ConfigError(
        expected(
            f"precision to be None, {', '.join(map(repr, PRECISIONS))} or a Precision",
            repr(choice),
            hint=_nearest(choice, PRECISIONS) or "None computes in the parameters' own dtype",
        )
    )


def refuse_unbuilt(offload: object, wire: object) -> None:
    """Refuse the tiers and wires that this version does not have, rather than ignore them."""
    for name, choice in (("offload", offload), ("wire", wire)):
        if choice is not None:
            raise ConfigError(
                expected(
                    f"{name} to be None in this version",
                    repr(choice),
                    hint="every state rests on the device and travels in its own dtype for now; "
                    "see CHANGELOG.md for what is planned",
                )
            )


def _nearest(word: object, known: dict[str, Precision]) -> str:
    close = get_close_matches(str(word), known, n=1)
    return f"did you mean {close[0]!r}?" if close else ""
