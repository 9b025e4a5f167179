"""Programs that train with a `Trainer`: an operation, and how they are drawn.

Ranks of these programs are processes: a Trainer keeps its state in its process.
"""

from __future__ import annotations

import os
import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import onefold
from tests.support.programs.frame import BUILDING, ROWS, WIDTH, Process


def fit(
    p: Process,
    steps: int = 2,
    micros: int = 1,
    resumes: bool = False,
    mixes: bool = False,
    evaluates: bool = False,
    **changes: Any,
) -> None:
    """Train; `resumes` builds all of it anew in the middle; `mixes` the class for the callback."""
    generator = torch.Generator().manual_seed(1)
    rows = [{"x": row.to(p.program.dtype)} for row in torch.randn(ROWS, WIDTH, generator=generator)]
    folder = f"{p.folder}/{'plain' if p.is_plain else 'sharded'}{p.noted}"
    if dist.is_initialized():
        size, own = dist.get_world_size(), dist.get_rank()
        names = {"RANK": own, "LOCAL_RANK": own, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {name: str(value) for name, value in names.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    world_size = 1 if p.is_plain else p.world_size
    changes = {
        "max_steps": steps, "per_device_train_batch_size": 12 // world_size,
        "gradient_accumulation_steps": micros, "output_dir": folder, "use_cpu": True,
        "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-2,
        "per_device_eval_batch_size": 24 // world_size, "adam_epsilon": 1e-4,
        "save_strategy": "steps" if resumes else "no", "save_steps": max(1, steps // 2),
        "eval_strategy": "epoch" if evaluates else "no", "dataloader_pin_memory": False, **changes,
    }  # fmt: skip
    forget_trainers()
    trainer = a_trainer(p, rows, changes, mixes)
    trainer.train()
    if resumes:
        forget_trainers()
        with BUILDING:
            torch.manual_seed(p.leg)
            p.model = p.program.build().to(p.program.dtype)
        trainer = a_trainer(p, rows, changes, mixes)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{max(1, steps // 2)}")
    for entry in trainer.state.log_history:
        for name in ("loss", "grad_norm", "learning_rate", "eval_loss"):
            if name in entry:
                p.note(name, torch.tensor(float(entry[name]), dtype=torch.float64))
    forget_trainers()


def forget_trainers() -> None:
    """Let the next Trainer begin as in a process that has built none."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def a_trainer(
    p: Process, rows: list[dict[str, Tensor]], changes: dict[str, Any], mixes: bool
) -> Any:
    """A Trainer of the process's module."""
    import transformers

    transformers.utils.logging.set_verbosity_error()

    def compute_loss(self, model, inputs, return_outputs=False, **_):  # type: ignore[no-untyped-def]
        out = model(inputs["x"])
        loss = (out.float() - 1).square().mean()
        return (loss, {"out": out}) if return_outputs else loss

    bases: tuple[type, ...] = (transformers.Trainer,)
    callbacks = []
    if not p.is_plain:
        bases = (onefold.hf.TrainerMixin, *bases) if mixes else bases
        options = {k: v for k, v in p.program.legs[p.leg].options.items() if k != "trainer"}
        callbacks = [onefold.hf.Callback(**p._in_folder(options))]
    kind = type("Losing", bases, {"compute_loss": compute_loss, "can_return_loss": True})
    args = transformers.TrainingArguments(**changes)
    args.remove_unused_columns = False
    trainer = kind(p.model, args, train_dataset=rows, eval_dataset=rows[:24], callbacks=callbacks)
    trainer.can_return_loss = True
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


TRAINED = (
    "Residual()", "Residual(33)", 'Normed("layer")', "Convolved()", "Embedded()", "Frozen()",
    "Recurrent()", "Attends()", "Unused()", "Shared()", "Borrowed()", "Buffered()", "Stacked()",
    "nn.Linear(8, 8)", 'Packed("tuple")', "Recomputed(Residual())", "Odd((7, 3), (13,))",
    "Experts(2, dense=True)", 'Parametrized("orthogonal")', "nn.PReLU()", "TiedHead()",
)  # fmt: skip
CHOICES = {
    "micros": (1, 2, 3), "resumes": (True, False), "mixes": (True, False),
    "evaluates": (True, False), "max_grad_norm": (0.0, 0.1, 1.0),
    "optim": ("adamw_torch", "adamw_torch_fused", "sgd", "adafactor", "rmsprop", "adagrad"),
    "lr_scheduler_type": ("linear", "cosine", "constant_with_warmup"), "warmup_steps": (0, 2),
    "weight_decay": (0.0, 0.1), "seed": (1, 2), "dataloader_drop_last": (True, False),
}  # fmt: skip


def draw_fit(r: random.Random) -> str:
    """A call of `fit`; about half of its arguments stay at their default."""
    parts = [f"steps={r.choice((2, 3, 4))}"]
    parts += [f"{n}={r.choice(several)!r}" for n, several in CHOICES.items() if r.random() < 0.5]
    return f"fit(p, {', '.join(parts)})"
