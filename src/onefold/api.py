"""The composition root: the only place where choices become objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from onefold.build import checks
from onefold.build.routes import Links, routes_of
from onefold.build.stepping import stepper_of
from onefold.build.tiers import Wish, offload_together
from onefold.config import (
    Offload,
    Placement,
    Placements,
    Precision,
    offload_of,
    placements_of,
    precision_of,
)
from onefold.engine import guards
from onefold.engine import unsharded as whole_parameters
from onefold.engine.activations import SavedActivations
from onefold.engine.engine import Engine
from onefold.engine.hooks import install
from onefold.engine.joining import adopt_later, bind, replace_parameters
from onefold.engine.registry import ENGINE, engine_of
from onefold.errors import ConfigError, expected
from onefold.layout.units import Owned, UnitChoice, UnitPlan, owned_parameters, plan_units
from onefold.ledger import Ledger
from onefold.mesh import ranks as meshes
from onefold.mesh.ranks import Ranks, two_axes_of_launcher
from onefold.planner.auto import Expectation, lowest_stage
from onefold.recording.report import Report, copied, snapshot, unit_lines
from onefold.tier.device import DeviceStore
from onefold.tier.pages import return_free_memory
from onefold.unit.context import Context, Tiers
from onefold.unit.init import (
    PROMISED,
    Initialisers,
    Values,
    agree_on_values,
    initialisers_of,
    materialise,
    materialise_buffers,
)
from onefold.unit.unit import Unit
from onefold.wire.collectives import Group
from onefold.wire_config import Wire, check_wire, fitted, wire_of

Source = tuple[Initialisers, Values | None]
"""Where a module on `meta` gets its values: what initialises its parts, and what was promised."""


def shard(  # noqa: PLR0913 - the contract
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    stage: int | str = 3,
    mesh: meshes.MeshChoice = None,
    units: UnitChoice = None,
    precision: object = None,
    offload: object = None,
    wire: object = None,
) -> nn.Module:
    """Shard a module, and its optimizer, in place over the ranks; returns the same module.

    A collective: every rank of `mesh` calls it with the same module (values are those of rank 0).
    Afterwards the ordinary loop trains: forward, `loss.backward()`, clipping, `optimizer.step()`.
    Gradients are averaged over the ranks. Source: ZeRO, arXiv 1910.02054, sections 5 and 7.

    Args:
        module: any module, on the CPU, the device, or `meta` (then each submodule's
            `reset_parameters` is called, unit by unit).
        optimizer: built on the module's parameters; stays the same object. Several may be given.
            None: for inference, or for an optimizer built afterwards on `module.parameters()`.
        stage: 0 replicates, 1 shards optimizer state, 2 also gradients, 3 also parameters. "auto":
            the lowest whose states leave room for activations; `report(module)` says why.
        mesh: a `DeviceMesh` of one axis, or of two: (nodes, ranks of a node), where nodes talk
            once a step (`Wire.secondary`); or a `ProcessGroup`; default the whole world. Without a
            process group the world is one; under torchrun the default group is initialised.
        units: which modules travel together; default: repeated blocks and balanced rests.
            A list of submodules, or a predicate over them.
        precision: None (own dtypes), "fp32", "bf16", "fp16" or a `Precision`.
        offload: None, "optimizer" (states off the device), "cpu" (parameters too),
            "disk:PATH", or an `Offload`. At stages 1 to 3.
        wire: None (exact), "zero++" or another preset, or a `Wire`: how state travels. With no mesh
            given, other wires take the hosts that torchrun started for the nodes.

    Raises:
        ConfigError: a choice that cannot work; on every rank where it can be seen.
        TierError: a tier has no room, or its path cannot be used; on every rank.
    """
    ranks = meshes.resolve(mesh)
    job = _examine_together(
        ranks, lambda: _examine(module, optimizer, stage, units, precision, offload, wire)
    )
    group, device = ranks.everyone, meshes.device_of(job.parameters, ranks.everyone)
    chosen, how = stepper_of(job.offload, device, group)
    found = ranks if job.wire.is_plain else two_axes_of_launcher(ranks, device)
    job = replace(job, ranks=found, offload=chosen)
    wire_at = partial(_wire_at, job, is_named=isinstance(wire, str))
    wish = Wish(job.offload, job.precision, job.plans, job.optimizers, device, ranks=job.ranks)
    number, why = _stage_of(stage, wish, offload, wire_at)
    job = replace(job, placements=placements_of(number), wire=wire_at(number))
    wish = replace(wish, stage=number, wire=job.wire)
    ledger = Ledger()
    expectation = Expectation.of(wish.subject)
    ledger.advise = expectation.smallest_change
    store = DeviceStore(device)
    offloading = offload_together(wish, store, ledger, group)
    setting = _setting(job, store, ledger, offloading.tiers)
    originals = [owned.parameter for owned in job.parameters]
    source: Source = (initialisers_of(module), module.__dict__.pop(PROMISED, None))
    build = partial(_build_units, job, offloading.chosen, setting, source)
    engine = Engine(module, build, setting, stage=number, recipe=expectation.setup)
    built = engine.units
    _settle_buffers(module, device, group, job.precision.buffers, source)
    engine.expected_peaks = expectation.peaks
    engine.told = "; ".join(line for line in (why, offloading.told, how) if line)
    if setting.tiers.scratch is not None:
        weights = [buffer.tensor for unit in built for buffer in (unit.weight, unit.full)]
        engine.saved = SavedActivations(setting.tiers.scratch, device, weights, module)
    module.__dict__[ENGINE] = engine
    install(engine, module, {index: plan.modules for index, plan in enumerate(job.plans)})
    guards.install(module, engine)
    faces = {p.fqn: p.face for unit in built for p in unit.parameters}
    replaced = {id(owned.parameter): faces[owned.fqn] for owned in job.parameters} | {
        id(original): faces[owned.fqn]
        for original, owned in zip(originals, job.parameters, strict=True)
    }
    for each in job.optimizers:
        replace_parameters(each, replaced, originals)
        bind(each, engine)
    adopt_later(engine)
    ledger.forget_traffic()
    return module


@contextmanager
def accumulate(module: nn.Module) -> Iterator[None]:
    """Around a micro-batch that is not the last: communication that can wait waits.

    At stages 0-2 gradients stay Partial, whole on each rank, and are reduced once, by the first
    backward outside. At stage 3 each micro-batch is reduced at once: a rank never holds more than
    a unit's whole gradients.

    On a mesh of two axes nodes talk at the last micro-batch (`Wire.secondary`): until then `.grad`
    may be set to None, which is followed; any other use of it is a `StateError`. So is a step after
    a backward that failed, if sums of earlier micro-batches went with it, until they are cleared.
    """
    engine = engine_of(module)
    before, engine.is_accumulating = engine.is_accumulating, True
    try:
        yield
    finally:
        engine.is_accumulating = before


@contextmanager
def unsharded(module: nn.Module, writeback: bool = False) -> Iterator[None]:
    """Whole parameters, as plain tensors in their own dtype, for reading, saving or editing.

    A collective on entry. With `writeback=True` edits made on every rank alike are kept; otherwise
    they are lost. Shapes must stay. The module may run inside, in the parameters' own dtype.
    """
    with whole_parameters.unsharded(engine_of(module), writeback=writeback):
        yield


def report(module: nn.Module) -> Report:
    """Bytes by kind and tier, now and at the peak, and bytes sent, on this rank alone.

    Waits for steps that run in the background: what they hold is not what rests.
    """
    engine = engine_of(module)
    for unit, gradient in engine.gradients.items():
        unit.await_step()
        gradient.drop_cleared()
    return Report(
        stage=engine.stage,
        rank=engine.group.rank,
        world_size=engine.group.world_size,
        shard=engine.setting.rest_rank,
        num_shards=engine.setting.rest_world,
        steps=engine.ledger.steps,
        skipped=engine.ledger.skipped,
        offload=engine.told,
        memory=snapshot(engine.ledger),
        total=type(engine.ledger.total)(engine.ledger.total.now, engine.ledger.total.peak),
        predicted=engine.expected_peaks(accumulates=engine.has_accumulated),
        traffic=copied(engine.ledger.traffic),
        last_step=copied(engine.ledger.last_step),
        units=unit_lines(engine.units),
    )


@dataclass(frozen=True, slots=True)
class _Job:
    """What is to be sharded, and how: the arguments of `shard`, found to be sound."""

    placements: Placements
    precision: Precision
    offload: Offload
    wire: Wire
    optimizers: list[Optimizer]
    parameters: list[Owned]
    plans: list[UnitPlan]
    ranks: Ranks = Ranks(Group.of(None))  # noqa: RUF009 - a frozen value

    @property
    def shards(self) -> Group:
        """The ranks over which resting state is cut."""
        return self.ranks.shards(are_replicas=self.wire.secondary == "optimizer")

    def facts(self) -> list[str]:
        """What must be the same on every rank, a line each."""
        offload = replace(self.offload, disk="own")  # each host may have its own folders
        choices = [f"{self.placements}, {self.precision}, {offload}", *self.wire.facts()]
        return [*self.ranks.facts(), *choices] + [
            f"{owned.fqn} {list(owned.parameter.shape)} {owned.parameter.dtype} "
            f"requires_grad={owned.parameter.requires_grad} in unit {plan.name}"
            for plan in self.plans
            for owned in plan.members
        ]


def _stage_of(
    stage: int | str, wish: Wish, offload: object, wire_at: Callable[[int], Wire]
) -> tuple[int, str]:
    """The stage, and why it is that one, if it was left open. A collective, then."""
    if isinstance(stage, int):
        return stage, ""
    group = wish.ranks.everyone
    local_world_size = meshes.local_place(group)[1]
    return lowest_stage(wish.subject, offload, wire_at, group, local_world_size)


def _examine(
    module: nn.Module, optimizer: object, stage: object, units: UnitChoice, precision: object,
    offload: object, wire: object,
) -> _Job:  # fmt: skip
    """Check one rank's arguments without touching anything."""
    placements = placements_of(3 if stage == "auto" else stage)  # which has all there can be
    chosen = precision_of(precision)
    tiers = offload_of(offload, placements)
    optimizers = checks.as_list(optimizer)
    checks.check_module(module)
    parameters = owned_parameters(module)
    checks.check_parameters(parameters)
    checks.check_optimizers(optimizers, parameters)
    plans = plan_units(module, units, tiers.tile or 0)
    return _Job(placements, chosen, tiers, wire_of(wire), optimizers, parameters, plans)


def _examine_together(ranks: Ranks, examine: Callable[[], _Job]) -> _Job:
    """The job of this rank, once every rank has found the same one; `ConfigError` on all if not."""
    job, problem = None, None
    try:
        job = replace(examine(), ranks=ranks)
    except ConfigError as error:
        problem = error
    group = ranks.everyone
    mine = [f"! {problem}"] if problem else job.facts() if job else []
    everyone = group.all_gather_object(mine) if group.world_size > 1 else [mine]
    if problem is not None:
        raise problem
    assert job is not None, "neither a job nor a problem"
    for rank, theirs in enumerate(everyone):
        assert isinstance(theirs, list), "ranks exchange lists of lines"
        if theirs != mine:
            pairs = zip_longest(mine, theirs, fillvalue="nothing")
            ours, other = next((a, b) for a, b in pairs if a != b)
            raise ConfigError(
                expected(
                    "the same module and choices on every rank",
                    f"{ours!r} on rank {group.rank} but {other!r} on rank {rank}",
                    hint="build the module from the same configuration everywhere",
                )
            )
    return job


def _wire_at(job: _Job, stage: int, *, is_named: bool) -> Wire:
    """The wire as this mesh and a stage have it; `ConfigError` for one that would mean nothing."""
    if job.ranks.everyone.world_size == 1:
        return Wire()  # nothing travels
    has_axes, placements = job.ranks.axes is not None, placements_of(stage)
    fits = is_named or job.ranks.is_flat  # a script for nodes runs on one of them, too
    wire = fitted(job.wire, placements, has_axes=has_axes) if fits else job.wire
    check_wire(wire, placements, job.offload, has_axes=has_axes)
    return wire


def _setting(job: _Job, store: DeviceStore, ledger: Ledger, tiers: Tiers) -> Context:
    is_sharded = job.placements.optimizer is Placement.SHARD
    shards, device = job.shards, store.device
    mesh = job.ranks.mesh if shards is job.ranks.everyone else None
    if mesh is None and shards.handle is not None and is_sharded:
        mesh = DeviceMesh.from_group(shards.handle, device.type)
    links = Links(device, ledger, job.precision.reduce)
    return Context(
        routes=routes_of(job.wire, job.ranks, job.placements, links),
        store=store,
        ledger=ledger,
        mesh=mesh if is_sharded else None,
        is_sharded=is_sharded,
        compute=job.precision.compute,
        master=job.precision.master,
        tiers=tiers,
    )


def _build_units(
    job: _Job, are_offloaded: Sequence[bool], setting: Context, source: Source, owner: Engine
) -> list[Unit]:
    """The units of a module, filled one by one."""
    units: list[Unit] = []
    for plan, is_offloaded in zip(job.plans, are_offloaded, strict=True):
        _order_members(plan, job.optimizers)
        unit = Unit(
            plan, setting, len(units), owner, is_offloaded=is_offloaded,
            keeps_bytes=owner.policy.keeps_bytes,
        )  # fmt: skip
        units.append(_fill_unit(unit, plan, source))
    return units


def _order_members(plan: UnitPlan, optimizers: Sequence[Optimizer]) -> None:
    """Parameters of one optimizer group lie together, so that they are one run."""
    group_of = {
        id(tensor): index
        for optimizer in optimizers
        for index, group in enumerate(optimizer.param_groups)
        for tensor in group["params"]
    }
    plan.members.sort(key=lambda owned: group_of.get(id(owned.parameter), len(group_of)))


def _fill_unit(unit: Unit, plan: UnitPlan, source: Source) -> Unit:
    """Give a unit's parameters their values, keep this rank's share, let go of the rest."""
    setting = unit.setting
    materialise(plan, setting.store.device, *source)
    originals = [owned.parameter for owned in plan.members]
    values = source[1]
    given = {owned.fqn for owned in plan.members if values is not None and owned.fqn in values}
    own = [owned.parameter.data for owned in plan.members if owned.fqn not in given]
    agree_on_values(own, setting.routes.group)
    unit.adopt(originals, values)
    originals.clear()
    return_free_memory()
    return unit


def _settle_buffers(
    module: nn.Module, device: torch.device, group: Group, dtype: torch.dtype | None, source: Source
) -> None:
    materialise_buffers(module, device, *source)
    agree_on_values(module.buffers(), group)
    if dtype is not None:
        for part in module.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    part._buffers[name] = buffer.to(dtype)
