"""A `tp_plan` of transformers cuts the matrices; norms stay plain, as the plan means it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

import onefold
from onefold.compose.cut_axes import HOOKED
from tests.axes.test_tensor_parallel import check_close, grads_of, weights_of
from tests.support.ranks import every_rank, run_ranks, seeded
from tests.support.rows import again_but

pytest.importorskip("transformers")

VOCAB, LENGTH = 32, 6


def build(kind: str) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False,
        attn_implementation="eager",
    )  # fmt: skip
    return seeded(getattr(transformers, f"{kind}ForCausalLM"), config).double()


def cut(model: Any, mesh: Any) -> None:
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(model.tp_plan))


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits  # the model's own loss is computed in fp32
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def rows() -> Tensor:
    return torch.randint(0, VOCAB, (2, 2, LENGTH), generator=torch.Generator().manual_seed(0))


def trained(rank: int, kind: str, stage: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = build(kind)
    cut(model, mesh["tp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    onefold.shard(model, optimizer, stage=stage, mesh=mesh["dp"])
    norm = model.model.norm.weight
    assert isinstance(norm, DTensor)
    wanted = (Replicate(),) if stage == 0 else (Replicate(), Shard(0))
    assert norm.placements == wanted
    grads = []
    for _ in range(2):
        loss_of(model, rows()[mesh["dp"].get_local_rank()]).backward()
        grads.append(grads_of(model))
        found = onefold.clip_grad_norm_(model, math.inf)
        wanted_norm = math.sqrt(sum(float(grad.norm()) ** 2 for grad in grads[-1].values()))
        assert float(found) == pytest.approx(wanted_norm, rel=1e-12)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        logits = model.eval()(input_ids=rows()[0]).logits
    return grads, weights_of(model), logits


@again_but("Qwen3")
@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_a_model_that_transformers_has_cut_trains_as_in_one_process(kind):
    """Qwen3 sums the gradients of its q_norm and k_norm in hooks: before any reduction."""
    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wanted = []
    for _ in range(2):
        loss_of(model, rows().flatten(0, 1)).backward()
        wanted.append(grads_of(model))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        logits = model.eval()(input_ids=rows()[0]).logits
    for stage in (0, 3):
        for grads, weights, evaluated in run_ranks(4, trained, kind, stage):
            for found, each in zip(grads, wanted, strict=True):
                check_close(found, each, 1e-12)
            check_close(weights, weights_of(model), 1e-12)
            assert (evaluated - logits).abs().max() < 1e-10


@every_rank(2)
def test_transformers_still_marks_the_modules_of_its_plans(rank):
    """`compose/cut_axes.py` accepts plain parameters only on such a model.

    If this fails, plain norms of a model that transformers has cut are refused, with a message that
    names one: look for the new mark in transformers/distributed/tensor_parallel.py.
    """
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = build("Llama")
    cut(model, mesh["tp"])
    assert model.model.layers[0].mlp.up_proj.__dict__[HOOKED] is True
    assert not isinstance(model.model.norm.weight, DTensor)
