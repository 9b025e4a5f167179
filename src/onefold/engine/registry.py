"""Find the engine of a sharded module: every public function does so first."""

from typing import TypeGuard

from torch import Tensor, nn

from onefold.engine import guards
from onefold.engine.engine import Engine
from onefold.engine.hooks import hook
from onefold.engine.structure import take_root
from onefold.errors import StateError
from onefold.layout.module_tree import uncompiled
from onefold.unit.unit import unit_of

ENGINE = "_onefold_engine"
"""The attribute of a sharded root module that holds its engine."""


def engine_of(module: nn.Module) -> Engine:
    """Return the engine of a sharded module, compiled or not, or of the only one in a wrapper.

    Raises `StateError` for any other.
    """
    engine = find_engine(module)
    if engine is None:
        got = f"a {type(module).__name__} that it has not sharded"
        hint = "call onefold.shard first; then pass the module that it sharded, not a part of it"
        raise StateError("a module that onefold.shard has sharded", got, hint=hint)
    return engine


def find_engine(module: object) -> Engine | None:
    """Return the engine that `engine_of` returns; None where it raises."""
    if not isinstance(module, nn.Module):
        return None
    module = uncompiled(module)
    return module.__dict__.get(ENGINE) or _held_by(module) or _unwrapped(module)


def owner_of(tensor: Tensor) -> Engine | None:
    """Return the engine that a sharded parameter belongs to; None for other tensors."""
    owner = getattr(tensor, "_onefold_owner", None)
    parameter = owner() if owner is not None else None
    engine = unit_of(parameter).owner if parameter is not None else None
    return engine if isinstance(engine, Engine) else None


def is_sharded(module: object) -> TypeGuard[nn.Module]:
    """True for the module itself that `onefold.shard` has sharded, not for parts and wrappers."""
    return isinstance(module, nn.Module) and ENGINE in module.__dict__


def _held_by(wrapper: nn.Module) -> Engine | None:
    """Return the engine of the only sharded module inside."""
    engines = {part.__dict__[ENGINE] for part in wrapper.modules() if is_sharded(part)}
    return engines.pop() if len(engines) == 1 else None


def _unwrapped(module: nn.Module) -> Engine | None:
    """Make a module the root that has all parameters of a sharded one, as its wrapper was removed.

    So `merge_and_unload` of adapters returns a part of the module that was sharded.
    """
    parameters = list(module.parameters())
    engine = owner_of(parameters[0]) if parameters else None
    if engine is None:
        return None
    root, mine = engine.module(), set(map(id, parameters))
    if root is not None and not all(id(parameter) in mine for parameter in root.parameters()):
        return None
    module.__dict__[ENGINE] = engine
    guards.guard_root(module)
    hook(engine, {}, root=module)
    take_root(engine, module)
    return engine
