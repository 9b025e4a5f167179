"""Find the engine of a sharded module: every public function does so first."""

from __future__ import annotations

from torch import nn

from onefold.engine.engine import Engine
from onefold.errors import StateError, expected
from onefold.layout.units import uncompiled

ENGINE = "_onefold_engine"
"""The attribute of a sharded root module that holds its engine."""


def engine_of(module: nn.Module) -> Engine:
    """Return the engine of a sharded module, compiled or not. Raises `StateError` for others."""
    module = uncompiled(module)
    engine = module.__dict__.get(ENGINE) if isinstance(module, nn.Module) else None
    if not isinstance(engine, Engine):
        raise StateError(
            expected(
                "a module that onefold.shard has sharded",
                f"a {type(module).__name__} that it has not sharded",
                hint="pass the module that was given to onefold.shard, not a part of it",
            )
        )
    return engine
