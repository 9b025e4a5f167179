"""The arguments of `onefold.shard` that a callback or a strategy takes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from torch import nn

from onefold.api import shard
from onefold.config import OffloadChoice, PrecisionChoice, StageChoice, offload_of, precision_of
from onefold.engine.registry import engine_of
from onefold.errors import ConfigError
from onefold.layout.units import UnitChoice
from onefold.wire_config import WireChoice

CHOICES = "_onefold_choices"
"""The attribute of a module that holds the choices with which a library has sharded it."""


@dataclass(frozen=True, slots=True)
class ShardChoices:
    """The arguments of `Callback` and of `Strategy`; see `onefold.shard`."""

    stage: StageChoice = 3
    precision: PrecisionChoice = None
    offload: OffloadChoice = None
    wire: WireChoice = None
    units: UnitChoice = None
    timeout: float | timedelta | None = None

    def shard(self, module: nn.Module, optimizer: Any, **others: Any) -> None:
        """Shard a module. `others` add to these choices, or replace some. A collective."""
        choices = {field.name: getattr(self, field.name) for field in fields(ShardChoices)}
        shard(module, optimizer, **(choices | others))
        module.__dict__[CHOICES] = self

    def check(self, module: nn.Module) -> None:
        """Raise `ConfigError` if a module was sharded with other choices."""
        known = module.__dict__.get(CHOICES)
        if type(known) is type(self):
            got, is_same = str(known), known == self
        else:
            recipe = engine_of(module).recipe
            got = f"stage {recipe.stage.number}, {recipe.precision}, {recipe.offload}"
            mine, its = offload_of(self.offload), recipe.offload
            is_same = self == type(self)() or (
                self.stage in ("auto", recipe.stage.number)
                and precision_of(self.precision) == recipe.precision
                and (mine.optimizer, mine.parameters) == (its.optimizer, its.parameters)
            )
        if not is_same:
            hint = "choose the same, or pass a model that is not sharded yet"
            raise ConfigError(
                f"the choices with which the model was sharded, {got}", str(self), hint=hint
            )
