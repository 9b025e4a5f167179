"""Files whose names and layouts are transformers': read by rows, and written as its own."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import onefold
from onefold.checkpoint.offline import export
from onefold.checkpoint.safetensors import PretrainedFiles
from onefold.errors import CheckpointError, StateError
from tests.support.ranks import run_ranks
from tests.support.rows import worlds_in_turn

transformers = pytest.importorskip("transformers")

TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
DEEPSEEK = {
    "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip


def of(model: str, config: str, **sizes: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**sizes))


KINDS: dict[str, Callable[[], Any]] = {
    # MergeModulelist, Concatenate and renames: experts one by one
    "experts": of("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, **TEXT),
    # the same, beside a dense layer and shared experts
    "some experts": of("DeepseekV3ForCausalLM", "DeepseekV3Config", **{**TEXT, **DEEPSEEK}),
    # Chunk: queries, keys and values in one matrix
    "split": of("Dinov2Model", "Dinov2Config",
                **{k: v for k, v in VISION.items() if k != "intermediate_size"}),
    # WeightRenaming alone
    "renamed": of("ViTForImageClassification", "ViTConfig", **VISION),
    # PrefixChange
    "prefix": of("CLIPTextModel", "CLIPTextConfig",
                 **{k: v for k, v in TEXT.items() if k != "num_key_value_heads"}),
    # names as in the module
    "exact": of("LlamaForCausalLM", "LlamaConfig", **TEXT),
    "tied": of("LlamaForCausalLM", "LlamaConfig", tie_word_embeddings=True, **TEXT),
}  # fmt: skip


def built(build: Callable[[], Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return build().eval()


def on_meta(build: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return build().eval()


def content(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Names, dtypes and shapes in a folder's files."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                part = file.get_slice(name)
                found[name] = part.get_dtype(), part.get_shape()
    return found


def assert_equal(found: dict[str, Any], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@worlds_in_turn
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("build", KINDS.values(), ids=KINDS)
def test_what_transformers_saves_is_read_and_written_again_alike(tmp_path, build, world_size):
    """On meta, into a sharded module, and back: values, names, dtypes and shapes."""
    model = built(build)
    model.save_pretrained(tmp_path / "theirs")
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    empty = [on_meta(build) for _ in range(world_size)]
    others = [built(build, seed=1) for _ in range(world_size)]

    def body(rank: int) -> list[Any]:
        onefold.load_pretrained(empty[rank], tmp_path / "theirs")
        onefold.shard(empty[rank], stage=3)
        onefold.shard(others[rank], stage=3)
        onefold.load_pretrained(others[rank], tmp_path / "theirs")
        onefold.save_pretrained(others[rank], tmp_path / "ours")
        onefold.save_pretrained(empty[rank], tmp_path / "own", original_names=False)
        return [onefold.full_state_dict(each) for each in (empty[rank], others[rank])]

    for found in run_ranks(world_size, body)[0]:
        assert_equal(found, wanted)
    assert content(tmp_path / "ours") == content(tmp_path / "theirs")
    assert content(tmp_path / "own").keys() <= wanted.keys()
    again = type(model).from_pretrained(tmp_path / "ours")
    assert_equal(again.state_dict(), wanted)


def test_each_rank_reads_its_own_rows_once(tmp_path, monkeypatch):
    """Of fused experts, too: the bytes that all ranks read are those of the files."""
    build = KINDS["experts"]
    model = built(build)
    model.save_pretrained(tmp_path)
    modules = [on_meta(build) for _ in range(3)]
    read: list[int] = []
    box = PretrainedFiles.box

    def counted(files: PretrainedFiles, name: str, wanted: Any) -> Tensor:
        values = box(files, name, wanted)
        read.append(values.nbytes)
        return values

    monkeypatch.setattr(PretrainedFiles, "box", counted)

    def body(rank: int) -> None:
        onefold.load_pretrained(modules[rank], tmp_path)
        onefold.shard(modules[rank], stage=3)

    run_ranks(3, body)
    assert sum(read) == sum(
        value.nbytes for value in load_file(tmp_path / "model.safetensors").values()
    )


def test_names_at_a_load_are_those_of_the_next_save(tmp_path):
    """As in transformers: a file of the base, and gamma and beta."""
    sizes = {k: v for k, v in TEXT.items() if k != "num_key_value_heads"}
    build = of("BertForMaskedLM", "BertConfig", **sizes)
    model = built(build)
    model.save_pretrained(tmp_path / "new")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for name, value in load_file(tmp_path / "new/model.safetensors").items()
    }
    for name in ("old", "theirs"):
        (tmp_path / name).mkdir()
    save_file(old, tmp_path / "old/model.safetensors", {"format": "pt"})
    (tmp_path / "old/config.json").write_text((tmp_path / "new/config.json").read_text())
    type(model).from_pretrained(tmp_path / "old").save_pretrained(tmp_path / "theirs")
    modules = [on_meta(build) for _ in range(2)]

    def body(rank: int) -> None:
        onefold.load_pretrained(modules[rank], tmp_path / "old")
        onefold.shard(modules[rank])
        onefold.save_pretrained(modules[rank], tmp_path / "ours")

    run_ranks(2, body)
    assert content(tmp_path / "ours") == content(tmp_path / "theirs")
    assert any(name.endswith("gamma") for name in content(tmp_path / "ours"))


def test_a_file_of_the_base_fills_a_model_with_a_head(tmp_path):
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    build = of("GPT2LMHeadModel", "GPT2Config", **sizes)
    model = built(build)
    model.transformer.save_pretrained(tmp_path)
    modules = [on_meta(build) for _ in range(2)]

    def body(rank: int) -> Any:
        onefold.load_pretrained(modules[rank], tmp_path)
        onefold.shard(modules[rank])
        return onefold.full_state_dict(modules[rank])

    assert_equal(run_ranks(2, body)[0], model.state_dict())


def test_a_head_that_no_file_has_is_refused_or_drawn_by_the_models_rule(tmp_path):
    model = built(KINDS["exact"])
    model.model.save_pretrained(tmp_path)
    build = of("LlamaForSequenceClassification", "LlamaConfig", num_labels=3, **TEXT)
    modules = [[on_meta(build) for _ in range(2)] for _ in range(2)]

    def strict(rank: int) -> None:
        with pytest.raises(CheckpointError, match=r"score\.weight(?s:.*)strict=False"):
            onefold.load_pretrained(modules[0][rank], tmp_path)

    run_ranks(2, strict)

    with pytest.warns(UserWarning, match=r"not in the files, so not loaded: score\.weight"):
        [onefold.load_pretrained(each, tmp_path, strict=False) for each in modules[1]]

    def body(rank: int) -> Any:
        onefold.shard(modules[1][rank])
        return onefold.full_state_dict(modules[1][rank])

    found = run_ranks(2, body)[0]
    base = model.model.state_dict()
    assert_equal({n: found[f"model.{n}"] for n in base}, base)
    deviation = found["score.weight"].std().item()
    assert 0.3 < deviation / modules[1][0].config.initializer_range < 3


def changed(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def add_fused(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp.experts.down_proj"] = torch.zeros(4, 32, 48)


def drop_expert(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.block_sparse_moe.experts.2.w1.weight"]


def other_shape(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.block_sparse_moe.experts.2.w1.weight"] = torch.zeros(8, 32)


def drop_layer(tensors: dict[str, Tensor]) -> None:
    for name in [n for n in tensors if n.startswith("model.layers.1.block_sparse_moe.experts.")]:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (add_fused, r"one tensor in the files for .*layers\.0\.mlp\.experts\.down_proj"),
        (drop_expert, r"layers\.1\.mlp\.experts\.gate_up_proj"),
        (other_shape, r"layers\.1\.mlp\.experts\.gate_up_proj"),
        (drop_layer, r"layers\.1\.mlp\.experts\.(gate_up|down)_proj"),
    ],
)
def test_a_folder_that_is_half_converted_is_named_and_changes_nothing(tmp_path, change, words):
    build = KINDS["experts"]
    model = built(build)
    model.save_pretrained(tmp_path)
    changed(tmp_path, change)
    modules = [built(build, seed=1) for _ in range(2)]
    wanted = {name: value.clone() for name, value in modules[0].state_dict().items()}

    def body(rank: int) -> Any:
        onefold.shard(modules[rank])
        with pytest.raises(CheckpointError, match=words):
            onefold.load_pretrained(modules[rank], tmp_path)
        return onefold.full_state_dict(modules[rank])

    assert_equal(run_ranks(2, body)[0], wanted)


def test_an_index_that_names_what_a_file_lacks_is_refused(tmp_path):
    model = built(KINDS["experts"])
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    index = tmp_path / "model.safetensors.index.json"
    lying = json.loads(index.read_text())
    files = sorted(set(lying["weight_map"].values()))
    lying["weight_map"]["lm_head.weight"] = next(
        file for file in files if file != lying["weight_map"]["lm_head.weight"]
    )
    index.write_text(json.dumps(lying))
    with pytest.raises(CheckpointError):
        onefold.load_pretrained(on_meta(KINDS["experts"]), tmp_path)


def test_a_sharded_model_is_not_saved_by_transformers_alone(tmp_path):
    """Its own files would hold one rank's rows."""
    modules = [built(KINDS["experts"]) for _ in range(2)]
    wanted = {name: value.clone() for name, value in modules[0].state_dict().items()}

    def body(rank: int) -> None:
        module = modules[rank]
        onefold.shard(module, stage=3)
        with pytest.raises(StateError, match=r"onefold\.save_pretrained"):
            module.save_pretrained(tmp_path / f"refused-{rank}")
        state = onefold.full_state_dict(module)
        if rank == 0:
            module.save_pretrained(tmp_path / "state", state_dict=state)

    run_ranks(2, body)
    found = type(modules[0]).from_pretrained(tmp_path / "state")
    assert_equal(found.state_dict(), wanted)


def test_a_copy_of_a_module_on_meta_reads_the_same_files(tmp_path):
    model = built(KINDS["experts"])
    model.save_pretrained(tmp_path)
    module = onefold.load_pretrained(on_meta(KINDS["experts"]), tmp_path)
    copied = copy.deepcopy(module)
    onefold.shard(copied)
    assert_equal(onefold.full_state_dict(copied), model.state_dict())


@pytest.mark.parametrize("build", [KINDS["experts"], KINDS["split"], KINDS["tied"]])
def test_a_checkpoint_is_exported_under_the_names_that_transformers_writes(tmp_path, build):
    """With masters: in bf16 or in fp32, without the module."""
    models = [built(build) for _ in range(2)]
    wanted = {name: value.clone() for name, value in models[0].state_dict().items()}
    models[0].save_pretrained(tmp_path / "theirs")

    def body(rank: int) -> None:
        onefold.shard(models[rank])
        onefold.save(tmp_path / "run", models[rank])

    run_ranks(2, body)
    export(tmp_path / "run", tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "theirs")
    assert_equal(type(models[0]).from_pretrained(tmp_path / "out").state_dict(), wanted)
    export(tmp_path / "run", tmp_path / "half", dtype=torch.bfloat16)
    assert {dtype for dtype, _ in content(tmp_path / "half").values()} <= {"BF16", "I64"}
