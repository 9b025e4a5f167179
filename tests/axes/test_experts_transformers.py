"""Mixture-of-experts models of transformers on an expert axis, in real processes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import onefold
from tests.support import experts
from tests.support.ranks import run_processes, seeded

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 5},
    "Qwen3Moe": {"num_experts": 5, "moe_intermediate_size": 12, "head_dim": 8},
}


def model_of(kind: str) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(**SMALL | CONFIGS[kind])
    model = seeded(getattr(transformers, f"{kind}ForCausalLM"), config).double()
    model.set_experts_implementation("eager")  # grouped products are not there for fp64
    return model


def tokens_of(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 32, (1 + rank % 2, 3 + rank), generator=generator)


def loss_of(model: nn.Module, rank: int) -> Tensor:
    tokens = tokens_of(rank)
    return model(input_ids=tokens, labels=tokens).loss


def spread(rank: int, wanted: dict[str, dict[str, Tensor]]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "expert"))
    for stage, (kind, gradients) in enumerate(wanted.items(), 2):
        model = model_of(kind)
        found = onefold.experts.distribute(model, mesh["expert"])
        assert len(found) == 2, "one in each layer"
        onefold.shard(model, stage=stage, units=dict.fromkeys(found, mesh["replica"]))
        loss_of(model, rank).backward()
        own = {n: experts.whole(p.grad) for n, p in model.named_parameters()}
        assert experts.error(own, gradients) < 1e-12, kind
        with torch.no_grad(), onefold.generating(model):
            model.generate(tokens_of(0), max_new_tokens=3)


@pytest.mark.process
def test_models_of_transformers_have_the_gradients_of_one_process():
    wanted = {}
    for kind in CONFIGS:
        model = model_of(kind)
        for rank in range(4):
            (loss_of(model, rank) / 4).backward()
        wanted[kind] = {name: p.grad for name, p in model.named_parameters()}
    run_processes(4, spread, wanted)


def skips(rank: int) -> None:
    model, _ = experts.sharded(experts.Axis(2, 2))
    rows = experts.rows_of(rank, 4, 1)
    with torch.no_grad(), onefold.generating(model):
        model(rows)  # gathers all units
        if rank == 2:  # the other rank of its expert axis is 3
            with pytest.raises(onefold.WireError) as caught:
                model(rows)
            assert "exchange of tokens of 'blocks.0.experts'" in str(caught.value)
            assert re.search(r"^  ranks? (\d, )*3: a collective of torch", str(caught.value), re.M)
        elif rank < 2:
            model(rows)
        dist.barrier()


@pytest.mark.process
def test_a_rank_that_leaves_out_a_forward_is_named_with_the_block():
    run_processes(4, skips)
