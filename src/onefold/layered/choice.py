"""Choose an order of micro-batches from free memory, and say what the other orders would cost.

At stage 3, with m micro-batches, one gather of all weights of g bytes and one reduction of r bytes:

    order           sends            holds besides
    plain           m (2 g + r)      nothing
    keep weights    g + m r          all unsharded weights
    keep            g + r            those, and gradients of all of them
    layers          2 g + r          tensors between blocks of all micro-batches

"keep weights" is told for comparison: it sends more than "layers" from three micro-batches on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from onefold.engine.engine import Engine
from onefold.host import in_bytes
from onefold.ledger import Kind, Traffic
from onefold.planner.auto import room_to_keep

Order = Literal["auto", "layers", "keep", "plain"]


@dataclass(slots=True)
class Accumulation:
    """What is known of a module's accumulation, for the next step and the report.

    Attributes:
        refused: why the module is no chain; None where it may be one.
        is_proved: it was one.
        border_nbytes: bytes of tensors between blocks of all micro-batches, in the last step.
        sent_nbytes: bytes of the last step's gathers and reductions.
        has_kept: a step kept weights and gradients.
    """

    refused: str | None = None
    is_proved: bool = False
    order: Order = "layers"
    num_microbatches: int = 0
    border_nbytes: int = 0
    sent_nbytes: tuple[int, int] = (0, 0)
    has_kept: bool = False
    _picked: Order | None = None
    _num_picks: int = field(default=0)

    def sent(self, engine: Engine) -> tuple[int, int]:
        """Return the bytes that gathers and reductions have sent so far."""
        traffic, none = engine.ledger.traffic, Traffic()
        gathered, reduced = (traffic.get(name, none) for name in ("gather", "reduce_scatter"))
        return gathered.sent_nbytes, reduced.sent_nbytes

    def note(self, engine: Engine, before: tuple[int, int], number: int) -> None:
        """Note the bytes that a step of `number` micro-batches has sent."""
        after = self.sent(engine)
        self.sent_nbytes = after[0] - before[0], after[1] - before[1]
        self.num_microbatches = number

    def pick(self, engine: Engine) -> Order:
        """Pick an order for all ranks; again in the second step, when activations are known."""
        if self._picked is None or self._num_picks < 2:
            self._num_picks += 1
            room = room_to_keep(engine.recipe, engine.context.store.device, engine.group, None)
            has_room = room >= kept_nbytes(engine)
            needs: list[object] = [self.border_nbytes]
            if engine.group.world_size > 1:
                needs = engine.group.all_gather_object(self.border_nbytes)
            fits = all(isinstance(need, int) and need <= room for need in needs)
            self._picked = "keep" if has_room else "layers" if fits else "plain"
        return self._picked

    def describe(self, engine: Engine) -> list[str]:
        """Return lines for the report: the order of the last step, and the costs of all orders."""
        if not self.num_microbatches:
            return []
        line = f"accumulation: {self.order!r} order, {self.num_microbatches} micro-batches"
        if self.refused is not None:
            line += f", as the module is no chain of blocks: {self.refused}"
        tiled = any(unit.is_tiled for unit in engine.units)  # gathered for each use in every order
        if engine.policy.frees_after_forward and engine.group.world_size > 1 and not tiled:
            line += f". Sent {in_bytes(sum(self.sent_nbytes))} a step; {self._costs(engine)}"
        return [line]

    def _costs(self, engine: Engine) -> str:
        """Bytes that each order sends and holds, from those of the last step."""
        number, (gathered, reduced) = self.num_microbatches, self.sent_nbytes
        passes = {"layers": (2, 1), "keep": (1, 1), "plain": (2 * number, number)}
        gathers, reductions = passes[self.order]
        gather, reduction = gathered // gathers, reduced // reductions
        weights = _weights_nbytes(engine)
        borders = in_bytes(self.border_nbytes) if self.is_proved else "an unknown number of bytes"
        costs = (
            ("plain", number * (2 * gather + reduction), "nothing"),
            ("keep weights", gather + number * reduction, in_bytes(weights)),
            ("keep", gather + reduction, in_bytes(kept_nbytes(engine))),
            ("layers", 2 * gather + reduction, borders),
        )
        return ", ".join(
            f"{name!r} sends {in_bytes(sent)} and holds {held} more" for name, sent, held in costs
        )


def accumulation_of(engine: Engine) -> Accumulation:
    """Return what is known of a module's accumulation."""
    if not isinstance(engine.accumulation, Accumulation):
        engine.accumulation = Accumulation()
    return engine.accumulation


def choose(engine: Engine, known: Accumulation, order: Order) -> Order:
    """Return the order to run: the one that was asked for, or the pick."""
    return known.pick(engine) if order == "auto" else order


def kept_nbytes(engine: Engine) -> int:
    """Return the bytes of all unsharded weights and of gradients of those that train."""
    return _weights_nbytes(engine) + _trained_nbytes(engine)


def with_kept(engine: Engine, peaks: dict[str, int]) -> dict[str, int]:
    """Return predicted peaks with those of an order that keeps weights and gradients."""
    known = engine.accumulation
    if not (peaks and isinstance(known, Accumulation) and known.has_kept):
        return peaks
    found, added = dict(peaks), 0
    kept = (Kind.UNSHARDED, _weights_nbytes(engine)), (Kind.PARTIAL_GRAD, _trained_nbytes(engine))
    for kind, most in kept:
        more = max(0, most - found.get(kind, 0))
        found[kind] = found.get(kind, 0) + more
        added += more
    if engine.policy.keeps_gradients:
        found["all"] += added
    else:  # reduced gradients come as the others go
        kinds = sum(nbytes for kind, nbytes in found.items() if kind not in ("all", Kind.GRAD))
        found["all"] = max(found["all"], kinds)
    return found


def _weights_nbytes(engine: Engine) -> int:
    """Bytes of unsharded weights that are not at rest."""
    return sum(unit.nbytes for unit in engine.schedule.units if not unit.is_resident)


def _trained_nbytes(engine: Engine) -> int:
    trained = [p for gradient in engine.gradients.values() for p in gradient.trainable()]
    return sum(parameter.full_nbytes for parameter in trained)


def describe_accumulation(engine: Engine) -> list[str]:
    """Return lines for the report of a module: orders, their costs, and the noise scale."""
    known, noise = engine.accumulation, engine.hands.noise
    lines = known.describe(engine) if isinstance(known, Accumulation) else []
    return lines if noise is None else [*lines, noise.describe()]
