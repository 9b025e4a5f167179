"""The lines and the command that a plan prints give the memory that it promises."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold.config import offload_of
from onefold.planner.byte_executor import ACTIVATION, LOGITS
from onefold.planner.memory import forecast
from onefold.planner.models.gpt import GPT, GPTConfig
from onefold.planner.models.loader import build_model
from onefold.planner.result import Plan
from onefold.planner.trace import default_loss, trace
from onefold.recording.report import UPPER_BOUNDS, Report
from tests.support.commands import onefold as command
from tests.support.planned import most_of
from tests.support.ranks import run_ranks

RANKS, ROWS, SEQ = 2, 4, 32
OF_TORCH = (ACTIVATION, LOGITS, "batch", "buffer")
"""Kinds that a plan counts and a report does not."""
STATES = ("weight", "master", "optimizer")
BUILDING = Lock()
"""Ranks that are threads share torch's default dtype, which transformers changes for a moment."""

GPT2 = {
    "model_type": "gpt2", "vocab_size": 300, "n_embd": 64, "n_layer": 4, "n_head": 2,
    "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 176,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    """Ranks that are threads may leave behind what transformers sets while it builds in bf16."""
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def build() -> nn.Module:
    """What `module:function` names."""
    torch.manual_seed(0)
    return GPT(GPTConfig(num_layers=4, width=64, num_heads=2, lr=1e-3), SEQ)


def config_of(folder: Path, config: dict[str, Any]) -> str:
    pytest.importorskip("transformers")
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def planned(model: Any, **choices: Any) -> Plan:
    cluster = {"ranks": RANKS, "device_type": "cpu", "memory": "4GiB"}
    return onefold.plan(model, cluster=cluster, seq=SEQ, batch=ROWS, **choices)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return default_loss(model(tokens))


def ran(script: str, **names: Any) -> dict[str, Any]:
    """The names of a script that one of several ranks has run."""
    given = dict(names)
    before, _, last = script.strip().rpartition("\n")
    with BUILDING:
        exec(before, given)
    exec(last, given)
    return given


def held(script: str, folder: Path, **names: Any) -> Report:
    """What a rank holds after steps with the model and the optimizer of a script."""

    def body(rank: int) -> Report:
        own = {name: make() for name, make in names.items()}
        given = ran(script.replace("disk:PATH", f"disk:{folder}"), **own)
        model, optimizer = given["model"], given["optimizer"]
        tokens = torch.arange(ROWS * SEQ).view(ROWS, SEQ) % 256
        for _ in range(2):
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        return onefold.report(model)

    return run_ranks(RANKS, body)[0]


def ledger_peak(made: Plan) -> int:
    """The most bytes that a plan says its engine will hold at a time, without torch's."""
    row = made.taken
    found = forecast(
        made.search.trace_of(row.rows), row.forecast.recipe, accumulate=made.search.accumulate,
        has_timeline=True,
    )  # fmt: skip
    assert found.memory_nbytes == row.needs["device"]
    return max(
        sum(n for (kind, tier), n in at.held.items() if kind not in OF_TORCH and tier != "disk")
        for at in found.timeline
    )


def resting(made: Plan, kind: str) -> int:
    held = made.taken.forecast.resting
    return sum(nbytes for (each, _), nbytes in held.items() if each == kind)


def check(made: Plan, report: Report) -> None:
    """A report is what the plan says: states to the byte, peaks within 5 %."""
    for kind in STATES:
        assert report.nbytes(kind) == resting(made, kind), kind
    assert report.stage == made.taken.stage
    most = ledger_peak(made)
    at_most = sum(most_of(made.taken.forecast, kind) for kind in UPPER_BOUNDS)
    assert 0.95 * (most - at_most) <= report.memory_peak <= 1.05 * most
    assert report.differing() == {}, report.verdict


MODELS = {"gpt2": GPT2, "llama": LLAMA, "bf16": LLAMA | {"torch_dtype": "bfloat16"}}
CHOICES: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"stage": 0}),
    ("gpt2", {"stage": 3, "recompute": True, "precision": "bf16"}),
    ("llama", {"stage": 2, "dtype": "bf16"}),
    ("llama", {"stage": 1, "recompute": True}),
    ("bf16", {"stage": 3}),
    ("bf16", {"stage": 3, "dtype": "fp32", "precision": "bf16"}),
    ("bf16", {"stage": 3, "recompute": True, "offload": "disk"}),
]


@pytest.mark.parametrize(
    ("name", "choices"), CHOICES, ids=[f"{n}-{'-'.join(map(str, c.values()))}" for n, c in CHOICES]
)
def test_the_lines_of_a_plan_give_the_memory_it_promises(name, choices, tmp_path):
    made = planned(config_of(tmp_path, MODELS[name]), **{"offload": None, **choices})
    check(made, held(made.script, tmp_path))


@pytest.mark.parametrize("recompute", [False, True])
def test_the_lines_for_a_preset_give_the_memory_it_promises(recompute, tmp_path):
    made = planned("tiny", stage=3, offload=None, recompute=recompute, dtype="bf16")
    check(made, held(made.script, tmp_path))


def test_the_lines_for_a_function_or_a_module_leave_building_it_to_its_owner(tmp_path):
    made = planned(f"{__name__}:build", stage=2, offload=None, recompute=True)
    check(made, held(made.script, tmp_path))
    given = planned(build(), stage=2, offload=None, recompute=True)
    assert made.script.endswith(given.script.partition("\n\n")[2])
    assert "\n\nmodel.recomputes = True\n" in given.script
    assert given.taken.needs == made.taken.needs, "it is planned as it will run"
    check(given, held(given.script, tmp_path, model=build))


def test_the_lines_for_a_folder_of_weights_load_them(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / 'my "llama"'
    saved = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    saved.save_pretrained(folder)
    made = planned(str(folder), stage=3, offload=None)
    assert f"--model {shlex.quote(str(folder))}" in made.command

    def body(rank: int) -> Tensor:
        model = ran(made.script)["model"]
        with onefold.unsharded(model):
            return model.lm_head.weight.detach().clone()

    for loaded in run_ranks(RANKS, body):
        assert torch.equal(loaded, saved.lm_head.weight)


def test_what_is_printed_is_what_runs(tmp_path):
    """The lines and the command, as the terminal shows them."""
    path = config_of(tmp_path, LLAMA)
    flags = ("--ranks", str(RANKS), "--seq", str(SEQ), "--batch", str(ROWS))
    choices = ("--stage", "3", "--precision", "bf16", "--recompute", "--offload", "none")
    done = command("plan", "--model", path, *flags, *choices)
    assert done.returncode == 0, done.stderr
    before, _, script = done.stdout.partition("or in a script:\n")
    made = planned(path, stage=3, precision="bf16", recompute=True, offload=None)
    assert dedent(script).strip() == made.script
    check(made, held(dedent(script), tmp_path))
    words = shlex.split(before[before.rindex("  onefold train") :].replace("\\\n", ""))[1:]
    assert words == shlex.split(made.command)[1:]
    done = command(*words, "--steps", "3", "--sample", "0", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["predicted"]["peak_nbytes"] == made.taken.needs["device"]
    for kind in STATES:
        assert told["memory"][0]["expected"][kind] == resting(made, kind), kind


def test_a_module_that_was_passed_has_no_command():
    assert planned(build()).command == ""
    assert "onefold train" not in str(planned(build()))


def test_a_folder_without_weights_is_trained_from_its_configuration(tmp_path):
    path = config_of(tmp_path, GPT2)
    made = planned(str(tmp_path))
    assert f"--model {path} " in made.command
    assert "load_pretrained" not in made.script
    assert "# weights are random" in made.script


def test_an_offload_in_a_script_is_that_of_the_plan():
    made = planned("tiny", stage=3, offload="disk")
    assert 'offload="disk:PATH"' in made.line
    assert made.taken.forecast.recipe.offload.parameters == offload_of("disk:.").parameters


def test_a_module_is_planned_as_it_will_run_and_stays_as_it_was():
    module = build_model("tiny", SEQ)
    plain, less = (planned(module, recompute=each, stage=3) for each in (False, True))
    assert less.taken.needs["device"] < plain.taken.needs["device"]
    assert not module.recomputes
    assert trace(module, (torch.zeros(1, SEQ, dtype=torch.long),)).numel == plain.numel
