"""`onefold plan` as a user types it."""

from __future__ import annotations

import json

import pytest
import torch

from onefold.planner.models.loader import build_model, published
from tests.support.commands import onefold

GIVEN = ("--model", "tiny", "--seq", "64", "--gpus", "4")


def test_a_plan_is_a_table_a_verdict_a_command_and_a_line():
    done = onefold("plan", *GIVEN, "--mem", "2GiB", "--cluster", "h100-80")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "tiny: 862,464 parameters, 4 ranks, 1 row of 64 tokens a rank"
    heads = lines[2].split()
    assert heads == ["stage", "offload", "memory", "fits", "step", "why"]
    assert [line.split()[:2] for line in lines[3:12]] == [
        ["*0", "none"], ["1", "none"], ["2", "none"], ["3", "none"], ["1", "optimizer"],
        ["2", "optimizer"], ["3", "optimizer"], ["3", "cpu"], ["3", "disk"],
    ]  # fmt: skip
    assert "stage 0 fits with" in done.stdout
    assert "  onefold train --model tiny --stage 0 --batch 1 --seq 64 --ranks 4" in lines
    assert "  onefold.shard(model, optimizer, stage=0)" in lines
    assert "more devices:" not in done.stdout, "the answer stays on a small screen"


def test_a_plan_for_cpu_ranks_has_bytes_and_no_times():
    done = onefold("plan", "--model", "tiny", "--seq", "64", "--ranks", "2", "--wide")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[2].split() == ["stage", "offload", "memory", "fits", "why"]
    assert "in KiB, sent by one rank in a step:" in lines
    for word in ("step times", "seconds", "tokens/s", "fastest", "bound"):
        assert word not in done.stdout


def test_a_wide_plan_ends_with_the_speed_on_more_devices():
    done = onefold("plan", *GIVEN, "--mem", "2GiB", "--cluster", "h100-80", "--wide")
    assert "the same rows a rank on more devices:" in done.stdout
    assert "tokens/s per device" in done.stdout


def test_a_published_model_and_a_gpu_are_all_that_a_plan_needs():
    done = onefold("plan", "--model", "llama-8b", "--gpu", "h100-80")
    assert done.returncode == 0, done.stderr
    head, *lines = done.stdout.splitlines()
    assert head == "llama-8b: 8,030,261,248 parameters, 8 ranks, 1 row of 1024 tokens a rank"
    rows = [line.split() for line in lines]
    verdicts = {row[0].strip("*"): row[4] for row in rows if row[1:2] == ["none"]}
    assert verdicts["0"] == "no"
    assert verdicts["3"] == "yes"
    assert "tokens/s, bound by compute" in " ".join(done.stdout.split())
    assert "onefold train --model llama-8b --stage" in done.stdout


NUMEL = {
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
}


def test_published_models_have_the_parameters_of_their_cards():
    assert {*published()} == {*NUMEL}
    for name, numel in NUMEL.items():
        with torch.device("meta"):
            model = build_model(name, seq=1024)
        assert sum(parameter.numel() for parameter in model.parameters()) == numel


def test_in_json_it_is_one_object():
    done = onefold("plan", *GIVEN, "--mem", "2GiB", "--batch", "auto", "--json")
    told = json.loads(done.stdout)
    assert told["fits"] is True
    assert told["parameters"] == 862_464
    assert told["best"]["rows"] > 1
    assert told["scaling"] == []
    assert told["best"]["missing_nbytes"]["device"] == 0 < told["best"]["free_nbytes"]["device"]


def test_where_nothing_fits_it_says_what_the_nearest_needs_and_ends_with_2():
    done = onefold("plan", *GIVEN, "--mem", "1MiB")
    assert done.returncode == 2
    assert "nothing fits; the nearest:" in done.stdout
    assert "it would need" in done.stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--mem", "80"), "--mem to be a number above 0 with a unit"),
        (("--mem", "80XB"), "--mem to be a number above 0 with a unit"),
        (("--host-mem", "-1GiB"), "--host-mem"),
        (("--gpus", "0"), "--gpus"),
        (("--gpus", "8"), "mem with gpus"),
        (("--gpus", "8", "--ranks", "2"), "ranks alone, got gpus, too"),
        (("--gpu", "h100-80", "--ranks", "2"), "ranks alone, got a machine with GPUs, too"),
        (("--gpu", "8xh100", "--nodes", "2"), "cluster with counts alone, got nodes too"),
        (("--nodes", "-1"), "--nodes"),
        (("--batch", "0"), "--batch"),
        (("--cluster", "abacus"), "abacus"),
        (("--gpu", "h10-80"), "got 'h10-80' (hint: did you mean h100-80?)"),
        (("--gpu", "abacus"), "a GPU among a100-40"),
        (("--model", "llama-8"), "did you mean 'llama-8b'?"),
        (("--wire", "int8"), "wire to be auto, exact, hybrid"),
        (("--stage", "7"), "stage to be"),
        (("--model", "nope"), "'nope'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(flags, said):
    done = onefold("plan", *flags)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("onefold plan: ")
    assert "expected" in line
    assert said in line
    assert "(hint: " in line


def test_a_config_with_missing_fields_or_an_unknown_architecture_is_one_line(tmp_path):
    for name, text in (("none", "{}"), ("odd", '{"model_type": "abacus"}'), ("cut", '{"model_')):
        path = tmp_path / f"{name}.json"
        path.write_text(text)
        done = onefold("plan", "--model", str(path), "--ranks", "2")
        assert done.returncode == 2, done.stdout
        (line,) = done.stderr.strip().splitlines()
        assert name in line
