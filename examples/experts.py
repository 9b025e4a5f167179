"""A Mixtral with an expert axis: `torchrun --nproc-per-node 4 examples/experts.py`.

    mesh        expert 0   expert 1        ranks 0 and 1 send each other the tokens of their experts
    replica 0   rank 0     rank 1          ranks 0 and 2 hold the same experts, in shards
    replica 1   rank 2     rank 3          all four train on different rows

Random weights; needs the `hf` extra. The model itself is unchanged.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import MixtralConfig, MixtralForCausalLM

import onefold

config = MixtralConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=128,
    output_router_logits=True,
    router_aux_loss_coef=0.0,  # of each rank's own tokens; below is that of all tokens
)
device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replica", "expert"))
torch.manual_seed(0)
model = MixtralForCausalLM(config)

experts = onefold.experts.distribute(model, mesh["expert"])  # each rank keeps its experts
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
units = dict.fromkeys(experts, mesh["replica"])
onefold.shard(model, optimizer, stage=3, units=units)

report = onefold.report(model)
text = torch.tensor(list(b"the same bytes, over and over, until the experts know them. " * 40))
for step in range(20):
    starts = torch.randint(0, len(text) - 32, (16,))  # the same on every rank
    starts = starts[report.rank :: report.world_size]  # own rows for each
    tokens = torch.stack([text[start : start + 32] for start in starts]).to(mesh.device_type)
    out = model(input_ids=tokens, labels=tokens)
    loss = out.loss + 0.01 * onefold.experts.balance_loss(out.router_logits, 2)
    loss.backward()
    onefold.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step in (0, 19):
        mean = out.loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.SUM)
        if report.rank == 0:
            print(f"step {step + 1}: loss {mean.item() / report.world_size:.3f}")
if report.rank == 0:
    print(onefold.report(model))
