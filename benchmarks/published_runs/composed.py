"""Published runs with tensor, pipeline and context axes. No constant is fitted on them.

Their constants are those of the same software without such axes: of ZeRO-3 in 2021, with links as
measured, for Megatron; of FSDP2 on one node for torchtitan.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from onefold.engine.policy import Policy, policy_of
from onefold.planner.composed import ComposedJob, parts_of, units_of
from onefold.planner.composition import pipeline_step
from onefold.planner.machines import FITS, Efficiency, machine_of
from onefold.planner.planned_axes import Anatomy, ModelAxes
from onefold.planner.simulate import StepTime
from onefold.planner.work import ModelWork, UnitWork, Work
from onefold.recipe import Recipe
from published_runs.decoder import TransformerShape, attention_flops, softmax_numel
from published_runs.rows import LLAMA_8B, Row

LLAMA = {
    "Llama 8B": LLAMA_8B,
    "Llama 70B": TransformerShape(
        8192, 80, 64, 128256, kv_heads=8, ffn=28672, is_gated=True, is_tied=False, has_bias=False
    ),
    "Llama 405B": TransformerShape(
        16384, 126, 128, 128256, kv_heads=8, ffn=53248, is_gated=True, is_tied=False, has_bias=False
    ),
}
MEGATRON = replace(FITS["ZeRO-3 2021, A100"], link=1.0)
TORCHTITAN = FITS["FSDP2 2024, H100"]
LONG = 8192
"""Tokens; torchtitan's longer sequences were measured with a context axis and without."""


def policy_of_pipeline(recipe: Recipe) -> Policy:
    """FSDP2 keeps weights through a step of a pipeline; gradients are reduced with the last."""
    policy = policy_of(recipe)
    if not recipe.frees_after_forward:
        return policy
    return replace(
        policy, frees_after_forward=False, frees_after_backward=False, defers_reduction=True
    )


@dataclass(frozen=True)
class ComposedRow(Row):
    """One run on a mesh; its `measured` is a speed, where times of steps were published, too.

    `hides_tp`: its software hides messages of tp behind products. `repeats_attention`: only the
    scores of attention are recomputed.
    """

    axes: ModelAxes = field(default_factory=ModelAxes)
    hides_tp: bool = False
    repeats_attention: bool = False

    @property
    def shape(self) -> TransformerShape:
        """The model's shapes; the last rank of a pipeline has a copy of the table as its head."""
        shape = LLAMA[self.model] if self.model in LLAMA else Row.shape.fget(self)  # pyright: ignore
        return replace(shape, is_tied=shape.is_tied and self.axes.pp == 1)

    @property
    def job(self) -> ComposedJob:
        """The axes on the model."""
        shape = self.shape
        anatomy = Anatomy(
            blocks=tuple(f"layer {index}" for index in range(shape.layers)), width=shape.hidden,
            heads=shape.heads, kv_heads=shape.kv_heads or shape.heads,
        )  # fmt: skip
        return ComposedJob(self.axes, anatomy, self.recipe, self.seq * self.microbatch, itemsize=2)

    @cached_property
    def result(self) -> StepTime:
        """The simulated step."""
        job, work, axes = self.job, self.work, self.axes
        units = [self._with_scores(unit) for unit in work.units]
        recipe, run = axes.data(self.recipe), self.conditions
        run = replace(run, ranks_per_host=recipe.local_world_size)
        policy = policy_of_pipeline(recipe) if axes.pp > 1 else None
        ranks = [
            ModelWork(
                units_of(units, parts_of(units, job, rank), job, frozenset()),
                work.tokens // axes.cp,
            )
            for rank in range(axes.pp)
        ]
        machine = replace(machine_of(self.machine), efficiency=self.efficiency)
        works = [(rank, None) for rank in ranks]
        return pipeline_step(works, recipe, axes, machine, run, policy)[0]

    @property
    def efficiency(self) -> Efficiency:
        """The constants of the same software without axes."""
        return TORCHTITAN if self.source == "torchtitan" else MEGATRON

    def _with_scores(self, unit: UnitWork) -> UnitWork:
        """Add the scores of attention to backward, where they are recomputed."""
        if not (self.repeats_attention and unit.is_recomputed):
            return unit
        tokens, shape = self.seq * self.microbatch, self.shape
        moved = softmax_numel(shape, self.seq)[0]
        again = Work(tokens * attention_flops(shape, self.seq), nbytes=2.0 * tokens * moved)
        return replace(unit, backward=unit.backward.plus(again))

    @property
    def predicted(self) -> float:
        """The simulated speed, in the unit of `measured`."""
        return self.speed(self.result)

    @property
    def kind(self) -> str:
        """The rows with which it is judged."""
        known = {"megatron": "Megatron 2021", "korthikanti": "Megatron 2022", "mt-nlg": "MT-NLG"}
        axes = self.axes
        has_long = self.source == "torchtitan" and self.seq > LONG
        words = [name for name, size in (("tp", axes.tp), ("pp", axes.pp)) if size > 1]
        words += ["cp"] * has_long
        end = ", long sequences" * has_long
        return f"{known.get(self.source, self.source)}: {' x '.join(words)}{end}"

    @property
    def mesh(self) -> str:
        """The mesh in words."""
        axes = self.axes
        sizes = {"pp": axes.pp, "dp": axes.dp(self.ranks), "cp": axes.cp, "tp": axes.tp}
        words = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        return words + (f", {axes.virtual} pieces a rank" if axes.virtual > 1 else "")

    @property
    def told(self) -> str:
        """Micro-batch, accumulation and what is special, in words."""
        said = super().told
        said += ", attention recomputed" if self.repeats_attention else ""
        return said + (", async tp" if self.hides_tp else "")


def torchtitan() -> list[ComposedRow]:
    """Llama 3.1 under FSDP2, compiled, recomputed: benchmarks/*.md of 2024-12 and 2025-06.

    A pipeline has as many micro-batches as ranks, torchtitan's default: the tables name none.
    """
    one = ComposedRow(
        "torchtitan", "h100-96-500w", "Llama 70B", 8192, 256, 16, 597, grad_itemsize=4,
        fused_elementwise=True, axes=ModelAxes(tp=8),
    )  # fmt: skip
    float8 = replace(one, measured=829, dtype="fp8", weight_itemsize=1)
    large = replace(float8, model="Llama 405B", ranks=512, accumulate=8, hides_tp=True)
    deep = replace(large, microbatch=1)
    small = replace(float8, model="Llama 8B", ranks=8, microbatch=1)
    contexts = ((1, 32768), (2, 65536), (4, 131072), (8, 262144))
    return [
        one, replace(one, measured=652, hides_tp=True),
        float8, replace(float8, measured=876, hides_tp=True),
        replace(large, microbatch=4, measured=100, axes=ModelAxes(tp=8, pp=8)),
        replace(large, microbatch=4, measured=128, axes=ModelAxes(tp=8, pp=8, virtual=2)),
        *(
            replace(small, seq=seq, measured=measured, axes=ModelAxes(cp=cp))
            for (cp, seq), measured in zip(contexts, (3890, 2540, 1071, 548), strict=True)
        ),
        *(
            replace(deep, seq=seq, measured=measured, axes=ModelAxes(tp=8, pp=8, cp=cp))
            for (cp, seq), measured in zip(contexts, (76, 47, 31, 16), strict=True)
        ),
    ]  # fmt: skip


def megatron() -> list[ComposedRow]:
    """Megatron beside ZeRO-3: arXiv 2104.04473, table 2. Inferred: pieces are not interleaved."""
    rows = (
        ("175B", 12, 1536, 384, 153), ("175B", 12, 1536, 768, 149), ("175B", 12, 1536, 1536, 141),
        ("530B", 35, 2240, 560, 171), ("530B", 35, 2240, 1120, 167), ("530B", 35, 2240, 2240, 159),
    )  # fmt: skip
    return [
        ComposedRow("megatron", "a100-80", model, 2048, ranks, 1, measured,
                    accumulate=batch * 8 * pp // ranks, stage=0, unit="TFLOP/s",
                    fused_attention=False, axes=ModelAxes(tp=8, pp=pp))
        for model, pp, batch, ranks, measured in rows
    ]  # fmt: skip


def korthikanti() -> list[ComposedRow]:
    """Iteration times of arXiv 2205.05198, table 5: blocks recomputed, and scores alone."""
    rows = (
        ("22B", 1, 1, 4, 4, (1.42, 1.10)), ("175B", 8, 3, 64, 1, (18.13, 13.75)),
        ("530B", 35, 3, 280, 1, (49.05, 37.83)), ("1T", 64, 1, 512, 1, (94.42, 71.49)),
    )  # fmt: skip
    found: list[ComposedRow] = []
    for model, pp, virtual, batch, microbatch, seconds in rows:
        for again, measured in enumerate(seconds):
            ranks = 8 * pp
            found.append(
                ComposedRow(
                    "korthikanti", "a100-80", model, 2048, ranks, microbatch,
                    batch * 2048 / measured / ranks, accumulate=batch // microbatch,
                    recompute=1.0 - again, stage=0, fused_attention=False,
                    axes=ModelAxes(tp=8, pp=pp, virtual=virtual), repeats_attention=again == 1,
                )
            )  # fmt: skip
    return found


def turing() -> list[ComposedRow]:
    """MT-NLG 530B on 280, 350 and 420 DGX A100, batch 1920: arXiv 2201.11990.

    Inferred: micro-batches of 1.
    """
    return [
        ComposedRow("mt-nlg", "a100-80", "530B", 2048, ranks, 1, 1920 * 2048 / seconds / ranks,
                    accumulate=1920 * 280 // ranks, stage=0, fused_attention=False,
                    axes=ModelAxes(tp=8, pp=35))
        for ranks, seconds in ((2240, 60.1), (2800, 50.2), (3360, 44.4))
    ]  # fmt: skip


@cache
def composed_rows() -> list[ComposedRow]:
    """Every row with model axes; each is simulated once for all tables."""
    return torchtitan() + megatron() + korthikanti() + turing()
