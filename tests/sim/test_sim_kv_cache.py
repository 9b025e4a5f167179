"""Keys and values in tiers on the simulated device: blocks go to CPU memory and to disk."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
from transformers import DynamicCache

import onefold.hf
from onefold.inference import token_store
from tests.inference import test_kv_cache as caches
from tests.sim import building
from tests.sim.ranks import run_sim
from tests.sim.training import device
from tests.support.ranks import seeded

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(building.missing() is not None, reason=f"needs {building.missing()}"),
]


def generated(rank: int, folder: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Tokens and logits of each tier, whose blocks are small, beyond an eighth on the device."""
    token_store.BLOCK_NBYTES, token_store.RUN_NBYTES = 4096, 4 * 4096
    model = seeded(caches.llama).eval().to(device())
    budget = caches.context_nbytes(model, 1, caches.PROMPT) // 8
    found = {}
    for tier, more in {"cpu": {"cpu_budget": 1 << 23}, "disk": {"disk": folder}}.items():
        cache = onefold.hf.KVCache(budget, **more)
        ids = caches.prompts().to(device())
        said = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=40,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        held = cache.report().held
        assert held[tier] > held["device"]
        found[tier] = said.sequences.cpu(), torch.stack(said.logits).cpu()
    return found


def test_a_cache_in_tiers_gives_the_tokens_and_logits_of_the_cpu(tmp_path):
    wanted = caches.generate(seeded(caches.llama).eval(), DynamicCache(), 1)
    (found,) = run_sim(1, generated, str(tmp_path), backend=None)
    for sequences, logits in found.values():
        assert torch.equal(sequences, wanted.sequences)
        torch.testing.assert_close(logits, torch.stack(wanted.logits))
