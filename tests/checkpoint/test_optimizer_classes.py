"""Law 4 for classes of optimizers that are not torch's: all that they keep comes back.

Each class takes up habits of published ones. A run that is saved and loaded into a fresh module
makes the steps that the run without a pause makes.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import onefold
from onefold import CheckpointError, ConfigError
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import worlds_in_turn


class Each(torch.optim.Optimizer):
    """Steps each parameter by `change`."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.change(p, group), alpha=-group["lr"])


def started(state, p):
    """A momentum that begins where the entry is missing, and slows down by its count."""
    if "count" not in state:
        state.update(count=0, mean=torch.zeros_like(p))
    state["count"] += 1
    return state["mean"].mul_(0.9).add_(p.grad) / state["count"]


class NoneMarks(Each):
    """Begins again where its mark is absent, which is None (torch-optimi)."""

    def change(self, p, group):
        state = self.state[p]
        if "compensation" not in state:
            state.update(mean=torch.zeros_like(p), compensation=None)
        return state["mean"].mul_(0.9).add_(p.grad)


class OtherKeys(Each):
    """Keys that are numbers, flags, tuples or look like ours, a dict without entries."""

    keys = (0.9, 0, True, None, (1, (0.5, "a")), ":0.9", "0.9", float("inf"))

    def change(self, p, group):
        state = self.state[p]
        if not state:
            state["means"] = {key: torch.zeros_like(p) for key in self.keys}
            state["empty"] = {}
        assert {*map(repr, state["means"])} == {*map(repr, self.keys)}
        assert state["empty"] == {}
        return sum(mean.mul_(0.9).add_(p.grad) for mean in state["means"].values())


class Tables(Each):
    """Keeps a table by parameter in its group, and rates by whole parameters (GrokAdamW)."""

    def change(self, p, group):
        table = group.setdefault("table", {})
        return started(table.setdefault(p, {}), p) / p.grad.norm()


class Counting(Each):
    """Counts steps in an attribute that its state dict holds (StableSPAM, Ranger21)."""

    total = 0

    def step(self, closure=None):
        self.total += 1
        super().step()

    def change(self, p, group):
        return started(self.state[p], p) * min(1.0, self.total / 8)

    def state_dict(self):
        return super().state_dict() | {"total": self.total}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for number, p in enumerate(self.param_groups[0]["params"]):  # as pytorch_optimizer does
            if number in state_dict["state"]:
                assert state_dict["state"][number].keys() == self.state[p].keys()
        self.total = state_dict["total"]


class Hidden(Counting):
    """Puts its count among the states (DoG), and None for functions of a group (GrokAdamW)."""

    def __init__(self, params):
        super().__init__(params)
        self.param_groups[0]["signal"] = abs

    def change(self, p, group):
        assert group["signal"] is abs
        return super().change(p, group) / p.grad.norm()

    def state_dict(self):
        whole = super().state_dict()
        whole["state"]["total"] = whole.pop("total")
        whole["param_groups"][0]["signal"] = None
        return whole

    def load_state_dict(self, state_dict):
        torch.optim.Optimizer.load_state_dict(self, state_dict)
        self.total = state_dict["state"]["total"]
        self.param_groups[0]["signal"] = abs


class Way(IntEnum):
    SLOW = 1
    FAST = 2


class Choosing(Each):
    """A member of an Enum in its group (SCION), which it looks at by identity."""

    def __init__(self, params):
        super().__init__(params)
        self.param_groups[0]["way"] = Way.FAST

    def change(self, p, group):
        return started(self.state[p], p) * (2 if group["way"] is Way.FAST else 1)


class Narrow(Each):
    """Keeps its momentum in bfloat16 (AdaFactor), and a second one as its parameter is."""

    def change(self, p, group):
        state = self.state[p]
        if not state:
            state["mean"] = torch.zeros_like(p, dtype=torch.bfloat16)
            state["like"] = torch.zeros_like(p)
        state["like"].lerp_(p.grad, 0.1)
        return state["mean"].lerp_((p.grad / p.grad.norm()).bfloat16(), 0.1).to(p) + state["like"]


class Divided(torch.optim.Optimizer):
    """A rate by a sum that divides by a state, which begins above 0 (DAdaptAdaGrad).

    As in pytorch_optimizer 4.1.0, `max` hides a sum that is not a number: the rate stays.
    """

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0, "d": 1e-2, "sum": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        held = [p for p in group["params"] if p.grad is not None]
        for p in held:
            state = self.state[p]
            if not state:
                state.update(total=torch.zeros_like(p), squares=torch.full_like(p, 1e-6))
            state["squares"].add_(p.grad.square())
            state["total"].add_(p.grad, alpha=group["d"])
            weighted = state["total"].square() / state["squares"].sqrt()
            group["sum"] += float(weighted.sum())
        group["d"] = max(group["d"], min(group["sum"], 2 * group["d"]))
        for p in held:
            p.sub_(self.state[p]["total"] / self.state[p]["squares"].sqrt())


class Recalling(Each):
    """Overrides `load_state_dict` alone, which looks up each entry (pytorch_optimizer 4.1.0).

    It also finds its number of steps in the states: no state dict holds that.
    """

    total = 0

    def step(self, closure=None):
        self.total += 1
        super().step()

    def change(self, p, group):
        return started(self.state[p], p) / p.grad.norm() * min(1.0, self.total / 8)

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for number, p in enumerate(self.param_groups[0]["params"]):
            for name in state_dict["state"].get(number, ()):
                self.total = max(self.total, self.state[p]["count"])
                assert type(self.state[p][name]) is type(state_dict["state"][number][name])


class Halved(torch.Tensor):
    """A tensor made of another one and a factor (torchao 0.18.0)."""

    def __new__(cls, codes, factor):
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float64)
        made.codes, made.factor = codes, factor
        return made

    def __tensor_flatten__(self):
        return ["codes"], [self.factor, torch.float64]

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        assert (context[1], size, len(stride)) == (torch.float64, inner["codes"].shape, len(size))
        return Halved(inner["codes"], context[0])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        own = [a.codes.double() * a.factor if isinstance(a, Halved) else a for a in args]
        return func(*own, **(kwargs or {}))


class Composed(Each):
    """Keeps a tensor made of others, and a queue of tensors (AdaShift)."""

    def change(self, p, group):
        state = self.state[p]
        if not state:
            zeros = torch.zeros_like(p, dtype=torch.bfloat16)
            state.update(mean=Halved(zeros, 0.5), last=deque([p.grad], maxlen=2))
        assert isinstance(state["mean"], Halved)
        assert state["last"].maxlen == 2
        mean = 0.9 * state["mean"] + p.grad / p.grad.norm()
        state["mean"] = Halved((mean * 2).bfloat16(), 0.5)
        state["last"].append(p.grad.clone())
        return (mean + state["last"][0]).to(p)


class Projector:
    """What GaLore keeps for a parameter. ScalableShampoo has an Enum there, too."""

    def __init__(self) -> None:
        self.seen, self.mean, self.kind = 0, None, Way.SLOW

    def project(self, grad):
        self.seen += 1
        assert self.kind is Way.SLOW
        self.mean = grad.clone() if self.mean is None else self.mean.lerp(grad, 1 / self.seen)
        return self.mean / self.mean.norm()


class Projecting(Each):
    def change(self, p, group):
        state = self.state[p]
        return state.setdefault("by", [Projector()])[0].project(p.grad)


CLASSES = [
    NoneMarks, OtherKeys, Tables, Counting, Hidden, Choosing, Narrow, Divided, Recalling, Composed,
    Projecting,
]  # fmt: skip


def built(make, seed=0, dtype=torch.float32, **choices):
    module = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), seed=seed).to(dtype)
    optimizer = make(module.parameters())
    return onefold.shard(module, optimizer, **choices), optimizer


def steps(module, optimizer, *numbers):
    for number in numbers:
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
        (module(x.to(module[0].weight.dtype)) - 1).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights_of(module):
    with onefold.unsharded(module):
        return [p.detach().clone() for p in module.parameters()]


def resumed(rank, folder, make, choices):
    """The weights of the run without a pause, and those of a fresh one that loads its start."""
    module, optimizer = built(make, **choices)
    steps(module, optimizer, 0, 1)
    onefold.save(folder, module, optimizer)
    steps(module, optimizer, 2, 3)
    return weights_of(module), continued(rank, folder, make, choices)


@worlds_in_turn
@pytest.mark.parametrize("make", [Divided, Recalling, Counting])
@pytest.mark.parametrize(("world", "stage"), [(1, 3), (3, 1), (3, 3)])
def test_a_rank_goes_on_from_its_own_state_dict(make, world, stage):
    def body(rank, is_loaded):
        module, optimizer = built(make, dtype=torch.float64, stage=stage)
        steps(module, optimizer, 0, 1)
        if is_loaded:
            optimizer.load_state_dict(optimizer.state_dict())
        steps(module, optimizer, 2, 3)
        return weights_of(module)

    runs = (run_ranks(world, body, is_loaded) for is_loaded in (False, True))
    for wanted, got in zip(*runs, strict=True):
        assert all(map(torch.equal, got, wanted))


def continued(rank, folder, make, choices):
    module, optimizer = built(make, seed=1, **choices)
    onefold.load(folder, module, optimizer)
    steps(module, optimizer, 2, 3)
    return weights_of(module)


@worlds_in_turn
@pytest.mark.parametrize("make", CLASSES)
@pytest.mark.parametrize(("world", "stage"), [(1, 3), (3, 0), (2, 2), (3, 3)])
def test_all_that_a_class_keeps_comes_back(make, world, stage, tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        choices, folder = {"stage": stage, "dtype": dtype}, tmp_path / str(dtype)
        ranks = run_ranks(world, resumed, folder, make, choices)
        for wanted, got in ranks:
            assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (3, 3)])
def test_a_parameter_of_integers_among_those_that_are_stepped_whole_comes_back(
    world, stage, tmp_path
):
    def started(seed):
        module = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), seed=seed)
        module.table = nn.Parameter(torch.arange(3) + seed, requires_grad=False)
        optimizer = Projecting(module.parameters())
        return onefold.shard(module, optimizer, stage=stage), optimizer

    def body(rank):
        module, optimizer = started(0)
        steps(module, optimizer, 0)
        onefold.save(tmp_path / "saved", module, optimizer)
        fresh, other = started(1)
        onefold.load(tmp_path / "saved", fresh, other)
        for each in ((module, optimizer), (fresh, other)):
            steps(*each, 1)
        assert all(map(torch.equal, weights_of(module), weights_of(fresh)))

    run_ranks(world, body)


@pytest.mark.parametrize("make", CLASSES)
def test_all_that_a_class_keeps_comes_back_at_another_world_size(make, tmp_path):
    choices = {"stage": 1, "dtype": torch.float64}
    wanted = run_ranks(2, resumed, tmp_path / "saved", make, choices)[0][0]
    for world, stage in ((3, 3), (1, 0)):
        again = choices | {"stage": stage}
        for got in run_ranks(world, continued, tmp_path / "saved", make, again):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("offload", ["optimizer", "cpu", "disk"])
def test_states_that_are_none_come_back_from_other_tiers(offload, tmp_path):
    place = f"disk:{tmp_path}" if offload == "disk" else offload
    choices = {"stage": 3, "offload": place}
    for wanted, got in run_ranks(3, resumed, tmp_path / "saved", NoneMarks, choices):
        assert all(map(torch.equal, got, wanted))


class Odd(Each):
    def change(self, p, group):
        self.state[p][frozenset("a")] = 1
        return p.grad / p.grad.norm()


class Unprobed(Odd):
    def __init__(self, params, module):
        super().__init__(params)


def test_a_key_that_no_file_holds_and_no_probe_saw_is_refused_by_its_place(tmp_path):
    module, optimizer = built(lambda held: Unprobed(held, nn.Identity()), stage=3)
    steps(module, optimizer, 0)
    with pytest.raises(CheckpointError, match=r"(?s)state of '0.weight'.*frozenset.*hint:"):
        onefold.save(tmp_path / "saved", module, optimizer)


class Holding(Each):
    """Keeps an object in its states (GaLore, ScalableShampoo)."""

    def change(self, p, group):
        self.state[p].setdefault("by", [object()])
        return p.grad / p.grad.norm()


class Averaging(Counting):
    """Keeps an average of what a step sees in an attribute, and a table that all ranks share."""

    last = None

    def step(self, closure=None):
        self.last = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        super().step()

    def state_dict(self):
        seen = [p.to_local() if isinstance(p, DTensor) else p for p in self.last or ()]
        return super().state_dict() | {"last": seen, "table": torch.arange(3)}


class Tabled(Counting):
    def state_dict(self):
        return super().state_dict() | {"table": torch.arange(3)}


def test_tensors_of_rows_that_a_state_dict_adds_are_refused_where_ranks_have_others(tmp_path):
    def save(rank, make, stage):
        module, optimizer = built(make, stage=stage)
        steps(module, optimizer, 0)
        onefold.save(tmp_path / make.__name__ / str(stage), module, optimizer)

    def load(rank, make, saved, stage):
        module, optimizer = built(make, stage=stage)
        onefold.load(tmp_path / make.__name__ / str(saved), module, optimizer)

    for make in (Averaging, Tabled):
        run_ranks(2, save, make, 3)
    run_ranks(2, load, Averaging, 3, 1)
    for world, stage in ((3, 3), (1, 3), (2, 0)):
        run_ranks(world, load, Tabled, 3, stage)
        with pytest.raises(CheckpointError, match=r"(?s)Averaging to hold.*of 2.*2 ranks.*stage 3"):
            run_ranks(world, load, Averaging, 3, stage)


class Objects(Counting):
    def state_dict(self):
        return super().state_dict() | {"seen": [{"now": object()}]}


class Raising(Counting):
    def state_dict(self):
        raise NotImplementedError("use another call")


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (Objects, r"object in .*'seen'\]\[0\]\['now'\]"),
        (Raising, "use another call"),
        (Odd, r"a frozenset as a key of state\[parameter\]"),
        (Holding, r"an? object in state\[parameter\]\['by'\]\[0\]"),
    ],
)
def test_a_state_that_cannot_be_saved_is_refused_at_shard(make, got):
    module = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=rf"(?s){make.__name__}.*{got}.*hint:"):
        onefold.shard(module, make(module.parameters()), stage=3)
    assert type(module.weight) is nn.Parameter
