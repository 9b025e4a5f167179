"""Any torch optimizer steps sharded state, unchanged."""

from __future__ import annotations

import gc
from functools import partial
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

import onefold
from onefold.engine.joining import adopt_later
from onefold.engine.registry import engine_of
from onefold.errors import ConfigError
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import every_rank, run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn
from tests.support.training import Job, assert_close, assert_same_bits, cut, run_job, train_plain
from tests.support.zoo import whole

ELEMENTWISE = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "AdamW foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "NAdam": partial(torch.optim.NAdam, lr=1e-2),
    "RAdam": partial(torch.optim.RAdam, lr=1e-2),
    "Adamax": partial(torch.optim.Adamax, lr=1e-2),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "Adadelta": partial(torch.optim.Adadelta, lr=1e-1),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9),
    "Rprop": partial(torch.optim.Rprop, lr=1e-3),
    "ASGD": partial(torch.optim.ASGD, lr=1e-2),
}


class Matrices(nn.Module):
    """Only 2-D parameters, as Muon asks for."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))
        self.head = nn.Linear(16, 50, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


@again_but("SGD", "AdamW", "RAdam", "Adadelta", "ASGD")
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_agree_with_one_process(name):
    job = Job(Model, token_batches(steps=4), next_token_loss, optimizer=ELEMENTWISE[name])
    tolerance = 1e-4 if name in ("Rprop", "Adadelta") else 1e-6  # signs and ratios of tiny numbers
    wanted = train_plain(job)
    runs = [run_job(job, 3, stage) for stage in (0, 1, 3)]
    assert_same_bits(runs[1], runs[2])
    assert_close(runs[0], wanted, tolerance)
    assert_close(runs[1], wanted, tolerance)


@again_but("Muon-3", "Adafactor-2")
@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "optimizer",
    [partial(torch.optim.Muon, lr=1e-2), partial(torch.optim.Adafactor, lr=1e-2)],
    ids=["Muon", "Adafactor"],
)
def test_matrix_optimizers_see_whole_matrices(world_size, optimizer):
    job = Job(Matrices, token_batches(steps=4), next_token_loss, optimizer=optimizer)
    runs = [run_job(job, world_size, stage) for stage in (0, 1, 2, 3)]
    for run in runs[1:]:
        assert_same_bits(run, runs[0])
    # Newton-Schulz in bfloat16 turns a last-bit difference of a gradient into 1e-3 of the update
    assert_close(runs[0], train_plain(job), 1e-3)


def test_a_matrix_optimizer_keeps_each_state_on_one_rank():
    def state_numels(rank):
        module = seeded(Matrices)
        optimizer = torch.optim.Muon(module.parameters(), lr=1e-2)
        onefold.shard(module, optimizer, stage=3)
        next_token_loss(module, token_batches()[0]).backward()
        optimizer.step()
        return [entry["momentum_buffer"].numel() for entry in optimizer.state.values()]

    per_rank = run_ranks(2, state_numels)
    assert sum(map(sum, per_rank)) == sum(p.numel() for p in Matrices().parameters())
    assert all(per_rank)


def test_two_optimizers_share_a_module():
    def groups(module):
        matrices = [p for p in module.parameters() if p.dim() == 2]
        others = [p for p in module.parameters() if p.dim() != 2]
        return torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)

    def train(module, optimizers, rank, world_size):
        for batch in token_batches():
            next_token_loss(module, cut(batch, world_size)[rank]).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def sharded(rank, stage):
        module = seeded(Model)
        optimizers = groups(module)
        onefold.shard(module, optimizers, stage=stage)
        train(module, optimizers, rank, 2)
        with onefold.unsharded(module):
            return [p.detach().clone() for p in module.parameters()]

    plain = seeded(Model)
    train(plain, groups(plain), 0, 1)
    for stage in (0, 3):
        for weight, wanted in zip(run_ranks(2, sharded, stage)[0], plain.parameters(), strict=True):
            torch.testing.assert_close(weight, wanted.detach(), rtol=0, atol=2e-3)


def muon_and_adamw(module: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    matrices = [p for p in module.parameters() if p.dim() == 2]
    others = [p for p in module.parameters() if p.dim() != 2]
    return torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)


@again_but("1-3", "3-2")
@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_two_optimizers_of_a_module_take_one_step_together_and_each_holds_its_states(
    stage, world_size
):
    def report(rank, pick):
        module = seeded(Model)
        optimizers = pick(module)
        onefold.shard(module, optimizers, stage=stage)
        for batch in token_batches(3):
            next_token_loss(module, cut(batch, world_size)[rank]).backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        held = [
            value.to_local() if isinstance(value, DTensor) else value
            for optimizer in optimizers
            for entry in optimizer.state.values()
            for name, value in entry.items()
            if name != "step"
        ]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in held}
        return onefold.report(module), sum(storage.nbytes() for storage in storages.values())

    def adamw(module):
        return (torch.optim.AdamW(module.parameters(), lr=1e-2),)

    alone = run_ranks(world_size, report, adamw)
    together = run_ranks(world_size, report, muon_and_adamw)
    for (one, _), (two, nbytes) in zip(alone, together, strict=True):
        assert (one.steps, two.steps) == (3, 3)
        assert two.memory["optimizer"]["device"].now == nbytes > 0
        sent = {name: (t.calls, t.sent_nbytes) for name, t in two.last_step.items()}
        for name, of_one in one.last_step.items():  # Muon brings whole matrices beside
            assert sent[name] >= (of_one.calls, of_one.sent_nbytes)


def test_optimizers_that_step_in_turns_take_a_step_each_and_one_that_is_gone_holds_nothing():
    module = seeded(Model)
    optimizers = list(muon_and_adamw(module))
    onefold.shard(module, optimizers)
    for turn, batch in enumerate(token_batches(4)):
        next_token_loss(module, batch).backward()
        optimizers[turn % 2].step()
        optimizers[turn % 2].zero_grad()
        assert onefold.report(module).steps == turn + 1
    optimizers[0].step()
    optimizers[0].step()
    assert onefold.report(module).steps == 5, "the first of them shares the step before"
    both = onefold.report(module).memory["optimizer"]["device"].now
    others = 2 * 4 * sum(p.numel() for p in module.parameters() if p.dim() != 2)
    del optimizers[0]
    gc.collect()
    assert onefold.report(module).memory["optimizer"]["device"].now == others < both


@worlds_in_turn
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Muon])
def test_an_optimizer_built_after_shard_trains_the_same(stage, kind):
    def train(rank, late):
        module = seeded(Matrices)
        optimizer = None if late else kind(module.parameters(), lr=1e-2)
        onefold.shard(module, optimizer, stage=stage)
        if optimizer is None:
            optimizer = kind(module.parameters(), lr=1e-2)
        for batch in token_batches():
            next_token_loss(module, cut(batch, 2)[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        with onefold.unsharded(module):
            return [p.detach().clone() for p in module.parameters()]

    for late, early in zip(
        run_ranks(2, train, True)[0], run_ranks(2, train, False)[0], strict=True
    ):
        assert torch.equal(late, early)


def test_one_fused_call_steps_each_unit_and_group(monkeypatch):
    calls = []
    fused = torch._fused_adamw_

    def counting(params, *args, **kwargs):
        if params[0].dtype != torch.float64:  # not the probe's
            calls.append([p.numel() for p in params])
        return fused(params, *args, **kwargs)

    monkeypatch.setattr(torch, "_fused_adamw_", counting)

    def step(rank):
        module = seeded(Model)
        decay = [p for p in module.parameters() if p.dim() > 1]
        plain = [p for p in module.parameters() if p.dim() == 1]
        optimizer = torch.optim.AdamW([{"params": decay}, {"params": plain, "weight_decay": 0.0}])
        onefold.shard(module, optimizer, stage=3)
        units = len(onefold.report(module).units)
        next_token_loss(module, token_batches()[0]).backward()
        optimizer.step()
        return units

    units = run_ranks(2, step)[0]
    assert units == 5
    assert len(calls) == 2 * 2  # one call a group and rank ...
    assert sorted(map(len, calls)) == [4, 4, 5, 5]  # ... of one tensor a unit that has the group


@every_rank(2)
def test_schedulers_hooks_and_groups_keep_working(rank):
    module = seeded(Model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1.0)
    seen = []
    optimizer.register_step_pre_hook(lambda o, a, k: seen.append(o.param_groups[0]["params"][0]))
    same = optimizer
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    onefold.shard(module, optimizer, stage=3)
    optimizer.register_step_post_hook(lambda o, a, k: seen.append(o.param_groups[0]["params"][0]))
    optimizer.register_step_pre_hook(lambda o, a, k: seen.append(o.param_groups[0]["params"][0]))
    for batch in token_batches(steps=2):
        next_token_loss(module, batch).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    face = module.embed.weight
    assert optimizer is same
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert len(seen) == 6
    assert all(tensor is face for tensor in seen)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [
        id(p) for p in module.parameters()
    ]
    assert isinstance(optimizer.state[face]["exp_avg"], DTensor)
    assert optimizer.state[face]["exp_avg"].shape == face.shape


@every_rank(2)
def test_a_closure_is_called_once_and_its_loss_returned(rank):
    module = seeded(Model)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    onefold.shard(module, optimizer, stage=3)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = next_token_loss(module, token_batches()[0])
        loss.backward()
        calls.append(loss.detach())
        return loss

    loss = optimizer.step(closure)
    assert len(calls) == 1
    assert torch.equal(loss, calls[0])


@worlds_in_turn
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("world_size", [1, 3])
def test_an_optimizer_that_has_stepped_is_recut_and_goes_on(stage, world_size):
    def plain_steps(module, optimizer, batches, rank=0, world=1):
        for batch in batches:
            next_token_loss(module, cut(batch, world)[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()

    def resumed(rank):
        module = seeded(Model)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
        plain_steps(module, optimizer, batches[:2])
        onefold.shard(module, optimizer, stage=stage)
        plain_steps(module, optimizer, batches[2:], rank, world_size)
        with onefold.unsharded(module):
            return [p.detach().clone() for p in module.parameters()]

    batches = token_batches(steps=4)
    whole = seeded(Model)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, fused=True)
    plain_steps(whole, optimizer, batches)
    for weight, wanted in zip(run_ranks(world_size, resumed)[0], whole.parameters(), strict=True):
        torch.testing.assert_close(weight, wanted.detach(), rtol=1e-5, atol=1e-6)


@again_but("3")
@pytest.mark.parametrize("stage", [0, 1, 3])
@every_rank(2)
def test_a_loaded_optimizer_state_is_used(rank, stage):
    batches = token_batches(steps=4)

    def fresh():
        module = seeded(Model)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        return onefold.shard(module, optimizer, stage=stage), optimizer

    def steps(module, optimizer, batches):
        for batch in batches:
            next_token_loss(module, cut(batch, 2)[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()

    module, optimizer = fresh()
    steps(module, optimizer, batches[:2])
    saved_module = {k: v.clone() for k, v in module.state_dict().items()}
    saved_optimizer = optimizer.state_dict()
    other, other_optimizer = fresh()
    other.load_state_dict(saved_module)
    other_optimizer.load_state_dict(saved_optimizer)
    steps(other, other_optimizer, batches[2:])
    steps(module, optimizer, batches[2:])
    for ours, theirs in zip(module.parameters(), other.parameters(), strict=True):
        ours, theirs = (getattr(p, "_local_tensor", p) for p in (ours, theirs))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("stage", [1, 3])
@every_rank(2)
def test_a_step_that_raises_leaves_faces_in_the_groups(rank, stage):
    module = seeded(Model)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    onefold.shard(module, optimizer, stage=stage)
    next_token_loss(module, token_batches()[0]).backward()
    optimizer.param_groups[0]["momentum"] = "wrong"
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0
    optimizer.zero_grad()
    next_token_loss(module, token_batches()[0]).backward()
    assert optimizer.param_groups[0]["params"][0] is module.embed.weight
    optimizer.step()
    assert optimizer.param_groups[0]["params"][0] is module.embed.weight


@every_rank(2)
def test_lbfgs_is_refused_where_its_parameters_are_spread(rank):
    module = seeded(Model)
    with pytest.raises(onefold.ConfigError, match="LBFGS"):
        onefold.shard(module, torch.optim.LBFGS(module.parameters()), stage=3)


def test_gradients_set_by_hand_are_stepped():
    def run(rank):
        module = seeded(Model)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        onefold.shard(module, optimizer, stage=3)
        before = module.head.weight.full_tensor()
        module.head.weight.grad = torch.ones_like(module.head.weight)
        optimizer.step()
        assert torch.equal(module.head.weight.full_tensor(), before - 1)

    run_ranks(2, run)
    assert not dist.is_initialized()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_that_a_user_keeps_are_not_overwritten_by_the_next_backward(stage):
    def train(rank):
        module = seeded(lambda: nn.Linear(8, 8))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        onefold.shard(module, optimizer, stage=stage)
        module(torch.ones(2, 8)).sum().backward()
        kept = [parameter.grad for parameter in module.parameters()]
        views = [_local(grad).view(-1) for grad in kept]
        before = [view.clone() for view in views]
        optimizer.zero_grad()
        module(torch.randn(2, 8)).square().sum().backward()
        for view, was in zip(views, before, strict=True):
            assert torch.equal(view, was)

    def _local(tensor):
        return tensor._local_tensor if isinstance(tensor, DTensor) else tensor

    run_ranks(2, train)


@pytest.mark.parametrize("stage", [0, 3])
def test_loaded_state_replaces_that_of_parameters_the_last_step_left_alone(stage):
    def body(rank: int, stage: int | None) -> list[Tensor]:
        module = seeded(lambda: nn.ModuleList(nn.Linear(6, 6) for _ in range(2)))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        if stage is not None:
            onefold.shard(module, optimizer, stage=stage)

        def step(*layers: nn.Module) -> None:
            sum(layer(torch.ones(2, 6)).square().sum() for layer in layers).backward()
            optimizer.step()
            optimizer.zero_grad()

        step(*module)
        step(module[0])
        state = optimizer.state_dict()
        for entry in state["state"].values():
            entry["exp_avg"] = entry["exp_avg"] * 0.0
        optimizer.load_state_dict(state)
        step(*module)
        return [whole(p.detach()).clone() for p in module.parameters()]

    wanted = body(0, None)
    for got in run_ranks(2, body, stage):
        for a, b in zip(wanted, got, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_module_that_is_collected_while_another_steps_disturbs_no_step():
    """The collector may run anywhere, also in the loop over the hooks of all optimizers."""

    def lost() -> None:
        module = nn.Linear(2, 2)
        onefold.shard(module, stage=3)
        module.__dict__["itself"] = module  # in a cycle: it waits for the collector

    def collect(*_: object) -> None:
        gc.collect()

    module = nn.Linear(2, 2)
    handle = register_optimizer_step_pre_hook(collect)
    try:
        for _ in range(2):
            lost()
            num_hooks = len(_global_optimizer_pre_hooks)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            module(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    finally:
        handle.remove()
    lost()
    assert len(_global_optimizer_pre_hooks) < num_hooks, "hooks of what is gone go with the next"


def test_modules_are_sharded_while_the_collector_runs_what_adds_step_hooks():
    """As it does where ranks are threads: what it frees lets another thread go on."""
    num_hooks = 3000  # more than the freed tuples that CPython keeps: the collector has to run
    handles = [register_optimizer_step_pre_hook(lambda *_: None) for _ in range(num_hooks)]
    added = []

    def add(phase: str, _: object) -> None:
        if phase == "start":
            added.append(register_optimizer_step_pre_hook(lambda *_: None))
        elif added:
            added.pop().remove()

    module = nn.Linear(2, 2)
    onefold.shard(module)
    engine = engine_of(module)
    threshold = gc.get_threshold()
    gc.callbacks.append(add)
    try:
        gc.set_threshold(1)
        adopt_later(engine)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(add)
        for handle in [*handles, *added]:
            handle.remove()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_graph_of_one_optimizers_units_outlives_the_step_of_another(stage):
    """A maker's output is used again after its critic has stepped, as in plain PyTorch."""

    def body(rank: int, is_plain: bool) -> list[Tensor]:
        module = seeded(lambda: nn.ModuleList(nn.Sequential(*_pair()) for _ in range(2)))
        maker, critic = module
        first, second = (torch.optim.AdamW(part.parameters(), lr=1e-2) for part in module)
        if not is_plain:
            onefold.shard(module, [first, second], stage=stage)
        rows = torch.linspace(-1, 1, 32).reshape(4, 8)
        for _ in range(3):
            made = maker(rows)
            critic(made.detach()).square().mean().backward()
            second.step()
            second.zero_grad()
            critic(made).mean().backward()
            first.step()
            first.zero_grad()
            second.zero_grad()
        return [whole(parameter) for parameter in module.parameters()]

    wanted = body(0, True)
    for found in run_ranks(2, body, False):
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs)


def _pair() -> list[nn.Module]:
    return [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]


ORDERED = [partial(torch.optim.AdamW, lr=1e-2), partial(torch.optim.Adafactor, lr=1e-2)]


def in_an_order_of_its_own(rank, make, stage=None, *, is_built_later=False, without=()):
    """The optimizer after two steps: groups made from a set are in the order of addresses."""
    module = seeded(Matrices)
    if is_built_later:
        onefold.shard(module, stage=stage)
    named = sorted(module.named_parameters(), key=lambda pair: crc32(f"{rank}{pair[0]}".encode()))
    matrices = [p for n, p in named if "layers" in n and n not in without]
    optimizer = make([{"params": matrices}, {"params": [p for n, p in named if "layers" not in n]}])
    if stage is not None and not is_built_later:
        onefold.shard(module, optimizer, stage=stage, units=[module.layers[0], module.layers[1]])
    for tokens in token_batches(steps=2):
        optimizer.zero_grad()
        next_token_loss(module, tokens).backward()
        optimizer.step()
    names = {id(p): n for n, p in module.named_parameters()}
    order = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if stage is None:
        return list(module.parameters()), order
    with onefold.unsharded(module):
        return [p.detach().clone() for p in module.parameters()], order


@worlds_in_turn
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("make", ORDERED, ids=["AdamW", "Adafactor"])
@pytest.mark.parametrize("is_built_later", [False, True])
def test_groups_whose_order_differs_on_each_rank_are_stepped_as_in_plain_torch(
    stage, make, is_built_later
):
    wanted, _ = in_an_order_of_its_own(0, make)

    def body(rank):
        return in_an_order_of_its_own(rank, make, stage, is_built_later=is_built_later)

    ranks = run_ranks(3, body)
    for weights, order in ranks:
        for ours, theirs in zip(weights, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        assert is_built_later or order == ranks[0][1]


@every_rank(3)
def test_groups_of_other_parameters_on_one_rank_are_refused_by_name(rank):
    without = ("layers.1.weight",) if rank == 1 else ()
    with pytest.raises(ConfigError, match=r"group 0[^$]*'layers.1.weight' on rank 0 alone"):
        in_an_order_of_its_own(rank, ORDERED[0], 3, without=without)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_one_rank_that_casts_steps_one_tensor_a_unit_and_holds_what_was_predicted(precision):
    class Counting(torch.optim.AdamW):
        def step(self, closure=None):
            if self is optimizer:  # `shard` tries copies
                stepped.append(len(self.param_groups[0]["params"]))
            return super().step(closure)

    stepped = []
    model = seeded(Model)
    optimizer = Counting(model.parameters())
    num_parameters = len(optimizer.param_groups[0]["params"])
    onefold.shard(model, optimizer, stage=2, precision=precision)
    for _ in range(3):
        next_token_loss(model, token_batches(1)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = onefold.report(model)
    assert stepped == [len(report.units)] * 3 < [num_parameters] * 3
    kinds = {kind: tiers["device"].peak for kind, tiers in report.memory.items()}
    assert report.predicted == kinds | {"all": report.memory_peak}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@every_rank(3)
def test_cleared_gradients_leave_no_bytes_behind_where_shards_are_reduced(rank, stage):
    """Where activations outweigh gradients, the peak is where forward ends, and has none of them.

    Stage 0 keeps their memory for the next backward, as DDP does (docs/adr/0006).
    """
    module = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    optimizer = torch.optim.AdamW(module.parameters())
    onefold.shard(module, optimizer, stage=stage)
    for _ in range(2):
        module(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    module(torch.ones(2, 8))
    report = onefold.report(module)
    assert report.memory["grad"]["device"].peak == report.predicted["grad"] > 0
    assert bool(report.memory["grad"]["device"].now) is (stage == 0)
