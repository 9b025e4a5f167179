"""Rules: the update of one parameter group, applied to a block of flat state at a time.

The optimizer's class defines the update. `ClassRule` runs the class's own step on the block, as if
the block were a parameter. `BlockedAdam` has the same bits for Adam and AdamW, in fewer passes over
memory. Both keep the hyper-parameters of the moment at which they were made.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onefold.engine.blocked_adam import BlockedAdam, frozen
from onefold.errors import ConfigError
from onefold.unit.sharded_form import OURS

State = dict[str, Any]
Attributes = dict[str, Any]


def attributes_of(tensor: Tensor, names: Iterable[str]) -> Attributes:
    """Return those of some attributes that a user has put on a parameter."""
    own = vars(tensor)
    return {name: own[name] for name in names if name in own and name not in OURS}


def whole_matrices(fqn: str, cut: str, optimizer: Optimizer) -> ConfigError:
    """Return the error for an optimizer whose matrices are cut over model axes."""
    wanted = f"an elementwise optimizer, such as AdamW, for parameter {fqn!r}: {cut}"
    hint = "a rank of tensor parallel holds a part of each matrix"
    return ConfigError(wanted, f"{type(optimizer).__name__}, which steps whole matrices", hint=hint)


def unhooked_step(kind: type[Optimizer]) -> Any:
    """Return the class's `step` without the wrappers by which torch calls hooks."""
    step: Any = kind.step
    while getattr(step, "__wrapped__", None) is not None:
        step = step.__wrapped__
    return step


def wrapped_by(optimizer: Optimizer) -> str | None:
    """Return the attribute in which an optimizer keeps another one that steps its parameters."""
    kept = (name for name, value in vars(optimizer).items() if isinstance(value, Optimizer))
    return next(kept, None)


class ClassRule:
    """Runs the class's own `step`, in a copy of the optimizer that holds only the block."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        self._kind = type(optimizer)
        self._attributes: Attributes = {}  # of the parameters, that the class reads
        own = {k: v for k, v in optimizer.__dict__.items() if k not in ("state", "param_groups")}
        hooks = [name for name, value in own.items() if isinstance(value, OrderedDict)]
        self._own = {**own, **{name: OrderedDict() for name in hooks}}
        self._group = {k: frozen(v) for k, v in group.items() if k != "params"}
        if may_fuse(optimizer, group):
            self._group["fused"] = True
        self._step = unhooked_step(self._kind)
        is_torchs = self._kind.__module__.startswith("torch.optim.")
        on_device = self._group.get("fused") or self._group.get("capturable")
        self.takes_numbers_near = bool(on_device) or not is_torchs  # others read them on the host

    def with_attributes(self, attributes: Attributes) -> ClassRule:
        """Return the rule for parameters that have these attributes."""
        rule = copy(self)
        rule._attributes = attributes
        return rule

    def start(self, moments: dict[str, Tensor]) -> State:
        """Return the state before the first step: empty, as the class makes it in `step`."""
        return {}

    def step(self, stepped: Tensor, grad: Tensor, weight: Tensor, state: State) -> None:
        """Step `stepped` [numel] by `grad` in place; round it into `weight` if that is another.

        `state` is the class's, of one parameter. It is empty before the first step, which fills it.
        """
        parameter = nn.Parameter(stepped)
        vars(parameter).update(self._attributes)
        parameter.grad = grad.to(stepped.dtype)
        optimizer = object.__new__(self._kind)
        optimizer.__dict__.update(self._own)
        optimizer.param_groups = [{**self._group, "params": [parameter]}]
        optimizer.state = defaultdict(dict, {parameter: state} if state else {})
        self._step(optimizer)
        state.update(optimizer.state.get(parameter, {}))
        if weight is not stepped:
            weight.copy_(stepped)


Rule = BlockedAdam | ClassRule


def rule_of(optimizer: Optimizer, group: dict[str, Any]) -> Rule:
    """Return the rule of a group as it is now."""
    return BlockedAdam.if_alike(optimizer, group) or ClassRule(optimizer, group)


FUSED: tuple[type[Optimizer], ...] = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad,
)  # fmt: skip


def may_fuse(optimizer: Optimizer, group: dict[str, Any], states: Collection[State] = ()) -> bool:
    """True if the class has a fused step, the user left it open, and the group allows it.

    torch's fused SGD takes momentum of all tensors or of none, and a first gradient may come late.
    """
    if type(optimizer) is torch.optim.SGD and 0 < sum(map(bool, states)) < len(states):
        return False
    is_open = type(optimizer) in FUSED and group.get("fused", False) is None
    if not is_open or any(map(group.get, ("foreach", "differentiable", "capturable"))):
        return False
    return all(tensor.is_floating_point() for tensor in group["params"])


PROBE_NUMEL = 2


def state_after_first_step(rule: Rule, dtype: torch.dtype) -> State:
    """Return the state that a class keeps per parameter, found by one step of two zeros."""
    state: State = {}
    probe = torch.zeros(PROBE_NUMEL, dtype=dtype)
    with torch.no_grad():
        rule.step(probe, torch.zeros_like(probe), probe, state)
    return state


def begun_at_zero(rule: Rule, dtype: torch.dtype) -> dict[str, float]:
    """Return the states of an element that is zero, and has no gradient, after one step.

    Classes coupled by sums add up gaps between parameters, too. DAdaptAdaGrad (pytorch_optimizer
    4.1.0) divides by a state that begins at 1e-6: zeros there would make its sums NaN.
    """
    try:
        state = state_after_first_step(rule, dtype)
    except Exception:  # whatever a class raises without gradients, or without a closure
        return {}
    return {name: value[0].item() for name, value in state.items() if is_moment(value)}


def same_entry(now: State | None, then: State) -> bool:
    """True if a parameter's state holds the very values that it held then."""
    return (
        now is not None
        and len(now) == len(then)
        and all(map(operator.is_, map(now.get, then), then.values()))
    )


def is_moment(value: object) -> bool:
    """True for an entry of the probe's state with one element for each of the probe's."""
    return isinstance(value, Tensor) and tuple(value.shape) == (PROBE_NUMEL,)
