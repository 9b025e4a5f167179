"""Trainers for tests: tiny models and rows of data, on ranks that are forked processes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
import transformers
from torch import Tensor, nn

from tests.support.ranks import run_processes, seeded

VOCABULARY, LENGTH, ROWS = 40, 6, 22


def llama(**changes: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=44, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=1,
        pad_token_id=1, **changes,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def rows(num: int = ROWS) -> list[dict[str, Tensor]]:
    """Rows whose labels count for unequal numbers of tokens."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(num):
        words = torch.randint(2, VOCABULARY, (LENGTH,), generator=generator)
        labels = words.clone()
        labels[: index % 4] = -100
        found.append({"input_ids": words, "labels": labels})
    return found


def arguments(folder: Path, **changes: Any) -> transformers.TrainingArguments:
    """Arguments of a short run that logs each step."""
    wanted: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 2,
        "logging_steps": 1, "learning_rate": 1e-2, "report_to": "none", "use_cpu": True,
        "save_strategy": "no", "disable_tqdm": True, "weight_decay": 0.1,
        "dataloader_pin_memory": False, "logging_nan_inf_filter": False,
    }  # fmt: skip
    return transformers.TrainingArguments(**(wanted | changes))


def trainer_of(
    folder: Path, *callbacks: Any, kind: type = transformers.Trainer,
    build: Callable[[], nn.Module] = llama, data: Any = None, model: nn.Module | None = None,
    options: dict[str, Any] | None = None, **changes: Any,
) -> Any:  # fmt: skip
    """A Trainer of a seeded model; `changes` are of its arguments, `options` its own."""
    return kind(
        model=seeded(build) if model is None else model, args=arguments(folder, **changes),
        train_dataset=rows() if data is None else data, callbacks=list(callbacks),
        **(options or {}),
    )  # fmt: skip


def logs(trainer: Any) -> list[tuple[float, float]]:
    """The loss and the gradient norm of each logged step."""
    return [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "grad_norm" in e]


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Unsharded weights, on every rank: of a DDP run's model or of a sharded one."""
    found = {}
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found[name] = full.detach().clone()
    return found


def on_ranks(world_size: int, body: Callable[..., None], *args: Any, **options: Any) -> None:
    """Call the module-level `body(rank, *args)` on forked ranks, as torchrun would start them."""
    run_processes(world_size, _as_under_torchrun, world_size, body, args, **options)


def _as_under_torchrun(
    rank: int, world_size: int, body: Callable[..., None], args: tuple[Any, ...]
) -> None:
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
    }
    os.environ |= {name: str(value) for name, value in own.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "ACCELERATE_USE_CPU": "true"}
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    body(rank, *args)
