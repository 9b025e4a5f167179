"""Steps inside a CUDA graph: what one can hold, and what is refused by name.

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):        # after some steps on a side stream
        loss = model(inputs).mean()
        loss.backward()
        optimizer.step()                 # capturable=True, as torch asks
    inputs.copy_(batch)                  # then each step is a copy and a replay
    graph.replay()

A graph repeats launches, and no Python. On one rank without offload a step is the same launches on
one stream at the same addresses each time, and the host waits for none of them: tests/sim shows it
for ten steps. Where a step depends on the host, a replay would do something else, so `shard`ed
modules refuse to be captured then.

After a replay Python knows of no change. So once a step was captured, each later forward casts
weights again, and `report` and `state_dict` count the steps that Python saw.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from onefold.engine.run_facts import RunFacts
from onefold.errors import ConfigError
from onefold.layout.ledger import Ledger
from onefold.recipe import Recipe
from onefold.tier import accelerator
from onefold.unit.context import Context
from onefold.unit.unit import Unit


class Capturable(Protocol):
    """An engine, as a capture asks it."""

    context: Context
    facts: RunFacts
    ledger: Ledger
    recipe: Recipe
    units: list[Unit]

    def rest(self) -> None: ...


@dataclass(slots=True)
class Captures:
    """What a run has captured; `RunFacts.about` keeps it."""

    holds_steps: bool = False  # a graph does, and may be replayed


def begin_forward(run: Capturable) -> None:
    """A forward outside of any other begins, captured or not. Raises `ConfigError`."""
    captures = run.facts.about(Captures)
    if accelerator.is_capturing():
        if others := [*_obstacles(run)]:
            raise _refusal(others[0])
        captures.holds_steps = True
    if captures.holds_steps:  # also what a graph fills must not lie in memory that others free
        run.rest()


def begin_step(run: Capturable, optimizer: object) -> None:
    """An optimizer is about to step, captured or not. Raises `ConfigError`."""
    if not accelerator.is_capturing():
        return
    if getattr(optimizer, "found_inf", None) is not None:
        check_scale()
    trained = (p for unit in run.units for p in unit.gradient.trainable())
    unused = [p.fqn for p in trained if p.own_grad() is None]
    if unused:
        raise _refusal(f"{unused[0]!r} without a gradient, which an optimizer leaves alone")


def check_scale() -> None:
    """Raise `ConfigError` where a dynamic loss scale is captured."""
    if accelerator.is_capturing():
        raise _refusal("a dynamic loss scale, by which the host decides whether to step")


def _obstacles(run: Capturable) -> Iterable[str]:
    """What a step of the run needs the host for."""
    recipe, num_ranks = run.recipe, run.context.everyone.world_size
    if num_ranks > 1:
        yield f"{num_ranks} ranks, whose hosts check each message"
    offload = recipe.offload
    tiers: Sequence[str] = (offload.parameters, offload.optimizer, offload.activations)
    if far := [tier for tier in tiers if tier != "device"]:
        yield f"offload to {far[0]}, whose copies and steps the host begins"
    if run.ledger.observer is not None:
        yield "a recording, which reads clocks"
    if torch.is_grad_enabled() and not run.ledger.steps:
        yield "the first step, which makes the optimizer's states"


def _refusal(got: str) -> ConfigError:
    hint = "capture one rank without offload and loss scale, after some steps, with all parameters "
    hint += "used; or run the step as it is"
    return ConfigError("a step that a CUDA graph can repeat without Python", got, hint=hint)
