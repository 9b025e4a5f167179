"""The examples run as written, and ranks train on rows of their own."""

from __future__ import annotations

import difflib
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import onefold
from tests.support.commands import script, torchrun
from tests.support.forking import HANG_S

EXAMPLES = Path(__file__).parents[2] / "examples"


def alone(name: str) -> str:
    done = script(EXAMPLES / name)
    assert done.returncode == 0, done.stderr
    return done.stdout


def fresh(name: str) -> str:
    """In a process that is no fork: a fork that meets others found a lock of its parent taken."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=2 * HANG_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def under_torchrun(name: str, *, forks_ranks: bool = True, ranks: int = 2) -> str:
    done = torchrun(str(EXAMPLES / name), forks_ranks=forks_ranks, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(printed: str) -> list[float]:
    return [float(each) for each in re.findall(r"-?\d+\.\d+", printed)]


def test_the_sharded_script_is_the_plain_one_and_four_lines():
    plain, sharded = (
        (EXAMPLES / name).read_text().split('"""', 2)[2].splitlines()
        for name in ("train_plain.py", "train_sharded.py")
    )
    changes = [line for line in difflib.ndiff(plain, sharded) if line[0] in "+-"]
    assert [line.strip("+ ") for line in changes if line.strip("+ ")] == [
        "import onefold",
        "onefold.shard(model, optimizer, stage=3)  # the one line",
        "report = onefold.report(model)",
        "starts = starts[report.rank :: report.world_size]  # own rows for each rank",
    ]


@pytest.mark.process
def test_the_sharded_script_reaches_the_loss_of_the_plain_one_alone_and_under_torchrun():
    """Under torchrun here in processes of their own from the start, as a user's are.

    Each of two ranks has half of the rows, so the mean of their losses is the plain script's.
    """
    told = alone("train_plain.py")
    assert told.startswith("loss ")
    assert alone("train_sharded.py") == told
    both = numbers(under_torchrun("train_sharded.py", forks_ranks=False))
    assert len(both) == 2
    assert both[0] != both[1], "two ranks trained on the same rows"
    assert sum(both) / 2 == pytest.approx(numbers(told)[0], abs=2e-4)


@pytest.mark.process
def test_two_models_with_one_loss_train():
    assert numbers(under_torchrun("gan.py")) == pytest.approx(numbers(alone("gan.py")), abs=0.002)


@pytest.mark.again(
    "tests/adapters/test_huggingface.py::test_a_model_trains_as_in_one_process_at_every_stage"
)
@pytest.mark.process
def test_a_llama_from_its_config_trains_in_bf16():
    assert "stage 3, rank 0 of 2, 10 steps" in under_torchrun("llama.py")


@pytest.mark.again(
    "tests/axes/test_sequence.py::test_every_stage_has_the_weights_of_one_process_after_twenty_steps"
)
@pytest.mark.process
def test_a_split_sequence_has_the_losses_of_one_rank():
    alone_told, *together = (
        numbers(under_torchrun("sequence_parallel.py", ranks=ranks)) for ranks in (1, 2, 4)
    )
    assert len(alone_told) == 4
    assert alone_told[-1] < alone_told[0]
    for told in together:
        assert told == pytest.approx(alone_told, abs=2e-3)


@pytest.mark.again(
    "tests/axes/test_experts_transformers.py::test_models_of_transformers_have_the_gradients_of_one_process"
)
@pytest.mark.process
def test_a_mixtral_trains_with_an_expert_axis():
    told = under_torchrun("experts.py", ranks=4)
    first, last = numbers("".join(re.findall(r"step .*", told)))
    assert last < first / 2
    assert "stage 3, rank 0 of 4, 20 steps" in told


@pytest.mark.again(
    "tests/axes/test_tensor_parallel.py::test_gradients_and_weights_are_those_of_one_process_and_bitwise_those_of_other_stages"
)
@pytest.mark.process
def test_tensor_parallel_trains_one_model_on_each_pair_of_ranks():
    done = torchrun(str(EXAMPLES / "tensor_parallel.py"), ranks=4)
    assert done.returncode == 0, done.stderr
    first, _, last, _ = numbers(done.stdout)
    assert last < first - 2
    assert "blocks.0.up.weight [192, 64]: [48, 64] rest on a rank" in done.stdout


@pytest.mark.again(
    "tests/adapters/test_lightning.py::test_losses_weights_and_validation_are_those_of_ddp"
)
@pytest.mark.process
def test_lightning_trains_on_processes_of_its_own_launcher_and_under_torchrun():
    pytest.importorskip("lightning")
    alone_printed = fresh("lightning_fit.py")  # which starts a rank itself, next to this one
    together = under_torchrun("lightning_fit.py")
    (loss,) = numbers(re.findall(r"val_loss .*", alone_printed)[-1])
    assert loss < 2
    assert numbers(re.findall(r"val_loss .*", together)[-1]) == pytest.approx([loss], abs=2e-3)


def test_the_notebook_shows_the_outputs_of_a_run(tmp_path, monkeypatch):
    """Written by docs/tools/notebook.py. Losses and free memory are those of a machine."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tool = runpy.run_path(str(EXAMPLES.parent / "docs" / "tools" / "notebook.py"))
    cells = json.loads((EXAMPLES / "first_steps.ipynb").read_text())["cells"]
    pairs = list(zip(cells, tool["run"](cells), strict=True))
    for shown, ran in pairs:
        assert shown.get("execution_count") == ran.get("execution_count")
        assert len(shown.get("outputs", ())) == len(ran.get("outputs", ()))
    printed = ["".join(o.get("text", "")) for _, ran in pairs for o in ran.get("outputs", ())]
    first, last = numbers(next(text for text in printed if text.startswith("loss")))[:2]
    assert last < first
    assert "resumed at step 20\n" in printed
    (report,) = [text for text in printed if text.startswith("stage 3, rank 0 of 1")]
    assert report in ["".join(o.get("text", "")) for c, _ in pairs for o in c.get("outputs", ())]


def test_adapters_train_on_a_four_bit_base():
    """The second rank has half of the base; each line is rank 0's."""
    pytest.importorskip("bitsandbytes")
    together = under_torchrun("qlora.py")
    first, *_, last = numbers(re.sub(r"/\S+", "", together.partition("stage 3")[0]))
    assert last < first
    assert "stage 3, rank 0 of 2, 12 steps" in together
    assert "stage 3, rank 0 of 1, 12 steps" in alone("qlora.py")


@pytest.mark.again("tests/axes/test_pipeline.py::test_weights_after_ten_steps_equal_one_process")
@pytest.mark.process
def test_the_pipeline_learns_the_next_word():
    done = torchrun(str(EXAMPLES / "pipeline.py"), ranks=4)
    assert done.returncode == 0, done.stderr
    assert numbers(done.stdout)[0] < 0.5


@pytest.mark.again(
    "tests/app/test_finetune.py::test_adapters_on_a_quantized_base_are_saved_and_merged"
)
@pytest.mark.process
def test_plain_transformers_opens_the_fine_tuned_folder_to_the_logits_of_the_trained_model(
    tmp_path,
):
    """The trained model is read from the run's checkpoint: shards of its two ranks."""
    transformers = pytest.importorskip("transformers")
    for package in ("trl", "peft", "datasets"):
        pytest.importorskip(package)
    environment = os.environ | {
        "PYTHON": sys.executable, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(EXAMPLES / "finetune.sh"), str(tmp_path)], env=environment, cwd=tmp_path,
        capture_output=True, text=True, timeout=4 * HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, after = numbers("".join(re.findall(r"held-out loss .*", done.stdout)))
    assert after < before / 2
    assert re.search(r"plain transformers: .*\nassistant:\n[a-z]", done.stdout), "an answer"

    open_model = transformers.AutoModelForCausalLM.from_pretrained
    begun, opened = (open_model(tmp_path / name) for name in ("model", "tuned"))
    trained = transformers.LlamaForCausalLM(opened.config).eval()
    onefold.shard(trained)
    onefold.load(tmp_path / "runs" / "checkpoint-100" / "onefold", trained)
    tokens = torch.arange(400).view(4, 100)
    with torch.no_grad():
        found, wanted, first = (model(tokens).logits for model in (opened, trained, begun))
    assert torch.equal(found, wanted)
    assert (first - wanted).abs().max() > 1


def three_axes_alone() -> tuple[nn.Module, list[float]]:
    """The training of `three_axes.py` in this process: its model, and the loss of each step."""
    source = (EXAMPLES / "three_axes.py").read_text()
    scope = {"torch": torch, "nn": nn}
    exec(source[source.index("WORDS, ") : source.index("dist.init_process_group")], scope)
    torch.manual_seed(0)
    words, width = scope["WORDS"], scope["WIDTH"]
    model = nn.Sequential(
        nn.Embedding(words, width), *(scope["Block"]() for _ in range(4)), nn.Linear(width, words)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    shape = 4 * scope["MICRO_BATCHES"], scope["LENGTH"]
    drawn = []
    for dp in range(2):
        torch.manual_seed(100 + dp)
        drawn.append([torch.randint(words, shape) for _ in range(scope["STEPS"])])
    losses = []
    for rows in zip(*drawn, strict=True):
        tokens = torch.cat(rows)
        targets = (tokens * 5 + 3) % words
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


@pytest.mark.again(
    "tests/axes/test_axes_matrix.py::test_every_stage_on_every_mesh_is_one_process_and_stages_have_the_same_bits"
)
@pytest.mark.process
def test_three_axes_train_the_model_of_one_process(tmp_path):
    folder = tmp_path / "saved"
    done = torchrun(str(EXAMPLES / "three_axes.py"), str(folder), ranks=8)
    assert done.returncode == 0, done.stderr
    wanted, losses = three_axes_alone()
    assert numbers(done.stdout) == pytest.approx([losses[-1]], rel=0.2)  # of one data rank's rows
    found, _ = three_axes_alone()
    nn.init.zeros_(found[0].weight)
    onefold.shard(found)
    onefold.load(folder, found)
    for name, weight in wanted.named_parameters():
        torch.testing.assert_close(found.get_parameter(name).data, weight, rtol=0, atol=2e-5)
