"""A module on `meta` gets the values of its files, however it is wrapped before it is sharded."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import onefold
from onefold.errors import ConfigError
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import worlds_in_turn


class Adapted(nn.Module):
    """A Linear beside a small product, as LoRA wraps it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 2, bias=False, device="meta")
        self.up = nn.Linear(2, base.out_features, bias=False, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


class Outer(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 5), nn.BatchNorm1d(5))


def promised(folder: Path) -> nn.Sequential:
    with torch.device("meta"):
        module = plain()
    onefold.load_pretrained(module, folder)
    return module


def saved(folder: Path) -> dict[str, Tensor]:
    state = seeded(plain, seed=3).state_dict()
    save_file(state, folder / "model.safetensors")
    return state


def in_a_wrapper(module: nn.Module) -> nn.Module:
    return Outer(module)


def with_adapters(module: nn.Sequential) -> nn.Module:
    first = module[0]
    assert isinstance(first, nn.Linear)
    module[0] = Adapted(first)
    return Outer(module)


def copied(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module)


def compared(name: str) -> str:
    return name.removeprefix("model.").replace(".base_layer", "")


@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("wrap", [in_a_wrapper, with_adapters, copied])
def test_a_wrapped_module_has_the_values_of_the_files(tmp_path, wrap, stage, world_size):
    wanted = saved(tmp_path)

    def body(rank: int) -> None:
        module = wrap(promised(tmp_path))
        onefold.shard(module, stage=stage)
        state = onefold.full_state_dict(module, rank0_only=False)
        found = {compared(name): value for name, value in state.items()}
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        assert all(value.isfinite().all() for value in state.values())

    run_ranks(world_size, body)


def replaced(module: nn.Sequential) -> nn.Sequential:
    module[2] = nn.Linear(12, 5, device="meta")
    return module


@pytest.mark.parametrize("wrap", [replaced, lambda module: Outer(replaced(module))])
def test_a_module_that_took_the_place_of_a_promised_one_is_refused(tmp_path, wrap):
    """It would keep random values, where a user expects those of the files."""
    saved(tmp_path)

    def body(rank: int) -> None:
        with pytest.raises(ConfigError, match=r"2\.weight.*load_pretrained saw"):
            onefold.shard(wrap(promised(tmp_path)))

    run_ranks(2, body)


@pytest.mark.parametrize("word", ["int8", "int4"])
def test_a_frozen_base_is_quantized_while_its_files_are_read(tmp_path, word):
    """The same bytes as of a module that was loaded first."""
    saved(tmp_path)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))

    def outputs(module: nn.Module) -> Tensor:
        module = Outer(module.requires_grad_(False)).eval()
        onefold.shard(module, precision=onefold.Precision(frozen=word))
        return module(x)

    def body(rank: int) -> tuple[Tensor, Tensor]:
        loaded = plain()
        onefold.load_pretrained(loaded, tmp_path)
        onefold.shard(loaded)
        whole = plain()
        whole.load_state_dict(onefold.full_state_dict(loaded, rank0_only=False))
        return outputs(promised(tmp_path)), outputs(whole)

    for found, wanted in run_ranks(3, body):
        assert torch.equal(found, wanted)
