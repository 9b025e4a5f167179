"""Laws of modules and scripts that train sharded as they do in one process, as cases of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from tests.support.modules import ModuleLaw, module_of
from tests.support.programs.blocks import Tower
from tests.support.zoo import Process, Script, adamw, law_1, rows, squared, training

Made = TypeVar("Made", bound=Callable[..., Any])
REENTRANT = {"False": False, "True": True}
GUARDS = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@dataclass(frozen=True)
class Clause:
    """A script for which law 1 holds, on these numbers of ranks."""

    script: Script
    worlds: Sequence[int]
    choices: Mapping[str, Any]
    number: int  # of its value

    def check(self, world_size: int) -> None:
        law_1(world_size, self.script, **self.choices)


@dataclass
class Turn:
    """What a script of turns sees: a module, its optimizer, and one global batch."""

    process: Process
    module: Any
    optimizer: torch.optim.Optimizer
    index: int
    batch: Tensor

    def loss(self, times: float = 1) -> Tensor:
        """The loss of this process's part of the batch."""
        return self.process.mean(squared(self.module), self.batch * times)

    def step(self, label: str = "", part: nn.Module | None = None, times: float = 1) -> None:
        """One ordinary step, of the module or of a part of it."""
        loss_of = squared(part or self.module)
        batch = self.batch * times
        self.process.step(f"{self.index}{label}", self.module, self.optimizer, loss_of, batch)

    def update(self) -> None:
        """Note gradients, step, and clear them."""
        self.process.update(self.index, self.module, self.optimizer)

    def note_mean(self, label: str, value: Tensor) -> None:
        self.process.note_mean(f"{self.index} {label}", value)

    def note_grads(self, label: str = "") -> None:
        self.process.note_grads(f"{self.index} {label}", self.module)

    def accumulate(self, times: float = 1) -> None:
        """The backward of a micro-batch that is not the last."""
        with self.process.accumulating(self.module):
            self.loss(times).backward()


class Clauses(dict[str, Clause]):
    """Clauses by name: that of a law of modules, or of the function that a decorator takes.

    Each decorator takes choices of `law_1`. `of`: there is a clause of each of these values, which
    the decorated function takes as its last argument. `worlds`: numbers of ranks.
    """

    def __init__(self, modules: Mapping[str, ModuleLaw]) -> None:
        super().__init__()
        for name, law in modules.items():
            for number, (key, text) in enumerate(law.texts.items()):
                self[name + key] = Clause(_trained(law, text), law.worlds, law.choices, number)

    def script(
        self,
        name: str = "",
        *,
        of: Mapping[str, Any] | None = None,
        worlds: Sequence[int] = (3, 1, 2, 4),
        **choices: Any,
    ) -> Callable[[Made], Made]:
        """A whole script."""

        def add(script: Made) -> Made:
            for number, (key, value) in enumerate(({"": None} if of is None else of).items()):
                made = script if of is None else _with(script, value)
                full = (name or script.__name__) + (key and f"-{key}")
                assert full not in self, full
                self[full] = Clause(made, worlds, choices, number)
            return script

        return add

    def turns(
        self,
        count: int = 2,
        build: Callable[[], nn.Module] = Tower,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        options: Mapping[str, Any] | None = None,
        **choices: Any,
    ) -> Callable[[Made], Made]:
        """What a script does with each of so many batches; it notes the weights at the end."""

        def add(turn: Made) -> Made:
            def script(process: Process, *value: Any) -> None:
                module, made = process.ready(build, optimizer, **options or {})
                for index, batch in enumerate(rows(count)):
                    turn(Turn(process, module, made, index, batch), *value)
                process.note_weights(module)

            self.script(turn.__name__, **choices)(script)
            return turn

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


def _trained(law: ModuleLaw, text: str) -> Script:
    loss = law.loss
    loss_of = squared if loss is None else lambda module: partial(loss, module)
    build = partial(module_of, text)
    return training(build, loss_of, law.optimizer, law.batches, **law.options)


def _with(script: Callable[..., None], value: Any) -> Script:
    return lambda process: script(process, value)
