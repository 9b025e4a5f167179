"""A table of modules and scripts that train sharded as they do in one process.

Decorators fill it: of a module (a class, or a function that builds one), of a loss, or of a whole
script. A clause has the name of the function, or the one that is given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from tests.support.zoo import Process, Script, Tower, law_1, training

Made = TypeVar("Made", bound=Callable[..., Any])
REENTRANT = {"False": False, "True": True}
GUARDS = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
_OF_LAW = {*inspect.signature(law_1).parameters}


@dataclass(frozen=True)
class Clause:
    """A script for which law 1 holds, on these numbers of ranks."""

    script: Script
    worlds: Sequence[int]
    choices: Mapping[str, Any]
    number: int  # of its value

    def check(self, world_size: int) -> None:
        law_1(world_size, self.script, **self.choices)


class Clauses(dict[str, Clause]):
    """Clauses by name.

    Each decorator takes choices of `law_1`. `of`: there is a clause of each of these values, which
    the decorated function takes as its last argument. `worlds`: numbers of ranks.
    """

    def script(
        self,
        name: str = "",
        *,
        of: Mapping[str, Any] | None = None,
        worlds: Sequence[int] = (3, 1, 2, 4),
        **choices: Any,
    ) -> Callable[[Made], Made]:
        def add(script: Made) -> Made:
            for number, (key, value) in enumerate(({"": None} if of is None else of).items()):
                made = script if of is None else _with(script, value)
                full = (name or script.__name__) + (key and f"-{key}")
                assert full not in self, full
                self[full] = Clause(made, worlds, choices, number)
            return script

        return add

    def module(self, name: str = "", of: Any = None, **choices: Any) -> Callable[[Made], Made]:
        """Other choices are those of `training`."""

        def add(build: Made, **more: Any) -> Made:
            own = {key: choices.pop(key) for key in [*choices] if key not in _OF_LAW | {"worlds"}}

            def script(process: Process, *value: Any) -> None:
                training(partial(build, *value), **own, **more)(process)

            self.script(name or build.__name__, of=of, **choices)(script)
            return build

        return add

    def loss(
        self, name: str = "", build: Callable[[], nn.Module] = Tower, **choices: Any
    ) -> Callable[[Made], Made]:
        """A function of the module and a batch; other choices are those of `training`."""

        def add(loss: Made) -> Made:
            loss_of = lambda module: partial(loss, module)
            self.module(name or loss.__name__, loss=loss_of, **choices)(build)
            return loss

        return add

    def cases(self) -> Iterator[Any]:
        """Each clause on its first number of ranks, and on another one in turn.

        `make test` runs the first of these, for one of three values; `make again` the others. Of
        several values the first alone is run on another number of ranks.
        """
        again = pytest.mark.again("tests/laws/test_any_module.py::test_any_module")
        for turn, (name, clause) in enumerate(self.items()):
            first, *others = clause.worlds
            marks = [again] if clause.number % 3 else []
            yield pytest.param(clause, first, id=f"{name}-{first}", marks=marks)
            if others and clause.number == 0:
                other = others[turn % len(others)]
                yield pytest.param(clause, other, id=f"{name}-{other}", marks=again)


def _with(script: Callable[..., None], value: Any) -> Script:
    return lambda process: script(process, value)
