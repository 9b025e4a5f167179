"""Predict the passes of a streamed module: the bytes that one reads, and those that it holds.

The recipe says which units stay (fit/kept_units.py), and the engine's own schedule says when the
others come and go. So a plan and the engine cannot disagree.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from onefold.engine.policy import UnitFacts, policy_of
from onefold.engine.schedule import Schedule
from onefold.engine.walks import Call, Phase
from onefold.fit.kept_units import held_by, stack_nbytes
from onefold.layout.cut import cut_of
from onefold.layout.flat import UnitBytes
from onefold.layout.rows import round_up
from onefold.layout.units import UnitPlan
from onefold.planner.byte_executor import ByteCounter, ByteExecutor
from onefold.planner.message_counts import planned_unit
from onefold.planner.storages import Storages, Untraceable
from onefold.planner.work import UnitWork, Work
from onefold.recipe import Recipe, UnitRecipe
from onefold.tier.store import GRAIN_NUMEL, whole_pages

NUM_PASSES = 4
"""Passes that are played: the first reads units that stay, the second one knows the order."""


@dataclass(frozen=True, slots=True)
class Use:
    """A module that uses units starts, or ends; or it uses a weight too large for a unit.

    Verbs: "enter", "leave"; "blocks", row blocks of a matrix; "rows", one row of a table, as for
    one token: tables are never read as a whole.
    """

    unit: int
    verb: str
    module: int = -1
    num_modules: int = 1


@dataclass(frozen=True, slots=True)
class PassBytes:
    """The bytes of one rank. `peak`: unsharded weights and staging, and weights at rest there."""

    read: int  # from the tier, in a pass
    peak: int  # in the memory that computes
    at_rest: int  # in the tier
    stay: int  # unsharded, of units that stay


def streamed_nbytes(recipe: Recipe, rank: int | None = None, uses: Sequence[Use] = ()) -> int:
    """Return the bytes that a pass reads from the tier: each unit that it uses and that moves.

    Where weights rest in the memory that computes, these are the bytes that come from other ranks.

    Args:
        recipe: with the units that stay.
        rank: None: the one with the largest share.
        uses: of the pass; without any of a unit: all units. Large weights are read in each use.
    """
    held, nbytes = held_by(recipe, rank), 0
    used = {use.unit for use in uses if use.verb == "enter"} or set(range(len(held)))
    for index, (unit, unit_held) in enumerate(zip(recipe.units, held, strict=True)):
        if index in used and not unit.tile_nbytes and not unit.stays:
            nbytes += _moved(recipe, unit, unit_held, rank or 0)
    for use in uses:
        if use.verb in ("blocks", "rows"):
            nbytes += _large(recipe, use, held[use.unit]).read
    return nbytes


def _moved(recipe: Recipe, unit: UnitRecipe, held: UnitBytes, rank: int) -> int:
    """Bytes that move where one unit is gathered."""
    if recipe.reads_files:  # without the gaps between parameters of a buffer
        cuts = (cut_of(member.shape, recipe.shard_world, recipe.shares) for member in unit.members)
        numel = sum(cut.piece_numel(rank) for cut in cuts)
        return numel * unit.members[0].itemsize
    if recipe.offload.parameters == "disk":
        return whole_pages(held.weight)
    if recipe.rests_near:
        return held.unsharded - held.unsharded // recipe.rest_world if held.unsharded else 0
    return held.weight


@dataclass(frozen=True, slots=True)
class _Large:
    """Bytes of one use of a weight in row blocks, or of one row: at most."""

    read: int
    rooms: int  # unsharded
    slots: tuple[int, ...] = ()
    messages: tuple[int, ...] = ()  # among ranks, one after the other, each with its flags


def _large(recipe: Recipe, use: Use, held: UnitBytes) -> _Large:
    unit = recipe.units[use.unit]
    member, ranks = unit.members[0], recipe.rest_world
    columns = member.numel // member.shape[0]
    is_disk = recipe.offload.parameters == "disk"
    if use.verb == "rows":
        most = round_up(GRAIN_NUMEL - gcd(columns, GRAIN_NUMEL) + columns, GRAIN_NUMEL)
        nbytes = min(most, held.rest_numel) * member.itemsize
        rooms = (columns + recipe.num_flags) * member.compute_itemsize
        near = 0 if recipe.rests_near else columns * member.itemsize
        sent = (rooms,) if ranks > 1 else ()
        return _Large(nbytes if is_disk else near, rooms, (nbytes,) if is_disk else (), sent)
    height = max(1, unit.tile_nbytes // (columns * member.compute_itemsize * ranks))
    own_rows = -(-member.shape[0] // ranks)
    heights = [min(height, own_rows - first) for first in range(0, own_rows, height)]
    sent = tuple(
        (ranks * rows * columns + recipe.num_flags) * member.compute_itemsize for rows in heights
    )
    rooms, messages = 2 * max(sent), sent if ranks > 1 else ()
    if not is_disk:
        return _Large(0 if recipe.rests_near else held.weight, rooms, (), messages)
    reads: list[int] = []
    for first in range(0, own_rows, height):
        start, stop = first * columns, min(first + height, own_rows) * columns
        begin = start // GRAIN_NUMEL * GRAIN_NUMEL
        end = min(round_up(stop, GRAIN_NUMEL), held.rest_numel)
        reads.append(whole_pages((end - begin) * member.itemsize))
    alive = 1 if recipe.world_size > 1 else 2  # one is read while another is
    return _Large(sum(reads), rooms, tuple(sorted(reads)[-alive:]), messages)


def pass_bytes(recipe: Recipe, uses: Sequence[Use]) -> PassBytes:
    """Play some passes of a module whose units are used in this order."""
    held = held_by(recipe)
    player = _Player(recipe, held)
    for _ in range(NUM_PASSES):
        player.play(uses)
    return PassBytes(
        read=streamed_nbytes(recipe, uses=uses),
        peak=player.peak + stack_nbytes(recipe),
        at_rest=sum(unit_held.weight for unit_held in held),
        stay=sum(
            unit_held.unsharded + unit_held.decoded
            for unit, unit_held in zip(recipe.units, held, strict=True)
            if unit.stays
        ),
    )


class _Player:
    """Announces passes to the engine's schedule, and counts the bytes of its answers."""

    def __init__(self, recipe: Recipe, held: list[UnitBytes]) -> None:
        self._recipe = recipe
        self._held = held
        facts = [
            UnitFacts(
                nbytes=unit_held.unsharded + unit_held.decoded,
                is_resident=unit_held.unsharded == 0,
                is_tiled=unit.tile_nbytes > 0,
                keeps_sums=recipe.is_sharded,
            )
            for unit, unit_held in zip(recipe.units, held, strict=True)
        ]
        self._schedule = Schedule(policy_of(recipe), facts)
        self._schedule.keep(frozenset(i for i, unit in enumerate(recipe.units) if unit.stays))
        counter = self._counter = ByteCounter(recipe.device_type)
        planned = [
            planned_unit(UnitWork(unit.name, unit.numel, members=unit.members), recipe)
            for unit in recipe.units
        ]
        self._executor = ByteExecutor(recipe, planned, [False] * len(planned), counter)
        if recipe.rests_near:
            counter.add("weight", sum(unit_held.weight for unit_held in held))
        counter.see()

    @property
    def peak(self) -> int:
        """The most bytes of the memory that computes."""
        return self._counter.peak.memory_nbytes(self._recipe.device_type)

    def play(self, uses: Sequence[Use]) -> None:
        """Announce one pass."""
        schedule, do, calls = self._schedule, self._executor.do, dict[tuple[int, int], list[Call]]()
        do(schedule.begin_forward(Phase.EVALUATION))
        for use in uses:
            key = use.unit, use.module
            if use.verb == "enter":
                call, actions = schedule.enter(use.unit, Phase.EVALUATION)
                calls.setdefault(key, []).append(call)
                do(actions)
            elif use.verb == "leave":
                call = calls[key].pop()
                do(schedule.leave(call, use.module, use.num_modules, is_recompute=False))
            else:
                self._use_large(use)
        do(schedule.end_forward(Phase.EVALUATION))

    def _use_large(self, use: Use) -> None:
        large = _large(self._recipe, use, self._held[use.unit])
        self._counter.add("unsharded", large.rooms)
        pool = self._executor.rows.pool
        taken = [pool.take_slot(nbytes) for nbytes in large.slots]
        self._counter.see()
        for index, nbytes in enumerate(large.messages):  # the next is on its way
            self._executor.begin_message(use.unit, "gather", (nbytes,))
            self._counter.see()
            if index:
                self._executor.give(use.unit, "gather", (large.messages[index - 1],))
        self._executor.give(use.unit, "gather", large.messages[-1:])
        self._counter.add("unsharded", -large.rooms)
        for slot in taken:
            pool.give(slot)


# which modules use units, seen in one forward on `meta`


@dataclass(frozen=True, slots=True)
class ForwardTrace:
    """One forward of [rows, seq] tokens."""

    uses: tuple[Use, ...]
    peak: int  # the most bytes that torch holds besides parameters
    work: Work
    cache_nbytes: int  # keys and values of all its tokens; 0 for a model without a cache


def names_of_users(module: nn.Module, plans: Sequence[UnitPlan]) -> dict[str, list[Use]]:
    """Return the units that modules use, by the modules' names: they outlive a copy."""
    names = {id(part): name for name, part in module.named_modules()}
    uses: dict[str, list[Use]] = {}
    for index, plan in enumerate(plans):
        owners = [owner for owned in plan.members for owner, _ in owned.owners]
        is_large = plan.tile_nbytes > 0
        users = list(dict.fromkeys(owners)) if is_large else plan.modules
        for user in users:
            verb = verb_of(user) if is_large else "enter"
            use = Use(index, verb, id(user), len(users))
            uses.setdefault(names[id(user)], []).append(use)
    return uses


def verb_of(user: nn.Module) -> str:
    """Say how a module uses a weight that is too large for a unit."""
    return "rows" if isinstance(user, nn.Embedding) else "blocks"


def trace_forward(
    module: nn.Module, users: Mapping[str, Sequence[Use]], tokens: Tensor, device_type: str,
    options: Mapping[str, Any] | None = None,
) -> ForwardTrace:  # fmt: skip
    """Trace one forward of a module on `meta`; `users` by name, of a module like it.

    Args:
        module: the model.
        users: the units that its modules use.
        tokens: [rows, seq], its first argument.
        device_type: of the device that computes.
        options: more arguments of its forward.

    Raises `Untraceable` where the forward depends on the values of tensors.
    """
    arguments = dict(options or {})
    events: list[Use] = []
    hooks: list[Any] = []
    for name, part in module.named_modules():
        for use in users.get(name, ()):
            hooks.append(part.register_forward_pre_hook(partial(_note_pass, events, use)))
            if use.verb == "enter":
                leave = Use(use.unit, "leave", use.module, use.num_modules)
                hooks.append(part.register_forward_hook(partial(_note_pass, events, leave)))
    works: list[Work] = []
    storages = Storages(device_type, works.append)
    inputs = [leaf for leaf in tree_iter((tokens, arguments)) if isinstance(leaf, Tensor)]
    for tensor in chain(module.parameters(), module.buffers(), inputs):
        storages.ignore(tensor)
    try:
        with torch.no_grad(), storages.watching():
            outputs = module(tokens, **arguments, **_options(module))
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise Untraceable(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    finally:
        for hook in hooks:
            hook.remove()
    work = Work()
    for kernel in works:
        work = work.plus(kernel)
    cache = _cache_nbytes(getattr(outputs, "past_key_values", None))
    return ForwardTrace(tuple(events), storages.take_peak()[0], work, cache)


def _note_pass(events: list[Use], use: Use, *_: object) -> None:
    events.append(use)


def _options(module: nn.Module) -> dict[str, Any]:
    """The options with which generation calls a model of transformers."""
    known = inspect.signature(module.forward).parameters
    wanted = {"use_cache": True, "logits_to_keep": 1}
    return {name: value for name, value in wanted.items() if name in known}


def _cache_nbytes(cache: Any) -> int:
    both = (
        getattr(cache, "self_attention_cache", None),
        getattr(cache, "cross_attention_cache", None),
    )
    if all(both):  # an encoder-decoder's
        return sum(_cache_nbytes(part) for part in both)
    layers = getattr(cache, "layers", None) or ()
    tensors = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in layers]
    return sum(tensor.nbytes for tensor in tree_iter(tensors) if isinstance(tensor, Tensor))
