"""The model of a folder and its tokenizer: on `meta`, with adapters, and the way it will train."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onefold
from onefold.app.finetune.choices import AUTO, FinetuneJob
from onefold.app.finetune.row_file import Row, RowFile
from onefold.app.generate.sources import TOKENIZERS
from onefold.checkpoint.agreement import first
from onefold.config import PrecisionWord, precision_of
from onefold.errors import ConfigError
from onefold.planner.models.loader import described, recompute
from onefold.planner.planning import plan
from onefold.planner.result import Plan
from onefold.planner.storages import Untraceable
from onefold.text import format_bytes
from onefold.tier import accelerator
from onefold.tier.device import map_blocks
from onefold.wire.world import World

MAPPED_NBYTES = 8 << 20
"""Blocks that CPU ranks give back when they are freed: gradients of matrices, between those that
stay. 291 M parameters on 2 ranks held 1.15 of the bytes in use, and hold 1.09."""


def give_blocks_back(world: World) -> None:
    """Let large blocks of a CPU rank return to the system at once, unless the user tunes malloc."""
    if world.device.type == "cpu" and not any(name.startswith("MALLOC_") for name in os.environ):
        map_blocks(MAPPED_NBYTES)


def load_tokenizer(job: FinetuneJob, rows: RowFile) -> Any:
    """Return the folder's tokenizer, with a token for padding.

    Raises: ConfigError: no tokenizer, or none with a chat template where rows are messages.
    """
    folder = Path(job.model)
    if not any((folder / name).exists() for name in TOKENIZERS):
        hint = "copy tokenizer.json and tokenizer_config.json of the model there"
        raise ConfigError(f"a tokenizer in --model {job.model!r}", "none", hint=hint)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        hint = "download or save the folder again"
        wanted = f"a tokenizer that loads in {job.model!r}"
        raise ConfigError(wanted, described(error), hint=hint) from error
    if tokenizer.pad_token is None:
        tokenizer.add_special_tokens({"pad_token": tokenizer.eos_token})
    if rows.is_chat and not tokenizer.chat_template:
        hint = "copy the model's chat_template.jinja there, or make prompt and completion texts"
        wanted = f"a chat template of the tokenizer in {job.model!r}, as rows are messages"
        raise ConfigError(wanted, "none", hint=hint)
    return tokenizer


def token_count(tokenizer: Any, row: Row) -> int:
    """Return the tokens of a row, before it is cut to the longest that is trained on."""
    if "messages" in row or isinstance(row.get("prompt"), list):
        messages = row.get("messages") or [*row["prompt"], *row["completion"]]
        return len(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
    return len(tokenizer("".join(row.values()))["input_ids"])


def check_model(job: FinetuneJob) -> Any:
    """Return the configuration of the folder's model.

    Raises: ConfigError: a model that does not write text, or has fewer positions than `--seq`.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = AutoConfig.from_pretrained(job.model, local_files_only=True, trust_remote_code=False)
    writers = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    named = config.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "")]
    if config.is_encoder_decoder or not writers.intersection(named):
        hint = "an encoder does not write text: train it in a loop of your own, with onefold.shard"
        wanted = f"a model that continues text (...ForCausalLM) in {job.model!r}"
        raise ConfigError(wanted, " ".join(named) or config.model_type, hint=hint)
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(longest, int) and job.seq > longest:
        wanted = f"--seq of at most {longest}, the positions of {job.model!r}"
        raise ConfigError(wanted, job.seq, hint=f"--seq {longest}")
    return config


def build(job: FinetuneJob, config: Any, device: torch.device) -> nn.Module:
    """Build the model on `meta`, its values promised by the files; with adapters, if any."""
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if device.type == "cpu" or job.precision else config.dtype
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:
        hint = "AutoModelForCausalLM.from_config must be able to build it"
        raise ConfigError(f"a model in {job.model!r}", described(error), hint=hint) from error
    module.config.update({"use_cache": False})
    onefold.load_pretrained(module, job.model)
    if not job.lora:
        return module
    import peft

    options = peft.LoraConfig(
        r=job.lora, lora_alpha=2 * job.lora, target_modules="all-linear", task_type="CAUSAL_LM",
        base_model_name_or_path=job.model,
    )  # fmt: skip
    adapted = peft.get_peft_model(module, options)
    adapted.enable_input_require_grads()  # else recompute keeps no graph of a frozen base
    return adapted


@dataclass(frozen=True, slots=True)
class Way:
    """How the model trains. `line`: what was chosen, and the planned peak of a rank."""

    stage: int
    offload: str | None
    precision: PrecisionWord | None
    recompute: bool
    peak_nbytes: int  # predicted; 0 where the model could not be traced
    line: str


def choose(job: FinetuneJob, module: nn.Module, world: World) -> Way:
    """Plan the run, before any weight is read. Every rank gets the plan of rank 0. A collective.

    Raises: ConfigError: on every rank, where nothing fits.
    """
    found: Way | str = ""
    if world.rank == 0:
        try:
            found = _choose(job, module, world)
        except ConfigError as error:
            found = str(error)
    way = world.group.gather(found)[0]
    if isinstance(way, str):
        raise ConfigError(f"{way}")
    return way


def _precision(job: FinetuneJob, module: nn.Module, device: torch.device) -> PrecisionWord | None:
    """Return the dtype of compute: on GPUs bf16, for weights that are wider."""
    if job.precision or device.type == "cpu":
        return job.precision
    is_wide = any(p.dtype == torch.float32 and not p.requires_grad for p in module.parameters())
    is_wide |= all(p.dtype == torch.float32 for p in module.parameters())
    return "bf16" if is_wide and accelerator.computes_bf16() else None


def _choose(job: FinetuneJob, module: nn.Module, world: World) -> Way:
    precision = _precision(job, module, world.device)
    packed = replace(precision_of(precision), frozen=job.rest)
    plans: list[Plan] = []
    try:
        for recomputes in (True,) if job.recompute else (False, True):
            if recomputes:
                recompute(module, job.model)
            plans.append(
                plan(
                    module, world_size=world.world_size, seq=job.seq, batch=job.batch,
                    accumulate=job.accumulate, precision=packed, stage=job.stage,
                    offload="none" if job.offload is None else _tier(job.offload),
                    recompute=recomputes,
                )
            )  # fmt: skip
            if plans[-1].fits:
                break
    except (Untraceable, ConfigError) as error:
        return _unplanned(job, precision, str(error).splitlines()[0])
    best = plans[-1]
    if not best.fits:
        lines = "; ".join(best.explain()[:2])
        hint = "fewer tokens (--seq, --batch), --lora 16, more ranks, or --offload disk:PATH"
        wanted = f"a way to train {job.model!r} on {world.world_size} ranks"
        raise ConfigError(wanted, lines, hint=hint)
    taken = best.taken
    offload = job.offload if job.offload not in (AUTO, None) else best.offload
    way = Way(taken.stage, offload, precision, best.recompute, taken.forecast.memory_nbytes, "")
    return replace(way, line=_line(way, job, module))


def _tier(offload: str) -> str:
    """Return the word by which a plan knows the tiers."""
    return offload.partition(":")[0]


def _unplanned(job: FinetuneJob, precision: PrecisionWord | None, reason: str) -> Way:
    stage = 3 if job.stage == AUTO else job.stage
    offload = None if job.offload == AUTO else job.offload
    words = f"stage {stage}, not planned: {reason}"
    return Way(int(stage), offload, precision, job.recompute, 0, words)


def _line(way: Way, job: FinetuneJob, module: nn.Module) -> str:
    parts = [f"stage {way.stage}"]
    parts += [f"offload {way.offload}"] * bool(way.offload)
    parts += ["recompute"] * way.recompute
    parts += [f"{way.precision} compute"] * bool(way.precision)
    parts += [f"LoRA of rank {job.lora}"] * bool(job.lora)
    parts += [f"a base in {job.rest}"] * bool(job.rest)
    weights = {str(p.dtype).removeprefix("torch.") for p in module.parameters()}
    parts += [f"weights in {' and '.join(sorted(weights))}"]
    return f"{', '.join(parts)}: planned peak of a rank {format_bytes(way.peak_nbytes)}"


def save_weights(module: nn.Module, tokenizer: Any, folder: str, world: World) -> None:
    """Write a model and its tokenizer for `from_pretrained`. A collective.

    Each rank writes its own rows. Trainer's `save_model` would write whole weights a second time,
    from files that rank 0 has mapped.
    """
    onefold.save_pretrained(module, folder)
    first(world.group, lambda: tokenizer.save_pretrained(folder))
