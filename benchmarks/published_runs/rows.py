"""The rows: who ran what on what, how fast it was, and which shapes their models have."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

from onefold.config import Offload, stage_of
from onefold.planner.costs import Conditions
from onefold.planner.machines import Efficiency, machine_of
from onefold.planner.simulate import StepTime, simulate
from onefold.planner.work import ModelWork
from onefold.recipe import Recipe
from published_runs.decoder import TransformerShape, transformer_work

HERE = Path(__file__).parent
MPT_VOCAB, MEGATRON_VOCAB = 50368, 51200
RANKS_PER_HOST = 8
MPT = {  # hidden, layers, heads: scripts/train/yamls/pretrain/mpt-*.yaml
    "125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 12), "1b": (2048, 24, 16),
    "3b": (2560, 32, 20), "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}  # fmt: skip
GPT = {  # arXiv 2104.04473 table 1, 2205.05198 table 3, DeepSpeed's post table 2
    "22B": (6144, 48, 64), "175B": (12288, 96, 96), "530B": (20480, 105, 128),
    "1T": (25600, 128, 160), "2T": (32768, 160, 128),
}  # fmt: skip
LLAMA_8B = TransformerShape(
    4096, 32, 32, 128256, kv_heads=8, ffn=14336, is_gated=True, is_tied=False, has_bias=False
)


@dataclass(frozen=True, slots=True)
class Row:
    """One published run. `measured` is in `unit` per rank: tokens/s, or hardware TFLOP/s."""

    source: str
    machine: str
    model: str
    seq: int
    ranks: int
    microbatch: int
    measured: float
    accumulate: int = 1
    recompute: float = 1.0
    stage: int = 3
    dtype: str = "bf16"
    weight_itemsize: int = 2
    grad_itemsize: int = 2
    optimizer: str = "device"
    unit: str = "tokens/s"
    fused_attention: bool = True
    fused_elementwise: bool = False

    @property
    def shape(self) -> TransformerShape:
        """The model's shapes; MPT has learned positions, as many as the sequence is long."""
        if self.model in MPT:
            hidden, layers, heads = MPT[self.model]
            return TransformerShape(hidden, layers, heads, MPT_VOCAB, positions=self.seq)
        if self.model in GPT:
            hidden, layers, heads = GPT[self.model]
            return TransformerShape(hidden, layers, heads, MEGATRON_VOCAB, positions=self.seq)
        return LLAMA_8B

    @property
    def work(self) -> ModelWork:
        """What one rank does in one micro-batch."""
        return transformer_work(
            self.shape,
            seq=self.seq,
            microbatch=self.microbatch,
            fused_attention=self.fused_attention,
            fused_elementwise=self.fused_elementwise,
        )

    @property
    def recipe(self) -> Recipe:
        """Stage, ranks and tiers of the run."""
        return Recipe(
            stage=stage_of(self.stage),
            world_size=self.ranks,
            local_world_size=RANKS_PER_HOST,
            offload=Offload(optimizer=self.optimizer),
            device_type="cuda",
        )

    @property
    def conditions(self) -> Conditions:
        """The job, and the dtypes that the system sends."""
        return Conditions(
            dtype=self.dtype,
            weight_itemsize=self.weight_itemsize,
            grad_itemsize=self.grad_itemsize,
            accumulate=self.accumulate,
            recompute=self.recompute,
            uses_rings=True,
        )

    def step(self, efficiency: Efficiency) -> StepTime:
        """The simulated step."""
        machine = replace(machine_of(self.machine), efficiency=efficiency)
        return simulate(self.work, self.recipe, machine, self.conditions)

    def speed(self, step: StepTime) -> float:
        """A simulated step in the unit of `measured`."""
        tokens_per_s = step.tokens_per_s / self.ranks
        return tokens_per_s * (1 if self.unit == "tokens/s" else self.megatron_flops / 1e12)

    def error(self, efficiency: Efficiency) -> float:
        """Simulated over measured, less one."""
        return self.speed(self.step(efficiency)) / self.measured - 1

    @property
    def told(self) -> str:
        """Micro-batch, accumulation and what is special, in words."""
        said = [f"{self.microbatch} x {self.accumulate}"]
        said += {0.0: [], 0.5: ["half recomputed"], 1.0: ["recomputed"]}[self.recompute]
        said += [] if self.stage == 3 else [f"stage {self.stage}"]
        said += ["compiled"] if self.fused_elementwise else []
        said += ["states on cpu"] if self.optimizer == "cpu" else []
        return ", ".join(said)

    @property
    def megatron_flops(self) -> float:
        """FLOPs per token with full recompute, by Megatron's formula (arXiv 2104.04473, eq. 3)."""
        shape = self.shape
        share = self.seq / (6 * shape.hidden) + shape.vocab / (16 * shape.layers * shape.hidden)
        return 96 * shape.layers * shape.hidden**2 * (1 + share)


def llm_foundry() -> list[Row]:
    """MPT under FSDP, MosaicML, 2023: scripts/train/benchmarking/README.md, all rows.

    Gradients are reduced in fp32, and in bf16 where the table says PURE.
    """
    with (HERE / "llm_foundry.csv").open() as file:
        return [
            Row(
                "llm-foundry", row["machine"], row["model"], int(row["seq"]), int(row["ranks"]),
                int(row["microbatch"]), float(row["tokens"]), int(row["accumulate"]),
                float(row["recompute"]), int(row["stage"]), row["dtype"],
                grad_itemsize=int(row["grad_itemsize"]),
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip


def torchtitan() -> list[Row]:
    """Llama 3.1 8B under FSDP2, 2024-12 and 2025-06: benchmarks/*.md, the rows without TP or PP.

    Selective recompute saves every other product: half of forward. float8 is gathered as such.
    """
    eager = Row("torchtitan", "h100-96-500w", "Llama 8B", 8192, 8, 2, 5762, recompute=0.5,
                grad_itemsize=4)  # fmt: skip
    compiled = replace(eager, measured=6667, fused_elementwise=True)
    float8 = replace(compiled, measured=8532, dtype="fp8", weight_itemsize=1)
    return [
        eager, compiled, float8,
        replace(eager, ranks=128, measured=5605),
        replace(compiled, ranks=128, measured=6514),
        replace(float8, ranks=128, measured=8380),
        replace(float8, machine="h200", ranks=32, measured=10938),
        replace(float8, machine="h200", ranks=64, measured=10753),
    ]  # fmt: skip


def megatron() -> list[Row]:
    """ZeRO-3 (DeepSpeed, 2021) beside Megatron: arXiv 2104.04473, table 2."""
    rows = (
        ("175B", 384, 4, 144), ("175B", 768, 2, 88), ("175B", 1536, 1, 44),
        ("530B", 640, 4, 138), ("530B", 1120, 2, 98), ("530B", 2240, 1, 48),
    )  # fmt: skip
    return [
        Row("megatron", "a100-80", model, 2048, ranks, microbatch, measured,
            unit="TFLOP/s", fused_attention=False)
        for model, ranks, microbatch, measured in rows
    ]  # fmt: skip


def deepspeed() -> list[Row]:
    """ZeRO-3 with states on the CPU, Azure NDm A100, 2022: docs/_posts/2022-07-26-deepspeed-azure.

    The micro-batch of 530B's best run is not printed; 8 is the largest that was tried.
    """
    rows = (
        ("175B", 512, 256, 32, 204.49), ("530B", 1024, 1024, 8, 171.37),
        ("1T", 1024, 1024, 8, 165.36), ("2T", 1024, 1024, 8, 157.0),
    )  # fmt: skip
    return [
        Row("deepspeed", "a100-80", model, seq, ranks, microbatch, measured, optimizer="cpu",
            unit="TFLOP/s", fused_attention=False)
        for model, seq, ranks, microbatch, measured in rows
    ]  # fmt: skip


def all_rows() -> list[Row]:
    """Every row that the simulator is held against."""
    return llm_foundry() + torchtitan() + megatron() + deepspeed()
