"""Which units stay unsharded, for a room of bytes: those of a stream, a generation, a window.

A pass over the units wants the unit that was used last again only after all others. A cache of the
units that were used last would never have the next one. So the choice is fixed: units that stay lie
evenly between the others, and their compute hides the gathers and reads of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from onefold.engine.engine import Engine
from onefold.engine.policy import UnitFacts
from onefold.errors import ConfigError
from onefold.fit.bounds import RankMemory, most_of_budget, room_of
from onefold.layout.flat import UnitBytes, unit_bytes
from onefold.layout.rows import round_up
from onefold.recipe import Recipe, UnitRecipe


def spread(sizes: Sequence[int], room: int, moving: int = 0) -> frozenset[int]:
    """Choose the units that stay: the most bytes that fit, of sets at even distances.

    More room never keeps fewer bytes.

    Args:
        sizes: bytes of each unit, in the order of a pass.
        room: bytes of units that stay and, at a time, of `moving` others.
        moving: how many of the largest others come and go at a time.

    >>> sorted(spread([1, 1, 1, 1, 1, 1], 3))
    [0, 2, 4]
    """
    fitting = [
        stays
        for count in range(len(sizes), -1, -1)
        if most_nbytes(sizes, stays := _evenly(sizes, count), moving) <= room
    ]
    return max(fitting, key=lambda stays: sum(sizes[i] for i in stays), default=frozenset())


def _evenly(sizes: Sequence[int], count: int) -> frozenset[int]:
    """Choose about `count / len(sizes)` of all bytes, and at most one unit less."""
    stays, due = list[int](), 0
    for index in reversed(range(len(sizes))):
        due += count * sizes[index]
        if due >= len(sizes) * sizes[index]:
            due -= len(sizes) * sizes[index]
            stays.append(index)
    return frozenset(stays)


def most_nbytes(sizes: Sequence[int], stays: Iterable[int], moving: int) -> int:
    """The most bytes of a pass, an upper bound: units that stay, and the largest of the others."""
    kept = set(stays)
    others = sorted(size for index, size in enumerate(sizes) if index not in kept)
    return sum(sizes[i] for i in kept) + sum(others[len(others) - min(moving, len(others)) :])


@dataclass(frozen=True, slots=True)
class GatheredUnits:
    """The units of one module that are gathered as a whole, and what each holds unsharded.

    sizes: bytes of every unit of the module: its weights, and its gradients where they are summed.
    gathered: positions of those that are gathered as a whole.
    moving: how many that do not stay are unsharded at a time, at most.
    """

    sizes: tuple[int, ...]
    gathered: tuple[int, ...]
    moving: int

    @staticmethod
    def from_facts(
        units: Sequence[UnitFacts], ahead: int, trains: Sequence[bool] = ()
    ) -> GatheredUnits:
        """Describe units, of which `ahead` are gathered before they compute.

        Besides these and the unit that computes, one stays from its first to its last use: that of
        a weight which is tied to another module's, as an embedding to its head.

        Args:
            units: all units of a module.
            ahead: as in the module's policy.
            trains: True for units whose gradients are kept with their weights; default: none.
        """
        pairs = zip(units, trains or [False] * len(units), strict=True)
        sizes = tuple(facts.nbytes * (2 if trained else 1) for facts, trained in pairs)
        gathered = [i for i, unit in enumerate(units) if not (unit.is_resident or unit.is_tiled)]
        return GatheredUnits(sizes, tuple(gathered), ahead + 2)

    @property
    def everyone(self) -> frozenset[int]:
        """All units that are gathered as a whole."""
        return frozenset(self.gathered)

    def window(self, room: int) -> frozenset[int]:
        """Return the units that stay in `room` bytes, besides the gathered others."""
        stays = spread([self.sizes[i] for i in self.gathered], room, self.moving)
        return frozenset(self.gathered[i] for i in stays) if room > 0 else frozenset()

    def some(self, count: int) -> frozenset[int]:
        """Return so many units, or all, at even distances."""
        return frozenset(self.gathered[i] for i in spread([1] * len(self.gathered), count))

    def most(self, kept: frozenset[int]) -> int:
        """Return the most bytes of a pass that keeps some units, an upper bound."""
        stays = [at for at, index in enumerate(self.gathered) if index in kept]
        return most_nbytes([self.sizes[i] for i in self.gathered], stays, self.moving)

    def nbytes_of(self, indices: Iterable[int]) -> int:
        """Return the bytes of several units."""
        return sum(self.sizes[index] for index in indices)


def choose_windows(
    stages: Sequence[GatheredUnits], free: int, limit: int | None = None
) -> list[frozenset[int]]:
    """Choose the units of each stage module of a rank that stay through a step, in their order.

    A run measures the free memory when `onefold.pipeline` is called, a plan predicts it. Neither
    knows more: activations come later.

    Args:
        stages: the modules, which share the rank's memory.
        free: bytes that the rank may still take; a quarter is left for activations.
        limit: the most bytes of all windows; None: what fits.
    """
    room = room_of(free) if limit is None else min(room_of(free), limit)
    windows = list[frozenset[int]]()
    for stage in stages:
        windows.append(stage.window(room))
        room -= stage.nbytes_of(windows[-1])
    return windows


# a module that is sharded already


def memory_of(engine: Engine) -> RankMemory:
    """Return the memory of this rank, among the ranks of a module."""
    return RankMemory(engine.context.store.device, engine.recipe.local_world_size, engine.group)


def gathered_units(engine: Engine) -> GatheredUnits:
    """Return the units of a module, with the bytes of their weights."""
    return GatheredUnits.from_facts(engine.schedule.units, engine.policy.prefetch)


def trained_units(engine: Engine) -> GatheredUnits:
    """Return the units of a module, with the bytes of their weights and gradients."""
    trains = [unit.requires_grad() for unit in engine.units]
    return GatheredUnits.from_facts(engine.schedule.units, engine.policy.prefetch, trains)


def units_to_keep(engine: Engine, budget: int | str | None) -> frozenset[int]:
    """Choose the units that stay unsharded between evaluations; a collective where units move.

    `budget`: bytes of unsharded weights, at most; None: what fits.
    """
    if not engine.recipe.frees_after_forward:
        most_of_budget(budget)
        return frozenset()  # nothing is freed
    return gathered_units(engine).window(memory_of(engine).room_to_keep(budget))


# units of a streamed module that stay in device memory, for a budget of bytes


MIN_PREFETCH = 1
"""Units that are read ahead at least: without one, nothing is read while a unit computes."""

NUM_TILES = 2
"""Tiles of a weight in row blocks that are alive at a time: one computes, one is read."""


Blocks = Sequence[dict[int, int]]
"""Unsharded and decoded bytes of units, by position, in blocks that the same modules use.

The units of a block are unsharded together.
"""


def with_residents(recipe: Recipe) -> Recipe:
    """Return the recipe with the units that stay, and the room for unsharded weights.

    A recipe that trains is returned as it is. Raises `ConfigError` if the budget is less than one
    block, one unit more, and what rests on the device.
    """
    inference = recipe.inference
    if inference is None:
        return recipe
    held = held_by(recipe)
    near = sum(unit_held.weight for unit_held in held) if recipe.rests_near else 0
    large = (unit for unit in recipe.units if unit.tile_nbytes)
    tiles = NUM_TILES * max((_tile_nbytes(unit, recipe.rest_world) for unit in large), default=0)
    blocks, stacks = _module_blocks(recipe, held), stack_nbytes(recipe)
    room = inference.budget - near - tiles - stacks
    sizes = [sum(block.values()) for block in blocks]
    if sum(sizes) <= room:
        stays, prefetch = {unit for block in blocks for unit in block}, inference.prefetch
    else:
        prefetch = next(
            (ahead for ahead in range(inference.prefetch, MIN_PREFETCH - 1, -1)
             if _ring(blocks, ahead) <= room),
            0,
        )  # fmt: skip
        if prefetch == 0:
            raise _too_small(recipe, blocks, near, tiles, stacks)
        kept = spread(sizes, room - _ring(blocks, prefetch))
        stays = {unit for at in kept for unit in blocks[at]}
    units = tuple(replace(unit, stays=index in stays) for index, unit in enumerate(recipe.units))
    return replace(recipe, units=units, inference=replace(inference, room=room, prefetch=prefetch))


def _tile_nbytes(unit: UnitRecipe, ranks: int) -> int:
    """Bytes of a row block, at most: a weight of fewer bytes is one block, with all ranks' rows."""
    weight = unit.members[0]
    numel = round_up(weight.shape[0], ranks) * prod(weight.shape[1:])
    return min(unit.tile_nbytes, numel * weight.compute_itemsize)


def stack_nbytes(recipe: Recipe) -> int:
    """Bytes for the numbers of packed stacks (experts): those of one unit at a time."""
    return max((sum(m.stack_nbytes for m in unit.members) for unit in recipe.units), default=0)


def held_by(recipe: Recipe, rank: int | None = None) -> list[UnitBytes]:
    """Return the bytes of each unit on a rank; None: the one with the largest share."""
    return [
        unit_bytes(unit.members, recipe, rank, is_tiled=unit.tile_nbytes > 0)
        for unit in recipe.units
    ]


def _module_blocks(recipe: Recipe, held: Sequence[UnitBytes]) -> Blocks:
    """Blocks in the order of the module; tiled units are in none."""
    blocks: list[dict[int, int]] = []
    for index, (unit, unit_held) in enumerate(zip(recipe.units, held, strict=True)):
        if not unit.tile_nbytes:
            blocks += [] if unit.is_joined and blocks else [{}]
            blocks[-1][index] = unit_held.unsharded + unit_held.decoded
    return blocks


def _ring(blocks: Blocks, ahead: int) -> int:
    """Bytes of the block that computes and of `ahead` units behind it, wherever the pass is."""
    largest = max((sum(block.values()) for block in blocks), default=0)
    return largest + ahead * max((max(block.values()) for block in blocks), default=0)


def _too_small(recipe: Recipe, blocks: Blocks, near: int, tiles: int, stacks: int) -> ConfigError:
    ring = _ring(blocks, MIN_PREFETCH)
    parts = [f"{ring:,} for the largest block and one unit that is read ahead"]
    parts += [f"{tiles:,} for {NUM_TILES} row blocks"] if tiles else []
    parts += [f"{stacks:,} for the numbers of one unit's experts"] if stacks else []
    parts += [f"{near:,} for weights that stay on the device"] if near else []
    assert recipe.inference is not None, "a recipe that trains has no budget"
    hint = 'a larger budget, rest="int4", or smaller units'
    if near:
        hint = 'offload="disk:PATH", where weights are not in this memory; or rest="int4"'
    wanted = f"a budget of at least {ring + near + tiles + stacks:,} bytes ({', '.join(parts)})"
    return ConfigError(wanted, f"{recipe.inference.budget:,} bytes", hint=hint)
