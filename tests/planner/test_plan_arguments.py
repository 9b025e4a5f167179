"""`onefold plan` and `onefold.plan` take the same arguments, and give the same plan."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from inspect import signature
from typing import Any

import pytest
import torch

import onefold
from onefold.app.cli.main import main
from onefold.app.cli.plan import AXES, CHOICES, DEVICES
from onefold.errors import ConfigError
from onefold.planner.clusters import Cluster, Devices
from onefold.planner.models.gpt import GPT, GPTConfig
from onefold.planner.planned_axes import ModelAxes

PRINTING = {"json", "wide", "help"}
INFERENCE = {"inference", "budget", "rest", "context"}
"""Flags of another plan, that of `onefold generate`."""
SAID_BY_OTHERS = {"world_size": "flags gpus and ranks, or those of this machine"}


def flags_of_plan(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What argparse hands to the command."""
    seen: list[set[str]] = []
    monkeypatch.setattr(
        "onefold.app.cli.plan.check_flags", lambda found: seen.append({*vars(found)})
    )
    monkeypatch.setattr("onefold.app.cli.plan.print_result", lambda *_: None)
    assert main(["plan", "--ranks", "2", "--mem", "4GiB", "--seq", "16"]) == 0
    return seen[0] - {"run", "default_of", "command", "words"}


def test_the_command_and_the_function_take_the_same_arguments(monkeypatch):
    flags = flags_of_plan(monkeypatch) - PRINTING - INFERENCE
    axes = {*ModelAxes.__dataclass_fields__}
    assert axes == {*AXES} <= flags
    arguments = {*signature(onefold.plan).parameters} - {*SAID_BY_OTHERS}
    renamed = {"module_or_config": "model"}
    assert {renamed.get(name, name) for name in arguments} == (flags - axes) | {"axes"}


def test_what_the_command_passes_on_is_all_that_it_takes():
    arguments = {*signature(onefold.plan).parameters}
    assert {*DEVICES, *CHOICES} == arguments - {"module_or_config", "axes", *SAID_BY_OTHERS}
    assert {*DEVICES} == {*Devices.__dataclass_fields__}


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        ("--gpus 4 --mem 2GiB", {"gpus": 4, "mem": "2GiB"}),
        ("--gpu h100-80 --nodes 2", {"cluster": "h100-80", "nodes": 2}),
        ("--gpu a100 --gpus 4 --tp 2", {"cluster": "a100", "gpus": 4, "axes": {"tp": 2}}),
        ("--ranks 3 --mem 3GiB --disk 1GB", {"ranks": 3, "mem": 3 << 30, "disk": "1GB"}),
        ("--gpus 2 --mem 1GiB --host-mem 1KiB", {"gpus": 2, "mem": "1GiB", "host_mem": "1KiB"}),
        ("--gpu 8xh100-80+8xa100-40", {"cluster": "8xh100-80+8xa100-40"}),
        ("--ranks 2 --mem 2GiB --dtype bf16 --stage 3 --offload none --recompute --batch auto",
         {"ranks": 2, "mem": "2GiB", "dtype": "bf16", "stage": 3, "offload": "none",
          "recompute": True, "batch": "auto"}),
    ],
)  # fmt: skip
def test_the_same_words_give_the_same_plan(flags, arguments, capsys):
    code = main(["plan", "--model", "tiny", "--seq", "16", "--json", *flags.split()])
    told = json.loads(capsys.readouterr().out)
    made = onefold.plan("tiny", seq=16, **arguments)
    told.pop("scaling")
    assert told == json.loads(json.dumps(made.as_dict()))
    assert code == (0 if made.fits else 2)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"gpus": 2, "ranks": 2}, "ranks alone"),
        ({"ranks": 2, "cluster": "h100"}, "ranks alone"),
        ({"gpus": 2}, "mem with gpus"),
        ({"gpus": 0, "mem": "1GiB"}, "ranks"),
        ({"mem": "80"}, "mem to be a number"),
        ({"cluster": Cluster(memory="1GiB"), "gpus": 2}, "cluster alone"),
        ({"cluster": "8xh100-80", "mem": "1GiB"}, "cluster with counts alone"),
    ],
)
def test_devices_that_contradict_each_other_are_refused(arguments, match):
    with pytest.raises(ConfigError, match=match):
        onefold.plan("tiny", seq=16, **arguments)


class Cells(HTMLParser):
    """The text of each cell, and the tags that were opened and not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.cells += [""] * (tag in ("td", "th"))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] in (["td"], ["th"]):
            self.cells[-1] += data


def test_in_a_notebook_a_plan_is_a_small_table():
    made = onefold.plan("tiny", gpus=4, mem="2GiB", cluster="h100-80", seq=16)
    page = Cells(made._repr_html_())
    assert page.open == []
    assert page.cells[:6] == ["stage", "offload", "memory", "fits", "step", "why"]
    assert len(page.cells) == 6 * (1 + len(made.rows))
    assert made._repr_html_().count("bold") == 1


def test_text_in_a_notebook_is_escaped(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "<b>&.json"
    path.write_text(json.dumps({"model_type": "gpt2", "vocab_size": 300, "n_embd": 16, "n_layer": 1,
                                "n_head": 2, "n_positions": 16}))  # fmt: skip
    page = onefold.plan(str(path), ranks=2, mem="2GiB", seq=16)._repr_html_()
    assert "<b>" not in page
    assert "&lt;b&gt;&amp;.json" in page
    assert Cells(page).open == []


def test_a_plan_of_a_module_is_shown_too():
    with torch.device("meta"):
        module = GPT(GPTConfig(num_layers=2, width=64, num_heads=2, lr=1e-3), 16)
    page = onefold.plan(module, world_size=2, seq=16)._repr_html_()
    assert "<pre>import onefold" in page


def test_a_plan_for_gpus_of_unknown_memory_is_refused_as_nothing_could_be_checked(monkeypatch):
    monkeypatch.setattr("onefold.tier.accelerator.kind", lambda: None)
    for devices in ({"gpus": 8}, {"cluster": {"ranks": 8}}):
        with pytest.raises(ConfigError, match="nothing can be checked without the memory of a GPU"):
            onefold.plan("tiny", seq=16, **devices)


def test_what_was_not_checked_is_said_in_words():
    made = onefold.plan("tiny", gpus=8, mem="1GiB", seq=16, stage=3, offload="disk")
    text = " ".join(str(made).split())
    assert "if: it fits if each node has so much free host memory and free disk" in text
    assert made.rows[0].unchecked.keys() == {"host", "disk"}
    whole = onefold.plan(
        "tiny", gpus=8, mem="1GiB", host_mem="1GiB", disk="1GiB", seq=16, stage=3, offload="disk"
    )  # fmt: skip
    assert "if each node" not in str(whole)
    assert whole.fits


def test_a_plan_in_a_list_or_a_debugger_is_one_line():
    text = repr(onefold.plan("tiny", seq=16))
    assert "\n" not in text
    assert len(text) < 200
    assert "tiny" in text
    assert "fits" in text
