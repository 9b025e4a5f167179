"""Quantized bases: packed weights and their side tables are sharded as they are, never cast.

The reference is one process that trains the same packed weights with bitsandbytes' own modules.
"""

from __future__ import annotations

import copy
import gc
import inspect
import io
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import onefold
import onefold.hf
from onefold.checkpoint.offline import export
from onefold.errors import CheckpointError, ConfigError
from onefold.recording.report import Report
from onefold.wire.codec import codec_of
from tests.support.ranks import every_rank, run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn

bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from tests.support import trainers  # noqa: E402

WIDTH, HIDDEN = 64, 128


def four_bits(ins: int, outs: int, **options: Any) -> nn.Module:
    """A 4-bit Linear that does not pack its weights anew for an evaluation on this CPU."""
    made = bnb.nn.Linear4bit(
        ins, outs, bias=False, compute_dtype=torch.float32, **({"quant_type": "nf4"} | options)
    )
    made.support_avx512bf16_for_cpu = False
    return made


def eight_bits(ins: int, outs: int, **options: Any) -> nn.Module:
    return bnb.nn.Linear8bitLt(ins, outs, bias=False, has_fp16_weights=False, **options)


LINEARS = {
    "nf4": four_bits,
    "nf4, tables not nested": partial(four_bits, compress_statistics=False),
    "fp4": partial(four_bits, quant_type="fp4"),
    "nf4 in bfloat16": partial(four_bits, quant_storage=torch.bfloat16),
    "nf4 in float32": partial(four_bits, quant_storage=torch.float32),
    "int8": eight_bits,
    "int8, outliers": partial(eight_bits, threshold=6.0),
}


class Adapted(nn.Module):
    """A frozen linear with a low-rank adapter, as PEFT adds one."""

    def __init__(self, base: nn.Module, ins: int, outs: int) -> None:
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(ins, 4, bias=False), nn.Linear(4, outs)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Block(nn.Module):
    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.up = Adapted(linear(WIDTH, HIDDEN), WIDTH, HIDDEN)
        self.down = Adapted(linear(HIDDEN, WIDTH), HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, kind: str, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(LINEARS[kind]) for _ in range(2))
        self.head = LINEARS[kind](WIDTH, 32)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def quantized(kind: str, recompute: bool = False) -> nn.Module:
    return seeded(lambda: Model(kind, recompute).to("cpu"))  # bitsandbytes quantizes here


def adapters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def batch(index: int, rows: int = 6) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(index))


def train(module: nn.Module, optimizer: Any, *, steps: int = 3, accumulate: int = 1) -> list[float]:
    """Losses of some steps, each followed by that of an evaluation."""
    losses: list[float] = []
    for step in range(steps):
        for micro in range(accumulate):
            waits = micro + 1 < accumulate and onefold_shards(module)
            with onefold.accumulate(module) if waits else nullcontext():
                loss = module(batch(step * accumulate + micro)).square().mean()
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        module.eval()
        with torch.no_grad():
            losses.append(module(batch(-1 - step)).square().mean().item())
        module.train()
    return losses


def onefold_shards(module: nn.Module) -> bool:
    return "_onefold_engine" in vars(module)


def weights_of(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in adapters(module)]


def run_plain(kind: str, **options: Any) -> tuple[list[float], list[Tensor]]:
    module = quantized(kind)
    optimizer = torch.optim.AdamW(adapters(module), lr=1e-2, fused=True)
    losses = train(module, optimizer, **options)
    return losses, weights_of(module)


def run_sharded(
    rank: int, kind: str, *, recompute: bool = False, choices: Any = None, **options: Any
) -> tuple[list[float], list[Tensor], Report]:
    module = quantized(kind, recompute)
    optimizer = torch.optim.AdamW(adapters(module), lr=1e-2)
    onefold.shard(module, optimizer, **(choices or {}))
    losses = train(module, optimizer, **options)
    with onefold.unsharded(module):
        weights = weights_of(module)
    return losses, weights, onefold.report(module)


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Packed bytes in a wide storage may read as NaN."""
    return torch.equal(*(each.detach().reshape(-1).view(torch.uint8) for each in (ours, theirs)))


def assert_same_bits(found: Any, wanted: Any) -> None:
    assert found[0] == wanted[0]
    for ours, theirs in zip(found[1], wanted[1], strict=True):
        assert torch.equal(ours, theirs)


@again_but("nf4", "nf4 in bfloat16", "int8, outliers")
@pytest.mark.parametrize("kind", LINEARS)
def test_a_quantized_base_trains_with_the_bits_of_one_process(kind):
    wanted = run_plain(kind)
    for world_size, stage in [(1, 3), (2, 0), (2, 1), (2, 2), (2, 3)]:
        for found in run_ranks(
            world_size, partial(run_sharded, kind=kind, choices={"stage": stage})
        ):
            assert_same_bits(found, wanted)


@again_but("int8")
@pytest.mark.parametrize("kind", ["nf4", "nf4 in bfloat16", "int8"])
def test_every_tier_and_recompute_keep_the_bits(kind, tmp_path):
    wanted = run_plain(kind)
    for offload in ("optimizer", "cpu", f"disk:{tmp_path}"):
        choices = {"stage": 3, "offload": offload}
        run = partial(run_sharded, kind=kind, choices=choices, recompute=offload == "cpu")
        for found in run_ranks(2, run):
            assert_same_bits(found, wanted)


def run_compiled(rank: int, kind: str, backend: str | None) -> list[float]:
    module = quantized(kind)
    optimizer = torch.optim.AdamW(adapters(module), lr=1e-2)
    onefold.shard(module, optimizer, stage=3)
    for block in module.blocks if backend else ():
        block.compile(backend=backend)
    return train(module, optimizer, steps=2)


@pytest.mark.again("tests/engine/test_compile.py::test_compiled_losses_equal_uncompiled_ones")
@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script_method:DeprecationWarning",  # all of dynamo's own
    "ignore:.*Function'> should not be instantiated:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)
@pytest.mark.parametrize(("kind", "backend"), [("nf4", "eager"), ("int8", "aot_eager")])
def test_compiled_blocks_of_a_quantized_base_keep_the_bits(kind, backend):
    wanted = run_ranks(2, run_compiled, kind, None)
    torch._dynamo.reset()
    assert run_ranks(2, run_compiled, kind, backend) == wanted
    torch._dynamo.reset()


def moments_of_all(rank: int, kind: str) -> int:
    module = quantized(kind)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer, offload="cpu")
    train(module, optimizer, steps=2)
    report = onefold.report(module)
    assert report.differing() == {}
    return report.nbytes("optimizer")


def test_packed_weights_in_an_optimizer_have_no_moments():
    (held,) = run_ranks(1, moments_of_all, "nf4")
    trained = [p for p in quantized("nf4").parameters() if p.requires_grad]
    assert held == 2 * 4 * sum(-(-p.numel() // 64) * 64 for p in trained)


@again_but("int8")
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_accumulation_over_three_ranks_agrees_with_one_process(kind):
    wanted, _ = run_plain(kind, accumulate=2)
    found = {
        stage: run_ranks(
            3, partial(run_sharded, kind=kind, choices={"stage": stage}, accumulate=2)
        )[1]
        for stage in (1, 3)
    }
    for losses, _, _ in found.values():
        assert losses == pytest.approx(wanted, rel=1e-5)


def shown(module: nn.Module) -> dict[str, Tensor]:
    """The state dict, as copies: packed bytes, side tables, notes and adapters."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_same_state(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert same_bits(found[name], value), name


def tables_of(module: nn.Module) -> list[Tensor]:
    """Every side table, by the attributes that bitsandbytes' kernels read."""
    tables: list[Tensor] = []
    for part in module.modules():
        state = getattr(getattr(part, "weight", None), "quant_state", None)
        for each in (state, getattr(state, "state2", None)):
            tables += [v for v in vars(each or part).values() if type(v) is Tensor]
        scales = getattr(getattr(part, "weight", None), "SCB", None)
        tables += [] if scales is None else [scales]
    return tables


def own_nbytes(tensor: Tensor, rank: int, world_size: int, multiple: int = 1) -> int:
    """Bytes of this rank's rows; adapters lie at multiples of 16 elements, packed bytes do not."""
    pieces = tensor.chunk(world_size) if tensor.dim() else (tensor,) * world_size
    numel = pieces[rank].numel() if rank < len(pieces) else 0
    return -(-numel // multiple) * multiple * tensor.element_size()


def bytes_of_a_pass(rank: int, kind: str, world_size: int) -> None:
    module = quantized(kind)
    is_packed = lambda p: "bitsandbytes" in type(p).__module__
    packed = [p.detach() for p in module.parameters() if is_packed(p)] + tables_of(module)
    others = [p for p in module.parameters() if not is_packed(p)]
    held = sum(own_nbytes(each, rank, world_size) for each in packed)
    held += sum(own_nbytes(each, rank, world_size, 16) for each in others)
    sent = sum(own_nbytes(each, rank, world_size) for each in packed + others if each.dim())
    optimizer = torch.optim.AdamW(adapters(module))
    onefold.shard(module, optimizer, stage=3)
    assert onefold.report(module).nbytes("weight") == held
    with torch.no_grad():
        module(batch(0))
    report = onefold.report(module)
    assert report.traffic["gather"].sent_nbytes == (world_size - 1) * sent
    assert report.nbytes("unsharded") == 0
    train(module, optimizer, steps=2)
    report = onefold.report(module)
    if rank == 0:  # predictions are those of rank 0
        assert report.differing() == {}
        assert report.predicted["weight"] == held
    assert "master" not in report.memory


@again_but("nf4-2", "int8-3")
@worlds_in_turn
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", ["nf4", "nf4, tables not nested", "nf4 in bfloat16", "int8"])
def test_a_rank_holds_its_part_of_bytes_and_tables_and_sends_nothing_else(kind, world_size):
    run_ranks(world_size, bytes_of_a_pass, kind, world_size)


def state_of_all_kinds(rank: int, kind: str, stage: int) -> None:
    module = quantized(kind)
    wanted = shown(module)
    onefold.shard(module, stage=stage)
    assert list(module.state_dict()) == list(wanted)
    full = onefold.full_state_dict(module, rank0_only=False)
    assert_same_state(full, wanted)
    with onefold.unsharded(module):
        assert_same_state(shown(module), wanted)
        first = module.blocks[0].up.base.weight
        assert type(first).__module__.startswith("bitsandbytes")


@again_but("0-nf4", "0-int8, outliers", "3-int8")
@worlds_in_turn
@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("stage", [0, 3])
def test_state_dicts_are_those_of_bitsandbytes(kind, stage):
    run_ranks(2, state_of_all_kinds, kind, stage)


def moved_through(directory: str, rank: int, kind: str, stage: int, seed: int) -> None:
    """Load into a module with other weights: `seed` differs."""
    module = seeded(lambda: Model(kind).to("cpu"), seed=seed)
    optimizer = torch.optim.AdamW(adapters(module), lr=1e-2)
    onefold.shard(module, optimizer, stage=stage)
    onefold.load(directory, module, optimizer)
    return onefold.full_state_dict(module, rank0_only=False), train(module, optimizer, steps=1)


@again_but("int8")
@pytest.mark.parametrize("kind", ["nf4", "nf4 in bfloat16", "int8"])
def test_checkpoints_hold_packed_bytes_and_move_to_another_world_size(kind, tmp_path):
    def save(rank: int) -> Any:
        module = quantized(kind)
        optimizer = torch.optim.AdamW(adapters(module), lr=1e-2)
        onefold.shard(module, optimizer, stage=3)
        train(module, optimizer, steps=1)
        onefold.save(tmp_path / "run", module, optimizer)
        onefold.save_pretrained(module, tmp_path / "weights")
        return onefold.full_state_dict(module, rank0_only=False), train(module, optimizer, steps=1)

    wanted, losses = run_ranks(2, save)[0]
    same = run_ranks(2, partial(moved_through, tmp_path / "run", kind=kind, stage=3, seed=5))
    other = run_ranks(3, partial(moved_through, tmp_path / "run", kind=kind, stage=2, seed=5))
    for found, _ in same + other:
        assert_same_state(found, wanted)
    assert same[0][1] == losses
    assert other[0][1] == pytest.approx(losses, rel=1e-5)

    def load(rank: int) -> Any:
        module = seeded(lambda: Model(kind).to("cpu"), seed=7)
        onefold.shard(module)
        onefold.load_pretrained(module, tmp_path / "weights")
        return onefold.full_state_dict(module, rank0_only=False)

    for found in run_ranks(3, load):
        assert_same_state(found, wanted)
    export(tmp_path / "run", tmp_path / "exported", dtype=torch.float16)  # casts adapters alone
    saved, exported = (
        load_file(tmp_path / name / "model.safetensors") for name in ("weights", "exported")
    )
    assert saved.keys() == exported.keys()
    for name in (name for name in saved if ".base." in name or name.startswith("head")):
        assert same_bits(exported[name], saved[name]), name
    assert exported["blocks.0.up.a.weight"].dtype == torch.float16


def test_a_checkpoint_of_another_code_is_refused(tmp_path):
    def save(rank: int) -> None:
        module = onefold.shard(quantized("fp4"))
        onefold.save(tmp_path / "run", module)
        onefold.save_pretrained(module, tmp_path / "weights")

    def load(rank: int) -> None:
        module = onefold.shard(quantized("nf4"))
        with pytest.raises(CheckpointError, match="__fp4"):
            onefold.load(tmp_path / "run", module)
        with pytest.raises(CheckpointError, match="__nf4"):
            onefold.load_pretrained(module, tmp_path / "weights")

    run_ranks(2, save)
    run_ranks(2, load)


def merged(rank: int, kind: str) -> dict[str, Tensor]:
    """Replace a weight inside `unsharded`, as a merge of adapters does."""
    module = quantized(kind)
    onefold.shard(module)
    with onefold.unsharded(module, writeback=True):
        base = module.blocks[0].up.base
        values = torch.ones(HIDDEN, WIDTH) * torch.arange(1.0, 1 + WIDTH)
        old = vars(base.weight)
        kept = ("has_fp16_weights", "compress_statistics", "quant_type", "quant_storage")
        options = {name: old[name] for name in kept if name in old}
        made = type(base.weight)(values, requires_grad=False, **options).to("cpu")
        base.weight = made
        if kind == "int8":
            base.state.reset_grads()
    return onefold.full_state_dict(module, rank0_only=False), module(batch(0)).sum().item()


@again_but("int8")
@pytest.mark.parametrize("kind", ["nf4", "nf4 in bfloat16", "int8"])
def test_a_weight_that_is_quantized_anew_brings_its_tables_along(kind):
    ((wanted, output),) = run_ranks(1, merged, kind)
    before = shown(quantized(kind))
    assert any(not same_bits(before[name], wanted[name]) for name in wanted)
    for found, other in run_ranks(2, merged, kind):
        assert_same_state(found, wanted)
        assert other == output


@every_rank(2)
def test_a_narrow_compute_dtype_leaves_packed_weights_as_they_are(rank):
    module = quantized("nf4 in bfloat16")
    wanted = shown(module)
    optimizer = torch.optim.AdamW(adapters(module), lr=1e-2)
    onefold.shard(module, optimizer, precision="bf16")
    assert [p.grad for p in module.parameters()] == [None] * len(list(module.parameters()))
    average = onefold.ema(module, decay=0.5)
    for _ in range(2):
        module(batch(0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
    packed = {name: value for name, value in wanted.items() if ".base." in name}
    with average.applied():
        found = onefold.full_state_dict(module, rank0_only=False)
    assert_same_state({name: found[name] for name in packed}, packed)
    found = onefold.full_state_dict(module, rank0_only=False)
    assert_same_state({name: found[name] for name in packed}, packed)
    assert not torch.equal(found["blocks.0.up.b.weight"], wanted["blocks.0.up.b.weight"])


def dispatched() -> nn.Module:
    module = quantized("nf4")
    module.hf_device_map = {"blocks": 0, "head": "cpu"}
    return module


def evaluated_here() -> nn.Module:
    """bitsandbytes packs weights anew where a CPU has AVX512-BF16; this stands in for one."""
    module = quantized("nf4")
    module.head.weight.quant_state.packing_format_for_cpu = True
    return module


def on_meta(kind: str) -> nn.Module:
    with torch.device("meta"):
        return Model(kind)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (partial(on_meta, "nf4"), r"Params4bit on meta.*\n.*from_pretrained"),
        (partial(on_meta, "int8"), r"Int8Params on meta.*\n.*from_pretrained"),
        (lambda: Model("nf4"), "not quantized yet"),
        (lambda: Model("int8"), "not quantized yet"),
        (lambda: bnb.nn.Linear8bitLt(8, 8).to("cpu"), "has_fp16_weights=True"),
        (lambda: bnb.nn.Embedding8bit(8, 8).to("cpu"), "Embedding8bit"),
        (evaluated_here, "bitsandbytes repacked"),
        (dispatched, "dispatched to"),
    ],
)
@every_rank(2)
def test_weights_that_are_not_quantized_for_good_are_refused(rank, build, words):
    with pytest.raises(ConfigError, match=words):
        onefold.shard(seeded(build))


def test_a_quantized_module_has_its_values_before_it_is_sharded(tmp_path):
    with pytest.raises(CheckpointError, match=r"after onefold\.shard"):
        onefold.load_pretrained(quantized("nf4"), tmp_path)


# as users come: transformers loads and quantizes, PEFT adds adapters


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def adapted(folder: Path, bits: int) -> nn.Module:
    """A quantized Llama with LoRA on every linear, in QLoRA's usual steps."""
    packing = transformers.BitsAndBytesConfig(
        load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=packing)
    base = peft.prepare_model_for_kbit_training(
        base, gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    options = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return seeded(lambda: peft.get_peft_model(base, options))


def tune(module: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for step in range(2):
        tokens = torch.randint(0, 40, (4, 6), generator=torch.Generator().manual_seed(step))
        loss = module(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@again_but("8")
@pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore:.*ContextVar")
@pytest.mark.parametrize("bits", [4, 8])
def test_qlora_of_peft_has_the_losses_and_the_adapter_file_of_one_process(bits, tmp_path):
    seeded(llama).save_pretrained(tmp_path / "base")
    plain, *sharded = [adapted(tmp_path / "base", bits) for _ in range(3)]
    wanted = tune(plain, torch.optim.AdamW(adapters(plain), lr=1e-2, fused=True))
    plain.save_pretrained(tmp_path / "wanted")

    def run(rank: int) -> list[float]:
        module = sharded[rank]
        optimizer = torch.optim.AdamW(adapters(module), lr=1e-2)
        onefold.shard(module, optimizer, stage=3)
        losses = tune(module, optimizer)
        with onefold.unsharded(module):
            if rank == 0:
                module.save_pretrained(tmp_path / "found")
        return losses

    assert run_ranks(2, run) == [wanted, wanted]
    name = "adapter_model.safetensors"
    assert (tmp_path / "found" / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes()


def under_trainer(rank: int, folder: Path) -> None:
    """The first of the ranks' worlds is one process, whose plain Trainer is the reference.

    At a rate of 1e-2 steps grow rounding tenfold, under DDP alike: norms differ by 2e-5 at the 4th.
    """
    world_size = torch.distributed.get_world_size()
    options = {
        "per_device_train_batch_size": 6 // world_size, "gradient_accumulation_steps": 2,
        "data": trainers.rows(24), "learning_rate": 1e-3, "adam_epsilon": 1e-3,
    }  # fmt: skip
    runs: dict[int, list[tuple[int, Any]]] = {
        1: [(4, None), (8, None), (4, {"stage": 3})], 2: [(4, {"offload": "cpu"})],
        3: [(8, {"stage": 3})],
    }  # fmt: skip
    for bits, choices in runs[world_size]:
        callbacks = [] if choices is None else [onefold.hf.Callback(**choices)]
        model = adapted(folder / "base", bits)
        trainer = trainers.trainer_of(folder, *callbacks, model=model, **options)
        trainer.train()
        found = trainers.logs(trainer), trainers.weights(model)
        if choices is None:
            torch.save(found, folder / f"{bits}.pt")
            continue
        wanted = torch.load(folder / f"{bits}.pt")
        relative = 0.0 if world_size == 1 else 1e-6
        assert len(found[0]) == 4
        for ours, theirs in zip(found[0], wanted[0], strict=True):
            assert ours == pytest.approx(theirs, rel=relative), (bits, choices)
        for name, value in wanted[1].items():
            if "lora" in name:
                assert (found[1][name] - value).norm() <= 50 * relative * value.norm(), name


@pytest.mark.again(
    "tests/unit/test_quantized.py::test_qlora_of_peft_has_the_losses_and_the_adapter_file_of_one_process"
)
@pytest.mark.process
def test_qlora_under_trainer_has_the_losses_and_adapters_of_one_process(tmp_path):
    seeded(llama).save_pretrained(tmp_path / "base")
    for world_size in (1, 2, 3):
        trainers.on_ranks(world_size, under_trainer, tmp_path)


@again_but("8")
@pytest.mark.parametrize("bits", [4, 8])
def test_from_pretrained_reads_the_packed_weights_that_onefold_saves(bits, tmp_path):
    seeded(llama).save_pretrained(tmp_path / "base")
    packing = transformers.BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    load = partial(transformers.AutoModelForCausalLM.from_pretrained, tmp_path / "base")
    modules = [load(quantization_config=packing) for _ in range(2)]
    wanted = shown(modules[0])

    def save(rank: int) -> None:
        onefold.shard(modules[rank])
        onefold.save_pretrained(modules[rank], tmp_path / "packed")

    run_ranks(2, save)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert_same_state(shown(again), wanted)


def freed(rank: int, kind: str, stage: int) -> dict[Any, int]:
    module = quantized(kind)
    optimizer = torch.optim.AdamW(adapters(module))
    onefold.shard(module, optimizer, stage=stage)
    train(module, optimizer, steps=1)
    ledger = vars(module)["_onefold_engine"].ledger
    del module, optimizer
    return {kind: usage.now for kind, usage in ledger.usage.items()}


@worlds_in_turn
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_deleted_quantized_model_gives_every_byte_back_without_a_collector(kind, stage):
    gc.disable()
    try:
        for left in run_ranks(2, freed, kind, stage):
            assert not any(left.values()), left
    finally:
        gc.enable()


# plain Linears: frozen weights in a codec of ours


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(lambda i, o: nn.Linear(i, o)) for _ in range(2))
        for block in self.blocks:
            for part in (block.up.base, block.down.base):
                part.requires_grad_(False)
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def rounded(word: str) -> tuple[nn.Module, list[Tensor]]:
    """The module, with frozen weights as they are after coding; their values before."""
    module, codec = seeded(Plain), codec_of(word)
    before = [b.detach().clone() for b in bases(module)]
    for weight in bases(module):
        message = torch.empty(codec.nbytes(weight.numel()), dtype=torch.uint8)
        codec.encode(weight.detach().reshape(-1), message)
        codec.decode(message, weight.detach().reshape(-1))
    return module, before


def bases(module: nn.Module) -> list[Tensor]:
    return [part.base.weight for block in module.blocks for part in (block.up, block.down)]


@again_but("int4")
@pytest.mark.parametrize("word", ["int8", "int4"])
def test_frozen_weights_of_plain_linears_rest_and_travel_quantized(word, tmp_path):
    module, _ = rounded(word)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    wanted = train(module, optimizer), weights_of(module)
    values = [each.detach().clone() for each in bases(module)]
    nbytes = sum(codec_of(word).nbytes(each.numel()) for each in values)

    def run(rank: int, choices: Any) -> Any:
        module = seeded(Plain)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        onefold.shard(module, optimizer, precision=onefold.Precision(frozen=word), **choices)
        frozen = [unit for unit in onefold.report(module).units if "packed" in unit.name]
        assert sum(unit.nbytes for unit in frozen) == nbytes
        losses = train(module, optimizer)
        report = onefold.report(module)
        assert rank > 0 or report.differing() == {}
        with pytest.raises(CheckpointError, match=r"Precision\(frozen=\)"):
            onefold.save_pretrained(module, tmp_path / "quantized")
        with onefold.unsharded(module, writeback=True):
            for ours, theirs in zip(bases(module), values, strict=True):
                assert torch.equal(ours, theirs)
            weights = weights_of(module)
        with onefold.unsharded(module):  # decoded numbers code to the same bytes
            assert all(map(torch.equal, bases(module), values))
        return losses, weights

    for world_size, stage in [(1, 3), (2, 0), (2, 1), (2, 3)]:
        for found in run_ranks(world_size, run, {"stage": stage}):
            assert_same_bits(found, wanted)
    for found in run_ranks(2, run, {"offload": f"disk:{tmp_path}"}):
        assert_same_bits(found, wanted)


def test_quantized_weights_are_decoded_one_unit_at_a_time_and_saved_as_bytes(tmp_path):
    options = {"precision": onefold.Precision(compute=torch.bfloat16, frozen="int8")}

    def run(rank: int, seed: int, loads: bool) -> Any:
        module = seeded(Plain, seed=seed)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        onefold.shard(module, optimizer, **options)
        train(module, optimizer, steps=2)
        report = onefold.report(module)
        one_block = 2 * 2 * WIDTH * HIDDEN  # in bf16
        quantized = 2 * codec_of("int8").nbytes(2 * WIDTH * HIDDEN)  # two blocks, and the adapters
        assert report.memory["unsharded"]["device"].peak < one_block + 1.2 * quantized
        assert report.memory["unsharded"]["device"].now == 0
        if loads:
            onefold.load(tmp_path / "run", module, optimizer)
        else:
            onefold.save(tmp_path / "run", module, optimizer)
        found = onefold.full_state_dict(module, rank0_only=False)
        assert found["blocks.0.up.base.weight"].dtype == torch.uint8
        return found

    wanted, _ = run_ranks(2, run, 0, False)
    for world_size in (1, 3):
        for found in run_ranks(world_size, run, 5, True):
            assert_same_state(found, wanted)


def test_weights_that_cannot_be_quantized_are_refused():
    with pytest.raises(ConfigError, match="NF4 is for weights"):
        onefold.Precision(frozen="nf4")  # type: ignore[arg-type]
    with torch.device("meta"):
        module = Plain()
    with pytest.raises(ConfigError, match="before it is quantized"):
        onefold.shard(module, precision=onefold.Precision(frozen="int8"))

    class Editing(Plain):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.blocks[0].up.base.weight.mul_(2)
            return super().forward(x)

    def run(rank: int) -> None:
        module = onefold.shard(seeded(Editing), precision=onefold.Precision(frozen="int8"))
        with pytest.raises(onefold.StateError, match="quantized numbers"):
            module(batch(0))

    run_ranks(2, run)


def test_the_names_of_bitsandbytes_that_are_relied_on_exist():
    """layout/packed.py finds side tables by these names; without one, tables stay on every rank."""
    four, eight = four_bits(WIDTH, HIDDEN).to("cpu"), eight_bits(WIDTH, HIDDEN).to("cpu")
    state = four.weight.quant_state
    assert type(four.weight).__module__.startswith("bitsandbytes.")
    assert {type(four.weight).__name__, type(eight.weight).__name__} == {"Params4bit", "Int8Params"}
    assert {"absmax", "code", "offset", "state2"} <= vars(state).keys()
    assert {"absmax", "code"} <= vars(state.state2).keys()
    tensors = {k for s in (state, state.state2) for k, v in vars(s).items() if type(v) is Tensor}
    assert tensors == {"absmax", "code", "offset"}, "a new table is not sharded yet"
    assert {"CB", "SCB", "has_fp16_weights"} <= vars(eight.weight).keys()
    assert type(eight.state).__name__ == "MatmulLtState"
    assert {"CB", "SCB"} <= vars(eight.state).keys()
    assert "support_avx512bf16_for_cpu" in vars(bnb.nn.Linear4bit(8, 8)), "packs anew, see settle"
    source = inspect.getsource(bnb.nn.Linear4bit.forward)
    assert "packing_format_for_cpu" in source, "the mark of weights that were packed anew"
    notes = [key for key in four.state_dict() if "quant_state.bitsandbytes__nf4" in key]
    assert len(notes) == 1, "the note that save_pretrained writes"


def of_state(module: nn.Module) -> Tensor:
    return module.state_dict()["0.weight"]


def in_list(weight: Tensor) -> None:
    torch._foreach_mul_([torch.ones(2, dtype=torch.uint8), weight], 2)


def into(weight: Tensor) -> None:
    torch.add(weight.clone(), 1, out=weight)


def set_item(weight: Tensor) -> None:
    weight[0] = 1


def by_vector(module: nn.Module) -> None:
    frozen = [module.get_parameter("0.weight")]
    nn.utils.vector_to_parameters(torch.ones(frozen[0].numel(), dtype=torch.uint8), frozen)


EDITS_OF_BYTES: dict[str, Callable[[Any], object]] = {
    "zero_": Tensor.zero_, "neg_": Tensor.neg_, "mul_": lambda weight: weight.mul_(2),
    "clamp_": lambda weight: weight.clamp_(0), "ones_": nn.init.ones_, "normal_": nn.init.normal_,
    "in a list": in_list, "out=": into, "setitem": set_item, "+=": lambda w: w.__iadd__(1),
    "copy_": lambda weight: weight.copy_(torch.ones(8, 8)),
    "copy_ of floats": lambda weight: weight.copy_(torch.ones(weight.shape)),
    "slice": lambda weight: weight[1:3].mul_(2), "row": lambda weight: weight[0].zero_(),
    "view": lambda weight: weight.view(-1).add_(1), "view.copy_": lambda w: w[:2].copy_(w[2:4]),
    "flatten": lambda weight: weight.flatten()[:].fill_(3),
}  # fmt: skip
SHOWN_BYTES: dict[str, Callable[[Any], Any]] = {
    "the parameter": lambda module: module[0].weight,
    ".data": lambda module: module[0].weight.data,
    ".detach()": lambda module: module[0].weight.detach(),
    "state_dict()": of_state,
    ".data.detach()": lambda module: module[0].weight.data.detach(),
}  # fmt: skip


@again_but("1-0-False", "3-3-False")
@worlds_in_turn
@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize(
    ("world_size", "stage"), [(1, 0), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (3, 0), (3, 3)]
)
def test_no_edit_writes_to_the_bytes_of_a_frozen_quantized_weight(world_size, stage, is_inference):
    words = r"'0\.weight'[^$]*writeback=True"

    def body(rank: int) -> None:
        module = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8))
        onefold.shard(module, stage=stage, precision=onefold.Precision(frozen="int8"))
        wanted = own_bytes(module)
        for shown_as, show in SHOWN_BYTES.items():
            for name, edit in EDITS_OF_BYTES.items():
                with torch.inference_mode(is_inference), torch.no_grad():
                    weight = show(module)
                    with pytest.raises(onefold.StateError, match=words):
                        edit(weight)
                        raise AssertionError(f"{name} of {shown_as} is silent")
                assert torch.equal(own_bytes(module), wanted), (name, shown_as)
        with torch.inference_mode(is_inference):
            for edit in (by_vector, assign_data):
                with pytest.raises(onefold.StateError, match=r"0\.weight"):
                    edit(module)
        assert torch.equal(own_bytes(module), wanted)

    run_ranks(world_size, body)


def assign_data(module: nn.Module) -> None:
    weight = module.get_parameter("0.weight")
    weight.data = torch.ones(weight.shape, dtype=torch.uint8)


def own_bytes(module: Any) -> Tensor:
    found = onefold.full_state_dict(module, rank0_only=False)["0.weight"]
    assert type(found) is Tensor
    return found.clone()


@worlds_in_turn
@pytest.mark.filterwarnings("ignore:torch.save of a sharded module")
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 0), (2, 1), (2, 3)])
@every_rank()
def test_the_bytes_of_a_frozen_quantized_weight_can_be_read_and_copied(rank, world_size, stage):
    modules = [nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)) for _ in "ab"]
    for module in modules:
        onefold.shard(module, stage=stage, precision=onefold.Precision(frozen="int8"))
    module, other = modules
    wanted, others = own_bytes(module), own_bytes(other)
    assert not torch.equal(wanted, others)
    for show in SHOWN_BYTES.values():
        with torch.no_grad():
            weight = show(module)
            assert weight.detach().tolist() == wanted.tolist()
            assert weight.detach().numpy().tolist() == wanted.tolist()
            assert weight[3].item() == wanted[3]
            assert weight.sum().item() == wanted.sum()
            assert "tensor(" in repr(weight[:4].float() + 1)
            for read in (weight.clone(), weight.to(torch.int32), weight.float()):
                read.mul_(2)  # of its own
            copied = copy.deepcopy(weight.detach())
            copied.mul_(2)
            file = io.BytesIO()
            torch.save(weight.detach(), file)
            file.seek(0)
            assert torch.load(file, weights_only=False).shape == weight.shape
    assert torch.equal(own_bytes(module), wanted)
    before = copy.deepcopy(module.state_dict())
    for show in SHOWN_BYTES.values():
        with torch.no_grad():
            show(module).copy_(show(other))
            assert torch.equal(own_bytes(module), others)
            module[0].bias.copy_(other[0].bias)
            assert torch.equal(module[0](torch.ones(8)), other[0](torch.ones(8)))
        module.load_state_dict(before)
        assert torch.equal(own_bytes(module), wanted)


def test_a_copy_of_plain_values_into_a_frozen_quantized_weight_is_refused():
    module = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8))
    onefold.shard(module, stage=0, precision=onefold.Precision(frozen="int8"))
    with torch.no_grad():
        module.load_state_dict(module.state_dict())
        with pytest.raises(
            onefold.StateError, match=r"'0\.weight'[^$]*\[8, 8\][^$]*writeback=True"
        ):
            module[0].weight.copy_(torch.ones(8, 8))
        with onefold.unsharded(module, writeback=True):
            module[0].weight.copy_(torch.ones(8, 8))
    with onefold.unsharded(module):
        torch.testing.assert_close(module[0].weight, torch.ones(8, 8), rtol=0, atol=1e-3)
