"""A probe: a class that steps small parameters in float64, as an optimizer was built.

Random operations get numbers that depend on the step and their shape alone (`engine/draws.py`). So
classes that draw can be compared, and no other thread's numbers are touched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onefold.engine.draws import Draws
from onefold.engine.rules import unhooked_step

SCALES = (1.0, 3.0, 0.5, 40.0, 2.0, 0.1, 1.5, 0.7)
"""Gradients of the probe's steps, relative to one another: a sudden one is clipped."""
MATRICES = ((3, 2), (4, 3))
SHAPES = (*MATRICES, (64, 64), (2, 2, 1, 2))
"""Some classes treat other numbers of dimensions otherwise, or states of 4096 elements and more."""
BLOCKS = (5, 70, 3000, 1047)
EXACT, ROUNDED = 1e-6, 1e-4
"""Relative differences: in float64, and where sums or a tensor of the rate are float32."""


@dataclass(frozen=True, slots=True)
class Question:
    """A class and its arguments: equal questions have one answer."""

    kind: type[Optimizer]
    text: str
    group: dict[str, Any] = field(compare=False)
    arguments: dict[str, Any] = field(compare=False)
    attributes: dict[str, Any] = field(compare=False)  # of each parameter
    reads: set[str] = field(compare=False, default_factory=set)  # attributes that it looked for
    closes: bool = False  # a step gets a closure
    is_list: bool = False  # the constructor takes a list of parameters alone

    @staticmethod
    def about(optimizer: Optimizer, group: dict[str, Any], attributes: dict[str, Any]) -> Question:
        """The question of one group; schedules change `lr`, which may be 0 just now."""
        rate = optimizer.defaults.get("lr", group.get("lr", 1e-3))
        fixed: dict[str, Any] = {"lr": rate if rate else 1e-3, "capturable": False}
        left = ("params", "initial_lr", "param_names")
        own = {k: v for k, v in group.items() if k not in left and is_plain(v)}
        own |= {key: value for key, value in fixed.items() if key in own}
        known = {**vars(optimizer), **optimizer.defaults, **own}
        named = _arguments_of(type(optimizer))
        arguments = {n: known[n] for n in named if n in known and is_plain(known[n])}
        text = repr((sorted(own.items()), sorted(arguments.items()), words_of(attributes)))
        return Question(type(optimizer), text, own, arguments, attributes)

    def build(self, parameters: Sequence[Tensor]) -> Optimizer:
        """Build an optimizer that is ready to train."""
        group, arguments = deepcopy(self.group), deepcopy(self.arguments)
        if self.is_list:
            optimizer = self.kind(list(parameters), **arguments)
        else:
            optimizer = self.kind([{**group, "params": parameters}], **arguments)
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
class Run:
    """A class that has stepped small parameters."""

    optimizer: Optimizer
    parameters: list[Tensor]
    start: Tensor
    has_drawn: bool = False
    begun: set[str] = field(default_factory=set)  # names of states that the constructor made
    calls: int = 0  # of the closure
    searches: bool = False  # the closure was called with other weights than at the step's start

    @property
    def moved(self) -> Tensor:
        """How far each element went."""
        with torch._C.DisableTorchFunctionSubclass():
            return torch.cat([p.detach().reshape(-1) for p in self.parameters]) - self.start

    def is_like(self, other: Run, tolerance: float = EXACT) -> bool:
        """True if elements went as far as in another run, and groups hold the same numbers."""
        mine, wanted = self.moved.nan_to_num(), other.moved.nan_to_num()[: len(self.start)]
        atol = tolerance * 1e-3 * wanted.abs().max().item()
        is_near = torch.allclose(mine, wanted, rtol=tolerance, atol=atol)
        return is_near and _are_near(self.numbers(other), other.numbers(other), tolerance)

    def numbers(self, counted: Run) -> dict[str, Any]:
        """The numbers and words that the class keeps in its group.

        Without those that count elements in the run `counted`, as in heavyball 3.2.1: a count that
        changes a step is seen in what has moved.
        """
        numel = len(counted.start)
        counts = {k for k, v in counted._kept().items() if type(v) is int and v == numel}
        return {k: v for k, v in self._kept().items() if k not in counts}

    def _kept(self) -> dict[str, Any]:
        group = self.optimizer.param_groups[0]
        return {k: v for k, v in group.items() if k != "params" and is_plain(v)}

    def entries(self) -> list[dict[str, Any]]:
        """The states of all parameters."""
        return [self.optimizer.state.get(p, {}) for p in self.parameters]

    def names(self) -> set[str]:
        """Names of the states of all parameters."""
        return {name for entry in self.entries() for name in entry}

    def can_be_cut(self) -> bool:
        """True if each state has an element for each of its parameter's, or is a number."""
        values = (value for entry in self.entries() for value in entry.values())
        return all(is_moment(value, self) or is_number(value) for value in values)

    def has_marked(self, question: Question) -> bool:
        """True if the class has put attributes on parameters, or changed them."""
        given = repr(question.attributes | {"onefold_reads": question.reads})
        return any(vars(p) and repr(vars(p)) != given for p in self.parameters)

    def has_common(self) -> bool:
        """True if the class keeps state that belongs to no parameter."""
        return any(not isinstance(key, Tensor) for key in self.optimizer.state)


class _Asked(nn.Parameter):
    """A parameter that notes attributes that a class looks for, and that it does not have."""

    def __getattr__(self, name: str) -> Any:
        vars(self).get("onefold_reads", set()).add(name)
        raise AttributeError(f"'Parameter' object has no attribute {name!r}")


def parameters_of(question: Question, parts: Iterable[Tensor], reads: set[str]) -> list[Tensor]:
    """Make parameters that note in `reads` what a class looks for."""
    if question.kind.__module__.startswith("torch.optim."):  # which looks for nothing
        return [nn.Parameter(part) for part in parts]
    made: list[Tensor] = [
        _Asked(part) if type(part) is Tensor else nn.Parameter(part) for part in parts
    ]
    for parameter in made:
        vars(parameter).update(question.attributes, onefold_reads=reads)
    return made


def stepped(
    question: Question, shapes: Sequence[Sequence[int]], start: int = 0, *, like: Any = Tensor
) -> Run:
    """Return a run over parameters of some shapes, whose values begin at `start`."""
    weights, gradients = values_of(start, numel_of(shapes))
    parts = (p.clone().as_subclass(like) for p in parts_of(weights, shapes))
    parameters = parameters_of(question, parts, question.reads)
    with Draws(0) as draws:
        run = Run(question.build(parameters), parameters, weights)
    run.begun, run.has_drawn = run.names(), draws.num > 0
    step = unhooked_step(question.kind)

    def closure() -> Tensor:
        run.calls += 1
        run.searches |= not all(map(torch.equal, parameters, before))
        return torch.ones(())

    with torch.no_grad():
        for number, gradient in enumerate(gradients, start=1):
            for parameter, own in zip(parameters, parts_of(gradient, shapes), strict=True):
                parameter.grad = own.clone().as_subclass(like)
            before = [parameter.clone() for parameter in parameters]
            with Draws(number) as draws:
                step(run.optimizer, *([closure] if question.closes else []))
            run.has_drawn |= draws.num > 0
    return run


def values_of(start: int, numel: int) -> tuple[Tensor, list[Tensor]]:
    """Return weights and the gradients of each step, in float64; those of the matrices come twice.

    Gradients of two elements are not in proportion: else a mean over them is that of each part.
    They keep their direction by and large: else no class would raise its rate.
    """
    at, period = torch.arange(start, start + numel, dtype=torch.float64), numel_of(MATRICES)
    at = torch.where(at < 2 * period, at % period, at)
    sizes = torch.where(at < math.prod(MATRICES[0]), 0.02, 1.5)
    steps = enumerate(SCALES, start=1)
    return torch.cos(3 * at) * 0.4, [
        scale * sizes * (torch.cos(at) + 0.3 * torch.cos(n * at)) for n, scale in steps
    ]


def parts_of(flat: Tensor, shapes: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    parts = flat.split([math.prod(shape) for shape in shapes])
    return (part.view(*shape) for part, shape in zip(parts, shapes, strict=True))


def numel_of(shapes: Sequence[Sequence[int]]) -> int:
    return sum(map(math.prod, shapes))


def is_moment(value: object, run: Run) -> bool:
    """True for a state with an element for each of a parameter's, of its dtype."""
    kinds, shapes = {Tensor, *map(type, run.parameters)}, [p.shape for p in run.parameters]
    if not isinstance(value, Tensor) or type(value) not in kinds:
        return False
    return value.dtype == torch.float64 and value.shape in shapes


def is_number(value: object) -> bool:
    is_one = isinstance(value, Tensor) and value.numel() == 1
    return is_one or value is None or isinstance(value, bool | int | float | str)


def is_plain(value: object) -> bool:
    """True for numbers, words and leaf tensors of one element, and sequences of them."""
    if isinstance(value, tuple | list):
        return all(map(is_plain, value))
    return is_number(value) and not (isinstance(value, Tensor) and not value.is_leaf)


def words_of(attributes: Mapping[str, Any]) -> str:
    """Write attributes down, floats without their value: they scale, and choose nothing."""
    kept = {k: "a float" if isinstance(v, float) else v for k, v in sorted(attributes.items())}
    return repr(kept) if kept else ""


def _are_near(mine: dict[str, Any], wanted: dict[str, Any], tolerance: float) -> bool:
    return mine.keys() == wanted.keys() and all(
        math.isclose(mine[key], value, rel_tol=tolerance, abs_tol=1e-30)
        if isinstance(value, float | Tensor)
        else repr(mine[key]) == repr(value)
        for key, value in wanted.items()
    )
