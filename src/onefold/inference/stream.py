"""Forwards without gradients: choices of `onefold.stream`, and units that `generating` keeps.

See docs/adr/0022.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from onefold.compose import checks
from onefold.compose.parts import Arguments, Choices
from onefold.compose.quantizing import KeptExact, quantize_for_products, without_reading
from onefold.compose.resolve import examine, examine_together
from onefold.config import Inference, Offload, Precision, nearest_word, offload_of
from onefold.engine.registry import engine_of
from onefold.engine.watch import in_backward
from onefold.errors import ConfigError, StateError
from onefold.fit.bounds import RankMemory, most_of_budget
from onefold.fit.kept_units import gathered_units, units_to_keep, with_residents
from onefold.layout.module_tree import ModuleTree
from onefold.layout.units import UnitPlan, repeated_blocks
from onefold.recipe import Recipe
from onefold.unit.promises import promised_values
from onefold.wire.collectives import Group
from onefold.wire.ranks import Ranks, local_place
from onefold.wire.together import together

MIN_TILE_NBYTES = 1 << 20
"""Row blocks of a head or a table are at least as large: smaller reads are slower."""


def examine_stream(
    module: nn.Module, ranks: Ranks, *, budget: int | str | None, rest: str | None, offload: object
) -> tuple[Arguments, list[KeptExact]]:
    """Check the arguments on all ranks, freeze the module and pack its weights. A collective.

    Returns the module's recipe, and the matrices that could not be packed.
    """
    data, tree = ranks.everyone, ModuleTree.from_root(module)
    choices = examine_together(
        ranks,
        lambda: examine(tree, None, _checked_choices(tree, budget, rest, offload), data),
        tree,
    )
    for _, parameter, *_ in tree.parameters():
        parameter.requires_grad_(False)
    device, exact = choices.device, list[KeptExact]()
    if rest is not None:
        exact = together(
            data, lambda: quantize_for_products(tree.root, rest, device.type), ConfigError
        )
    if budget is None:
        budget = RankMemory(device, local_place(data)[1], data).room_to_keep()
    arguments = examine_together(
        ranks, lambda: examine(tree, None, _tiled(tree, budget, rest, offload), data), tree
    )
    return arguments, exact


def recipe_of_stream(
    module: nn.Module, ranks: Recipe, *, budget: int, rest: str | None, offload: object
) -> tuple[Recipe, list[UnitPlan]]:
    """Return the recipe that `onefold.stream` would build, without ranks or values; and its units.

    The module, on `meta`, is frozen and packed. World sizes and device are those of `ranks`.
    """
    tree = ModuleTree.from_root(module)
    _checked_choices(tree, budget, rest, offload)
    for _, parameter, *_ in tree.parameters():
        parameter.requires_grad_(False)
    if rest is not None:
        with without_reading(tree):
            quantize_for_products(module, rest, ranks.device_type)
    arguments = examine(tree, None, _tiled(tree, budget, rest, offload), Group.from_handle(None))
    recipe = replace(
        arguments.recipe, world_size=ranks.world_size, local_world_size=ranks.local_world_size,
        device_type=ranks.device_type,
    )  # fmt: skip
    return with_residents(recipe), arguments.parts.plans


def _checked_choices(
    tree: ModuleTree, budget: int | str | None, rest: str | None, offload: object
) -> Choices:
    """The choices, without touching anything; `ConfigError` for some that cannot work."""
    checks.check_module(tree)
    most = most_of_budget(budget, least=1)
    if rest not in (None, "int8", "int4"):
        hint = nearest_word(rest, ("int8", "int4")) or "int8 loses least"
        raise ConfigError('rest to be None (exact), "int8" or "int4"', repr(rest), hint=hint)
    reads_files = offload == "disk"
    tiers = _files_of(tree, rest) if reads_files else _tiers_of(offload)
    return Choices(
        stage=3, offload=tiers, precision=Precision(frozen=rest),
        inference=Inference(0 if budget is None else most, reads_files=reads_files),
    )  # fmt: skip


def _files_of(tree: ModuleTree, rest: str | None) -> Offload:
    """The folder of the files that the module was promised, for weights that rest in them."""
    values = promised_values(tree)
    if values is None or rest is not None:
        got = f"packed weights (rest={rest!r}), which no file has" if rest else "none"
        hint = 'offload="disk:PATH"; "disk" alone reads exact weights from the files that '
        hint += "onefold.load_pretrained has promised to a module"
        raise ConfigError("a folder for the disk tier", got, hint=hint)
    return Offload(parameters="disk", disk=str(values.directory))


def _tiers_of(offload: object) -> Offload:
    """The tiers of `stream(offload=)`: only weights rest, so the other kinds have none."""
    if offload is None or offload == "device":
        return Offload()
    if isinstance(offload, str | os.PathLike | Offload):
        tiers = offload_of(offload)
        return Offload(parameters=tiers.parameters, disk=tiers.disk)
    wanted = 'offload to be None, "cpu", "disk:PATH" or an Offload'
    hint = '"cpu" keeps weights in CPU memory, "disk:PATH" in a file in that folder'
    raise ConfigError(wanted, repr(offload), hint=hint)


def _tiled(tree: ModuleTree, budget: int | str, rest: str | None, offload: object) -> Choices:
    """The choices; large tables and heads in row blocks, unless the budget holds all weights."""
    choices = _checked_choices(tree, budget, rest, offload)
    parameters = list(tree.root.parameters())
    total = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    blocks = repeated_blocks(tree.root)
    if total <= most_of_budget(budget) or not blocks:
        return choices
    largest = max(sum(p.numel() * p.element_size() for p in block.parameters()) for block in blocks)
    tiers = replace(offload_of(choices.offload), tile=max(MIN_TILE_NBYTES, largest))
    return replace(choices, offload=tiers)


@contextmanager
def generating(module: nn.Module, budget: int | str | None = None) -> Iterator[None]:
    """Keep weights unsharded between forwards without gradients: to generate or evaluate.

    A collective on entry. At stage 3 every forward gathers every unit, so that `generate` of n
    tokens gathers n times. In this block each unit that fits is gathered once. The others are
    gathered in every forward. Weights, tokens and training are the same, bit for bit, with and
    without it. Kept weights are freed at the end of the block, and earlier where training goes on:
    a forward with gradients, an optimizer step, a save or a load. Without sharded parameters
    (stages 0 to 2) nothing changes.

    Random number generators are the caller's: sampling advances the generator that dropout uses.

    Args:
        module: one that `shard` has sharded.
        budget: bytes of unsharded weights, at most, or a text such as "2GiB". Default, and upper
            limit: three quarters of the free memory of the rank that has the least, where the
            others leave room for activations and a cache of keys and values.

    Raises:
        StateError: inside a forward or backward of the module.
        ConfigError: a budget that is no number of bytes.

    Example:
        >>> with onefold.generating(model):
        ...     tokens = model.generate(prompt, max_new_tokens=100)
    """
    engine = engine_of(module)
    kept, schedule = units_to_keep(engine, budget), engine.schedule
    if schedule.forward_depth > 0 or in_backward():
        wanted = "onefold.generating outside forward and backward"
        got = "a call from within one"
        hint = "enter it before the module is called"
        raise StateError(wanted, got, where=f"rank {engine.group.rank}", hint=hint)
    if schedule.driven.keeps:
        yield
        return
    if kept:
        engine.facts.note_kept(gathered_units(engine).most(kept))
    with engine.driven(keeps=kept):
        yield
