"""Another engine that shards stops with an error that names where it was configured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from onefold import ConfigError
from onefold.adapters.hf import conflicts
from onefold.adapters.hf.conflicts import refuse_other_engines

SWITCHES = [variable for _, variable, _ in conflicts._ENGINES]
VARIABLES = (*SWITCHES, *conflicts._DETAILS)


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch, tmp_path):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(conflicts, "_default_file", lambda: None)


def refusal(*given) -> str:
    with pytest.raises(ConfigError) as raised:
        refuse_other_engines(*given)
    assert "hint: " in str(raised.value)
    return str(raised.value)


def test_without_another_engine_nothing_is_raised(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    refuse_other_engines()
    refuse_other_engines(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=None)))
    refuse_other_engines(None, SimpleNamespace(fsdp=None, deepspeed=None))


@pytest.mark.parametrize("variable", SWITCHES)
def test_the_variable_of_a_launcher_is_named(monkeypatch, variable):
    monkeypatch.setenv(variable, "true")
    assert f"the environment ({variable}=true)" in refusal()


def test_the_version_and_the_file_beside_a_switch_are_named(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert "FSDP as well" in refusal()
    assert "(ACCELERATE_USE_FSDP=true, FSDP_VERSION=2)" in refusal()
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "zero3.json")
    assert "ACCELERATE_DEEPSPEED_CONFIG_FILE=zero3.json" in refusal()


def test_the_default_file_of_a_launcher_is_named_if_it_has_the_engine(monkeypatch, tmp_path):
    file = tmp_path / "default_config.yaml"
    monkeypatch.setattr(conflicts, "_default_file", lambda: file)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    file.write_text("distributed_type: MULTI_CPU\n")
    assert str(file) not in refusal()
    file.write_text("debug: false\ndistributed_type: FSDP\n")
    assert str(file) in refusal()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"fsdp": True, "deepspeed": None}, "TrainingArguments(fsdp=True)"),
        ({"fsdp": "full_shard"}, "TrainingArguments(fsdp='full_shard')"),
        ({"deepspeed": "zero3.json"}, "TrainingArguments(deepspeed='zero3.json')"),
    ],
)
def test_the_argument_of_a_trainer_is_named(given, named):
    assert named in refusal(None, SimpleNamespace(**given))


def test_a_plugin_of_the_script_is_named():
    state = SimpleNamespace(fsdp_plugin=object())
    assert "Accelerator(fsdp_plugin=...)" in refusal(SimpleNamespace(state=state))
    assert "Accelerator(fsdp_plugin=...)" in refusal(state)
    state = SimpleNamespace(parallelism_config=SimpleNamespace(total_size=2))
    assert "a ParallelismConfig as well" in refusal(state)
    refuse_other_engines(SimpleNamespace(parallelism_config=SimpleNamespace(total_size=1)))
