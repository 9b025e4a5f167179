"""Hugging Face models as they come: built from a config, sharded by one call, nothing else said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import onefold
from tests.support.ranks import every_rank, run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn
from tests.support.zoo import ROWS, Process, Script, adamw, law_1, run_plain, run_sharded

VOCABULARY, LENGTH = 40, 6


def gpt2() -> nn.Module:
    """Its head is tied to its embedding."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=44, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=20, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def t5() -> nn.Module:
    """One weight is the shared, the encoder's, the decoder's embedding and the head."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4,
        dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=44, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=44,
        image_size=8, patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        num_labels=3,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


MODELS = {"gpt2": gpt2, "llama": llama, "mixtral": mixtral, "t5": t5, "bert": bert, "vit": vit}


def batches(steps: int = 2) -> Iterator[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield (
            torch.randint(2, VOCABULARY, (ROWS // 2, LENGTH), generator=generator),
            torch.randn(ROWS // 2, 3, 8, 8, generator=generator),
            torch.randint(0, 3, (ROWS // 2,), generator=generator),
        )


def loss_of(module: nn.Module) -> Callable[[tuple[Tensor, ...]], Tensor]:
    def loss(part: tuple[Tensor, ...]) -> Tensor:
        words, images, classes = part
        if isinstance(module, transformers.ViTForImageClassification):
            return module(pixel_values=images, labels=classes).loss
        return module(input_ids=words, labels=words).loss

    return loss


def training(build: Callable[[], nn.Module], **options: Any) -> Script:
    def script(process: Process) -> None:
        module, optimizer = process.ready(build, adamw, **({} if process.is_plain else options))
        module.train()
        for index, batch in enumerate(batches()):
            process.step(index, module, optimizer, loss_of(module), batch)
        process.note_weights(module)

    return script


@again_but("1-t5", "2-llama", "3-vit")
@worlds_in_turn
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_model_trains_as_in_one_process_at_every_stage(world_size, model):
    script = training(MODELS[model])
    stages = (0, 1, 2, 3) if world_size == 3 else (0, 3)
    # a mixture's load-balancing and each rank's routing see only its part
    law_1(world_size, script, stages=stages, fine_units=False, by_part=model == "mixtral",
          relative=2e-6)  # fmt: skip


def wav2vec2(layerdrop: float) -> nn.Module:
    config = transformers.Wav2Vec2Config(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=24, conv_dim=(8,), conv_stride=(5,), conv_kernel=(10,),
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.0,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0,
        final_dropout=0.0, layerdrop=layerdrop, ctc_loss_reduction="mean", pad_token_id=0,
    )  # fmt: skip
    return transformers.Wav2Vec2ForCTC(config)


@pytest.mark.parametrize("stage", [2, 3])
def test_layers_that_ranks_drop_by_dice_of_their_own_end_no_run(stage):
    """At stage 3 transformers runs them all, once it knows that parameters are sharded."""

    def body(rank: int) -> list[float]:
        module = seeded(wav2vec2, 0.5 if stage == 3 else 0.0)
        optimizer = adamw(module)
        if stage == 3 and rank == 0:
            with pytest.warns(UserWarning, match=r"layerdrop=0\.5 .* no effect at stage 3"):
                onefold.shard(module, optimizer, stage=stage)
        else:
            onefold.shard(module, optimizer, stage=stage)
        module.wav2vec2.encoder.config.layerdrop = 0.5 if stage == 3 or rank == 0 else 0.0
        losses = []
        for _ in range(3):
            wave, labels = torch.linspace(-1, 1, 200).view(2, 100), torch.ones(2, 3).long()
            loss = module(input_values=wave, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    runs = run_ranks(3, body)
    if stage == 3:
        assert runs[0] == runs[1] == runs[2], "all layers ran on all ranks"


@again_but("t5")
@pytest.mark.parametrize("model", ["gpt2", "t5"])
def test_a_model_trains_with_every_module_a_unit(model):
    law_1(2, training(MODELS[model]), stages=(3,), relative=2e-6)


@again_but("llama-False", "t5-True")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("model", ["llama", "t5"])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_a_model_trains_with_its_own_gradient_checkpointing(model, reentrant):
    def build() -> nn.Module:
        module = MODELS[model]()
        module.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            module.enable_input_require_grads()
        return module

    law_1(2, training(build), stages=(0, 3), fine_units=False, relative=2e-6)


@again_but("3-gpt2")
@worlds_in_turn
@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_sharded_model_generates_what_one_process_does(world_size, model):
    build = MODELS[model]
    prompt = torch.tensor([[2, 3, 4], [5, 6, 7]])
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
    wanted = seeded(build).eval().generate(prompt, **options)
    assert wanted.shape == (2, 8)

    def body(rank: int) -> tuple[Tensor, Tensor]:
        module = seeded(build)
        onefold.shard(module, adamw(module), stage=3)
        module.eval()
        first = module.generate(prompt, **options)
        with onefold.unsharded(module):
            second = module.generate(prompt, **options)
        return first, second

    for first, second in run_ranks(world_size, body):
        assert torch.equal(first, wanted)
        assert torch.equal(second, wanted)


@again_but("3")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bf16_compute_is_the_same_at_every_stage_and_near_one_process(world_size):
    script = training(llama, precision="bf16")
    law_1(world_size, script, stages=(0, 2, 3), fine_units=False, relative=1e-2)


def test_a_model_loaded_in_bf16_has_fp32_masters_and_trains_alike_at_every_stage():
    script = training(lambda: gpt2().to(torch.bfloat16))
    runs = [run_sharded(script, 2, stage) for stage in (0, 1, 3)]
    for run in runs[1:]:
        for name, value in runs[0].items():
            assert value is not None
            assert torch.equal(run[name], value), name


def test_micro_batches_of_a_tied_model_accumulate_as_in_one_process():
    def script(process: Process) -> None:
        module, optimizer = process.ready(gpt2)
        for batch in batches():
            if process.is_plain:
                process.mean(loss_of(module), batch).backward()
            else:
                with onefold.accumulate(module):
                    process.mean(loss_of(module), batch).backward()
        process.step("last", module, optimizer, loss_of(module), next(batches(1)))
        process.note_weights(module)

    law_1(2, script, stages=(0, 1), fine_units=False, relative=2e-6)
    law_1(3, script, stages=(2, 3), fine_units=False, relative=2e-6)


@pytest.mark.parametrize("stage", [0, 3])
def test_low_rank_adapters_on_a_frozen_model_train(stage):
    class Adapter(nn.Module):
        """What an adapter library puts in place of a projection."""

        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = nn.Linear(base.in_features, 2, bias=False)
            self.up = nn.Linear(2, base.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    def build() -> nn.Module:
        module = llama().requires_grad_(False)
        for layer in module.model.layers:
            layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
            layer.self_attn.v_proj = Adapter(layer.self_attn.v_proj)
        return module

    law_1(2, training(build), stages=(stage,), fine_units=stage == 3, relative=2e-6)


@every_rank(2)
def test_a_model_saves_and_loads_through_its_own_format(rank, tmp_path):
    """From whole weights, which `unsharded` shows."""
    module = seeded(gpt2)
    optimizer = adamw(module)
    onefold.shard(module, optimizer, stage=3)
    loss_of(module)(next(batches(1))).backward()
    optimizer.step()
    with onefold.unsharded(module):
        if rank == 0:
            module.save_pretrained(tmp_path)
        module.wanted = {n: p.detach().clone() for n, p in module.named_parameters()}
    if rank == 0:
        loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
        for name, value in loaded.named_parameters():
            assert torch.equal(value, module.wanted[name]), name


def test_one_process_is_what_the_plain_script_is():
    """The same seed gives the same plain run twice, another seed does not."""
    script = training(gpt2)
    once, again = run_plain(script), run_plain(script)
    assert all(torch.equal(once[name], again[name]) for name in once if once[name] is not None)
    other = run_plain(training(partial(_reseeded, gpt2)))
    assert not torch.equal(once["0 loss"], other["0 loss"])


def _reseeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(9)
    return build()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="device_map finds one device, a CPU")
def test_a_device_map_of_one_device_is_a_model_as_any_other(tmp_path):
    """Of several devices it is refused: see tests/adapters/test_hf_trainer.py."""
    seeded(llama).save_pretrained(tmp_path)
    words = torch.arange(12).reshape(2, 6)
    wanted = seeded(llama)(input_ids=words, labels=words).loss

    def body(rank: int) -> None:
        with torch.no_grad():
            found = onefold.shard(models[rank])(input_ids=words, labels=words).loss
        torch.testing.assert_close(found, wanted.detach())

    models = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto")
        for _ in range(2)
    ]
    run_ranks(2, body)
