"""Laws of `onefold.hf.prefill`: chunks of a prompt pass through one block before the next."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import onefold
from onefold.engine.registry import engine_of
from tests.adapters.test_huggingface import mixtral
from tests.inference.test_generate import HELD, plain
from tests.inference.test_generating import deep_llama, gathers, unsharded_nbytes
from tests.support.hf_ranks import run_forks
from tests.support.ranks import seeded
from tests.support.rows import again_but

CHUNK = 5


def gemma() -> nn.Module:
    """Sliding and full attention, and a head that is tied to the embedding."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma2Config(
        vocab_size=40, hidden_size=32, intermediate_size=44, num_hidden_layers=4, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=8, layer_types=kinds,
        initializer_range=0.5, attn_implementation="eager",
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config)


def gpt2() -> nn.Module:
    """Learned positions, and a head that is tied to the embedding."""
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=64, n_embd=32, n_layer=3, n_head=2, initializer_range=0.5
    )
    return transformers.GPT2LMHeadModel(config)


def chunk_by_chunk(model: Any, ids: Tensor, mask: Tensor) -> Any:
    """The passes that `prefill_chunk_size` makes, all but the last token."""
    cache, start = transformers.DynamicCache(config=model.config), 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        for part in ids[:, :-1].split(CHUNK, dim=1):
            end = start + part.shape[1]
            model(
                part, past_key_values=cache, use_cache=True, logits_to_keep=1,
                attention_mask=mask[:, :end], position_ids=positions[:, start:end],
            )  # fmt: skip
            start = end
    return cache


def is_same(one: Any, other: Any) -> bool:
    pairs = zip(one.layers, other.layers, strict=True)
    return all(torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in pairs)


MODELS = {"llama": deep_llama, "gpt2": gpt2, "mixtral": mixtral, "gemma": gemma}


def prefilled(rank: int, model: str) -> None:
    ids = torch.randint(2, 40, (2, 18 + 5 * rank), generator=torch.Generator().manual_seed(rank))
    mask = torch.ones_like(ids)
    ids[0, : 1 + rank] = mask[0, : 1 + rank] = 0
    resident = seeded(MODELS[model]).eval()
    module: Any = HELD["stage 3"](seeded(MODELS[model]).eval())
    wanted = chunk_by_chunk(resident, ids, mask)
    with torch.no_grad():
        module(ids)
    units, peak = gathers(module), onefold.report(module).memory["unsharded"]["device"].peak
    found = onefold.hf.prefill(module, ids, chunk=CHUNK, attention_mask=mask)
    assert gathers(module) == 2 * units, "one gather a unit, for four chunks or five"
    assert is_same(found, wanted)
    assert unsharded_nbytes(module) == 0
    if model == "llama":  # nothing is tied: the embedding stays for all chunks, nothing else does
        embedding = engine_of(module).units[0].unsharded.tensor.nbytes
        assert onefold.report(module).memory["unsharded"]["device"].peak == peak + embedding
    assert is_same(onefold.hf.prefill(resident, ids, chunk=CHUNK, attention_mask=mask), wanted)
    tokens = plain(module, ids, attention_mask=mask, past_key_values=found)
    assert torch.equal(tokens, plain(resident, ids, attention_mask=mask, past_key_values=wanted))
    assert torch.equal(tokens, plain(resident, ids, attention_mask=mask))
    with onefold.generating(module):
        begun = gathers(module)
        kept = onefold.hf.prefill(module, ids, chunk=CHUNK, attention_mask=mask)
        assert torch.equal(plain(module, ids, attention_mask=mask, past_key_values=kept), tokens)
        assert gathers(module) == begun + len(engine_of(module).units)
    fails(module, ids)


def fails(module: Any, ids: Tensor) -> None:
    """A forward that fails ends all others, and the next one is as before."""
    blocks = max((p for p in module.modules() if isinstance(p, nn.ModuleList)), key=len)
    calls = []

    def fail(*_: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("a bad chunk")

    handle = blocks[-1].register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="a bad chunk"):
        onefold.hf.prefill(module, ids, chunk=CHUNK)
    handle.remove()
    assert unsharded_nbytes(module) == 0
    with torch.no_grad():
        module(ids)
    for chunk in (0, -1):
        with pytest.raises(onefold.ConfigError, match="chunks of one token"):
            onefold.hf.prefill(module, ids, chunk=chunk)


@again_but("llama", "gemma")
@pytest.mark.parametrize("model", MODELS)
def test_chunks_of_a_prompt_gather_each_unit_once_and_give_the_same_cache(model):
    run_forks(2, prefilled, model)
