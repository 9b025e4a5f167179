"""Models of transformers as they come, over a split sequence: as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import onefold
from onefold.errors import ConfigError, StateError
from tests.axes.test_sequence import assert_close, gradients
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but

transformers = pytest.importorskip("transformers")

VOCAB = 48
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 32,
}  # fmt: skip


def llama() -> Any:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=12, n_layer=2, n_head=3, n_positions=32,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def qwen() -> Any:
    config = transformers.Qwen3Config(**SMALL, num_key_value_heads=1, head_dim=8)
    return transformers.Qwen3ForCausalLM(config)


def mistral() -> Any:
    config = transformers.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=4)
    return transformers.MistralForCausalLM(config)


def bert() -> Any:
    more = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **more))


def rows(length: int, padding: str | None) -> dict[str, Tensor]:
    """Tokens, a mask if rows are padded, and labels of unequal numbers."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (4, length), generator=generator)
    labels = tokens.clone()
    labels[0, :6], labels[2] = -100, -100
    if padding is None:
        return {"input_ids": tokens, "labels": labels}
    mask = torch.ones_like(tokens)
    for row, count in ((0, 5), (3, 2)):
        where = slice(0, count) if padding == "left" else slice(-count, None)
        mask[row, where], labels[row, where] = 0, -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def prepared(build: Any, recompute: bool) -> Any:
    model = seeded(build).double().train()
    if recompute:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def parted(batch: dict[str, Tensor], rank: int, cp: int, dp: int) -> dict[str, Tensor]:
    return {name: each.chunk(dp)[rank // cp] for name, each in batch.items()}


def compare(build: Any, batch: dict[str, Tensor], cp: int, *, dp: int = 1, **more: Any) -> None:
    """With the model's own loss, which transformers computes in fp32."""
    recompute = more.pop("recompute", False)
    model = prepared(build, recompute)
    loss = model(**batch, **more, use_cache=False).loss
    loss.backward()
    wanted = gradients(model)

    def body(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
        mesh = dist.device_mesh.init_device_mesh("cpu", (dp, cp), mesh_dim_names=("dp", "cp"))
        model = prepared(build, recompute)
        onefold.shard(model, mesh=mesh["dp", "cp"])
        onefold.split_sequence(model, mesh["cp"])
        own = model(**parted(batch, rank, cp, dp), **more).loss
        own.backward()
        return own.detach(), gradients(model)

    ranks = run_ranks(dp * cp, body)
    mean = torch.stack([each[0] for each in ranks]).mean()
    torch.testing.assert_close(mean, loss.detach(), rtol=1e-6, atol=0)
    for _, got in ranks:
        assert_close(got, wanted, 2e-6)


@again_but("None-qwen", "left-gpt2", "right-llama", "right-mistral")
@pytest.mark.parametrize("build", [llama, gpt2, qwen, mistral])
@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_a_causal_model_has_its_loss_and_gradients_with_one_line_more(build, padding):
    compare(build, rows(12, padding), 2, dp=2)
    compare(build, rows(13, padding), 3)


@again_but("mistral")
@pytest.mark.parametrize("build", [llama, gpt2, mistral])
def test_checkpointed_layers_attend_over_all_ranks_again(build):
    compare(build, rows(12, "right"), 4, recompute=True)
    compare(build, rows(9, None), 2, recompute=True)


def test_documents_packed_into_a_row_stay_apart():
    batch = rows(12, None)
    batch["position_ids"] = torch.cat([torch.arange(7), torch.arange(5)])[None].expand(4, -1)
    compare(llama, batch, 3)
    compare(mistral, batch, 2, dp=2)


@again_but(
    "12-4-left-gpt2", "12-4-right-bert", "13-3-None-bert", "13-3-left-gpt2", "13-3-right-bert"
)
@pytest.mark.parametrize("build", [gpt2, bert])
@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize(("length", "cp"), [(12, 4), (13, 3)])
def test_losses_of_ones_own_have_the_gradients_of_one_process(build, padding, length, cp):
    """In fp64. An encoder sees padding that only its mask hides, ours included."""
    batch = rows(length, padding)
    labels, shift = batch.pop("labels"), build is gpt2
    model = prepared(build, recompute=False)
    targets = F.pad(labels[:, 1:], (0, 1), value=-100) if shift else labels
    (loss_of(model(**batch).logits, targets) / (targets != -100).sum()).backward()
    wanted = gradients(model)

    def body(rank: int) -> dict[str, Tensor]:
        model = prepared(build, recompute=False)
        onefold.shard(model, stage=2)
        sequence = onefold.split_sequence(model)
        mine = sequence.labels(labels, shift=shift)
        logits = (
            model(batch["input_ids"], batch.get("attention_mask")).logits
            if not shift
            else (model(**batch).logits)
        )
        onefold.weigh(loss_of(logits, mine), (mine != -100).sum()).backward()
        return gradients(model)

    for got in run_ranks(cp, body):
        assert_close(got, wanted, 1e-12)


@pytest.mark.parametrize("build", [llama, gpt2])
def test_half_precision_is_close_to_one_process(build):
    batch = rows(13, "right")

    def body(rank: int) -> Tensor:
        model = seeded(build)
        onefold.shard(model, precision="bf16")
        onefold.split_sequence(model)
        loss = model(**batch).loss
        loss.backward()
        return loss.detach()

    (wanted,) = run_ranks(1, body)
    torch.testing.assert_close(sum(run_ranks(2, body)) / 2, wanted, rtol=5e-3, atol=0)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def test_a_whole_mask_of_four_axes_is_used_as_it_is():
    batch = rows(12, None)
    mask = torch.ones(12, 12, dtype=torch.bool).tril() & torch.ones(12, 12).triu(-4).bool()
    batch = {"attention_mask": mask.expand(4, 1, -1, -1)} | batch
    compare(llama, batch, 2, dp=2)


def test_a_number_of_items_is_taken_as_a_trainer_counts_it():
    """Over the whole rows of all ranks: those of a sequence count each of its rows."""
    batch = rows(12, None)
    count = (batch["labels"][:, 1:] != -100).sum()

    def body(rank: int) -> Tensor:
        model = prepared(llama, recompute=False)
        onefold.split_sequence(model)
        return model(**batch, num_items_in_batch=count * 2).loss.detach()

    wanted = prepared(llama, recompute=False)(**batch).loss.detach()
    torch.testing.assert_close(sum(run_ranks(2, body)), wanted, rtol=1e-6, atol=0)


def test_a_removed_split_leaves_the_model_as_it_was():
    tokens = rows(8, None)["input_ids"]
    model = prepared(llama, recompute=False)
    wanted, generated = model(tokens).logits, model.generate(tokens, max_new_tokens=3)

    def body(rank: int) -> tuple[Tensor, Tensor]:
        model = prepared(llama, recompute=False)
        before = model.config.to_dict()
        with onefold.split_sequence(model):
            assert model.config._attn_implementation == "onefold_sequence"
            assert model.model(tokens).last_hidden_state.shape[1] == 8, "a part runs whole"
            with pytest.raises(StateError, match=r"remove\(\)"):
                model.generate(tokens, max_new_tokens=3)
        assert model.config.to_dict() == before
        assert model.config._attn_implementation == "sdpa"
        return model(tokens).logits, model.generate(tokens, max_new_tokens=3)

    for logits, again in run_ranks(2, body):
        assert torch.equal(logits, wanted)
        assert torch.equal(again, generated)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_around_a_model_train_over_a_split_sequence():
    peft = pytest.importorskip("peft")

    def adapted() -> nn.Module:
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(llama(), config)

    compare(adapted, rows(12, "left"), 2, dp=2)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_learned_prompts_before_each_piece_are_an_error():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(llama(), config)
    with pytest.raises(ConfigError, match="learned prompts"):
        onefold.split_sequence(model)


def test_pooled_outputs_are_left_out():
    def body(rank: int) -> bool:
        model = seeded(lambda: transformers.BertModel(bert().config))
        onefold.split_sequence(model)
        outputs = model(rows(12, None)["input_ids"])
        return outputs.pooler_output is None and outputs.last_hidden_state.shape[1] == 6

    assert run_ranks(2, body) == [True, True]


class Around(nn.Module):
    """A model of one's own around one of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits


def call(model: Any, **given: Any) -> None:
    onefold.split_sequence(model)
    model(**({"input_ids": rows(12, None)["input_ids"]} | given))


def of(kind: str, head: str, **more: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**SMALL, **more)
    return getattr(transformers, f"{kind}For{head}")(config)


@pytest.mark.parametrize(
    ("run", "error", "message"),
    [
        (lambda: call(bert(), labels=rows(12, None)["labels"]), ConfigError, "no labels for a"),
        (lambda: call(llama(), use_cache=True), StateError, "use_cache="),
        (lambda: call(llama(), logits_to_keep=1), StateError, "logits_to_keep="),
        (lambda: call(of("Llama", "SequenceClassification")), ConfigError, "the output of one pos"),
        (lambda: call(of("Roberta", "MaskedLM")), ConfigError, "position_ids, which Roberta"),
        (
            lambda: call(of("Mixtral", "CausalLM", output_router_logits=True)),
            ConfigError,
            "the auxiliary loss",
        ),
        (
            lambda: call(of("Qwen3", "CausalLM", layer_types=["linear_attention"] * 2)),
            ConfigError,
            "linear",
        ),
        (lambda: call(transformers.T5ForConditionalGeneration(t5())), ConfigError, "several parts"),
        (lambda: onefold.split_sequence(Around()), ConfigError, "a Around around one"),
        (lambda: onefold.split_sequence(llama(), inputs=False), ConfigError, "inputs=False"),
        (lambda: call(llama(), input_ids=torch.zeros(2, 1).long()), ConfigError, "at least 2"),
        (lambda: call(of("Gemma2", "CausalLM", head_dim=4)), ConfigError, "softcap"),
    ],
    ids=range(12),
)
def test_what_would_be_wrong_is_a_named_error_on_every_rank(run, error, message):
    def body(rank: int) -> str:
        with pytest.raises(error) as caught:
            run()
        return str(caught.value)

    for told in run_ranks(2, body):
        assert message in told
        assert "\nhint: " in told


def t5() -> Any:
    return transformers.T5Config(vocab_size=VOCAB, d_model=16, d_ff=24, num_layers=1, num_heads=2)


def test_transformers_offers_what_the_split_is_built_on():
    """These names are used to build masks of whole rows; a failure here names the one that went."""
    from transformers import masking_utils

    for name in (
        "AttentionMaskInterface", "causal_mask_function", "find_packed_sequence_indices",
        "packed_sequence_compatibility_function", "sdpa_mask",
    ):  # fmt: skip
        assert callable(getattr(masking_utils, name)), name
    assert callable(transformers.AttentionInterface.register)
    assert llama().config._attn_implementation == "sdpa", "the attribute is read to restore it"
