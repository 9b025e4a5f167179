"""What `onefold.shard` passes on: choices, the parts of a module, sound arguments, a recipe."""

from dataclasses import dataclass, field

import torch
from torch.optim import Optimizer

from onefold.compose.own_meshes import UnitRanks
from onefold.config import Inference
from onefold.engine.run_facts import Forecaster
from onefold.fit.shares import AUTO
from onefold.layout.module_tree import ModuleTree
from onefold.layout.units import Owned, UnitChoice, UnitPlan
from onefold.recipe import Recipe
from onefold.wire.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Choices:
    """The arguments of `onefold.shard`, as they were given."""

    stage: object = 3
    units: UnitChoice = None
    precision: object = None
    offload: object = None
    wire: object = None
    shares: object = None
    inference: Inference | None = None


@dataclass(frozen=True, slots=True)
class ModuleParts:
    """The objects that a recipe is about."""

    tree: ModuleTree
    optimizers: list[Optimizer]
    parameters: list[Owned]
    plans: list[UnitPlan]


RankTiers = tuple[object, ...]
"""The tiers of one rank: of states, parameters, activations; the fraction, and who steps."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments that were found sound on this rank: a recipe with open choices."""

    parts: ModuleParts
    recipe: Recipe
    opens_stage: bool  # stage="auto"
    names_wire: bool  # a name means less where a mesh has fewer axes
    opens_shares: bool = False  # shares="auto"
    device: torch.device = field(default_factory=lambda: torch.device("meta"))  # that computes
    tiers: tuple[RankTiers, ...] = ()  # of every rank, which each chooses for itself

    @property
    def mixes_tiers(self) -> bool:
        """True if ranks have chosen different tiers."""
        return len(set(self.tiers)) > 1

    def digest(self) -> list[str]:
        """One line for each choice that ranks must share. A rank's tiers are its own."""
        shares = repr(AUTO) if self.opens_shares else self.recipe.shares
        lines = self.recipe.digest()
        return [f"shares={shares}", *(line for line in lines if not line.startswith(_OWN_CHOICES))]


_OWN_CHOICES = (
    *(f"Offload.{n}=" for n in ("optimizer", "parameters", "activations", "fraction", "step")),
    "shares=",
)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The recipe, the ranks and the device it is for, and the reasons for what was left open."""

    recipe: Recipe
    ranks: Ranks
    device: torch.device
    forecaster: Forecaster
    own: tuple[UnitRanks | None, ...] = ()  # by unit: of a mesh of its own
    why_stage: str = ""
    why_fraction: str = ""
    why_stepper: str = ""
    why_shares: str = ""
    any_offloads: bool = False  # some rank's state leaves the device
    has_room: bool = False  # for even shares, as was seen when the stage was chosen
