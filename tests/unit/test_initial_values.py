"""Values of a module that was built on `meta`: those of its constructor, or of the files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Literal, TypeVar

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import onefold
from onefold.unit import deferred
from onefold.unit.deferred import Deferred
from tests.support.ranks import run_ranks
from tests.support.rows import worlds_in_turn

M = TypeVar("M", bound=nn.Module)

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _every_value_is_dropped(monkeypatch):
    """Tensors of these tests are smaller than those whose values are dropped and made again."""
    monkeypatch.setattr(deferred, "LEAST_NBYTES", 0)


class Parent(nn.Module):
    """Has a mask that is in no file, and resets its children, as its constructor does."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(8), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.mask.fill_(1.0)
        nn.init.orthogonal_(self.inner.weight)
        nn.init.trunc_normal_(self.inner.bias, std=2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.mask


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(9, 8, padding_idx=0), Parent(), nn.MultiheadAttention(8, 2), nn.GRU(8, 5),
        nn.BatchNorm1d(5), Parent(),
    )  # fmt: skip


class ByRule(nn.Module):
    """Initializes by methods that need no arguments, or a module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.embed, self.head = nn.Linear(8, 8), nn.Embedding(8, 8), nn.Linear(8, 8)
        self.head.weight = self.embed.weight
        self.init_weights()

    def init_weights(self, scale: float = 1.0) -> None:
        nn.init.xavier_normal_(self.inner.weight, scale)
        nn.init.normal_(self.head.weight, std=0.02)


class Written(nn.Module):
    """Initializes in its constructor what the rule of a part initializes otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        nn.init.xavier_normal_(self.inner.weight)


class Named(Written):
    """Its rule wants the name of a module, too."""

    def _init_weights(self, module: nn.Module, name: str) -> None: ...


class Tied(nn.Module):
    """Two modules show one weight; only the constructor knows which of them has made it."""

    def __init__(self, *, is_from_head: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)
        maker, other = (self.head, self.embed) if is_from_head else (self.embed, self.head)
        other.weight = maker.weight


class FromConfig(nn.Module):
    """Draws in its constructor alone; `torch.Tensor(n)` is real on `meta`, too."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config
        self.old = nn.Parameter(torch.Tensor(3).uniform_())
        self.new = nn.Parameter(torch.randn(config.width, 3) * 0.1)
        self.table = nn.Parameter(torch.ones(config.width))
        self.nothing = nn.Parameter(torch.empty(0, config.width))
        layer = nn.TransformerEncoderLayer(8, 2, config.width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)  # which copies the layer
        self.register_buffer("angles", torch.ones(3, 3).tril().cumsum(0), persistent=False)
        for name, parameter in self.layers.named_parameters():
            if name.endswith("linear2.weight"):
                nn.init.normal_(parameter, std=0.02 / len(self.layers.layers))


class OldMemory(nn.Module):
    """Has a tensor that is real on `meta` and that nothing has written, as far as torch counts."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config
        self.old = nn.Parameter(torch.Tensor(config.width))
        self.old.data.uniform_(1, 2)  # what lies there; `.data` counts no version
        self.constant = nn.Parameter(torch.from_numpy(np.arange(3.0)))
        self.new, self.last = nn.Linear(3, 3), nn.Linear(3, 3)


def clip() -> nn.Module:
    sizes = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }  # fmt: skip
    ids = {"vocab_size": 32, "eos_token_id": 1, "bos_token_id": 0}
    config = transformers.CLIPConfig(
        text_config={**sizes, **ids, "max_position_embeddings": 8},
        vision_config={**sizes, "image_size": 8, "patch_size": 4}, projection_dim=8,
    )  # fmt: skip
    return transformers.CLIPModel(config)


def t5(**options: object) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, **options
    )
    return transformers.T5ForConditionalGeneration(config)


def mamba() -> nn.Module:
    config = transformers.MambaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4
    )
    return transformers.MambaForCausalLM(config)


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=32, d_model=16, encoder_layers=1, encoder_attention_heads=2, decoder_layers=1,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=8,
        max_source_positions=10, max_target_positions=10, pad_token_id=0,
    )  # fmt: skip
    return transformers.WhisperModel(config)


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "by its own rule": ByRule,
    "from a configuration": lambda: FromConfig(SimpleNamespace(width=6)),
    "inside another module": lambda: nn.Sequential(nn.Linear(3, 3), t5(), nn.Linear(3, 3)),
    "clip": clip, "t5": t5, "mamba": mamba, "whisper": whisper,
}  # fmt: skip


def on_meta(build: Callable[[], M]) -> M:
    with torch.device("meta"):
        return build()


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, also those that no state dict has."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: value.detach().clone() for name, value in named.items()}


def sharded(module: nn.Module, stage: Literal[0, 3] = 3) -> dict[str, Tensor]:
    onefold.shard(module, stage=stage)
    with onefold.unsharded(module):
        return tensors(module)


def assert_equal(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(got) == list(wanted)
    assert [name for name, value in wanted.items() if not torch.equal(got[name], value)] == []


@worlds_in_turn
@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (3, 3), (2, 0)])
def test_initial_values_on_meta_are_those_of_the_constructor(kind, world_size, stage):
    build = BUILDERS[kind]
    torch.manual_seed(3)
    wanted, end = tensors(build()), torch.get_rng_state()
    modules = [on_meta(build) for _ in range(world_size)]
    torch.manual_seed(3)
    for got in run_ranks(world_size, lambda rank: sharded(modules[rank], stage)):
        assert_equal(got, wanted)
    assert torch.equal(torch.get_rng_state(), end)


def test_a_model_in_another_dtype_draws_in_that_dtype():
    def build() -> nn.Module:
        config = transformers.T5Config(
            vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2
        )
        return transformers.AutoModelForSeq2SeqLM.from_config(config, dtype=torch.bfloat16)

    torch.manual_seed(3)
    wanted = tensors(build())
    assert wanted["shared.weight"].dtype is torch.bfloat16
    module = on_meta(build)
    torch.manual_seed(3)
    assert_equal(sharded(module), wanted)
    assert torch.get_default_dtype() is torch.float32


def test_a_model_that_differs_from_its_configuration_follows_the_rules_of_its_library():
    """T5's attention draws through its parent, with a spread that depends on its widths."""

    def build() -> nn.Module:
        model = t5()
        model.extra = nn.Linear(16, 3)
        return model

    got, wanted = sharded(on_meta(build)), tensors(build())
    assert list(got) == list(wanted)
    for name, value in got.items():
        assert value.isfinite().all(), name
        if value.numel() > 64:
            assert 0.7 < value.std() / wanted[name].std() < 1.4, name
    assert got["encoder.block.0.layer.0.layer_norm.weight"].eq(1).all()


@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("build", [plain, clip, whisper], ids=["plain", "clip", "whisper"])
def test_loaded_values_are_never_initialised(tmp_path, build, world_size):
    torch.manual_seed(3)
    first = build()
    save_file(
        {k: v.contiguous() for k, v in first.state_dict().items()}, tmp_path / "a.safetensors"
    )
    torch.manual_seed(4)

    def body(rank: int) -> dict[str, Tensor]:
        module = modules[rank]
        onefold.load_pretrained(module, tmp_path)
        return sharded(module)

    modules = [on_meta(build) for _ in range(world_size)]
    before = torch.get_rng_state()
    for got in run_ranks(world_size, body):
        assert_equal(got, tensors(first))
    if build is not plain:  # orthogonal_ draws for a tensor of its own
        assert torch.equal(torch.get_rng_state(), before), "nothing is drawn for values of files"


@pytest.mark.parametrize("build", [plain, clip], ids=["plain", "clip"])
def test_a_partial_load_leaves_the_rest_to_initialisers(build):
    first = build()
    state = first.state_dict()
    dropped = [name for name in state if name.endswith(("inner.bias", "position_embedding.weight"))]
    assert dropped
    kept = {name: value for name, value in state.items() if name not in dropped}

    def body(rank: int) -> dict[str, Tensor]:
        modules[rank].load_state_dict(copy.deepcopy(kept), strict=False, assign=True)
        return sharded(modules[rank])

    modules = [on_meta(build) for _ in range(2)]
    for got in run_ranks(2, body):
        assert_equal({name: got[name] for name in kept}, kept)
        for name in set(got) - set(kept):
            assert got[name].isfinite().all(), name
        for name in dropped:
            assert got[name].std() > 0, name
            assert not torch.equal(got[name], state[name]), name


def test_a_load_that_is_not_strict_leaves_the_rest_to_initialisers(tmp_path):
    first = clip()
    kept = {k: v.contiguous() for k, v in first.state_dict().items() if "logit_scale" not in k}
    save_file(kept, tmp_path / "a.safetensors")

    def body(rank: int) -> dict[str, Tensor]:
        with pytest.raises(onefold.CheckpointError, match="logit_scale"):
            onefold.load_pretrained(modules[rank], tmp_path)
        onefold.load_pretrained(modules[rank], tmp_path, strict=False)
        got = sharded(modules[rank])
        onefold.load_pretrained(modules[rank], tmp_path, strict=False)
        with onefold.unsharded(modules[rank]):
            assert_equal(tensors(modules[rank]), got)
        return got

    modules = [on_meta(clip) for _ in range(3)]
    with pytest.warns(UserWarning, match="not in the files, so not loaded: logit_scale"):
        found = run_ranks(3, body)
    for got in found:
        assert_equal(got, tensors(first))  # logit_scale is a constant of the configuration


def test_an_initialiser_that_writes_on_one_rank_only_is_refused_on_all_and_nothing_is_changed():
    class OnRank0(nn.Linear):
        writes = True

        def reset_parameters(self) -> None:
            if self.writes:
                super().reset_parameters()

    def body(rank: int) -> None:
        modules[rank].get_submodule("1").writes = rank == 0
        with pytest.raises(onefold.ConfigError, match=r"OnRank0(.|\n)*1\.weight(.|\n)*hint: "):
            onefold.shard(modules[rank])
        assert rank == 0 or all(p.is_meta for p in modules[rank].parameters())

    modules = [on_meta(lambda: nn.Sequential(nn.Linear(3, 3), OnRank0(3, 3))) for _ in range(3)]
    run_ranks(3, body)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (Written, r"make all initial values of 'inner\.weight'(.|\n)*hint: .*init_weights"),
        (Named, r"make all initial values of 'inner\.weight'(.|\n)*hint: .*init_weights"),
        (
            Tied,
            r"one module to initialize 'head\.weight'.*Embedding and Linear\nhint: .*init_weights",
        ),
        (lambda: Tied(is_from_head=True), r"one module to initialize 'head\.weight'"),
    ],
    ids=["written by a constructor", "a rule by name", "tied", "tied from the last"],
)
def test_values_that_only_a_constructor_makes_are_refused_by_name(build, said):
    with torch.device("meta"):
        module = build()
    with pytest.raises(onefold.ConfigError, match=said):
        onefold.shard(module, stage=3)
    assert all(p.is_meta for p in module.parameters())
    loaded = dict(build().state_dict())
    module.load_state_dict(loaded, assign=True)
    assert_equal(sharded(module), loaded)


def test_a_module_of_inference_mode_has_the_values_of_its_constructor():
    torch.manual_seed(3)
    wanted = tensors(ByRule())
    with torch.inference_mode():
        module = on_meta(ByRule)
    torch.manual_seed(3)
    assert_equal(sharded(module), wanted)


def test_a_buffer_that_nobody_computes_is_named():
    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.register_buffer("mask", torch.ones(3, dtype=torch.long), persistent=False)

    with pytest.raises(onefold.ConfigError, match=r"0\.mask"):
        onefold.shard(on_meta(lambda: nn.Sequential(Masked())))


# operations


def read_and_written(tensor: Tensor) -> Tensor:
    return tensor.normal_().t()[1:].copy_(torch.rand(tensor.shape[1] - 1, tensor.shape[0]))


def copied_and_changed(tensor: Tensor, source: Tensor) -> None:
    tensor.copy_(source)
    source.zero_()
    tensor.add_(source)


PROGRAMS: dict[str, Callable[[Tensor], object]] = {
    "orthogonal": nn.init.orthogonal_,
    "truncated": lambda t: nn.init.trunc_normal_(t, std=2.0),
    "sparse": lambda t: nn.init.sparse_(t, 0.5),
    "written twice": lambda t: (t.normal_(), t[1].zero_(), t.mul_(2), t[:, 0].uniform_()),
    "read": read_and_written,
    "permuted": lambda t: t.copy_(torch.randperm(t.numel()).view_as(t) + torch.randint(9, t.shape)),
    "other tensors": lambda t: t.copy_(torch.randn_like(t).add_(torch.full_like(t, 2).tril_())),
    "a source that changes": lambda t: copied_and_changed(t, torch.rand(t.shape)),
    "a choice by values": lambda t: t.fill_(1) if torch.rand(5).sum().item() > 1 else t.zero_(),
    "numpy": lambda t: t.copy_(torch.tensor(torch.rand(t.shape).numpy())),
    "a copied buffer": lambda t: t.copy_(copy.deepcopy(torch.rand(t.shape)) + 1),
    "an own generator": lambda t: t.normal_(generator=torch.Generator().manual_seed(5)),
    "its data": lambda t: t.data.bernoulli_(0.5),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_values_that_are_made_again_are_those_of_a_plain_program(program):
    torch.manual_seed(3)
    wanted, after = torch.zeros(4, 5), torch.zeros(2, 3)
    with torch.no_grad():
        PROGRAMS[program](wanted)
        after.uniform_()
    end = torch.get_rng_state()
    torch.manual_seed(3)
    made = Deferred(torch.device("cpu"))
    got, others = made.blank(wanted), made.blank(after)
    with made, torch.no_grad():
        PROGRAMS[program](got)
        others.uniform_()
    assert got.untyped_storage().nbytes() == 0, "its values should be dropped"
    for tensor, value in ((others, after), (got, wanted)):
        assert not made.is_unset(tensor)
        made.settle(tensor)
        assert torch.equal(tensor, value)
    made.advance()
    assert torch.equal(torch.get_rng_state(), end)


def test_a_draw_that_takes_no_generator_is_refused_by_its_name():
    made = Deferred(torch.device("cpu"))
    with pytest.raises(onefold.ConfigError, match=r"native_dropout(.|\n)*hint: "), made:
        torch.native_dropout(torch.ones(3), 0.5, train=True)


@pytest.mark.parametrize("loaded", ["new.", ("new.", "constant")])
def test_old_memory_is_not_taken_for_loaded_values(loaded):
    """Where all of the model is missing, its constructor runs once more: no value is given."""
    first = OldMemory(SimpleNamespace(width=4))
    kept = {name: value for name, value in first.state_dict().items() if name.startswith(loaded)}
    module = on_meta(lambda: OldMemory(SimpleNamespace(width=4)))
    module.load_state_dict(copy.deepcopy(kept), strict=False, assign=True)
    with pytest.raises(onefold.ConfigError, match=r"parameter 'old' on the meta(.|\n)*hint: build"):
        onefold.shard(module)
    assert any(p.is_meta for p in module.parameters())


def test_constants_that_are_real_on_meta_stay_in_a_part_of_a_load():
    first = OldMemory(SimpleNamespace(width=4))
    kept = {n: v for n, v in first.state_dict().items() if n.startswith(("old", "new."))}
    module = on_meta(lambda: OldMemory(SimpleNamespace(width=4)))
    module.new.load_state_dict(first.new.state_dict(), assign=True)
    with torch.no_grad():
        module.old.copy_(first.old)  # as load_state_dict without `assign`: a write that counts
    got = sharded(module)
    assert_equal({name: got[name] for name in kept}, kept)
    assert got["constant"].tolist() == [0, 1, 2]
