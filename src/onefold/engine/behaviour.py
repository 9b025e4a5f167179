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

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from threading import RLock
from typing import Any, Literal, get_args

import torch
from torch.optim import LBFGS, Optimizer

from onefold.engine.coupled import SENT, Sends, refuse_messages, summed_rows
from onefold.engine.identity import finds_by_identity
from onefold.engine.own_state import unsavable
from onefold.engine.probe import (
    BLOCKS,
    MATRICES,
    ROUNDED,
    SCALES,
    SHAPES,
    Question,
    Run,
    is_moment,
    is_plain,
    numel_of,
    parameters_of,
    stepped,
    values_of,
    words_of,
)
from onefold.engine.rules import (
    ClassRule,
    attributes_of,
    rule_of,
    state_after_first_step,
    unhooked_step,
)
from onefold.engine.rules import is_moment as is_probed_moment
from onefold.errors import ConfigError

Kind = Literal["elementwise", "parameter", "coupled"]
DECLARED = "_onefold_kind"
"""The attribute of a class that was declared. Subclasses are not: their step may differ."""


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
        reads: attributes of parameters that a step looks for.
        unsavable: a value in a state that no checkpoint gives back; empty if a probe saw none.
    """

    kind: Kind = "parameter"
    adds: bool = False
    in_blocks: bool = False
    searches: bool = False
    differentiates: bool = False
    sends: str = ""
    moments: tuple[str, ...] | None = None
    reads: frozenset[str] = frozenset()
    unsavable: str = ""

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
    behaviour = _of_all([group_behaviour(optimizer, group) for group in optimizer.param_groups])
    if behaviour.searches or DECLARED in vars(type(optimizer)):
        return behaviour
    if not finds_by_identity(optimizer)[0]:
        return behaviour
    kind: Kind = "coupled" if behaviour.kind == "coupled" else "parameter"
    return replace(behaviour, kind=kind, adds=False, in_blocks=False)


def _of_all(parts: Sequence[Behaviour]) -> Behaviour:
    """Return what holds for all parts of an optimizer's parameters."""
    kinds = {behaviour.kind for behaviour in parts}
    coupled = [behaviour for behaviour in parts if behaviour.kind == "coupled"]
    moments = [b.moments for b in parts if b.moments is not None]
    names = tuple(dict.fromkeys(chain.from_iterable(moments)))
    return Behaviour(
        next(kind for kind in reversed(get_args(Kind)) if kind in kinds),
        adds=bool(coupled) and all(behaviour.adds for behaviour in parts),
        in_blocks=all(behaviour.in_blocks for behaviour in parts),
        searches=any(behaviour.searches for behaviour in parts),
        differentiates=any(behaviour.differentiates for behaviour in parts),
        sends=next((behaviour.sends for behaviour in parts if behaviour.sends), ""),
        moments=names if len(moments) == len(parts) else None,
        reads=frozenset().union(*(behaviour.reads for behaviour in parts)),
        unsavable=next((b.unsavable for b in parts if b.unsavable), ""),
    )


def group_behaviour(optimizer: Optimizer, group: dict[str, Any]) -> Behaviour:
    """Return what a step does to the parameters of one group, as their attributes are now."""
    kind = type(optimizer)
    declared: Kind | None = vars(kind).get(DECLARED)
    if isinstance(optimizer, LBFGS):
        return Behaviour("coupled", searches=True)
    if "compile" in _names_in_step(kind):
        behaviour = Behaviour()  # it compiles each shape, for seconds
    else:
        behaviour = _probed_group(optimizer, group)
    if declared is None or declared == behaviour.kind:
        return behaviour
    return Behaviour(declared, in_blocks=declared == "elementwise", reads=behaviour.reads)


_ONE_BY_ONE = RLock()
"""Threads probe in turn, and the next one finds the answer: dispatch modes of several threads at
once ended a process of torch 2.13 twice in 5,000 programs (ASGD with foreach, three ranks)."""


def _names_in_step(kind: type[Optimizer]) -> tuple[str, ...]:
    code = getattr(unhooked_step(kind), "__code__", None)
    return () if code is None else code.co_names


def _probed_group(optimizer: Optimizer, group: dict[str, Any]) -> Behaviour:
    """Probe a class with each set of attributes that its parameters have, of those it looks for.

    A class may look for more attributes of a parameter that has some.
    """
    answers, reads = dict[str, Behaviour](), frozenset[str]()
    own: dict[str, dict[str, Any]] = {"": {}}
    while own.keys() - answers.keys():
        answers |= {w: _answer(optimizer, group, own[w]) for w in own.keys() - answers.keys()}
        reads = reads.union(*(answer.reads for answer in answers.values()))
        held = group["params"] if reads else ()
        found = [attributes_of(tensor, reads) for tensor in held] or [{}]
        own = {words_of(attributes): attributes for attributes in found}
    return replace(_of_all([answers[words] for words in sorted(own)]), reads=reads)


def _answer(optimizer: Optimizer, group: dict[str, Any], attributes: dict[str, Any]) -> Behaviour:
    question = _try(Question.about, optimizer, group, attributes)
    if not question or not all(map(is_plain, attributes.values())):
        return Behaviour()
    ways = (question, replace(question, closes=True), replace(question, is_list=True))
    reads = frozenset[str]()
    for way in ways:
        with _ONE_BY_ONE:
            answer, own = _probed(way)
        reads |= own
        if answer is not None:
            return replace(answer, reads=reads)
    # it may send messages where no probe sees them
    sent = [name for name in _names_in_step(type(optimizer)) if name in SENT]
    return Behaviour(reads=reads, sends=sent[0] if sent else "")


def moments_of_group(
    optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype
) -> dict[str, torch.dtype]:
    """Return the dtypes of states with one element for each of the parameter's, by name."""
    behaviour = group_behaviour(optimizer, group)
    if behaviour.moments is not None:
        return dict.fromkeys(behaviour.moments, dtype)
    rule = rule_of(optimizer, group)
    if behaviour.reads and isinstance(rule, ClassRule) and group["params"]:
        rule = rule.with_attributes(attributes_of(group["params"][0], behaviour.reads))
    state = state_after_first_step(rule, dtype)
    return {name: value.dtype for name, value in state.items() if is_probed_moment(value)}


@lru_cache(maxsize=1024)
def _probed(question: Question) -> tuple[Behaviour | None, frozenset[str]]:
    """Probe a class; None if it raises. Return also the attributes that it looked for."""
    profiler: Any = sys.getprofile()
    behaviour = None
    try:
        sys.setprofile(refuse_messages)
        together = stepped(question, MATRICES)
        behaviour = _compare_apart(question, together)
        behaviour = replace(behaviour, unsavable=_unsavable(together, behaviour))
    except Sends as error:
        behaviour = Behaviour(sends=str(error))
    except MemoryError:  # which tells nothing of the class
        raise
    except Exception as error:  # whatever a class raises on parameters that it is not made for
        if "process group has not been initialized" in str(error):
            behaviour = Behaviour(sends="torch.distributed")
        elif "does not have a grad_fn" in str(error):
            behaviour = Behaviour(differentiates=True)
    finally:
        _resume_profiler(profiler)
    return behaviour, frozenset(question.reads)


def _resume_profiler(profiler: Any) -> None:
    """Let a user's profiler go on. That of cProfile (3.11) is no function, so it begins again."""
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
    else:
        sys.setprofile(None)
        profiler.enable()


def _compare_apart(question: Question, together: Run) -> Behaviour:
    apart = [
        stepped(question, [shape], start) for shape, start in zip(MATRICES, (0, 6), strict=True)
    ]
    if together.searches or together.calls > len(SCALES):
        return Behaviour("coupled", searches=True)
    halves = zip(apart, together.moved.split([6, 12]), strict=True)
    is_same = all(torch.equal(run.moved.nan_to_num(), half.nan_to_num()) for run, half in halves)
    numbers = repr(together.numbers(together))
    if not is_same or any(repr(run.numbers(together)) != numbers for run in apart):
        rows = _try(_adds, question)
        return Behaviour("coupled", adds=bool(rows), moments=_moments(rows) if rows else None)
    draws = any(run.has_drawn for run in (together, *apart))  # other numbers where it is cut
    wanted = None if draws else _try(_elementwise, question)
    if not wanted:
        return Behaviour("coupled" if together.has_common() else "parameter")
    is_begun = wanted.begun and wanted.begun != wanted.names()  # blocks would begin again
    in_blocks = not is_begun and bool(_try(_steps_blocks, question, wanted))
    return Behaviour("elementwise", in_blocks=in_blocks, moments=_moments(wanted))


def _unsavable(run: Run, behaviour: Behaviour) -> str:
    """Return a value in the states of small parameters that no checkpoint gives back."""
    # one rank keeps the state of such a parameter, also what is inside of objects
    is_whole = behaviour.kind != "elementwise" and not behaviour.adds
    name, flags = "state[parameter]", {"is_state": True, "has_objects": is_whole}
    return next(filter(None, (unsavable(entry, name, **flags) for entry in run.entries())), "")


def _try(test: Callable[..., Any], *args: Any) -> Any:
    try:
        return test(*args)
    except MemoryError:
        raise
    except Exception:  # as above
        return False


def _elementwise(question: Question) -> Run | None:
    """Return the run over one flat parameter, if it is that over parameters of all shapes."""
    if not _flat_like(question, MATRICES):  # a matrix optimizer takes minutes for thousands
        return None
    return _flat_like(question, SHAPES)


def _flat_like(question: Question, shapes: Sequence[Sequence[int]]) -> Run | None:
    together, flat = stepped(question, shapes), stepped(question, [(numel_of(shapes),)])
    can_cut = all(run.can_be_cut() for run in (together, flat))
    can_cut = can_cut and not together.has_marked(question)
    draws = together.has_drawn or flat.has_drawn  # of large parameters
    return flat if can_cut and not draws and flat.is_like(together) else None


def _adds(question: Question) -> Run | None:
    """Return the run over own rows if its sums, doubled, are those over the rows and a copy."""
    together = stepped(question, [*MATRICES, *MATRICES])
    rows = summed_rows(lambda total: total + total)
    flat = stepped(question, [(numel_of(MATRICES),)], like=rows)
    can_cut = flat.can_be_cut() and not (flat.has_common() or flat.has_drawn)
    return flat if can_cut and flat.is_like(together, ROUNDED) else None


def _steps_blocks(question: Question, wanted: Run) -> bool:
    """True if blocks stepped by rules, and a step without parameters, come to `wanted`."""
    weights, gradients = values_of(0, numel_of(SHAPES))
    (parameter,) = parameters_of(question, [weights], question.reads)
    run = Run(question.build([parameter]), [weights], weights.clone())
    (group,), step = run.optimizer.param_groups, unhooked_step(question.kind)
    states: list[dict[str, Any]] = [{} for _ in BLOCKS]
    names: list[list[str]] = []
    with torch.no_grad():
        for gradient in gradients:
            rule = ClassRule(run.optimizer, group).with_attributes(question.attributes)
            blocks = zip(weights.split(BLOCKS), gradient.split(BLOCKS), states, strict=True)
            for block, own, state in blocks:
                rule.step(block, own, block, state)
                names.append(list(state))
            group["params"] = []
            step(run.optimizer)
    return all(known == names[0] for known in names) and run.is_like(wanted, ROUNDED)


def _moments(flat: Run) -> tuple[str, ...]:
    """Names of the states with an element for each of the only parameter's."""
    return tuple(name for name, value in flat.entries()[0].items() if is_moment(value, flat))
