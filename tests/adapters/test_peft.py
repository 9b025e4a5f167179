"""PEFT's own classes on sharded models: adapters added before or after `onefold.shard`."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import onefold
from onefold.layout.rows import ALIGN_NUMEL, PIECE_NUMEL, round_up
from tests.support.hf_ranks import run_forks
from tests.support.ranks import every_rank, run_ranks, seeded
from tests.support.rows import again_but

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from tests.adapters.test_huggingface import LENGTH, VOCABULARY, bert, gpt2, llama, t5  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # PEFT's call
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable` is deprecated"),
    pytest.mark.filterwarnings("ignore:Adapter other was active which is now deleted"),
    pytest.mark.filterwarnings("ignore:Unmerge result can be inaccurate"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute"),
    pytest.mark.filterwarnings("ignore:.*fan_in_fan_out is set to False"),
    pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied"),
    pytest.mark.filterwarnings("ignore:ranks 0 and 1 got the same first batch"),
]

LLAMA = ["q_proj", "v_proj", "down_proj"]
TUNERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "lora": (llama, lambda: lora()),
    "dora": (llama, lambda: lora(use_dora=True)),
    "rslora-bias": (bert, lambda: lora(["query", "value"], use_rslora=True, bias="lora_only")),
    "conv1d": (gpt2, lambda: lora(["c_attn"], fan_in_fan_out=True)),
    "ia3": (
        llama,
        lambda: peft.IA3Config(
            target_modules=LLAMA, feedforward_modules=["down_proj"], init_ia3_weights=False
        ),
    ),
    "tokens": (
        llama,
        lambda: peft.TrainableTokensConfig(token_indices=[1, 5], target_modules=["embed_tokens"]),
    ),
    "lora-tokens": (t5, lambda: lora(["q", "v"], trainable_token_indices={"shared": [1, 5]})),
    "adalora": (
        llama,
        lambda: peft.AdaLoraConfig(
            init_r=3, target_r=2, target_modules=["q_proj"], total_step=10, tinit=1, tfinal=5,
            init_lora_weights=False,
        ),
    ),
    "vera": (
        llama,
        lambda: peft.VeraConfig(r=2, target_modules=["q_proj"], init_weights=False),
    ),
}  # fmt: skip
PROMPTS: dict[str, Callable[[], Any]] = {
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


def lora(targets: list[str] | None = None, **options: Any) -> Any:
    chosen = {"r": 2, "init_lora_weights": False, **options}
    return peft.LoraConfig(target_modules=targets or LLAMA, **chosen)


def adapted(build: Callable[[], nn.Module] = llama, config: Callable[[], Any] = lora) -> nn.Module:
    """A model with adapters, as one process has it."""
    model = seeded(build)
    return seeded(partial(peft.get_peft_model, model, config()), seed=5)


def adapted_after(plain: nn.Module, build: Any, config: Any, **options: Any) -> nn.Module:
    """The same, sharded first; threads share a generator, so initial values are copied."""
    model = seeded(build)
    onefold.shard(model, **options)
    found = peft.get_peft_model(model, config())
    dist.barrier()
    with torch.no_grad():
        for (name, mine), (same, value) in zip(
            found.named_parameters(), plain.named_parameters(), strict=True
        ):
            assert name == same
            assert mine.shape == value.shape
            if value.requires_grad and not isinstance(mine, DTensor):
                mine.copy_(value)
        for buffer, value in zip(found.buffers(), plain.buffers(), strict=True):
            buffer.copy_(value)
    return found


def words(steps: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, VOCABULARY, (6, LENGTH), generator=generator) for _ in range(steps)]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, eps=1e-3, fused=True)


def train(model: nn.Module, rank: int = 0, world_size: int = 1, steps: int = 2) -> Tensor:
    """An ordinary loop; the losses."""
    model.train()
    optimizer = optimizer_of(model)
    losses = []
    for batch in words(steps):
        rows = batch.chunk(world_size)[rank]
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-6, msg=name)


def file_of(model: nn.Module, folder: Path) -> bytes:
    model.save_pretrained(folder)
    return (folder / "adapter_model.safetensors").read_bytes()


def logits(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=words()[0], labels=words()[0]).logits


# training, and the files of adapters


@again_but(
    "lora-after", "dora-before", "rslora-bias-after", "conv1d-after", "ia3-before", "tokens-after",
    "lora-tokens-after", "adalora-before", "vera-after",
)  # fmt: skip
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("tuner", TUNERS)
def test_a_tuner_trains_and_saves_as_in_one_process(tuner, order, tmp_path):
    """Its adapter files are those of one process, byte for byte, at equal values."""
    build, config = TUNERS[tuner]
    fresh = adapted(build, config)
    before = file_of(fresh, tmp_path / "plain")
    plain = copy.deepcopy(fresh)
    losses = train(plain)

    def body(rank: int, world_size: int, stage: int) -> Any:
        if order == "before":
            model = adapted(build, config)
            onefold.shard(model, stage=stage)
        else:
            model = adapted_after(fresh, build, config, stage=stage)
            logits(model)  # the first forward takes the adapters in
        assert file_of(model, tmp_path / f"{world_size}-{rank}") == before
        found = train(model, rank, world_size)
        file = file_of(model, tmp_path / f"{world_size}-{rank} trained")
        return found, onefold.full_state_dict(model, rank0_only=False), file

    is_first = (list(TUNERS).index(tuner) + (order == "before")) % 2 == 0
    for world_size, stage in ((2, 3),) if is_first else ((3, 1),):  # each tuner meets both
        results = run_ranks(world_size, body, world_size, stage)
        mean = torch.stack([found for found, _, _ in results]).mean(0)
        torch.testing.assert_close(mean, losses, rtol=1e-5, atol=0)
        for _, state, file in results:
            assert_near(state, values(plain))
            same = copy.deepcopy(fresh)
            same.load_state_dict(state, strict=False)
            assert file == file_of(same, tmp_path / "same")


@again_but("prefix")
@pytest.mark.parametrize("tuner", PROMPTS)
def test_prompts_that_are_learned_train_if_added_before(tuner, tmp_path):
    plain = adapted(llama, PROMPTS[tuner])
    losses = train(plain)

    def body(rank: int) -> Any:
        model = adapted(llama, PROMPTS[tuner])
        onefold.shard(model)
        found = train(model, rank, 2)
        model.save_pretrained(tmp_path / str(rank))
        return found, onefold.full_state_dict(model, rank0_only=False)

    results = run_ranks(2, body)
    mean = torch.stack([found for found, _ in results]).mean(0)
    torch.testing.assert_close(mean, losses, rtol=1e-5, atol=0)
    for rank, (_, state) in enumerate(results):
        assert_near(state, values(plain))
        loaded = peft.PeftModel.from_pretrained(seeded(llama), tmp_path / str(rank))
        torch.testing.assert_close(logits(loaded), logits(plain), rtol=1e-3, atol=1e-4)


def test_prompts_that_are_added_after_are_named_by_a_warning():
    """They lie outside of the sharded module."""

    def body(rank: int) -> None:
        model = seeded(llama)
        onefold.shard(model)
        train(peft.get_peft_model(model, PROMPTS["prompt"]()), rank, 2, steps=1)

    with pytest.warns(UserWarning, match="outside of the sharded module trains through it"):
        run_ranks(2, body)


@again_but("after")
@pytest.mark.parametrize("order", ["before", "after"])
def test_one_rank_is_one_process_bit_for_bit(order, tmp_path):
    fresh = adapted()
    plain = copy.deepcopy(fresh)
    losses = train(plain, steps=3)
    file = file_of(plain, tmp_path / "plain")

    def body(rank: int) -> None:
        if order == "before":
            model = adapted()
            onefold.shard(model)
        else:
            model = adapted_after(fresh, llama, lora)
        assert torch.equal(train(model, steps=3), losses)
        assert file_of(model, tmp_path / "sharded") == file

    run_ranks(1, body)


@again_but("{'stage': 0}", "{'offload': 'disk'}")
@pytest.mark.parametrize(
    "options", [{"stage": 0}, {"stage": 2}, {"offload": "cpu"}, {"offload": "disk"}], ids=str
)
def test_both_orders_have_the_same_bits_at_every_stage_and_tier(options, tmp_path):
    fresh = adapted()

    def body(rank: int, order: str, options: dict[str, Any]) -> Any:
        if options.get("offload") == "disk":
            options = {"offload": f"disk:{tmp_path}"}
        if order == "before":
            model = adapted()
            onefold.shard(model, **options)
        else:
            model = adapted_after(fresh, llama, lora, **options)
        return train(model, rank, 3), onefold.full_state_dict(model, rank0_only=False)

    wanted, state = run_ranks(3, body, "before", {"stage": 3})[0]
    for order in ("before", "after"):
        found, same = run_ranks(3, body, order, options)[0]
        assert torch.equal(found, wanted)
        assert all(torch.equal(same[name], value) for name, value in state.items())


# merging


@again_but(
    "lora-after", "dora-after", "rslora-bias-before", "conv1d-after", "ia3-after",
    "lora-tokens-before", "vera-after",
)  # fmt: skip
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("tuner", [t for t in TUNERS if t not in ("tokens", "adalora")])
def test_merged_adapters_are_those_of_one_process(tuner, order, tmp_path):
    build, config = TUNERS[tuner]
    fresh = adapted(build, config)
    plain = copy.deepcopy(fresh)
    plain.merge_adapter()
    merged = logits(plain)
    plain.unmerge_adapter()
    apart = logits(plain)
    base = plain.merge_and_unload()
    base.save_pretrained(tmp_path / "plain")

    def body(rank: int) -> None:
        if order == "before":
            model = adapted(build, config)
            onefold.shard(model)
        else:
            model = adapted_after(fresh, build, config)
        torch.testing.assert_close(logits(model), apart, rtol=1e-4, atol=1e-5)
        with onefold.unsharded(model, writeback=True):
            model.merge_adapter()
        torch.testing.assert_close(logits(model), merged, rtol=1e-4, atol=1e-5)
        with onefold.unsharded(model, writeback=True):
            model.unmerge_adapter()
        torch.testing.assert_close(logits(model), apart, rtol=1e-4, atol=1e-5)
        with onefold.unsharded(model, writeback=True):
            model = model.merge_and_unload()
        gc.collect()
        torch.testing.assert_close(logits(model), merged, rtol=1e-4, atol=1e-5)
        onefold.save_pretrained(model, tmp_path / "sharded")
        assert not any("lora" in name or "ia3" in name for name, _ in model.named_parameters())
        model.requires_grad_(True)
        train(model, rank, 2)

    run_ranks(2, body)
    loaded = type(base).from_pretrained(tmp_path / "sharded")
    torch.testing.assert_close(values(loaded), values(base), rtol=1e-4, atol=1e-6)


def test_pretrained_weights_fill_a_wrapper_of_a_sharded_model(tmp_path):
    def body(rank: int) -> None:
        model = adapted_after(fresh, llama, lora, stage=3)
        onefold.save_pretrained(model, tmp_path / "saved")
        wanted = values(model)
        with onefold.unsharded(model, writeback=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
        onefold.load_pretrained(model, tmp_path / "saved")
        found = values(model)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)

    fresh = adapted()
    run_ranks(2, body)


@again_but("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_low_rank_adapters_merge_outside_of_unsharded_too(stage):
    def filled() -> nn.Module:
        model, generator = adapted(), torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
        return model

    def body(rank: int) -> dict[str, Tensor]:
        model = filled()
        onefold.shard(model, stage=stage)
        model.merge_adapter()
        return {name: p.full_tensor() for name, p in model.named_parameters()}

    wanted = filled()
    apart = values(wanted)
    wanted.merge_adapter()
    assert any(not torch.equal(value, apart[name]) for name, value in values(wanted).items())
    for merged in run_ranks(3, body):
        torch.testing.assert_close(merged, values(wanted), rtol=1e-5, atol=1e-6)


@again_but("after")
@pytest.mark.parametrize("order", ["before", "after"])
def test_merging_without_writeback_warns_that_it_is_discarded(order):
    fresh = adapted()

    def body(rank: int) -> None:
        model = adapted() if order == "before" else adapted_after(fresh, llama, lora)
        if order == "before":
            onefold.shard(model)
        with onefold.unsharded(model):  # comes out as it went in
            model.merge_adapter()
            model.unmerge_adapter()
        with onefold.unsharded(model, writeback=True), onefold.unsharded(model):
            model.merge_adapter()
            model.unmerge_adapter()
        if rank == 0:
            seen.append(len(caught))
        dist.barrier()
        logits(model)
        numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
        told = onefold.report(model).notes
        assert [note[: note.find(" joined")] for note in told] == (
            [f"{numel:,d} parameters"] if order == "after" else []
        )
        with onefold.unsharded(model):
            model.merge_adapter() if order == "after" else model.merge_and_unload()

    seen: list[int] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", "adapters of 6 layers were merged, or taken out")
        run_ranks(2, body)
    assert seen == [0]
    assert len(caught) == 2
    assert {Path(each.filename).name for each in caught} == {Path(__file__).name}


# loading


def test_adapters_are_loaded_switched_and_deleted_on_a_sharded_model(tmp_path):
    first, second = adapted(), adapted(config=lambda: lora(["k_proj"], r=3))
    for name, each in (("first", first), ("second", second)):
        each.save_pretrained(tmp_path / name)
    base = seeded(llama)  # threads that load share the generator
    plain = peft.PeftModel.from_pretrained(
        copy.deepcopy(base), tmp_path / "first", is_trainable=True
    )
    plain.load_adapter(tmp_path / "second", "other", is_trainable=True)

    def compare(model: nn.Module, wanted: nn.Module) -> None:
        torch.testing.assert_close(logits(model), logits(wanted), rtol=1e-4, atol=1e-5)

    def body(rank: int, is_before: bool) -> None:
        wanted, model = copy.deepcopy(plain), copy.deepcopy(base)
        if not is_before:
            onefold.shard(model)
        model = peft.PeftModel.from_pretrained(model, tmp_path / "first", is_trainable=True)
        if is_before:
            onefold.shard(model)
        compare(model, wanted)
        options: dict[str, Any] = {"low_cpu_mem_usage": is_before}  # True: built on meta, assigned
        model.load_adapter(tmp_path / "second", "other", is_trainable=True, **options)
        compare(model, wanted)
        for each in (model, wanted):
            each.set_adapter("other")
        compare(model, wanted)
        with model.disable_adapter(), wanted.disable_adapter():
            compare(model, wanted)
        losses = train(model, rank, 2)
        dist.all_reduce(losses)
        torch.testing.assert_close(losses / 2, train(wanted), rtol=1e-5, atol=0)
        for each in (model, wanted):
            each.delete_adapter("other")
            each.set_adapter("default")
        compare(model, wanted)
        train(model, rank, 2, steps=1)

    run_ranks(2, body, False)
    run_forks(2, body, True)  # to build on meta, PEFT replaces a method of all modules for a while


def test_adapters_come_in_inference_mode_and_go_right_before_unsharded():
    """IA3 keeps parameters in a dict of its layer: deleting them leaves the layer where it was."""

    def build(base: nn.Module) -> nn.Module:
        found = seeded(partial(peft.get_peft_model, base, TUNERS["ia3"][1]()), seed=5)
        found.add_adapter("other", TUNERS["ia3"][1]())
        return found

    def body(rank: int) -> None:
        base = seeded(llama)
        onefold.shard(base)
        model = build(base)
        with torch.no_grad():
            for (name, mine), value in zip(model.named_parameters(), fresh, strict=True):
                if "ia3" in name:
                    mine.copy_(value)
        with torch.inference_mode():
            torch.testing.assert_close(logits(model), wanted)
        assert torch.equal(logits(copy.copy(model)), logits(model))  # it shares all parts
        losses = train(model, rank, 2)
        dist.all_reduce(losses)
        torch.testing.assert_close(losses / 2, trained)
        model.delete_adapter("other")
        with onefold.unsharded(model):
            assert not any("other" in name for name, _ in model.named_parameters())
            assert_near(values(model), after)

    plain = build(seeded(llama))
    fresh = [p.detach().clone() for p in plain.parameters()]
    wanted, trained = logits(plain), train(plain)
    plain.delete_adapter("other")
    after = values(plain)
    run_ranks(2, body)


@again_but("after")
@pytest.mark.parametrize("order", ["before", "after"])
def test_checkpoints_hold_adapters_and_resume_at_another_world_size(order, tmp_path):
    fresh = adapted()
    plain = copy.deepcopy(fresh)
    train(plain, steps=2)

    def start() -> nn.Module:
        if order == "before":
            model = adapted()
            onefold.shard(model)
            return model
        return adapted_after(fresh, llama, lora)

    def save(rank: int) -> None:
        model = start()
        train(model, rank, 2)
        onefold.save(tmp_path / "run", model)

    def load(rank: int) -> None:
        model = start()
        onefold.load(tmp_path / "run", model)
        assert_near(onefold.full_state_dict(model, rank0_only=False), values(plain))

    run_ranks(2, save)
    run_ranks(3, load)


def test_a_checkpoint_of_either_order_loads_in_the_other(tmp_path):
    fresh = adapted()

    def save(rank: int) -> dict[str, Tensor]:
        model = adapted_after(fresh, llama, lora)
        train(model, rank, 2)
        onefold.save(tmp_path / "after", model)
        return onefold.full_state_dict(model, rank0_only=False)

    def load(rank: int) -> dict[str, Tensor]:
        model = adapted()
        onefold.shard(model)
        onefold.load(tmp_path / "after", model)
        return onefold.full_state_dict(model, rank0_only=False)

    wanted = run_ranks(2, save)[0]
    for found in run_ranks(2, load):
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


# bytes


@pytest.mark.parametrize("order", ["before", "after"])
def test_frozen_parameters_have_no_gradient_master_or_moments(order):
    """A base in bf16, norms and adapters in fp32. Only the adapters have masters, and none here."""

    def build() -> nn.Module:
        model = llama().bfloat16()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data = parameter.data.float()
        return model

    fresh = adapted(build)
    adapters = sum(p.numel() for p in fresh.parameters() if p.requires_grad)

    def body(rank: int) -> None:
        if order == "before":
            model = adapted(build)
            onefold.shard(model)
        else:
            model = adapted_after(fresh, build, lora)
        optimizer = optimizer_of(model)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=words()[0], labels=words()[0]).loss
        loss.backward()
        sent = onefold.report(model).traffic["reduce_scatter"].sent_nbytes
        optimizer.step()
        report = onefold.report(model)
        mine = rounded_numel(model, lambda p: p.requires_grad)
        assert report.nbytes("master") == 0
        assert report.nbytes("grad") == 4 * mine
        assert report.nbytes("optimizer") == 8 * mine
        frozen = rounded_numel(model, lambda p: not p.requires_grad and p.dtype == torch.bfloat16)
        norms = rounded_numel(model, lambda p: not p.requires_grad and p.dtype == torch.float32)
        assert report.nbytes("weight") == 2 * frozen + 4 * (norms + mine)
        assert sent <= 4 * (adapters + 64)  # half of the elements, with flags; never the base

    run_ranks(2, body)


def rounded_numel(model: nn.Module, is_wanted: Callable[[nn.Parameter], bool]) -> int:
    """Elements of this rank's rows, each parameter's rounded up as buffers are laid out."""
    return sum(
        round_up(p.to_local().numel(), PIECE_NUMEL)
        if isinstance(p, DTensor)
        else round_up(p.numel(), ALIGN_NUMEL)
        for p in model.parameters()
        if is_wanted(p)
    )


def test_saving_gathers_adapters_alone(tmp_path):
    def body(rank: int, world_size: int) -> None:
        model = adapted()
        onefold.shard(model)
        own = sum(p.to_local().numel() for p in model.parameters() if p.requires_grad)
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, own)
        model.save_pretrained(tmp_path, is_main_process=rank == 0)
        traffic = onefold.report(model).traffic
        assert traffic["state_dict"].sent_nbytes == (world_size - 1) * 4 * max(everyone)
        assert set(traffic) == {"state_dict"}

    for world_size in (2, 3):
        run_ranks(world_size, body, world_size)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # of safetensors
def test_embeddings_are_saved_whole_or_named(tmp_path):
    """PEFT saves embeddings that have adapters, and all of them where a user asks for it."""
    plain = adapted(config=lambda: lora(["q_proj", "embed_tokens", "lm_head"]))
    plain.save_pretrained(tmp_path / "adapted")
    adapted().save_pretrained(tmp_path / "asked", save_embedding_layers=True)

    def body(rank: int, order: str) -> None:
        config = partial(lora, ["q_proj", "embed_tokens", "lm_head"])
        if order == "before":
            model = adapted(config=config)
            onefold.shard(model)
        else:
            model = adapted_after(plain, llama, config)
        model.save_pretrained(tmp_path / order, is_main_process=rank == 0)
        model = onefold.shard(adapted())
        options = {"is_main_process": rank == 0, "save_embedding_layers": True}
        named = pytest.raises(onefold.StateError, match=r"inside `with onefold\.unsharded")
        with named if rank == 0 else nullcontext():
            model.save_pretrained(tmp_path / "refused", **options)
        with onefold.unsharded(model):
            model.save_pretrained(tmp_path / "found", **options)

    name = "adapter_model.safetensors"
    for order in ("before", "after"):
        run_ranks(2, body, order)
        assert (tmp_path / order / name).read_bytes() == (tmp_path / "adapted" / name).read_bytes()
    assert (tmp_path / "found" / name).read_bytes() == (tmp_path / "asked" / name).read_bytes()


# the mesh


@every_rank(2)
def test_the_axis_of_shards_has_the_name_that_peft_takes_for_whole_features(rank):
    """`peft.tuners.tuners_utils._get_in_out_features` reads it: another name means local rows."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    node = init_device_mesh("cpu", (1, 2), mesh_dim_names=("node", "rank"))
    for given in (None, mesh, node, dist.group.WORLD):
        model = seeded(llama)
        onefold.shard(model, mesh=given)
        assert model.lm_head.weight.device_mesh.mesh_dim_names == ("fsdp",)
        found = peft.tuners.tuners_utils._get_in_out_features(model.lm_head)
        assert found == (32, VOCABULARY)


# mistakes


def test_adapters_that_differ_between_ranks_are_named_on_every_rank():
    def body(rank: int) -> str:
        model = seeded(llama)
        onefold.shard(model)
        model = peft.get_peft_model(model, lora(["q_proj"] if rank else ["v_proj"]))
        with pytest.raises(onefold.StateError, match="same new parameters on every rank") as error:
            logits(model)
        return str(error.value)

    assert all("\nhint: " in said for said in run_ranks(2, body))


@pytest.mark.parametrize("order", ["before", "after"])
@every_rank(2)
def test_an_optimizer_built_before_the_adapters_is_named(rank, order):
    model = seeded(llama)
    optimizer = torch.optim.AdamW(model.parameters())
    expected = pytest.raises(onefold.OnefoldError, match="after adapters were added")
    if order == "before":
        model = peft.get_peft_model(model, lora())
        with expected:
            onefold.shard(model, optimizer)
        return
    onefold.shard(model, optimizer)
    model = peft.get_peft_model(model, lora())
    model(input_ids=words()[0], labels=words()[0]).loss.backward()
    with expected:
        optimizer.step()


def modules_to_save(model: nn.Module) -> None:
    peft.get_peft_model(model, lora(modules_to_save=["lm_head"]))


def layer_norms(model: nn.Module) -> None:
    peft.get_peft_model(model, peft.LNTuningConfig(target_modules=["input_layernorm"]))


def resize(model: nn.Module) -> None:
    model.resize_token_embeddings(VOCABULARY + 8)


@pytest.mark.parametrize("mistake", [modules_to_save, layer_norms, resize])
def test_copies_and_new_sizes_after_sharding_are_errors_that_say_to_do_so_before(mistake):
    def body(rank: int) -> str:
        model = seeded(llama)
        onefold.shard(model)
        with pytest.raises(onefold.StateError, match=r"before onefold\.shard") as error:
            mistake(model)
        return str(error.value)

    assert all("\nhint: " in said for said in run_ranks(2, body))


def test_modules_to_save_and_gradient_checkpointing_train_if_added_before(tmp_path):
    config = partial(lora, modules_to_save=["lm_head"])

    def build() -> nn.Module:
        model = adapted(config=config)
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": True})
        return model

    plain = build()
    losses = train(plain)

    def body(rank: int) -> Any:
        model = build()
        onefold.shard(model)
        found = train(model, rank, 2)
        model.save_pretrained(tmp_path / str(rank))
        return found

    results = run_ranks(2, body)
    torch.testing.assert_close(torch.stack(results).mean(0), losses, rtol=1e-5, atol=0)
    loaded = peft.PeftModel.from_pretrained(seeded(llama), tmp_path / "0")
    torch.testing.assert_close(logits(loaded), logits(plain), rtol=1e-3, atol=1e-4)


BEGINNINGS: dict[str, Callable[[], Any]] = {
    "zero": lambda: peft.LoraConfig(r=16, target_modules="all-linear", modules_to_save=["lm_head"]),
    "gaussian": lambda: lora(r=16, init_lora_weights="gaussian"),
    "random": lambda: lora(r=16),
    "embedding": lambda: lora(["embed_tokens"], r=16, init_lora_weights=True),
}


@pytest.mark.parametrize("case", BEGINNINGS)
def test_factors_on_a_meta_model_have_the_distribution_of_peft(case, tmp_path):
    """The model's own rule, which knows linear layers alone, would give both a std of 0.02."""
    base = seeded(llama)
    base.save_pretrained(tmp_path)
    wanted = peft.get_peft_model(copy.deepcopy(base), BEGINNINGS[case]())
    with torch.device("meta"):
        model = llama()
    onefold.load_pretrained(model, tmp_path)
    model = peft.get_peft_model(model, BEGINNINGS[case]())
    onefold.shard(model, stage=3)
    begun = dict(model.named_parameters())
    for name, value in wanted.named_parameters():
        if ".lora_" in name:
            most = 1.3 if value.numel() > 200 else 1.6  # a factor of 16 ranks has few numbers
            assert begun[name].std() <= most * value.std(), name
            assert value.std() <= most * begun[name].std(), name
        else:
            assert torch.equal(begun[name], value), name
    if case != "random":
        assert torch.equal(logits(model), logits(base))


def test_a_copy_that_peft_trains_whole_has_the_rule_of_a_model_on_meta():
    """The base has no files here, so that its values and those of the copy are drawn."""
    with torch.device("meta"):
        model = peft.get_peft_model(llama(), lora(modules_to_save=["lm_head"]))
    onefold.shard(model)
    (copied,) = [p for name, p in model.named_parameters() if "modules_to_save" in name]
    assert 0.01 < copied.std() < 0.04  # of the model: 0.02


@pytest.mark.parametrize("tuner", ["ia3", "vera", "adalora"])
def test_adapters_whose_values_only_peft_makes_are_refused_on_meta(tuner):
    build, config = TUNERS[tuner]
    with torch.device("meta"):
        model = peft.get_peft_model(build(), config())
    with pytest.raises(onefold.ConfigError, match="adapters on the meta device to be of LoRA"):
        onefold.shard(model)
