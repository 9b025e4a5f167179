"""`onefold.plan`: from a model, by name or as a module, to a plan."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Literal

from torch import nn

from onefold.config import PRECISIONS, PrecisionChoice, StageChoice, precision_of
from onefold.errors import ConfigError
from onefold.layout.module_tree import ModuleTree
from onefold.planner.bf16_weights import bf16_weights
from onefold.planner.clusters import (
    ClusterChoice,
    Devices,
    check_mixed,
    clusters_of,
    device_kinds,
    recipe_of,
)
from onefold.planner.memory import OFFLOADS, WAYS, estimated
from onefold.planner.models.loader import (
    DtypeWord,
    config_path,
    left_out,
    named_model,
    published,
)
from onefold.planner.planned_axes import Anatomy, ModelAxes, check_counts
from onefold.planner.result import Plan
from onefold.planner.script import building_lines, preparing_lines, trained_name
from onefold.planner.search import Candidate, Row, Search, best_of, candidates, lossy, nearest
from onefold.planner.show import MixedPlan
from onefold.planner.storages import Untraceable
from onefold.planner.trace import Trace, tokens_of, trace, traced_units, without_values
from onefold.recipe import Recipe
from onefold.wire_config import WireChoice

OTHER_DTYPE = '--dtype bf16 (dtype="bf16" in Python) plans another'
"""How to say that weights have another dtype than the one that was assumed."""

Tracing = Callable[[int], Trace]
"""Traces a micro-batch of so many rows."""

_Traced = tuple[Tracing, Trace, Trace | None, tuple[str, ...]]


def plan(  # noqa: PLR0913 - the contract
    module_or_config: nn.Module | str | os.PathLike[str],
    *,
    world_size: int = 1,
    cluster: ClusterChoice = None,
    gpus: int | None = None,
    ranks: int | None = None,
    nodes: int = 1,
    mem: int | str | None = None,
    host_mem: int | str | None = None,
    disk: int | str | None = None,
    machines: str | os.PathLike[str] | None = None,
    seq: int = 1024,
    batch: int | Literal["auto"] = 1,
    accumulate: int = 1,
    precision: PrecisionChoice = None,
    stage: StageChoice = "auto",
    offload: Literal["auto", "none", "optimizer", "cpu", "disk"] | str | None = "auto",
    wire: Literal["auto"] | WireChoice = "auto",
    recompute: bool = False,
    dtype: DtypeWord | None = None,
    axes: ModelAxes | Mapping[str, int] | None = None,
) -> Plan:
    """Find the ways to train a model that fit, how fast they are, and which one to take.

    Nothing runs. Step times are estimates for GPUs, from data sheets. CPU ranks have none.

    Args:
        module_or_config: a module that takes tokens [batch, seq] (its values are not read), a
            preset, a Hugging Face config.json, or "module:function".
        world_size: ranks on this machine, where no devices are named: GPUs if torch sees one, else
            processes on the CPU.
        cluster: the devices; default: those of this machine. A machine such as "h100-80", or
            {"ranks": 8, "nodes": 2, "machine": "h100-80"}, and the other fields of
            `planner/clusters.py`. Several kinds of devices: a list, or a text as in
            "8xh100-80 + 16xa100-40". Then rows are split by speed and states by memory:
            `Plan.mixed` compares them with an equal split.
        gpus, ranks: GPUs of a node, or processes of a node on the CPU instead.
        nodes: machines.
        mem: memory of a GPU, or of all CPU ranks of a node: bytes, or a text such as "80GiB".
        host_mem, disk: CPU memory and free disk of a node; None: they are not checked, but for
            the CPU memory next to GPUs of this machine.
        machines: a TOML file of more GPUs that `cluster` may name.
        batch: rows of one micro-batch on one rank, or "auto": as many as fit. On several
            kinds of devices: the mean over all ranks.
        stage, offload: one of them, or "auto" for all. offload: None, "optimizer", "cpu", "disk".
        wire: None (exact, one axis), a preset's name or a `Wire`. "auto": on several nodes the
            exact preset that is fastest, or sends least between them; `Plan.wires` compares all
            presets, the lossy ones too.
        recompute: recompute blocks in backward. A module without a switch for that, as models of
            transformers have it, has to be set up by its owner.
        dtype: "fp32", "bf16" or "fp16", of the weights; None: as the configuration says, else fp32.
            A module is planned in its own.
        axes: ranks of tensor, pipeline, context and expert axes as in {"tp": 2, "pp": 2, "cp": 1,
            "ep": 1}, and "virtual", the parts of the model on a rank of pp; the rest of the world
            is dp. Each rank of the pipeline is planned on its data axis.

    Raises:
        ConfigError: a model that cannot be built, counts below 1, words that are not known; a wire
            that `onefold.shard` refuses at that stage or on so many nodes; axes that do not divide
            the world, or for which the model has not enough heads, blocks or experts; a cluster of
            several kinds with axes or a wire.
    """
    devices = Devices(
        gpus=gpus, ranks=ranks, nodes=nodes, mem=mem, host_mem=host_mem, disk=disk,
        machines=machines,
    )  # fmt: skip
    kinds, axes = clusters_of(cluster, world_size, devices), ModelAxes.from_choice(axes)
    for kind in kinds:
        check_counts(ranks=kind.ranks, nodes=kind.nodes, seq=seq, accumulate=accumulate)
    check_counts(batch=1 if batch == "auto" else batch)
    where, mixed, chosen = kinds[0], device_kinds(kinds), precision_of(precision)
    if mixed:
        check_mixed(kinds, axes, wire)
    recipe = recipe_of(kinds, chosen)
    axes.check(recipe.world_size)
    name, module = named_model(module_or_config, seq, recomputes=recompute, dtype=dtype)
    is_named = not isinstance(module_or_config, nn.Module)
    word = next((word for word, preset in PRECISIONS.items() if preset == chosen), None)
    rows = 1 if batch == "auto" else int(batch)

    is_open, least = batch == "auto" or bool(mixed), 1 if mixed else rows
    traces = partial(_traces, module, recipe, seq, least, is_open=is_open)
    exact, first, two, estimates = traces(is_alone=recipe.is_alone)
    if is_named:
        config = str(config_path(name)) if name in published() else name
        estimates += left_out(config, module, dtype=dtype, otherwise=f"; {OTHER_DTYPE}")
    anatomy = Anatomy()
    if axes.are_used:
        anatomy = Anatomy.dissect(module, first.units)
        anatomy.check(axes)
        estimates += anatomy.estimates(axes)
    search = Search(
        one_row=first,
        two_rows=two,
        recipe=recipe,
        room=where.room,
        machine=where.described,
        tokens=seq,
        accumulate=accumulate,
        wires=_wires(wire, 1 if mixed else where.nodes, axes),
        axes=axes,
        anatomy=anatomy,
        kinds=mixed,
        exact=exact,
    )  # fmt: skip
    ways = _ways(stage, offload, where.device_type)
    searches = _by_offload(search, ways, partial(traces, is_alone=False))
    rows_tried = _found(searches, ways, None if batch == "auto" else rows)
    if batch == "auto" and not mixed:  # a mixed one has exact traces
        rows_tried = _confirmed(rows_tried, searches)
    best, closest = best_of(rows_tried), nearest(rows_tried)
    search = searches[(best or closest).offload]
    return Plan(
        name, word if precision is not None else None, recompute, search, rows_tried, best, closest,
        estimates,
        _compared(search, best or closest) if wire == "auto" else (),
        MixedPlan.from_row(search, best or closest) if mixed else None,
        trained_name(name) if is_named else None, dtype,
        building_lines(name if is_named else None, module, seq=seq, dtype=dtype),
        preparing_lines(module, recomputes=recompute),
        bf16_weights(search, best or closest),
    )  # fmt: skip


def _traces(
    module: nn.Module, recipe: Recipe, seq: int, rows: int, *, is_open: bool, is_alone: bool
) -> _Traced:
    """Return the tracing, the traces of `rows` rows and of two if that is open, and estimates.

    There is no trace of two where it has other events: it could not be extrapolated.
    """
    precision, device_type, estimates = recipe.precision, recipe.device_type, ()

    @cache
    def exact(rows: int) -> Trace:
        return trace(
            module, tokens_of(rows, seq), precision=precision, device_type=device_type,
            is_alone=is_alone,
        )  # fmt: skip

    try:
        first, two = exact(rows), exact(2) if is_open else None
    except Untraceable as error:
        tree = ModuleTree.from_root(without_values(module))
        units, _ = traced_units(tree, None, precision, is_alone=is_alone)
        exact = cache(lambda rows: estimated(units, rows * seq, precision))
        first, two = exact(rows), exact(2) if is_open else None
        estimates = (f"activations and work, as the forward cannot be traced ({error})",)
    has_line = two is not None and len(first.events) == len(two.events)
    return exact, first, two if has_line else None, estimates


def _by_offload(
    search: Search, ways: Sequence[tuple[int, str]], trace_again: Callable[[], _Traced]
) -> dict[str, Search]:
    """Return the search of each offload: one rank with nothing offloaded has units of its own."""
    words, others = {word for _, word in ways}, search
    if search.recipe.is_alone and words != {"none"}:
        exact, first, two, _ = trace_again()
        others = replace(search, one_row=first, two_rows=two, exact=exact)
    return {word: search if word == "none" else others for word in words}


def _found(
    searches: Mapping[str, Search], ways: Sequence[tuple[int, str]], rows: int | None
) -> tuple[Row, ...]:
    """Try each way that has such a wire, with as many rows as fit, or as many as requested.

    `searches`: by offload.
    """
    rows_tried, refused = list[Row](), list[ConfigError]()
    for stage, offload in ways:
        search = searches[offload]
        try:
            row = search.row(stage, offload, rows) if rows else search.largest(stage, offload)
            rows_tried.append(row)
        except ConfigError as error:
            refused.append(error)
    if not rows_tried:
        raise refused[0]
    return tuple(rows_tried)


def _confirmed(rows: tuple[Row, ...], searches: Mapping[str, Search]) -> tuple[Row, ...]:
    """Trace the best row with as many rows as it has; take fewer where they do not fit after all.

    Bytes at an event grow along a line from one row to two. The most of several events is above it.
    """
    while (best := best_of(rows)) is not None and best.rows > 2:
        search = replace(searches[best.offload], wires=(best.wire,))
        if search.two_rows is None or search.exact is None:
            return rows
        exact = replace(search, one_row=search.exact(best.rows), two_rows=None)
        row = exact.row(best.stage, best.offload, best.rows)
        if row.fits:
            return tuple(row if other is best else other for other in rows)
        fewer = search.row(best.stage, best.offload, best.rows - max(1, best.rows // 16))
        rows = tuple(fewer if other is best else other for other in rows)
    return rows


def _compared(search: Search, row: Row) -> tuple[Row, ...]:
    """Try the same way on every wire; none where the stage, or the cluster, has but one."""
    if search.recipe.nodes == 1 or search.axes.are_used or search.kinds:
        return ()
    rows = search.over((*search.wires, *lossy()), row.stage, row.offload, row.rows)
    rows = [row if other.wire == row.wire else other for other in rows]
    return tuple(rows) if len(rows) > 1 else ()


def _wires(
    wire: Literal["auto"] | WireChoice, nodes: int, axes: ModelAxes
) -> tuple[Candidate, ...]:
    """Return the wires to try: with cp or ep the plain one: their data axis is no grid of nodes."""
    wires = candidates(wire, nodes=nodes)
    is_grid = axes.cp == axes.ep == 1
    plain = tuple(candidate for candidate in wires if is_grid or candidate.wire.is_plain)
    if not plain:
        got = f"wire {wires[0].name} with cp {axes.cp} and ep {axes.ep}"
        hint = "leave the wire out, or cp and ep"
        raise ConfigError("the exact wire with cp and ep", got, hint=hint)
    return plain


def _ways(stage: int | str, offload: str | None, device_type: str) -> Sequence[tuple[int, str]]:
    """Return the stages and offloads to try."""
    stages = (0, 1, 2, 3) if stage == "auto" else (stage,)
    word = "none" if offload is None else offload.partition(":")[0]
    if word != "auto" and word not in OFFLOADS:
        hint = "offload='auto' tries all of them"
        words = f"offload to be auto, {', '.join(OFFLOADS)}"
        raise ConfigError(words, repr(offload), hint=hint)
    if any(number not in (0, 1, 2, 3) for number in stages):
        hint = "stage='auto' tries all of them"
        raise ConfigError("stage to be auto, 0, 1, 2 or 3", repr(stage), hint=hint)
    words = (word,)
    if word == "auto":  # where the CPU computes, its memory is no other tier
        words = ("none", "disk") if device_type == "cpu" else tuple(OFFLOADS)
    ways = [(s, o) for s, o in WAYS if s in stages and o in words]
    if not ways:
        hint = "optimizer needs stage 1 to 3, cpu and disk need stage 3"
        got = f"stage {stage}"
        raise ConfigError(f"offload={offload!r} at a stage that has it", got, hint=hint)
    return ways
