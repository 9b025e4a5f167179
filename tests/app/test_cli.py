"""The command, as a user meets it: what it prints, its exit codes, what it leaves running."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onefold.app.cli import launch
from onefold.app.cli.arguments import one_line, real, whole
from onefold.app.cli.main import main
from onefold.errors import ConfigError
from onefold.planner.models.gpt import PRESETS
from onefold.planner.models.loader import published
from tests.support.commands import begin, onefold, torchrun
from tests.support.forking import HANG_S
from tests.support.rows import again_but

ONEFOLD = [sys.executable, "-m", "onefold"]
TINY_RUN = ["--steps", "3", "--batch", "2", "--seq", "16"]

MODULES = '''
import os
import sys
import time
import torch
from torch import nn


class Net(nn.Module):
    """Bytes to logits, through a layer that may weigh differently on each rank."""

    def __init__(self, slope=0.0):
        super().__init__()
        self.slope = slope
        self.embed = nn.Embedding(256, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 256)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + (1 + self.slope * int(os.environ["RANK"])) * self.mix(x))


class Dies(Net):
    def forward(self, tokens):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), 9)
        return super().forward(tokens)


def net():
    return Net()


def rank_dependent():
    return Net(slope=0.1)


class SlowOutput:
    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        time.sleep(0.5)
        return self.stream.write(text)

    def flush(self):
        self.stream.flush()

    def isatty(self):
        return False


def slow_to_print():
    if os.environ["RANK"] == "0":
        sys.stdout = SlowOutput(sys.stdout)
    return rank_dependent()


def dies():
    return Dies()


def narrow():
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 100))


def regression():
    rows = torch.linspace(-1, 1, 24).view(4, 6)
    return nn.Linear(6, 5), (rows, rows[:, :5].sin()), loss


def no_loss():
    return nn.Linear(4, 1), torch.randn(8, 4), lambda module, batch: module(batch).nothing


def loss(module, batch):
    inputs, targets = batch
    return (module(inputs) - targets).square().mean()
'''


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def step_device(tmp_path: Path) -> Path:
    """A working directory with modules of the user's own."""
    (tmp_path / "mine.py").write_text(MODULES)
    return tmp_path


def without_times(result: dict[str, Any]) -> dict[str, Any]:
    kept = {name: result[name] for name in ("losses", "held_out", "text", "ranks")}
    # peaks depend on whether a reduction was over when the next gradient came
    return kept | {"memory": [memory["now"] for memory in result["memory"]]}


def processes_below(folder: Path) -> list[str]:
    """Command lines of processes that work in `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and Path(os.readlink(entry / "cwd")) == folder:
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def wait_for_torch(running: subprocess.Popen) -> None:
    """Until the process begins to load torch, which it does only with interrupts in hand."""
    deadline = time.monotonic() + HANG_S
    while "/libtorch" not in Path(f"/proc/{running.pid}/maps").read_text():
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


# starting


@pytest.mark.process
@pytest.mark.parametrize("command", [[], ["train"], ["check"], ["doctor"]])
def test_help_takes_under_three_tenths_of_a_second_and_imports_no_torch(command):
    """Of a core: how long others keep it waiting for one is not its doing."""
    program = (
        "import sys\nfrom onefold.app.cli.main import main\n"
        f"try:\n    main({[*command, '--help']!r})\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules"
    )
    fastest = float("inf")
    for _ in range(5):  # the fastest: others use the caches too
        begun = os.times()
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        ended = os.times()
        taken = ended.children_user + ended.children_system
        fastest = min(fastest, taken - begun.children_user - begun.children_system)
        assert done.returncode == 0, done.stderr
        assert "--json" in done.stdout or not command
        if fastest < 0.3:
            break
    assert fastest < 0.3


def test_without_a_command_it_shows_its_commands(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("train", "check", "doctor"))


@pytest.fixture
def unread() -> Iterator[int]:
    """The end of a pipe that nobody reads, as of `onefold doctor | head -1`."""
    ours, theirs = os.pipe()
    os.close(ours)
    yield theirs
    os.close(theirs)


@pytest.mark.process
@pytest.mark.parametrize("arguments", [[], ["plan", "--help"]])
def test_a_reader_that_has_left_ends_the_command_without_a_word(arguments, unread, step_device):
    """The exit code is that of SIGPIPE."""
    done = subprocess.run([*ONEFOLD, *arguments], cwd=step_device, stdout=unread,
                          stderr=subprocess.PIPE, text=True, timeout=HANG_S,
                          env={**os.environ, "PYTHONUNBUFFERED": ""})  # fmt: skip
    assert done.stderr == ""
    assert done.returncode == 128 + signal.SIGPIPE


@again_but("arguments1")
@pytest.mark.process
@pytest.mark.parametrize("arguments", [["doctor"], ["check", "--steps", "1", "--json"]])
def test_a_reader_that_has_left_ends_ranks_too(arguments, unread, step_device):
    """A launcher prints what its ranks measured; of a check, rank 0 prints."""
    done = onefold(*arguments, cwd=step_device, out=unread)
    assert done.stderr == ""
    assert done.returncode == 128 + signal.SIGPIPE


# help


def test_help_names_every_model_that_needs_no_file(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split()).replace("- ", "-")
    assert not [name for name in (*PRESETS, *published()) if name not in shown]


def test_help_lists_the_flags_of_train_in_groups_and_examples_on_lines_of_their_own(capsys):
    commands = ("train", "plan", "check", "generate", "report", "doctor", "bench", "inspect",
                "export")  # fmt: skip
    for command in commands:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        lines = capsys.readouterr().out.splitlines()
        examples = [line for line in lines if line[:2] == "  " and f"onefold {command}" in line]
        assert examples, command
        if command == "train":
            heads = ["options:", "memory:", "model and data:", "ranks and speed:"]
            heads.append("checkpoints and reports:")
            assert [line for line in lines if line in heads] == heads


def test_a_missing_argument_is_named_in_the_words_of_argparse(capsys):
    assert main(["generate"]) == 2
    said = "onefold generate: the following arguments are required: --model, --prompt "
    assert capsys.readouterr().err == said + "(hint: `onefold generate --help` describes them)\n"


# bad input


@pytest.mark.parametrize(("arguments", "message"), [
    (["train", "--stage", "7"], 'expected stage to be 0, 1, 2, 3 or "auto", got 7'),
    (["train", "--stage", "all"], "expected stage to be 0, 1, 2, 3 or \"auto\", got 'all'"),
    (["train", "--precision", "bf61"], "did you mean 'bf16'?"),
    (["train", "--ranks", "0"], "expected --ranks to be a whole number of at least 1, got '0'"),
    (["train", "--steps", "many"], "expected --steps to be a whole number of at least 1"),
    (["train", "--steps"], "expected one argument"),
    (["train", "--lr", "-1"], "expected --lr to be a number above 0, got '-1'"),
    (["train", "--clip", "nan"], "expected --clip to be a number of at least 0, got 'nan'"),
    (["train", "--shares", "3,x"], "expected --shares to be a number of at least 0, got 'x'"),
    (["train", "--shares", "0,0"], "not all of them 0, got (0, 0)"),
    (["train", "--shares", "1,2,3"], "expected --shares with one weight for each of 2 ranks"),
    (["train", "--data", "/nonexistent"], "expected a data folder with text files, got no folder"),
    (["train", "--model", "tini"], "did you mean 'tiny'?"),
    (["train", "--model", "nosuch:build"], "expected 'nosuch:build' to import"),
    (["train", "--model", "tests.app.test_cli:nosuch"], "has no attribute 'nosuch'"),
    (["train", "--model", "nowhere/config.json"], "expected a readable Hugging Face config.json"),
    (["train", "--bogus", "1"], "expected a flag of `onefold train`, got --bogus"),
    (["plan", "config.json"], "a model goes behind its flag: `onefold plan --model config.json`"),
    (["train", "--step", "1"], "got --step (hint: did you mean --steps?)"),
    (["train", "--stge=3"], "got --stge (hint: did you mean --stage?)"),
    (["check", "--seeds", "1"], "did you mean --seed?"),
    (["report", "--jsn"], "did you mean --json?"),
    (["inspect", "--verfy", "here"], "did you mean --verify?"),
    (["export", "a", "b", "--max-shard", "5GB"], "did you mean --max-shard-size?"),
    (["bench", "disk", "--second", "1"], "did you mean --seconds?"),
    (["bench", "dsk"], "did you mean disk?"),
    (["plan", "--gpu", "8"], "did you mean --gpus 8?"),
    (["train", "--checkpoint", "/proc/nowhere"], "expected a directory to write checkpoints to"),
    (["train", "--report", "/proc/nowhere"], "expected a directory to write a report to"),
    (["--verison"], "did you mean --version?"),
    (["trian", "--stage", "3"], "did you mean train?"),
    (["train", "tiny"], "a model goes behind its flag: `onefold train --model tiny`"),
    (["train", "--batch", "0"], "expected --batch to be a whole number of at least 1, got '0'"),
    (["check", "nosuch:build"], "expected 'nosuch:build' to import"),
    (["check", "--steps", "0"], "expected --steps to be a whole number of at least 1, got '0'"),
    (["doctor", "--fast"], "got --fast"),
    (["fly"], "expected a command: train, finetune, plan, check"),
])  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_two_before_any_rank_starts(
    arguments, message, capsys, monkeypatch
):
    def started(*_: object) -> int:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("onefold.app.cli.train.launch", started)
    monkeypatch.setattr("onefold.app.cli.check.launch", started)
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert told.err.startswith(
        f"onefold {arguments[0]}: " if arguments[0][0] != "-" else "onefold: "
    )
    assert message in told.err
    assert "expected" in told.err


def test_a_folder_without_text_is_refused(tmp_path, capsys):
    assert main(["train", "--data", str(tmp_path)]) == 2
    assert "got no text in" in capsys.readouterr().err


def test_a_message_and_its_hint_become_one_line():
    assert one_line(ConfigError("expected a,\n  got b\nhint: do\nc")) == (
        "expected a, got b (hint: do c)"
    )


@pytest.mark.parametrize("text", ["", "1e400", "inf", "nan", "x", "0"])
def test_numbers_that_are_none_are_refused(text):
    with pytest.raises(ConfigError, match=r"expected --lr to be a number above 0"):
        real("--lr", text, above=0)
    with pytest.raises(ConfigError, match=r"expected --steps to be a whole number"):
        whole("--steps", text, least=1)


@pytest.mark.process
def test_bad_input_that_only_a_rank_can_see_is_one_line_too(step_device):
    done = onefold("train", "--model", "mine:narrow", *TINY_RUN, cwd=step_device)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "got [2, 16, 100]" in done.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("variable", "missing"),
    [
        ("RANK", "WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ("WORLD_SIZE", "RANK, MASTER_ADDR, MASTER_PORT"),
    ],
)
def test_a_rank_without_its_launcher_is_told_so(variable, missing, step_device, monkeypatch):
    monkeypatch.setenv(variable, "2")
    done = onefold("train", *TINY_RUN, cwd=step_device)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"got no {missing}" in done.stderr


# train


@pytest.mark.again(
    "tests/app/test_cli.py::test_without_a_terminal_progress_is_lines_and_the_table_equals_the_closed_form"
)
@pytest.mark.process
def test_train_tells_the_same_in_json_alone_and_under_torchrun(step_device):
    arguments = ["train", *TINY_RUN, "--json"]
    done = onefold(*arguments, cwd=step_device)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    result = json.loads(done.stdout)
    assert result["ranks"] == 2
    assert result["job"]["stage"] == 3
    assert len(result["losses"]) == 3
    assert set(result["versions"]) == {"python", "torch", "onefold"}
    assert result["text"].startswith("def ")
    for memory in result["memory"]:
        assert {kind: memory["now"].get(kind, 0) for kind in memory["expected"]} == (
            memory["expected"]
        )
    again = torchrun("-m", "onefold", *arguments, "--ranks", "2", cwd=step_device)
    assert again.returncode == 0, again.stderr
    assert without_times(json.loads(again.stdout)) == without_times(result)


@pytest.mark.process
def test_without_a_terminal_progress_is_lines_and_the_table_equals_the_closed_form(step_device):
    run = ("--model", "mine:net", "--stage", "2", "--shares", "1,3", *TINY_RUN)
    done = onefold("train", *run, cwd=step_device)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert done.stdout.isascii()
    assert "step      3 of 3  loss" in done.stdout
    assert "held-out loss" in done.stdout
    for kind in ("weight", "grad", "optimizer"):
        (row,) = [line for line in done.stdout.splitlines() if line.startswith(kind)]
        assert row.split()[3] == "equal"
    assert 'text: "def ' in done.stdout


@pytest.mark.again(
    "tests/app/test_cli.py::test_without_a_terminal_progress_is_lines_and_the_table_equals_the_closed_form"
)
@pytest.mark.process
def test_on_a_terminal_progress_is_a_bar(step_device):
    """Here launcher and ranks are processes of their own from the start, as a user's are."""
    ours, theirs = pty.openpty()
    running = subprocess.Popen(
        [*ONEFOLD, "train", "--model", "mine:net", *TINY_RUN],
        cwd=step_device, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert running.wait(HANG_S) == 0
    text = shown.decode()
    assert "step 3 of 3" in text
    assert text.count("\x1b[?25h") >= text.count("\x1b[?25l") > 0, "the cursor is shown again"
    assert "held-out loss" in text
    assert "Warning" not in text


@again_but("0.5")
@pytest.mark.process
@pytest.mark.parametrize("delay_s", [0.0, 0.5])
def test_an_interrupt_at_the_start_ends_the_command_with_one_line(step_device, delay_s):
    """While it starts, from when it loads torch.

    An interrupt in the first tenths of a second ends Python's own start, as it ends any script's.
    """
    running = subprocess.Popen(
        [*ONEFOLD, "train", "--steps", "100000"], cwd=step_device, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    wait_for_torch(running)
    time.sleep(delay_s)
    assert running.poll() is None
    os.killpg(running.pid, signal.SIGINT)
    _, errors = running.communicate(timeout=HANG_S)  # 100,000 steps take hours
    assert running.returncode == 130
    assert errors == "onefold train: interrupted\n"
    assert_none_is_left(step_device)


@pytest.mark.process
def test_an_interrupt_ends_all_ranks_within_seconds_with_one_line(step_device):
    """A second after it began to train. Its ranks have sessions of their own, as torch starts them:
    a terminal's interrupt reaches the launcher alone."""
    running = begin("train", "--steps", "100000", cwd=step_device)
    running.until(lambda out: out.count("\n") >= 3)  # what is told before the first step
    time.sleep(1)
    assert running.poll() is None
    os.kill(running.pid, signal.SIGINT)
    done = running.end()
    assert done.returncode == 130
    assert done.stderr == "onefold train: interrupted\n"
    assert_none_is_left(step_device)


def assert_none_is_left(folder: Path) -> None:
    """No process that works in the folder, within minutes."""
    deadline = time.monotonic() + HANG_S
    while processes_below(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_below(folder) == []


@pytest.mark.process
def test_a_rank_that_is_killed_ends_the_run_with_a_line_that_names_it(step_device):
    done = onefold("train", "--model", "mine:dies", *TINY_RUN, cwd=step_device)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "rank 1 ended by SIGKILL" in done.stderr


# check


@pytest.mark.process
def test_check_passes_on_the_default_module_and_says_so_in_json(step_device):
    done = onefold("check", "--json", cwd=step_device)
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["passes"]
    assert [stage["stage"] for stage in verdict["stages"]] == [0, 1, 2, 3]
    assert all(stage["bits"] is None for stage in verdict["stages"])


@pytest.mark.again(
    "tests/app/test_cli.py::test_check_passes_on_the_default_module_and_says_so_in_json"
)
@pytest.mark.process
def test_check_takes_a_batch_and_a_loss_from_the_user(step_device):
    done = onefold("check", "mine:regression", "--steps", "2", cwd=step_device)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "35 parameters, 2 steps, 2 ranks" in done.stdout
    assert done.stdout.endswith("all stages agree\n")


@pytest.mark.process
def test_check_names_the_line_of_a_loss_that_fails(step_device):
    done = onefold("check", "mine:no_loss", cwd=step_device)
    assert done.returncode != 0
    assert "expected loss_fn(module, batch) to run, got AttributeError" in done.stderr
    assert "(mine.py:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.process
def test_check_names_the_parameter_that_differs_where_ranks_compute_differently(step_device):
    done = onefold("check", "mine:rank_dependent", cwd=step_device)
    assert done.returncode == 1
    assert done.stderr == ""
    assert "FAILS" in done.stdout
    assert "differs most from one process: by " in done.stdout
    assert any(f"'{name}'" in done.stdout for name in ("embed.weight", "mix.weight", "head.weight"))


@pytest.mark.process
def test_check_waits_until_its_verdict_is_printed(step_device):
    """Rank 1 returns 1, and the launcher then ends rank 0."""
    done = onefold("check", "mine:slow_to_print", "--steps", "1", cwd=step_device)
    assert done.returncode == 1
    assert "FAILS" in done.stdout


# doctor


@pytest.mark.process
def test_doctor_tells_what_the_machine_has(step_device):
    done = onefold("doctor", "--json", cwd=step_device)
    assert done.returncode == 0, done.stderr
    machine = json.loads(done.stdout)
    assert machine["cores"] >= 1
    assert machine["link"]["backend"] == "gloo"
    assert machine["link"]["rates"]["gather"]["per_s"] > 0
    assert machine["memory_total"] >= machine["memory_free"] > 0


def test_a_rank_that_is_ended_while_it_writes_its_failure_leaves_no_file(tmp_path, monkeypatch):
    """The launcher would read half of one."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv(launch.LAUNCHER, "1")
    write = Path.write_text

    def write_half(path: Path, text: str) -> None:
        write(path, text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(KeyboardInterrupt):
        launch.record_failure(ValueError("a wrong number"), 1)
    assert not path.exists()
    monkeypatch.setattr(Path, "write_text", write)
    assert launch.record_failure(ValueError("a wrong number"), 1)
    assert json.loads(path.read_text())["onefold"]["line"] == "ValueError: a wrong number"
