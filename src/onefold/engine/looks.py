"""What a class looks for in parameters, beyond their values: attributes, identity, position.

Schedules may change attributes at any step (muP-like rates), as long as elements are still stepped
apart. Who keeps parameters elsewhere than in groups gets all of them, in the order of the groups:
those that other ranks step have no elements and no gradient. See docs/adr/0031.
"""

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from onefold.engine.behaviour import behaviour_of
from onefold.engine.engine import Engine
from onefold.engine.identity import finds_by_identity, is_torchs, rename
from onefold.engine.probe import words_of
from onefold.engine.rules import attributes_of
from onefold.errors import StateError
from onefold.unit.parameter import UnitParameter

Shown = list[tuple[UnitParameter, nn.Parameter]]
"""Parameters, and what a step sees of them."""


class Looks:
    """What an optimizer looks for, as it was when it was judged."""

    def __init__(self, optimizer: Optimizer, reads: frozenset[str]) -> None:
        self._reads = reads
        self._known = self._now(optimizer)
        self.finds, self._in_modules = finds_by_identity(optimizer)
        self._is_torchs = is_torchs(optimizer)
        self._shown: Shown = []  # during a step

    def _now(self, optimizer: Optimizer) -> set[str]:
        held = (tensor for group in optimizer.param_groups for tensor in group["params"])
        return {words_of(attributes_of(t, self._reads)) for t in held} if self._reads else set()

    def have_changed(self, optimizer: Optimizer) -> bool:
        """True if it keeps parameters now, or one has attributes that no probe has seen."""
        if not self.finds and not self._is_torchs:
            self.finds, self._in_modules = finds_by_identity(optimizer)
            if self.finds:
                return True
        return not self._now(optimizer) <= self._known

    def judge(
        self, optimizer: Optimizer, engines: Sequence[Engine], *, is_flat: bool
    ) -> frozenset[str]:
        """Return the attributes that it reads now; raise `StateError` if it steps otherwise."""
        behaviour, engine = behaviour_of(optimizer), engines[0]
        in_blocks = any(unit.steps_in_blocks for each in engines for unit in each.units)
        fits = behaviour.is_flat(engine.recipe.rest_world)
        if is_flat and (not fits or (in_blocks and not behaviour.in_blocks)):
            name, own = type(optimizer).__name__, ", ".join(sorted(behaviour.reads))
            wanted = f"{name} to step each element by itself, as at onefold.shard"
            got = "parameters in its tables" if self.finds else f"other attributes ({own})"
            hint = "fill tables and set attributes before onefold.shard, which looks at them"
            raise StateError(wanted, got, where=f"rank {engine.group.rank}", hint=hint)
        if is_flat:
            self._reads = behaviour.reads
            self._known |= self._now(optimizer)
        return behaviour.reads

    def show(self, optimizer: Optimizer, shown: Shown) -> None:
        """Let the class find what it steps where it keeps sharded parameters."""
        self._shown = shown
        rename(optimizer, {id(p.sharded): stand_in for p, stand_in in self._shown})
        for parameter, stand_in in self._shown if self._in_modules else ():
            parameter.show(stand_in)

    def put_back(self, optimizer: Optimizer) -> None:
        """Let it keep sharded parameters again."""
        if self._shown:
            rename(optimizer, {id(stand_in): p.sharded for p, stand_in in self._shown})
        for parameter, _ in self._shown if self._in_modules else ():
            parameter.show(parameter.sharded)
        self._shown = []
