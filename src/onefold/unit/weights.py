"""UnitWeights: the weights of one unit at rest, for a parameter of n elements over N ranks.

    weight   [n/N] (or [n] if replicated)  in the parameter's own dtype; sharded parameters show it
    master   like weight, wider            only where the own dtype is narrower than the master
    moments  like master                   where the unit is offloaded; else the optimizer's own

Edits are counted, so that gathered weights, fetched rows and masters are known to be out of date.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor

from onefold.errors import TierError
from onefold.layout.ledger import Kind
from onefold.layout.observer import Stream, watched
from onefold.tier import accelerator
from onefold.tier.files import FileRows
from onefold.tier.scratch import Pieces
from onefold.tier.slots import Room
from onefold.tier.store import Store
from onefold.tier.workers import Task
from onefold.unit import refusals
from onefold.unit.buffer import Buffer
from onefold.unit.context import Context, UnitSpec
from onefold.unit.parameter import UnitParameter
from onefold.wire import fused
from onefold.wire.ticket import Ticket, Waitable

_VERSION = attrgetter("_version")


class Edits:
    """Counts the changes of a unit's weights at rest.

    Version counters tell most changes. `bump` counts those that torch does not.
    """

    def __init__(self, weight: Buffer) -> None:
        self._weight = weight
        self._sharded: list[Tensor] = []
        self._watched: list[Tensor] = []  # these, and `.data` of some, once taken
        self._num_at_rest = self._num_others = 0

    def watch(self, sharded: Tensor) -> None:
        """Count the changes of a sharded parameter, too."""
        self._sharded.append(sharded)
        self._watched.append(sharded)

    def watch_data(self, data: Tensor) -> None:
        """Count the changes by way of `.data` of a sharded parameter, too."""
        self._watched.append(data)

    def bump(self, *, at_rest: int = 0, others: int = 0) -> None:
        """Count changes that `at_rest` tells, and others that only `all` tells."""
        self._num_at_rest += at_rest
        self._num_others += others

    def at_rest(self) -> int:
        """Changes, less those by way of `.data` and those in place that a forward made."""
        with torch._C.DisableTorchFunctionSubclass():
            counted = sum(map(_VERSION, self._sharded))
        return counted + self._weight.tensor._version + self._num_at_rest

    def all(self) -> int:
        """Every change of the weights at rest."""
        with torch._C.DisableTorchFunctionSubclass():
            counted = sum(map(_VERSION, self._watched))
        return counted + self._weight.tensor._version + self._num_at_rest + self._num_others


class OwnRows:
    """The flat rows of a weight that may rest in a far tier."""

    def __init__(self, weight: Buffer, context: Context, unit: str) -> None:
        self._weight = weight
        self._ledger = context.ledger
        self._unit = unit
        self._tiers = context.tiers
        self._slot: Room | None = None
        self._task: Task | None = None
        self._edits = -1  # of the weight, when the fetch began
        self._copied: accelerator.Event | None = None  # copies from rows that rest near end with it

    def start(self, edits: int, after: Waitable | None) -> None:
        """Begin to fetch the rows, once `after` is over; nothing to do where they rest near."""
        far = self._weight.far
        if far is None or (self._task is not None and self._edits == edits):
            return
        self.give_back()
        self._edits = edits
        slot = self._slot = self._tiers.slots.take_slot(self._weight.tensor.nbytes)
        near = slot.tensor(len(self._weight.tensor), self._weight.tensor.dtype)

        def fetch() -> None:
            if after is not None:
                after.wait()
            with watched(self._ledger.observer, Stream.TIER, "fetch", self._unit, near.nbytes):
                far.fetch(0, near)

        self._task = self._tiers.fetchers.give(fetch)

    def rows_after(self, edits: int) -> Tensor:
        """The rows as they are after `edits`, valid until `give_back`. Raises `TierError`."""
        self.start(edits, None)
        assert self._task is not None, "a fetch was just begun"
        assert self._slot is not None, "a fetch has a slot"
        self._task.wait()
        return self._slot.tensor(len(self._weight.tensor), self._weight.tensor.dtype)

    def read_into(self, full: Tensor) -> Ticket:
        """Begin to read all rows straight into `full`, whose memory ends with a whole page.

        Pieces are read in order, by the fetchers and by the thread that waits.
        """
        weight, far = self._weight.tensor, self._weight.far
        assert far is not None, "rows in memory are not read"

        def piece(start: int, stop: int) -> None:
            first, last = start // weight.itemsize, stop // weight.itemsize
            with watched(self._ledger.observer, Stream.TIER, "fetch", self._unit, stop - start):
                far.fetch(first, full[first:last])

        return Ticket([Pieces(self._tiers.fetchers, weight.nbytes, piece)])

    def give_back(self) -> None:
        """Return the slot of fetched rows; waits for a fetch that is still under way."""
        task, self._task = self._task, None
        slot, self._slot = self._slot, None
        if task is not None and slot is not None:
            task.await_end()
            self._tiers.slots.give(slot)

    def leave_by(self, event: accelerator.Event) -> None:
        """Copies of the rows to the device end with `event`."""
        if self._slot is None:
            self._copied = event
        else:
            self._slot.leave_by(event)

    def await_copies(self) -> None:
        """Wait, on the host, until no copy reads rows that rest near: they may be edited."""
        copied, self._copied = self._copied, None
        if copied is not None:
            accelerator.await_event(copied)

    def await_fetch(self) -> None:
        """Wait for a fetch that is under way; its rows stay. `rows_after` raises its error."""
        if self._task is not None:
            self._task.await_end()


class UnitWeights:
    """This rank's rows of a unit's weights, masters and moments, and how often they changed."""

    def __init__(self, spec: UnitSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self.context = spec.context
        self.dtype, self.compute_dtype = spec.dtype, spec.compute_dtype
        self.rest, self.wire = spec.rest, spec.wire
        self.is_offloaded, self.is_resident = spec.is_offloaded, spec.is_resident
        self.steps_in_blocks = spec.steps_in_blocks
        self.parameters: list[UnitParameter] = []
        self.pending: Waitable | None = None  # the step that is under way in the background
        self.failure: TierError | None = None  # of that step, or of a fetch: it stays
        context, numel = spec.context, spec.rest.shard_numel(spec.context.rest_rank)
        tiers, ledger = context.tiers, context.ledger
        self.weight = Buffer(numel, self.dtype, Kind.WEIGHT, tiers.weight, ledger)
        self.files_edits: int | None = None  # all edits of rows in files, which never change
        if not isinstance(self.weight.far, FileRows):
            self.weight.tensor.zero_()
        self.rows = OwnRows(self.weight, context, self.name)
        self.master: Buffer | None = None
        self.moments: dict[str, Buffer] = {}
        # who steps a parameter by a moment: the binding of an optimizer
        self._keepers: dict[tuple[UnitParameter, str], ReferenceType[object]] = {}
        self.averages: list[ReferenceType[Buffer]] = []  # own rows that others keep of the unit
        self.edits = Edits(self.weight)
        self._shown = WeakSet[Tensor]()  # detached shards, whose edits are not counted
        self._published = -1  # all edits when the weight and its master agreed
        is_narrow = self.dtype.is_floating_point and context.master.itemsize > self.dtype.itemsize
        is_elsewhere = spec.is_offloaded and tiers.weight.device != tiers.state.device
        self._wide = context.master if is_narrow else self.dtype if is_elsewhere else None
        if spec.is_packed:
            self._wide = None
        if spec.is_trained:
            self._make_master()

    @property
    def state_store(self) -> Store:
        """The tier of masters and moments."""
        return self.context.tiers.state if self.is_offloaded else self.context.store

    @property
    def stepped(self) -> Tensor:
        """The flat tensor that the optimizer steps: the master, or the weight itself."""
        return self.weight.tensor if self.master is None else self.master.tensor

    def _make_master(self) -> None:
        """Allocate a master [own rows], where the unit needs one; its values follow."""
        if self._wide is not None:
            numel, ledger = len(self.weight.tensor), self.context.ledger
            self.master = Buffer(numel, self._wide, Kind.MASTER, self.state_store, ledger)
            self.master.tensor.zero_()

    def drop_master(self) -> None:
        """Free the master of parameters that were frozen before any step."""
        if not self.requires_grad() and not self.moments:
            self.master = None

    def make_moments(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Allocate zeros [own rows] for optimizer states, by name."""
        for name, dtype in dtypes.items():
            if name not in self.moments:
                numel, ledger = len(self.weight.tensor), self.context.ledger
                moment = Buffer(numel, dtype, Kind.OPTIMIZER, self.state_store, ledger)
                if moment.far is None:  # else the file is new, and reads as zeros
                    moment.tensor.zero_()
                self.moments[name] = moment

    def keep_moment(self, parameter: UnitParameter, name: str, keeper: object) -> None:
        """Note who keeps a parameter's state in a moment; raise `StateError` for a second one."""
        known = self._keepers.get((parameter, name), lambda: None)()
        if known is not None and known is not keeper:
            raise refusals.TWO_KEEPERS(parameter.fqn, name, where=self.context.where)
        self._keepers[parameter, name] = ref(keeper)

    def row_buffers(self) -> list[Buffer]:
        """Return the buffers of own rows, in the same order on every rank, moments last."""
        averages = [average() for average in self.averages]
        moments = [self.moments[name] for name in sorted(self.moments)]
        buffers = [self.weight, self.master, *averages, *moments]
        return [buffer for buffer in buffers if buffer is not None]

    def begin_step(self, step: Waitable) -> None:
        """A step of the unit runs in the background."""
        self.pending = step

    def note_failure(self, failure: TierError) -> None:
        """A step or a fetch failed: the weights are lost."""
        self.failure = failure

    def join_step(self, *, raises: bool = False) -> None:
        """Wait for the step that runs in the background; note its failure, if it failed.

        Raises `TierError` if it did, with `raises`.
        """
        if self.pending is not None:
            try:
                with watched(self.context.ledger.observer, Stream.COMPUTE, "wait_step", self.name):
                    self.pending.wait()
            except TierError as error:
                self.failure = error
            self.pending = None  # not before: an interrupted wait is waited for again
        if raises and self.failure is not None:
            raise self.failure

    def wait_step(self) -> None:
        """Let users read and edit own rows: wait for the step, and for copies of the rows.

        Raises `TierError` if the step failed.
        """
        self.join_step(raises=True)
        self.rows.await_copies()

    def forget(self) -> None:
        """Free memory in which users, or a checkpoint, read state of a far tier."""
        if self.weight.far is None and not self.is_offloaded:
            return
        for buffer in (self.weight, self.master, *self.moments.values()):
            if buffer is not None and buffer.far is not None:
                buffer.far.forget()

    def own_rows(self, numels: list[int]) -> Sequence[Tensor]:
        """Own rows, near until `rows.give_back`, as `numels` split them. Raises `TierError`."""
        if self.weight.far is None:
            return self.weight.parts(numels)[1::2]
        return self.rows.rows_after(self.edits.all()).split_with_sizes(numels)[1::2]

    def requires_grad(self) -> bool:
        """True if a parameter requires a gradient now."""
        with torch._C.DisableTorchFunctionSubclass():
            return any(parameter.sharded.requires_grad for parameter in self.parameters)

    # masters

    def note_shown(self, weight: Tensor) -> None:
        """A detached shard was given out (`state_dict`), whose edits are not counted."""
        if self.master is not None:
            self._shown.add(weight)
            self._published = -1

    def refresh_master(self) -> None:
        """Copy edited weights (a loaded state dict) into the master; make it for unfrozen ones."""
        if self.master is None and self._wide is not None and self.requires_grad():
            self._make_master()
        if self.master is None:
            return
        # a device's list kernels change plain parameters without counting it
        is_counted = not self.spec.computes_on_sharded or self.weight.tensor.device.type == "cpu"
        if is_counted and not self._shown and self._published == self.edits.all():
            return
        master = self.master.tensor
        weight = self.weight.tensor.to(master.device)
        with torch.no_grad():
            if not fused.adopt(weight, master):
                untouched = weight == master.to(weight.dtype)
                master.copy_(torch.where(untouched, master, weight.to(master.dtype)))
        self._published = self.edits.all()

    def publish(self, *, is_rounded: bool) -> None:
        """Round the stepped master into the weight, unless that `is_rounded` already."""
        self.edits.bump(at_rest=1)  # fused kernels do not count what they change
        if self.master is not None:
            if not is_rounded:
                with torch.no_grad():
                    self.weight.tensor.copy_(self.master.tensor)
            self._published = self.edits.all()
