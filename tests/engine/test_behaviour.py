"""A probe finds what a step does: optimizers are stepped right, or refused by name."""

from __future__ import annotations

import copy
import cProfile
import itertools
import pstats
import threading
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import onefold
from onefold.engine import blocks
from onefold.engine.behaviour import behaviour_of
from onefold.engine.registry import engine_of
from onefold.errors import ConfigError
from tests.support.ranks import every_rank, run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn
from tests.support.zoo import whole


class DAdapted(Optimizer):
    """SGD whose rate is estimated from all parameters (D-Adaptation, arXiv 2301.07733)."""

    def __init__(self, params, lr=1.0, d0=1e-3):
        super().__init__(params, {"lr": lr, "d": d0, "top": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        held = [p for p in group["params"] if p.grad is not None]
        for p in held:
            state = self.state[p]
            sum_of_grads = state.setdefault("s", torch.zeros_like(p))
            group["top"] += group["d"] * float((p.grad * sum_of_grads).sum())
            sum_of_grads.add_(p.grad, alpha=group["d"])
        norm = sum(float(self.state[p]["s"].abs().sum()) for p in held)
        group["d"] = max(group["d"], group["top"] / max(norm, 1e-12))
        for p in held:
            p.sub_(p.grad, alpha=group["lr"] * group["d"])


class ProdigyLike(Optimizer):
    """Adam's direction, with a rate by the distance gone (Prodigy, arXiv 2306.06101)."""

    def __init__(self, params, lr=1.0, d0=1e-3):
        super().__init__(params, {"lr": lr, "d": d0})

    @torch.no_grad()
    def step(self, closure=None):
        group, top, bottom = self.param_groups[0], 0.0, 1e-12
        held = [p for p in group["params"] if p.grad is not None]
        for p in held:
            start = self.state[p].setdefault("start", p.clone())
            top += float((p.grad * (start - p)).sum())
            bottom += float(p.grad.abs().sum())
        group["d"] = max(group["d"], top / bottom)
        for p in held:
            p.sub_(p.grad.sign(), alpha=group["lr"] * group["d"])


class Counting(Optimizer):
    """SGD that counts its steps under a key that is no parameter, as MADGRAD does."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        self.state["k"] = self.state.get("k", 0) + 1
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] / self.state["k"])


class Renamed(torch.optim.AdamW):
    pass


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn_like(p), alpha=1e-3)
        return super().step(closure)


class Langevin(torch.optim.SGD):
    """Clips by the norm of all gradients, and draws: neither may hide the other."""

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm() if held else 1.0
        for p in held:
            p.add_(p.grad, alpha=-float(0.01 / norm)).add_(torch.randn_like(p), alpha=0.0)


class Rejecting(torch.optim.SGD):
    """Waits for a number that never comes where draws repeat."""

    @torch.no_grad()
    def step(self, closure=None):
        drawn = 0.0
        while drawn < 0.5:
            drawn = 2 * torch.rand(1).item() if drawn else 0.01
        return super().step(closure)


class Sampling(torch.optim.SGD):
    """Adds noise of its own generator, from operations of many kinds."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        self.draws = torch.Generator().manual_seed(1)

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            noise = torch.rand(p.shape, generator=self.draws) + torch.randint(0, 9, p.shape)
            noise += torch.bernoulli(torch.full(p.shape, 0.5)) + torch.randperm(len(p))[0]
            noise += torch.empty_like(p).normal_() + torch.randint_like(p, 3, 7)
            p.add_(noise, alpha=1e-3)
        return super().step(closure)


class Dropping(torch.optim.SGD):
    """Draws by an operation that takes no generator."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(torch.dropout(p.grad, 0.5, train=True), alpha=0.1)


class CountingElements(Optimizer):
    """Adam's kin that notes how many elements its group has, as heavyball 3.2.1 does."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group.setdefault("param_count", sum(p.numel() for p in group["params"]))
            for p in group["params"]:
                p.sub_(p.grad.tanh(), alpha=group["lr"])


class Listed(torch.optim.SGD):
    """Takes a list of parameters, no groups."""

    def __init__(self, params, lr=0.1):
        assert all(isinstance(p, nn.Parameter) for p in params)
        super().__init__(params, lr=lr)


class Listing(torch.optim.SGD):
    """Keeps a plain list for each parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("last", []).append(p.grad.clone())
        return super().step(closure)


class OfModel(torch.optim.SGD):
    def __init__(self, module, *, named):
        self.module, self.named = module, named
        super().__init__(module.parameters(), lr=0.1)


class Clipped(Optimizer):
    """SGD of gradients relative to the largest of all."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        held = self.param_groups[0]["params"]
        largest = max(float(p.grad.abs().max()) for p in held)
        for p in held:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] / largest)


class Counted(Optimizer):
    """SGD of gradients relative to their mean: it counts elements, which ranks hold in part."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        held = self.param_groups[0]["params"]
        mean = sum(float(p.grad.abs().sum()) for p in held) / sum(p.numel() for p in held)
        for p in held:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] / mean)


class SignLike(Optimizer):
    """Lion's update (arXiv 2302.06675): a sign of two averages."""

    def __init__(self, params, lr=1e-2, weight_decay=0.1):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1  # counted here, not for each parameter
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(average.lerp(p.grad, 0.1).tanh(), alpha=group["lr"] / group["k"])
                average.lerp_(p.grad, 0.01)


class Seeded(SignLike):
    """Puts an entry into its state when it is built."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, lr)
        for p in self.param_groups[0]["params"]:
            self.state[p]["seed"] = 1


class ScheduleFreeLike(Optimizer):
    """SGD whose weights are an average in evaluation (Schedule-Free, arXiv 2405.15682)."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "k": 0, "is_training": False})

    @torch.no_grad()
    def _swap(self, is_training, weight):
        for group in self.param_groups:
            if group["is_training"] != is_training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)
                group["is_training"] = is_training

    def train(self):
        self._swap(True, 0.1)

    def eval(self):
        self._swap(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["is_training"]:
                raise RuntimeError("train() was not called")
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["k"]).add_(p.grad, alpha=-0.1 * group["lr"])
                z.sub_(p.grad, alpha=group["lr"])


class MatrixAverage(ScheduleFreeLike):
    """As before, with one rate for each parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.grad.div_(p.grad.norm() + 1e-3)
        return super().step(closure)


class Decayed(torch.optim.SGD):
    """Decays matrices, not vectors."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.dim() > 1:
                p.mul_(0.999)
        return super().step(closure)


class Large(torch.optim.SGD):
    """Keeps other states of large parameters, as 8-bit optimizers do."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.numel() >= 4096:
                self.state[p]["codes"] = torch.zeros(p.numel() // 2, dtype=torch.uint8)
        return super().step(closure)


class Perturbed(torch.optim.SGD):
    """Takes gradients at other weights (SAM, arXiv 2010.01412)."""

    @torch.no_grad()
    def step(self, closure):
        held = self.param_groups[0]["params"]
        with torch.enable_grad():
            loss = closure()
        for p in held:
            p.add_(p.grad, alpha=0.01)
        with torch.enable_grad():
            closure()
        for p in held:
            p.sub_(p.grad, alpha=0.11)
        return loss


class Dealing(torch.optim.SGD):
    """Each rank steps some parameters and sends them to the others, as a distributed Muon does."""

    @torch.no_grad()
    def step(self, closure=None):
        if dist.is_initialized():
            for number, p in enumerate(self.param_groups[0]["params"]):
                if number % dist.get_world_size() == dist.get_rank() and p.grad is not None:
                    p.add_(p.grad, alpha=-self.param_groups[0]["lr"])
                dist.broadcast(p, number % dist.get_world_size())


class ListDealing(Dealing):
    """As the package muon-optimizer 0.1.0: no probe can build it from groups."""

    def __init__(self, params, lr=0.1):
        assert isinstance(params, list)
        assert isinstance(params[0], nn.Parameter)
        super().__init__(params, lr=lr)


class OfModelDealing(OfModel):
    """No probe can build it at all, but its code shows that it sends."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            dist.all_reduce(p.grad)


SUMS = [DAdapted, ProdigyLike]
COUPLED = [Clipped, Counted]


def build():
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 6, generator=generator), torch.randn(12, 2, generator=generator)


def trained(make, rank=0, world_size=1, steps=4, **choices):
    """The weights and losses after some steps; plain without `choices`."""
    module = seeded(build)
    optimizer = make(module.parameters())
    if isinstance(optimizer, ScheduleFreeLike):
        optimizer.train()
    if choices:
        onefold.shard(module, optimizer, **choices)
    x, y = (rows.chunk(world_size)[rank] for rows in data())
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = (module(x) - y).pow(2).mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(steps):
        if isinstance(optimizer, torch.optim.LBFGS | Perturbed):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    if choices:
        with onefold.unsharded(module):
            return [p.detach().clone() for p in module.parameters()], losses
    return [p.detach() for p in module.parameters()], losses


def lbfgs(parameters, line_search_fn=None):
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3, line_search_fn=line_search_fn)


def searching(parameters):
    return lbfgs(parameters, "strong_wolfe")


@worlds_in_turn
@pytest.mark.parametrize("make", [lbfgs, searching, *SUMS, *COUPLED])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_in_one_process_an_optimizer_of_all_parameters_has_the_bits_of_plain_torch(make, stage):
    wanted, losses = trained(make)
    weights, ours = trained(make, stage=stage)
    assert ours == losses
    assert all(map(torch.equal, weights, wanted))


@again_but("2-Clipped", "3-Counted")
@worlds_in_turn
@pytest.mark.parametrize("make", [lbfgs, searching, *SUMS, *COUPLED])
@pytest.mark.parametrize("world_size", [2, 3])
def test_at_stage_0_every_rank_steps_all_parameters_as_plain_torch_does(make, world_size):
    wanted, _ = trained(make)

    def body(rank):
        return trained(make, rank, world_size, stage=0)[0]

    on_ranks = run_ranks(world_size, body)
    tolerance = 1e-2 if make is searching else 1e-4  # a search amplifies rounding
    for weights in on_ranks:
        assert all(map(torch.equal, weights, on_ranks[0]))
        for ours, theirs in zip(weights, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance / 10)


@worlds_in_turn
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("make", [lbfgs, *COUPLED, Langevin])
@every_rank(3)
def test_where_ranks_step_different_parameters_it_is_refused_before_anything_changes(
    rank, make, stage
):
    module = seeded(build)
    optimizer = make(module.parameters())
    before = list(module.parameters())
    name = type(optimizer).__name__
    with pytest.raises(onefold.ConfigError, match=rf"{name}[^$]*hint: use stage=0"):
        onefold.shard(module, optimizer, stage=stage)
    assert all(a is b for a, b in zip(before, module.parameters(), strict=True))
    onefold.shard(module, optimizer, stage=0)  # as the hint says


@every_rank(2)
def test_it_is_refused_at_its_first_step_where_it_was_built_after_shard(rank):
    module = onefold.shard(seeded(build), stage=3)
    optimizer = Clipped(module.parameters())
    module(data()[0]).sum().backward()
    with pytest.raises(onefold.ConfigError, match="Clipped"):
        optimizer.step()


KINDS = {
    **{
        name: (getattr(torch.optim, name), "elementwise")
        for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta")
    },
    **{name: (getattr(torch.optim, name), "elementwise") for name in ("RMSprop", "Rprop", "ASGD")},
    "Adafactor": (torch.optim.Adafactor, "parameter"),
    "Muon": (lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2]), "parameter"),
    "AdamW on a device": (lambda ps: torch.optim.AdamW(ps, capturable=True), "elementwise"),
    "AdamW with a rate on a device": (
        lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(1e-2)),
        "elementwise",
    ),
    "AdamW before its warm-up": (lambda ps: torch.optim.AdamW(ps, lr=0.0), "elementwise"),
    "Renamed": (Renamed, "elementwise"),
    "SignLike": (SignLike, "elementwise"),
    "Counting": (Counting, "elementwise"),
    "ScheduleFreeLike": (ScheduleFreeLike, "elementwise"),
    "Decayed": (Decayed, "parameter"),
    "Large": (Large, "parameter"),
    "Noisy": (lambda ps: Noisy(ps, lr=0.1, momentum=0.9), "parameter"),
    "Langevin": (Langevin, "coupled"),
    "Rejecting": (Rejecting, "parameter"),
    "Sampling": (Sampling, "parameter"),
    "Dropping": (Dropping, "parameter"),
    "Listing": (Listing, "parameter"),
    "Listed": (Listed, "elementwise"),
    "CountingElements": (CountingElements, "elementwise"),
    "Seeded": (Seeded, "elementwise"),
    **{kind.__name__: (kind, "coupled") for kind in (*SUMS, *COUPLED, Perturbed)},
}


@pytest.mark.parametrize("name", KINDS)
def test_a_probe_finds_what_a_step_depends_on(name):
    make, kind = KINDS[name]
    behaviour = behaviour_of(make(list(build().parameters())))
    assert behaviour.kind == kind
    assert behaviour.adds == (make in SUMS)
    apart = (Counting, Seeded)
    assert behaviour.in_blocks == (kind == "elementwise" and make not in apart)


@again_but("1-Counting", "3-Renamed")
@worlds_in_turn
@pytest.mark.parametrize("make", [SignLike, Renamed, Counting])
@pytest.mark.parametrize("world_size", [1, 3])
def test_an_elementwise_class_of_any_library_is_stepped_in_flat_groups(make, world_size):
    wanted, _ = trained(make)

    def body(rank, stage):
        return trained(make, rank, world_size, stage=stage)[0]

    for stage in (0, 1, 2, 3):
        for weights in run_ranks(world_size, body, stage):
            for ours, theirs in zip(weights, wanted, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_one_call_of_a_class_of_any_library_steps_a_unit():
    shapes = []

    class Seeing(SignLike):
        def step(self, closure=None):
            shapes[:] = [p.shape for p in self.param_groups[0]["params"]]
            return super().step(closure)

    run_ranks(3, lambda rank: trained(Seeing, rank, 3, stage=3))
    assert [len(shape) for shape in shapes] == [1, 1]  # two layers, of a matrix and a vector each


@again_but("1-ScheduleFreeLike", "3-Renamed")
@worlds_in_turn
@pytest.mark.parametrize("make", [SignLike, Renamed, ScheduleFreeLike])
@pytest.mark.parametrize("world_size", [1, 3])
def test_an_elementwise_class_of_any_library_is_offloaded_with_the_bits_of_the_device(
    make, world_size, monkeypatch
):
    monkeypatch.setattr(blocks, "BLOCK_NUMEL", 16)

    def body(rank, offload):
        return trained(make, rank, world_size, stage=3, offload=offload)[0]

    wanted = run_ranks(world_size, body, None)[0]
    for weights in run_ranks(world_size, body, "cpu"):
        assert all(map(torch.equal, weights, wanted))


@again_but("3")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_average_of_weights_waits_for_the_step_in_the_background(world_size, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_NUMEL", 16)

    def body(rank):
        module = seeded(lambda: nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)]))
        optimizer = SignLike(module.parameters())
        onefold.shard(module, optimizer, stage=3, offload="cpu")
        copies = [p.detach().clone() for p in module.parameters()]
        lists = [copied.clone() for copied in copies]
        for _ in range(3):
            module(torch.ones(2, 32)).square().sum().backward()
            optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(lists[-1:], list(module.parameters())[-1:])
                for copied, p in reversed(list(zip(copies, module.parameters(), strict=True))):
                    copied.copy_(p)
            for copied, p in zip(copies, module.parameters(), strict=True):
                assert torch.equal(whole(copied), whole(p))
            assert torch.equal(whole(lists[-1]), whole(p))

    run_ranks(world_size, body)


@again_but("3-ProdigyLike")
@worlds_in_turn
@pytest.mark.parametrize("make", SUMS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_over_all_elements_are_taken_over_all_ranks(make, world_size):
    wanted, _ = trained(make, steps=6)

    def body(rank, stage):
        return trained(make, rank, world_size, 6, stage=stage)[0]

    runs = [run_ranks(world_size, body, stage) for stage in (1, 2, 3)]
    for weights in itertools.chain(*runs):
        assert all(map(torch.equal, weights, runs[0][0]))
        for ours, theirs in zip(weights, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", SUMS)
def test_sums_cost_a_few_bytes_a_step_and_states_are_cut_as_those_of_adam(make):
    def body(rank):
        module = seeded(build)
        optimizer = make(module.parameters())
        onefold.shard(module, optimizer, stage=2)
        for _ in range(2):
            module(data()[0]).square().sum().backward()
            optimizer.step()
        report = onefold.report(module)
        assert "optimizer_sum" in str(report)
        sums, numel = report.last_step["optimizer_sum"], sum(map(len, rows_of(module)))
        assert sums.sent_nbytes == sums.calls * 6  # 2 (N-1)/N of 4 bytes, rounded up
        assert report.nbytes("optimizer") == 4 * numel
        return sums.calls

    assert run_ranks(3, body) == [4, 4, 4]  # two units, two sums each


@worlds_in_turn
@pytest.mark.parametrize("make", SUMS)
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 0), (3, 1), (3, 3)])
@every_rank()
def test_states_of_a_class_coupled_by_sums_are_predicted(rank, make, world_size, stage):
    module = seeded(lambda: nn.Sequential(nn.Linear(300, 240), nn.Linear(240, 300)))
    optimizer = make(module.parameters())
    onefold.shard(module, optimizer, stage=stage)
    module(torch.ones(2, 300)).square().sum().backward()
    optimizer.step()
    report = onefold.report(module)
    wanted = report.predicted["optimizer"]
    assert wanted > 0
    assert report.nbytes("optimizer") == pytest.approx(wanted, rel=0.01)


@every_rank(2)
def test_a_report_counts_the_lists_of_lbfgs(rank):
    module = seeded(build)
    optimizer = lbfgs(module.parameters())
    onefold.shard(module, optimizer, stage=0)

    def closure():
        optimizer.zero_grad()
        loss = (module(data()[0]) - data()[1]).pow(2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    state = next(iter(optimizer.state.values()))
    tensors = [*state["old_dirs"], *state["old_stps"], state["d"], state["prev_flat_grad"]]
    assert len(tensors) > 3
    assert onefold.report(module).nbytes("optimizer") >= sum(t.nbytes for t in tensors)


def rows_of(module):
    return [unit.stepped for unit in engine_of(module).units]


@every_rank(2)
def test_a_parameter_without_dimensions_would_be_summed_on_every_rank_and_is_refused(rank):
    module = seeded(build)
    module.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(onefold.ConfigError, match="without dimensions"):
        onefold.shard(module, DAdapted(module.parameters()), stage=3)


@again_but("cpu-3")
@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_weights_that_a_class_swaps_for_evaluation_are_those_of_plain_torch(world_size, offload):
    def evaluated(rank, world_size, **choices):
        module = seeded(build)
        optimizer = ScheduleFreeLike(module.parameters())
        if choices:
            onefold.shard(module, optimizer, **choices)
        x, y = (rows.chunk(world_size)[rank] for rows in data())
        averages = []
        for _ in range(3):
            optimizer.train()
            optimizer.zero_grad()
            (module(x) - y).pow(2).mean().backward()
            optimizer.step()
            optimizer.eval()
            averages.append(module(data()[0]).detach())
        return averages

    wanted = evaluated(0, 1)
    for stage in (3,) if offload else (0, 1, 2, 3):
        choices = {"stage": stage, "offload": offload}
        for averages in run_ranks(
            world_size, lambda rank, choices=choices: evaluated(rank, world_size, **choices)
        ):
            for ours, theirs in zip(averages, wanted, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class Addressed(MatrixAverage):
    """Finds states by the address of a parameter, and trades places with one (heavyball)."""

    def _kept(self, p):
        return self.state[p].setdefault(p.data_ptr(), {})

    @torch.no_grad()
    def _swap(self, is_training, weight):
        group = self.param_groups[0]
        for p in group["params"] if group["is_training"] != is_training else ():
            if "z" in self._kept(p):
                self._kept(p)["z"], _ = p.clone(), p.copy_(self._kept(p)["z"])
        group["is_training"] = is_training

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad / p.grad.norm(), alpha=0.1)
            self._kept(p).setdefault("z", p.clone()).lerp_(p, 0.3)


@pytest.mark.parametrize(
    ("make", "world_size", "choices"),
    [
        (ScheduleFreeLike, 1, {"stage": 3}),
        (ScheduleFreeLike, 3, {"stage": 0}),
        (ScheduleFreeLike, 2, {"stage": 1}),
        (ScheduleFreeLike, 3, {"stage": 3}),
        (ScheduleFreeLike, 2, {"stage": 3, "offload": "cpu"}),
        (Addressed, 1, {"stage": 2}),
        (Addressed, 3, {"stage": 0}),
    ],
)
def test_narrow_weights_are_swapped_in_their_masters_and_come_back(make, world_size, choices):
    """What evaluation shows is that of an fp32 module, rounded; training does not feel the swap."""

    def evaluated(dtype, swaps, **choices):
        module = seeded(build).bfloat16().to(dtype)
        optimizer = make(module.parameters())
        if choices:
            onefold.shard(module, optimizer, **choices)
        averages = []
        for number in range(3):
            optimizer.train()
            optimizer.zero_grad()
            sum((p.float() * (0.5 + number)).sum() for p in module.parameters()).backward()
            optimizer.step()
            if swaps:
                optimizer.eval()
                with onefold.unsharded(module) if choices else nullcontext():
                    averages.append([p.detach().clone().float() for p in module.parameters()])
        optimizer.train()
        ends = [unit.stepped.clone() for unit in engine_of(module).units] if choices else []
        return averages, ends

    wanted, _ = evaluated(torch.float32, True)
    for (averages, ends), (_, undisturbed) in run_ranks(
        world_size,
        lambda _: [evaluated(torch.bfloat16, swaps, **choices) for swaps in (True, False)],
    ):
        for ours, theirs in zip(averages, wanted, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b.bfloat16().float(), rtol=8e-3, atol=1e-4)
        for a, b in zip(ends, undisturbed, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@every_rank(2)
def test_whole_parameters_that_a_class_swaps_for_evaluation_are_refused_above_stage_0(rank):
    module = seeded(build)
    with pytest.raises(onefold.ConfigError, match=r"MatrixAverage[^$]*eval\(\)"):
        onefold.shard(module, MatrixAverage(module.parameters()), stage=1)


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_at_other_weights_are_right_on_whole_copies_and_refused_elsewhere(stage):
    def make(parameters):
        return Perturbed(parameters, lr=0.1)

    def body(rank):
        if stage == 0:
            return trained(make, rank, 3, stage=0)[0]
        with pytest.raises(onefold.ConfigError, match="Perturbed, which evaluates its closure"):
            trained(make, rank, 3, stage=1)
        return None

    wanted, _ = trained(make)
    for weights in run_ranks(3, body):
        for ours, theirs in zip(weights or wanted, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class Twice(OfModel):
    def step(self, closure=None):
        closure()
        return super().step(closure)


def test_a_closure_that_is_evaluated_twice_is_an_error_where_no_probe_has_seen_it():
    module = seeded(build)
    optimizer = Twice(module, named={})
    onefold.shard(module, optimizer, stage=3)
    with pytest.raises(onefold.StateError, match="Twice, which evaluates it again"):
        optimizer.step(lambda: module(data()[0]).sum())


class Around(Optimizer):
    """Moves weights along the gradient before an optimizer inside steps (SAM, arXiv 2010.01412)."""

    def __init__(self, params, base):
        self.base = base(params, lr=0.1)
        super().__init__(self.base.param_groups[0]["params"], {})
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure):
        held = [p for group in self.param_groups for p in group["params"]]
        moves = [p.grad * 0.01 for p in held]
        for p, move in zip(held, moves, strict=True):
            p.add_(move)
        with torch.enable_grad():
            closure()
        for p, move in zip(held, moves, strict=True):
            p.sub_(move)
        self.base.step()


@worlds_in_turn
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 0), (3, 1), (3, 3)])
@pytest.mark.parametrize("is_built_after", [False, True])
def test_of_an_optimizer_around_another_the_one_inside_is_passed_to_shard(
    world_size, stage, is_built_after
):
    def around(rank, world_size, stage=None):
        module = seeded(build)
        if is_built_after and stage is not None:
            onefold.shard(module, stage=stage)
        optimizer = Around(module.parameters(), torch.optim.AdamW)
        if stage is not None and not is_built_after:
            with pytest.raises(onefold.ConfigError, match=r"Around, which wraps AdamW[^$]*\.base"):
                onefold.shard(module, optimizer, stage=stage)
            onefold.shard(module, optimizer.base, stage=stage)
        x, y = (rows.chunk(world_size)[rank] for rows in data())

        def closure():
            optimizer.zero_grad()
            (module(x) - y).pow(2).mean().backward()

        for _ in range(3):
            closure()
            optimizer.step(closure)
        with torch.no_grad():
            return module(data()[0])

    wanted = around(0, 1)
    for found in run_ranks(world_size, lambda rank: around(rank, world_size, stage)):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


class Curved(Optimizer):
    """Divides gradients by the curvature along them (AdaHessian, arXiv 2006.00719)."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            (curved,) = torch.autograd.grad(p.grad, p, torch.ones_like(p), retain_graph=True)
            p.sub_(p.grad / (1 + curved.abs()))


@worlds_in_turn
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 0), (3, 1)])
@every_rank()
def test_a_class_that_differentiates_gradients_is_refused_by_name(rank, world_size, stage):
    module = seeded(build)
    with pytest.raises(onefold.ConfigError, match="Curved, which differentiates gradients"):
        onefold.shard(module, Curved(module.parameters()), stage=stage)


class Elsewhere(OfModel):
    """Evaluates its closure at other weights, and no probe can build it."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.mul_(1.01)
        closure()


@pytest.mark.parametrize("stage", [0, 3])
@every_rank(2)
def test_a_closure_evaluated_at_other_weights_is_an_error_where_no_probe_has_seen_it(rank, stage):
    module = seeded(build)
    optimizer = Elsewhere(module, named={})
    onefold.shard(module, optimizer, stage=stage)

    def closure():
        module(data()[0]).sum().backward()

    with pytest.raises(onefold.StateError, match="Elsewhere, which evaluates it at others"):
        optimizer.step(closure)


@pytest.mark.parametrize("make", [Counting, Clipped, DAdapted, Decayed, Seeded])
@every_rank(2)
def test_states_that_cannot_be_stepped_in_blocks_are_refused_before_anything_changes(rank, make):
    module = seeded(build)
    optimizer = make(module.parameters())
    before = list(module.parameters())
    with pytest.raises(onefold.ConfigError, match=make.__name__):
        onefold.shard(module, optimizer, stage=3, offload="cpu")
    assert all(a is b for a, b in zip(before, module.parameters(), strict=True))


def test_offloaded_states_of_complex_parameters_are_refused():
    module = nn.Linear(3, 3, dtype=torch.cfloat)
    optimizer = torch.optim.Adam(module.parameters())
    with pytest.raises(onefold.ConfigError, match="Adam of complex parameters"):
        onefold.shard(module, optimizer, stage=3, offload="cpu")
    onefold.shard(module, optimizer, stage=3)
    module(torch.ones(2, 3, dtype=torch.cfloat)).abs().sum().backward()
    optimizer.step()


@worlds_in_turn
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("offload", [None, "optimizer"])
def test_momentum_begins_with_the_first_gradient_of_a_parameter_however_late(
    stage, world_size, offload
):
    if offload and stage == 0:
        pytest.skip("stage 0 keeps states on the device")

    def late(rank, world_size, choices):
        module = seeded(build)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        if choices:
            onefold.shard(module, optimizer, **choices)
        x, y = (rows.chunk(world_size)[rank] for rows in data())
        for step in range(3):
            optimizer.zero_grad()
            (module(x) - y).pow(2).mean().backward()
            if step == 0:
                list(module.parameters())[1].grad = None
            optimizer.step()
        if not choices:
            return [p.detach() for p in module.parameters()]
        with onefold.unsharded(module):
            return [p.detach().clone() for p in module.parameters()]

    choices = {"stage": stage, "offload": offload}
    wanted = late(0, 1, {})
    for weights in run_ranks(world_size, lambda rank: late(rank, world_size, choices)):
        for ours, theirs in zip(weights, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_class_that_no_probe_can_build_steps_whole_parameters_or_as_declared():
    class Unknown(OfModel):
        pass

    def make():
        module = build()
        return Unknown(module, named=dict(module.named_parameters()))

    assert behaviour_of(make()).kind == "parameter"
    for kind in ("elementwise", "coupled", "parameter"):
        onefold.declare(Unknown, kind)
        assert behaviour_of(make()).kind == kind
        assert behaviour_of(make()).in_blocks == (kind == "elementwise")
    assert behaviour_of(OfModel(build(), named={})).kind == "parameter"


def test_a_declared_class_trains_in_flat_groups_and_offloaded():
    class Declared(OfModel):
        pass

    onefold.declare(Declared, "elementwise")
    module = seeded(build)
    optimizer = Declared(module, named={})
    onefold.shard(module, optimizer, stage=3, offload="cpu")
    module(data()[0]).square().sum().backward()
    optimizer.step()
    plain = seeded(build)
    plain(data()[0]).square().sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    with onefold.unsharded(module):
        for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_a_class_whose_step_compiles_is_offloaded_if_it_is_declared_elementwise():
    class Compiling(torch.optim.SGD):
        def step(self, closure=None):
            if self.defaults["maximize"]:
                torch.compile(self.step)
            return torch.optim.SGD.step(self, closure)

    assert behaviour_of(Compiling(build().parameters())).kind == "parameter"
    onefold.declare(Compiling, "elementwise")
    assert behaviour_of(Compiling(build().parameters())).in_blocks


def test_a_declaration_names_a_class_and_one_of_three_kinds():
    with pytest.raises(onefold.ConfigError, match="elementwise, parameter, coupled"):
        onefold.declare(Renamed, "flat")
    with pytest.raises(onefold.ConfigError, match="pass the class"):
        onefold.declare(Renamed(build().parameters()), "elementwise")


def test_a_probe_of_a_matrix_optimizer_steps_a_few_elements_alone():
    """A preconditioner of n elements has n² (Shampoo): thousands of elements took minutes."""
    numels = []

    class Normed(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            numels.extend(p.numel() for p in self.param_groups[0]["params"])
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=1 / float(p.grad.norm()))

    assert behaviour_of(Normed(build().parameters())).kind == "parameter"
    assert max(numels) < 100


def test_draws_of_another_thread_are_neither_taken_for_those_of_the_class_nor_rewound():
    numbers = []

    def draw():
        numbers.append(torch.rand(4).tolist())

    class Beside(SignLike):
        def step(self, closure=None):
            thread = threading.Thread(target=draw)  # a loader, or another rank in a thread
            thread.start()
            thread.join()
            return super().step(closure)

    optimizer = Beside(build().parameters())
    torch.manual_seed(7)
    assert behaviour_of(optimizer).kind == "elementwise"
    torch.manual_seed(7)
    assert numbers == [torch.rand(4).tolist() for _ in numbers]


def test_a_probe_reads_and_sets_no_generator(monkeypatch):
    for name in ("get_rng_state", "set_rng_state", "manual_seed"):
        monkeypatch.setattr(torch, name, lambda *_: pytest.fail("a generator was touched"))
    parameters = list(build().parameters())
    before = torch.default_generator.get_state()
    for make in (Noisy, Langevin, Sampling):
        behaviour_of(type(make.__name__, (make,), {})(parameters, lr=0.3))
    assert torch.equal(torch.default_generator.get_state(), before)


def test_a_probe_leaves_the_optimizer_and_the_generator_as_they_are_and_runs_once():
    module, steps = build(), []

    class Watched(Noisy):
        def step(self, closure=None):
            steps.append(len(self.param_groups))
            return super().step(closure)

    optimizer = Watched(module.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    groups, generator = copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
    behaviour_of(optimizer)
    probed = len(steps)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.05)  # as a schedule does
    behaviour_of(optimizer)
    assert len(steps) == probed < 40
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    assert str(optimizer.state_dict()) == str(groups)
    assert torch.equal(torch.get_rng_state(), generator)


@worlds_in_turn
@pytest.mark.parametrize("make", [Dealing, ListDealing, OfModelDealing])
@pytest.mark.parametrize("stage", [1, 3])
@every_rank(3)
def test_an_optimizer_that_sends_messages_is_refused_where_ranks_step_different_rows(
    rank, stage, make
):
    module = seeded(build)
    name, sent = make.__name__, "all_reduce" if make is OfModelDealing else "broadcast"
    if make is OfModelDealing:
        optimizer = make(module, named={})
    else:
        optimizer = make(list(module.parameters()), lr=0.1)
    with pytest.raises(onefold.ConfigError, match=rf"{name}, which calls {sent}[^$]*stage=0"):
        onefold.shard(module, optimizer, stage=stage)


def test_an_optimizer_that_needs_a_process_group_sends_messages():
    class Counting(Dealing):
        def step(self, closure=None):
            self.param_groups[0]["ranks"] = dist.get_world_size()

    module = build()
    assert behaviour_of(Counting(module.parameters(), lr=0.1)).sends == "torch.distributed"


def test_an_optimizer_that_sends_messages_steps_whole_copies_at_stage_0():
    def plain(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    def dealing(parameters):
        return Dealing(parameters, lr=0.1)

    wanted, _ = trained(plain)
    for weights in run_ranks(3, lambda rank: trained(dealing, rank, 3, stage=0)[0]):
        for ours, theirs in zip(weights, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 3])
def test_sparse_gradients_become_dense_and_an_optimizer_of_sparse_ones_is_refused(world_size):
    words = torch.arange(12) % 5

    def run(rank, stage):
        module = seeded(lambda: nn.Embedding(8, 4, sparse=True))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        if stage is not None:
            sparse = torch.optim.SparseAdam(module.parameters())
            with pytest.raises(onefold.ConfigError, match=r"SparseAdam[^$]*hint: "):
                onefold.shard(module, sparse, stage=stage)
            onefold.shard(module, optimizer, stage=stage)
        mine = words if stage is None else words.chunk(world_size)[rank]
        for _ in range(2):
            module(mine).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole(module.weight.detach())

    wanted = run(0, None)
    for stage in (0, 3):
        for ours in run_ranks(world_size, run, stage):
            torch.testing.assert_close(ours, wanted)


def test_a_probe_without_memory_tells_nothing_of_the_class():
    class Hungry(torch.optim.SGD):
        def step(self, closure=None):
            raise MemoryError("no memory")

    module = nn.Linear(8, 8)
    with pytest.raises(MemoryError, match="no memory"):
        onefold.shard(module, Hungry(module.parameters()))


@every_rank(3)
def test_a_probe_without_memory_on_one_rank_is_an_error_on_all(rank):
    class Hungry(torch.optim.SGD):
        def step(self, closure=None):
            if rank == 1:
                raise MemoryError("no memory")

    module = seeded(nn.Linear, 8, 8)
    with pytest.raises((MemoryError, ConfigError), match="no memory"):
        onefold.shard(module, Hungry(module.parameters()))


@pytest.mark.parametrize("world_size", [1, 3])
def test_threads_probe_in_turn_and_find_the_answer_of_the_first(world_size):
    class Counted(Optimizer):
        inside = most = built = 0

        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})
            Counted.built += 1

        @torch.no_grad()
        def step(self, closure=None):
            Counted.inside += 1
            Counted.most = max(Counted.most, Counted.inside)
            time.sleep(1e-4)  # lets another thread run
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad)
            Counted.inside -= 1

    def behaviour(rank):
        return behaviour_of(Counted([nn.Parameter(torch.ones(2))])).kind

    assert run_ranks(world_size, behaviour) == ["elementwise"] * world_size
    assert Counted.most == 1
    probed = Counted.built - world_size
    behaviour_of(Counted([nn.Parameter(torch.ones(2))]))
    assert Counted.built == probed + world_size + 1
    assert probed == 8  # runs of one probe, whatever the number of threads


def test_a_profile_of_python_goes_on_after_the_probe_of_a_class():
    def trained():
        class Unseen(torch.optim.SGD):
            """No probe has seen it."""

        model = nn.Linear(4, 4)
        onefold.shard(model, Unseen(model.parameters(), lr=0.1))
        after_the_probe()

    def after_the_probe():
        pass

    profile = cProfile.Profile()
    profile.runcall(trained)
    names = {name for _, _, name in pstats.Stats(profile).stats}
    assert {"trained", "shard", "after_the_probe"} <= names
