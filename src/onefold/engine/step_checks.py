"""Refuse optimizers whose step would be another one than the class's, or that step nothing."""

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.optim import Optimizer, SparseAdam

from onefold.engine.behaviour import Behaviour, behaviour_of
from onefold.engine.engine import Engine
from onefold.engine.own_state import check_savable
from onefold.engine.probe import acts_outside
from onefold.engine.rules import wrapped_by
from onefold.errors import ConfigError, StateError
from onefold.recipe import Recipe
from onefold.unit.parameter import with_gradient

_WHY = {
    "elementwise": "it keeps numbers, or states from its constructor, for all blocks",
    "parameter": "it steps whole parameters",
    "coupled": "its step of a parameter depends on the other parameters",
}


def check_step(optimizer: Optimizer, recipe: Recipe) -> None:
    """Raise `ConfigError` for an optimizer that cannot be stepped right under a recipe.

    Ranks hold parts of all parameters above stage 0, and offloaded states are stepped in blocks.
    """
    _check_kind(optimizer)
    check_savable(optimizer)
    behaviour, name = behaviour_of(optimizer), type(optimizer).__name__
    held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    if behaviour.unsavable:
        hint = "a class that keeps tensors, numbers, words, lists and dicts in its states"
        wanted = f"states of {name} that onefold.save can save"
        raise ConfigError(wanted, behaviour.unsavable, hint=hint)
    if behaviour.differentiates:
        got = f"{name}, which differentiates gradients: those of sharded parameters have no graph"
        hint = "an optimizer such as AdamW, or Muon and Shampoo for matrices"
        raise ConfigError("an optimizer that takes gradients as numbers", got, hint=hint)
    has_meshes = any(unit.ranks for unit in recipe.units)
    if recipe.rest_world > 1 or has_meshes:
        why = _why_together(behaviour, held, has_meshes=has_meshes)
        if behaviour.kind == "parameter" and acts_outside(type(optimizer)):
            why = why or "whose train() and eval() need states that other ranks keep"
        if why:
            hint = "use stage=0, where every rank steps all parameters, or another one, as AdamW"
            wanted = "an optimizer that steps each parameter by itself: ranks step different ones"
            raise ConfigError(wanted, f"{name}, {why}", hint=hint)
    if any(unit.is_offloaded for unit in recipe.units) or not recipe.rests_near:
        hint = "offload=None, or AdamW, SGD, RMSprop and their like"
        wanted = "an optimizer whose step can be cut into blocks, for offloaded states"
        if not behaviour.in_blocks:
            raise ConfigError(wanted, f"{name}: {_WHY[behaviour.kind]}", hint=hint)
        if any(tensor.is_complex() for tensor in held):
            raise ConfigError(wanted, f"{name} of complex parameters", hint="offload=None")


def _check_kind(optimizer: Optimizer) -> None:
    """Raise `ConfigError` for one that has another one step its parameters, or steps sparsely."""
    inner, name = wrapped_by(optimizer), type(optimizer).__name__
    if isinstance(optimizer, SparseAdam):
        hint = "torch.optim.Adam, which also trains nn.Embedding(sparse=True)"
        got = f"{name}, which takes sparse ones alone"
        raise ConfigError(
            "an optimizer of dense gradients: they are reduced densely", got, hint=hint
        )
    if inner is not None:
        hint = f"build {name} after onefold.shard(module), or pass it optimizer.{inner} alone"
        got = f"{name}, which wraps {type(getattr(optimizer, inner)).__name__}"
        raise ConfigError("an optimizer that steps its parameters itself", got, hint=hint)


def _why_together(behaviour: Behaviour, held: Sequence[Tensor], *, has_meshes: bool) -> str:
    """Return why an optimizer needs the parameters of all ranks; empty if it does not."""
    if behaviour.sends:
        return f"which calls {behaviour.sends} by itself, for ranks that hold whole parameters"
    if behaviour.searches:
        return "which evaluates its closure at other weights"
    if behaviour.kind == "coupled" and (has_meshes or not behaviour.adds):
        return "whose step of a parameter depends on the other parameters"
    if behaviour.kind == "coupled" and not all(tensor.dim() for tensor in held):
        return "which would count a parameter without dimensions on every rank"
    return ""


def check_trains(optimizer: Optimizer, engines: Iterable[Engine]) -> None:
    """Raise `StateError` if all that it holds is frozen, and no optimizer holds what trains."""
    held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    if any(tensor.requires_grad for tensor in held):
        return
    for engine in engines:
        stepped = {p for stepper in engine.executor.steppers for p in stepper.held()}
        for parameter in with_gradient(engine.by_sharded.values()):
            if parameter not in stepped:
                wanted = f"{type(optimizer).__name__} to hold parameters that train"
                got = f"frozen ones alone; no optimizer holds {parameter.fqn!r}"
                hint = "build the optimizer after adapters were added"
                raise StateError(wanted, got, where=f"rank {engine.group.rank}", hint=hint)
