"""Optimizers that need all parameters at once are right on whole copies, or refused by name."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import onefold
from onefold.engine.coupled import is_coupled
from tests.support.ranks import run_ranks, seeded


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


class OfModel(torch.optim.SGD):
    def __init__(self, module, *, named):
        self.module, self.named = module, named
        super().__init__(module.parameters(), lr=0.1)


COUPLED = [DAdapted, ProdigyLike, Counting]


def build():
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 6, generator=generator), torch.randn(12, 2, generator=generator)


def trained(make, rank=0, world_size=1, steps=4, **choices):
    """The weights and losses after some steps; plain without `choices`."""
    module = seeded(build)
    optimizer = make(module.parameters())
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
        if isinstance(optimizer, torch.optim.LBFGS):
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


@pytest.mark.parametrize("make", [lbfgs, searching, *COUPLED])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_in_one_process_an_optimizer_of_all_parameters_has_the_bits_of_plain_torch(make, stage):
    wanted, losses = trained(make)
    weights, ours = trained(make, stage=stage)
    assert ours == losses
    assert all(map(torch.equal, weights, wanted))


@pytest.mark.parametrize("make", [lbfgs, searching, *COUPLED])
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


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("make", [lbfgs, *COUPLED])
def test_where_ranks_step_different_parameters_it_is_refused_before_anything_changes(make, stage):
    def body(rank):
        module = seeded(build)
        optimizer = make(module.parameters())
        before = list(module.parameters())
        name = type(optimizer).__name__
        with pytest.raises(onefold.ConfigError, match=rf"{name}[^$]*hint: use stage=0"):
            onefold.shard(module, optimizer, stage=stage)
        assert all(a is b for a, b in zip(before, module.parameters(), strict=True))
        onefold.shard(module, optimizer, stage=0)  # as the hint says

    run_ranks(3, body)


def test_it_is_refused_at_its_first_step_where_it_was_built_after_shard():
    def body(rank):
        module = onefold.shard(seeded(build), stage=3)
        optimizer = DAdapted(module.parameters())
        module(data()[0]).sum().backward()
        with pytest.raises(onefold.ConfigError, match="DAdapted"):
            optimizer.step()

    run_ranks(2, body)


SEPARATE = {
    **{
        name: getattr(torch.optim, name)
        for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta")
    },
    **{name: getattr(torch.optim, name) for name in ("RMSprop", "Rprop", "ASGD", "Adafactor")},
    "Renamed": Renamed,
    "Noisy": lambda parameters: Noisy(parameters, lr=0.1, momentum=0.9),
    "Muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.dim() == 2]),
}


@pytest.mark.parametrize("name", SEPARATE)
def test_a_class_that_steps_each_parameter_by_itself_passes_the_probe(name):
    module = build()
    assert not is_coupled(SEPARATE[name](list(module.parameters())))


def test_a_class_that_cannot_be_built_from_its_hyper_parameters_is_not_refused():
    module = build()
    assert not is_coupled(OfModel(module, named=dict(module.named_parameters())))


def test_a_probe_leaves_the_optimizer_and_the_generator_as_they_are_and_is_cheap():
    module = build()
    optimizer = Noisy(module.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    groups, generator = copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
    seconds = []
    for _ in range(5):
        start = time.process_time()
        assert not is_coupled(optimizer)
        seconds.append(time.process_time() - start)
    assert str(optimizer.state_dict()) == str(groups)
    assert torch.equal(torch.get_rng_state(), generator)
    assert min(seconds) < 0.05  # about 2 ms; other tests run beside it
