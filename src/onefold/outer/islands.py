"""`onefold.islands`: islands of ranks train apart and average their steps every so often."""

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
from onefold.errors import ConfigError, StateError, WireError
from onefold.outer.anchors import Anchors, OuterChoice, Share
from onefold.outer.journal import JournalRecord
from onefold.outer.membership import Meeting, Membership, find_place
from onefold.outer.periods import Periods
from onefold.outer.rounds import OuterRound
from onefold.unit.parameter import UnitParameter
from onefold.wire.codec import codec_of
from onefold.wire.together import together

TIMEOUT_S = 60.0
"""Seconds that islands wait for one another in a round by default."""


class islands:
    """Train on islands behind slow links, which exchange weights every so many steps only.

    Shard the module over the ranks of one island first. Each island then trains on its own data.
    After every `every` steps islands average how far their weights have moved from the anchor, the
    weights that they agreed on last. An outer optimizer steps the anchor with this mean, weighted
    by the islands' numbers of ranks, and each island goes on from there.

    A collective: every rank of every island calls it, and then `step()` after each
    `optimizer.step()`. Afterwards all islands have the weights of island 0. `onefold.save` saves
    anchors and outer state with the module. If `onefold.load` came before, islands resume from what
    it read: all from the same step, or an older one takes over the state of the newest.

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
        meeting: an `onefold.islands.Meeting`: where islands meet that are separate jobs. They may
            end and join again.
        timeout: seconds that islands wait for one another. One that does not answer is left out
            until it joins again.

    Attributes:
        outer: the outer optimizer: a learning rate schedule may change its groups.
        periods: when islands exchange which values.
        num_steps: calls of `step`, those of earlier runs included.
        num_rounds: exchanges that were applied.
        num_dropped: exchanges that were given up, on all islands alike.
        num_joined: how often this island took over the state of others after it was left out.
        waited_s: seconds that this rank waited for messages of other islands. `Periods.delay` hides
            them behind steps.

    Raises:
        ConfigError: a choice that cannot work, or islands with different models, stages, wires,
            codecs, periods or outer optimizers: the message names the difference.
        StateError: the module is not sharded.
        WireError: an island does not come within the timeout.

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

    Periods, Meeting = Periods, Meeting
    word, reshards = "islands", False

    def __init__(  # noqa: PLR0913 - the contract
        self,
        module: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        every: int | Periods,
        outer: OuterChoice = None,
        codec: str | None = None,
        mesh: DeviceMesh | None = None,
        meeting: Meeting | None = None,
        timeout: float = TIMEOUT_S,
    ) -> None:
        engine = self._engine = engine_of(module)

        def prepare() -> tuple[Periods, Anchors]:
            periods = every if isinstance(every, Periods) else Periods(every)
            optimizers = as_list(optimizer)
            if codec is not None:
                codec_of(codec)
            if isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0:
                wanted = "timeout to be a positive number of seconds"
                raise ConfigError(wanted, repr(timeout), hint=f"{TIMEOUT_S:g} is the default")
            shares = _shares_of(engine, periods, optimizers)
            return periods, Anchors(shares, optimizers, outer, feeds_back=codec is not None)

        self.periods, anchors = together(engine.group, prepare)
        place = find_place(engine.group, mesh, meeting, timeout)
        coding = None if codec is None else codec_of(codec)
        self.outer, self._anchors = anchors.outer, anchors
        self.num_steps = self.num_rounds = self.num_dropped = self.num_joined = 0
        self.waited_s = 0.0
        facts = {
            "stage": engine.recipe.stage.number,
            "wire": str(engine.recipe.wire),
            "codec": "exact" if coding is None else coding.name,
            "every": str(self.periods),
            "outer": _described(anchors.outer),
        }
        self._members = Membership(engine.group, place, anchors.shares, coding, timeout, facts)
        self._pending: OuterRound | None = None
        self.resume(engine.companions.join(self))

    @property
    def island(self) -> int:
        return self._members.island

    @property
    def members(self) -> tuple[int, ...]:
        """The islands that took part in the last exchange, or will in the next."""
        return self._members.record.members

    def step(self) -> None:
        """Count a step, and exchange with the other islands if it is time to.

        A collective of the island, and of all islands where they exchange. An exchange that fails
        is repeated among the islands that answer. If that does not help it is dropped, on all
        alike: nothing changes, and the next one has the steps of both.

        Raises:
            StateError: inside forward or backward, islands exchange different values, or a
                parameter trains that was frozen or absent when onefold.islands was called.
            WireError: the store where islands meet has gone.
        """
        self._check_resting()
        self._anchors.check_trained(self._engine.units)
        self.num_steps += 1
        pending = self._pending
        if pending is not None and self.num_steps >= pending.step + self.periods.delay:
            self.finish()
        due = self.periods.due(self.num_steps)
        if due is not None:
            self._start(*due)
            if self.periods.delay == 0:
                self.finish()

    def finish(self) -> None:
        """Apply the exchange that is under way, if there is one: before an evaluation, or the end.

        All islands call it at the same step.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        self._rest()
        members = self._members
        while True:
            begun = time.monotonic()
            deadline = pending.receive(members, members.timeout)
            self.waited_s += time.monotonic() - begun
            verdict = members.verdict(deadline, pending.failure, pending.step, pending.work)
            if members.island not in verdict.members:
                self._join()
                return
            if verdict.is_committed:
                pending.apply(members, self._anchors, self.periods.keep)
                self.num_rounds += 1
                self._transfer()
                return
            if verdict.is_dropped:
                self.num_dropped += 1
                return
            pending.start(members, self._engine.ledger)

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
        """Meet the other islands, and take over the newest state among them. A collective.

        Raises `StateError` for a state of another model, codec or number of ranks.
        """
        self._check_resting()
        together(self._members.group, lambda: self._take_over(state))
        self._members.meet(self.num_steps)
        self._transfer()
        if self._pending is not None:
            self._pending.start(self._members, self._engine.ledger)
        self.num_joined = 0

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

    def _start(self, fragment: int, kinds: Sequence[str]) -> None:
        """Begin to exchange values of the units of one fragment."""
        self._rest()
        anchors = self._anchors
        items = [
            (k, i) for k in kinds for i in self.periods.units_of(fragment, len(anchors.shares))
        ]
        with torch.no_grad():
            sent = together(
                self._members.group, lambda: {item: anchors.to_send(*item) for item in items}
            )
        frozen = [name for _, _, name in anchors.frozen(dict.fromkeys(i for _, i in items))]
        self._pending = OuterRound(self.num_steps, fragment, sent, frozen)
        self._pending.start(self._members, self._engine.ledger)

    # islands that join

    def _join(self) -> None:
        """This island was left out: wait for the others' next exchange and take over its state."""
        self._members.meet(self.num_steps)
        self._transfer()
        self.num_joined += 1

    def _transfer(self) -> None:
        """Send, or take over, the state of the source, if the last record has islands that join."""
        members = self._members
        while (record := members.record).adopters:
            self._pending = None
            failure, described, rows = "", dict[str, Any](), list[list[Tensor]]()
            deadline = time.monotonic() + members.timeout
            try:
                described, rows = self._send_state(record, deadline)
            except (WireError, RuntimeError) as error:
                failure = str(error).splitlines()[0]
            deadline = max(deadline, time.monotonic())
            verdict = members.verdict(deadline, failure, record.index, "state")
            if members.island not in verdict.members:
                members.meet(self.num_steps)
            elif verdict.is_committed and members.island in record.adopters:
                self._rest()
                self._anchors.adopt(described, rows)
                self.num_steps = described["num_steps"]

    def _send_state(
        self, record: JournalRecord, deadline: float
    ) -> tuple[dict[str, Any], list[list[Tensor]]]:
        """Send the source's anchors and outer state to all, unit by unit; return them."""
        members, anchors = self._members, self._anchors
        if members.island == record.source:
            members.note({**anchors.describe_state(), "num_steps": self.num_steps})
        described = members.read_note(deadline)
        members.connect()
        source, received = record.members.index(record.source), list[list[Tensor]]()
        is_source = members.island == record.source
        for index, names in enumerate(described["rows"]):
            rows = anchors.state_rows(index, names)
            for at, values in enumerate(rows):
                into = torch.zeros_like(values)
                for message in members.messages(index, exact=True):
                    packed = message.pack(values)
                    arriving = members.links.broadcast(message.owners, packed, source)
                    arriving.wait(time.monotonic() + members.timeout, members.has_failed)
                    message.unpack(arriving.messages[0], into)
                    if is_source:
                        nbytes = members.links.sent_nbytes(packed)
                        self._engine.ledger.sent("islands join", nbytes)
                rows[at] = into
            received.append(rows if members.island in record.adopters else [])
        return described, received

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


def _described(outer: Optimizer) -> str:
    groups = [{k: v for k, v in group.items() if k != "params"} for group in outer.param_groups]
    return f"{type(outer).__name__} {groups}"
