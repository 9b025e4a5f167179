"""Choose an order of micro-batches from free memory; report its costs and the noise scale.

At stage 3, with m micro-batches, one gather of all weights of g bytes and one reduction of r bytes:

    order           sends            holds besides
    plain           m (2 g + r)      nothing
    keep            g + r            unsharded weights of all units, and their gradients
    layers          2 g + r          tensors between blocks of all micro-batches

"keep" keeps a window of units, as a pipeline does. Other units are sent as in the plain order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from onefold.engine.engine import Engine
from onefold.engine.noise import NoiseScale
from onefold.engine.registry import engine_of
from onefold.errors import ConfigError
from onefold.fit.kept_units import gathered_units, memory_of, trained_units
from onefold.layout.ledger import Kind, Traffic
from onefold.text import format_bytes

Order = Literal["auto", "layers", "keep", "plain"]


@dataclass(slots=True)
class Accumulation:
    """What is known of a module's accumulation, for the next step and the report."""

    refused: str | None = None  # why the module is no chain; None where it may be one
    is_proved: bool = False  # it was a chain
    order: Order = "layers"  # of the last step
    num_microbatches: int = 0
    border_nbytes: int = 0  # of tensors between blocks, of all micro-batches of the last step
    sent_nbytes: tuple[int, int] = (0, 0)  # by gathers and reductions of the last step
    window: frozenset[int] = frozenset()  # units that "keep" keeps
    kept: frozenset[int] = frozenset()  # units that some step has kept
    _picked: Order | None = None
    _num_picks: int = 0

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

    def choose(self, engine: Engine, order: Order) -> Order:
        """Return the order to run, and choose the window for it."""
        if order != "auto":
            self.window = gathered_units(engine).everyone if order == "keep" else frozenset()
            return order
        if not engine.policy.frees_after_forward:
            return "plain"  # it gathers once
        if self._picked is None or self._num_picks < 2:
            self._num_picks += 1
            self._picked = self._pick(engine)
        return self._picked

    def _pick(self, engine: Engine) -> Order:
        """Pick an order for all ranks; again in the second step, when activations are known."""
        room = memory_of(engine).room_to_keep()
        self.window = trained_units(engine).window(room)
        needs = engine.group.gather(self.border_nbytes)
        if self.window == gathered_units(engine).everyone:
            return "keep"
        if self.refused is None and all(need <= room for need in needs):
            return "layers"
        return self.loop_order()

    def refuse(self, why: str | None) -> None:
        """Note why the module is no chain, if it is none."""
        self.refused = why

    def prove(self, border_nbytes: int) -> None:
        """A step ran in layered order, with so many bytes between blocks."""
        self.is_proved, self.border_nbytes, self.order = True, border_nbytes, "layers"

    def begin_loop(self, order: Order) -> frozenset[int]:
        """A step runs in an order of `loop_order`; return the units that it keeps."""
        self.order = order
        if order == "plain":
            self.window = frozenset()
        self.kept |= self.window
        return self.window

    def loop_order(self) -> Order:
        """Return the order of a loop over micro-batches."""
        return "keep" if self.window else "plain"

    def describe(self, engine: Engine) -> list[str]:
        """Return lines for the report: the order of the last step, and the costs of all orders."""
        if not self.num_microbatches:
            return []
        line = f"accumulation: {self.order!r} order, {self.num_microbatches} micro-batches"
        if self.order == "keep":
            line += f", {len(self.window)} of {len(gathered_units(engine).everyone)} units kept"
        if self.refused is not None:
            line += f", as the module is no chain of blocks: {self.refused}"
        tiled = any(unit.is_tiled for unit in engine.units)  # gathered for each use in every order
        if engine.policy.frees_after_forward and engine.group.world_size > 1 and not tiled:
            line += f". Sent {format_bytes(sum(self.sent_nbytes))} a step; {self._costs(engine)}"
        return [line]

    def _costs(self, engine: Engine) -> str:
        """Bytes that each order sends and holds, from those of the last step."""
        number, (gathered, reduced) = self.num_microbatches, self.sent_nbytes
        units = trained_units(engine)
        everything = units.nbytes_of(gathered_units(engine).everyone)
        share = units.nbytes_of(self.window) / max(1, everything)
        kept = share + (1 - share) * 2 * number, share + (1 - share) * number
        passes = {"layers": (2, 1), "keep": kept, "plain": (2 * number, number)}
        gathers, reductions = passes[self.order]
        gather, reduction = int(gathered / gathers), int(reduced / reductions)
        borders = (
            format_bytes(self.border_nbytes) if self.is_proved else "an unknown number of bytes"
        )
        costs = [
            ("plain", number * (2 * gather + reduction), "nothing"),
            ("keep", gather + reduction, format_bytes(everything)),
            ("layers", 2 * gather + reduction, borders),
        ]
        if self.refused is not None:
            del costs[-1]
        return ", ".join(
            f"{name!r} sends {format_bytes(sent)} and holds {held} more"
            for name, sent, held in costs
        )


def with_kept(engine: Engine, peaks: dict[str, int]) -> dict[str, int]:
    """Return predicted peaks with those of a step that kept a window of weights and gradients."""
    known = engine.facts.about(Accumulation)
    if not (peaks and known.kept):
        return peaks
    trained = {
        i: sum(parameter.full_nbytes for parameter in unit.gradient.trainable())
        for i, unit in enumerate(engine.units)
    }
    more = sum(trained[i] for i in known.kept), sum(trained.values())
    most = {
        Kind.UNSHARDED: gathered_units(engine).most(known.kept),
        Kind.PARTIAL_GRAD: min(peaks.get(Kind.PARTIAL_GRAD, 0) + more[0], more[1]),
    }
    predicted = peaks | {kind: max(peaks.get(kind, 0), nbytes) for kind, nbytes in most.items()}
    if not engine.policy.defers_reduction:
        # reduced gradients come as the others go, where their memory does not stay
        come_late = () if engine.policy.keeps_gradients else (Kind.GRAD,)
        kinds = sum(nbytes for kind, nbytes in predicted.items() if kind not in ("all", *come_late))
        predicted["all"] = max(peaks["all"], kinds)
    return predicted


def describe_accumulation(engine: Engine) -> list[str]:
    """Return lines for the report of a module: orders, their costs, and the noise scale."""
    lines, noise = engine.facts.about(Accumulation).describe(engine), engine.hands.noise
    return lines if noise is None else [*lines, noise.describe()]


def measure_noise(module: nn.Module) -> NoiseScale:
    """Estimate the gradient noise scale of each step from now on.

    The report says how much of the progress of an endless batch a step makes, and suggests a number
    of micro-batches. Any loop is measured: `onefold.accumulate`, `onefold.accumulate_layers`, or
    Trainer, whose logs get `gradient_noise_scale`. Each gradient is read once more before its
    reduction and once after it. A step sends five numbers more.

    Call it on every rank. Micro-batches have equal weights, as in a loss divided by their number.
    A step is left out where gradients of an earlier one were not cleared, where they are not
    finite, or where pipelines or different numbers of reductions make ranks differ. Units on a mesh
    of their own (experts) and units in row blocks are left out.

    Args:
        module: one that `shard` has sharded.

    Returns:
        The estimate, which follows the steps. `batches` is the noise scale as a multiple of the
        last step's rows, `suggested_microbatches` the number of micro-batches that it suggests;
        both None at first.

    Raises:
        ConfigError: a module that evaluates only, or one small batch a step: one rank that sums
            micro-batches before they are seen.

    Example:
        >>> noise = onefold.measure_noise(model)
        >>> for step in range(100):
        ...     train(model)
        >>> print(noise.describe(), noise.suggested_microbatches)

    Source: McCandlish et al., arXiv 1812.06162, appendix A.1.
    """
    engine = engine_of(module)
    where = f"rank {engine.group.rank}"
    if engine.is_inference:
        hint = "onefold.shard a module that trains"
        got = "one of onefold.stream"
        raise ConfigError("a module that trains", got, where=where, hint=hint)
    if engine.group.world_size == 1 and engine.policy.defers_reduction:
        hint = "stage=2 shows each micro-batch alone, and more ranks show theirs"
        got = f"one rank at stage {engine.recipe.stage.number}"
        raise ConfigError("two gradients a step, to compare", got, where=where, hint=hint)
    return engine.hands.measure_noise(engine.group, engine.context.rest_world)
