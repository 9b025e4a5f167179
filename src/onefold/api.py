"""The public functions on a module: shard, accumulate, unsharded, report."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from datetime import timedelta
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from onefold.compose.build import build
from onefold.compose.parts import Choices
from onefold.compose.quantizing import quantize_frozen
from onefold.compose.resolve import examine, examine_together, resolve
from onefold.config import OffloadChoice, PrecisionChoice, StageChoice
from onefold.engine import adapters
from onefold.engine import unsharded as whole_parameters
from onefold.engine.engine import Engine
from onefold.engine.registry import engine_of
from onefold.engine.run_facts import RunHistory
from onefold.engine.walks import EventKind
from onefold.fit.shares import AUTO, SharesChoice
from onefold.inference.stream import examine_stream
from onefold.keywords import SHARD, names_keywords
from onefold.layered.accumulate import describe_accumulation, with_kept
from onefold.layout.ledger import Kind
from onefold.layout.module_tree import ModuleTree
from onefold.layout.units import UnitChoice
from onefold.mixed.speeds import measure, row_shares
from onefold.recipe import Recipe
from onefold.recording.meter import Meter, Rates
from onefold.recording.report import Report, snapshot, unit_lines
from onefold.tier import accelerator
from onefold.wire import ranks as meshes
from onefold.wire.together import announcing, together
from onefold.wire_config import WireChoice


class _LazyForecaster:
    """A `Forecaster` that is imported when it is first asked: most calls of `shard` never ask."""

    def needs_of(
        self, recipe: Recipe, *, micro_batches: int = 1, rank: int | None = None
    ) -> dict[str, int]:
        from onefold.planner import memory

        return memory.needs_of(recipe, micro_batches=micro_batches, rank=rank)

    def peaks_of(self, recipe: Recipe, rank: int | None, history: RunHistory) -> dict[str, int]:
        from onefold.planner import memory

        return memory.peaks_of(recipe, rank, history)

    def smallest_change(self, recipe: Recipe, shortage: int) -> str:
        from onefold.planner import memory

        return memory.smallest_change(recipe, shortage)


@names_keywords(SHARD)
def shard(  # noqa: PLR0913 - the contract
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    stage: StageChoice = 3,
    mesh: meshes.MeshChoice = None,
    units: UnitChoice = None,
    precision: PrecisionChoice = None,
    offload: OffloadChoice = None,
    wire: WireChoice = None,
    shares: SharesChoice = None,
    timeout: float | timedelta | None = None,
) -> nn.Module:
    """Shard a module and its optimizer over the ranks, in place.

    A collective: call it on every rank of `mesh` with the same module. All ranks start from the
    values of rank 0. Then train as before: forward, `loss.backward()`, clipping,
    `optimizer.step()`. Gradients are averaged over the ranks.

    Args:
        module: any module, on the CPU, the device, or `meta` (then it gets the values that
            its constructor would have drawn, unit by unit).
        optimizer: built on the module's parameters; stays the same object. Or a list of several.
            None: for inference, or if you build the optimizer afterwards on `module.parameters()`.
        stage: 0 replicates, 1 shards optimizer state, 2 also gradients, 3 also parameters. "auto":
            the lowest stage that leaves room for activations; `report(module)` says why.
        mesh: a `DeviceMesh` of one axis, or of two: (nodes, ranks of a node), where nodes
            communicate once per step (`Wire.secondary`); or a `ProcessGroup`. Default: all ranks.
            If there is no process group, it is initialized from the launcher's environment
            (torchrun, or any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT).
            Without a launcher, the world size is 1.
        units: modules whose parameters are gathered and reduced together; default: repeated
            blocks, and balanced groups of the other parameters; in the only process, without
            offload, neighbors up to 16 MiB, which the module brings all at once. A list of
            submodules, or a predicate over them. A mapping from modules or predicates to meshes of
            one axis adds units that only these ranks share: experts, if other ranks hold other
            experts. Their parameters are DTensors over the other axis, see `onefold.experts`; their
            gradients are also means over all ranks of `mesh`.
        precision: None (own dtypes), "fp32", "bf16", "fp16", a torch.dtype or a `Precision`.
        offload: None, "optimizer" (optimizer state), "cpu" (parameters too), "disk:PATH", or an
            `Offload`. At stages 1 to 3.
        wire: None (exact), "zero++" or another preset, or a `Wire` (quantized communication).
            Without a mesh, every wire but None treats the launcher's hosts as the nodes.
        shares: how much state each rank holds. None: all the same. A list: one weight per rank that
            holds a copy of the state, in rank order; a rank of weight 0 holds none. "auto": as
            even as the free memory of the ranks allows. `offload` may differ between ranks.
        timeout: seconds, or a timedelta, that ranks wait for one another before they raise a
            `WireError` that says where each rank is. Default: the timeout of the process group,
            or 5 minutes if this call starts it.

    Returns:
        The same module.

    Raises:
        ConfigError: an argument that cannot work; on every rank that can detect it.
        TierError: a tier or a rank lacks memory for its share, or a path cannot be used; on every
            rank.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        >>> onefold.shard(model, optimizer, stage=3, precision="bf16")

    Source: ZeRO, arXiv 1910.02054, sections 5 and 7.
    """
    choices = Choices(stage, units, precision, offload, wire, shares)
    ranks = meshes.find_and_meet(mesh, timeout)
    with announcing(ranks.everyone):
        tree = ModuleTree.from_root(module)
        examine_mine = partial(examine, tree, optimizer, choices, ranks.everyone)
        arguments = examine_together(ranks, examine_mine, tree)
        frozen = arguments.recipe.precision.frozen
        if frozen is not None:
            quantize = partial(quantize_frozen, tree, arguments.parts.optimizers, frozen)
            together(ranks.everyone, quantize)
            arguments = examine_together(ranks, examine_mine, tree)
        build(arguments.parts, resolve(arguments, ranks, _LazyForecaster()))
    if choices.shares == AUTO:
        measure(module)  # rows by speed are suggested beside shares by memory
    return module


@names_keywords({})
def stream(
    module: nn.Module,
    *,
    budget: int | str | None = None,
    rest: str | None = None,
    offload: OffloadChoice = "cpu",
    mesh: meshes.MeshChoice = None,
) -> nn.Module:
    """Run inference with a module that is larger than device memory, in place.

    Weights are stored in CPU memory or on disk, and loaded unit by unit, a few units ahead of the
    compute. Units that fit into the budget stay on the device. A collective: call it on every rank
    with the same module. With N ranks, each stores 1/N of the weights, and ranks gather them.
    Forwards record no graph.

    Args:
        module: any module; on `meta` after `onefold.load_pretrained`, which is read unit by unit.
        budget: bytes of device memory for weights, including those that stay there; or a string,
            "2GiB". None: three quarters of the free memory.
        rest: None (exact), "int8" or "int4": weights of Linears are stored and sent quantized.
        offload: where weights are stored: "cpu"; "disk:PATH", a file in that folder; "disk", the
            files that `onefold.load_pretrained` named, without a copy; an `Offload` (only its
            `parameters` is used); or None, the device itself.
        mesh: as in `onefold.shard`.

    Returns:
        The same module. Its parameters are frozen.

    Raises:
        ConfigError: an argument that cannot work, such as a budget below the largest block plus
            one unit; on every rank.
        TierError: a tier lacks memory, or its path cannot be used; on every rank.

    Example:
        >>> with torch.device("meta"):
        ...     model = AutoModelForCausalLM.from_config(config)
        >>> onefold.load_pretrained(model, directory)
        >>> onefold.stream(model, budget="2GiB", rest="int4", offload="disk:/fast/disk")
        >>> model.generate(tokens)

    Source: ZeRO-Inference (DeepSpeed, 2022), ZeRO-Infinity (arXiv 2104.07857).
    """
    ranks = meshes.find_and_meet(mesh)
    with announcing(ranks.everyone):
        arguments, exact = examine_stream(module, ranks, budget=budget, rest=rest, offload=offload)
        build(arguments.parts, resolve(arguments, ranks, _LazyForecaster()))
    notes = [f"{weight.fqn} stays exact: {weight.reason}" for weight in exact]
    engine_of(module).facts.add_notes(*notes)
    return module


@contextmanager
def accumulate(module: nn.Module) -> Iterator[None]:
    """Run a micro-batch that is not the last of a step, and defer communication.

    At stages 0 and 1, each rank keeps unsharded, unreduced gradients. The first backward outside
    the block reduces them once. At stages 2 and 3, gradients of each micro-batch are reduced into
    shards at once, so a rank never holds unsharded gradients of more than two units.

    On a mesh of two axes, nodes communicate in the last micro-batch (`Wire.secondary`). Until then
    you may only set `.grad` to None, which clears the sums; any other use raises `StateError`. If a
    failed backward lost the sums of earlier micro-batches, the next step raises it too, until the
    gradients are cleared.

    Example:
        >>> for x in micro_batches[:-1]:
        ...     with onefold.accumulate(model):
        ...         model(x).mean().backward()
        >>> model(micro_batches[-1]).mean().backward()
    """
    with engine_of(module).driven(accumulates=True):
        yield


@contextmanager
def unsharded(module: nn.Module, writeback: bool = False) -> Iterator[None]:
    """Show unsharded parameters, as plain tensors in their own dtype, to read, save or edit.

    A collective on entry, and at the end if a backward ran inside: on every rank or on none. Its
    gradients are averaged then. Inside the block the module may run, in the parameters' own dtype.
    Do not change shapes.

    Args:
        module: one that `shard` has sharded.
        writeback: keep edits, which must be the same on every rank. False discards them, with a
            warning if PEFT has merged adapters.
    """
    engine = engine_of(module)
    merges = [] if writeback or engine.is_unsharded else adapters.merges_of(module)
    with whole_parameters.unsharded(engine, writeback=writeback):
        yield
    adapters.warn_of_lost_merges(merges)


def report(module: nn.Module) -> Report:
    """Report this rank's bytes by kind and tier, now and at the peak, and the bytes it sent.

    Not a collective. It waits for steps that run in the background, because their buffers change.
    """
    engine = engine_of(module)
    for unit in engine.units:
        unit.join_step()
        unit.gradient.drop_cleared()
    rates = rates_of(engine)
    return Report(
        stage=engine.recipe.stage.number,
        rank=engine.group.rank,
        world_size=engine.group.world_size,
        shard=engine.context.rest_rank,
        num_shards=engine.context.rest_world,
        steps=engine.ledger.steps,
        loaded_steps=engine.ledger.loaded_steps,
        skipped=engine.ledger.skipped,
        offload=engine.facts.description,
        notes=_run_notes(engine),
        memory=snapshot(engine.ledger),
        total=type(engine.ledger.total)(engine.ledger.total.now, engine.ledger.total.peak),
        predicted=_predicted_peaks(engine),
        traffic=deepcopy(engine.ledger.traffic),
        last_step=deepcopy(engine.ledger.last_step),
        units=unit_lines(engine.units),
        is_inference=engine.is_inference,
        row_shares=row_shares(engine),
        shares=engine.recipe.shares,
        **rates,
    )


def rates_of(engine: Engine) -> dict[str, float | None]:
    """Return the rates of a report; the first call after a step starts to measure."""
    if engine.is_inference or engine.ledger.steps == engine.ledger.loaded_steps:
        return {}
    rates = Meter.on_engine(engine).rates()
    if rates is None:
        return {}
    return {
        "waiting_share": rates.waiting_share,
        "tokens_per_s": rates.tokens_per_s or None,
        "model_flops_per_s": rates.flops_per_s or None,
        "mfu": _share_of_peak(rates, engine.context.store.device) or None,
    }


def _share_of_peak(rates: Rates, device: torch.device) -> float:
    """Return the FLOP/s as a share of the GPU's dense peak; 0.0 where the table lacks it."""
    if device.type != "cuda":
        return 0.0
    from onefold.planner.machines import peak_of

    names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
    dtype = names.get(rates.dtype, "fp8" if rates.dtype.itemsize == 1 else "")
    if dtype == "fp32" and accelerator.multiplies_in_tf32():
        dtype = "tf32"
    return rates.flops_per_s / peak_of(accelerator.model(device)[0], dtype)


def _predicted_peaks(engine: Engine) -> dict[str, int]:
    """Predicted peaks by kind; averages and anchors, which no plan knows, as they are."""
    positions = {id(p): i for unit in engine.units for i, p in enumerate(unit.parameters)}
    event_log = engine.schedule.open_calls.event_log
    events = [
        event._replace(call=positions[event.call]) if event.kind is EventKind.GRAD else event
        for event in event_log.events
        if event_log.is_complete
    ]
    peaks = with_kept(engine, engine.facts.predicted_peaks(events))
    for added in (Kind.AVERAGE, Kind.ANCHOR):
        nbytes = sum(
            usage.now
            for (kind, tier), usage in engine.ledger.usage.items()
            if kind is added and tier != "disk"
        )
        if nbytes and peaks:
            peaks = {**peaks, added: nbytes, "all": peaks["all"] + nbytes}
    return peaks


def _run_notes(engine: Engine) -> tuple[str, ...]:
    """Name messages that the run could save, and bytes that no plan knows."""
    notes = [*engine.facts.notes, *describe_accumulation(engine)]
    policy, most = engine.policy, engine.facts.most_backwards
    if most > 1 and (policy.defers_reduction or policy.sums_rest) and engine.group.world_size > 1:
        notes.append(
            f"{most} backwards ran before a step without onefold.accumulate, and each one sent its "
            "gradients: put all but the last inside `with onefold.accumulate(module):`"
        )
    later = [
        p for unit in engine.units[len(engine.recipe.units) :] for p in unit.parameters if p.places
    ]
    if later:
        numel = sum(math.prod(parameter.slot.shape) for parameter in later)
        notes.append(
            f"{numel:,d} parameters joined after onefold.shard: each rank holds all of them and "
            "their states, 16 bytes a parameter with AdamW in fp32. Predicted bytes leave them out"
        )
    return tuple(notes)
