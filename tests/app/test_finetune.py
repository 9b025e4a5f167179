"""`onefold finetune`: rows, refusals, adapters, and runs as a user meets them."""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import onefold
from onefold import Precision
from onefold.adapters.hf.saving import WholeWeights
from onefold.app.cli.arguments import Parser
from onefold.app.cli.config_file import COPY
from onefold.app.cli.finetune import add_to, job_of
from onefold.app.cli.main import main
from onefold.app.finetune.merge import merge_adapter
from onefold.app.finetune.progress import FinetuneObserver
from onefold.app.finetune.row_file import open_rows
from onefold.app.finetune.tuning import FinetuneResult, finetune, preflight
from onefold.app.tools.step_profile import StepProfile
from onefold.errors import CheckpointError, ConfigError
from onefold.recording.page import read_report
from onefold.wire.collectives import Group
from onefold.wire.world import World
from tests.support.commands import begin, torchrun
from tests.support.commands import onefold as command
from tests.support.fresh import run_scripts
from tests.support.ranks import run_processes

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*")
"""transformers 5.23 renames what PEFT and TRL still use."""

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_model.py"
SMALL = ("--batch", "2", "--seq", "48", "--sample", "4", "--lr", "3e-3")


# rows


def written(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text(
        "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    )
    return path


TEXT = {"text": "a b c"}
PAIR = {"prompt": "2 + 2 =", "completion": " 4"}
CHAT = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
CHAT_PAIR = {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}


@pytest.mark.parametrize(
    ("row", "kind", "is_chat"),
    [(TEXT, "text", False), (PAIR, "prompt", False), (CHAT, "messages", True),
     (CHAT_PAIR, "prompt", True)],
)  # fmt: skip
def test_rows_of_each_kind_are_read_without_other_columns(tmp_path, row, kind, is_chat):
    rows = open_rows(written(tmp_path, {"id": 1, **row}, "\n", row, row))
    assert (rows.kind, rows.is_chat) == (kind, is_chat)
    assert list(rows.read_rows([0, 2])) == [row, row]
    assert [number for _, number in rows.places] == [1, 3, 4], "empty lines have numbers"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("{\n", r"line 3 of .* to be JSON"),
        ("[1]\n", "to be a JSON object, got list.*hint: write one row a line"),
        ("[\n", "to be JSON, .*hint: write one row a line"),
        ({"body": "x"}, "line 3 .*'text', 'prompt'.*got 'body'.*hint: rename or convert"),
        ({"instruction": "x", "output": "y"}, "hint: Alpaca's rows: .*output as 'completion'"),
        ({"conversations": []}, "hint: ShareGPT's rows: write 'messages'"),
        ({"text": ""}, "'text' in line 3 .* to be text, got nothing"),
        ({"text": 5}, "to be text, got 5"),
        ({"prompt": "x"}, "line 3 .* to have 'completion' too"),
        (PAIR, "line 3 .* kind of the rows before, text, got prompt and completion"),
        ({"messages": []}, "messages with a role"),
        ({"messages": [{"role": "user"}]}, "messages with content"),
        ({"messages": "hello"}, "to be a list of messages"),
        ({"prompt": "x", "completion": CHAT["messages"]}, "prompt and completion of line 3"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, bad, words):
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        open_rows(written(tmp_path, TEXT, TEXT, bad, TEXT))


def test_a_file_that_is_not_there_or_has_one_row_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        open_rows(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="at least 2 rows"):
        open_rows(written(tmp_path, TEXT))


def test_held_out_rows_are_apart_from_those_that_train_and_the_same_for_a_seed(tmp_path):
    rows = open_rows(written(tmp_path, *[{"text": str(i)} for i in range(40)]))
    train, held_out = rows.split(0.1, seed=3)
    assert len(held_out) == 4
    assert sorted(train + held_out) == list(range(40))
    assert rows.split(0.1, seed=3) == (train, held_out) != rows.split(0.1, seed=4)
    assert rows.split(0.001, seed=0)[1], "one, where a share is asked for"
    assert not rows.split(0, seed=0)[1]


def test_rows_of_more_tokens_are_counted_and_the_first_named(tmp_path):
    rows = open_rows(written(tmp_path, TEXT, {"text": "a " * 30}, TEXT, {"text": "b " * 40}))
    assert rows.longer_than(20, lambda row: len(row["text"].split())) == (2, 2)
    assert rows.longer_than(50, lambda row: len(row["text"].split())) == (0, 0)


# adapters


def test_a_merged_model_is_the_one_that_peft_merges(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    base = transformers.LlamaForCausalLM(config)
    base.save_pretrained(tmp_path / "base", max_shard_size="10KB")
    options = peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear",
                              init_lora_weights=False)  # fmt: skip
    adapted = peft.get_peft_model(base, options)
    adapted.save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    wanted = adapted.merge_and_unload().state_dict()
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


def test_an_adapter_of_another_base_is_refused_and_leaves_nothing(tmp_path):
    for name in ("base", "adapter"):
        (tmp_path / name).mkdir()
    save_file({"head.weight": torch.zeros(2, 2)}, tmp_path / "base/model.safetensors")
    factors = {f"base_model.model.other.lora_{x}.weight": torch.zeros(2, 2) for x in "AB"}
    save_file(factors, tmp_path / "adapter/adapter_model.safetensors")
    (tmp_path / "adapter/adapter_config.json").write_text('{"r": 2, "lora_alpha": 4}')
    with pytest.raises(CheckpointError, match=r"no 'other\.weight'"):
        merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}


# refusals, before a rank starts


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its tokenizer and chats, as the example makes them."""
    folder = tmp_path_factory.mktemp("finetune")
    with mock.patch.object(sys, "argv", [str(EXAMPLE), str(folder)]):
        runpy.run_path(str(EXAMPLE))
    return folder


@pytest.fixture
def work(made: Path, tmp_path: Path) -> Path:
    """A copy with rows of each kind."""
    for name in ("model", "chats.jsonl"):
        (tmp_path / name).symlink_to(made / name)
    lines = (made / "chats.jsonl").read_text().splitlines()
    chats = [json.loads(line)["messages"] for line in lines[:60]]
    for name, row in (
        ("text", lambda asked, answer: {"text": f"{asked}: {answer}"}),
        ("pairs", lambda asked, answer: {"prompt": f"{asked}: ", "completion": answer}),
    ):
        texts = (json.dumps(row(a["content"], b["content"])) for a, b in chats)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(texts))
    (tmp_path / "few.jsonl").write_text("\n".join(lines[:60]))
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "nowhere"], "config.json and safetensors files in --model 'nowhere'"),
        (["--data", "none.jsonl"], "No such file"),
        (["--out", "model"], "no folder at --out 'model'"),
        (["--out", "text.jsonl/tuned"], "'text.jsonl/tuned' to be writable, .*text.jsonl is not"),
        (["--checkpoint", "text.jsonl"], "a directory to write checkpoints to, .*File exists"),
        (["--checkpoint", "text.jsonl/x"], "a directory to write checkpoints to, .*Not a dir"),
        (["--checkpoint", "used"], "'used' to be empty, got checkpoint-3.*--resume"),
        (["--model", "org/name"], r"hint: nothing is downloaded: `hf download org/name"),
        (["--merge"], r"--lora R with --merge, got none"),
        (["--stage", "4"], r'stage to be 0, 1, 2, 3 or "auto", got 4'),
        (["--offload", "nvme"], r"offload.*got 'nvme'"),
        (
            ["--report-to", "wandbb"],
            r"--report-to to be none, all or an installed tracker .*got 'wandbb'.*\n?.*\bwandb\b",
        ),
        (["--rest", "int4"], r"--lora R with --rest"),
        (["--resume"], "--checkpoint with --resume"),
        (["--use_peft"], r"here it is --lora 16"),
        (["--load_in_4bit"], r"here it is --lora 16 --rest int4"),
        (["--lerning-rate", "1"], r"did you mean"),
        (["--max_steps", "0"], "a whole number of at least 1"),
    ],
)
def test_what_cannot_work_is_refused_before_a_rank_starts(work, monkeypatch, capsys, flags, words):
    monkeypatch.chdir(work)
    (work / "used" / "checkpoint-3").mkdir(parents=True)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    given = {"--model": "model", "--data": "text.jsonl", "--out": "tuned"}
    more = [flag for flag in flags if flag not in given]
    if flags[0] in given:
        given[flags[0]], more = flags[1], []
    assert main(["finetune", *(word for pair in given.items() for word in pair), *more]) == 2
    assert re.search(words, capsys.readouterr().err)


def parsed(*words: str) -> argparse.Namespace:
    """Flags of the command, without running it."""
    parser = Parser(prog="onefold")
    add_to(parser.add_subparsers())
    needed = ("--model", "model", "--data", "text.jsonl", "--out", "tuned")
    return parser.parse_args(["finetune", *needed, *words])


def flags_of_trl() -> set[str]:
    """All that `trl sft` takes, in both of its spellings; it turns a default off by `--no_NAME`."""
    kinds = (trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig, trl.DatasetMixtureConfig)
    known = {field.name: field for kind in kinds for field in fields(kind) if field.init}
    negated = {f"no_{name}" for name, field in known.items() if field.default is True}
    names = negated | set(known)
    return {f"--{spelled}" for name in names for spelled in (name, name.replace("_", "-"))}


def test_each_flag_of_trl_sft_is_taken_or_has_a_hint():
    taken = set()
    for flag in sorted(flags_of_trl()):
        try:
            parsed(flag)
        except ConfigError as error:
            text = str(error)
            if f"a flag of `onefold finetune`, got {flag}" not in text:
                taken.add(flag)  # it wants a value
            elif "hint: here it is " not in text:
                raise AssertionError(f"no hint for {flag}: {text}") from error
        else:
            taken.add(flag)
    assert taken == {
        "--model_name_or_path", "--dataset_name", "--output_dir", "--per_device_train_batch_size",
        "--gradient_accumulation_steps", "--learning_rate", "--num_train_epochs", "--max_steps",
        "--max_length", "--resume_from_checkpoint", "--packing", "--seed", "--report-to",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--save_steps", "here it is --checkpoint DIR, with --every N"),
        ("--lr-scheduler-type", "here it is fixed: the rate rises in 3 %"),
        ("--warmup_ratio", "here it is fixed: the rate rises in 3 %"),
        ("--push_to_hub", "here it is another command: `hf upload"),
        ("--use_liger_kernel", "not offered, though `trl sft` has it: .*docs/guides/trl.md"),
        ("--no_gradient_checkpointing", "the default: without --recompute"),
        ("--resume_from_checkpoint=runs/checkpoint-3", "hint: --checkpoint runs --resume"),
        ("--resume_from_checkpoint=runs", "hint: --checkpoint runs --resume"),
    ],
)
def test_a_flag_of_trl_sft_leads_to_what_this_command_does(flag, words):
    with pytest.raises(ConfigError, match=words):
        parsed(flag)


def test_resume_from_checkpoint_is_resume():
    assert not job_of(parsed()).resume
    assert job_of(parsed("--resume_from_checkpoint")) == job_of(parsed("--resume"))
    assert job_of(parsed("--resume_from_checkpoint", "--seq", "8")).resume


def test_a_flag_of_trl_sft_is_refused_without_importing_it():
    code = (
        "import sys; from onefold.app.cli.main import main\n"
        "assert main(['finetune', '--optim', 'sgd']) == 2\n"
        "assert not {'torch', 'transformers', 'trl'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "AdamW" in done.stderr


@pytest.mark.parametrize("num_steps", [1, 2, 10, 100])
def test_every_step_has_a_learning_rate_and_one_has_the_peak(num_steps):
    from onefold.app.finetune.tuning import SCHEDULE

    args = transformers.TrainingArguments(**SCHEDULE)
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = transformers.get_scheduler(
        args.lr_scheduler_type, optimizer, args.get_warmup_steps(num_steps), num_steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )  # fmt: skip
    rates = []
    for _ in range(num_steps):
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    assert min(rates) >= 0.1 - 1e-9
    assert max(rates) == 1.0


# runs

PLAIN_OPTIONS = {
    "per_device_train_batch_size": 2, "learning_rate": 3e-3, "max_length": 48, "seed": 0,
    "lr_scheduler_type": "cosine_warmup_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "warmup_steps": 0.03, "logging_steps": 1, "bf16": False, "use_cpu": True,
    "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    "gradient_checkpointing": False,
}  # fmt: skip
"""Of plain TRL, for what `SMALL` chooses."""


def result_of(work: Path, *flags: str) -> dict[str, Any]:
    done = command("finetune", "--model", "model", *SMALL, *flags, "--json", cwd=work)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.process
def test_adapters_on_a_quantized_base_are_saved_and_merged(work):
    """From meta: no rank holds the base whole, and PEFT opens the adapter."""
    found = result_of(
        work, "--data", "chats.jsonl", "--out", "tuned", "--steps", "4", "--lora", "2", "--merge",
        "--stage", "3", "--rest", "int4", "--lr", "1e-2", "--report", "out", "--profile", "out",
    )  # fmt: skip
    traces = ["profile-rank0.json.gz", "profile-rank1.json.gz"]
    written = sorted(path.name for path in (work / "out").iterdir())
    assert written == ["index.html", *traces, "report.json", "trace.json"]
    assert read_report(work / "out").views[0].recorded == 3
    assert (
        f'"profiles":{json.dumps(traces, separators=(",", ":"))}'
        in (work / "out" / "index.html").read_text()
    )
    before, after = found["held_out"]
    assert after < before
    assert found["way"]["stage"] == 3
    base = transformers.AutoModelForCausalLM.from_pretrained(work / "model")
    numel = sum(p.numel() for p in base.parameters())
    packed = sum(m.weight.numel() for m in base.modules() if isinstance(m, torch.nn.Linear))
    assert 0 < found["num_trained"] < numel / 10
    assert found["num_parameters"] == numel + found["num_trained"]
    wide = found["num_parameters"] - packed
    weight_nbytes = (4 * wide + packed / 2 + 4 * packed / 256) / 2  # a scale for 256 weights
    assert [rank["now"]["weight"] for rank in found["memory"]] == [weight_nbytes] * 2
    planned = found["way"]["peak_nbytes"]
    assert all(rank["total_peak"] <= planned for rank in found["memory"])
    lora = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    module = peft.get_peft_model(copy.deepcopy(base), lora)
    module.enable_input_require_grads()
    asked = parsed(*SMALL)
    exact, quantized = (
        onefold.plan(
            module, world_size=2, seq=asked.seq, batch=asked.batch, stage=3, offload="none",
            precision=Precision(frozen=word),
        ).taken.forecast.memory_nbytes
        for word in (None, "int4")
    )  # fmt: skip
    assert planned == quantized < exact
    adapted = peft.PeftModel.from_pretrained(base, work / "tuned").merge_and_unload()
    merged = transformers.AutoModelForCausalLM.from_pretrained(work / "tuned-merged")
    state = merged.state_dict()
    for name, value in adapted.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
    left = {path.name for path in work.iterdir() if path.name.startswith(".")}
    assert not left


@pytest.mark.process
@pytest.mark.again(
    "tests/app/test_finetune.py::test_adapters_on_a_quantized_base_are_saved_and_merged"
)
def test_a_run_that_is_stopped_goes_on_as_if_it_never_was(work):
    flags = ("--data", "pairs.jsonl", "--steps", "8", "--checkpoint")
    whole = result_of(work, *flags, "whole", "--out", "whole-out", "--every", "3")
    started = begin(
        "finetune", "--model", "model", *SMALL, *flags, "cut", "--out", "cut-out", "--every", "1",
        cwd=work,
    )  # fmt: skip
    while not (work / "cut/checkpoint-2").exists():
        time.sleep(0.05)
    os.kill(started.pid, signal.SIGTERM)
    stopped = started.end()
    assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr
    assert "--resume goes on there" in stopped.stderr
    assert not (work / "cut-out").exists()
    assert "every = 1" in (work / "cut" / COPY).read_text()
    resumed = result_of(work, *flags, "cut", "--out", "cut-out", "--resume")
    assert resumed["losses"] == whole["losses"][-len(resumed["losses"]) :]
    assert resumed["losses"]
    weights = [load_file(work / out / "model.safetensors") for out in ("whole-out", "cut-out")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    shutil.rmtree(work / "cut-out")
    flags = (*SMALL, *flags, "cut", "--out", "cut-out", "--resume", "--ranks", "3")
    done = command("finetune", "--model", "model", *flags, cwd=work)
    assert done.returncode == 2
    assert "--steps above 8" in done.stderr


PLAIN = """
import json, sys, datasets, torch.distributed, transformers, trl

model, rows, checkpoint, out, options = sys.argv[1:]
args = trl.SFTConfig(f"{out}-plain", **json.loads(options))
trainer = trl.SFTTrainer(
    transformers.AutoModelForCausalLM.from_pretrained(model), args=args,
    train_dataset=datasets.Dataset.from_list(json.loads(open(rows).read())),
    processing_class=transformers.AutoTokenizer.from_pretrained(model),
)
trainer.train(resume_from_checkpoint=checkpoint)
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
if trainer.args.process_index == 0:
    assert trainer.args.world_size == 3
    open(out, "w").write(json.dumps(losses))
torch.distributed.destroy_process_group()
"""


def as_plain(checkpoint: Path, plain: Path) -> None:
    """Copy a checkpoint, with the optimizer's states as plain Trainer keeps them."""
    shutil.copytree(checkpoint, plain)
    sharded, copied = (
        transformers.AutoModelForCausalLM.from_pretrained(checkpoint) for _ in range(2)
    )
    args = transformers.TrainingArguments(str(plain), use_cpu=True, bf16=False)
    mine, its = (
        transformers.Trainer(model, args).create_optimizer() for model in (sharded, copied)
    )
    onefold.shard(sharded, mine)
    onefold.load(plain / "onefold", sharded, mine)
    whole = StateDictOptions(full_state_dict=True)
    states = get_optimizer_state_dict(sharded, mine, options=whole)
    for group in its.param_groups:
        group["initial_lr"] = 0.0  # a scheduler's, which is read too
    set_optimizer_state_dict(copied, its, states, options=whole)
    assert all(state["exp_avg_sq"].any() for state in its.state.values())
    shutil.rmtree(plain / "onefold")
    torch.save(its.state_dict(), plain / "optimizer.pt")


@pytest.mark.process
@pytest.mark.again(
    "tests/adapters/test_hf_save.py::test_checkpoints_open_and_resume_bit_for_bit_and_elsewhere"
)
def test_a_killed_run_goes_on_at_the_losses_of_plain_trainer_on_three_ranks(work, monkeypatch):
    """From the newest checkpoint of two ranks, killed at a moment that is drawn."""
    steps = 10  # an epoch of three ranks
    flags = ("--data", "pairs.jsonl", "--steps", str(steps), "--held-out", "0", "--keep", "99",
             "--checkpoint", "runs", "--out", "out")  # fmt: skip
    (work / "tmp").mkdir()
    with monkeypatch.context() as context:
        context.setattr("tempfile.tempdir", str(work / "tmp"))
        started = begin("finetune", "--model", "model", *SMALL, *flags, "--every", "1", cwd=work)
    while not (work / "runs/checkpoint-2").exists():
        assert started.poll() is None
        time.sleep(0.05)
    time.sleep(Random().uniform(0, 0.3))
    for path in (work / "tmp").glob("onefold_*/rank.*"):
        os.kill(int(path.suffix[1:]), signal.SIGKILL)
    killed = started.end()
    assert killed.returncode == 1
    assert "ended by SIGKILL" in killed.stderr
    found = result_of(work, *flags, "--resume", "--ranks", "3")["losses"]
    done = steps - len(found)
    assert 1 <= done < steps

    as_plain(work / "runs" / f"checkpoint-{done}", work / "plain")
    rows = open_rows(work / "pairs.jsonl")
    (work / "plain.py").write_text(PLAIN)
    (work / "rows.json").write_text(json.dumps(list(rows.read_rows(rows.split(0, 0)[0]))))
    options = json.dumps(PLAIN_OPTIONS | {"max_steps": steps})
    plain = torchrun("plain.py", "model", "rows.json", "plain", "losses.json", options, ranks=3,
                     cwd=work)  # fmt: skip
    assert plain.returncode == 0, plain.stderr
    wanted = json.loads((work / "losses.json").read_text())
    assert len(wanted) == steps, "those of the two ranks are in the checkpoint"
    assert found == pytest.approx(wanted[done:], rel=1e-6)


@pytest.mark.process
@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are no forks of this process")
@pytest.mark.again("tests/app/test_cli_checkpoint.py::test_a_second_signal_stops_at_once")
def test_a_second_signal_stops_a_run_at_once(work, monkeypatch):
    """Also a rank that waits for one that will never answer."""

    def begin_step(_: StepProfile, step: int) -> None:
        if os.environ["RANK"] == "1":
            (work / "asleep").touch()
            time.sleep(600)

    monkeypatch.setattr(StepProfile, "begin", begin_step)
    started = begin(
        "finetune", "--model", "model", *SMALL, "--data", "pairs.jsonl", "--out", "out", "--steps",
        "4", "--checkpoint", "runs", cwd=work,
    )  # fmt: skip
    started.until(lambda _: (work / "asleep").exists())
    os.kill(started.pid, signal.SIGTERM)
    time.sleep(1.5)  # sooner, it would be the same request once more
    assert started.poll() is None  # it waits for the step to end
    os.kill(started.pid, signal.SIGTERM)
    assert started.end().returncode == 128 + signal.SIGTERM  # long before the rank would wake up
    assert not (work / "out").exists()
    assert not list((work / "runs").iterdir())


@pytest.mark.process
@pytest.mark.again(
    "tests/app/test_config_file.py::test_a_run_trains_by_its_file_and_again_by_its_copy"
)
def test_a_run_tunes_by_its_file_and_again_by_its_copy(work):
    (work / "run.toml").write_text(
        'model_name_or_path = "model"\ndata = "text.jsonl"\nsteps = 2\nlora = 2\nheld-out = 0\n'
        "batch = 2\nseq = 48\nlearning-rate = 3e-3\n"
    )
    found = []
    for words in (
        ("--config", "run.toml", "--out", "first", "--checkpoint", "runs"),
        ("--config", f"runs/{COPY}", "--out", "second", "--checkpoint", "more"),
    ):
        done = command("finetune", *words, "--json", cwd=work)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout)["losses"])
    assert len(found[0]) == 2
    assert found[0] == found[1]
    first, second = ((work / name / COPY).read_text() for name in ("first", "second"))
    assert first == (work / "runs" / COPY).read_text()
    assert second == first.replace('"first"', '"second"').replace('"runs"', '"more"')
    wanted, again = (
        load_file(work / out / "adapter_model.safetensors") for out in ("first", "second")
    )
    assert wanted.keys() == again.keys()
    assert all(torch.equal(value, again[name]) for name, value in wanted.items())


def tuned(work: Path, *flags: str) -> FinetuneResult:
    """What the command does on one rank, here in this process."""
    job = job_of(
        parsed("--model", str(work / "model"), "--out", str(work / "tuned"), *SMALL, *flags)
    )
    world = World(Group.from_handle(None), torch.device("cpu"))
    return finetune(job, preflight(job), world, FinetuneObserver())


@pytest.mark.parametrize(
    ("data", "flags", "options"),
    [
        pytest.param("text", (), {}, id="text"),
        pytest.param("text", ("--packing",), {"packing": True}, id="packed text"),
        pytest.param("pairs", (), {}, id="pairs"),
        pytest.param("pairs", ("--packing",), {"packing": True}, id="packed pairs"),
        pytest.param("few", (), {"assistant_only_loss": True}, id="chats"),
        pytest.param(
            "few", ("--packing",), {"assistant_only_loss": True, "packing": True}, id="packed chats"
        ),
        pytest.param("few", (), {}, id="chats without marks in the template"),
    ],
)
def test_rows_of_each_kind_train_at_the_losses_of_plain_trl(work, data, flags, options, request):
    """One rank, all weights. TRL by itself takes the loss of pairs on completions alone."""
    if "without marks" in request.node.callspec.id:
        source = (work / "model").resolve()
        (work / "model").unlink()
        shutil.copytree(source, work / "model")
        template = work / "model" / "chat_template.jinja"
        marked = template.read_text()
        template.write_text(re.sub(r"{% (end)?generation %}", "", marked))
        assert template.read_text() != marked
    rows = open_rows(work / f"{data}.jsonl")
    found = tuned(work, "--data", str(rows.path), "--steps", "3", "--held-out", "0", *flags)
    args = trl.SFTConfig(str(work / "plain"), max_steps=3, **PLAIN_OPTIONS, **options)
    trainer = trl.SFTTrainer(
        transformers.AutoModelForCausalLM.from_pretrained(work / "model"), args=args,
        train_dataset=datasets.Dataset.from_list(list(rows.read_rows(rows.split(0, 0)[0]))),
        processing_class=transformers.AutoTokenizer.from_pretrained(work / "model"),
    )  # fmt: skip
    trainer.train()
    wanted = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(wanted) == 3
    assert found.losses == pytest.approx(wanted, rel=1e-6)


def _tune_all_weights(rank: int, work: str) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in names.items()})
    job = job_of(
        parsed("--model", f"{work}/model", "--data", f"{work}/text.jsonl", "--out", f"{work}/tuned",
               "--steps", "1", "--held-out", "0", *SMALL)
    )  # fmt: skip
    world = World(Group.from_handle(dist.group.WORLD), torch.device("cpu"))
    with mock.patch.object(WholeWeights, "bring") as bring:
        finetune(job, preflight(job), world, FinetuneObserver())
    assert not bring.called, "whole weights were brought to rank 0"


@pytest.mark.process
def test_a_run_without_checkpoints_brings_whole_weights_to_no_rank(work):
    run_processes(2, _tune_all_weights, str(work))
    saved = transformers.AutoModelForCausalLM.from_pretrained(work / "tuned")
    source = transformers.AutoModelForCausalLM.from_pretrained(work / "model")
    pairs = zip(saved.parameters(), source.parameters(), strict=True)
    assert any(not torch.equal(new, old) for new, old in pairs)


@pytest.mark.process
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: (model / "tokenizer.json").unlink(), "a tokenizer in --model"),
        (lambda model: (model / "chat_template.jinja").unlink(), "a chat template"),
        (lambda model: encoder(model / "config.json"), "a model that continues text"),
    ],
)
def test_a_folder_that_cannot_be_tuned_on_chats_is_named(work, change, words, monkeypatch):
    from onefold.app.finetune.choices import FinetuneJob
    from onefold.app.finetune.progress import FinetuneObserver
    from onefold.app.finetune.tuning import finetune
    from onefold.wire.collectives import Group
    from onefold.wire.world import World

    source = (work / "model").resolve()
    (work / "model").unlink()
    shutil.copytree(source, work / "model")
    for name in ("tokenizer_config.json",) if "tokenizer in" in words else ():
        (work / "model" / name).unlink()
    change(work / "model")
    monkeypatch.chdir(work)
    job = FinetuneJob(model="model", data="chats.jsonl", out="tuned", seq=48)
    with pytest.raises(ConfigError, match=words):
        world = World(Group.from_handle(None), torch.device("cpu"))
        finetune(job, open_rows(Path(job.data)), world, FinetuneObserver())


def test_rows_longer_than_the_positions_of_the_model_are_refused(work):
    data = ("--data", str(work / "text.jsonl"))
    with pytest.raises(ConfigError, match=r"--seq of at most 256, .*got 257\nhint: --seq 256"):
        tuned(work, *data, "--seq", "257")
    assert tuned(work, *data, "--seq", "256", "--steps", "1").losses


def encoder(path: Path) -> None:
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "architectures": ["LlamaModel"]}))


def test_a_model_that_needs_more_memory_than_is_free_is_refused_with_both(monkeypatch):
    from onefold.app.finetune.choices import FinetuneJob
    from onefold.app.finetune.model import choose
    from onefold.wire.collectives import Group
    from onefold.wire.world import World

    monkeypatch.setattr("onefold.planner.clusters.free_host_nbytes", lambda: 1 << 20)
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 176}
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    job = FinetuneJob(model="base", data="rows", out="out", seq=16, offload=None)
    with pytest.raises(ConfigError, match=r"it would need .*iB on each device, which has 1\.0"):
        choose(job, module, World(Group.from_handle(None), torch.device("cpu")))


FREED = """
import os, torch
from types import SimpleNamespace
from onefold.app.finetune.model import give_blocks_back

def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 >> 20

os.environ.update({})
give_blocks_back(SimpleNamespace(device=torch.device("cpu")))
large = torch.ones(6 << 20)  # 24 MiB: once they are freed, glibc takes such blocks from its heap
del large
blocks, behind = [], []
for _ in range(10):
    blocks.append(torch.ones(4 << 20))  # 16 MiB
    behind.append(torch.ones(16 << 10))  # 64 KiB that stay
before = resident_mib()
blocks.clear()
print(before - resident_mib())
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="glibc gives the blocks back")
def test_freed_gradients_go_back_to_the_system_unless_the_user_tunes_malloc():
    tuned = FREED.replace("({})", "(MALLOC_ARENA_MAX='4')")
    freed_mib, kept_mib = (int(ended.stdout) for ended in run_scripts([FREED, tuned]))
    assert freed_mib >= 150, f"{freed_mib} of 160 MiB went back"
    assert kept_mib < 50, "the test sees no difference"
