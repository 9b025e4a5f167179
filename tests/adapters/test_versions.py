"""Versions of other libraries: the tested ranges, and the names that Onefold relies on."""

from __future__ import annotations

import inspect
import re
import tomllib
import warnings
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import onefold
from onefold import compat, versions
from onefold.app.tools import machine
from onefold.errors import ConfigError


@pytest.mark.parametrize("package", versions.TESTED)
def test_the_installed_version_is_a_tested_one(package):
    pytest.importorskip(package)
    assert versions.outside(package, version(package)) == ""


def test_the_package_asks_for_the_range_of_torch_that_is_tested():
    floor, above = versions.TESTED["torch"]
    project = Path(__file__).parents[2] / "pyproject.toml"
    asked = tomllib.loads(project.read_text())["project"]["dependencies"]
    assert f"torch>={floor},<{above}" in asked


@pytest.mark.parametrize(
    ("found", "is_tested"),
    [
        ("1.14.9", False), ("1.15", True), ("1.15.0", True), ("1.15.3.dev0", True),
        ("1.16.0", False), ("1.16.0rc1", False), ("2.0", False), ("unknown", False),
    ],
)  # fmt: skip
def test_a_range_holds_its_floor_and_not_its_end(found, is_tested):
    assert (versions.outside("accelerate", found) == "") is is_tested


def test_an_untested_version_is_warned_about_once(monkeypatch):
    monkeypatch.setattr(versions, "version", lambda package: "0.1")
    versions._warn_once.cache_clear()

    def adopt() -> None:  # a public function, in whose caller the warning appears
        for _ in range(2):
            versions.warn_if_untested("trl")

    with pytest.warns(UserWarning, match=r"trl from 1\.16 .* 0\.1 is\s+installed") as told:
        adopt()
    assert len(told) == 1
    assert told[0].filename == __file__
    versions._warn_once.cache_clear()


def test_a_package_that_is_not_installed_is_passed_over(monkeypatch):
    monkeypatch.setitem(versions.TESTED, "no-such-package", ("1", "2"))
    versions._warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn_if_untested("no-such-package")


@pytest.mark.parametrize(
    ("found", "got"),
    [("2.10.1", "refused"), ("2.11.0+cu130", ""), ("2.15.0", ""), ("2.16.0", "warned")],
)
def test_an_old_torch_is_refused_by_name_and_a_new_one_warned_of(monkeypatch, found, got):
    monkeypatch.setattr(versions, "version", lambda package: found)
    versions.check_torch.cache_clear()
    versions._warn_once.cache_clear()
    if got == "refused":
        with pytest.raises(ConfigError, match=r"expected torch 2\.11 or newer, got torch 2\.10\.1"):
            _ = onefold.shard
    elif got == "warned":
        with pytest.warns(UserWarning, match=r"tested with torch from 2\.11 up to"):
            _ = onefold.shard
    else:
        _ = onefold.shard
    versions.check_torch.cache_clear()
    versions._warn_once.cache_clear()


# names that differ between the tested versions of torch


def package(group: tuple[str, ...], distributed: tuple[str, ...], storage: tuple[str, ...]) -> Any:
    """A torch that has these names."""

    def owner(kind: str, names: tuple[str, ...], **more: object) -> Any:
        return type(kind, (), {**dict.fromkeys(names, id), **more})

    named = owner("distributed", distributed, ProcessGroup=owner("ProcessGroup", group))
    return owner("torch", (), distributed=named, UntypedStorage=owner("UntypedStorage", storage))


OLD = ("_allgather_base", "alltoall_base"), ("reduce_scatter_tensor",)
NEW = ("all_gather_single", "all_to_all_single"), ("reduce_scatter_single",)
ANY = tuple(old + new for old, new in zip(OLD, NEW, strict=True))  # torch 2.13 and 2.14
SWAP = ("_swap_data_ptr_",)


@pytest.mark.parametrize(
    ("names", "chosen"),
    [((*OLD, ()), OLD), ((*OLD, SWAP), OLD), ((*ANY, SWAP), NEW), ((*NEW, SWAP), NEW)],
)
def test_a_name_is_chosen_that_this_torch_has(names, chosen):
    found = compat.Names.from_package(package(*names))
    assert ((found.all_gather, found.all_to_all), (found.reduce_scatter,)) == chosen
    assert found.swap == "".join(names[2])


def test_the_installed_torch_has_every_chosen_name():
    group, names = torch.distributed.ProcessGroup, compat.NAMES
    for owner, name in ((group, names.all_gather), (group, names.all_to_all),
                        (torch.distributed, names.reduce_scatter)):  # fmt: skip
        assert callable(getattr(owner, name))
    assert not names.swap or callable(getattr(torch.UntypedStorage, names.swap))


def test_a_torch_without_any_of_the_names_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"ProcessGroup of torch to have all_to_all_single or "):
        compat.Names.from_package(package(("all_gather_single",), *OLD[1:], ()))


@pytest.mark.parametrize(("swap", "lines"), [("_swap_data_ptr_", 0), ("", 1)])
def test_the_doctor_says_what_this_torch_lacks(monkeypatch, swap, lines):
    monkeypatch.setattr(compat, "NAMES", replace(compat.NAMES, swap=swap))
    found = [check for check in machine._limits() if check.name == "limits of this torch"]
    assert [(check.level, "Adagrad" in check.value) for check in found] == [("warn", True)] * lines


DETACH, DETACH_IN_PLACE = torch.ops.aten.detach.default, torch.ops.aten.detach_.default


@pytest.mark.parametrize(
    ("rules", "added"),
    [
        ({DETACH: "torch's"}, {DETACH: "torch's", DETACH_IN_PLACE: "torch's"}),  # torch 2.11
        ({DETACH: "torch's", DETACH_IN_PLACE: "its own"},) * 2,  # torch 2.13
        ({}, {}),  # torch 2.15
    ],
)
def test_a_rule_is_added_only_where_torch_has_the_one_of_detach_alone(monkeypatch, rules, added):
    propagator = DTensor._op_dispatcher.sharding_propagator
    monkeypatch.setattr(propagator, "op_strategy_funcs", dict(rules))
    compat.add_missing_rules()
    assert propagator.op_strategy_funcs == added


def test_a_launcher_gets_only_the_fields_that_it_takes():
    fields = {"run_id": "onefold", "shutdown_timeout": 5}
    assert compat.known_fields(lambda run_id, shutdown_timeout: None, **fields) == fields
    assert compat.known_fields(lambda run_id: None, **fields) == {"run_id": "onefold"}


# names of other libraries that are no public interface


def source(path: str) -> str:
    """The source of a class or function, by its dotted path."""
    module, _, name = path.rpartition(".")
    if module.rpartition(".")[2][:1].isupper():  # a method
        module, _, kind = module.rpartition(".")
        return inspect.getsource(getattr(getattr(import_module(module), kind), name))
    return inspect.getsource(getattr(import_module(module), name))


PRIVATE = [
    ("accelerate.Accelerator.prepare_model", r'getattr\(model, "_is_accelerate_prepared", False\)',
     "a module with this attribute is returned as it is: else adopted models get wrapped by DDP"),
    ("accelerate.Accelerator.no_sync", r'getattr\(model, "no_sync", context\)',
     "micro-batches that are not the last call the module's no_sync: else each one communicates"),
    ("accelerate.Accelerator.save_state", r"self\.get_state_dict\(model, unwrap=False\)",
     "unwrap=False tells save_state from a user's call: else each save gathers the weights"),
    ("accelerate.Accelerator.save_state", r"hook\(self\._models, weights, output_dir\)",
     "the hook sees models and weights in one order and may remove weights: else they are written"),
    ("accelerate.Accelerator.load_state", r"hook\(models, input_dir\)",
     "the hook may remove models: else Accelerate looks for their files"),
    ("accelerate.Accelerator.save_model", r"self\.get_state_dict\(model\)",
     "save_model writes the tensors of get_state_dict: else it writes shards"),
    ("accelerate.checkpointing.save_accelerator_state", r"state = opt\.state_dict\(\)",
     "state_dict() is called once for each save: else the optimizers' states are written twice"),
    ("accelerate.Accelerator.prepare_optimizer", r"scaler=scaler",
     "an optimizer gets the scaler of the accelerator: else fp16 steps on some ranks alone"),
    ("transformers.distributed.fsdp.is_fsdp_managed_module", r'"_is_fsdp_managed_module", False',
     "generate runs on for other ranks where a model has this attribute: else they hang"),
    ("trl.GRPOTrainer.__init__", r"self\._dist = DistributedBackend\(self\.accelerator\)",
     "adopt_trainer replaces this object: else generation gathers every layer for every token"),
    ("trl.RLOOTrainer.__init__", r"self\._dist = DistributedBackend\(self\.accelerator\)",
     "as for GRPOTrainer"),
    ("trl.generation.vllm_generation.VLLMGeneration.__init__", r"self\._dist = Distributed",
     "adopt_trainer replaces this object: else an inference server gets shards"),
    ("trl.generation.vllm_generation.VLLMGeneration._iter_named_params",
     r"with self\._dist\.gather_params\(\[param\]\):\s+yield name, param\.data",
     ".data is read inside gather_params([param]): else an inference server gets shards"),
    ("trl.generation.vllm_generation.VLLMGeneration._iter_named_params",
     r"with self\._dist\.gather_params\(list\(model\.parameters\(\)\)\):\s+model\.merge_adapter",
     "adapters are merged inside gather_params: else they are merged into shards"),
    ("trl.trainer.utils.add_fused_lm_head", r"weight = weight\.full_tensor\(\)",
     "the head of a sharded model is read by full_tensor(): else its loss fails"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "found", "why"), PRIVATE)
def test_a_private_name_is_as_it_was(path, found, why):
    package = path.partition(".")[0]
    pytest.importorskip(package)
    assert re.search(found, source(path)), (
        f"{path} of {package} {version(package)} has no {found!r} any more. Why it matters: {why}."
    )


def test_the_backend_answers_all_that_trl_asks():
    trl = pytest.importorskip("trl")
    from onefold.adapters.hf.wrap import ShardedBackend

    asked: set[str] = set()
    for path in Path(trl.__file__).parent.rglob("*.py"):
        asked |= set(re.findall(r"self\._dist\.(\w+)", path.read_text()))
    assert {"gather_params", "summon_full_params"} <= asked
    assert asked <= set(dir(ShardedBackend)), "TRL asks DistributedBackend for more than it did"
