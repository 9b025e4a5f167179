"""TRL's own trainers on sharded models: as under DDP, with a reference model in shards."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import onefold
from onefold.adapters.hf.wrap import mark_prepared
from onefold.hf import Callback, adopt_frozen, adopt_trainer
from tests.house.test_examples import alone, numbers, under_torchrun
from tests.support.hf_ranks import run_forks
from tests.support.rows import again_but

datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")

from trl.distributed import DistributedBackend  # noqa: E402
from trl.generation.vllm_generation import VLLMGeneration  # noqa: E402
from trl.models.utils import create_reference_model  # noqa: E402

pytestmark = pytest.mark.process

WORDS = [f"w{i}" for i in range(28)]
IN_BF16 = pytest.mark.again(
    "tests/adapters/test_hf_trl.py::test_sft_has_the_losses_and_norms_of_ddp"
)


def tokenizer() -> Any:
    names = ["<pad>", "<eos>", "<unk>", *WORDS]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def llama(seed: int = 0, *, tied: bool = True) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=32, intermediate_size=44, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def sentences(count: int, length: int = 6) -> list[str]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, len(WORDS), (count, length), generator=generator)
    return [" ".join(WORDS[i] for i in row) for row in ids.tolist()]


def arguments(kind: Any, folder: Any, **options: Any) -> Any:
    given = {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2,
        "bf16": False, "max_grad_norm": 0.5, "seed": 5,
    }  # fmt: skip
    return kind(**(given | options))


def losses(trainer: Any) -> list[tuple[float, float]]:
    trainer.train()
    return [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e]


def callbacks(stage: int | None) -> list[Any]:
    return [] if stage is None else [Callback(stage=stage)]


def sft(rank: int, folder: Any, is_bf16: bool) -> dict[Any, Any]:
    found = {}
    stages = (None, 0, 1, 2, 3) if torch.distributed.get_world_size() == 2 else (None, 0, 3)
    for stage in stages:
        trainer = trl.SFTTrainer(
            llama(), args=arguments(trl.SFTConfig, folder, max_length=8, bf16=is_bf16),
            train_dataset=datasets.Dataset.from_dict({"text": sentences(24)}),
            processing_class=tokenizer(), callbacks=callbacks(stage),
        )  # fmt: skip
        found[stage] = losses(trainer)
    return found


def assert_like_ddp(found: dict[Any, Any]) -> None:
    for stage, told in found.items():
        for now, wanted in zip(told, found[None], strict=True):
            assert now == pytest.approx(wanted, rel=1e-6), stage


@pytest.mark.parametrize(
    ("world_size", "is_bf16"), [pytest.param(2, True, marks=IN_BF16), (3, False)]
)
def test_sft_has_the_losses_and_norms_of_ddp(tmp_path, world_size, is_bf16):
    """TRL's default is bf16 by autocast: a tied weight has one bf16 copy, as under DDP.

    Two ranks alone add gradients in the order of DDP. On three, the last bits of the first update
    differ, and Adam and bf16 make 2e-4 of them in the norm of the third step.
    """
    for found in run_forks(world_size, sft, tmp_path, is_bf16):
        assert len(found[None]) == 3
        assert_like_ddp(found)


# a reference model in shards


def pairs() -> Any:
    told = sentences(36)
    return datasets.Dataset.from_dict(
        {"prompt": told[:12], "chosen": told[12:24], "rejected": told[24:]}
    )


def shard_nbytes(model: nn.Module) -> int:
    return sum(p.to_local().nbytes for p in model.parameters())


def most_nbytes(model: nn.Module, world_size: int) -> int:
    """The closed form of a stage 3 shard: whole rows, the most that a rank may get."""
    return sum(-(-len(p) // world_size) * (p.nbytes // len(p)) for p in model.parameters())


def dpo(rank: int, folder: Any, sharded: tuple[int | None, bool], **options: Any) -> Any:
    """With the reference sharded before the trainer is built, or by `adopt_trainer`."""
    stage, is_early = sharded
    model, reference = llama(tied=False), llama(seed=1, tied=False)
    numel = sum(p.numel() for p in model.parameters())
    most = 2 * most_nbytes(model, torch.distributed.get_world_size())
    if is_early:
        assert adopt_frozen(reference) is reference
    trainer = trl.DPOTrainer(
        model, ref_model=reference,
        args=arguments(trl.DPOConfig, folder, max_length=16, adam_epsilon=1e-4, **options),
        train_dataset=pairs(), processing_class=tokenizer(), callbacks=callbacks(stage),
    )  # fmt: skip
    if stage is not None and not is_early:
        assert adopt_trainer(trainer) is trainer
    if stage is not None:
        assert trainer.ref_model is reference, "no wrapper, no copy"
        held = shard_nbytes(model) + shard_nbytes(reference)
        assert held <= most
        world_size = torch.distributed.get_world_size()
        assert held <= 2 * 4 * numel / world_size * 1.05
        assert onefold.report(reference).total.now <= most / 2 * 1.02
    return losses(trainer)


def every_dpo(rank: int, folder: Any) -> Any:
    ways = {None: (None, False), "early": (3, True), "late": (3, False), 2: (2, True)}
    return {name: dpo(rank, folder, way) for name, way in ways.items()}


def test_dpo_with_a_reference_model_in_shards_has_the_losses_of_ddp(tmp_path):
    for found in run_forks(2, every_dpo, tmp_path):
        assert_like_ddp(found)


def synced(rank: int, folder: Any) -> Any:
    options = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    ways = {None: (None, False), 3: (3, True)}
    return {name: dpo(rank, folder, way, **options) for name, way in ways.items()}


def test_a_reference_model_that_follows_the_policy_does_so_in_shards(tmp_path):
    for found in run_forks(2, synced, tmp_path):
        assert_like_ddp(found)


# generation


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) + 0.1 * text.count("w1") for text in completions]


def grpo(rank: int, folder: Any, ways: list[tuple[int | None, bool]]) -> Any:
    """Losses, and the tokens of each generation, by stage.

    The reference model is TRL's own copy from a folder, in shards afterwards.
    """
    if rank == 0:
        llama().save_pretrained(folder / "model")
    torch.distributed.barrier()
    found, sent = {}, {}
    for stage, gathers in ways:
        tokens: list[Any] = []

        def score(
            completions: list[str], completion_ids: Any, kept: Any = tokens, **_: Any
        ) -> list[float]:
            kept.append(completion_ids)
            return reward(completions)

        given = arguments(
            trl.GRPOConfig, folder, max_completion_length=6, num_generations=2, beta=0.1,
            per_device_train_batch_size=4, ds3_gather_for_generation=gathers,
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
        trainer = trl.GRPOTrainer(
            model, score, args=given, callbacks=callbacks(stage),
            train_dataset=datasets.Dataset.from_dict({"prompt": sentences(24, 3)}),
            processing_class=tokenizer(),
        )  # fmt: skip
        if stage is not None:
            adopt_trainer(trainer)
            assert all(isinstance(p, DTensor) for p in trainer.ref_model.parameters())
        found[stage if gathers else "by unit"] = losses(trainer), tokens
        if stage == 3:
            sent[gathers] = onefold.report(trainer.model).traffic["gather"].calls
    if len(sent) == 2:
        assert sent[True] < sent[False] / 2, "a generation gathers once, or once a token"
    return found


# weights for an inference server


class Recorder:
    """Stands in for TRL's client of a vLLM server."""

    def __init__(self) -> None:
        self.pushed: list[tuple[str, Tensor]] = []
        self.told: list[Any] = []
        self.resets = 0

    def update_named_params(self, metadata: Any, params: Any) -> None:
        self.told = metadata
        self.pushed = [(name, value.detach().clone()) for name, value in params]

    def reset_prefix_cache(self) -> None:
        self.resets += 1


def link(trainer: Any) -> Any:
    """TRL's link to a server, without the server that its constructor waits for."""
    made = object.__new__(VLLMGeneration)
    made.model, made.accelerator, made.mode = trainer.model, trainer.accelerator, "server"
    made._dist, made._weight_metadata = DistributedBackend(trainer.accelerator), None
    made.vllm_client = Recorder()
    return made


def push(rank: int, folder: Any) -> Any:
    """Weights after a step, as one process would push them, and what was pushed."""
    found = {}
    for stage, with_adapters in ((0, False), (2, False), (3, False), (3, True), (0, True)):
        model = llama()
        if with_adapters:
            peft = pytest.importorskip("peft")
            adapters = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2)
            model = peft.get_peft_model(model, adapters)
        trainer = trl.GRPOTrainer(
            model, reward, callbacks=callbacks(stage), processing_class=tokenizer(),
            args=arguments(
                trl.GRPOConfig, folder, max_completion_length=4, num_generations=2, max_steps=1,
                per_device_train_batch_size=4,
            ),
            train_dataset=datasets.Dataset.from_dict({"prompt": sentences(24, 3)}),
        )  # fmt: skip
        trainer.vllm_generation = link(trainer)
        adopt_trainer(trainer).train()
        before = onefold.full_state_dict(model, rank0_only=False)
        for _ in range(2):
            trainer.vllm_generation.sync_weights()
        after = onefold.full_state_dict(model, rank0_only=False)
        assert all(torch.equal(after[name], value) for name, value in before.items())
        plain = llama()
        if with_adapters:
            plain = peft.get_peft_model(plain, adapters)
        plain.load_state_dict(before)
        if with_adapters:
            plain = plain.merge_and_unload()
        recorder = trainer.vllm_generation.vllm_client
        assert recorder.resets == (2 if rank == 0 else 0)
        if rank == 0:
            found[stage, with_adapters] = (
                recorder.told, recorder.pushed, [(n, p.data) for n, p in plain.named_parameters()]
            )  # fmt: skip
        else:
            assert recorder.pushed == []
    return found


def test_an_inference_server_gets_every_weight_once(tmp_path):
    for (_, with_adapters), (told, pushed, wanted) in run_forks(2, push, tmp_path)[0].items():
        assert [name for name, _ in pushed] == [name for name, _ in wanted], "tied weights once"
        assert len(told) == len(pushed)
        for (name, value), (_, right), (_, dtype, shape) in zip(pushed, wanted, told, strict=True):
            assert type(value) is Tensor, name
            assert (str(value.dtype), list(value.shape)) == (f"torch.{dtype}", shape), name
            if with_adapters:
                torch.testing.assert_close(value, right)
            else:
                assert torch.equal(value, right), name


class _StopAt(transformers.StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(ids),), ids.shape[1] >= self.length)


def generate_unevenly(rank: int, with_adapters: bool) -> tuple[Tensor, Tensor]:
    def generate(model: Any) -> Tensor:
        prompt = torch.tensor([[4 + rank, 5, 6]])
        return model.eval().generate(
            prompt, max_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=None,
            stopping_criteria=[_StopAt(4 if rank else 9)],
        )  # fmt: skip

    model = llama()
    if with_adapters:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    wanted = generate(model)
    mark_prepared(onefold.shard(model, stage=3, timeout=60))
    found = generate(model)
    torch.distributed.barrier()
    return found, wanted


@again_but("True")
@pytest.mark.parametrize("with_adapters", [False, True])
def test_ranks_that_stop_generating_early_wait_for_the_others(with_adapters):
    for rank, (found, wanted) in enumerate(run_forks(2, generate_unevenly, with_adapters)):
        length = 4 if rank else 9
        assert wanted.shape[1] == length
        assert torch.equal(found[:, :length], wanted)


def copy_of_a_sharded_model(rank: int) -> None:
    model = mark_prepared(onefold.shard(llama(), stage=3))
    for make in (copy.deepcopy, create_reference_model):
        with pytest.raises(onefold.StateError, match=r"copy a module before onefold\.shard"):
            make(model)
    with pytest.raises(onefold.StateError, match=r"callbacks=\[onefold.hf.Callback"):
        adopt_trainer(object())


def test_a_copy_of_a_sharded_model_is_an_error_that_says_what_to_do():
    run_forks(2, copy_of_a_sharded_model)


def test_grpo_generates_the_tokens_and_has_the_losses_of_ddp(tmp_path):
    ways = [(None, True), (0, True), (2, True), (3, True), (3, False)]
    for found in run_forks(2, grpo, tmp_path, ways):
        wanted, tokens = found[None]
        assert len(tokens) > 2
        for stage, (told, generated) in found.items():
            assert generated == tokens, stage
            for now, then in zip(told, wanted, strict=True):
                assert now == pytest.approx(then, rel=1e-6, abs=1e-8), stage


@pytest.mark.again("tests/adapters/test_hf_trl.py::test_sft_has_the_losses_and_norms_of_ddp")
def test_the_example_of_sft_learns():
    for printed in (alone("trl_sft.py"), under_torchrun("trl_sft.py")):
        first, last = numbers(re.findall("^loss .* then .*", printed, re.M)[0])
        assert last < first
    assert "stage 3, rank 0 of 2" in printed
