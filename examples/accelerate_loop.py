"""Accelerate with a sharded model: `torchrun --nproc-per-node 2 examples/accelerate_loop.py`.

A small GPT-2 from its config learns to continue the source of Python's own library, byte by byte.
The only change to the Accelerate loop is `onefold.hf.adopt`. It also runs as
`python examples/accelerate_loop.py`, and with `accelerate launch`. Needs the `hf` extra.
"""

import string
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import onefold

LENGTH, ROWS = 64, 64

set_seed(0)
on_cpu = not torch.accelerator.is_available()
accelerator = Accelerator(cpu=on_cpu, gradient_accumulation_steps=2)
config = GPT2Config(
    vocab_size=256,
    n_positions=LENGTH,
    n_embd=64,
    n_layer=2,
    n_head=4,
    bos_token_id=0,
    eos_token_id=0,
)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 8)
text = Path(string.__file__).read_bytes()[: ROWS * LENGTH]
loader = DataLoader(TensorDataset(torch.tensor(list(text)).view(ROWS, LENGTH)), 8)

onefold.hf.adopt(accelerator, model, optimizer, stage=3)  # the one line
set_seed(0, device_specific=True)  # each rank drops elements of its own
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)


def train(epochs: int) -> float:
    for _ in range(epochs):
        losses = []
        for (tokens,) in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach()).mean())
    return float(torch.stack(losses).mean())


first = train(epochs=1)
# a folder that every rank knows; in a run of your own: a path
folder = tempfile.mkdtemp() if accelerator.is_main_process else None
(folder,) = broadcast_object_list([folder])
accelerator.save_state(f"{folder}/state")  # every rank writes its shard
last = train(epochs=2)
accelerator.load_state(f"{folder}/state")  # at any number of ranks, and at any stage
again = train(epochs=2)

accelerator.save_model(model, f"{folder}/model")  # one plain safetensors file
accelerator.print(f"loss {first:.3f}, then {last:.3f}; from the saved state {again:.3f}")
if accelerator.is_main_process:
    print(onefold.report(model))
accelerator.end_training()
