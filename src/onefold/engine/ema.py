"""`onefold.ema`: an exponential moving average of a sharded module's weights, kept in shards.

Each rank averages its own rows: of the fp32 master where there is one, else of the weight, in fp32
at least. An average rests in the tier of the masters. No update communicates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from onefold.engine.engine import Engine
from onefold.engine.registry import engine_of
from onefold.engine.watch import in_backward
from onefold.errors import ConfigError, StateError
from onefold.layout.ledger import Kind
from onefold.unit.buffer import Buffer
from onefold.unit.parameter import UnitParameter
from onefold.unit.unit import Unit


def ema(module: nn.Module, decay: float = 0.999) -> MovingAverage:
    """Average a sharded module's weights over the steps, on each rank for its own rows.

    Works at every stage, tier and precision. The first update copies the weights. Each later one
    does `average = decay * average + (1 - decay) * weights`, as `AveragedModel` of
    `torch.optim.swa_utils` does with `get_ema_multi_avg_fn`.

    Args:
        module: one that `shard` has sharded.
        decay: share of the old average that an update keeps, from 0 to 1.

    Returns:
        The average. Call its `update()` after each `optimizer.step()`.

    Raises:
        ConfigError: `decay` is not between 0 and 1.
        StateError: the module is not sharded.
        TierError: the tier of the masters has no room for the average.

    Example:
        >>> average = onefold.ema(model, decay=0.999)
        >>> optimizer.step()
        >>> average.update()
        >>> with average.applied(), torch.no_grad():
        ...     model(x)
    """
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
        raise ConfigError("decay to be between 0 and 1", repr(decay), hint="decay=0.999 is usual")
    return MovingAverage(engine_of(module), float(decay))


class MovingAverage:
    """The moving average that `onefold.ema` returns. Checkpoints of the module hold it.

    Attributes:
        decay: share of the old average that the next update keeps. It may be changed.
        num_updates: updates so far.
    """

    word, reshards = "average", True

    def __init__(self, engine: Engine, decay: float) -> None:
        self.decay = decay
        self.num_updates = 0
        self._engine = engine
        self._is_applied = False
        self._buffers = {unit: _buffer_of(unit) for unit in engine.units}
        engine.companions.join(self)
        with torch.no_grad():
            for unit, average in self._ready("onefold.ema"):
                average.copy_(unit.stepped)
            self._forget()

    @torch.no_grad()
    def update(self) -> None:
        """Average the weights as they are now. No collective.

        Waits for offloaded steps that run in the background.
        """
        for unit, average in self._ready("update"):
            if self.num_updates == 0 or not _is_number(unit):
                average.copy_(unit.stepped)
            else:
                average.lerp_(unit.stepped.to(average), 1 - self.decay)
        self.num_updates += 1
        self._forget()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Show the average in the module, to evaluate or save it.

        Every rank enters the block: the module's forward is a collective. Afterwards weights and
        masters have the bits that they had before. Changes of weights inside are discarded. The
        block takes memory for a copy of this rank's weights and masters.
        """
        ready = self._ready("applied")
        kept = [(unit, unit.weight.tensor.clone(), unit.stepped.clone()) for unit, _ in ready]
        self._is_applied = True
        try:
            with torch.no_grad():
                for unit, average in ready:
                    unit.stepped.copy_(average)
                    unit.publish(is_rounded=False)
                    unit.gather.forget_base()
                self._forget()
            yield
        finally:
            self._is_applied = False
            self._engine.rest()
            with torch.no_grad():
                for unit, weight, stepped in kept:
                    unit.join_step()
                    unit.rows.await_copies()
                    unit.stepped.copy_(stepped)
                    unit.weight.tensor.copy_(weight)
                    unit.publish(is_rounded=True)
                    unit.gather.forget_base()
                self._forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the average by parameter name, as shards (`DTensor`), and the number of updates.

        The values share memory with the average. `torch.distributed.checkpoint` saves them, and
        loads them at any number of ranks. `onefold.save` needs no call of it.
        """
        averages = {p.fqn: p.wrap(own) for p, own in self._average_rows()}
        return {"averages": averages, "num_updates": self.num_updates}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a `state_dict()` of the same module, of unsharded or sharded tensors.

        Raises:
            StateError: names, shapes or the number of ranks differ. Nothing is changed then.
        """
        averages: dict[str, Tensor] = state_dict["averages"]
        rows = self._average_rows()
        shapes = {name: tuple(value.shape) for name, value in averages.items()}
        wanted = {parameter.fqn: parameter.shape for parameter, _ in rows}
        for name in sorted(shapes.keys() | wanted.keys()):
            if shapes.get(name) != wanted.get(name):
                raise self._error(
                    f"the average of parameter {name!r} of shape {wanted.get(name)}",
                    f"shape {shapes.get(name)}",
                    "the state is of another configuration of this module",
                )
        for parameter, own in rows:
            given_rows = parameter.unwrap(averages[parameter.fqn])
            if given_rows.shape != own.shape:
                raise self._error(
                    f"the average of parameter {parameter.fqn!r} sharded over as many ranks",
                    f"rows {list(given_rows.shape)} in place of {list(own.shape)}",
                    "torch.distributed.checkpoint loads it at any number of ranks",
                )
        for parameter, own in rows:
            own.copy_(parameter.unwrap(averages[parameter.fqn]))
        self.resume(state_dict)

    # checkpoints (`Companion`)

    def saved_rows(self) -> list[tuple[UnitParameter, Tensor]]:
        """Return this rank's rows of the average; none while the weights show it."""
        return [] if self._is_applied else self._average_rows()

    def rank_state(self) -> dict[str, Any]:
        """The number of updates."""
        return {"num_updates": self.num_updates}

    def resume(self, state: dict[str, Any]) -> None:
        """Go on after the rows of a checkpoint were read."""
        self.num_updates = int(state["num_updates"])
        self._forget()

    def _average_rows(self) -> list[tuple[UnitParameter, Tensor]]:
        """This rank's rows of the average of each parameter."""
        return [
            (parameter, parameter.own_rows(buffer.tensor))
            for unit, buffer in self._buffers.items()
            for parameter in unit.parameters
        ]

    def _ready(self, call: str) -> list[tuple[Unit, Tensor]]:
        """Let weights and masters rest and agree; return each unit with its average."""
        engine = self._engine
        is_running = engine.schedule.forward_depth > 0 or in_backward()
        if self._is_applied or engine.is_unsharded or is_running:
            got = "a call inside `applied()`, `onefold.unsharded`, forward or backward"
            hint = "call update() once a step, on every rank, outside these blocks"
            raise self._error(f"{call} after optimizer.step()", got, hint)
        engine.rest()
        for unit in engine.units:
            unit.wait_step()
            unit.check_untouched()
            unit.refresh_master()
        return [(unit, buffer.tensor) for unit, buffer in self._buffers.items()]

    def _error(self, what: str, got: str, hint: str) -> StateError:
        where = f"rank {self._engine.group.rank}"
        return StateError(what, got, where=where, hint=hint)

    def _forget(self) -> None:
        """Free memory in which tensors of a far tier were read."""
        for unit, buffer in self._buffers.items():
            unit.forget()
            if buffer.far is not None:
                buffer.far.forget()


def _buffer_of(unit: Unit) -> Buffer:
    """Room for the average of a unit: [own rows], where its master is or would be."""
    stepped, dtype = unit.stepped, unit.stepped.dtype
    if _is_number(unit):
        dtype = torch.promote_types(dtype, torch.float32)
    ledger = unit.context.ledger
    average = Buffer(len(stepped), dtype, Kind.AVERAGE, unit.state_store, ledger)
    unit.averages.append(ref(average))
    return average


def _is_number(unit: Unit) -> bool:
    """True where weights have averages: not for integers, nor for packed weights."""
    dtype = unit.stepped.dtype
    return (dtype.is_floating_point or dtype.is_complex) and not unit.spec.is_packed
