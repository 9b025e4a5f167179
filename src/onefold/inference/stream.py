"""From the arguments of `onefold.stream` to the choices of a module that never trains."""

from __future__ import annotations

import os
from dataclasses import replace

from torch import nn

from onefold.compose import checks
from onefold.compose.coding import KeptExact, code_for_products
from onefold.compose.resolve import Asked, Choices, examine, examine_together
from onefold.config import Inference, Offload, Precision, nearest_word, offload_of
from onefold.errors import ConfigError
from onefold.fit.bounds import RankMemory
from onefold.fit.residents import with_residents
from onefold.layout.units import UnitPlan, repeated_blocks, uncompiled
from onefold.recipe import Recipe
from onefold.unit.init import PROMISED, Values
from onefold.wire.collectives import Group
from onefold.wire.ranks import Ranks, local_place
from onefold.wire.together import together

MIN_TILE_NBYTES = 1 << 20
"""Row blocks of a head or a table are at least as large: smaller reads are slower."""


def examine_stream(
    module: nn.Module, ranks: Ranks, *, budget: int | None, rest: str | None, offload: object
) -> tuple[Asked, list[KeptExact]]:
    """Check the arguments on all ranks, freeze the module and pack its weights. A collective.

    Returns the module's recipe, and the matrices that could not be packed.
    """
    data = ranks.everyone
    choices = examine_together(
        ranks, lambda: examine(module, None, _checked(module, budget, rest, offload), data), module
    )
    for parameter in uncompiled(module).parameters():
        parameter.requires_grad_(False)
    device, exact = choices.device, list[KeptExact]()
    if rest is not None:
        exact = together(
            data, lambda: code_for_products(uncompiled(module), rest, device.type), ConfigError
        )
    if budget is None:
        budget = RankMemory(device, local_place(data)[1], data).room_to_keep()
    examined = examine_together(
        ranks, lambda: examine(module, None, _tiled(module, budget, rest, offload), data), module
    )
    return examined, exact


def recipe_of_stream(
    module: nn.Module, ranks: Recipe, *, budget: int, rest: str | None, offload: object
) -> tuple[Recipe, list[UnitPlan]]:
    """Return the recipe that `onefold.stream` would build, without ranks or values; and its units.

    The module, on `meta`, is frozen and packed. World sizes and device are those of `ranks`.
    """
    _checked(module, budget, rest, offload)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    if rest is not None:
        module.__dict__[PROMISED] = _Unread()
        code_for_products(module, rest, ranks.device_type)
        del module.__dict__[PROMISED]
    examined = examine(module, None, _tiled(module, budget, rest, offload), Group.of(None))
    recipe = replace(
        examined.recipe, world_size=ranks.world_size, local_world_size=ranks.local_world_size,
        device_type=ranks.device_type,
    )  # fmt: skip
    return with_residents(recipe), examined.parts.plans


class _Unread:
    """Promises the values of every weight to a plan, which reads none."""

    def __contains__(self, name: str) -> bool:
        return True


def _checked(module: nn.Module, budget: int | None, rest: str | None, offload: object) -> Choices:
    """The choices, without touching anything; `ConfigError` for some that cannot work."""
    checks.check_module(module)
    if budget is not None and (type(budget) is not int or budget < 1):
        raise ConfigError(
            "budget to be a number of bytes, or None",
            repr(budget),
            hint="2 << 30 is 2 GiB; None takes what is free on the device",
        )
    if rest not in (None, "int8", "int4"):
        raise ConfigError(
            'rest to be None (exact), "int8" or "int4"',
            repr(rest),
            hint=nearest_word(rest, ("int8", "int4")) or "int8 loses least",
        )
    reads_files = offload == "disk"
    tiers = _files_of(module, rest) if reads_files else _tiers_of(offload)
    return Choices(
        stage=3, offload=tiers, precision=Precision(frozen=rest),
        inference=Inference(budget or 0, reads_files=reads_files),
    )  # fmt: skip


def _files_of(module: nn.Module, rest: str | None) -> Offload:
    """The folder of the files that the module was promised, for weights that rest in them."""
    values: Values | None = uncompiled(module).__dict__.get(PROMISED)
    if values is None or rest is not None:
        raise ConfigError(
            "a folder for the disk tier",
            f"packed weights (rest={rest!r}), which no file has" if rest else "none",
            hint='offload="disk:PATH"; "disk" alone reads exact weights from the files that '
            "onefold.load_pretrained has promised to a module",
        )
    return Offload(parameters="disk", disk=str(values.directory))


def _tiers_of(offload: object) -> Offload:
    """The tiers of `stream(offload=)`: only weights rest, so the other kinds have none."""
    if offload is None or offload == "device":
        return Offload()
    if isinstance(offload, str | os.PathLike | Offload):
        tiers = offload_of(offload)
        return Offload(parameters=tiers.parameters, disk=tiers.disk)
    raise ConfigError(
        'offload to be None, "cpu", "disk:PATH" or an Offload',
        repr(offload),
        hint='"cpu" keeps weights in CPU memory, "disk:PATH" in a file in that folder',
    )


def _tiled(module: nn.Module, budget: int, rest: str | None, offload: object) -> Choices:
    """The choices; large tables and heads in row blocks, unless the budget holds all weights."""
    choices = _checked(module, budget, rest, offload)
    parameters = list(uncompiled(module).parameters())
    total = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    blocks = repeated_blocks(uncompiled(module))
    if total <= budget or not blocks:
        return choices
    largest = max(sum(p.numel() * p.element_size() for p in block.parameters()) for block in blocks)
    tiers = replace(offload_of(choices.offload), tile=max(MIN_TILE_NBYTES, largest))
    return replace(choices, offload=tiers)
