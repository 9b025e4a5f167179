"""Weights that files keep in 8 bits with scales are read as the numbers that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import onefold
from onefold.checkpoint.safetensors import PretrainedFiles
from onefold.errors import CheckpointError, ConfigError
from tests.support.ranks import run_ranks

Files = dict[str, Tensor]
FP8 = torch.float8_e4m3fn


class Net(nn.Module):
    """Matrices that blocks of 128 do not divide, a stack of experts, and a norm that is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(150, 260)
        self.blocks = nn.ModuleList(nn.Linear(260, 260, bias=False) for _ in range(2))
        self.norm = nn.LayerNorm(260)
        self.experts = nn.Parameter(torch.randn(3, 130, 260) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.experts.sum(0).t()


def by_blocks(name: str, weight: Tensor, block: int = 128) -> tuple[Files, Tensor]:
    rows, columns = (-(-length // block) for length in weight.shape[-2:])
    scale = torch.rand(*weight.shape[:-2], rows, columns) + 0.5
    spread = scale.repeat_interleave(block, -2).repeat_interleave(block, -1)
    spread = spread[..., : weight.shape[-2], : weight.shape[-1]]
    numbers = (weight / spread).to(FP8)
    return {name: numbers, f"{name}_scale_inv": scale}, numbers.float() * spread


def by_rows(name: str, weight: Tensor, dtype: torch.dtype = FP8) -> tuple[Files, Tensor]:
    scale = weight.abs().amax(-1, keepdim=True) / 100
    numbers = (weight / scale).to(dtype)
    return {name: numbers, f"{name}_scale": scale}, numbers.float() * scale


def by_tensor(name: str, weight: Tensor) -> tuple[Files, Tensor]:
    scale = (weight.abs().max() / 100).reshape([1] if weight.dim() == 2 else [])
    numbers = (weight / scale).to(torch.float8_e5m2)
    others = {f"{name.removesuffix('weight')}input_scale": torch.ones(1)}  # of activations
    return {name: numbers, f"{name}_scale": scale, **others}, numbers.float() * scale


def by_bitsandbytes(name: str, weight: Tensor) -> tuple[Files, Tensor]:
    if not name.endswith("weight"):
        return by_rows(name, weight)
    prefix, scale = name.removesuffix("weight"), weight.abs().amax(-1)
    numbers = (weight / scale[:, None] * 127).round().to(torch.int8)
    files = {name: numbers, f"{prefix}SCB": scale}
    files[f"{prefix}weight_format"] = torch.tensor(0, dtype=torch.uint8)
    return files, numbers.float() * scale[:, None] * (1 / 127)


FORMATS: dict[str, tuple[Callable[[str, Tensor], tuple[Files, Tensor]], dict[str, Any] | None]] = {
    "fp8 blocks": (by_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "fp8 blocks of 64": (
        lambda name, weight: by_blocks(name, weight, 64),
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
    ),
    "fp8 rows": (by_rows, {"quant_method": "compressed-tensors"}),
    "fp8 tensors": (by_tensor, {"quant_method": "modelopt"}),
    "int8 rows": (lambda name, weight: by_rows(name, weight, torch.int8), None),
    "bitsandbytes": (by_bitsandbytes, {"quant_method": "bitsandbytes"}),
}


def written(folder: Path, kind: str) -> Files:
    """Write files of a format, and return the exact weights."""
    quantize, config = FORMATS[kind]
    torch.manual_seed(0)
    files, exact = Files(), Files()
    for name, value in Net().state_dict().items():
        if value.dim() > 1:
            more, exact[name] = quantize(name, value)
            files |= more
        else:
            files[name] = exact[name] = value
    save_file({k: v.contiguous() for k, v in files.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return exact


def loaded(folder: Path, way: str) -> nn.Module:
    with torch.device("cpu" if way == "sharded" else "meta"):
        module = Net()
    if way == "sharded":
        onefold.shard(module, stage=3)
    onefold.load_pretrained(module, folder)
    if way == "meta":
        onefold.shard(module, stage=1)
    if way == "streamed":
        onefold.stream(module, budget="64MiB")
    return module


def assert_is(module: nn.Module, exact: Files) -> None:
    for name, value in onefold.full_state_dict(module, rank0_only=False).items():
        torch.testing.assert_close(value, exact[name], rtol=1e-6, atol=0, msg=name)


@pytest.mark.filterwarnings("ignore:not in the module")
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("world_size", "way"), [(1, "streamed"), (2, "meta"), (3, "sharded")])
def test_weights_are_dequantized_while_they_are_read(tmp_path, kind, world_size, way):
    exact = written(tmp_path, kind)
    run_ranks(world_size, lambda rank: assert_is(loaded(tmp_path, way), exact))


def test_weights_that_rest_in_int8_are_quantized_from_their_numbers(tmp_path):
    exact = written(tmp_path, "fp8 blocks")
    with torch.device("meta"):
        module = Net()
    onefold.load_pretrained(module, tmp_path)
    onefold.stream(module, budget="64MiB", rest="int8")
    plain, x = Net(), torch.ones(2, 150) / 9
    plain.load_state_dict(exact)
    torch.testing.assert_close(module(x), plain(x), rtol=0.1, atol=0.1)


def test_each_rank_reads_its_own_numbers_and_their_scales(tmp_path, monkeypatch):
    written(tmp_path, "fp8 blocks")
    read: dict[str, int] = {}
    box_of = PretrainedFiles.box

    def box(files: PretrainedFiles, name: str, box: Any) -> Tensor:
        values = box_of(files, name, box)
        read[name] = read.get(name, 0) + values.numel()
        return values

    monkeypatch.setattr(PretrainedFiles, "box", box)
    run_ranks(3, lambda rank: loaded(tmp_path, "sharded"))
    assert read["up.weight"] == 260 * 150
    assert read["blocks.0.weight"] == 260 * 260
    assert read["blocks.0.weight_scale_inv"] <= 5 * 3  # two ranks' rows lie in two blocks
    assert read["experts_scale_inv"] == 3 * 2 * 3


def changed(folder: Path, change: Callable[[Files], object]) -> None:
    files = load_file(folder / "model.safetensors")
    change(files)
    save_file(files, folder / "model.safetensors")


NAME = "blocks.1.weight"
MISTAKES: dict[str, tuple[Callable[[Files], object], str]] = {
    "no scale": (lambda f: f.pop(f"{NAME}_scale_inv"), "no scales"),
    "a scale of another shape": (
        lambda f: f.update({f"{NAME}_scale_inv": torch.ones(2, 2)}), r"shape \[2, 2\]",
    ),
    "scales of integers": (
        lambda f: f.update({f"{NAME}_scale_inv": torch.ones(3, 3, dtype=torch.uint8)}), "U8 scales",
    ),
    "a zero point": (
        lambda f: f.update({f"{NAME}_zero_point": torch.ones(3, 3)}), "zero_point",
    ),
    "two scales": (lambda f: f.update({f"{NAME}_scale": torch.ones(1)}), "weight_scale"),
    "numbers of 4 bits": (lambda f: f.update({NAME: f[NAME].view(torch.uint8)}), "U8 numbers"),
    "wider integers": (lambda f: f.update({NAME: torch.ones(260, 260).int()}), "I32 numbers"),
    "another layout of bitsandbytes": (
        lambda f: (
            f.pop(f"{NAME}_scale_inv"),
            f.update({
                NAME: torch.ones(260, 260).to(torch.int8), "blocks.1.SCB": torch.ones(260),
                "blocks.1.weight_format": torch.tensor(1, dtype=torch.uint8),
            }),
        ),
        "not in rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize(("world_size", "way"), [(1, "meta"), (3, "sharded")])
def test_a_format_that_is_not_read_is_refused_by_name(tmp_path, mistake, world_size, way):
    change, word = MISTAKES[mistake]
    written(tmp_path, "fp8 blocks")
    changed(tmp_path, change)

    def body(rank: int) -> None:
        with pytest.raises(CheckpointError, match=rf"blocks\.1\.weight(.|\n)*{word}(.|\n)*hint: "):
            loaded(tmp_path, way)

    run_ranks(world_size, body)


@pytest.mark.parametrize("config", [{"quant_method": "mxfp9"}, {"bits": 4}, "text"])
def test_an_unknown_quantization_method_is_refused(tmp_path, config):
    written(tmp_path, "fp8 blocks")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(CheckpointError, match=r"quantization_config(.|\n)*hint: "):
        loaded(tmp_path, "meta")


def test_weights_that_rest_in_their_files_cannot_be_quantized_there(tmp_path):
    written(tmp_path, "fp8 rows")
    with torch.device("meta"):
        module = Net()
    onefold.load_pretrained(module, tmp_path)
    with pytest.raises(ConfigError, match=r"experts.*with scales(.|\n)*hint: offload=.disk:PATH"):
        onefold.stream(module, budget="64MiB", offload="disk")


def test_an_export_of_dequantized_weights_names_no_quantization(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=24, quantization_config={"quant_method": "fp8"},
    )  # fmt: skip
    module = transformers.LlamaForCausalLM(config)
    assert "quantization_config" in config.to_dict()
    onefold.shard(module)
    onefold.save_pretrained(module, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


# numbers of 4 bits


@pytest.mark.parametrize("world_size", [2, 3])
def test_mxfp4_experts_are_those_that_transformers_dequantizes(tmp_path, world_size):
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = transformers.GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        head_dim=16, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.GptOssForCausalLM(config)
    wanted, files = dict(model.state_dict()), Files()
    for name, value in wanted.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            files[name] = value.clone()
            continue
        experts, columns, rows = value.shape
        files[f"{name}_blocks"] = torch.randint(
            0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8
        )
        files[f"{name}_scales"] = torch.randint(
            120, 130, (experts, rows, columns // 32), dtype=torch.uint8
        )
        wanted[name] = convert_moe_packed_tensors(
            files[f"{name}_blocks"], files[f"{name}_scales"], dtype=torch.float32
        )
    save_file(files, tmp_path / "model.safetensors")
    about = {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(about))
    with torch.device("meta"):
        modules = [transformers.GptOssForCausalLM(config) for _ in range(world_size)]

    def body(rank: int) -> Any:
        onefold.load_pretrained(modules[rank], tmp_path)
        onefold.shard(modules[rank])
        return onefold.full_state_dict(modules[rank])

    found = run_ranks(world_size, body)[0]
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_of_bitsandbytes_are_those_that_it_dequantizes(tmp_path, kind, nested):
    """Rows are whole blocks: of others bitsandbytes 0.50.2 on a CPU gives other numbers."""
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    files, wanted = Files(), Files()
    for name, shape in {"up": (96, 64), "down": (65, 128)}.items():
        plain = nn.Linear(shape[1], shape[0])
        part = bnb.nn.Linear4bit(shape[1], shape[0], quant_type=kind, compress_statistics=nested)
        part.load_state_dict(plain.state_dict())
        part = part.to("cpu")
        files |= {f"{name}.{key}": value.clone() for key, value in part.state_dict().items()}
        weight = part.weight
        wanted[f"{name}.weight"] = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
        wanted[f"{name}.bias"] = part.bias.detach()
    save_file(files, tmp_path / "model.safetensors")

    def body(rank: int) -> Any:
        with torch.device("meta"):
            module = nn.ModuleDict({"up": nn.Linear(64, 96), "down": nn.Linear(128, 65)})
        onefold.load_pretrained(module, tmp_path)
        onefold.shard(module)
        return onefold.full_state_dict(module)

    found = run_ranks(3, body)[0]
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value.float(), rtol=1e-6, atol=1e-7)


def lost_absmax(files: Files) -> None:
    files["up.weight.absmax"] = files["up.weight.absmax"][:-1].clone()


def lying_shape(files: Files) -> None:
    (name,) = [name for name in files if "quant_state" in name]
    about = json.loads(bytes(files[name].tolist())) | {"shape": [1 << 40, 64]}
    files[name] = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)


def no_note(files: Files) -> None:
    (name,) = [name for name in files if "quant_state" in name]
    files[name] = torch.tensor(list(b"{"), dtype=torch.uint8)


@pytest.mark.parametrize("change", [lost_absmax, lying_shape, no_note])
def test_parts_of_four_bits_that_do_not_fit_are_named(tmp_path, change):
    bnb = pytest.importorskip("bitsandbytes")
    part = bnb.nn.Linear4bit(64, 96, bias=False, quant_type="nf4")
    part.load_state_dict(nn.Linear(64, 96, bias=False).state_dict())
    files = {f"up.{key}": value.clone() for key, value in part.to("cpu").state_dict().items()}
    change(files)
    save_file(files, tmp_path / "model.safetensors")
    with torch.device("meta"):
        module = nn.ModuleDict({"up": nn.Linear(64, 96, bias=False)})
    with pytest.raises(CheckpointError, match=r"parts of 'up\.weight'"):
        onefold.load_pretrained(module, tmp_path)
