"""The plain script, sharded: alone, or `torchrun --nproc-per-node 2 examples/train_sharded.py`.

`onefold.shard` is the one line that shards it; another gives each rank its own rows of the batch.
"""

import torch
from torch import nn
from torch.nn import functional as F

import onefold


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.head(x)


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
onefold.shard(model, optimizer, stage=3)  # the one line
report = onefold.report(model)

device = next(model.parameters()).device
text = torch.tensor(list(b"the same bytes, over and over, until the model knows them. " * 40))
for step in range(20):
    starts = torch.randint(0, len(text) - 33, (8,))
    starts = starts[report.rank :: report.world_size]  # own rows for each rank
    batch = torch.stack([text[start : start + 33] for start in starts]).to(device)
    logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.4f}")
