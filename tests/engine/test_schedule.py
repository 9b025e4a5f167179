"""The schedule under made-up orders of events: it executes nothing, so thousands take seconds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onefold.engine.driving import Action, Drive, Verb
from onefold.engine.policy import Policy, UnitFacts
from onefold.engine.schedule import Schedule
from onefold.engine.walks import MAX_PENDING, Call, Phase
from tests.support.rows import again_but

STAGE_3 = Policy(
    frees_after_forward=True, frees_after_backward=True, keeps_bytes=False, defers_reduction=False
)
STAGE_2 = Policy(
    frees_after_forward=False, frees_after_backward=False, keeps_bytes=True, defers_reduction=True,
    gathers_in_order=True,
)  # fmt: skip
STAGE_0 = Policy(
    frees_after_forward=False, frees_after_backward=True, keeps_bytes=False, defers_reduction=True,
    has_second_hop=True,
)  # fmt: skip
NODES = replace(STAGE_3, has_second_hop=True, sums_rest=True, keeps_second_shard=True,
                fills_early=True)  # fmt: skip
POLICIES = {"stage 3": STAGE_3, "stage 2": STAGE_2, "stage 0": STAGE_0, "nodes": NODES,
            "window": replace(STAGE_2, cap=3, gathers_in_order=False)}  # fmt: skip
EACH_POLICY = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


class Executor:
    """Executes actions on nothing: keeps account of units, and objects to what may not be."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.done: list[Action] = []
        self.unsharded: set[int] = set()
        self.fresh: set[int] = set()
        self.shown: set[int] = set()
        self.used: Counter[int] = Counter()  # by forwards that run, or by backward
        self.held: set[int] = set()
        self.flying: list[int] = []
        self.landed: list[int] = []

    def do(self, actions: list[Action]) -> None:
        for verb, unit in actions:
            self.done.append((verb, unit))
            self.one(verb, unit)

    def one(self, verb: Verb, unit: int) -> None:
        match verb:
            case Verb.GATHER:
                assert unit not in self.fresh, "gathered twice"
                self.unsharded.add(unit)
                self.fresh.add(unit)
                self.check_cap(unit)
            case Verb.SHOW:
                self.shown.add(unit)
            case Verb.HIDE:
                self.shown.discard(unit)
            case Verb.FREE | Verb.INVALIDATE:
                assert not self.used[unit], "freed in use"
                assert unit not in self.held, "freed while a graph needs it"
                self.shown.discard(unit)
                self.fresh.discard(unit)
                if verb is Verb.FREE:
                    self.unsharded.discard(unit)
            case Verb.REDUCE:
                assert unit not in self.flying
                self.flying.append(unit)
                assert len(self.flying) <= 1
            case Verb.LAND:
                assert self.flying.pop(0) == unit, "landed out of order"
            case Verb.FOLLOW:
                self.landed.append(unit)
            case Verb.FINISH:
                assert self.landed.pop() == unit, "settled before it landed"

    def check_usable(self, unit: int) -> None:
        facts = self.schedule.units[unit]
        assert unit in self.shown
        assert facts.is_resident or unit in self.fresh, "used before it is whole"

    def check_cap(self, gathered: int) -> None:
        cap = self.schedule.policy.cap
        needed = {unit for unit, count in self.used.items() if count} | self.held | {gathered}
        nbytes = {unit: self.schedule.units[unit].nbytes for unit in self.unsharded}
        if cap is not None:
            most = max(cap, sum(nbytes[unit] for unit in needed & self.unsharded))
            assert sum(nbytes.values()) <= most, "more bytes alive than the cap and units in use"

    def count(self, verb: Verb) -> Counter[int]:
        return Counter(unit for each, unit in self.done if each is verb)


@dataclass
class Use:
    """A module that uses a unit, and the modules that run inside it."""

    unit: int
    inside: list[Use] = field(default_factory=list)
    is_recomputed: bool = False
    raises: bool = False
    is_reached: bool = True  # by backward


def uses(num_units: int) -> st.SearchStrategy[list[Use]]:
    leaf = st.builds(
        Use,
        st.integers(0, num_units - 1),
        st.just([]),
        st.booleans(),
        st.sampled_from([False] * 9 + [True]),
        st.sampled_from([True] * 5 + [False]),
    )
    nested = st.recursive(
        leaf,
        lambda inner: st.builds(
            Use,
            st.integers(0, num_units - 1),
            st.lists(inner, max_size=3),
            st.booleans(),
            st.just(False),
            st.sampled_from([True] * 5 + [False]),
        ),
        max_leaves=6,
    )
    return st.lists(nested, max_size=6)


class Raised(Exception):
    """A module's forward ended by an exception."""


class Script:
    """Runs uses through a schedule as torch would: forward, then backward in reverse order."""

    def __init__(self, policy: Policy, num_units: int, *, resident: frozenset[int] = frozenset()):
        units = [
            UnitFacts(nbytes=1, is_resident=unit in resident, is_offloaded=unit % 2 == 0)
            for unit in range(num_units)
        ]
        self.schedule = Schedule(policy, units)
        self.executor = Executor(self.schedule)
        self.calls: list[tuple[Call, Use]] = []
        self.num_modules = [1] * num_units

    def forward(self, program: list[Use], phase: Phase = Phase.FORWARD) -> bool:
        """True if it ran to its end."""
        executor, schedule = self.executor, self.schedule
        self.calls = []
        executor.do(schedule.begin_forward(phase))
        try:
            for use in program:
                self.run(use, phase)
        except Raised:
            return False
        finally:
            executor.do(schedule.end_forward(phase))
            if phase is Phase.EVALUATION and schedule.policy.frees_after_forward:
                assert not executor.shown
        return True

    def run(self, use: Use, phase: Phase) -> None:
        executor, schedule = self.executor, self.schedule
        call, actions = schedule.enter(use.unit, phase)
        executor.do(actions)
        executor.used[use.unit] += 1
        executor.check_usable(use.unit)
        is_again = phase is Phase.BACKWARD
        is_whole = True
        try:
            if use.raises and not is_again:
                raise Raised
            for inner in use.inside:
                self.run(inner, phase)
                executor.check_usable(use.unit)
        except Raised:
            is_whole = False
            raise
        finally:
            executor.used[use.unit] -= 1
            key = id(use) if is_whole else None
            executor.do(
                schedule.leave(call, key, self.num_modules[use.unit], is_recompute=is_again)
            )
            if is_whole and use.is_reached and phase is not Phase.EVALUATION:
                schedule.expect_backward(call)
                self.calls.append((call, use))

    def backward(self, num_trained: int = 2, *, is_last: bool = True, ends: bool = True) -> None:
        """Reach every watched call, the last finished first; then each parameter's gradient."""
        executor, schedule = self.executor, self.schedule
        calls, self.calls = self.calls[::-1], []
        schedule.drive(replace(schedule.driven, accumulates=not is_last))
        schedule.begin_backward([num_trained] * len(schedule.units))
        left = Counter(use.unit for _, use in calls)
        active: list[Call] = []  # reached, and not over: no call has been reached that ended before
        for call, use in calls:
            active = [other for other in active if other.started <= call.finished]
            executor.used = Counter(other.unit for other in active)
            executor.do(schedule.enter_backward(call))
            active.append(call)
            executor.used[use.unit] += 1
            executor.check_usable(use.unit)
            if use.is_recomputed:
                for inner in use.inside:
                    self.run(inner, Phase.BACKWARD)
                self.calls = []
            left[use.unit] -= 1
            if not left[use.unit]:
                for member in range(num_trained):
                    executor.do(schedule.gradients(use.unit, [member]))
        executor.used.clear()
        if ends:
            executor.do(schedule.end_backward())
            assert not executor.flying
            assert not executor.landed

    def step(self) -> set[int]:
        stepped = self.schedule.early_steps.take_stepped()
        self.executor.held.clear()
        self.executor.do(self.schedule.rest())
        assert not self.executor.shown
        assert not self.executor.fresh
        assert not self.executor.unsharded or self.schedule.policy.keeps_bytes
        self.schedule.stepped()
        return stepped


@again_but("stage 2", "window")
@EACH_POLICY
@settings(max_examples=120)
@given(
    programs=st.lists(uses(5), min_size=1, max_size=3), resident=st.frozensets(st.integers(0, 4))
)
def test_no_unit_is_used_before_it_is_whole_or_freed_while_it_is_used(policy, programs, resident):
    script = Script(policy, 5, resident=resident)
    for program in programs:
        if script.forward(program):
            script.backward()
        script.step()


@again_but("stage 2", "window")
@EACH_POLICY
@settings(max_examples=120)
@given(program=uses(5), count=st.integers(1, 3))
def test_every_trained_unit_is_reduced_exactly_once_in_a_step(policy, program, count):
    script = Script(policy, 5)
    for use in program:
        use.raises = False
    for micro in range(count):
        if not script.forward(program):
            return
        before = script.executor.count(Verb.REDUCE)
        script.backward(is_last=micro == count - 1)
        reduced = script.executor.count(Verb.REDUCE) - before
        is_deferred = policy.defers_reduction and micro < count - 1
        assert reduced == ({} if is_deferred else dict.fromkeys(range(5), 1))
    script.step()
    assert script.executor.count(Verb.LAND) == script.executor.count(Verb.REDUCE)
    followed = script.executor.count(Verb.FOLLOW)
    if policy.sums_rest:  # nodes talk once a step
        assert followed == dict.fromkeys(range(5), 1)


@again_but("stage 2", "window")
@EACH_POLICY
@settings(max_examples=60)
@given(programs=st.lists(uses(4), min_size=2, max_size=2))
def test_ranks_that_use_other_parts_reduce_in_the_same_order(policy, programs):
    orders = []
    for program in programs:
        script = Script(policy, 4)
        if not script.forward(program):
            return
        script.backward()
        verbs = (Verb.REDUCE, Verb.FOLLOW)
        orders.append([action for action in script.executor.done if action[0] in verbs])
    assert [unit for verb, unit in orders[0] if verb is Verb.REDUCE] == [3, 2, 1, 0]
    assert orders[0] == orders[1]


@settings(max_examples=60)
@given(programs=st.lists(uses(4), min_size=2, max_size=4))
def test_ranks_that_use_other_units_gather_in_the_same_order_at_stages_1_and_2(programs):
    script = Script(STAGE_2, 4)
    for program in programs:
        script.executor.done.clear()
        if script.forward(program):
            script.backward()
        gathered = [unit for verb, unit in script.executor.done if verb is Verb.GATHER]
        assert gathered == [0, 1, 2, 3]
        script.step()


def test_the_order_of_gathers_changes_nothing_where_modules_run_in_order():
    found = []
    for policy in (STAGE_2, replace(STAGE_2, gathers_in_order=False)):
        script = Script(policy, 6)
        for _ in range(2):
            script.forward([Use(unit) for unit in range(6)])
            script.backward()
            script.step()
        found.append(script.executor.done)
    assert found[0] == found[1]


@again_but("stage 2", "window")
@EACH_POLICY
@settings(max_examples=60)
@given(program=uses(4))
def test_a_backward_that_fails_finishes_its_reductions_and_leaves_nothing_behind(policy, program):
    script = Script(policy, 4)
    if not script.forward(program):
        return
    script.backward(ends=False)
    script.executor.do(script.schedule.abort_backward())
    assert not script.executor.flying
    assert not script.executor.shown
    assert not script.schedule.early_steps
    for use in program:
        use.raises = False
    if script.forward(program):
        script.backward()


@settings(max_examples=60)
@given(program=uses(4))
def test_weights_that_a_graph_refers_to_stay_until_the_backward_ends(program):
    script = Script(STAGE_3, 4)
    if not script.forward(program) or not script.calls:
        return
    _, use = script.calls[-1]
    script.schedule.hold(use.unit)
    script.executor.held.add(use.unit)
    script.backward(ends=False)
    script.executor.held.clear()
    script.executor.do(script.schedule.end_backward())
    assert use.unit not in script.executor.unsharded


def test_stage_3_gathers_a_unit_in_forward_and_again_in_backward_the_next_one_ahead():
    script = Script(STAGE_3, 3)
    program = [Use(0), Use(1), Use(2)]
    for _ in range(2):
        script.executor.done.clear()
        script.forward(program)
        script.backward()
        script.step()
    gathered = [unit for verb, unit in script.executor.done if verb is Verb.GATHER]
    assert gathered == [0, 1, 2, 2, 1, 0]
    done = script.executor.done
    assert done.index((Verb.GATHER, 1)) < done.index((Verb.SHOW, 0))
    assert done.index((Verb.FREE, 0)) < done.index((Verb.SHOW, 1))


def test_stage_2_gathers_a_unit_once_a_step_whatever_the_micro_batches():
    script = Script(STAGE_2, 3)
    program = [Use(0), Use(1), Use(2)]
    for micro in range(4):
        script.forward(program)
        script.backward(is_last=micro == 3)
    assert script.executor.count(Verb.GATHER) == {0: 1, 1: 1, 2: 1}
    assert script.executor.count(Verb.REDUCE) == {0: 1, 1: 1, 2: 1}


def test_kept_units_are_gathered_once_over_evaluations_and_freed_when_training_goes_on():
    script = Script(STAGE_3, 4)
    done, program = script.executor.done, [Use(unit) for unit in range(4)]
    script.executor.do(script.schedule.keep(frozenset({0, 2})))
    for _ in range(3):
        script.forward(program, Phase.EVALUATION)
        assert script.executor.unsharded == {0, 2}
    assert script.executor.count(Verb.GATHER) == {0: 1, 1: 3, 2: 1, 3: 3}
    done.clear()
    script.forward(program)
    assert {(Verb.FREE, 0), (Verb.FREE, 2)} <= set(done[: done.index((Verb.GATHER, 0))])
    assert not script.executor.unsharded, "training frees as it does without"
    script.backward()
    script.step()
    script.executor.do(script.schedule.keep(frozenset({1})))
    script.forward(program, Phase.EVALUATION)
    script.step()  # frees kept units; the next evaluation gathers them once more
    script.forward(program, Phase.EVALUATION)
    assert script.executor.unsharded == {1}
    script.executor.do(script.schedule.keep(frozenset()))
    assert not script.executor.unsharded


def test_a_kept_unit_of_a_stream_is_shown_for_an_operation_alone_until_its_module_runs():
    """An operation that fails tells nothing: its `use` never comes."""
    schedule = Schedule(replace(STAGE_3, is_cyclic=True), [UnitFacts(1)] * 2)
    schedule.keep(frozenset({0}))
    schedule.begin_forward(Phase.EVALUATION)
    schedule.show(0, is_recorded=False)
    assert (Verb.HIDE, 0) in schedule.use(0, is_recorded=False)[1]
    schedule.show(0, is_recorded=False)  # and fails
    for _ in range(2):
        call, _ = schedule.enter(0, Phase.EVALUATION)
        assert schedule.leave(call, "module", 1, is_recompute=False) == []
    schedule.show(0, is_recorded=False)
    assert schedule.use(0, is_recorded=False)[1] == []


@again_but("policy0", "policy3")
@pytest.mark.parametrize("policy", [STAGE_3, STAGE_2, STAGE_0, NODES])
@settings(max_examples=60)
@given(programs=st.lists(uses(4), min_size=2, max_size=4), kept=st.frozensets(st.integers(0, 3)))
def test_evaluations_that_keep_units_leave_training_as_it_was(policy, programs, kept):
    plain, keeping = Script(policy, 4), Script(policy, 4)
    for script in (plain, keeping):
        script.forward(programs[0])  # it learns the order of units
        script.backward()
        script.step()
    keeping.executor.do(keeping.schedule.keep(kept))
    for program in programs:
        keeping.forward(program, Phase.EVALUATION)
    for script in (plain, keeping):
        script.step()
        script.executor.done.clear()
        script.forward(programs[0])
        script.backward()
    assert keeping.executor.done == plain.executor.done


def test_units_that_a_graph_refers_to_outlive_the_evaluations_that_kept_them():
    script = Script(STAGE_3, 1)
    script.executor.do(script.schedule.keep(frozenset({0})))
    script.forward([Use(0)], Phase.EVALUATION)
    script.schedule.hold(0)
    script.executor.held.add(0)
    script.executor.do(script.schedule.keep(frozenset()))
    assert script.executor.unsharded == {0}


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_as_many_units_are_gathered_ahead_as_the_policy_says(prefetch):
    script = Script(replace(STAGE_3, prefetch=prefetch, prefetches_late=False), 5)
    _, actions = script.schedule.enter(0, Phase.FORWARD)
    gathered = [unit for verb, unit in actions if verb is Verb.GATHER]
    assert gathered == list(range(prefetch + 1))
    fetched = [unit for verb, unit in actions if verb is Verb.FETCH]
    assert fetched == [prefetch + 1]


def test_a_unit_called_by_two_modules_is_freed_after_the_second():
    script = Script(STAGE_3, 2)
    script.num_modules = [2, 1]
    script.forward([Use(0), Use(1), Use(0)])
    assert script.executor.count(Verb.GATHER)[0] == 1
    assert script.executor.count(Verb.FREE)[0] == 1


def test_units_stepped_in_backward_wait_for_the_one_before_the_last():
    script = Script(replace(STAGE_3, steps_in_backward=True), 8)
    script.forward([Use(unit) for unit in range(8)])
    script.backward()
    stepped = [unit for verb, unit in script.executor.done if verb is Verb.STEP]
    assert stepped == [6, 4, 2, 0]  # even ones are offloaded
    waited = [unit for verb, unit in script.executor.done if verb is Verb.WAIT_STEP]
    assert waited == stepped[: len(stepped) - MAX_PENDING]
    assert script.step() == {0, 2, 4, 6}


def test_nothing_is_decided_while_modules_show_editable_unsharded_parameters():
    schedule = Schedule(STAGE_3, [UnitFacts(1)])
    schedule.drive(Drive(is_suspended=True))
    call, actions = schedule.enter(0, Phase.FORWARD)
    assert actions == schedule.leave(call, 1, 1, is_recompute=False) == []
