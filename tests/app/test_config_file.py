"""`--config run.toml`: flags of `onefold train` and `onefold finetune` from a file."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.app.cli import finetune, train
from onefold.app.cli.config_file import COPY, save_copy
from onefold.app.cli.main import _parse, main
from onefold.errors import ConfigError
from tests.support.commands import onefold, torchrun

NEEDED = 'model = "m"\ndata = "d"\nout = "o"\n'
TINY_RUN = "steps = 3\nbatch = 2\nseq = 16\nsample = 0\n"


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def parsed(folder: Path, command: str, toml: str, *flags: str) -> argparse.Namespace:
    (folder / "run.toml").write_text(toml)
    return _parse([command, "--config", "run.toml", *flags])


def job_of(arguments: argparse.Namespace) -> Any:
    is_train = arguments.command == "train"
    return train.job_of(arguments, 2) if is_train else finetune.job_of(arguments)


# meaning


@pytest.mark.parametrize(
    ("command", "toml", "flags"),
    [
        ("train", "", ""),
        ("train", 'stage = 2\nprecision = "bf16"', "--stage 2 --precision bf16"),
        ("train", 'stage = "auto"\nlr = 1e-3\nclip = 0', "--stage auto --lr 1e-3 --clip 0"),
        ("train", "shares = [3, 1]\nrows = [1.5, 1]", "--shares 3,1 --rows 1.5,1"),
        ("train", 'shares = "3,1"\nrows = "auto"', "--shares 3,1 --rows auto"),
        ("train", "recompute = true\ncompile = false", "--recompute"),
        ("train", 'data = "-texts of = mine"', "'--data=-texts of = mine'"),
        ("train", 'data = ""', "--data="),
        ("finetune", NEEDED + "held-out = 0.1", "--held-out 0.1"),
        ("finetune", NEEDED + "held_out = 0.1", "--held-out 0.1"),
        ("finetune", NEEDED + "learning_rate = 1\nmax-steps = 1_0", "--lr 1 --steps 10"),
        ("finetune", NEEDED + 'report-to = "wandb"\nlora = 4\nmerge = true',
         "--report-to wandb --lora 4 --merge"),
    ],
)  # fmt: skip
def test_a_file_means_what_its_flags_mean(cwd, command, toml, flags):
    needed = "--model m --data d --out o " if command == "finetune" else ""
    wanted = _parse([command, *shlex.split(needed + flags)])
    assert job_of(parsed(cwd, command, toml)) == job_of(wanted)


def test_required_flags_may_come_from_the_file_under_any_of_their_names(cwd):
    toml = 'model_name_or_path = "m"\ndataset-name = "d"\noutput_dir = "o"'
    job = job_of(parsed(cwd, "finetune", toml))
    assert (job.model, job.data, job.out) == ("m", "d", "o")
    with pytest.raises(ConfigError, match="required: --out"):
        parsed(cwd, "finetune", 'model = "m"\ndata = "d"')


@pytest.mark.parametrize("flag", ["--lr", "--learning_rate"])
@pytest.mark.parametrize("is_first", [False, True])
def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(cwd, flag, is_first):
    (cwd / "run.toml").write_text(NEEDED + "learning-rate = 0.5\nseq = 7")
    words = ["--config=run.toml"], [flag, "0.25"]
    job = job_of(_parse(["finetune", *(words[is_first] + words[not is_first])]))
    assert (job.lr, job.seq, job.batch) == (0.25, 7, 1)


def test_of_two_files_the_later_one_wins_and_may_turn_a_switch_off(cwd):
    (cwd / "base.toml").write_text("recompute = true\nsteps = 3\nseq = 8")
    (cwd / "more.toml").write_text("recompute = false\nsteps = 4")
    job = job_of(_parse(["train", "--config", "base.toml", "--config", "more.toml"]))
    assert (job.recompute, job.steps, job.seq) == (False, 4, 8)


def test_ranks_of_the_launcher_get_the_flags_and_read_no_file(cwd, monkeypatch):
    """A pipe, as of `--config <(...)`, can be read once."""
    launched = []
    keep = lambda argv, *_, **__: launched.append(argv) or 0
    monkeypatch.setattr("onefold.app.cli.train.launch", keep)
    (cwd / "run.toml").write_text(TINY_RUN + "ranks = 3")
    assert main(["train", "--config", "run.toml", "--seed", "5"]) == 0
    ((command, *words),) = launched
    assert command == "train"
    assert not [word for word in words if "config" in word or "toml" in word]
    arguments = _parse([command, *words])
    assert (arguments.steps, arguments.ranks, arguments.seed) == (3, 3, 5)


# refusals


@pytest.mark.parametrize(
    ("command", "toml", "words"),
    [
        ("finetune", "lerning-rate = 1", r"a flag of `onefold finetune`, got lerning-rate \(F\)"
         r".* did you mean learning_rate\?"),
        ("finetune", "use-peft = true", r"got use-peft \(F\).* here it is --lora 16"),
        ("train", "learning_rate = 1", r"a flag of `onefold train`, got learning_rate \(F\)"),
        ("train", '"" = 1', r"a flag of `onefold train`, got +\(F\)"),
        ("train", "h = true", r"a flag of `onefold train`, got h \(F\)"),
        ("train", 'config = "a"', r"got 'config' \(F\).* --config works on the command line"),
        ("train", "help = true", r"got 'help' \(F\)"),
        ("train", "[memory]\nstage = 2", r"without tables, got \[memory\] \(F\)"),
        ("train", "optim.lr = 2", r"without tables, got \[optim\] \(F\)"),
        ("train", "lr.peak = 2", r"without tables, got \[lr\] \(F\)"),
        ("finetune", "lr = 1\nlearning_rate = 2", r"one key for --lr, got 'learning_rate' as well"),
        ("train", 'lr = "fast"', r"--lr to be a number above 0, got 'fast' \(lr in F\)"),
        ("train", "steps = 3.5", r"--steps to be a whole number .*'3.5' \(steps in F\)"),
        ("train", "steps = true", r"--steps to be a number or text, got True \(steps in F"),
        ("train", "seed = 2026-11-29", r"--seed to be a number or text, got .*\(seed in F\)"),
        ("train", "batch = [8]", r"--batch to be one value, got \[8\] \(batch in F\)"),
        ("train", "stage = [1, 2]", r"--stage to be one value, got \[1, 2\] \(stage in F"),
        ("train", 'shares = [1, "a"]', r"--shares to be a number .* got 'a' \(shares in F\)"),
        ("train", "rows = [1, true]", r"--rows to be a number .* got 'True' \(rows in F\)"),
        ("train", "model = 3", r"--model to be text in quotes, got 3 \(model in F\)"),
        ("train", 'data = ["a", "b"]', r"--data to be text in quotes, got .* \(data in F\)"),
        ("train", 'recompute = "yes"', r"--recompute to be true or false, got 'yes' \(recompute"),
        ("finetune", 'rest = "int2"', r"--rest to be int8 or int4, got 'int2' \(rest in F\)"),
        ("train", "lr = 1\nseq 3", r"--config 'F' to be a TOML file, got .*line 2"),
        ("train", "lr = 1\nlr = 2", r"--config 'F' to be a TOML file, got .*overwrite"),
        ("train", b"data = '\xff'", r"--config 'F' to be a TOML file, got .*utf-8"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_work_is_refused_in_one_line_that_names_it(
    cwd, capsys, command, toml, words
):
    (cwd / "F").write_bytes(toml if isinstance(toml, bytes) else toml.encode())
    assert main([command, "--config", "F"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert re.search(words, line), line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--config", "none.toml"], "'none.toml' to be a TOML file, got No such file"),
        (["--config", "."], "'.' to be a TOML file, got Is a directory"),
        (["--config"], "--config '' to be a TOML file"),
        (["--config="], "--config '' to be a TOML file"),
        (["--confg", "run.toml"], "did you mean --config?"),
    ],
)
def test_a_file_that_is_not_there_is_named(cwd, capsys, flags, words):
    assert main(["train", *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_command_without_config_files_refuses_the_flag(capsys):
    assert main(["plan", "--config", "run.toml"]) == 2
    assert "got --config" in capsys.readouterr().err


# the copy


@pytest.mark.parametrize(
    "argv",
    [
        ["train"],
        ["train", "--stage", "auto", "--offload", "disk:/a:/b", "--fraction", "auto"],
        ["train", "--shares", "3,1", "--rows", "1.5,1", "--recompute", "--lr", "1e-05"],
        ["train", "--shares", "auto", "--rows", "auto", "--clip", "0", "--ranks", "4", "--resume"],
        ["finetune", "--model", "m", "--data", "d", "--out", "o"],
        ["finetune", "--model", "m", "--data", "d", "--out", "o", "--held-out", "0", "--lora", "2",
         "--rest", "int4", "--merge", "--offload", "none", "--epochs", "0.5", "--report-to", "x"],
    ],
)  # fmt: skip
def test_the_copy_of_a_run_gives_the_same_run(cwd, argv):
    arguments = _parse(argv)
    save_copy(arguments, ".")
    again = _parse([argv[0], "--config", COPY])
    assert job_of(again) == job_of(arguments)
    assert again.ranks == arguments.ranks
    (cwd / "second").mkdir()
    save_copy(again, "second")
    assert (cwd / "second" / COPY).read_text() == (cwd / COPY).read_text()


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_from_the_copy(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("copy")
    save_copy(_parse(["train", f"--data={text}"]), str(folder))
    assert _parse(["train", "--config", str(folder / COPY)]).data == text


def test_a_copy_has_the_defaults_too_and_says_nothing_of_the_output(cwd):
    save_copy(parsed(cwd, "train", "steps = 3", "--json", "--seq", "8"), ".", None)
    text = (cwd / COPY).read_text()
    assert {"steps = 3", "seq = 8", "batch = 8", 'model = "tiny"'} <= set(text.splitlines())
    assert not re.search("json|config =|toml =", text)


def test_a_path_that_is_not_utf_8_does_not_end_the_run(cwd):
    save_copy(_parse(["train", "--data", "\udcff"]), ".")
    assert b'data = "\xff"' in (cwd / COPY).read_bytes()


# runs


def losses(folder: Path, *flags: str) -> list[float]:
    done = onefold("train", *flags, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["losses"]


@pytest.mark.process
def test_a_run_trains_by_its_file_and_again_by_its_copy(tmp_path):
    """The file is found from the folder where the command runs; its ranks are the launcher's."""
    (tmp_path / "run.toml").write_text(TINY_RUN + 'checkpoint = "runs"\nreport = "page"\n')
    first = losses(tmp_path, "--config", "run.toml", "--seed", "3")
    assert len(first) == 3
    copy = (tmp_path / "runs" / COPY).read_text()
    assert copy == (tmp_path / "page" / COPY).read_text()
    assert {"seed = 3", "ranks = 2", "batch = 2"} <= set(copy.splitlines())
    assert losses(tmp_path, "--config", f"runs/{COPY}", "--checkpoint", "again") == first
    again = (tmp_path / "again" / COPY).read_text()
    assert again == copy.replace('"runs"', '"again"')


@pytest.mark.process
def test_under_torchrun_each_rank_reads_the_file_and_a_refused_run_leaves_the_copy(tmp_path):
    (tmp_path / "run.toml").write_text(TINY_RUN + 'checkpoint = "runs"\njson = true\n')
    words = ("-m", "onefold", "train", "--config", "run.toml")
    done = torchrun(*words, ranks=3, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 3
    copy = (tmp_path / "runs" / COPY).read_text()
    assert "ranks =" not in copy, "torchrun chooses them again"
    done = torchrun(*words, "--seed", "9", ranks=3, cwd=tmp_path)
    assert done.returncode != 0
    assert "go on from there with --resume" in done.stderr
    assert (tmp_path / "runs" / COPY).read_text() == copy


@pytest.mark.process
@pytest.mark.again(
    "tests/app/test_config_file.py::test_a_copy_has_the_defaults_too_and_says_nothing_of_the_output"
)
def test_a_run_that_writes_nothing_saves_no_copy(tmp_path):
    (tmp_path / "run.toml").write_text(TINY_RUN)
    losses(tmp_path, "--config", "run.toml")
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]
