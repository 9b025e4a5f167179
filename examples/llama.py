"""A Llama from its config: `torchrun --nproc-per-node 2 examples/llama.py`.

Random weights, bf16 compute; needs the `hf` extra. The module is
unchanged: no wrapper class, no list of layer names.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import onefold

config = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)
torch.manual_seed(0)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
onefold.shard(model, optimizer, stage=3, precision="bf16")

report = onefold.report(model)
device = next(model.parameters()).device
for _ in range(10):
    rows = torch.randint(0, 256, (8, 64))  # the same on every rank
    tokens = rows[report.rank :: report.world_size].to(device)  # own rows for each
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
if report.rank == 0:
    print(f"loss {loss.item():.3f}")
    print(onefold.report(model))
