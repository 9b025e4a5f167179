"""What cannot work is an error of Onefold on every rank, that says what, where, and what to do."""

from __future__ import annotations

import gc
import inspect
import re
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import onefold
from onefold import keywords
from onefold.config import precision_of
from tests.support.programs.blocks import Tower
from tests.support.ranks import every_rank, run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn
from tests.support.zoo import (
    WIDTH,
    Process,
    adamw,
    every_stage,
    law_1,
    rows,
    squared,
    whole,
)

sharded_stages = pytest.mark.parametrize("stage", [1, 3])


@contextmanager
def refused(kind: type[Exception], *words: str):
    """The block raises exactly this kind of error, whose message holds the words and a hint."""
    assert issubclass(kind, onefold.OnefoldError)
    with pytest.raises(onefold.OnefoldError) as caught:
        yield caught
    assert isinstance(caught.value, kind), repr(caught.value)
    message = str(caught.value)
    for word in (*words, "expected ", "got ", "\nhint: "):
        assert word in message, f"{word!r} is not in: {message}"
    assert not message.split("\nhint: ")[1].startswith("\n")


def trains(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """A step runs: what was refused has left nothing behind."""
    optimizer = optimizer or adamw(module)
    squared(module)(rows()[0]).backward()
    before = [whole(p.detach()).clone() for p in module.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    after = [whole(p.detach()).clone() for p in module.parameters()]
    assert any(not torch.equal(a, b) for a, b in zip(after, before, strict=True))


# choices


MEANINGLESS = {
    "stage": [4, -1, "3", 2.0, None, True, "z3", [3]],
    "precision": ["bf17", "float32", 16, torch.int8, {"compute": "bf16"}],
    "optimizer": ["adamw", 3, torch.optim.AdamW, [1, 2]],
    "mesh": ["world", 2, [0, 1]],
    "units": ["blocks", 3],
}


@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("argument", MEANINGLESS)
@every_rank()
def test_an_argument_that_means_nothing_is_refused(rank, world_size, argument):
    module = Tower()
    for value in MEANINGLESS[argument]:
        words = [repr(value)] if argument in ("stage", "precision") else []
        with refused(onefold.ConfigError, argument, *words):
            if argument == "optimizer":
                onefold.shard(module, value)
            else:
                onefold.shard(module, **{argument: value})
    onefold.shard(module, stage=3)
    trains(module)


@pytest.mark.parametrize(
    ("word", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_a_dtype_of_torch_means_what_its_word_means(word, dtype):
    assert precision_of(dtype) == precision_of(word)
    trains(onefold.shard(seeded(Tower), precision=dtype))


def test_a_misspelt_precision_is_answered_with_the_right_one():
    with refused(onefold.ConfigError, "'bf61'", "did you mean 'bf16'?"):
        onefold.shard(Tower(), precision="bf61")


@pytest.mark.parametrize("choice", ["gpu", "cuda"], ids=["short", "long"])
def test_the_device_is_no_offload_and_not_taken_for_the_cpu(choice):
    with refused(onefold.ConfigError, repr(choice), "None keeps all state on the device"):
        onefold.shard(Tower(), offload=choice)


@pytest.mark.parametrize("field", ["compute", "master", "reduce", "buffers"])
def test_a_precision_of_something_that_is_no_float_dtype_is_refused(field):
    for dtype in ("bf16", torch.int8, 16):
        with refused(onefold.ConfigError, field, repr(dtype)):
            onefold.Precision(**{field: dtype})


@every_rank(2)
def test_an_unknown_keyword_is_refused_by_name(rank):
    with refused(onefold.ConfigError, "stagee=", "did you mean 'stage'?"):
        onefold.shard(Tower(), stagee=3)
    with refused(onefold.ConfigError, "ofload=", "did you mean 'offload'?") as caught:
        onefold.stream(Tower(), ofload="cpu")
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    ("keyword", "value", "instead"),
    [
        ("level", 3, "stage=3"),
        ("zero_stage", 2, "stage=2"),
        ("sharding_strategy", "FULL_SHARD", "stage=3"),
        ("reshard_after_forward", True, "stage=3"),
        ("mixed_precision", "bf16", "precision="),
        ("cpu_offload", True, 'offload="cpu"'),
        ("process_group", None, "mesh="),
        ("auto_wrap_policy", None, "units="),
        ("gradient_accumulation_steps", 4, "onefold.accumulate"),
        ("nothing_of_the_kind", 1, "leave nothing_of_the_kind= out"),
    ],
)
def test_a_keyword_of_another_library_is_answered_with_the_one_that_stands_for_it(
    keyword, value, instead
):
    module = Tower()
    with refused(onefold.ConfigError, f"{keyword}=") as caught:
        onefold.shard(module, **{keyword: value})
    assert instead in str(caught.value).partition("hint:")[2]
    onefold.shard(module)  # untouched by the refusal


def test_hints_for_keywords_of_other_libraries_name_arguments_that_shard_has():
    known = set(inspect.signature(onefold.shard).parameters)
    for names, hint in keywords.SHARD.items():
        named = set(re.findall(r"\b(\w+)=", hint)) - set(names.split())
        assert named <= known, names
        assert not set(names.split()) & known, names


def test_a_signature_is_shown_and_its_own_errors_pass_as_they_are():
    assert list(inspect.signature(onefold.shard).parameters)[:3] == ["module", "optimizer", "stage"]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'module'"):
        onefold.shard()

    @keywords.names_keywords({})
    def fails(values):
        return sorted(values, no_such_keyword=1)

    with pytest.raises(TypeError, match="no_such_keyword") as caught:
        fails(values=[1])
    assert not isinstance(caught.value, onefold.OnefoldError)


@pytest.mark.parametrize("thing", [None, "model", [nn.Linear(2, 2)], torch.ones(2)])
@every_rank(2)
def test_something_that_is_no_module_is_refused(rank, thing):
    with refused(onefold.ConfigError, "Module", type(thing).__name__):
        onefold.shard(thing)


@every_rank(2)
def test_units_that_are_not_of_the_module_are_refused(rank):
    module = Tower()
    with refused(onefold.ConfigError, "units", "Linear"):
        onefold.shard(module, units=[module.blocks[0], nn.Linear(2, 2)])
    onefold.shard(module)
    trains(module)


# optimizers


@worlds_in_turn
@every_stage
@pytest.mark.parametrize("world_size", [1, 3])
@every_rank()
def test_an_optimizer_of_another_module_is_refused(rank, world_size, stage):
    module, other = Tower(), Tower()
    with refused(onefold.ConfigError, "AdamW", "parameters"):
        onefold.shard(module, adamw(other), stage=stage)
    trains(module)
    trains(other)


@every_stage
@every_rank(2)
def test_an_optimizer_of_this_and_an_unsharded_module_steps_both(rank, stage):
    """Not all of an optimizer's parameters need to be sharded."""
    module, other = seeded(Tower), seeded(lambda: nn.Linear(3, 1))
    both = torch.optim.AdamW([*module.parameters(), *other.parameters()])
    onefold.shard(module, both, stage=stage)
    before = [p.detach().clone() for p in other.parameters()]
    other(module(rows()[0])).square().mean().backward()
    both.step()
    assert all(not torch.equal(p, b) for p, b in zip(other.parameters(), before, strict=True))


@again_but("1-RMSprop", "2-Adafactor", "3-Adagrad")
@worlds_in_turn
@pytest.mark.parametrize(
    "optimizer",
    [
        adamw,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
        lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, centered=True, eps=1e-4),
        lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01),
    ],
    ids=["AdamW", "SGD", "Adagrad", "RMSprop", "Adafactor"],
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_optimizer_that_has_stepped_goes_on_as_if_never_stopped(world_size, optimizer):
    def script(process: Process) -> None:
        module = seeded(Tower)
        made = optimizer(module)
        for batch in rows(2):  # alike on every rank, and in one process
            squared(module)(batch).backward()
            made.step()
            made.zero_grad()
        if not process.is_plain:
            onefold.shard(module, made, stage=process.stage, **process.options)
        for index, batch in enumerate(rows(3, seed=4)):
            process.step(index, module, made, squared(module), batch)
        process.note_weights(module)

    law_1(world_size, script, relative=3e-6)


@sharded_stages
@every_rank(1)
def test_states_that_a_constructor_made_on_meta_are_refused(rank, stage):
    """torch's Adagrad fills its sums while it is built: on `meta` the number is lost."""

    def build():
        torch.manual_seed(3)
        return Tower()

    def adagrad(module):
        return torch.optim.Adagrad(module.parameters(), lr=0.1, initial_accumulator_value=0.2)

    with torch.device("meta"):
        module = build()
    early = adagrad(module)
    with refused(onefold.ConfigError, "'sum'", "'first.weight'", "Adagrad", "after onefold"):
        onefold.shard(module, early, stage=stage)
    torch.manual_seed(3)
    onefold.shard(module, stage=stage)
    plain = build()
    for one in (module, plain):
        optimizer = adagrad(one)
        for batch in rows(2):
            squared(one)(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    with onefold.unsharded(module):
        for got, wanted in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-7)  # sums of 0: 0.05 off


@sharded_stages
@every_rank(2)
def test_an_optimizer_whose_state_cannot_be_cut_is_refused(rank, stage):
    module = seeded(Tower)
    optimizer = torch.optim.AdamW(module.parameters())
    trains(module, optimizer)
    for entry in optimizer.state.values():
        entry["exp_avg"] = torch.ones(2, 3, 5)
    with refused(onefold.ConfigError, "'first.weight'", "exp_avg"):
        onefold.shard(module, optimizer, stage=stage)
        trains(module, optimizer)


@every_rank(2)
def test_state_that_cannot_be_cut_is_refused_before_anything_is_changed(rank):
    module = seeded(Tower)
    optimizer = torch.optim.AdamW(module.parameters())
    trains(module, optimizer)
    first = next(iter(optimizer.state.values()))
    kept, first["exp_avg"] = first["exp_avg"], torch.ones(2, 3, 5)
    with refused(onefold.ConfigError, "'first.weight'", "exp_avg"):
        onefold.shard(module, optimizer, stage=3)
    first["exp_avg"] = kept
    trains(module, optimizer)
    onefold.shard(module, optimizer, stage=3)
    trains(module, optimizer)


@sharded_stages
@every_rank(2)
def test_an_optimizer_that_searches_over_all_parameters_at_once_is_refused(rank, stage):
    module = Tower()
    with refused(onefold.ConfigError, "LBFGS"):
        onefold.shard(module, torch.optim.LBFGS(module.parameters()), stage=stage)
    trains(module)


@every_stage
@every_rank(2)
def test_an_optimizer_built_on_the_parameters_before_but_not_given_is_an_error(rank, stage):
    """It would step tensors that no module has any more."""
    module = Tower()
    forgotten = adamw(module)
    onefold.shard(module, stage=stage)
    if stage == 0:  # the parameters are the same objects
        trains(module, forgotten)
        return
    squared(module)(rows()[0]).backward()
    with refused(onefold.StateError, "'first.weight'"):
        forgotten.step()


# modules that are sharded already, or shared


@worlds_in_turn
@every_stage
@pytest.mark.parametrize("world_size", [1, 3])
@every_rank()
def test_a_second_shard_is_refused(rank, world_size, stage):
    module = Tower()
    optimizer = adamw(module)
    onefold.shard(module, optimizer, stage=stage)
    with refused(onefold.ConfigError, "Tower", "already"):
        onefold.shard(module, optimizer, stage=stage)
    trains(module, optimizer)


@worlds_in_turn
@every_stage
@pytest.mark.parametrize("world_size", [1, 2])
@every_rank()
def test_a_part_of_a_sharded_module_is_refused(rank, world_size, stage):
    module = Tower()
    onefold.shard(module, stage=stage)
    for part in (module.blocks[0], module.blocks, module.last):
        with refused(onefold.ConfigError, "sharded"):
            onefold.shard(part, stage=stage)
    trains(module)


@worlds_in_turn
@every_stage
@pytest.mark.parametrize("world_size", [1, 2])
@every_rank()
def test_a_module_around_a_sharded_one_is_refused(rank, world_size, stage):
    inner = Tower()
    onefold.shard(inner, stage=stage)
    with refused(onefold.ConfigError, "sharded"):
        onefold.shard(nn.Sequential(inner, nn.Linear(3, 3)), stage=stage)
    trains(inner)


@worlds_in_turn
@every_stage
@pytest.mark.parametrize("world_size", [1, 2])
@every_rank()
def test_parameters_shared_with_another_sharded_module_are_refused(rank, world_size, stage):
    one, two = seeded(Tower), seeded(Tower)
    two.blocks[1].up = one.blocks[1].up
    onefold.shard(one, stage=stage)
    with refused(onefold.ConfigError, "'blocks.1.up.weight'"):
        onefold.shard(two, stage=stage)
    trains(one)


@every_stage
@every_rank(2)
def test_a_parameter_object_shared_before_either_was_sharded_is_refused(rank, stage):
    one, two = seeded(Tower), seeded(Tower)
    two.last.weight = one.last.weight
    onefold.shard(one, stage=stage)
    with refused(onefold.OnefoldError, "'last.weight'"):
        onefold.shard(two, stage=stage)
    trains(one)


@pytest.mark.parametrize("stage", [0, 3])
@every_rank(2)
def test_a_module_is_free_again_when_the_sharded_one_is_gone(rank, stage):
    module = Tower()
    onefold.shard(module, stage=stage)
    state = {name: whole(value).clone() for name, value in module.state_dict().items()}
    del module
    gc.collect()
    again = Tower()
    again.load_state_dict(state)
    onefold.shard(again, stage=stage)
    trains(again)


# meshes


@every_rank(3)
def test_a_mesh_without_this_rank_is_refused_on_that_rank(rank):
    group = dist.new_group([0, 1])
    module = Tower()
    if rank == 2:
        with refused(onefold.ConfigError, "rank 2"):
            onefold.shard(module, mesh=group)
        trains(module)
    else:
        onefold.shard(module, mesh=group)
        trains(module)


@every_rank(4)
def test_a_mesh_of_three_axes_is_refused_with_a_way_out(rank):
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("outer", "inner", "tensor"))
    module = Tower()
    with refused(onefold.ConfigError, "(2, 2, 1)"):
        onefold.shard(module, mesh=mesh)
    onefold.shard(module, mesh=mesh["inner"])
    trains(module)


@every_rank(4)
def test_a_mesh_whose_ranks_do_not_ascend_is_refused(rank):
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]])
    with refused(onefold.ConfigError, "ascend"):
        onefold.shard(Tower(), mesh=mesh)


@every_rank(2)
def test_parameters_on_several_devices_are_refused(rank):
    module = Tower()
    module.last = nn.Linear(WIDTH, 3, device="meta")
    module.half_meta = nn.Linear(2, 2)
    onefold.shard(module)  # meta is no device: it is given the others'
    trains(module)


@every_rank(2)
def test_a_parameter_without_a_shape_yet_is_refused_by_name(rank):
    module = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
    with refused(onefold.ConfigError, "'0.weight'"):
        onefold.shard(module)


@every_rank(2)
def test_a_parameter_that_is_sharded_by_another_library_is_refused_by_name(rank):
    module = Tower()
    mesh = init_device_mesh("cpu", (2,))
    whole_weight = module.last.weight.detach()
    module.last.weight = nn.Parameter(distribute_tensor(whole_weight, mesh, [Shard(0)]))
    with refused(onefold.ConfigError, "'last.weight'"):
        onefold.shard(module)


# ranks that disagree


def _wider(rank: int) -> nn.Module:
    module = Tower()
    module.last = nn.Linear(WIDTH, 3 + rank)
    return module


def _longer(rank: int) -> nn.Module:
    return Tower(2 + rank)


def _frozen(rank: int) -> nn.Module:
    module = Tower()
    module.last.bias.requires_grad_(rank == 0)
    return module


def _cast(rank: int) -> nn.Module:
    return Tower().to((torch.float32, torch.bfloat16, torch.float64)[rank])


def _renamed(rank: int) -> nn.Module:
    module = Tower()
    setattr(module, f"extra_{rank}", nn.Linear(2, 2))
    return module


@worlds_in_turn
@pytest.mark.parametrize("build", [_wider, _longer, _frozen, _cast, _renamed])
@pytest.mark.parametrize("world_size", [2, 3])
@every_rank()
def test_ranks_that_shard_different_modules_are_all_refused(rank, world_size, build):
    module = build(rank)
    with refused(onefold.ConfigError, f"rank {rank}"):
        onefold.shard(module)


@every_rank(2)
def test_ranks_that_choose_different_stages_precisions_or_units_are_all_refused(rank):
    choices: list[dict[str, Any]] = [
        {"stage": rank},
        {"precision": "bf16" if rank else None},
        {"units": [] if rank else None},
    ]
    for choice in choices:
        with refused(onefold.ConfigError, f"rank {rank}"):
            onefold.shard(Tower(), **choice)


@every_rank(2)
def test_ranks_of_which_one_has_a_bad_choice_are_all_refused(rank):
    """The others would otherwise wait for it."""
    module = Tower()
    optimizer = adamw(Tower() if rank == 1 else module)
    with refused(onefold.OnefoldError):
        onefold.shard(module, optimizer)


# changes after sharding


def _run(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    squared(module)(rows()[0].to(next(module.parameters()).dtype)).backward()
    optimizer.step()


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "double": lambda m: m.double(),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "to dtype": lambda m: m.to(torch.float64),
    "to meta": lambda m: m.to("meta"),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "part to dtype": lambda m: m.blocks[0].up.double(),
    "parameter replaced": lambda m: setattr(
        m.blocks[0].up, "weight", nn.Parameter(torch.ones(7, WIDTH))
    ),
    "parameter resized": lambda m: setattr(
        m.blocks[0].up, "weight", nn.Parameter(torch.ones(9, WIDTH))
    ),
    "parameter removed": lambda m: delattr(m.blocks[0].up, "weight"),
    "parameter set to None": lambda m: setattr(m.blocks[0].up, "bias", None),
    "parameter data replaced": lambda m: setattr(
        m.blocks[0].up.weight, "data", torch.ones(7, WIDTH)
    ),
    "parameter data resized": lambda m: setattr(
        m.blocks[0].up.weight, "data", torch.ones(9, WIDTH)
    ),
    "parameter added": lambda m: m.register_parameter("extra", nn.Parameter(torch.ones(3))),
    "module replaced": lambda m: setattr(m.blocks[0], "up", nn.Linear(WIDTH, 7)),
    "module added": lambda m: m.blocks.append(nn.Linear(WIDTH, WIDTH)),
    "tied afterwards": lambda m: setattr(m.blocks[0].up, "weight", m.blocks[1].up.weight),
}


@worlds_in_turn
@every_stage
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("world_size", [1, 2])
@every_rank()
def test_a_module_changed_after_sharding_is_an_error_that_names_what_changed(
    rank, world_size, stage, change
):
    """At the change, or at the next use; never a run with stale or partial weights."""
    named = {"parameter added": "'extra'", "module added": "'blocks.2.weight'"}.get(change)
    named = named or ("" if change in ("double", "half", "bfloat16", "to dtype", "to meta",
                                       "to_empty") else "'blocks.0.up.")  # fmt: skip
    module = seeded(Tower)
    optimizer = adamw(module)
    onefold.shard(module, optimizer, stage=stage)
    with refused(onefold.StateError, f"rank {rank}", named):
        CHANGES[change](module)
        _run(module, optimizer)


@every_stage
@every_rank(2)
def test_moving_a_module_to_where_it_is_changes_nothing(rank, stage):
    module = seeded(Tower)
    optimizer = adamw(module)
    onefold.shard(module, optimizer, stage=stage)
    assert module.to("cpu") is module
    assert module.float() is module
    assert module.cpu() is module
    trains(module, optimizer)


@every_stage
@every_rank(2)
def test_a_parameter_added_to_a_layer_after_sharding_is_an_error(rank, stage):
    """As an adapter library would add one; it must not train unreduced on every rank."""
    module = seeded(Tower)
    onefold.shard(module, adamw(module), stage=stage)
    module.blocks[1].up.scale = nn.Parameter(torch.ones(()))
    with refused(onefold.StateError, "'blocks.1.up.scale'", f"rank {rank}"):
        squared(module)(rows()[0])


# state dicts


def _missing(state: dict[str, Tensor]) -> None:
    del state["blocks.1.up.weight"]


def _unexpected(state: dict[str, Tensor]) -> None:
    state["blocks.9.up.weight"] = torch.ones(2)


def _misshapen(state: dict[str, Tensor]) -> None:
    state["blocks.1.up.weight"] = torch.ones(7, WIDTH + 1)


def _flat(state: dict[str, Tensor]) -> None:
    state["blocks.1.up.weight"] = torch.ones(7 * WIDTH)


def _transposed(state: dict[str, Tensor]) -> None:
    state["blocks.1.up.weight"] = torch.ones(WIDTH, 7)


def _local(state: dict[str, Tensor]) -> None:
    """A rank's own rows of it: what would be loaded if shards were saved one by one."""
    state["blocks.1.up.weight"] = torch.ones(4, WIDTH)


@worlds_in_turn
@every_stage
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("damage", [_missing, _unexpected, _misshapen, _flat, _transposed, _local])
@every_rank()
def test_a_state_dict_with_wrong_names_or_shapes_is_refused(rank, world_size, stage, damage):
    state = seeded(Tower, seed=5).state_dict()
    damage(state)
    name = "blocks.9.up.weight" if damage is _unexpected else "blocks.1.up.weight"
    module = seeded(Tower)
    optimizer = adamw(module)
    onefold.shard(module, optimizer, stage=stage)
    with refused(onefold.StateError, name):
        module.load_state_dict(state)
    trains(module, optimizer)


@every_stage
@every_rank(2)
def test_a_wrong_shape_is_refused_also_when_not_strict(rank, stage):
    state = seeded(Tower, seed=5).state_dict()
    _misshapen(state)
    module = seeded(Tower)
    onefold.shard(module, stage=stage)
    with refused(onefold.StateError, "'blocks.1.up.weight'", f"rank {rank}"):
        module.load_state_dict(state, strict=False)


@worlds_in_turn
@every_stage
@pytest.mark.parametrize("world_size", [1, 2])
@every_rank()
def test_loading_by_assignment_is_refused(rank, world_size, stage):
    module = seeded(Tower)
    optimizer = adamw(module)
    onefold.shard(module, optimizer, stage=stage)
    with refused(onefold.StateError, "assign"):
        module.load_state_dict(seeded(Tower, seed=5).state_dict(), assign=True)
    with refused(onefold.StateError):
        module.blocks[0].load_state_dict(seeded(Tower).blocks[0].state_dict(), assign=True)
        trains(module, optimizer)
    module.load_state_dict({}, strict=False, assign=True)  # nothing of a shard


# calls at the wrong time or place


@pytest.mark.parametrize("world_size", [1, 2])
@every_rank()
def test_calls_about_a_module_that_is_not_sharded_are_errors(rank, world_size):
    module = Tower()
    with refused(onefold.StateError, "Tower"), onefold.accumulate(module):
        pass
    with refused(onefold.StateError, "Tower"), onefold.unsharded(module):
        pass
    with refused(onefold.StateError, "Tower"):
        onefold.report(module)
    onefold.shard(module)
    with refused(onefold.StateError, "Residual"), onefold.unsharded(module.blocks[0]):
        pass
    with refused(onefold.StateError, "Linear"):
        onefold.report(module.last)
    trains(module)


@pytest.mark.parametrize("thing", [None, "model", 3])
def test_calls_about_something_that_is_no_module_are_errors(thing):
    with refused(onefold.StateError, type(thing).__name__):
        onefold.report(thing)


@every_rank(2)
def test_a_tensor_hook_registered_before_sharding_is_refused(rank):
    module = Tower()
    handle = module.first.weight.register_hook(lambda grad: grad)
    with refused(onefold.ConfigError, "'first.weight'"):
        onefold.shard(module)
    handle.remove()
    onefold.shard(module)
    trains(module)


@every_stage
@every_rank(2)
def test_a_step_in_the_middle_of_unsharded_is_an_error(rank, stage):
    """The optimizer would step shards while the module shows copies of them."""
    module = seeded(Tower)
    optimizer = adamw(module)
    onefold.shard(module, optimizer, stage=stage)
    squared(module)(rows()[0]).backward()
    with onefold.unsharded(module), refused(onefold.StateError, f"rank {rank}"):
        optimizer.step()
    optimizer.step()
    optimizer.zero_grad()
    trains(module, optimizer)


@every_stage
@every_rank(2)
def test_parameters_with_gradients_before_sharding_lose_them_or_are_refused(rank, stage):
    """Gradients made before are not means over ranks."""
    module = seeded(Tower)
    optimizer = adamw(module)
    squared(module)(rows()[0] * (rank + 1)).backward()
    try:
        onefold.shard(module, optimizer, stage=stage)
    except onefold.ConfigError:
        return
    assert all(p.grad is None for p in module.parameters())
    trains(module, optimizer)


def test_a_process_group_that_is_gone_does_not_leave_modules_behind():
    """A module sharded in one world is not usable in the next, and says nothing false."""
    kept: list[nn.Module] = []

    def body(rank: int) -> None:
        module = seeded(Tower)
        onefold.shard(module)
        if rank == 0:
            kept.append(module)

    run_ranks(2, body)
    assert [tuple(p.shape) for p in kept[0].parameters()] == [
        tuple(p.shape) for p in seeded(Tower).parameters()
    ]


@pytest.mark.parametrize("builder", [partial(nn.Embedding, 20, WIDTH, sparse=True)])
def test_sparse_gradients_are_averaged_as_dense_ones_are(builder):
    def body(rank: int) -> Tensor:
        module = nn.Sequential(seeded(builder))
        onefold.shard(module, stage=3)
        module(torch.tensor([rank, 3])).sum().backward()
        grad = module[0].weight.grad
        return whole(grad.to_dense() if grad.layout is not torch.strided else grad)

    wanted = torch.zeros(20, WIDTH)
    wanted[0] = wanted[1] = 0.5
    wanted[3] = 1.0
    for grad in run_ranks(2, body):
        assert torch.equal(grad, wanted)
