"""Derive the trace of one rank of a pipeline from the trace of a whole model.

A rank has some pieces of the model. tp divides their matrices, ep their experts, tp and cp their
work and activations. Between two events of a trace torch holds more or less: those bytes belong to
the piece that runs then. So the planner of one data axis plans each rank of the pipeline.

Activations of tp are cut along the sequence, or along heads and columns. But attention and
feed-forward gather their inputs, and torch keeps them whole for backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from onefold.planner.costs import Conditions
from onefold.planner.machines import Machine
from onefold.planner.planned_axes import Anatomy, ModelAxes, expert_count
from onefold.planner.trace import Trace
from onefold.planner.work import AxisMessage, Event, EventKind, UnitWork, Work
from onefold.recipe import Member, Recipe


@dataclass(frozen=True, slots=True)
class ComposedJob:
    """The axes of a run, the sizes on which their messages depend, and the devices.

    recipe: of the whole world. tokens: of one micro-batch of a data rank, before cp cuts them.
    itemsize: bytes of an element of activations. room: bytes of a device; None: not known.
    """

    axes: ModelAxes
    anatomy: Anatomy
    recipe: Recipe
    tokens: int
    itemsize: int
    room: int | None = None
    machine: Machine | None = None
    conditions: Conditions = field(default_factory=Conditions)

    @property
    def share(self) -> float:
        """The share of a micro-batch's work and activations of one rank of tp and cp.

        Where tp does not divide the heads, it is the share of the rank with most heads.
        """
        return self.tp_share / self.axes.cp

    @property
    def tp_share(self) -> float:
        """The share of a block's matrices that the fullest rank of tp holds."""
        heads = self.anatomy.heads or self.axes.tp
        return ceil(heads / self.axes.tp) / heads

    @property
    def hidden_nbytes(self) -> float:
        """Bytes of the activations between two blocks, of one rank of cp and all of tp."""
        return self.tokens / self.axes.cp * self.anatomy.width * self.itemsize

    @property
    def sent_hidden_nbytes(self) -> float:
        """Bytes of these activations on one rank: it sends them along the pipeline."""
        return self.hidden_nbytes / self.axes.tp

    def message(self, axis: str, nbytes: float, forward: int, backward: int) -> AxisMessage:
        """Make a message of an axis."""
        near, world = self.recipe.local_world_size, self.recipe.world_size
        group = self.axes.group(axis, near, world)
        return AxisMessage(axis, nbytes, group, forward, backward)


@dataclass(frozen=True, slots=True)
class UnitPart:
    """A unit, or a part of one, on a rank: its piece, and the positions of its members there."""

    unit: int
    piece: int
    members: tuple[int, ...]
    is_expert: bool = False
    is_tied: bool = False  # a copy; another rank has the rest of the unit


def pieces_of(units: Sequence[UnitWork], job: ComposedJob) -> list[int]:
    """Return the piece of the pipeline to which each unit belongs.

    Blocks are cut evenly, the first pieces may have one more. Units before the first block belong
    to the first piece, units behind a block to the block's.
    """
    number, blocks = job.axes.num_pieces, len(job.anatomy.blocks)
    lengths = [blocks // number + (piece < blocks % number) for piece in range(number)]
    starts = [piece for piece, length in enumerate(lengths) for _ in range(length)]
    pieces: list[int] = []
    piece = 0
    for unit in units:
        block = job.anatomy.block_of(unit.name)
        piece = starts[block] if block >= 0 else piece
        pieces.append(piece)
    return pieces


def parts_of(units: Sequence[UnitWork], job: ComposedJob, rank: int) -> list[UnitPart]:
    """Return the units of a rank of the pipeline; the last one has copies of tied weights, too."""
    axes, parts = job.axes, list[UnitPart]()
    pieces = pieces_of(units, job)
    last = (axes.num_pieces - 1) % axes.pp
    for index, (unit, piece) in enumerate(zip(units, pieces, strict=True)):
        everyone = tuple(range(len(unit.members)))
        if piece % axes.pp == rank:
            counts = [expert_count(member.fqn, member.shape) for member in unit.members]
            experts = tuple(i for i in everyone if axes.ep > 1 and counts[i] > 0)
            others = tuple(i for i in everyone if i not in experts)
            parts += [UnitPart(index, piece, others)] if others or not everyone else []
            kept = tuple(i for i in experts if _is_kept(unit.members[i], job))
            parts += [UnitPart(index, piece, kept, is_expert=True)] if kept else []
        elif rank == last and (tied := _tied(unit, piece, job)):
            parts.append(UnitPart(index, axes.num_pieces - 1, tied, is_tied=True))
    return parts


def _tied(unit: UnitWork, piece: int, job: ComposedJob) -> tuple[int, ...]:
    """Return the members of a table's unit that a head uses, too."""
    if piece > 0 or job.axes.pp == 1 or job.anatomy.block_of(unit.name) >= 0:
        return ()
    return tuple(i for i, member in enumerate(unit.members) if member.fqn in job.anatomy.tied)


def _is_kept(member: Member, job: ComposedJob) -> bool:
    """True if a rank of ep has the expert: all of a stack are cut, of a list it has the first."""
    is_listed = len(member.shape) <= 2
    own = ceil(job.anatomy.experts / job.axes.ep)
    return not is_listed or expert_count(member.fqn, member.shape) <= own


def cut_member(member: Member, job: ComposedJob, *, in_block: bool) -> Member:
    """Cut a parameter as tp and ep do: matrices along one dimension; vectors are held whole.

    It is the first dimension that tp divides, and of a stack of experts one behind the experts.
    """
    shape, tp = list(member.shape), job.axes.tp
    is_stack = len(shape) > 2 and expert_count(member.fqn, member.shape) > 0
    if is_stack and job.axes.ep > 1:
        shape[0] = ceil(shape[0] / job.axes.ep)
    if tp > 1 and len(shape) > 1 and not member.is_packed:
        share = job.tp_share if in_block else 1 / tp
        at = range(1 if is_stack else 0, len(shape))
        chosen = next((i for i in at if shape[i] % tp == 0), at[0])
        exact = shape[chosen] * share
        shape[chosen] = ceil(round(exact, 6))
    return replace(member, shape=tuple(shape))


def units_of(
    units: Sequence[UnitWork],
    parts: Sequence[UnitPart],
    job: ComposedJob,
    recomputed: frozenset[int],
) -> tuple[UnitWork, ...]:
    """Return the units of a rank: members, work and messages. `recomputed`: in the trace itself."""
    pieces, axes, cut_units = pieces_of(units, job), job.axes, list[UnitWork]()
    expert_ranks = job.recipe.world_size // (axes.tp * axes.pp * axes.ep)
    for part in parts:
        unit, block = units[part.unit], job.anatomy.block_of(units[part.unit].name)
        members = tuple(cut_member(unit.members[i], job, in_block=block >= 0) for i in part.members)
        numel = sum(member.numel for member in members)
        if not unit.members:
            numel = ceil(unit.numel * (job.tp_share if block >= 0 else 1 / job.axes.tp))
        is_copied = bool(_tied(unit, pieces[part.unit], job))
        has_work = part.is_tied == is_copied and not part.is_expert  # a head's, not a table's
        cut_units.append(
            replace(
                unit,
                name=f"{unit.name}.experts" if part.is_expert else unit.name,
                numel=numel,
                members=members,
                forward=_scaled(unit.forward, job.share) if has_work else Work(),
                backward=_scaled(unit.backward, job.share) if has_work else Work(),
                messages=_messages(units, part, pieces, job, part.unit in recomputed),
                data_ranks=expert_ranks if part.is_expert else 0,
            )
        )
    return tuple(cut_units)


def _scaled(work: Work, share: float) -> Work:
    """Return a share of the work, in as many kernels."""
    return Work().plus(work, share)._replace(num_kernels=work.num_kernels)


def _messages(
    units: Sequence[UnitWork],
    part: UnitPart,
    pieces: Sequence[int],
    job: ComposedJob,
    is_recomputed: bool,
) -> tuple[AxisMessage, ...]:
    """Return the messages of a unit on the model axes, in one micro-batch.

    A block has two all-reduces of tp in forward, behind attention and behind the feed-forward, and
    two in backward; a table one in forward, a head one in backward. Attention has all-to-alls of
    queries, keys, values and its output, experts two, of the tokens and back.
    """
    axes, anatomy, index = job.axes, job.anatomy, part.unit
    block = anatomy.block_of(units[index].name)
    again, sent = int(is_recomputed), list[AxisMessage]()
    hidden, message = job.hidden_nbytes, job.message
    if part.is_expert:
        nbytes = anatomy.active * job.sent_hidden_nbytes
        return (message("ep", nbytes, 2, 2 + 2 * again),)
    is_first = index == 0 or units[index - 1].name.partition(" (")[0] != units[index].name
    if block >= 0 and is_first and not part.is_tied:
        sent += [message("tp", hidden, 2, 2 + 2 * again)] if axes.tp > 1 else []
        if axes.cp > 1:
            kv = anatomy.kv_heads / anatomy.heads if anatomy.heads else 1.0
            nbytes = (2 + 2 * kv) * job.sent_hidden_nbytes
            sent.append(message("cp", nbytes, 1, 1 + again))
    elif axes.tp > 1 and not part.is_tied and index == 0:
        sent.append(message("tp", hidden, 1, 0))
    is_last = index + 1 == len(units)
    if axes.tp > 1 and is_last and block < 0:  # a head that shares the table's weight is a copy
        sent.append(message("tp", hidden, 0, 1))
    is_end = is_last or pieces[index + 1] != pieces[index]
    if is_end and axes.pp > 1 and not part.is_tied:
        piece, nbytes = pieces[index], job.sent_hidden_nbytes
        sends = int(piece + 1 < axes.num_pieces), int(piece > 0)
        sent.append(message("pp", nbytes, *sends))
    return tuple(sent)


def rank_trace(trace: Trace, job: ComposedJob, rank: int, num_micro: int) -> Trace:
    """Return the trace of a micro-batch on a rank of the pipeline, with the others in flight."""
    parts = parts_of(trace.units, job, rank)
    again = frozenset(e.unit for e in trace.events if e.kind is EventKind.AGAIN)
    units = units_of(trace.units, parts, job, again)
    events = _Events(trace, parts, job, rank).all()
    has_batch = rank in (0, (job.axes.num_pieces - 1) % job.axes.pp)
    others = max(0.0, job.axes.in_flight(rank, num_micro) - 1)
    shift = ceil(others * kept_nbytes(events, units, job))
    moved = tuple(replace(e, now=e.now + shift, peak=e.peak + shift) for e in events)
    batch = ceil(trace.batch_nbytes / job.axes.cp) if has_batch else 0
    return Trace(units, moved, batch, trace.buffers_nbytes)


def kept_nbytes(events: Sequence[Event], units: Sequence[UnitWork], job: ComposedJob) -> int:
    """Return the bytes that a micro-batch keeps on a rank between forward and backward.

    Those of a head come and go at once: its backward follows.
    """
    kept = 0
    for event in events:
        if event.kind is EventKind.END_FORWARD:
            break
        if event.kind is EventKind.LEAVE and job.anatomy.block_of(units[event.unit].name) >= 0:
            kept = event.now
    return kept


class _Events:
    """Reads a model's events and keeps those of one rank, with the bytes that the rank holds."""

    def __init__(
        self, trace: Trace, parts: Sequence[UnitPart], job: ComposedJob, rank: int
    ) -> None:
        self._trace, self._job, self._rank = trace, job, rank
        self._pieces = pieces_of(trace.units, job)
        self._parts: dict[int, list[tuple[int, UnitPart]]] = {}
        for index, part in enumerate(parts):
            self._parts.setdefault(part.unit, []).append((index, part))
        self._due = [  # gradients that have not come: position of the unit, of the member
            (index, position)
            for index, part in enumerate(parts)
            for position, i in enumerate(part.members)
            if trace.units[part.unit].members[i].requires_grad
        ]
        self._held = self._peak = self._logits = 0.0
        self._received = 0  # inputs that came from the rank before
        self._again = frozenset(e.unit for e in trace.events if e.kind is EventKind.AGAIN)
        self._whole = 0  # blocks whose gathered inputs are alive
        self._block = -1  # whose backward runs
        self._found: list[Event] = []

    def all(self) -> list[Event]:
        """Return the events of the rank, with those at the ends of forward and backward."""
        piece, before = 0, 0
        piece_of_call: dict[int, int] = {}
        entered = {0}
        for event in self._trace.events:
            kind, own = event.kind, piece
            if kind is EventKind.ENTER:
                piece = max(piece, self._pieces[event.unit])
            if kind in (EventKind.ENTER, EventKind.AGAIN):
                piece_of_call[event.call] = piece
            elif kind in (EventKind.LEAVE, EventKind.EXPECT):
                own = piece_of_call[event.call]
            elif kind is EventKind.BACKWARD:
                piece = piece_of_call[event.call]
            self._work(event, before, own)
            before = event.now
            if self._is_own(piece) and piece not in entered:
                entered.add(piece)
                self._received += 1
            if kind in (EventKind.END_FORWARD, EventKind.END):
                self._end(event)
            elif self._is_own(piece):
                self._count_whole(event)
                self._note_parts(event)
        return self._found

    def _is_own(self, piece: int) -> bool:
        return piece % self._job.axes.pp == self._rank

    def _work(self, event: Event, before: int, piece: int) -> None:
        """Count the bytes since the event before, if the rank has the piece that made them."""
        if self._is_own(piece):
            self._peak = max(self._peak, self._held + event.peak - before)
            self._held += event.now - before
            self._logits = max(self._logits, event.logits)

    def _count_whole(self, event: Event) -> None:
        """Count the blocks whose gathered inputs are alive: from forward, or from recompute."""
        block_of, units = self._job.anatomy.block_of, self._trace.units
        block = block_of(units[event.unit].name)
        is_first = event.unit == 0 or block != block_of(units[event.unit - 1].name)
        if block < 0 or not is_first:
            return
        is_kept = event.unit not in self._again
        if event.kind is EventKind.LEAVE and is_kept and self._block < 0:
            self._whole += 1
        elif event.kind is EventKind.BACKWARD and block != self._block:
            self._whole += (not is_kept) - (self._block >= 0)
            self._block = block

    def _note_parts(self, event: Event) -> None:
        for index, part in self._parts.get(event.unit, ()):
            call = event.call * 2 + part.is_expert
            if event.kind is EventKind.GRAD:
                if event.call not in part.members:
                    continue
                call = part.members.index(event.call)
                self._due.remove((index, call))
            self._add(replace(event, unit=index, call=call))

    def _end(self, event: Event) -> None:
        if event.kind is EventKind.END:
            self._whole = 0
            for unit, member in self._due:
                self._add(Event(EventKind.GRAD, unit, member))
        self._add(event)

    def _add(self, event: Event) -> None:
        """Add an event with the bytes of now."""
        share, received = self._job.share, self._received * self._job.sent_hidden_nbytes
        # a rank of tp keeps the two gathered inputs of a block besides its share
        received += self._whole * 2 * (self._job.hidden_nbytes - self._job.sent_hidden_nbytes)
        now, peak, logits = (
            ceil(round(share * nbytes, 3)) for nbytes in (self._held, self._peak, self._logits)
        )
        more = ceil(received)
        now, peak = max(now, 0) + more, max(peak, 0) + more
        self._found.append(replace(event, now=now, peak=max(peak, now), logits=min(logits, peak)))
        self._peak, self._logits = self._held, 0.0
