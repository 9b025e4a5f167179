"""The choices of a run of `onefold train` or `onefold generate` as frozen values.

Imports no torch: `--help` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onefold.config import PrecisionWord, StageChoice
    from onefold.planner.models.loader import DtypeWord
    from onefold.wire_config import Preset


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of the training loop.

    `rows` is rows of one step, over all ranks and micro-batches; `seq` is bytes of a row.
    """

    model: str = "tiny"  # a preset, a Hugging Face config.json, or module:function
    data: str | None = None  # a folder of text; None: the source of Python's standard library
    stage: StageChoice = 3  # or "auto": the lowest that fits
    offload: str | None = None  # "optimizer", "cpu" or "disk:PATH"; None: all on the device
    fraction: float | str = 1.0  # of the optimizer state that leaves the device, or "auto"
    recompute: bool = False  # run blocks again in backward instead of keeping activations
    compile: bool = False  # run blocks through torch.compile
    precision: PrecisionWord | None = None  # None computes in the parameters' own dtype
    dtype: DtypeWord | None = None  # of the weights; None: as the model's configuration says
    wire: Preset | None = None  # a named wire; None sends exact messages on one axis
    shares: str | tuple[float, ...] | None = None  # of the state: "auto", or a weight a rank
    steps: int = 160
    rows: int = 16
    seq: int = 64
    row_shares: tuple[float, ...] | str | None = None  # of ranks; "auto" measures; None: equal
    accumulate: int = 1  # micro-batches of a step
    tp: int = 1  # ranks that share each layer
    pp: int = 1  # ranks that have blocks one after the other
    cp: int = 1  # ranks that share each row
    lr: float | None = None  # peak learning rate; None: the default of the preset
    clip: float = 1.0  # largest norm of the whole gradient; 0 does not clip
    seed: int = 0
    sample: int = 72  # bytes of text that the trained model writes; each is one forward
    checkpoint: str | None = None  # a directory of checkpoints; None saves nothing
    every: int = 0  # steps between checkpoints; 0: only the last step, and when interrupted
    keep: int | None = 2  # newest checkpoints that stay; None: all
    report: str | None = None  # a directory for a page about the run; None writes none
    profile: str | None = None  # a directory for torch.profiler's traces; None writes none
    resume: bool = False  # continue from the newest checkpoint, if there is one

    @property
    def steps_in_backward(self) -> bool:
        """True if units may step in backward: offloaded, and no step reads all gradients.

        Clipping and dynamic loss scaling read all gradients.
        """
        return self.offload is not None and self.clip == 0 and self.precision != "fp16"

    @property
    def model_ranks(self) -> int:
        """Ranks that work on the same rows."""
        return self.tp * self.pp * self.cp

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over all ranks."""
        return self.rows * self.seq


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob:
    """One run of `onefold generate`. Sizes are bytes."""

    model: str
    prompt: str
    rest: str | None = None  # "int8" or "int4"; None: exact
    budget: int | None = None  # of device memory for weights; None: what is free
    offload: str | None = "cpu"  # "disk:PATH", "disk" (the model's files); None: the device
    max_new_tokens: int = 64
    lookup: bool = False  # propose tokens from the prompt and the text so far
    kv_budget: int | None = None  # of memory for keys and values; None: all of them in memory
    temperature: float | None = None  # 0: always the likeliest token; None: as the model's kind
    seed: int = 0

    @property
    def folders(self) -> list[str]:
        """The folders of the disk tier; none without one."""
        word, _, paths = (self.offload or "").partition(":")
        return [path for path in paths.split(":") if path] if word == "disk" else []
