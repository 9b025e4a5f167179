"""Law 6: any module trains sharded as it does in one process; one clause for each kind."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import onefold
from tests.support.clauses import GUARDS, REENTRANT, Clauses, Turn
from tests.support.modules import BY_HALF, MODULES, marked, module_of
from tests.support.programs.blocks import (
    By,
    Residual,
    Tower,
    dropping,
    in_turn,
    ordered,
)
from tests.support.ranks import run_processes, run_ranks, seeded
from tests.support.zoo import (
    ROWS,
    SUMS,
    WIDTH,
    Process,
    rows,
    run_plain,
    sgd,
    squared,
    training,
)

clauses = Clauses(MODULES)

# frozen and unused parameters


@clauses.turns(4)
def requires_grad_may_change_between_steps(turn):
    turn.module.blocks[0].requires_grad_(turn.index in (0, 3))
    turn.module.last.bias.requires_grad_(turn.index != 1)
    turn.step()


@clauses.turns(3, lambda: Tower().requires_grad_(False))
def a_module_frozen_at_first_may_be_unfrozen(turn):
    turn.module.last.requires_grad_(True)
    turn.module.blocks.requires_grad_(turn.index > 0)
    turn.step()


@clauses.script()
def a_wholly_frozen_module_passes_gradients_to_its_input(process):
    frozen, _ = process.ready(lambda: Tower().requires_grad_(False))
    module, optimizer = process.ready(lambda: nn.Linear(WIDTH, WIDTH))
    for index, batch in enumerate(rows()):
        process.step(index, module, optimizer, lambda x: frozen(module(x)).square().mean(), batch)
    process.note_weights(module)
    process.note_weights(frozen, "frozen")


@clauses.turns(5, partial(ordered, 0, 1))
def a_parameter_unused_in_one_step_is_used_in_the_next(turn):
    turn.module.order = (0,) if turn.index in (0, 2, 3) else (0, 1)
    turn.step()


@clauses.turns(5, partial(ordered, 0, 1), options={"units": []})
def part_of_a_unit_unused_in_one_step_keeps_its_moments(turn):
    turn.module.order = (0,) if turn.index in (0, 2, 3) else (0, 1)
    turn.step()


@clauses.script(fine_units=False)
def a_module_without_parameters_runs(process):
    module = nn.Sequential(nn.Tanh())
    if not process.is_plain:
        onefold.shard(module, stage=process.stage)
    process.note_mean("loss", process.mean(lambda x: module(x).mean(), rows()[0]))


# modules called in loops, in part, or by a parent


@clauses.turns(3, partial(ordered, 0, 1))
def a_module_called_in_a_loop_of_changing_length_trains(turn):
    turn.module.order = [0] * (3, 1, 2)[turn.index]
    turn.step()


@clauses.turns(4, partial(ordered, 0, 1, 2))
def the_order_of_modules_may_change_between_steps(turn):
    turn.module.order = ((0, 1, 2), (2, 0), (1, 1, 0), (2, 1, 0))[turn.index]
    turn.step()


# evaluation takes torch's fused path only where every weight is whole at once
@clauses.script(fine_units=False)
def a_transformer_encoder_trains_and_evaluates(process):
    def build():
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    module, optimizer = process.ready(build, sgd)
    for index, batch in enumerate(rows()):
        batch = batch.unsqueeze(1).repeat(1, 3, 1)
        process.step(index, module, optimizer, squared(module), batch)
        module.eval()
        with torch.no_grad():
            process.note_mean(f"{index} eval", process.mean(squared(module), batch))
        module.train()


@clauses.turns(3)
def a_submodule_may_be_called_instead_of_the_root(turn):
    turn.step(part=(turn.module.blocks[1], turn.module, turn.module.first)[turn.index])


# recompute, evaluation


@clauses.turns(of=REENTRANT)
def recompute_of_the_whole_module_trains(turn, reentrant):
    again = partial(checkpoint, turn.module, use_reentrant=reentrant)
    loss_of = lambda x: again(x.requires_grad_()).square().mean()
    turn.process.step(turn.index, turn.module, turn.optimizer, loss_of, turn.batch)


@clauses.turns(3, of=GUARDS)
def evaluation_between_steps_changes_nothing(turn, guard):
    turn.module.eval()
    with guard():
        turn.note_mean("eval", turn.loss(2))
    turn.module.train()
    turn.step()
    if turn.index == 2:
        with guard():
            turn.note_mean("last eval", turn.loss())


@clauses.turns(of=GUARDS)
def evaluation_between_forward_and_backward_changes_nothing(turn, guard):
    loss = turn.loss()
    with guard():
        turn.note_mean("eval", turn.loss(2))
    loss.backward()
    with guard():
        turn.note_mean("eval after", turn.loss(3))
    turn.update()


# several losses and backwards


@clauses.turns(stages=SUMS)
def two_losses_of_one_forward_with_two_backwards_train(turn):
    out = turn.module(torch.cat(turn.process.parts(turn.batch)))
    first, second = out.square().mean(), (out[:, 0] - 1).square().mean()
    first.backward(retain_graph=True)
    turn.note_grads("first")
    second.backward()
    turn.update()


@clauses.turns(stages=SUMS)
def a_second_backward_through_a_retained_graph_doubles_gradients(turn):
    loss = turn.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    turn.update()


@clauses.turns(stages=SUMS)
def backwards_of_two_forwards_in_any_order_train(turn):
    one, two = turn.loss(), turn.loss(2)
    for loss in (one, two) if turn.index else (two, one):
        loss.backward()
    turn.update()


@clauses.turns()
def gradients_of_inputs_alone_leave_parameters_without_gradient(turn):
    part = torch.cat(turn.process.parts(turn.batch)).requires_grad_()
    (slope,) = torch.autograd.grad(turn.module(part).square().sum(), part)
    turn.note_mean("slope", slope.square().mean())
    turn.note_grads("none")
    turn.step()


# exceptions


class Oops(Exception):
    pass


def _raise(*_: Any) -> None:
    raise Oops


class Failing(Tower):
    """Raises in the middle of forward or backward, or in recompute, when told to."""

    def __init__(self, recomputes=False):
        super().__init__()
        self.recomputes, self.fails = recomputes, ""

    def forward(self, x):
        x = self.blocks[0](self.first(x))
        if self.fails == "forward":
            raise Oops
        if self.fails == "backward":
            x.register_hook(_raise)
        if self.recomputes:
            calls = iter([self.blocks[1], _raise if self.fails == "recompute" else self.blocks[1]])
            return self.last(checkpoint(lambda x: next(calls)(x), x, use_reentrant=False))
        return self.last(self.blocks[1](x))


def fail(turn: Turn, where: str) -> None:
    """A step that ends in an exception; its gradients are cleared."""
    turn.module.fails = where
    with pytest.raises(Oops):
        turn.loss(3).backward()
    turn.module.fails = ""
    turn.optimizer.zero_grad()


FAILURES = {f"{first}-{where}": (first, where) for first in (0, 1) for where in
            ("forward", "backward")}  # fmt: skip


@clauses.turns(4, Failing, of=FAILURES)
def steps_after_an_exception_are_those_of_a_run_without_it(turn, failure):
    if turn.index == failure[0] and not turn.process.is_plain:
        fail(turn, failure[1])
    turn.step()


@clauses.turns(3, partial(Failing, recomputes=True))
def an_exception_in_recompute_leaves_the_next_step_right(turn):
    if turn.index == 1 and not turn.process.is_plain:
        fail(turn, "recompute")
    turn.step()


@clauses.turns(2, Failing, of={"root": "root", "block": "block"})
def edits_after_a_failed_backward_are_those_of_the_parameters_before_it(turn, called):
    parameters = list(turn.module.parameters())
    fail(turn, "backward")
    assert all(a is b for a, b in zip(parameters, turn.module.parameters(), strict=True))
    with torch.no_grad():
        for parameter in turn.module.parameters():
            parameter.mul_(0.9)
    turn.step("first", turn.module if called == "root" else turn.module.blocks[0])
    turn.step("then")


# parameters of a list, which is never called
@clauses.turns(2, partial(module_of, "nn.Sequential(Odd((8,), (8,)), nn.Linear(8, 8))"))
def a_part_that_no_hook_sees_trains_after_a_failed_backward(turn):
    x = turn.batch.clone().requires_grad_()
    x.register_hook(_raise)
    with pytest.raises(Oops):
        turn.process.mean(squared(turn.module), x).backward()
    turn.module.zero_grad()
    turn.step("part", turn.module[0])
    turn.step("root")


@clauses.turns(3)
def an_exception_in_a_submodule_called_directly_leaves_it_usable(turn):
    block = turn.module.blocks[1]
    failing = block.down.register_forward_pre_hook(_raise)
    for called in (turn.module, block):
        with pytest.raises(Oops):
            called(turn.batch)
    with pytest.raises(Oops), torch.no_grad():
        turn.module(turn.batch)
    failing.remove()
    turn.step()


@clauses.turns(3)
def a_forward_whose_loss_is_dropped_leaves_the_next_step_right(turn):
    if not turn.process.is_plain:
        turn.loss(2)
    turn.step()
    if not turn.process.is_plain:
        turn.module.blocks[0](turn.batch)


# what happens to gradients and weights between backward and forward


@clauses.turns(stages=SUMS)
def gradient_clipping_by_norm_trains(turn):
    turn.loss().backward()
    norm = torch.nn.utils.clip_grad_norm_(turn.module.parameters(), 0.05)
    turn.process.note(f"{turn.index} norm", norm)
    turn.update()


@clauses.turns()
def gradient_clipping_by_value_trains(turn):
    turn.loss().backward()
    torch.nn.utils.clip_grad_value_(turn.module.parameters(), 0.01)
    turn.update()


@clauses.turns()
def gradients_changed_by_hand_are_stepped(turn):
    module = turn.module
    turn.loss().backward()
    with torch.no_grad():
        for parameter in module.blocks.parameters():
            parameter.grad.mul_(0.5)
        module.last.bias.grad = module.last.bias.grad * 2
        module.last.weight.grad.data = module.last.weight.grad.data.sign()
        module.first.weight.grad.data = torch.full_like(module.first.weight, 0.1)
        module.first.bias.grad = None
    turn.note_grads()
    turn.optimizer.step()
    turn.optimizer.zero_grad(set_to_none=turn.index == 0)


@clauses.turns(4)
def a_sum_goes_on_from_gradients_whose_data_was_replaced(turn):
    turn.loss().backward()
    if turn.index % 2:
        turn.update()
        return
    for parameter in turn.module.parameters():
        parameter.grad.data = parameter.grad.data * 0.5


@clauses.turns(4)
def gradients_cleared_by_the_module_or_to_zero_start_afresh(turn):
    turn.loss().backward()
    turn.note_grads()
    turn.optimizer.step()
    if turn.index == 0:
        turn.module.zero_grad()
    elif turn.index == 1:
        turn.optimizer.zero_grad(set_to_none=False)
    elif turn.index == 2:
        for parameter in turn.module.parameters():
            parameter.grad = None


@clauses.turns(3, stages=SUMS)
def gradients_that_are_never_cleared_add_up(turn):
    turn.loss().backward()
    turn.note_grads()
    turn.optimizer.step()


@clauses.turns(3)
def weights_edited_between_steps_are_trained_on(turn):
    turn.step()
    with torch.no_grad():
        for parameter in turn.module.parameters():
            parameter.mul_(0.9)
        turn.module.first.weight.zero_()
        turn.module.last.bias.fill_(0.25)


@clauses.turns(3)
def a_penalty_alone_gives_gradients_without_a_forward(turn):
    sum((p * p).sum() for p in turn.module.blocks.parameters()).backward()
    turn.update()


# several modules in one process


@clauses.script()
def two_models_that_train_each_other_in_turn(process):
    """A generator and a discriminator, each with its own loss and optimizer."""
    maker, maker_steps = process.ready(Tower)
    judge, judge_steps = process.ready(lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)))

    def judged(x):
        made = maker(x).detach()
        return judge(made).square().mean() - judge(x[:, :3]).tanh().mean()

    for index, batch in enumerate(rows()):
        process.step(f"{index} judge", judge, judge_steps, judged, batch)
        process.step(f"{index} maker", maker, maker_steps, lambda x: -judge(maker(x)).mean(), batch)
        judge_steps.zero_grad()
    process.note_weights(maker, "maker")
    process.note_weights(judge, "judge")


@clauses.script()
def two_models_with_one_loss_and_one_optimizer(process):
    one, _ = process.ready(Tower, sgd)
    two, _ = process.ready(lambda: nn.Linear(3, 3), sgd)
    both = torch.optim.AdamW([*one.parameters(), *two.parameters()], lr=1e-2, eps=1e-4)
    for index, batch in enumerate(rows()):
        process.mean(lambda x: (two(one(x)) - 1).square().mean(), batch).backward()
        process.note_grads(f"{index} one", one)
        process.update(f"{index} two", two, both)
    process.note_weights(one, "one")
    process.note_weights(two, "two")


@clauses.script()
def a_teacher_and_a_student_train_with_one_loss(process):
    teacher, _ = process.ready(lambda: Tower(3).eval().requires_grad_(False))
    student, optimizer = process.ready(partial(Tower, 1))

    def gap(x):
        with torch.no_grad():
            wanted = teacher(x)
        return (student(x) - wanted).square().mean()

    for index, batch in enumerate(rows()):
        process.step(index, student, optimizer, gap, batch)
    process.note_weights(student)


# more of the ordinary loop


@clauses.script(worlds=(1,))
def dropout_is_that_of_one_process_under_the_same_seed(process):
    text = "nn.Sequential(nn.Linear(8, 8), nn.Dropout(), Residual(), nn.Dropout(), nn.Linear(8, 8))"
    module, optimizer = process.ready(partial(module_of, text))
    torch.manual_seed(3)
    for _ in process.steps(module, optimizer):
        pass


MIXED = """with_parts(without_grad(Gained(ordered(0, 1), 1.5), "inner.first.weight"), {
"inner.blocks.1.up.weight": "inner.blocks.0.up.weight", "unused": nn.Parameter(torch.ones(3))})"""


@clauses.turns(2, partial(module_of, MIXED), stages=((0, 1), (2, 3)))
def accumulated_micro_batches_train_any_module(turn):
    """Tied, frozen, scalar and unused parameters, over two micro-batches of which one uses less."""
    turn.module.inner.order = (0,) if turn.index == 0 else (0, 1)
    turn.accumulate()
    turn.module.inner.order = (0,) if turn.index == 1 else (0, 1)
    turn.step(times=2)


def dropped() -> list[tuple[Tensor, Tensor]]:
    """Nothing is skipped; one by some ranks; all by all ranks but the last; one by every rank."""
    are_last = torch.arange(ROWS) >= ROWS - ROWS // 4
    marks = [0 * are_last, 2 * are_last, 7 * ~are_last, 4 + 0 * are_last, 1 + are_last]
    return list(zip(rows(5), marks, strict=True))


def layers_that_some_ranks_skip(process: Process, options: dict[str, Any]) -> None:
    module, optimizer = process.ready(partial(Tower, 3, by=dropping), **options)
    loss_of = partial(marked, module)
    for index, (batch, mark) in enumerate(dropped()):
        if index % 2:
            with process.accumulating(module):
                process.mean(loss_of, (batch, mark.flip(0))).backward()
        else:
            with torch.no_grad():
                process.mean(loss_of, (batch, mark.flip(0)))
        process.step(index, module, optimizer, loss_of, (batch, mark))
    process.note_weights(module)


for stage, options in (
    (0, {}), (1, {}), (2, {"offload": "optimizer"}), (1, {"wire": onefold.Wire("int8")})
):  # fmt: skip
    clauses.script(
        "layers_that_some_ranks_skip_train_as_in_one_process_at_stages_0_to_2",
        of={"-".join([str(stage), *options]): options}, worlds=(3,), stages=(stage,),
        relative=2e-2 if "wire" in options else 1e-6, **BY_HALF,
    )(layers_that_some_ranks_skip)  # fmt: skip


@clauses.script()
def a_graph_that_one_rank_keeps_does_not_change_the_order_of_collectives(process):
    """As when rank 0 alone keeps a validation loss for its log."""
    module, optimizer = process.ready(Tower)
    kept = []
    for _, batch in process.steps(module, optimizer, 3):
        validation = process.mean(squared(module), batch * 2)
        if process.rank == 0:
            kept.append(validation)


@clauses.turns(3)
def gradients_accumulated_and_then_cleared_are_gone(turn):
    if not turn.process.is_plain:
        turn.accumulate(3)
        turn.module.zero_grad() if turn.index else turn.optimizer.zero_grad()
    turn.step()


@clauses.turns(2, stages=((0,), (1,), (2,), (3,)), fine_units=False,
               may_fail=(onefold.StateError, ""))  # fmt: skip
def a_step_without_the_last_micro_batch_is_right_or_an_error(turn):
    """A loop whose number of batches does not divide by the micro-batches ends like this."""
    if turn.index == 0:
        turn.step()
    else:
        turn.accumulate()
        turn.optimizer.step()


@clauses.turns(stages=((0, 1), (2, 3)))
def between_micro_batches_a_module_may_be_looked_at(turn):
    module = turn.module
    with turn.process.accumulating(module):
        turn.loss(2).backward()
        with torch.no_grad():
            module(turn.batch)
    if not turn.process.is_plain:
        with onefold.unsharded(module):
            assert module.first.weight.shape == (WIDTH, WIDTH)
        module.state_dict()
        with torch.no_grad():
            module.blocks[0](turn.batch)
        onefold.report(module)
    turn.step()


@clauses.script(of={"step": "step", "load": "load", "copy": "copy"})
def weights_changed_between_forward_and_backward_are_an_error_as_in_plain_torch(process, change):
    """Gradients of the old forward at the new weights would be of no function at all."""
    module, optimizer = process.ready(Tower)
    other = {name: p.clone() for name, p in seeded(Tower, seed=5).state_dict().items()}
    process.step(0, module, optimizer, squared(module), rows()[0])
    early = process.mean(squared(module), rows()[1])
    if change == "step":
        process.mean(squared(module), rows()[0]).backward()
        optimizer.step()
    elif change == "load":
        module.load_state_dict(other)
    else:
        with torch.no_grad():
            module.last.weight.mul_(2)
    with pytest.raises(RuntimeError):
        early.backward()
    process.note("refused", torch.ones(1))


@clauses.script()
def hooks_on_modules_see_every_forward_and_backward(process):
    seen: list[str] = []

    def build():
        tower = Tower()
        block = tower.blocks[0]
        block.register_forward_pre_hook(lambda m, args: (args[0] * 1.5,))
        block.register_forward_hook(lambda m, args, out: out * 0.5)
        block.register_full_backward_hook(lambda m, gi, go: seen.append("before"))
        return tower

    module, optimizer = process.ready(build)
    block = module.blocks[1]
    block.register_forward_pre_hook(lambda m, args: (args[0] + m.up.weight[0],))
    block.register_forward_hook(lambda m, args, out: out * m.down.bias.sum())
    block.register_full_backward_pre_hook(lambda m, go: (go[0] * 2,))
    block.register_full_backward_hook(lambda m, gi, go: (gi[0] * 3,))
    for _ in process.steps(module, optimizer):
        pass
    assert seen == ["before"] * 2


@clauses.script()
def a_target_network_follows_another_module(process):
    online, optimizer = process.ready(Tower)
    target, _ = process.ready(lambda: Tower().requires_grad_(False))
    gap = lambda x: (online(x) - target(x) - 1).square().mean()
    for index, batch in enumerate(rows(2)):
        process.step(index, online, optimizer, gap, batch)
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
                slow.lerp_(fast, 0.5)
                slow.data.copy_(slow.data * 0.5 + fast.data)
    target.last.load_state_dict(online.last.state_dict())
    process.note_weights(online, "online")
    process.note_weights(target, "target")


# a gathered slice may take another kernel: not bitwise between stages
@clauses.turns(of=GUARDS, stages=((0,), (1,), (3,)))
def a_method_that_uses_weights_by_hand_evaluates(turn, guard):
    """As a `generate` or `encode` method of a plain model does."""
    module = turn.module

    def encode(x):
        x = in_turn(module.blocks, F.linear(x, module.first.weight, module.first.bias))
        return (x @ module.last.weight.t() + module.last.bias).mean()

    with guard():
        got = turn.process.mean(encode, turn.batch)
    wanted = turn.process.mean(encode, turn.batch)
    torch.testing.assert_close(got.clone(), wanted.detach())
    turn.note_mean("eval", wanted)
    turn.step()


READERS = {
    "numpy": lambda weight: weight.detach().numpy(),
    "array": lambda weight: np.asarray(weight.data),
    "dlpack": lambda weight: torch.from_dlpack(weight.detach()),
}


@clauses.script(of=READERS, worlds=(3,))
def a_weight_can_be_read_through_memory_that_numpy_shares(process, read):
    """numpy keeps the bytes of a storage from being freed; DTensor has none for DLPack."""
    module, optimizer = process.ready(Tower)
    seen = list[Tensor]()

    def look(part, *_):
        seen.append(torch.tensor(read(part.weight).std().item()))

    module.last.register_forward_pre_hook(look)
    module.first.register_forward_hook(look)
    for index, batch in enumerate(rows()):
        process.mean(squared(module), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        look(module.first)
        process.note(f"{index}", torch.stack(seen[-1:]))
    process.note_weights(module)


# narrower compute

TIED = """with_parts(without_grad(Tower(), "first.weight"), {
"blocks.1.up.weight": "blocks.0.up.weight", "unused": nn.Parameter(torch.ones(3))})"""
NARROW = {
    "by hand": "Tower(by=uses_weights)", "in place": "Tower(by=renewing)",
    "attention": 'Attends("encoder")', "tied, frozen, penalised": TIED, "recurrent": "Recurrent()",
}  # fmt: skip


@clauses.script(of=NARROW, worlds=(3, 1), relative=2e-3)
def bf16_compute_is_the_same_at_every_stage_and_near_fp32(process, text):
    module, optimizer = process.ready(
        partial(module_of, text), sgd, **({} if process.is_plain else {"precision": "bf16"})
    )
    penalised = list(module.blocks.parameters()) if text == TIED else []
    loss_of = lambda x: (
        squared(module)(x).float() + 0.01 * sum(p.float().pow(2).sum() for p in penalised)
    )
    for index, batch in enumerate(rows(2)):
        process.step(index, module, optimizer, loss_of, batch)
    process.note_weights(module)


@pytest.mark.parametrize(("clause", "on"), [*clauses.cases()])
def test_any_module(clause, on):
    clause.check(on)


# errors, and one process without ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_computed_weights_outside_of_their_unit_are_an_error_that_says_so(world_size):
    def body(rank, stage):
        module = seeded(partial(module_of, MODULES["computed_weights_work_in_one_unit"].text))
        onefold.shard(module, stage=stage, units=lambda module: True)
        with pytest.raises(
            onefold.StateError, match=r"(?s)computed values in its place.*units=\[\]"
        ):
            module(rows()[0])

    for stage in (0, 3):
        run_ranks(world_size, body, stage)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_without_a_process_group_a_module_trains_as_before(stage):
    script = training(Tower)
    process = Process(0, 1, stage)
    script(process)
    for name, value in run_plain(script).items():
        assert value is not None
        torch.testing.assert_close(process.seen[name], value, rtol=1e-5, atol=1e-7, msg=name)


def branching() -> nn.Module:
    branches = nn.ModuleList([Residual(), Residual()])
    return By(lambda self, x, rank: self.branches[rank](x), branches=branches)


def test_ranks_that_take_other_units_get_an_error_that_names_the_unit():
    """Law 5 where collectives must be in one order and are not: nothing is stepped, none hangs."""

    def body(rank: int) -> None:
        module = branching()
        optimizer = torch.optim.SGD(module.parameters())
        onefold.shard(module, optimizer, stage=3)
        module(torch.ones(2, WIDTH), rank).sum().backward()
        optimizer.step()  # threads have no lanes: ranks compare what they sent here

    with pytest.raises((onefold.OnefoldError, RuntimeError), match="branches"):
        run_ranks(2, body)


def evaluate_own_branch(rank: int) -> None:
    module = onefold.shard(seeded(branching), stage=3)
    with torch.no_grad(), pytest.raises(onefold.OnefoldError, match="branches"):
        module(torch.ones(2, WIDTH), rank)


@pytest.mark.process
def test_ranks_that_evaluate_other_units_get_an_error():
    """Without a backward there is no reduction to notice it by, and no step follows."""
    run_processes(2, evaluate_own_branch)
