"""`onefold.generating`: keep weights unsharded over the forwards of a generation or evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from onefold.engine.registry import engine_of
from onefold.engine.watch import in_backward
from onefold.errors import StateError
from onefold.fit.engines import gathered_units, units_to_keep


@contextmanager
def generating(module: nn.Module, budget: int | None = None) -> Iterator[None]:
    """Keep weights unsharded between forwards without gradients: to generate or evaluate.

    A collective on entry. At stage 3 every forward gathers every unit, so that `generate` of n
    tokens gathers n times. In this block each unit that fits is gathered once. The others are
    gathered in every forward. Weights, tokens and training are the same, bit for bit, with and
    without it. Kept weights are freed at the end of the block, and earlier where training goes on:
    a forward with gradients, an optimizer step, a save or a load. Without sharded parameters
    (stages 0 to 2) nothing changes.

    Random number generators are the caller's: sampling advances the generator that dropout uses.

    Args:
        module: one that `shard` has sharded.
        budget: bytes of unsharded weights, at most. Default, and upper limit: three quarters of
            the free memory of the rank that has the least, where the others leave room for
            activations and a cache of keys and values.

    Raises:
        StateError: inside a forward or backward of the module.
        ConfigError: a budget that is no number of bytes.

    Example:
        >>> with onefold.generating(model):
        ...     tokens = model.generate(prompt, max_new_tokens=100)
    """
    engine = engine_of(module)
    kept, schedule = units_to_keep(engine, budget), engine.schedule
    if schedule.forward_depth > 0 or in_backward():
        raise StateError(
            "onefold.generating outside forward and backward",
            "a call from within one",
            where=f"rank {engine.group.rank}",
            hint="enter it before the module is called",
        )
    if schedule.driven.keeps:
        yield
        return
    if kept:
        engine.facts.note_kept(gathered_units(engine).most(kept))
    with engine.driven(keeps=kept):
        yield
