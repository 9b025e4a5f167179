"""The gradient of one unit: partial on every rank, then reduced to where it rests.

While backward runs, autograd leaves this rank's gradient on the whole weight (`whole.grad`), where
micro-batches add up; that is the Partial placement, and nothing is copied for it. A reduction sends
it from there, and what comes back is the face's `.grad`:

    world 1             the partial gradient itself
    optimizer sharded   own rows of the mean, a slice of one flat shard buffer
    stage 0             the mean whole, a slice of one flat buffer: rows reduced, then gathered

Every message carries one number per parameter and destination: whether this rank used it. So a
parameter that no rank used keeps `grad is None` on all of them, as in plain PyTorch, and an
optimizer leaves it alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

import torch
from torch import Tensor

from onefold.errors import StateError
from onefold.ledger import Kind
from onefold.ticket import DONE, Ticket
from onefold.unit.buffer import Buffer
from onefold.unit.logical import NoMean
from onefold.unit.node_reduction import reduction_of
from onefold.unit.parameter import UnitParameter
from onefold.unit.unit import Unit


class UnitGradient:
    """Partial and reduced gradients of a unit's parameters."""

    def __init__(self, unit: Unit) -> None:
        self._unit = ref(unit)
        self.fired: set[UnitParameter] = set()  # accumulated in the running backward
        self._num_awaited = 0
        self._spans: dict[UnitParameter, tuple[int, int]] = {}
        self._resting: dict[UnitParameter, Tensor] = {}  # `.grad` of faces with a resting partial
        self._due: set[UnitParameter] = set()  # trained by a micro-batch that rests; on every rank
        self.is_unused = False  # by every rank, in the last backward
        self.is_spent = False  # stepped in backward, and freed: until the optimizer's step
        self.is_discarding = False  # an aborted backward: results that still arrive are dropped
        self.partial: dict[UnitParameter, int] = {}  # bytes waiting to be reduced
        self.reduced: Buffer | None = None
        self._reduced_at = -1  # steps that were done when a mean was last shown
        self.is_last = True  # of the micro-batches: nodes may talk now
        self.reduction = reduction_of(self)
        self._following = DONE  # what comes after the first hop of a reduction
        self._gap_index: Tensor | None = None
        self._local_nbytes = 0  # world 1, where gradients stay the tensors autograd made
        self._ledger, self._tier = unit.setting.ledger, unit.setting.store.name
        self.shown: dict[UnitParameter, Tensor] = {}  # the `.grad` we gave each face

    @property
    def unit(self) -> Unit:
        unit = self._unit()
        assert unit is not None, "a gradient outlived its unit"
        return unit

    def check_there(self, parameter: UnitParameter) -> None:
        """Raise `StateError` if the parameter's gradient was used up by a step in backward."""
        if self.is_spent:
            raise StateError(parameter.why_spent())

    def spend(self) -> None:
        """Its values are being stepped by: show none, and let whoever steps have the buffer."""
        self.is_spent = True
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self.unit.parameters:
                parameter.face.grad = None
        self.shown.clear()
        self._resting.clear()
        self.reduced = None
        self._count_local()

    # partial

    def trainable(self) -> list[UnitParameter]:
        """Those that are reduced: they require a gradient now, or did in one that rests."""
        with torch._C.DisableTorchFunctionSubclass():
            return [p for p in self.unit.parameters if p.face.requires_grad or p in self._due]

    def note_fired(self, parameter: UnitParameter) -> bool:
        """Count a gradient that autograd has just accumulated; True if the unit is now complete."""
        if not self.fired:
            self._num_awaited = len(self.trainable())
        self.fired.add(parameter)
        if parameter not in self.partial:
            self._hold(parameter, parameter.slot.numel * self.unit.compute_dtype.itemsize)
        return len(self.fired) == self._num_awaited

    def _hold(self, parameter: UnitParameter, nbytes: int) -> None:
        self.partial[parameter] = nbytes
        self._ledger.add(Kind.PARTIAL_GRAD, self._tier, nbytes)

    def _count_reduced(self, parameters: Iterable[UnitParameter]) -> None:
        nbytes = sum(self.partial.pop(parameter, 0) for parameter in parameters)
        self._ledger.add(Kind.PARTIAL_GRAD, self._tier, -nbytes)

    def rest_partial(self) -> None:
        """Micro-batches go on: show resting partials on faces, so that clearing them is seen."""
        self.fired.clear()
        self._due.update(self.trainable())
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for parameter in self.partial:
                grad = parameter.whole.grad
                if grad is None or parameter.whole is parameter.face:
                    continue
                if parameter.face.grad is None:
                    parameter.face.grad = parameter.wrap_partial(grad)
                self._resting[parameter] = parameter.face.grad  # type: ignore[assignment]

    def _drop_cleared_partials(self) -> None:
        """Forget partials whose face was cleared (`zero_grad`) since they came to rest."""
        if self._resting:
            cleared = [p for p, shown in self._resting.items() if p.face.grad is not shown]
            for parameter in cleared:
                parameter.whole.grad = None
                del self._resting[parameter]
            self._count_reduced(cleared)
            self.reduction.drop(cleared)

    def _take_back_partials(self) -> None:
        """Partials are about to be reduced: faces show only what is reduced already."""
        for parameter, shown in self._resting.items():
            is_reduced = shown is self.shown.get(parameter)
            if parameter.face.grad is shown and not is_reduced:
                parameter.face.grad = None
        self._resting.clear()

    def drop_partial(self) -> list[UnitParameter]:
        """Forget gradients that were not reduced; returns those of which micro-batches rested."""
        self.fired.clear()
        self._due.clear()
        with torch._C.DisableTorchFunctionSubclass():
            before = {p: p.face.grad for p in self._resting}
            self._take_back_partials()
            lost = [p for p, shown in before.items() if p.face.grad is not shown]
            for parameter in self.partial:
                if parameter.whole is not parameter.face:  # else as in plain PyTorch
                    parameter.whole.grad = None
        self._count_reduced(list(self.partial))
        self.reduction.drop(self.unit.parameters)
        return lost

    def lose(self) -> None:
        """A backward failed: forget what is not reduced. Faces whose earlier sums go say so."""
        for parameter in self.drop_partial():
            parameter.face.grad = parameter.mean_lost()

    def check_whole(self) -> None:
        """Raise `StateError` if sums were lost, and nobody has cleared them since."""
        with torch._C.DisableTorchFunctionSubclass():
            grads = [(p, p.face.grad) for p in self.unit.parameters]
        for parameter, shown in grads:
            if isinstance(shown, NoMean) and parameter not in self._resting | self.shown:
                shown.refuse()

    def begin(self, *, is_last: bool) -> None:
        """A backward begins: of the last micro-batch, or nodes do not talk yet."""
        self.check_whole()
        self.is_last = is_last
        self.drop_cleared()

    # between micro-batches, for checkpoints

    def accumulated(self) -> tuple[dict[UnitParameter, Tensor], dict[UnitParameter, Tensor]]:
        """What backward has left since the last step: own rows of means, and whole partials."""
        with torch._C.DisableTorchFunctionSubclass():
            partial = {p: p.whole.grad for p in self.partial if p.whole.grad is not None}
            means = {
                p: p.unwrap(grad)
                for p in self.unit.parameters
                if (grad := p.face.grad) is not None
                and not isinstance(grad, NoMean)
                and self._reduced_at == self._ledger.steps
                and (p not in partial or grad is self.shown.get(p))
            }
        return means, partial

    def restore(
        self, means: dict[UnitParameter, Tensor], partial: dict[UnitParameter, Tensor]
    ) -> None:
        """Undo `accumulated`, in place of whatever gradients there are."""
        self.drop_partial()
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for parameter in self.unit.parameters:
                parameter.face.grad = None
            self.drop_cleared()
            if means and self.unit.setting.world_size > 1:
                self.prepare_reduced(list(means))
            for parameter, mean in means.items():
                if self.unit.setting.world_size > 1:
                    mean = self._rest_view(parameter).copy_(mean)
                self.shown[parameter] = parameter.face.grad = parameter.wrap_grad(mean)
            for parameter, grad in partial.items():
                parameter.whole.grad = grad
                self._hold(parameter, grad.nbytes)
        self._reduced_at = self._ledger.steps
        self.rest_partial()

    # reduced

    def start_reduce(self) -> Ticket:
        """Begin averaging over the ranks; the ticket's `wait` shows the result on the faces.

        Where a second hop follows it begins that, and `end_following` shows the result.
        """
        parameters = self.trainable()
        self.unit.await_step()  # it may still read what is written now
        for parameter in parameters:
            self.check_there(parameter)
        if self.unit.setting.world_size == 1:
            self.fired.clear()
            self._due.clear()
            return Ticket(finish=lambda: self._keep_local(parameters))
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return self._start_reduce(parameters)

    def _keep_local(self, parameters: list[UnitParameter]) -> None:
        """World 1: the partial gradient is the mean already."""
        if self.is_discarding:
            return
        self._reduced_at = self._ledger.steps
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._take_back_partials()
            for parameter in parameters:
                grad, face = parameter.whole.grad, parameter.face
                if grad is None or parameter.whole is face:
                    continue
                mean = grad.to(parameter.local.dtype)
                existing = face.grad
                if existing is not None:
                    parameter.unwrap(existing).add_(mean)
                else:
                    self.shown[parameter] = face.grad = parameter.wrap_grad(mean)
                parameter.whole.grad = None
                parameter.call_hooks()
        self._count_reduced(parameters)
        self._count_local()

    def _count_local(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            grads = [p.face.grad for p in self.unit.parameters]
        now = sum(grad.nbytes for grad in grads if grad is not None)
        self._ledger.add(Kind.GRAD, self._tier, now - self._local_nbytes)
        self._local_nbytes = now

    def __del__(self) -> None:
        self._ledger.add(Kind.GRAD, self._tier, -self._local_nbytes)
        self._ledger.add(Kind.PARTIAL_GRAD, self._tier, -sum(self.partial.values()))

    def _start_reduce(self, parameters: list[UnitParameter]) -> Ticket:
        self.drop_cleared()
        self._take_back_partials()
        used = [p.whole.grad is not None for p in parameters]
        partials = [self._flat_partial(p) for p in parameters]
        ticket = self.reduction.start(parameters, partials, used)
        for parameter in parameters:
            parameter.whole.grad = None
        self.fired.clear()

        def finish() -> None:
            partials.clear()
            self._finish_reduce(parameters, used)

        return ticket.then(finish)

    def _finish_reduce(self, parameters: list[UnitParameter], used: list[bool]) -> None:
        """The first hop is over: show the mean, or begin what follows."""
        self._count_reduced(parameters)
        if self.is_discarding:
            return
        users = self._users(parameters, used)
        if self.reduction.rests_between and not self.is_last:
            self._due.update(parameters)
            self._show_resting(users)
            return
        self._due.clear()
        following = self.reduction.go_on(parameters, users)
        if following is None or not self.unit.setting.is_sharded:
            self.is_unused = not users
            self._following = (following or DONE).then(lambda: self.show_all(users))
        else:

            def show() -> None:
                found = self._users(parameters, [False])  # other nodes may have used more
                self.is_unused = not found
                self.show_all(found)

            self._following = following.then(show)
        if self.reduction.finishes_alone:
            self.end_following()

    def _users(self, parameters: list[UnitParameter], used: list[bool]) -> list[UnitParameter]:
        """Which parameters some rank has used, from the counts that came with the gradients."""
        counts = self.reduction.counts
        if counts.device.type == "cpu":
            self.reduction.check_tag(counts[-1].item())
        if not all(used):  # only then is it worth asking the device what the others did
            used = [count != 0 for count in counts[:-1].tolist()]
        return [p for p, is_used in zip(parameters, used, strict=True) if is_used]

    def _show_resting(self, used: list[UnitParameter]) -> None:
        """Until nodes talk faces show that there is something, so that clearing it is seen."""
        resting, in_place = self.reduction.rest(used), self.reduction.rests_in_place
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for parameter in resting:
                if parameter.face.grad is None:
                    parameter.face.grad = parameter.mean_to_come()
                    if in_place:
                        self.shown[parameter] = parameter.face.grad
                self._resting[parameter] = parameter.face.grad  # type: ignore[assignment]

    def end_following(self) -> None:
        """Wait for what comes after the first hop of the last reduction, if it is not over."""
        following, self._following = self._following, DONE
        following.wait()

    def show_all(self, parameters: Iterable[UnitParameter]) -> None:
        if self.is_discarding:
            return
        self._reduced_at = self._ledger.steps
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for parameter in parameters:
                self._show(parameter)

    def _show(self, parameter: UnitParameter) -> None:
        view = self._rest_view(parameter)
        shown = parameter.face.grad
        if shown is None or parameter.face is parameter.whole or isinstance(shown, NoMean):
            self.shown[parameter] = parameter.face.grad = parameter.wrap_grad(view)
        parameter.call_hooks()

    def prepare_reduced(self, parameters: list[UnitParameter]) -> list[bool]:
        """Make room for the mean; for each parameter, whether it replaces what is there."""
        unit, setting = self.unit, self.unit.setting
        if self.reduced is None:
            numel = unit.rest.shard_numels[setting.rest_rank]
            self.reduced = Buffer(
                numel, unit.dtype, Kind.GRAD, setting.store, setting.ledger,
                is_brief=not self._keeps_bytes,
            )  # fmt: skip
            self.reduced.tensor.index_fill_(0, self._gaps(), 0)  # optimizers read them too
        fresh: list[bool] = []
        for parameter in parameters:
            grad = parameter.face.grad
            adds = grad is not None and parameter.face is not parameter.whole
            fresh.append(not adds)
            if adds and grad is not None and grad is not self.shown.get(parameter):
                self._rest_view(parameter).copy_(parameter.unwrap(grad))
                shown = parameter.wrap_grad(self._rest_view(parameter))
                self.shown[parameter] = parameter.face.grad = shown
        return fresh

    def _gaps(self) -> Tensor:
        """int64: the elements of the reduced buffer that no reduction writes."""
        if self._gap_index is None:
            gaps, setting = self.unit.rest.gaps(self.unit.setting.rest_rank), self.unit.setting
            self._gap_index = torch.tensor(gaps, dtype=torch.int64, device=setting.store.device)
        return self._gap_index

    def drop_cleared(self) -> None:
        """Free the reduced buffer once no face shows a piece of it (after `zero_grad`).

        At stages 0 to 2 it stays for the next backward, unless the user kept a gradient.
        """
        if self._local_nbytes:
            self._count_local()
        with torch._C.DisableTorchFunctionSubclass():
            self._drop_cleared_partials()
        if self.reduced is None:
            return
        with torch._C.DisableTorchFunctionSubclass():
            cleared = [p for p, shown in self.shown.items() if p.face.grad is not shown]
        for parameter in cleared:
            del self.shown[parameter]
        if self._reduced_at == self._ledger.steps:  # nothing was stepped by them
            self.reduction.feedback.forget(cleared)
        if not self.shown and not (self._keeps_bytes and self.reduced.num_users == 1):
            self.reduced = None

    @property
    def _keeps_bytes(self) -> bool:
        """Stages 0 to 2, as for whole weights, unless states are offloaded to save memory."""
        unit = self.unit
        return not unit.steps_in_blocks and (unit.keeps_bytes or not unit.setting.is_sharded)

    def _flat_partial(self, parameter: UnitParameter) -> Tensor:
        grad = parameter.whole.grad
        if grad is None:
            whole = parameter.whole
            return torch.zeros(whole.numel(), dtype=self.unit.compute_dtype, device=whole.device)
        dense = grad if grad.layout is torch.strided else grad.to_dense()
        return dense.contiguous().view(-1)

    def own_piece(self, parameter: UnitParameter) -> Tensor:
        """Where this rank's part of the mean goes."""
        if self.unit.setting.is_sharded:
            return self.rest_rows(parameter)
        index = self.unit.parameters.index(parameter)
        start, stop = self.unit.wire.slots[index].pieces[self.unit.setting.rank]
        return self.rest_rows(parameter)[start:stop]

    def _rest_view(self, parameter: UnitParameter) -> Tensor:
        return self.rest_rows(parameter).view(parameter.local.shape)

    def rest_rows(self, parameter: UnitParameter) -> Tensor:
        """The parameter's part of the reduced buffer, flat."""
        assert self.reduced is not None, "a reduced gradient is used before it has a buffer"
        if parameter not in self._spans:
            start = parameter.slot.shard_offsets[self.unit.setting.rest_rank]
            self._spans[parameter] = (start, start + parameter.local.numel())
        start, stop = self._spans[parameter]
        return self.reduced.tensor[start:stop]
