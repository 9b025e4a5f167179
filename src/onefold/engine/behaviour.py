"""Find out what one step of an optimizer does, by a probe on small tensors and not by its class.

    elementwise     an element depends on itself alone: flat groups, any tier, blocks
    parameter       an update needs all rows of its parameter: owners step whole matrices
    coupled         stepping parameters together differs from stepping them apart

Coupled classes that only add up over all elements, as D-Adaptation (arXiv 2301.07733) and Prodigy
(2306.06101) do for their learning rate, *add*: ranks step their own rows, and every sum is taken
over all ranks (`onefold.engine.coupled`). Other coupled classes need whole copies of the module.

A probe builds the class with the optimizer's arguments, once, and compares displacements in
float64. A class that it cannot build, or that raises, steps whole parameters.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from inspect import Parameter, signature
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from onefold.engine.coupled import Sends, refuse_messages, summed_rows
from onefold.engine.rules import (
    ClassRule,
    is_moment,
    rule_of,
    state_after_first_step,
    unhooked_step,
)
from onefold.errors import ConfigError

Kind = Literal["elementwise", "parameter", "coupled"]
DECLARED = "_onefold_kind"
"""The attribute of a class that was declared. Subclasses are not: their step may differ."""

SCALES = (1.0, 3.0, 0.5, 40.0, 2.0, 0.1, 1.5, 0.7)
"""Gradients of the probe's steps, relative to one another: a sudden one is clipped."""
MATRICES = ((3, 2), (4, 3))
SHAPES = (*MATRICES, (64, 64), (2, 2, 1, 2))
"""Some classes treat other numbers of dimensions otherwise, or states of 4096 elements and more."""
BLOCKS = (5, 70, 3000, 1047)
EXACT, ROUNDED = 1e-6, 1e-4
"""Relative differences: in float64, and where sums or a tensor of the rate are float32."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What a step of an optimizer does.

    Attributes:
        kind: the elements on which an element's update depends.
        adds: coupled by sums over all elements alone.
        in_blocks: blocks of offloaded states can be stepped one by one, in the background.
        searches: a step evaluates its closure at other weights than those before the step.
        differentiates: a step takes gradients of gradients, so backward must record a graph.
        sends: the collective of torch.distributed that a step calls; empty if it calls none.
        moments: names of the states with an element for each of the parameter's, after one step;
            None where no probe has seen them.
    """

    kind: Kind = "parameter"
    adds: bool = False
    in_blocks: bool = False
    searches: bool = False
    differentiates: bool = False
    sends: str = ""
    moments: tuple[str, ...] | None = None

    def is_flat(self, rest_world: int) -> bool:
        """True if ranks step flat groups of their own rows, where `rest_world` hold the state."""
        return self.kind == "elementwise" or (self.adds and rest_world > 1)


def declare(cls: type[Optimizer], kind: Kind) -> None:
    """Say what a step of an optimizer class does, where a probe cannot tell.

    A probe cannot build a class that needs more than parameters and hyper-parameters. Call this
    before `onefold.shard`. Subclasses are not declared with their base class.

    Args:
        cls: the class of the optimizer.
        kind: "elementwise" (flat groups and offload), "parameter" (each parameter is stepped whole
            by one rank) or "coupled" (stages 1 to 3 are refused, unless a probe finds that only
            sums over all elements are shared).

    Raises:
        ConfigError: for another word, or for a class that is no optimizer.
    """
    if kind not in get_args(Kind):
        hint = 'onefold.declare(cls, "elementwise")'
        raise ConfigError(f"kind to be one of {', '.join(get_args(Kind))}", repr(kind), hint=hint)
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):  # type: ignore[redundant-expr]
        hint = "pass the class, not an optimizer: onefold.declare(type(optimizer), kind)"
        raise ConfigError("a subclass of torch.optim.Optimizer", type(cls).__name__, hint=hint)
    setattr(cls, DECLARED, kind)


def behaviour_of(optimizer: Optimizer) -> Behaviour:
    """Return what a step does to the parameters of every group: what holds for all groups."""
    groups = [group_behaviour(optimizer, group) for group in optimizer.param_groups]
    kinds = {behaviour.kind for behaviour in groups}
    coupled = [behaviour for behaviour in groups if behaviour.kind == "coupled"]
    return Behaviour(
        next(kind for kind in reversed(get_args(Kind)) if kind in kinds),
        adds=bool(coupled) and all(behaviour.adds for behaviour in groups),
        in_blocks=all(behaviour.in_blocks for behaviour in groups),
        searches=any(behaviour.searches for behaviour in groups),
        differentiates=any(behaviour.differentiates for behaviour in groups),
        sends=next((behaviour.sends for behaviour in groups if behaviour.sends), ""),
    )


def group_behaviour(optimizer: Optimizer, group: dict[str, Any]) -> Behaviour:
    """Return what a step does to the parameters of one group."""
    kind = type(optimizer)
    declared: Kind | None = vars(kind).get(DECLARED)
    if isinstance(optimizer, LBFGS):
        return Behaviour("coupled", searches=True)
    if "compile" in getattr(unhooked_step(kind), "__code__", _NOTHING).co_names:
        behaviour = Behaviour()  # it compiles each shape, for seconds
    else:
        behaviour = _probed_group(optimizer, group)
    if declared is None or declared == behaviour.kind:
        return behaviour
    return Behaviour(declared, in_blocks=declared == "elementwise")


def _probed_group(optimizer: Optimizer, group: dict[str, Any]) -> Behaviour:
    question = _try(_Question.of, optimizer, group)
    if not question:
        return Behaviour()
    return _probed(question) or _probed(replace(question, closes=True)) or Behaviour()


def moments_of_group(
    optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype
) -> dict[str, torch.dtype]:
    """Return the dtypes of states with one element for each of the parameter's, by name."""
    names = group_behaviour(optimizer, group).moments
    if names is not None:
        return dict.fromkeys(names, dtype)
    state = state_after_first_step(rule_of(optimizer, group), dtype)
    return {name: value.dtype for name, value in state.items() if is_moment(value)}


_NOTHING = (lambda: None).__code__


@dataclass(frozen=True, slots=True)
class _Question:
    """A class and its arguments: equal questions have one answer."""

    kind: type[Optimizer]
    text: str
    group: dict[str, Any] = field(compare=False)
    arguments: dict[str, Any] = field(compare=False)
    closes: bool = False  # a step gets a closure

    @staticmethod
    def of(optimizer: Optimizer, group: dict[str, Any]) -> _Question:
        """The question of one group; schedules change `lr`, which may be 0 just now."""
        rate = optimizer.defaults.get("lr", group.get("lr", 1e-3))
        fixed: dict[str, Any] = {"lr": rate if rate else 1e-3, "capturable": False}
        left = ("params", "initial_lr")
        own = {k: v for k, v in group.items() if k not in left and _is_plain(v)}
        own |= {key: value for key, value in fixed.items() if key in own}
        known = {**vars(optimizer), **optimizer.defaults, **own}
        named = _arguments_of(type(optimizer))
        arguments = {n: known[n] for n in named if n in known and _is_plain(known[n])}
        text = repr((sorted(own.items()), sorted(arguments.items())))
        return _Question(type(optimizer), text, own, arguments)

    def build(self, parameters: Sequence[Tensor]) -> Optimizer:
        """Build an optimizer that is ready to train."""
        group = deepcopy(self.group)
        optimizer = self.kind([{**group, "params": parameters}], **deepcopy(self.arguments))
        if acts_outside(self.kind):
            optimizer.train()  # type: ignore[attr-defined]
        return optimizer


@lru_cache(maxsize=256)
def _arguments_of(kind: type[Optimizer]) -> tuple[str, ...]:
    """Names of what the constructor takes besides parameters."""
    by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    _, *parameters = signature(kind).parameters.values()
    return tuple(p.name for p in parameters if p.kind in by_name)


def acts_outside(kind: type[Optimizer]) -> bool:
    """True for a class that changes weights in `train()` and `eval()`, as ScheduleFree does."""
    return all(callable(getattr(kind, name, None)) for name in ("train", "eval"))


@dataclass(slots=True)
class _Run:
    """A class that has stepped small parameters."""

    optimizer: Optimizer
    parameters: list[Tensor]
    start: Tensor
    calls: int = 0  # of the closure
    searches: bool = False  # the closure was called with other weights than at the step's start

    @property
    def moved(self) -> Tensor:
        """How far each element went."""
        with torch._C.DisableTorchFunctionSubclass():
            return torch.cat([p.detach().reshape(-1) for p in self.parameters]) - self.start

    def is_like(self, other: _Run, tolerance: float = EXACT) -> bool:
        """True if elements went as far as in another run, and groups hold the same numbers."""
        mine, wanted = self.moved.nan_to_num(), other.moved.nan_to_num()[: len(self.start)]
        atol = tolerance * 1e-3 * wanted.abs().max().item()
        is_near = torch.allclose(mine, wanted, rtol=tolerance, atol=atol)
        return is_near and _are_near(self.numbers(), other.numbers(), tolerance)

    def numbers(self) -> dict[str, Any]:
        """The numbers and words that the class keeps in its group."""
        group = self.optimizer.param_groups[0]
        return {k: v for k, v in group.items() if k != "params" and _is_plain(v)}

    def entries(self) -> list[dict[str, Any]]:
        """The states of all parameters."""
        return [self.optimizer.state.get(p, {}) for p in self.parameters]

    def has_common(self) -> bool:
        """True if the class keeps state that belongs to no parameter."""
        return any(not isinstance(key, Tensor) for key in self.optimizer.state)


@lru_cache(maxsize=256)
def _probed(question: _Question) -> Behaviour | None:
    """Probe a class; None if it raises. The global generator stays as it is."""
    before, profiler = torch.get_rng_state(), sys.getprofile()
    try:
        sys.setprofile(refuse_messages)
        return _compare(question, before)
    except Sends as error:
        return Behaviour(sends=str(error))
    except MemoryError:  # which tells nothing of the class
        raise
    except Exception as error:  # whatever a class raises on parameters that it is not made for
        if "process group has not been initialized" in str(error):
            return Behaviour(sends="torch.distributed")
        return Behaviour(differentiates=True) if "does not have a grad_fn" in str(error) else None
    finally:
        sys.setprofile(profiler)
        if not torch.equal(before, torch.get_rng_state()):
            torch.set_rng_state(before)


def _compare(question: _Question, generator: Tensor) -> Behaviour:
    together = _stepped(question, MATRICES)
    apart = [
        _stepped(question, [shape], start) for shape, start in zip(MATRICES, (0, 6), strict=True)
    ]
    if together.searches or together.calls > len(SCALES):
        return Behaviour("coupled", searches=True)
    if not torch.equal(generator, torch.get_rng_state()):
        return Behaviour()  # it draws: nothing can be compared
    halves = zip(apart, together.moved.split([6, 12]), strict=True)
    is_same = all(torch.equal(run.moved.nan_to_num(), half.nan_to_num()) for run, half in halves)
    if not is_same or any(repr(run.numbers()) != repr(together.numbers()) for run in apart):
        rows = _try(_adds, question)
        return Behaviour("coupled", adds=bool(rows), moments=_moments(rows) if rows else None)
    wanted = _try(_elementwise, question)
    if not wanted:
        return Behaviour("coupled" if together.has_common() else "parameter")
    in_blocks = bool(_try(_steps_blocks, question, wanted))
    return Behaviour("elementwise", in_blocks=in_blocks, moments=_moments(wanted))


def _try(test: Callable[..., Any], *args: Any) -> Any:
    try:
        return test(*args)
    except MemoryError:
        raise
    except Exception:  # as above
        return False


def _elementwise(question: _Question) -> _Run | None:
    """Return the run over one flat parameter, if it is that over parameters of all shapes."""
    if not _flat_like(question, MATRICES):  # a matrix optimizer takes minutes for thousands
        return None
    return _flat_like(question, SHAPES)


def _flat_like(question: _Question, shapes: Sequence[Sequence[int]]) -> _Run | None:
    together, flat = _stepped(question, shapes), _stepped(question, [(_numel(shapes),)])
    entries = [
        (run, value) for run in (together, flat) for e in run.entries() for value in e.values()
    ]
    can_cut = all(_is_moment(value, run) or _is_number(value) for run, value in entries)
    return flat if can_cut and flat.is_like(together) else None


def _adds(question: _Question) -> _Run | None:
    """Return the run over own rows if its sums, doubled, are those over the rows and a copy."""
    together = _stepped(question, [*MATRICES, *MATRICES])
    rows = summed_rows(lambda total: total + total)
    flat = _stepped(question, [(_numel(MATRICES),)], like=rows)
    values = (value for entry in flat.entries() for value in entry.values())
    can_cut = all(_is_moment(value, flat) or _is_number(value) for value in values)
    is_right = can_cut and not flat.has_common() and flat.is_like(together, ROUNDED)
    return flat if is_right else None


def _steps_blocks(question: _Question, wanted: _Run) -> bool:
    """True if blocks stepped by rules, and a step without parameters, come to `wanted`."""
    weights, gradients = _values(0, _numel(SHAPES))
    run = _Run(question.build([nn.Parameter(weights)]), [weights], weights.clone())
    (group,), step = run.optimizer.param_groups, unhooked_step(question.kind)
    states: list[dict[str, Any]] = [{} for _ in BLOCKS]
    names: list[list[str]] = []
    with torch.no_grad():
        for gradient in gradients:
            rule = ClassRule(run.optimizer, group)
            blocks = zip(weights.split(BLOCKS), gradient.split(BLOCKS), states, strict=True)
            for block, own, state in blocks:
                rule.step(block, own, block, state)
                names.append(list(state))
            group["params"] = []
            step(run.optimizer)
    return all(known == names[0] for known in names) and run.is_like(wanted, ROUNDED)


def _stepped(
    question: _Question, shapes: Sequence[Sequence[int]], start: int = 0, *, like: Any = Tensor
) -> _Run:
    """Return a run over parameters of some shapes, whose values begin at `start`."""
    weights, gradients = _values(start, _numel(shapes))
    parameters: list[Tensor] = [
        nn.Parameter(p.clone().as_subclass(like)) for p in _cut(weights, shapes)
    ]
    run = _Run(question.build(parameters), parameters, weights)
    step = unhooked_step(question.kind)

    def closure() -> Tensor:
        run.calls += 1
        run.searches |= not all(map(torch.equal, parameters, before))
        return torch.ones(())

    with torch.no_grad():
        for gradient in gradients:
            for parameter, own in zip(parameters, _cut(gradient, shapes), strict=True):
                parameter.grad = own.clone().as_subclass(like)
            before = [parameter.clone() for parameter in parameters]
            step(run.optimizer, *([closure] if question.closes else []))
    return run


def _values(start: int, numel: int) -> tuple[Tensor, list[Tensor]]:
    """Return weights and the gradients of each step, in float64; those of the matrices come twice.

    Gradients of two elements are not in proportion: else a mean over them is that of each part.
    They keep their direction by and large: else no class would raise its rate.
    """
    at, period = torch.arange(start, start + numel, dtype=torch.float64), _numel(MATRICES)
    at = torch.where(at < 2 * period, at % period, at)
    sizes = torch.where(at < math.prod(MATRICES[0]), 0.02, 1.5)
    steps = enumerate(SCALES, start=1)
    return torch.cos(3 * at) * 0.4, [
        scale * sizes * (torch.cos(at) + 0.3 * torch.cos(n * at)) for n, scale in steps
    ]


def _cut(flat: Tensor, shapes: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    parts = flat.split([math.prod(shape) for shape in shapes])
    return (part.view(*shape) for part, shape in zip(parts, shapes, strict=True))


def _numel(shapes: Sequence[Sequence[int]]) -> int:
    return sum(map(math.prod, shapes))


def _moments(flat: _Run) -> tuple[str, ...]:
    """Names of the states with an element for each of the only parameter's."""
    return tuple(name for name, value in flat.entries()[0].items() if _is_moment(value, flat))


def _is_moment(value: object, run: _Run) -> bool:
    """True for a state with an element for each of a parameter's, of its dtype."""
    kinds, shapes = {Tensor, *map(type, run.parameters)}, [p.shape for p in run.parameters]
    if not isinstance(value, Tensor) or type(value) not in kinds:
        return False
    return value.dtype == torch.float64 and value.shape in shapes


def _is_number(value: object) -> bool:
    is_one = isinstance(value, Tensor) and value.numel() == 1
    return is_one or value is None or isinstance(value, bool | int | float | str)


def _is_plain(value: object) -> bool:
    """True for numbers, words and leaf tensors of one element, and sequences of them."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return _is_number(value) and not (isinstance(value, Tensor) and not value.is_leaf)


def _are_near(mine: dict[str, Any], wanted: dict[str, Any], tolerance: float) -> bool:
    return mine.keys() == wanted.keys() and all(
        math.isclose(mine[key], value, rel_tol=tolerance, abs_tol=1e-30)
        if isinstance(value, float | Tensor)
        else repr(mine[key]) == repr(value)
        for key, value in wanted.items()
    )
