"""Laws of forms: an object's class says what may be read, and whose bytes it shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold import Precision
from onefold.engine.registry import engine_of
from onefold.errors import StateError
from onefold.unit.forms import Form
from onefold.unit.unit import Unit
from tests.support.ranks import run_ranks

MASTER = {"precision": Precision(master=torch.float64)}
CASES: dict[str, tuple[int, dict[str, Any], Form | None, Form | None]] = {
    "one process": (1, {"stage": 0}, None, None),
    "one process, master": (1, {"stage": 0, **MASTER}, Form.WATCHED, Form.WATCHED),
    "one process, cast": (1, {"stage": 0, "precision": "bf16"}, Form.REPLICATED, Form.UNSHARDED),
    "copies": (3, {"stage": 0, "precision": "bf16"}, Form.REPLICATED, Form.UNSHARDED),
    "shards": (3, {"stage": 3}, Form.SHARDED, Form.UNSHARDED),
    "quantized": (3, {"precision": Precision(frozen="int8")}, Form.SHARDED, Form.UNSHARDED),
}


def form_of(parameter: Tensor) -> Form | None:
    """The form whose class the object has; None for one that users gave it."""
    return next((form for form in Form if form.kind is type(parameter)), None)


def shows(parameter: Tensor, flat: Tensor) -> bool:
    """True if the object's memory is that of `flat`."""
    with torch._C.DisableTorchFunctionSubclass():
        local = getattr(parameter, "_local_tensor", parameter)
        return local.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def check(parameter: Tensor, form: Form | None, unit: Unit) -> None:
    assert form_of(parameter) is form
    if form is None or form.is_readable:
        assert torch.isfinite(parameter.sum())
    else:
        with pytest.raises(StateError):
            parameter.sum()
    if form is None or form.has_bytes:
        assert shows(parameter, unit.weight.tensor)


@pytest.mark.parametrize("case", CASES)
def test_each_object_of_a_parameter_takes_the_form_that_its_recipe_needs(case):
    world_size, options, at_rest, in_use = CASES[case]

    def walk(rank: int) -> None:
        module = nn.Linear(8, 6, bias=False)
        if case == "quantized":
            module.weight.requires_grad_(requires_grad=False)
        onefold.shard(module, **options)
        (unit,) = engine_of(module).units
        (parameter,) = unit.parameters
        stale = in_use if parameter.unsharded is parameter.sharded else Form.STALE
        check(parameter.unsharded, stale, unit)
        check(parameter.sharded, at_rest, unit)  # a read that a graph records may gather
        with torch.no_grad():
            unit.reshard(release=True)
            unit.unshard()
            assert module.weight is parameter.unsharded
            check(parameter.unsharded, in_use, unit)
            unit.reshard(release=True)
        assert module.weight is parameter.sharded
        check(parameter.unsharded, stale, unit)

    run_ranks(world_size, walk)


def test_an_object_that_onefold_replaced_is_stale():
    def replace(rank: int) -> None:
        module = nn.Linear(8, 6)
        before = module.weight
        onefold.shard(module, stage=3)
        assert form_of(before) is Form.STALE
        with torch._C.DisableTorchFunctionSubclass():
            assert not before.untyped_storage().nbytes()
        with pytest.raises(StateError, match="replaced"):
            before.sum()

    run_ranks(2, replace)


def test_no_two_forms_have_one_class_and_what_is_stale_has_neither_values_nor_bytes():
    assert len({form.kind for form in Form}) == len(Form)
    assert {form for form in Form if not form.is_readable} == {Form.STALE, Form.STALE_AXES}
    assert not any(form.has_bytes for form in Form if not form.is_readable)
