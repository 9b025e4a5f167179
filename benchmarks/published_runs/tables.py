"""The generated parts of the pages on step times (docs/measurements/), as lines of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import mean
from typing import Any

from onefold.planner.costs import Conditions, LinkGroup, gather_cost
from onefold.planner.machines import FITS, Efficiency, Link, known_machines, machine_of
from onefold.planner.simulate import (
    HOUR,
    LLAMA3_DEVICE_MTBF,
    goodput,
    scaling_curve,
    simulate,
    slowest_of,
)
from onefold.planner.work import ModelWork, UnitWork, Work
from onefold.recipe import Recipe
from onefold.wire_config import Wire
from published_runs.composed import LLAMA, composed_rows
from published_runs.decoder import TransformerShape, block_activation_nbytes, transformer_work
from published_runs.drawing import drawn
from published_runs.fits import CLASSES
from published_runs.rows import GPT, MEGATRON_VOCAB, RANKS_PER_HOST, Row, deepspeed

MIB, GIB = 1 << 20, 1 << 30
LLAMA_70B = LLAMA["Llama 70B"]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Markdown lines."""
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def percent(value: float) -> str:
    """A signed share."""
    return f"{100 * value:+.1f}%"


def spread(errors: Sequence[float]) -> tuple[str, str]:
    """Mean of the absolute errors, and the worst with its sign."""
    return f"{100 * mean(map(abs, errors)):.1f}%", percent(max(errors, key=abs))


@dataclass(frozen=True, slots=True)
class Told:
    """Rows that are judged together under one set of constants, with what is simulated for each.

    `counts` is False for another look at rows that are judged elsewhere.
    """

    name: str
    part: str
    rows: list[Row]
    predicted: list[float]
    bounds: list[str]
    is_fitted: bool = False
    counts: bool = True

    @classmethod
    def of(
        cls, name: str, part: str, efficiency: Efficiency, rows: list[Row], **flags: bool
    ) -> Told:
        """Simulate every row once."""
        steps = [row.step(efficiency) for row in rows]
        speeds = [row.speed(step) for row, step in zip(rows, steps, strict=True)]
        return cls(name, part, rows, speeds, [step.bound for step in steps], **flags)

    @property
    def errors(self) -> list[float]:
        """Simulated over measured less one, of each row."""
        pairs = zip(self.predicted, self.rows, strict=True)
        return [speed / row.measured - 1 for speed, row in pairs]

    @property
    def verdict(self) -> str:
        """The mean error that was to be reached, and whether it is."""
        limit = 0.10 if self.is_fitted else 0.20
        return f"{limit:.0%} {'holds' if mean(map(abs, self.errors)) <= limit else '**missed**'}"


def parts() -> list[Told]:
    """Fitted and predicted rows of each class, and those of a class that nothing was fitted on."""
    told = []
    for fit in CLASSES:
        fitted = f"fitted: {fit.part}"
        told.append(Told.of(fit.name, fitted, fit.efficiency, fit.rows(), is_fitted=True))
        for name, rows in _kinds(fit.others()).items():
            told.append(Told.of(fit.name, name, fit.efficiency, rows))
    name, same = "DeepSpeed 2022, A100", FITS["ZeRO-3 2021, A100"]
    return [
        *told,
        Told.of(name, "predicted: ZeRO-3 2021's compute, links as measured",
                replace(same, link=1.0), deepspeed()),
        Told.of(name, "the same rows, with ZeRO-3 2021's link too", same, deepspeed(),
                counts=False),
        Told.of(name, "the same rows, as FSDP 2023", FITS["FSDP 2023, A100"], deepspeed(),
                counts=False),
    ]  # fmt: skip


def _kinds(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Predicted rows by what is new in them."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        where = "one node" if row.ranks == 8 else "several nodes"
        kinds.setdefault(f"predicted: {row.machine}, {row.dtype}, {where}", []).append(row)
    return kinds


def summary(told: Sequence[Told]) -> list[str]:
    """One line for each part, and all together."""
    lines = [
        (each.name, each.part, str(len(each.rows)), *spread(each.errors), each.verdict)
        for each in told
    ]
    for is_fitted, name in ((True, "**all fitted rows**"), (False, "**all rows never fitted**")):
        these = [each for each in told if each.counts and each.is_fitted is is_fitted]
        errors = [error for each in these for error in each.errors]
        lines.append((name, "", str(len(errors)), *spread(errors), ""))
    return table(("class", "rows", "number", "mean error", "worst", "target"), lines)


def constants() -> list[str]:
    """What was fitted in each class, and what was not."""
    lines = []
    for fit in CLASSES:
        values = []
        for name in ("matmul", "memory", "contention", "link", "attention"):
            value = f"{getattr(fit.efficiency, name):.2f}"
            values.append(f"**{value}**" if name in fit.constants else value)
        lines.append((fit.name, *values))
    return table(("class", "matmul", "memory", "contention", "link", "attention"), lines)


def machines() -> list[str]:
    """The machines that the planner knows."""
    return table(
        ("machine", "bf16 TFLOP/s", "memory TB/s", "GB", "ranks a node", "inside GB/s",
         "outside GB/s a rank", "host GB/s", "constants of", "source"),
        (
            (
                machine.name, f"{machine.flops['bf16'] / 1e12:.4g}",
                f"{machine.memory_rate / 1e12:.2f}", f"{machine.memory_nbytes / 1e9:.0f}",
                f"{machine.ranks_per_node}",
                f"{machine.inside.nbytes_per_second / 1e9:.4g}",
                f"{machine.outside.nbytes_per_second / 1e9:.1f}",
                f"{machine.host_rate / 1e9:.0f}",
                next(name for name, fit in FITS.items() if fit == machine.efficiency),
                "[{}]({})".format(*machine.source.split(", ")),
            )
            for machine in known_machines().values()
        ),
    )  # fmt: skip


MEASURED_LINKS = (  # ml-engineering, network/README: all-reduce, bus bandwidth in GB/s by bytes
    ("h200", 8, ((MIB, 40), (16 * MIB, 220), (128 * MIB, 402), (GIB, 464), (16 * GIB, 482))),
    ("b200", 32, ((MIB, 5.4), (16 * MIB, 64), (128 * MIB, 198), (GIB, 362), (16 * GIB, 382))),
)


def links() -> list[str]:
    """All-reduce by message: measured bus bandwidth, and that of the two constants of each link."""
    lines = []
    for name, ranks, measured in MEASURED_LINKS:
        for nbytes, found in measured:
            half = gather_cost(nbytes, LinkGroup(ranks, 8), machine_of(name))
            cost = half.then(half)
            told = cost.nbytes / cost.seconds / 1e9
            lines.append((name, str(ranks), f"{nbytes // MIB}", f"{found}", f"{told:.1f}"))
    return table(("machine", "ranks", "MiB", "measured GB/s", "simulated GB/s"), lines)


KORTHIKANTI = (  # GiB of figure 1: states; activations; the same with both savings. pp, interleaved
    ("22B", 4, 1, 1, 45.5625, 59.25, 9.5625),
    ("175B", 1, 8, 3, 45.5625, 66.84375, 12.3515625),
    ("530B", 1, 35, 3, 31.640625, 114.0234375, 23.076171875),
    ("1T", 1, 64, 1, 32.958984375, 131.25, 26.5625),
)


def memory_rows() -> list[tuple[str, str, float, float]]:
    """Model, what, published GiB, and GiB by the formula: 8-way tensor parallel, sequences of 2048.

    States take 18 bytes a parameter of the blocks (fp32 gradients). The first of p pipeline stages,
    in v interleaved pieces, keeps the activations of L (1 + (p-1)/(p v)) blocks.
    """
    found = []
    for model, microbatch, stages, pieces, *published in KORTHIKANTI:
        hidden, layers, heads = GPT[model]
        shape = TransformerShape(hidden, layers, heads, MEGATRON_VOCAB)
        states = 18 * layers * shape.block_matrix_numel / 8 / stages
        share = 1 + (stages - 1) / (stages * pieces) if pieces > 1 else 1.0
        whole, least = (
            layers * share
            * block_activation_nbytes(
                shape, seq=2048, microbatch=microbatch, tensor_parallel=8,
                sequence_parallel=saves, selective_recompute=saves,
            )
            for saves in (False, True)
        )  # fmt: skip
        names = ("weights, gradients, Adam", "activations", "activations, both savings")
        for name, measured, nbytes in zip(names, published, (states, whole, least), strict=True):
            found.append((model, name, measured, nbytes / GIB))
    return found


def memory() -> list[str]:
    """Korthikanti's memory, row by row."""
    return table(
        ("model", "what", "published GiB", "formula GiB", "error"),
        (
            (model, what, f"{published:.1f}", f"{told:.1f}", percent(told / published - 1))
            for model, what, published, told in memory_rows()
        ),
    )


WORLDS = (8, 64, 512, 1024, 4096, 10_240)


def scaling() -> list[str]:
    """Llama 70B on H100, one sequence of 8192 a rank: flat, hybrid over 64, hybrid in the node."""
    work = transformer_work(LLAMA_70B, seq=8192, microbatch=1, fused_elementwise=True)
    flat_recipe = Recipe(world_size=64, local_world_size=RANKS_PER_HOST, device_type="cuda")
    copies = replace(
        flat_recipe, local_world_size=64, has_axes=True, wire=Wire(secondary="optimizer")
    )
    conditions = Conditions(recompute=1.0, ranks_per_host=RANKS_PER_HOST, uses_rings=True)
    machine = machine_of("h100-80")
    lines = []
    for world in WORLDS[1:]:
        flat, near = (
            scaling_curve(work, recipe, machine, (64, world), conditions)[-1]
            for recipe in (flat_recipe, copies)
        )
        lines.append(
            (f"{world:,}", f"{flat.step.tokens_per_s / world:.0f}", f"{flat.efficiency:.2f}",
             flat.step.bound, f"{near.step.tokens_per_s / world:.0f}", f"{near.efficiency:.2f}",
             near.step.bound)
        )  # fmt: skip
    return table(
        ("ranks", "flat: tokens/s a rank", "efficiency", "bound", "copies of 64 ranks",
         "efficiency", "bound"), lines,
    )  # fmt: skip


def stragglers() -> list[str]:
    """What a spread of 1% costs by the slowest of N."""
    return table(
        ("ranks", *(f"{world:,}" for world in WORLDS)),
        [("longer by", *(f"{slowest_of(world):.1f}%" for world in WORLDS))],
    )


def young_interval(checkpoint_seconds: float, mtbf: float) -> float:
    """Return Young's interval between checkpoints, in seconds: sqrt(2 x cost x mtbf).

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974).
    """
    return sqrt(2 * checkpoint_seconds * mtbf)


def failures() -> list[str]:
    """Failures at Llama 3's rate, a checkpoint of 60 s or a pause of 2, five minutes to restart."""
    lines = []
    for world in (*WORLDS, 16_384, 102_400):
        cells = [f"{world:,}", f"{LLAMA3_DEVICE_MTBF / world / HOUR:,.1f}"]
        for seconds in (60.0, 2.0):
            told = goodput(1.0, world_size=world, checkpoint_seconds=seconds, restart_seconds=300.0)
            young = young_interval(seconds, told.mtbf)
            cells += [f"{told.interval / 60:.1f}", f"{young / 60:.1f}", f"{100 * told.share:.1f}%"]
        lines.append(cells)
    return table(
        ("devices", "hours between failures", "60 s: best interval, min", "Young's", "useful",
         "2 s: best interval, min", "Young's", "useful"), lines,
    )  # fmt: skip


ROWS = ("h100", "a100-80", "a100-40")
"""Beginnings of machines' names: each has a page of rows."""


def every_row(told: Sequence[Told], machine: str) -> list[str]:
    """All rows on a machine, of all classes; the fitted ones are marked."""
    lines = []
    for each in told:
        judged = zip(each.rows, each.predicted, each.errors, each.bounds, strict=True)
        for row, predicted, error, bound in judged if each.counts else ():
            if not row.machine.replace("h200", "h100").startswith(machine):
                continue
            digits = 0 if row.unit == "tokens/s" else 1
            lines.append(
                (row.source, f"{row.machine}, {row.dtype}", row.model, str(row.seq),
                 str(row.ranks), row.told, f"{row.measured:.{digits}f}",
                 f"{predicted:.{digits}f}", percent(error), bound,
                 "fitted" if each.is_fitted else "")
            )  # fmt: skip
    return table(
        ("source", "machine", "model", "tokens", "ranks", "micro-batch", "measured", "simulated",
         "error", "bound", ""), lines,
    )  # fmt: skip


def composed() -> list[str]:
    """Rows with tensor, pipeline and context axes, by kind; none was fitted."""
    kinds: dict[str, list[float]] = {}
    for row in composed_rows():
        kinds.setdefault(row.kind, []).append(row.predicted / row.measured - 1)
    errors = [error for each in kinds.values() for error in each]
    lines = [(kind, str(len(each)), *spread(each)) for kind, each in kinds.items()]
    lines.append(("**all rows with model axes**", str(len(errors)), *spread(errors)))
    return table(("rows", "number", "mean error", "worst"), lines)


def composed_results() -> list[dict[str, Any]]:
    """Every row with model axes as plain numbers, for the result file."""
    return [
        {
            "source": row.source, "machine": row.machine, "model": row.model, "seq": row.seq,
            "ranks": row.ranks, "mesh": row.mesh or "dp", "micro-batch": row.told,
            "unit": row.unit, "measured": round(row.measured, 1),
            "simulated": round(row.predicted, 1),
            "error": round(row.predicted / row.measured - 1, 3), "bound": row.result.bound,
            "bubble": round(row.result.bubble / row.result.seconds, 3),
        }
        for row in composed_rows()
    ]  # fmt: skip


def every_composed_row() -> list[str]:
    """All rows with model axes."""
    lines = [
        (each["source"], each["machine"], each["model"], str(each["seq"]), str(each["ranks"]),
         each["mesh"], each["micro-batch"], f"{each['measured']:.1f}", f"{each['simulated']:.1f}",
         percent(each["error"]), f"{each['bubble']:.0%}")
        for each in composed_results()
    ]  # fmt: skip
    return table(
        ("source", "machine", "model", "tokens", "ranks", "mesh", "micro-batch", "measured",
         "simulated", "error", "bubble"), lines,
    )  # fmt: skip


def drawing() -> list[str]:
    """One step of four equal units at stage 3, at half the speed of the links that would do."""
    unit = UnitWork("", 10_000_000, Work(2e11), Work(4e11))
    work = ModelWork(tuple(replace(unit, name=str(index)) for index in range(4)), tokens=1)
    machine = replace(
        machine_of("h100-80"), flops={"bf16": 1e15}, inside=Link(20e9, 0.0),
        efficiency=Efficiency(1.0, 1.0),
    )  # fmt: skip
    recipe, conditions = Recipe(world_size=8, local_world_size=8), Conditions(uses_rings=True)
    return ["```text", *drawn(simulate(work, recipe, machine, conditions)), "```"]


def blocks() -> dict[str, list[str]]:
    """Each generated part of the page, by the name of its place."""
    told = parts()
    return {
        "drawing": drawing(),
        "machines": machines(),
        "links": links(),
        "constants": constants(),
        "summary": summary(told),
        "memory": memory(),
        "scaling": scaling(),
        "stragglers": stragglers(),
        "failures": failures(),
        **{f"rows {name}": every_row(told, name) for name in ROWS},
        "axes": composed(),
        "axes rows": every_composed_row(),
    }
