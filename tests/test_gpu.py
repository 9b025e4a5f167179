"""On a CUDA device: the same losses as on the CPU, and no memory left behind."""

from __future__ import annotations

import pytest
import torch

import onefold
from tests.models import Model, next_token_loss, token_batches
from tests.ranks import seeded

pytestmark = pytest.mark.gpu


def losses(device: str, stage: int, precision: str | None) -> torch.Tensor:
    module = seeded(Model).to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer, stage=stage, precision=precision)
    found = []
    for batch in token_batches():
        loss = next_token_loss(module, batch.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().float().cpu())
    return torch.stack(found)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("precision", "relative"), [(None, 1e-4), ("bf16", 2e-2)])
def test_a_gpu_computes_the_losses_of_the_cpu(stage, precision, relative):
    wanted = losses("cpu", stage, None)
    torch.testing.assert_close(losses("cuda", stage, precision), wanted, rtol=relative, atol=0)


def test_a_deleted_model_leaves_no_memory_on_the_device():
    losses("cuda", 3, "bf16")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    losses("cuda", 3, "bf16")
    assert torch.cuda.memory_allocated() == before
