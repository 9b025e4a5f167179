"""UnitGradient: the gradients of one unit, partial on every rank, then reduced to the mean.

While backward runs, autograd adds this rank's gradient to `.grad` of the unsharded parameter. That
is the partial gradient, which micro-batches share. A reduction sends it from there, without a copy.
The result is `.grad` of the sharded parameter:

    one rank            the partial gradient itself; where weights are cast, rows as below
    optimizer sharded   own rows of the mean, a view of one flat shard buffer
    stage 0             all rows of the mean, a view of one flat buffer: reduced, then gathered

Messages say which parameters a rank used: one that no rank used keeps `grad is None` everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter
from weakref import ref

import torch
from torch import Tensor

from onefold.layout.ledger import Account, Kind
from onefold.unit import refusals, user_hooks, whole
from onefold.unit.buffer import Buffer
from onefold.unit.gradient_phase import GradientPhase as Phase
from onefold.unit.local_mean import has_rows, own_means, take_rows
from onefold.unit.node_reduction import reduction_of
from onefold.unit.parameter import UnitParameter
from onefold.unit.reduction import Landed, MeanBuffer, MeanRows, Partials, known
from onefold.unit.sharded_form import wrap_grads
from onefold.unit.shown_grads import NoMean
from onefold.unit.stand_ins import StandIns
from onefold.unit.user_hooks import HeldBack
from onefold.unit.weights import UnitWeights
from onefold.wire.ticket import DONE, Ticket

_GRAD = attrgetter("_grad")


class UnitGradient:
    """Partial and reduced gradients of a unit's parameters."""

    def __init__(self, unit: UnitWeights, *, keeps_bytes: bool) -> None:
        """`keeps_bytes`: those of reduced gradients stay allocated from step to step."""
        spec = self._spec = unit.spec
        self._unit = ref(unit)
        parameters = self._parameters = unit.parameters
        self.phase = Phase.RESTING  # what it carries: the next two
        self._landed: Landed | None = None
        self._following = DONE
        self.is_unused = False  # by every rank, in the last backward
        self._stand_ins = StandIns()  # what `.grad` shows between micro-batches
        self._due: set[UnitParameter] = set()  # trained by these micro-batches, on every rank
        self.earlier: set[UnitParameter] = set()  # had a `.grad` when the last backward began
        spans = [(p.span.start, p.span.stop) for p in parameters]
        self._means = MeanBuffer(spec, spans, keeps_bytes=keeps_bytes)  # from step to step
        self.shown: dict[UnitParameter, Tensor] = {}  # the `.grad` that shows a mean
        self._reduced_at = -1  # steps that were done when a mean was last shown
        self.reduction = reduction_of(spec)
        self.held_back = HeldBack()
        store, ledger = spec.context.store, spec.context.ledger
        self._has_rows, self._ledger = has_rows(spec), ledger
        self.partial = Partials(Account(self, Kind.PARTIAL_GRAD, store.name, ledger))
        self._local_account = Account(self, Kind.GRAD, store.name, ledger)  # alone: autograd's own

    @property
    def unit(self) -> UnitWeights:
        """The unit of these gradients."""
        unit = self._unit()
        assert unit is not None, "a gradient outlived its unit"
        return unit

    @property
    def reduced(self) -> Buffer | None:
        """The buffer of reduced gradients; None while there are none."""
        return self._means.held

    def _enter(self, phase: Phase) -> None:
        if phase not in self.phase.next:
            raise self.phase.not_next(phase, self._spec)
        self.phase = phase

    def show_means(self, parameters: Sequence[UnitParameter]) -> list[bool]:
        """Whether each `.grad` is over the parameter's rows of the flat mean, as it was shown.

        A user may have assigned another gradient, or, to one that is a plain tensor, other data.
        """
        if self._means.held is None:
            return [False] * len(parameters)
        rows, then, plain = self._means.rows(), self.shown.get, whole.PLAIN
        return [
            (grad := p.sharded._grad) is not None
            and grad is then(p)
            and (type(grad) not in plain or grad.data_ptr() == rows[p.index].data_ptr())
            for p in parameters
        ]

    def check_there(self, parameter: UnitParameter) -> None:
        """Raise `StateError` if the parameter's gradient was used up by a step in backward."""
        if self.phase is Phase.CONSUMED:
            raise refusals.CONSUMED(parameter.fqn, where=self._spec.context.where)

    def end_step(self) -> None:
        """The step that consumed the values is over: gradients may be read again."""
        self._enter(Phase.RESTING)

    def consume(self) -> None:
        """A step uses the values now: show no gradient, and leave the buffer to the step."""
        self._enter(Phase.CONSUMED)
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self._parameters:
                parameter.sharded._grad = None
            self._count_local()
        self.shown.clear()
        self._stand_ins.clear()
        self._means.hand_over()

    def trainable(self) -> list[UnitParameter]:
        """The parameters that require a gradient now, or did in a micro-batch that rests."""
        with torch._C.DisableTorchFunctionSubclass():
            return [p for p in self._parameters if p.sharded.requires_grad or p in self._due]

    def rest_partial(self) -> None:
        """Micro-batches go on: show partial gradients, so that clearing them is noticed."""
        self._due.update(self.trainable())
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for parameter in self.partial:
                if parameter.partial_grad is not None:
                    self._stand_ins.show_partial(parameter, parameter.partial_grad)

    def drop_partial(self) -> None:
        """Forget gradients that were not reduced."""
        self._due.clear()
        with torch._C.DisableTorchFunctionSubclass():
            self._stand_ins.take_back(self.shown)
            for parameter in self.partial:
                if parameter.unsharded is not parameter.sharded:  # else `discard` has, and
                    parameter.unsharded.grad = None  # what is there now was assigned since
        self.partial.drop(list(self.partial))
        self.reduction.drop(range(len(self._parameters)))

    def discard(self) -> None:
        """A backward failed: drop its gradients, also those that arrive later. Torn sums raise."""
        if self.phase in (Phase.CONSUMED, Phase.DISCARDING):
            return
        self._enter(Phase.DISCARDING)
        self._landed = None
        torn = self.earlier & set(self._with_grad())
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self._parameters:
                parameter.sharded._grad = parameter.lost_mean if parameter in torn else None

    def lose(self) -> None:
        """All reductions are over: forget what the failed backward has left."""
        self._enter(Phase.RESTING)
        self.drop_partial()
        self.drop_cleared()
        self.shown.clear()

    def _with_grad(self) -> dict[UnitParameter, Tensor]:
        with torch._C.DisableTorchFunctionSubclass():
            grads = map(_GRAD, [parameter.sharded for parameter in self._parameters])
            pairs = zip(self._parameters, grads, strict=True)
            return {parameter: grad for parameter, grad in pairs if grad is not None}

    def check_whole(self) -> set[UnitParameter]:
        """Return the parameters with a gradient; raise `StateError` if one is lost."""
        grads = self._with_grad()
        if NoMean in set(map(type, grads.values())):
            self._stand_ins.check(grads, self.shown)
        return set(grads)

    def begin(self) -> None:
        """A backward begins."""
        self.earlier = self.check_whole()
        self.drop_cleared()

    # between micro-batches, for checkpoints

    def accumulated(self) -> tuple[dict[UnitParameter, Tensor], dict[UnitParameter, Tensor]]:
        """Gradients since the last step: own rows of means, and partial gradients [all rows]."""
        with torch._C.DisableTorchFunctionSubclass():
            partials = {p: g for p in self.partial if (g := p.partial_grad) is not None}
            means = {
                p: p.unwrap(grad)
                for p, grad in self._with_grad().items()
                if not isinstance(grad, NoMean)
                and self._reduced_at == self._ledger.steps
                and (p not in partials or grad is self.shown.get(p))
            }
        return means, partials

    def restore(
        self, means: dict[UnitParameter, Tensor], partial: dict[UnitParameter, Tensor]
    ) -> None:
        """Undo `accumulated`: these gradients replace all others."""
        self.drop_partial()
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for parameter in self._parameters:
                parameter.sharded._grad = None
            self.drop_cleared()
            if means and self._has_rows:
                self.mean_rows(list(means))
            for parameter, mean in means.items():
                if self._has_rows:
                    mean = self._rest_view(parameter).copy_(mean)
                self._give(parameter, mean)
            for parameter, grad in partial.items():
                parameter.set_partial_grad(grad)
                self.partial.note([parameter], grad.nbytes)
        self._reduced_at = self._ledger.steps
        self.rest_partial()

    def _give(self, parameter: UnitParameter, mean: Tensor) -> None:
        self.shown[parameter] = parameter.sharded._grad = parameter.wrap_grad(mean)

    # reduced

    def start_reduce(self) -> Ticket:
        """Begin the first hop of the mean over the ranks; its ticket is done when it has landed.

        Behind it `keep_sums`, or `follow` and `end_following`.
        """
        parameters = self.trainable()
        self.show_late()
        self.unit.join_step()  # it may still read the rows that are written now
        if self.phase is Phase.CONSUMED and parameters:
            self.check_there(parameters[0])
        if self.phase is not Phase.DISCARDING:
            self._enter(Phase.SENT)
        if not self._spec.context.exchanges:
            self._due.clear()
            return Ticket(finish=partial(self._keep_local, parameters))
        with torch._C.DisableTorchFunctionSubclass():
            self.drop_cleared()
            if self._stand_ins.shown:
                self._stand_ins.take_back(self.shown, are_sent=True)
            used = [p.unsharded.grad is not None for p in parameters]
            partials = [p.flat_partial() for p in parameters]
            mean = self.mean_rows(parameters) if self.reduction.fills_rows else None
            which = tuple([p.index for p in parameters])
            ticket = self.reduction.start(which, partials, used, mean)
            for parameter in parameters:
                parameter.unsharded.grad = None
            return ticket.then(partial(self._finish_reduce, parameters, used, partials, mean))

    def _keep_local(self, parameters: list[UnitParameter]) -> None:
        """One rank: the partial gradient is the mean already."""
        if self.phase is Phase.DISCARDING:
            return
        self._enter(Phase.RESTING)
        self._reduced_at, sources = self._ledger.steps, self._spec.context.sources
        with torch._C.DisableTorchFunctionSubclass():
            self._stand_ins.take_back(self.shown)
            if self._has_rows:
                used = [p for p in parameters if p.unsharded.grad is not None]
                self.show_all(used, take_rows(self.mean_rows(used), used, sources))
            else:
                for parameter, mean in own_means(parameters, sources).items():
                    self._give(parameter, mean)
            self.partial.drop(parameters)
            self._count_local()

    def _count_local(self) -> None:  # of one rank alone: gradients stay autograd's own tensors
        if not self._has_rows:
            grads = {**self.held_back, **self._with_grad()}
            own = [g if p.unsharded is p.sharded else p.unwrap(g) for p, g in grads.items()]
            self._local_account.set(sum([grad.nbytes for grad in own]))

    def _finish_reduce(
        self, parameters: list[UnitParameter], used: list[bool], partials: list[Tensor],
        mean: MeanRows | None,
    ) -> None:  # fmt: skip
        """The first hop is over."""
        partials.clear()
        self.partial.drop(parameters)
        if self.phase is not Phase.DISCARDING:
            self._enter(Phase.LANDED)
            self._landed = Landed(parameters, self.reduction.users(used), mean)

    def keep_sums(self) -> None:
        """Keep the node's sums until the last micro-batch, and show that there are some."""
        landed, self._landed = self._landed, None
        if landed is not None:
            self._enter(Phase.RESTING)
            self._due.update(landed.parameters)
            self._show_resting(self.reduction.rest(landed.which, known(landed.users)))

    def follow(self) -> None:
        """The first hop has landed: show the mean, or begin the second hop."""
        landed, self._landed = self._landed, None
        if landed is None:  # one rank alone, or the results are discarded
            return
        reduction, parameters = self.reduction, landed.parameters
        self._due.clear()
        if reduction.finishes_alone:
            self._show_users(landed)
            return
        self._enter(Phase.FOLLOWING)
        with torch._C.DisableTorchFunctionSubclass():
            mean = landed.mean or self.mean_rows(parameters)
            shown = [p in self.shown for p in parameters]
            following = reduction.follow(landed.which, landed.users, shown, mean)
        self._following = (following or DONE).then(partial(self._show_users, landed))

    def _show_users(self, landed: Landed) -> None:
        """Show the mean of parameters that some rank used: now, if the host knows these."""
        if self.phase is Phase.DISCARDING:
            return
        if not self.reduction.sees_all:
            landed = Landed(landed.parameters, self.reduction.users(landed.users), landed.mean)
        self._enter(Phase.LATE)
        self._landed = landed
        if isinstance(landed.users, list):
            self.show_late()

    def show_late(self) -> None:
        """Show means that are not shown yet; the host may wait."""
        if self.phase is Phase.LATE and self._landed is not None:
            late, self._landed = self._landed, None
            self._enter(Phase.RESTING)
            used = late.used()
            self.is_unused = not used
            self.show_all(used)

    def _show_resting(self, resting: list[int]) -> None:
        """Show stand-ins until nodes exchange their sums, so that clearing them is noticed."""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in [self._parameters[index] for index in resting]:
                stand_in = parameter.no_mean() if self._shows_nothing(parameter) else None
                self._stand_ins.show(parameter, stand_in)
                if stand_in is not None and self.reduction.rests_in_place:
                    self.shown[parameter] = stand_in

    def _shows_nothing(self, parameter: UnitParameter) -> bool:
        """True if `.grad` is None, or stands for a sum that is on its way."""
        shown = parameter.sharded._grad
        return shown is None or (
            isinstance(shown, NoMean) and shown is not self.shown.get(parameter)
        )

    def end_following(self) -> None:
        """Wait for the second hop of the last reduction, if it is not over."""
        following, self._following = self._following, DONE
        following.wait()

    def show_use(self, parameter: UnitParameter) -> None:
        """Show the mean of one use, to which others add; hooks run once, when backward ends."""
        if self.phase is not Phase.DISCARDING:
            self.show_all([parameter], ends=False)
            self._enter(Phase.LATE)
            self._landed = Landed([parameter], [True], None)

    def show_all(
        self,
        parameters: Iterable[UnitParameter],
        views: Sequence[Tensor] = (),
        *,
        ends: bool = True,
    ) -> None:
        """Show means; `views`: own rows of each, if made before. Hooks run where the sum `ends`."""
        self._reduced_at = self._ledger.steps
        with torch._C.DisableTorchFunctionSubclass():
            rows, new = self._means.rows(), dict[UnitParameter, Tensor]()
            for number, p in enumerate(parameters):
                sharded, shown = p.sharded, p.sharded._grad
                if shown is None or sharded is p.unsharded or isinstance(shown, NoMean):
                    new[p] = views[number] if views else rows[p.index].view_as(p.local)
                hooks = sharded._post_accumulate_grad_hooks if ends else None
                if hooks and len(hooks) > p.num_hooks:
                    user_hooks.note(p)
            for p, mean in zip(new, wrap_grads(new), strict=True):
                self.shown[p] = p.sharded._grad = mean

    def mean_rows(self, parameters: list[UnitParameter]) -> MeanRows:
        """Make room for the mean of `parameters`, at rest."""
        flat, rows = self._means.allocate()
        fresh = list[bool]()
        for parameter in parameters:
            grad, is_bare = parameter.sharded._grad, parameter.sharded is parameter.unsharded
            adds = grad is not None and not is_bare and not self._shows_nothing(parameter)
            fresh.append(not adds)
            if adds and grad is not None and not all(self.show_means([parameter])):
                self._rest_view(parameter).copy_(parameter.unwrap(grad))
                self._give(parameter, self._rest_view(parameter))
        return MeanRows(flat, [rows[p.index] for p in parameters], fresh)

    def drop_cleared(self) -> None:
        """Forget gradients that users cleared (`zero_grad`), and free the bytes of reduced ones."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._local_account.nbytes:
                self._count_local()
            if self._stand_ins.shown:
                cleared = self._stand_ins.cleared(self.partial, self._spec.context.where)
                for parameter in cleared:
                    parameter.unsharded.grad = None
                self.partial.drop(cleared)
                self.reduction.drop([parameter.index for parameter in cleared])
            if self.phase is not Phase.DISCARDING and (self.shown or self._means.held is not None):
                self._drop_cleared_means()  # results of a failed backward still arrive there

    def _drop_cleared_means(self) -> None:
        held = self.held_back
        cleared = {p for p, g in self.shown.items() if p.sharded._grad is not g and p not in held}
        if cleared:
            self.shown = {p: g for p, g in self.shown.items() if p not in cleared}
        if self._reduced_at == self._ledger.steps:  # nothing was stepped by them
            self.reduction.feedback.forget(cleared)
        if not self.shown:
            self._means.free()

    def _rest_view(self, parameter: UnitParameter) -> Tensor:
        return self._means.rows()[parameter.index].view_as(parameter.local)
