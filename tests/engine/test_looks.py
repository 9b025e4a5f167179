"""Classes that find a parameter by attribute, identity or position find the one that users see."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import onefold
from onefold.engine.behaviour import behaviour_of
from onefold.engine.registry import owner_of
from tests.support.ranks import every_rank, run_ranks, seeded
from tests.support.rows import worlds_in_turn
from tests.support.zoo import whole

RATES = {"0.weight": 0.1, "0.bias": 2.0, "2.weight": 0.5, "2.bias": 2.0}


class Looking(Optimizer):
    """Averages gradients; each parameter has a rate of its own, which a class looks up."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def rate(self, p, place):
        return 1.0

    def held(self):
        for i, group in enumerate(self.param_groups):
            yield from (((i, j), p) for j, p in enumerate(group["params"]))

    @torch.no_grad()
    def step(self, closure=None):
        for place, p in self.held():
            if p.grad is not None:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.5)
                p.sub_(mean, alpha=0.1 * self.rate(p, place))


class Scaled(Looking):
    def rate(self, p, place):
        return getattr(p, "scale", 1.0)


class Direct(Looking):
    def rate(self, p, place):
        return p.scale if p.is_scaled else 1.0


class ById(Looking):
    def __init__(self, params):
        super().__init__(params)
        self.tables = [({id(p): p.scale for _, p in self.held()},)]

    def rate(self, p, place):
        return self.tables[0][0].get(id(p), 1.0)


class ByParameter(Looking):
    def __init__(self, params):
        super().__init__(params)
        self.scales = {p: p.scale for _, p in self.held()}
        self.large = {id(p) for p, scale in self.scales.items() if scale > 1}

    def rate(self, p, place):
        return self.scales.get(p, 1.0) * (1.1 if id(p) in self.large else 1.0)


class InList(Looking):
    """Steps the parameters of a list of its own."""

    def __init__(self, params):
        super().__init__(params)
        self.mine = SimpleNamespace(kept=[p for _, p in Looking.held(self)])

    def held(self):
        yield from (((), p) for p in self.mine.kept)

    def rate(self, p, place):
        return p.scale


class ByPlace(ById):
    """By group and number, where a manager says so for an id."""

    def __init__(self, params):
        super().__init__(params)
        self.places = {place: p.scale for place, p in self.held()}

    def rate(self, p, place):
        return self.places.get(place, 1.0)


class OfModule(Looking):
    """Compares with what a module holds."""

    def __init__(self, params, module):
        super().__init__(params)
        self.overrides = [(module[0], "weight", 0.1), (module[2], "bias", 2.0)]

    def rate(self, p, place):
        return next((rate for part, n, rate in self.overrides if getattr(part, n) is p), 1.0)


class Marking(Looking):
    """Keeps a moment as an attribute, and counts steps in one that the user set."""

    def rate(self, p, place):
        p.moment = getattr(p, "moment", 0) + p.grad
        p.count = getattr(p, "count", 0) + 1
        return float(p.moment.mean()) / p.count


class Choosing(Looking):
    """Takes whole matrices where an attribute says so."""

    def rate(self, p, place):
        return 1 / float(p.grad.norm()) if getattr(p, "is_matrix", False) else 1.0


BY_ATTRIBUTE = [Scaled, Direct]
BY_IDENTITY = [ById, ByParameter, InList, ByPlace, OfModule]


def build():
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    for name, p in module.named_parameters():
        p.scale, p.is_scaled = RATES[name], name != "2.bias"
    return module


def of_groups(make, module):
    groups = [{"params": list(part.parameters())} for part in (module[2], module[0])]
    return make(groups, module) if make is OfModule else make(groups)


def trained(make, rank=0, world_size=1, *, is_built_later=False, changes=False, **choices):
    """Weights after three steps; plain without `choices`."""
    module = seeded(build)
    optimizer = None if is_built_later else of_groups(make, module)
    if choices:
        onefold.shard(module, optimizer, **choices)
    optimizer = optimizer or of_groups(make, module)
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    for step in range(3):
        optimizer.zero_grad()
        (module(inputs.chunk(world_size)[rank]) - 1).square().mean().backward()
        optimizer.step()
        for p in module.parameters() if changes else ():
            p.scale = p.scale / 2 if step else 0.3
    return [whole(p.detach()).clone() for p in module.parameters()]


def assert_as_plain(make, world_size, **choices):
    changes = choices.pop("changes", False)
    later = choices.pop("is_built_later", False)
    wanted = trained(make, changes=changes)

    def body(rank):
        return trained(make, rank, world_size, changes=changes, is_built_later=later, **choices)

    for weights in run_ranks(world_size, body):
        for ours, theirs in zip(weights, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@worlds_in_turn
@pytest.mark.parametrize("make", [*BY_ATTRIBUTE, *BY_IDENTITY, Marking])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (1, 3), (3, 0), (3, 2), (3, 3)])
def test_a_class_finds_the_parameter_that_the_user_sees(make, world_size, stage):
    assert_as_plain(make, world_size, stage=stage)


@worlds_in_turn
@pytest.mark.parametrize("make", [Scaled, *BY_IDENTITY])
@pytest.mark.parametrize("stage", [1, 3])
def test_so_does_one_that_is_built_after_shard(make, stage):
    assert_as_plain(make, 2, stage=stage, is_built_later=True)


@worlds_in_turn
@pytest.mark.parametrize("make", BY_ATTRIBUTE)
@pytest.mark.parametrize("choices", [{}, {"offload": "cpu"}, {"offload": "optimizer"}], ids=str)
@pytest.mark.parametrize("world_size", [1, 3])
def test_attributes_may_change_between_steps(make, choices, world_size):
    assert_as_plain(make, world_size, stage=3, changes=True, **choices)


@every_rank(2)
def test_parameters_with_equal_attributes_are_stepped_in_one_call(rank):
    module = seeded(build)
    for p in module.parameters():
        p.scale, p.is_scaled = 0.5, True
    optimizer = Direct(module.parameters())
    onefold.shard(module, optimizer, stage=3)
    calls = []
    optimizer.rate = lambda p, place: calls.append(place) or p.scale
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert len(calls) == len(set(calls)) == 2  # one for each layer


@pytest.mark.parametrize("make", BY_IDENTITY)
def test_one_that_finds_by_identity_is_not_offloaded_and_refused_by_name(make):
    module = seeded(build)
    with pytest.raises(onefold.ConfigError, match=rf"{make.__name__}: [^$]*hint: offload=None"):
        onefold.shard(module, of_groups(make, module), stage=3, offload="cpu")


@every_rank(2)
def test_tables_show_users_the_sharded_parameters_between_steps(rank):
    module = seeded(build)
    optimizer = of_groups(ByParameter, module)
    onefold.shard(module, optimizer, stage=3)
    for _ in range(2):
        assert list(optimizer.scales) == [*module[2].parameters(), *module[0].parameters()]
        assert optimizer.large == {id(module[0].bias), id(module[2].bias)}
        module(torch.ones(2, 4)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_the_methods_of_a_shard_are_no_attributes_of_the_user(stage):
    """In one process they are bound to the parameter; no other form of it may show that one."""
    module = seeded(build)
    onefold.shard(module, torch.optim.SGD(module.parameters(), lr=0.1), stage=stage)
    for parameter in owner_of(module[0].weight).by_sharded.values():
        assert {"scale", "is_scaled"} == parameter.attributes.keys()


@every_rank(2)
def test_attributes_are_those_of_the_parameter_in_all_its_forms(rank):
    class Reading(nn.Linear):
        def forward(self, x):
            return super().forward(x) * self.weight.scale

    module = seeded(lambda: nn.Sequential(Reading(4, 4)))
    module[0].weight.scale = 3.0
    wanted = module(torch.ones(2, 4)).detach()
    onefold.shard(module, torch.optim.SGD(module.parameters(), lr=0.1), stage=3)
    assert module[0].weight.scale == 3.0
    torch.testing.assert_close(module(torch.ones(2, 4)).detach(), wanted)
    with onefold.unsharded(module):
        assert module[0].weight.scale == 3.0


def test_an_attribute_that_chooses_whole_matrices_is_probed_with_its_value():
    module = build()
    assert behaviour_of(Choosing(module.parameters())).kind == "elementwise"
    module[0].weight.is_matrix = False
    assert behaviour_of(Choosing(module.parameters())).kind == "elementwise"
    module[0].weight.is_matrix = True
    assert behaviour_of(Choosing(module.parameters())).kind == "parameter"
    module[0].weight.is_matrix = torch.ones(6, 4)  # cannot be probed
    assert behaviour_of(Choosing(module.parameters())).kind == "parameter"


@every_rank(2)
def test_an_attribute_that_comes_later_and_needs_whole_matrices_is_an_error_by_name(rank):
    module = seeded(build)
    optimizer = Choosing(module.parameters())
    onefold.shard(module, optimizer, stage=3)
    module[0].weight.is_matrix = True
    module(torch.ones(2, 4)).sum().backward()
    with pytest.raises(onefold.StateError, match=r"Choosing[^$]*is_matrix[^$]*hint: fill"):
        optimizer.step()


def test_tables_that_come_later_are_an_error_by_name_where_elements_are_stepped_apart():
    module = seeded(build)
    optimizer = Looking(module.parameters())
    onefold.shard(module, optimizer, stage=3, precision="bf16")
    optimizer.scales = {id(module[0].weight): 0.1}
    module(torch.ones(2, 4)).sum().backward()
    with pytest.raises(onefold.StateError, match=r"Looking[^$]*tables[^$]*hint: fill"):
        optimizer.step()


def test_tables_that_come_later_are_found_where_one_rank_steps_the_parameters_themselves():
    module, plain = seeded(build), seeded(build)
    optimizers = [Looking(each.parameters()) for each in (module, plain)]
    onefold.shard(module, optimizers[0], stage=3)
    for each, optimizer in zip((module, plain), optimizers, strict=True):
        optimizer.scales = {id(each[0].weight): 0.1}
        each(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    torch.testing.assert_close([*module.parameters()], [*plain.parameters()], rtol=0, atol=0)


def test_torchs_own_classes_are_asked_for_no_attributes():
    module = build()
    assert not behaviour_of(torch.optim.AdamW(module.parameters())).reads
    assert behaviour_of(Scaled(module.parameters())).reads == {"scale"}


@worlds_in_turn
@pytest.mark.parametrize("how", ["module", "register", "rate", "later"])
@pytest.mark.parametrize("stage", [0, 3])
def test_overrides_of_bitsandbytes_meet_their_parameters(how, stage):
    """bitsandbytes 0.50.2 keeps them by id and by place; Trainer sets one for each embedding."""
    bnb = pytest.importorskip("bitsandbytes")
    manager = bnb.optim.GlobalOptimManager.get_instance()

    def run(stage=None):
        module = seeded(lambda: nn.ModuleList([nn.Embedding(64, 64), nn.Linear(64, 64)]))
        rate = {"lr": 1e-4} if how == "rate" else {"optim_bits": 32}
        if how == "module":
            manager.register_module_override(module[0], "weight", rate)
        elif how != "later":
            manager.override_config(module[1].weight, key_value_dict=dict(rate))
            manager.register_parameters(module.parameters())
        optimizer = bnb.optim.AdamW8bit(module.parameters(), lr=1e-2)
        if stage is not None:
            onefold.shard(module, optimizer, stage=stage)
        if how == "later":
            manager.override_config(module[1].weight, key_value_dict=dict(rate))
        for _ in range(2):
            optimizer.zero_grad()
            module[1](module[0](torch.arange(64))).square().mean().backward()
            optimizer.step()
        kept = {n: optimizer.state.get(p, {}) for n, p in module.named_parameters()}
        kinds = {n: state["state1"].dtype for n, state in kept.items() if "state1" in state}
        return [whole(p.detach()).clone() for p in module.parameters()], kinds

    manager.initialize()
    wanted, plain = run()
    manager.initialize()
    weights, kinds = run(stage)
    manager.initialize()
    assert kinds == plain
    assert all(map(torch.equal, weights, wanted))
