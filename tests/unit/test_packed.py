"""Weights that rest in int8 and int4 and are multiplied while they are packed.

The reference is one process whose linears call torch's kernels on weights that this file packs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import onefold
from onefold.compose import quantizing
from onefold.compose.quantizing import quantize_for_products
from onefold.engine.registry import engine_of
from onefold.errors import CheckpointError, ConfigError
from onefold.unit import formats
from onefold.unit.formats import Int4Groups, Int8Rows, MatrixFormat
from onefold.unit.promises import PROMISED
from tests.support.models import Block
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but

RESTS = ("int8", "int4")
FORMATS: dict[str, MatrixFormat] = {"int8": Int8Rows(), "int4": Int4Groups()}
WIDTH, HIDDEN = 96, 208  # multiples of 16 and 64, and not


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def closed_form(rest: str, rows: int, columns: int) -> int:
    """Bytes of one matrix, written anew."""
    if rest == "int8":
        return up(rows * up(columns, 16) + 2 * rows, 64)
    return up(up(rows, 64) * up(columns, 64) * 9 // 16, 64)


def packed(rest: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Payload and table of a bf16 matrix whose extents the kernels take, written anew."""
    rows, columns = weight.shape
    w = weight.detach().float()
    if rest == "int8":
        scale = (w.abs().amax(1) / 127).bfloat16()
        return (w / scale.float()[:, None]).round().to(torch.int8), scale
    groups = w.view(rows, -1, 64)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scale = ((high - low) / 15).bfloat16()
    zero = (low + 8 * scale.float()).bfloat16()
    q = ((groups - zero.float()[..., None]) / scale.float()[..., None]).round() + 8
    q = q.clamp(0, 15).view(rows, columns).int()
    payload = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 2)
    return payload, torch.stack([scale, zero], -1).transpose(0, 1).contiguous()


class KernelLinear(nn.Module):
    """A linear of the reference: one call of torch's kernel."""

    def __init__(self, linear: nn.Linear, rest: str) -> None:
        super().__init__()
        weight = linear.weight
        rows, columns = (up(n, 64) for n in weight.shape)
        whole = F.pad(weight.detach(), (0, columns - weight.shape[1], 0, rows - weight.shape[0]))
        self.rest, self.bias, self.rows, self.columns = rest, linear.bias, len(weight), columns
        self.payload, self.table = packed(rest, whole)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, self.columns - x.shape[-1]))
        if self.rest == "int8":
            found = torch.ops.aten._weight_int8pack_mm(x, self.payload, self.table)
        else:
            found = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.payload, 64, self.table)
        found = found[:, : self.rows]
        return found if self.bias is None else found + self.bias


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, HIDDEN, bias=False) for _ in range(3))
        self.head = nn.Linear(WIDTH, 50, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model(dtype: torch.dtype = torch.bfloat16) -> Any:
    return seeded(Model).to(dtype).requires_grad_(False)


def tokens(rows: int) -> Tensor:
    return torch.arange(rows) * 7 % 50


def sharded(rest: str, **choices: Any) -> Any:
    made = model()
    assert [kept.fqn for kept in quantize_for_products(made, rest)] == ["embed.weight"]
    return onefold.shard(made, stage=3, **choices)


# formats


@again_but("shape0-int4", "shape1-int8", "shape2-int4", "shape3-int4", "shape4-int8", "shape5-int4")
@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("shape", [(64, 64), (130, 100), (5, 7), (1, 1), (3, 70, 33), (600, 2048)])
def test_no_error_of_a_format_exceeds_the_documented_bound(rest, shape):
    form, numbers = FORMATS[rest], torch.randn(shape, generator=torch.Generator().manual_seed(1))
    message = torch.empty(form.nbytes(shape), dtype=torch.uint8)
    stack = len(numbers) if len(shape) == 3 else 1
    assert len(message) == stack * closed_form(rest, *shape[-2:])
    before = numbers.clone()
    form.encode(numbers, message)
    assert torch.equal(numbers, before)
    decoded = torch.empty(shape)
    form.decode(message, decoded)
    error = F.pad((decoded - numbers).abs(), (0, -shape[-1] % 64))
    w = F.pad(numbers, (0, -shape[-1] % 64))
    if rest == "int8":
        assert (error <= 0.505 * w.abs().amax(-1, keepdim=True) / 127).all()
    else:
        groups, error = w.unflatten(-1, (-1, 64)), error.unflatten(-1, (-1, 64))
        extent = groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)
        assert (error.amax(-1) <= 0.55 * extent / 15).all()
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for rows in (1, 3, 9, 300):
            x = torch.randn(rows, shape[-1], generator=torch.Generator().manual_seed(rows))
            x, matrices = x.to(dtype), decoded.view(-1, *shape[-2:])
            for matrix, parts in zip(matrices, form.matrices(message, shape), strict=True):
                ours, wanted = form.linear(x, parts), x.double() @ matrix.double().T
                assert ours.dtype == dtype
                most = (x.double().abs() @ matrix.double().abs().T).clamp(min=1e-3)
                unit = 2**-7 if dtype != torch.float32 else 2**-20
                assert ((ours - wanted).abs() <= unit * most).all()


@pytest.mark.parametrize("rest", RESTS)
def test_rows_that_are_not_finite_decode_to_nan_and_others_are_right(rest):
    numbers = torch.randn(70, 64, generator=torch.Generator().manual_seed(1))
    numbers[3, 5], numbers[9, 0], numbers[12] = torch.nan, -torch.inf, 0.0
    message = torch.empty(FORMATS[rest].nbytes(numbers.shape), dtype=torch.uint8)
    FORMATS[rest].encode(numbers, message)
    decoded = torch.empty(70, 64, dtype=torch.bfloat16)
    FORMATS[rest].decode(message, decoded)
    assert decoded.isnan().any(1).nonzero().flatten().tolist() == [3, 9]
    assert decoded[12].count_nonzero() == 0
    (parts,) = FORMATS[rest].matrices(message, (70, 64))
    for rows in (1, 300):
        x = torch.ones(rows, 64, dtype=torch.bfloat16)
        product = FORMATS[rest].linear(x, parts)
        assert product.isnan().any(0).nonzero().flatten().tolist() == [3, 9]


def test_the_kernels_of_torch_that_are_relied_on_exist():
    """unit/formats.py calls these; without them its products have no kernel."""
    names = ("_weight_int8pack_mm", "_weight_int4pack_mm_for_cpu")
    for name in (*names, "_convert_weight_to_int4pack_for_cpu"):
        assert getattr(torch.ops.aten, name).default._schema is not None


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_four_bits_are_read_as_they_were_packed(device_type):
    q = torch.randint(16, (128, 192), generator=torch.Generator().manual_seed(1)).int()
    packed_bytes = formats._packed(q, device_type)
    assert packed_bytes.shape == (128, 96)
    assert torch.equal(formats._unpacked(packed_bytes, device_type), (q - 8).to(torch.int8))


def test_the_order_in_a_tile_is_found_for_any_tile(monkeypatch):
    """A made-up device packs tiles of 8 x 64 whose nibbles lie backwards."""

    def pack(q: Tensor, device_type: str) -> Tensor:
        tiles = q.view(len(q) // 8, 8, -1, 64).permute(0, 2, 1, 3).reshape(-1, 512).flip(1)
        return (tiles[:, ::2] | tiles[:, 1::2] << 4).to(torch.uint8).view(len(q), -1)

    monkeypatch.setattr(formats, "_packed", pack)
    monkeypatch.setattr(formats, "_tile", lambda device_type: (8, 64))
    formats._tile_order.cache_clear()
    q = torch.randint(16, (128, 192), generator=torch.Generator().manual_seed(1))
    try:
        assert torch.equal(formats._unpacked(pack(q, "made up"), "made up"), (q - 8).char())
    finally:
        formats._tile_order.cache_clear()


# modules


@again_but("int4")
@pytest.mark.parametrize("rest", RESTS)
def test_logits_are_bitwise_those_of_one_process_that_calls_the_kernels(rest):
    wanted_model, exact = model(), model()
    for block in wanted_model.blocks:
        block.up, block.down = KernelLinear(block.up, rest), KernelLinear(block.down, rest)
    wanted_model.head = KernelLinear(wanted_model.head, rest)
    wanted = [wanted_model(tokens(rows)) for rows in (1, 8)]
    assert F.mse_loss(wanted[1], exact(tokens(8))) > 0
    matrices = [(HIDDEN, WIDTH), (WIDTH, HIDDEN)] * 3 + [(50, WIDTH)]

    def run(rank: int, choices: Any) -> Any:
        module = sharded(rest, **choices)
        found = [module(tokens(rows)) for rows in (1, 8)]
        with torch.inference_mode():
            found += [module(tokens(rows)) for rows in (1, 8)]
        many = module(tokens(300))
        report = onefold.report(module)
        assert report.differing() == {} or rank > 0
        packed_units = [unit for unit in engine_of(module).units if unit.spec.is_packed]
        assert all(unit.is_resident or choices or report.world_size > 1 for unit in packed_units)
        return found, many, sum(unit.weight.tensor.nbytes for unit in packed_units)

    manys = []
    for world_size, choices in [(1, {}), (2, {}), (3, {}), (1, {"offload": "cpu"})]:
        results = run_ranks(world_size, run, choices)
        assert all(all(map(torch.equal, found, wanted * 2)) for found, _, _ in results)
        assert sum(nbytes for *_, nbytes in results) == sum(
            closed_form(rest, *shape) for shape in matrices
        )
        manys += [many for _, many, _ in results]
    assert all(torch.equal(many, manys[0]) for many in manys)
    error = (manys[0] - exact(tokens(300))).norm() / exact(tokens(300)).norm()
    assert error < {"int8": 0.02, "int4": 0.2}[rest]


@again_but("int4")
@pytest.mark.parametrize("rest", RESTS)
def test_a_streamed_module_multiplies_packed_weights_from_any_tier(rest, tmp_path):
    (wanted,) = run_ranks(1, lambda rank: sharded(rest)(tokens(3)))

    def run(rank: int, choices: Any) -> Any:
        module = onefold.stream(model(), rest=rest, **choices)
        found = [module(tokens(3)) for _ in range(2)]
        assert not any(unit.decoded for unit in engine_of(module).units)
        return found

    for choices in ({"budget": 1 << 30}, {"budget": 120_000, "offload": f"disk:{tmp_path}"}):
        for world_size in (1, 2):
            for found in run_ranks(world_size, run, choices):
                assert all(torch.equal(each, wanted) for each in found)


def test_modules_see_a_weight_with_the_shape_dtype_and_numbers_of_a_plain_one():
    def run(rank: int) -> None:
        module = sharded("int8")
        numbers: list[Tensor] = []

        def look(part: nn.Module, args: Any) -> None:
            weight: Any = part.weight
            assert isinstance(weight, nn.Parameter)
            assert weight.shape == (HIDDEN, WIDTH)
            assert weight.dtype == torch.bfloat16
            assert weight.device.type == "cpu"
            assert weight.numel() == HIDDEN * WIDTH
            assert not weight.requires_grad
            assert args[0].to(weight.dtype).dtype == torch.bfloat16
            numbers.append(weight.detach().clone())
            assert torch.equal(weight.data, numbers[0])
            assert torch.equal(weight.t()[5], numbers[0][:, 5])
            assert torch.equal(weight + 0, numbers[0])
            assert torch.equal(torch.stack([weight, weight])[1], numbers[0])

        seen = module.blocks[1].up.register_forward_pre_hook(look)
        module(tokens(2))
        seen.remove()
        memory = onefold.report(module).memory["unsharded"]["device"]
        one_unit = closed_form("int8", HIDDEN, WIDTH) + closed_form("int8", WIDTH, HIDDEN)
        gathered = 0 if onefold.report(module).world_size == 1 else 3 * (one_unit + 2000)
        assert memory.now == 0
        assert memory.peak <= 2 * HIDDEN * WIDTH + gathered + 50 * WIDTH * 2
        with onefold.unsharded(module):
            assert torch.equal(module.blocks[1].up.weight, numbers[0])
        found = onefold.full_state_dict(module, rank0_only=False)["blocks.1.up.weight"]
        assert torch.equal(found, numbers[0])
        error = (numbers[0] - model().blocks[1].up.weight).abs().max()
        assert 0 < error < 0.01 * numbers[0].abs().max()  # a step / 2, and the rounding to bf16

    for world_size in (1, 2):
        run_ranks(world_size, run)


def test_edits_backwards_and_other_files_are_named_errors(tmp_path):
    class Editing(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            with torch.no_grad():
                self.get_parameter("blocks.0.up.weight").mul_(2)
            return super().forward(tokens)

    def run(rank: int) -> None:
        edited = seeded(Editing).bfloat16().requires_grad_(False)
        quantize_for_products(edited, "int4")
        onefold.shard(edited)
        with pytest.raises(onefold.StateError, match=r"blocks.0.up.weight.*quantized numbers"):
            edited(tokens(2))
        module = sharded("int4")
        with pytest.raises(CheckpointError, match="rest="):
            onefold.save_pretrained(module, tmp_path / "weights")
        with pytest.raises(CheckpointError, match="rest="):
            onefold.save(tmp_path / "run", module)
        with torch.autocast("cpu", torch.bfloat16):
            assert module(tokens(2)).isfinite().all()
        x = torch.randn(2, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        product = module.blocks[0](x).sum()
        with pytest.raises(onefold.StateError, match="no backward through a weight"):
            product.backward()
        assert module(tokens(2)).isfinite().all()

    for world_size in (1, 2):
        run_ranks(world_size, run)
    with pytest.raises(ConfigError, match="int8 or int4"):
        quantize_for_products(model(), "int3")
    with torch.device("meta"):
        empty = Model()
    with pytest.raises(ConfigError, match="before it is quantized"):
        quantize_for_products(empty, "int8")


# from files


def test_weights_are_quantized_while_they_are_read_one_at_a_time(tmp_path):
    save_file(model().state_dict(), tmp_path / "model.safetensors")

    def run(rank: int, rest: str) -> Tensor:
        with torch.device("meta"):
            module = Model().bfloat16().requires_grad_(False)
        onefold.load_pretrained(module, tmp_path)
        quantize_for_products(module, rest)
        values = module.__dict__[PROMISED].values._values
        alive: list[Any] = []
        fill = values.fill

        def watched(name: str, box: Any, out: Tensor) -> None:
            if out.dim() == 2 and name != "embed.weight":
                assert all(each() is None for each in alive)
                alive.append(ref(out))
            fill(name, box, out)

        values.fill = watched
        onefold.shard(module)
        assert len(alive) == 7
        return module(tokens(3))

    for rest in RESTS:
        (wanted,) = run_ranks(1, lambda rank, rest=rest: sharded(rest)(tokens(3)))
        for world_size in (1, 2, 3):
            assert all(torch.equal(found, wanted) for found in run_ranks(world_size, run, rest))


class Wide(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 1024, bias=False) for _ in range(layers))


def test_the_peak_of_loading_is_the_packed_bytes_and_a_few_matrices(tmp_path):
    """Private memory of a process, without files that are mapped; 24 matrices of 4 MiB."""
    for layers in (1, 24):
        save_file(Wide(layers).bfloat16().state_dict(), tmp_path / f"{layers}.safetensors")
        (tmp_path / str(layers)).mkdir()
        (tmp_path / f"{layers}.safetensors").rename(tmp_path / f"{layers}/model.safetensors")

    def load(layers: int) -> nn.Module:
        with torch.device("meta"):
            module = Wide(layers).bfloat16().requires_grad_(False)
        onefold.load_pretrained(module, tmp_path / str(layers))
        quantize_for_products(module, "int4")
        return onefold.shard(module)

    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            load(1)  # imports, and memory that the allocator keeps
            before, seen = private_nbytes(), []
            encode = quantizing.encode

            def watched(*args: Any) -> Tensor:
                message = encode(*args)
                seen.append(private_nbytes() - before)  # the exact matrix is still there
                return message

            quantizing.encode = watched
            load(24)
            matrix = 2 * 2048 * 1024  # in bf16
            most = 24 * matrix * 9 // 32 + 8 * matrix  # blocks in fp32 and int32: 1 matrix each
            code = 0 if len(seen) == 24 and max(seen) < most < 24 * matrix * 2 // 3 else 7
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def private_nbytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


# transformers

transformers = pytest.importorskip("transformers")
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
LLAMA = SMALL | {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2}
MODELS: dict[str, Any] = {
    "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100},
    "LlamaForCausalLM": LLAMA,
    "MixtralForCausalLM": LLAMA | {"num_local_experts": 4},
    "T5ForConditionalGeneration": SMALL
    | {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "decoder_start_token_id": 0},
    "BertLMHeadModel": SMALL | {"hidden_size": 64, "intermediate_size": 128, "is_decoder": True},
}
EXACT = {
    "GPT2LMHeadModel": ["transformer.wte.weight", "transformer.wpe.weight"],
    "LlamaForCausalLM": ["model.embed_tokens.weight"],
    "MixtralForCausalLM": ["model.embed_tokens.weight"]
    + [f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 1)],
}
ERRORS = {"int8": 0.03, "int4": 0.3}
"""Of the logits of models with random weights, relative: eight to ten matrices deep."""


def language_model(name: str, experts: str | None = None) -> Any:
    kind = getattr(transformers, name)
    options = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0} | MODELS[name]
    config = kind.config_class(**options)
    if experts is not None:
        config._experts_implementation = experts
    module = seeded(lambda: kind(config)).bfloat16().eval().requires_grad_(False)
    module.generation_config.eos_token_id = None
    return module


def outputs_of(module: Any) -> tuple[Tensor, Tensor]:
    """Logits, and the tokens of a greedy generation."""
    ids = torch.arange(14).view(2, 7) * 5 % 97 + 1
    inputs = {"decoder_input_ids": ids} if module.config.is_encoder_decoder else {}
    with torch.no_grad():
        logits = module(input_ids=ids, **inputs).logits
    made = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6)
    return logits, made


@again_but(
    "GPT2LMHeadModel-int8", "LlamaForCausalLM-int4", "MixtralForCausalLM-int4",
    "T5ForConditionalGeneration-int8", "BertLMHeadModel-int4",
)  # fmt: skip
@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("name", MODELS)
def test_transformers_generate_the_tokens_of_one_process_on_any_number_of_ranks(name, rest):
    exact, _ = outputs_of(language_model(name))
    found: list[tuple[Tensor, Tensor]] = []

    def run(rank: int) -> Any:
        module = language_model(name)
        kept = quantize_for_products(module, rest)
        assert [each.fqn for each in kept] == EXACT.get(name, [each.fqn for each in kept])
        assert all("embedding" in k.reason or "Router" in k.reason for k in kept)
        onefold.shard(module)
        return outputs_of(module)

    for world_size in (1, 2, 3):
        found += run_ranks(world_size, run)
    logits, made = found[0]
    assert made.shape[1] > 6
    assert all(torch.equal(a, logits) and torch.equal(b, made) for a, b in found)
    assert 0 < (logits - exact).norm() < ERRORS[rest] * exact.norm()


@again_but("batched_mm")
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_experts_are_multiplied_one_by_one_or_decoded_one_unit_at_a_time(experts):
    name, rest = "MixtralForCausalLM", "int8"
    exact, _ = outputs_of(language_model(name, experts))

    def run(rank: int) -> Any:
        module = language_model(name, experts)
        quantize_for_products(module, rest)
        onefold.shard(module)
        found = outputs_of(module)
        memory = onefold.report(module).memory.get("unsharded", {})
        return *found, next(((m.peak, m.now) for m in memory.values()), (0, 0))

    decoded = 0 if experts == "eager" else 4 * (3 * 64 * 128) * 2  # one layer's experts in bf16
    results = [found for world_size in (1, 2) for found in run_ranks(world_size, run)]
    logits, made, alone = results[0]
    assert alone == (decoded, 0)
    for found, generated, (peak, now) in results[1:]:
        assert torch.equal(found, logits)
        assert torch.equal(generated, made)
        assert now == 0
        assert decoded <= peak <= decoded + 3 * (4 * 3 * 64 * 128 + 6 * 64 * 64)
    assert 0 < (logits - exact).norm() < ERRORS[rest] * exact.norm()


@again_but("2")
@pytest.mark.parametrize("world_size", [1, 2])
def test_units_that_stay_have_the_numbers_of_one_unit_decoded_at_most(world_size):
    """A stay has no end at which numbers would be freed: two forwards, of two layers each."""
    decoded = 4 * (3 * 64 * 128) * 2  # one layer's experts in bf16

    def run(rank: int) -> None:
        module = language_model("MixtralForCausalLM", "grouped_mm")
        packed = language_model("MixtralForCausalLM", "grouped_mm")
        onefold.stream(packed, budget=1 << 30, rest="int8")
        for _ in range(2):
            outputs_of(packed)
        assert all(unit.stays for unit in engine_of(packed).recipe.units)
        usage = onefold.report(packed).memory["unsharded"]["device"]
        whole = sum(parameter.nbytes for parameter in module.parameters())
        rest = 0 if world_size == 1 else whole * 0.6  # gathered bytes stay, about half of bf16
        assert decoded <= usage.peak <= decoded + rest
        assert usage.now <= usage.peak

    run_ranks(world_size, run)


@again_but("2")
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_budget_has_room_for_the_numbers_of_one_unit_of_experts(world_size, tmp_path):
    numbers = 4 * (3 * 64 * 128) * 2  # one layer's experts in bf16

    def run(rank: int) -> None:
        options = {"offload": f"disk:{tmp_path}", "rest": "int8"}
        with pytest.raises(ConfigError, match=f"{numbers:,} for the numbers of one unit") as caught:
            onefold.stream(language_model("MixtralForCausalLM", "grouped_mm"), budget=1, **options)
        budget = int(str(caught.value).split("at least ")[1].split(" ")[0].replace(",", ""))
        resident = language_model("MixtralForCausalLM", "grouped_mm")
        onefold.stream(resident, budget=1 << 30, rest="int8")
        module = language_model("MixtralForCausalLM", "grouped_mm")
        onefold.stream(module, budget=budget, **options)
        for found, wanted in zip(outputs_of(module), outputs_of(resident), strict=True):
            assert torch.equal(found, wanted)
        peak = onefold.report(module).memory["unsharded"]["device"].peak
        assert numbers < peak <= budget

    run_ranks(world_size, run)
