"""The choices of a run of `onefold finetune` as frozen values, without torch for `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from onefold.config import PrecisionWord, StageChoice

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneJob:
    """One run. `batch` is rows of one rank in a micro-batch, `seq` the most tokens of a row."""

    model: str  # a folder that `from_pretrained` opens
    data: str  # a file of JSON lines
    out: str  # a folder that does not exist yet
    stage: StageChoice = AUTO  # 0 to 3, or "auto": as `onefold plan` chooses
    offload: str | None = AUTO  # None, "optimizer", "cpu", "disk:PATH" or "auto"
    recompute: bool = False  # True; False: where nothing fits without
    precision: PrecisionWord | None = None  # None: bf16 on GPUs, fp32 on CPUs
    lora: int = 0  # rank of adapters on all Linears; 0 trains all weights
    merge: bool = False  # write the merged model as well as the adapter
    rest: Literal["int8", "int4"] | None = None  # quantize the frozen base of adapters
    seq: int = 1024
    batch: int = 1
    accumulate: int = 1  # micro-batches of a step
    lr: float | None = None  # None: 2e-5, and 2e-4 of adapters
    epochs: float = 1.0
    steps: int | None = None  # in place of epochs
    packing: bool = False  # several rows in one of `seq` tokens
    held_out: float = 0.05  # share of the rows, at most 256, that only measure
    clip: float = 1.0
    seed: int = 0
    sample: int = 32  # tokens of the answer before and after; 0: none
    checkpoint: str | None = None  # a folder of checkpoints
    every: int = 0  # steps between checkpoints; 0: the last step alone
    keep: int = 2
    resume: bool = False
    report: str | None = None  # a folder for a page about the third step
    profile: str | None = None  # a folder for torch.profiler's traces
    report_to: str = "none"  # trackers, as Trainer has them

    @property
    def peak_lr(self) -> float:
        """The learning rate after its warm-up."""
        return self.lr if self.lr is not None else 2e-4 if self.lora else 2e-5
