"""`onefold.islands`: islands of ranks train apart and average their steps every so often.

See docs/adr/0024.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from onefold.compose.checks import as_list
from onefold.engine.engine import Engine
from onefold.engine.registry import engine_of
from onefold.engine.watch import in_backward
from onefold.errors import ConfigError, StateError
from onefold.outer.anchors import Anchors, OuterChoice, Share
from onefold.outer.periods import Periods
from onefold.outer.places import Introduction, Places, compare, meet_everyone
from onefold.outer.rounds import OuterRound, follow_first
from onefold.unit.parameter import UnitParameter
from onefold.wire.codec import Codec, codec_of
from onefold.wire.together import announcing, collect, refusing, same


class islands:
    """Train on islands behind slow links, which exchange weights every so many steps only.

    Shard the module over the ranks of one island first. Each island then trains on its own data.
    After every `every` steps islands average how far their weights have moved from the anchor, the
    weights that they agreed on last. An outer optimizer steps the anchor with this mean, weighted
    by the islands' numbers of ranks, and each island goes on from there.

    A collective: every rank of every island calls it, and then `step()` after each
    `optimizer.step()`. Afterwards all islands have the weights of island 0. `onefold.save` saves
    anchors and outer state with the module. If `onefold.load` came before, islands resume from what
    it read, all from the same step.

    Args:
        module: sharded over the ranks of this island.
        optimizer: the one that was given to `onefold.shard`, or several.
        every: steps between exchanges, or `onefold.islands.Periods`.
        outer: returns an optimizer of the anchors that it gets: flat tensors [own rows], in fp32,
            on the CPU. Default: that of DiLoCo, SGD with lr 0.7 and Nesterov momentum 0.9, for
            runs of many exchanges. SGD with lr 1 takes over the mean, which is better in short
            runs.
        codec: None (exact), "int8", "int4", "int8+h" or "int4+h": how matrices travel, with error
            feedback.
        mesh: axes (island, rank), whose second axis the module is sharded over. Default: the
            islands are the groups of ranks that shard together in this world, of any size.

    Attributes:
        outer: the outer optimizer: a learning rate schedule may change its groups.
        periods: when islands exchange which values.
        island: the number of this rank's island.
        num_steps: calls of `step`, those of earlier runs included.
        num_rounds: exchanges that were applied.
        waited_s: seconds that this rank waited for other islands. `Periods.delay` hides the time
            that messages take behind steps.

    Raises:
        ConfigError: a choice that cannot work, or islands with different models, stages, wires,
            codecs, periods, outer optimizers or steps to resume from: the message names both.
        StateError: the module is not sharded.
        WireError: a rank fails, ends or does not come, as in every collective:
            `onefold.shard(timeout=)` says how long the others wait.

    Example:
        >>> mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("island", "rank"))
        >>> onefold.shard(model, optimizer, mesh=mesh["rank"])
        >>> handle = onefold.islands(model, optimizer, every=30, mesh=mesh)
        >>> loss.backward()
        >>> optimizer.step()
        >>> handle.step()

    Sources: DiLoCo, arXiv 2311.08105; Streaming DiLoCo, arXiv 2501.18512; DES-LOC, arXiv
    2505.22549.
    """

    Periods = Periods
    word, reshards = "islands", False

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        every: int | Periods,
        outer: OuterChoice = None,
        codec: str | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        with refusing():
            engine = self._engine = engine_of(module)
            group = meet_everyone(engine.group, mesh)
        made = list[tuple[Periods, Anchors, Codec | None]]()

        def prepare() -> Introduction:
            self._check_resting()
            periods = every if isinstance(every, Periods) else Periods(every)
            coding = None if codec is None else codec_of(codec)
            optimizers = as_list(optimizer)
            shares = _shares_of(engine, periods, optimizers)
            anchors = Anchors(shares, optimizers, outer, feeds_back=codec is not None)
            made.append((periods, anchors, coding))
            facts = [
                f"stage {engine.recipe.stage.number}",
                f"wire {engine.recipe.wire}",
                f"codec {coding.name if coding else 'exact'}",
                f"every {periods}",
                f"outer {_described_outer(anchors.outer)}",
            ]
            return Introduction.introduce(engine.group, shares, facts)

        said = collect(group, prepare, ConfigError, compare)
        ((self.periods, anchors, coding),) = made
        self.outer, self._anchors = anchors.outer, anchors
        self.num_steps = self.num_rounds = 0
        self.waited_s = 0.0
        self._places = Places(group, said, anchors.shares, coding)
        self._pending: OuterRound | None = None
        self.resume(engine.companions.join(self))

    @property
    def island(self) -> int:
        return self._places.island

    def step(self) -> None:
        """Count a step, and exchange with the other islands if it is time to.

        A collective of all islands where they exchange: all ranks agree on the values first.

        Raises:
            StateError: inside forward or backward, islands exchange different values, weights are
                not finite, or a parameter trains that was frozen or absent when onefold.islands
                was called.
            WireError: a rank fails, ends or does not come.
        """
        with announcing(self._places.group):
            self._check_resting()
            self._anchors.check_trained(self._engine.units)
            self.num_steps += 1
            pending = self._pending
            if pending is not None and self.num_steps >= pending.step + self.periods.delay:
                self.finish()
            due = self.periods.due(self.num_steps)
            if due is not None:
                self._start_fragment(*due)
                if self.periods.delay == 0:
                    self.finish()

    def finish(self) -> None:
        """Apply the exchange that is under way, if there is one: before an evaluation, or the end.

        All islands call it at the same step.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with announcing(self._places.group):
            self._rest()
            begun = time.monotonic()
            pending.wait()
            self.waited_s += time.monotonic() - begun
            pending.apply(self._places, self._anchors, self.periods.keep)
            self.num_rounds += 1

    def _start_fragment(self, fragment: int, kinds: Sequence[str]) -> None:
        """Begin to exchange values of the units of one fragment."""
        self._rest()
        anchors = self._anchors
        units = self.periods.units_of(fragment, len(anchors.shares))
        made = list[tuple[OuterRound, float]]()

        @torch.no_grad()
        def prepare() -> list[str]:
            sent = {
                (kind, index): anchors.to_send(kind, index) for kind in kinds for index in units
            }
            pending = OuterRound(self.num_steps, fragment, sent)
            made.append((pending, time.monotonic()))
            return [pending.work, *(f"{name} is frozen" for _, _, name in anchors.frozen(units))]

        hint = "call step() of the handle once after each optimizer step, on every rank"
        same(self._places.group, prepare, "exchange of islands", hint=hint, kind=StateError)
        ((pending, begun),) = made
        self.waited_s += time.monotonic() - begun
        pending.start(self._places, self._engine.ledger)
        self._pending = pending

    # checkpoints (`Companion`)

    def saved_rows(self) -> list[tuple[UnitParameter, Tensor]]:
        """Nothing: at stage 0 ranks hold other rows of the anchors than of the weights."""
        return []

    def rank_state(self) -> dict[str, Any]:
        """Return this rank's anchors, outer state, residuals, and the exchange under way."""
        pending = self._pending
        under_way = None
        if pending is not None:
            sent = [[kind, index, rows] for (kind, index), rows in pending.sent.items()]
            under_way = {"step": pending.step, "fragment": pending.fragment, "sent": sent}
        counts = {"num_steps": self.num_steps, "num_rounds": self.num_rounds}
        return {**counts, "pending": under_way, **self._anchors.state_dict()}

    def resume(self, state: dict[str, Any] | None) -> None:
        """Go on from a `rank_state`, or from the weights of island 0. A collective of all islands.

        Raises `StateError` for a state of another model, codec or number of ranks, `ConfigError` if
        ranks have states of different steps.
        """

        def take_over() -> list[str]:
            self._check_resting()
            self._take_over(state)
            under_way = [] if self._pending is None else [self._pending.work]
            return ["no state" if state is None else f"step {self.num_steps}", *under_way]

        hint = "load the checkpoints of one step on all islands, or none"
        what = "step of islands to go on from"
        same(self._places.group, take_over, what, hint=hint, kind=ConfigError)
        if state is None:
            follow_first(self._places, self._anchors, self._engine.ledger)
        if self._pending is not None:
            self._pending.start(self._places, self._engine.ledger)

    def _take_over(self, state: dict[str, Any] | None) -> None:
        self._rest()
        if state is None:
            self._anchors.follow_weights()
            return
        self._anchors.load_state_dict(state)
        self.num_steps, self.num_rounds = int(state["num_steps"]), int(state["num_rounds"])
        pending = state["pending"]
        self._pending = None
        if pending is not None:
            sent: dict[tuple[str, int], Tensor] = {(k, i): rows for k, i, rows in pending["sent"]}
            self._pending = OuterRound(pending["step"], pending["fragment"], sent)

    # guards

    def _check_resting(self) -> None:
        engine = self._engine
        if engine.is_unsharded or engine.schedule.forward_depth > 0 or in_backward():
            wanted = "step() of the islands after optimizer.step()"
            got = "a call inside `onefold.unsharded`, forward or backward"
            hint = "call it once a step, on every rank"
            raise StateError(wanted, got, where=f"rank {engine.group.rank}", hint=hint)

    def _rest(self) -> None:
        """Let weights and masters rest and agree."""
        self._engine.rest()
        for share in self._anchors.shares:
            share.unit.wait_step()
            share.unit.check_untouched()
            share.unit.refresh_master()


def _shares_of(engine: Engine, periods: Periods, optimizers: list[Optimizer]) -> list[Share]:
    """The units that islands exchange."""
    if engine.context.routes.replicas is not None:
        hint = 'shard an island over one axis, or without Wire(secondary="optimizer")'
        raise ConfigError(
            "an island that holds each state once", "nodes that are replicas", hint=hint
        )
    shares = [share for share in map(Share, engine.units) if share.parameters]
    if len(shares) < periods.fragments:
        got = f"fragments={periods.fragments}, and {len(shares)} units that train"
        raise ConfigError("a unit for each fragment", got, hint="fragments are of units")
    if not optimizers and (periods.exp_avg or periods.exp_avg_sq):
        hint = "onefold.islands(module, optimizer, ...)"
        raise ConfigError("the optimizer whose moments travel", "none", hint=hint)
    return shares


def _described_outer(outer: Optimizer) -> str:
    groups = [{k: v for k, v in group.items() if k != "params"} for group in outer.param_groups]
    return f"{type(outer).__name__} {groups}"
