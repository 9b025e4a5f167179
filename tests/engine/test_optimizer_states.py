"""`optimizer.state_dict()` of a sharded optimizer is one rank's part: right, or refused by name."""

from __future__ import annotations

import copy
import io
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import onefold
from onefold.engine.flat_groups import with_numbers_on
from onefold.engine.optimizer_state import _warn_of_keepers
from tests.support.programs.blocks import By
from tests.support.ranks import every_rank, run_processes, run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.save of a sharded module", "ignore:this optimizer's state dict holds"
)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
MUON = partial(torch.optim.Muon, lr=1e-2)
REFUSED = r"expected the optimizer state that rank \d of \d keeps[^$]*hint: [^$]*onefold\.load"


def build():
    return nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(4)])


def ready(make, stage, is_late=False):
    module = seeded(build)
    if is_late:
        onefold.shard(module, stage=stage)
        return module, make(module.parameters())
    optimizer = make(module.parameters())
    return onefold.shard(module, optimizer, stage=stage), optimizer


def steps(module, optimizer, count=2, seed=3):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        module(torch.randn(5, 6, generator=generator)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights_of(module):
    with onefold.unsharded(module):
        return [p.detach().clone() for p in module.parameters()]


def in_a_file(state_dict):
    """The state dict after torch.save and torch.load with its default, weights_only=True."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    return torch.load(io.BytesIO(file.getvalue()))


def saved(rank, make, stage):
    """The weights, and this rank's optimizer state in a file."""
    module, optimizer = ready(make, stage)
    steps(module, optimizer)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    return weights_of(module), file.getvalue()


def resumed(make, stage, weights, state_dict, is_late=False):
    module, optimizer = ready(make, stage, is_late)
    module.load_state_dict(
        dict(zip((n for n, _ in module.named_parameters()), weights, strict=True))
    )
    optimizer.load_state_dict(state_dict)
    steps(module, optimizer, seed=4)
    return weights_of(module)


def two_processes(rank, make, stage, is_late):
    module, optimizer = ready(make, stage)
    steps(module, optimizer)
    files = [None] * dist.get_world_size()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    dist.all_gather_object(files, file.getvalue())
    before = weights_of(module)
    steps(module, optimizer, seed=4)
    wanted = weights_of(module)
    own = torch.load(io.BytesIO(files[rank]))
    for ours, theirs in zip(resumed(make, stage, before, own, is_late), wanted, strict=True):
        assert torch.equal(ours, theirs)
    other, its_optimizer = ready(make, stage, is_late)
    steps(other, its_optimizer, count=0 if is_late else 1)
    theirs = torch.load(io.BytesIO(files[1 - rank]))
    with pytest.raises(onefold.StateError, match=REFUSED):
        its_optimizer.load_state_dict(theirs)
        steps(other, its_optimizer)  # an optimizer built after shard is bound at its first step


@again_but("AdamW-False", "Muon-True")
@pytest.mark.process
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("make", [ADAMW, MUON], ids=["AdamW", "Muon"])
def test_a_rank_loads_its_own_file_bitwise_and_refuses_that_of_another_rank(make, is_late):
    run_processes(2, two_processes, make, 3, is_late)


@again_but("3-AdamW")
@worlds_in_turn
@pytest.mark.parametrize("make", [ADAMW, MUON], ids=["AdamW", "Muon"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_file_of_rank_0_is_refused_on_other_ranks_and_worlds(stage, make):
    files = [run_ranks(size, saved, make, stage)[0][1] for size in (2, 3)]

    def body(rank, file):
        module, optimizer = ready(make, stage)
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(onefold.StateError, match=REFUSED):
            optimizer.load_state_dict(torch.load(io.BytesIO(file)))
        assert str(optimizer.state_dict()) == str(before)
        steps(module, optimizer)

    run_ranks(1, body, files[0])
    run_ranks(3, body, files[0])
    run_ranks(2, body, files[1])


@again_but("3-AdamW")
@worlds_in_turn
@pytest.mark.parametrize("make", [ADAMW, MUON], ids=["AdamW", "Muon"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_plain_state_dict_fits_on_every_rank(make, world_size):
    plain = seeded(build)
    optimizer = make(plain.parameters())
    steps(plain, optimizer)
    file, weights = (
        in_a_file(optimizer.state_dict()),
        [p.detach().clone() for p in plain.parameters()],
    )
    steps(plain, optimizer, seed=4)

    def body(rank, stage):
        return resumed(make, stage, weights, copy.deepcopy(file))

    for stage in (0, 1, 3):
        for ours, theirs in zip(
            run_ranks(world_size, body, stage)[0], plain.parameters(), strict=True
        ):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=1e-4)


@again_but("0-1", "1-3", "3-1")
@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_torchs_full_optimizer_state_goes_from_rank_0s_file_to_every_rank(stage, world_size):
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    spread = StateDictOptions(full_state_dict=True)

    def save(rank):
        module, optimizer = ready(ADAMW, stage)
        steps(module, optimizer)
        state = get_optimizer_state_dict(module, optimizer, options=options)
        file, before = io.BytesIO(), weights_of(module)
        torch.save(state, file)
        steps(module, optimizer, seed=4)
        return file.getvalue(), before, weights_of(module)

    file, before, wanted = run_ranks(world_size, save)[0]

    def load(rank):
        module, optimizer = ready(ADAMW, stage)
        names = (name for name, _ in module.named_parameters())
        module.load_state_dict(dict(zip(names, before, strict=True)))
        state = torch.load(io.BytesIO(file))
        set_optimizer_state_dict(module, optimizer, state, options=spread)
        steps(module, optimizer, seed=4)
        return weights_of(module)

    for weights in run_ranks(world_size, load):
        assert all(map(torch.equal, weights, wanted))


@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 0), (3, 3)])
def test_exported_counters_of_steps_are_counted_once_by_plain_torch(world_size, stage):
    """Parameters that are stepped together share a counter, which plain torch adds to for each."""

    def body(rank):
        module, optimizer = ready(ADAMW, stage)
        steps(module, optimizer)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_optimizer_state_dict(module, optimizer, options=options)

    state = in_a_file(run_ranks(world_size, body)[0])
    plain = seeded(build)
    optimizer = ADAMW(plain.parameters())
    set_optimizer_state_dict(plain, optimizer, state)
    steps(plain, optimizer)
    assert [float(entry["step"]) for entry in optimizer.state.values()] == [4.0] * 4


MATRICES = [MUON, partial(torch.optim.Adafactor, lr=1e-2)]


@again_but("Muon-0-3-False", "Muon-3-2-True", "Adafactor-1-2-True", "Adafactor-1-3-False")
@worlds_in_turn
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("make", MATRICES, ids=["Muon", "Adafactor"])
def test_torchs_calls_give_each_rank_its_matrices_back_and_refuse_those_of_rank_0(
    make, stage, world_size, full, tmp_path
):
    """A raw KeyError of torch: ranks had other keys in their state dicts."""
    options = StateDictOptions(full_state_dict=full)

    def body(rank):
        module, optimizer = ready(make, stage)
        steps(module, optimizer)
        weights = weights_of(module)
        own = copy.deepcopy(get_optimizer_state_dict(module, optimizer, options=options))
        of_first = [own]
        dist.broadcast_object_list(of_first)
        steps(module, optimizer)
        after = weights_of(module)

        module, optimizer = ready(make, stage)
        with onefold.unsharded(module, writeback=True), torch.no_grad():
            for parameter, value in zip(module.parameters(), weights, strict=True):
                parameter.copy_(value)
        set_optimizer_state_dict(module, optimizer, own, options=options)
        onefold.save(tmp_path / "loaded", module, optimizer)
        steps(module, optimizer)
        assert all(map(torch.equal, weights_of(module), after))
        onefold.load(tmp_path / "loaded", module, optimizer)
        steps(module, optimizer)
        assert all(map(torch.equal, weights_of(module), after))
        if stage and full:
            module, optimizer = ready(make, stage)
            refuses = pytest.raises(onefold.StateError, match=REFUSED) if rank else nullcontext()
            with refuses:
                set_optimizer_state_dict(module, optimizer, of_first[0], options=options)

    run_ranks(world_size, body)


def test_numbers_of_a_loaded_state_go_where_a_fused_step_reads_them():
    """Plain torch loads `step` to the CPU; a fused step counts on the device."""
    moment, rate = torch.zeros(2), 0.1
    state = {"step": torch.tensor(3.0), "exp_avg": moment, "rate": rate}
    moved = with_numbers_on(torch.device("meta"), state)
    assert moved["step"].is_meta
    assert moved["exp_avg"] is moment
    assert moved["rate"] is rate


@again_but("make0-onefold.load-1", "make1-load_state_dict-3")
@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("loads", ["onefold.load", "load_state_dict"])
@pytest.mark.parametrize("make", [ADAMW, MUON])
def test_loaded_state_of_a_parameter_that_no_step_moves_is_shown_and_saved(
    world_size, loads, make, tmp_path
):
    """A frozen layer keeps its loaded moments; once trained, it goes on from them."""
    folder = str(tmp_path)

    def body(rank):
        module, optimizer = ready(make, 3)
        steps(module, optimizer)
        module[0].requires_grad_(False)
        loaded = optimizer.state_dict()
        if loads == "load_state_dict":
            for state in loaded["state"].values():
                for value in filter(torch.is_tensor, state.values()):
                    value.mul_(2)
            optimizer.load_state_dict(loaded)
        else:
            onefold.save(f"{folder}/first", module, optimizer)
            onefold.load(f"{folder}/first", module, optimizer)
        wanted = moments(optimizer.state[module[0].weight])
        steps(module, optimizer, seed=4)
        onefold.save(f"{folder}/second", module, optimizer)
        onefold.load(f"{folder}/second", module, optimizer)
        got = moments(optimizer.state[module[0].weight])
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[name], value) for name, value in wanted.items())
        return len(wanted)

    assert sum(run_ranks(world_size, body)) > 0


def moments(state):
    tensors = {name: value for name, value in state.items() if torch.is_tensor(value)}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in tensors.items()
    }


@pytest.mark.parametrize("options", [None, StateDictOptions(full_state_dict=True)])
def test_a_file_without_the_matrices_of_other_ranks_warns_and_names_save(options):
    def body(rank):
        module, optimizer = ready(MUON, 3)
        steps(module, optimizer)
        state = optimizer.state_dict()
        if options is not None:
            state = get_optimizer_state_dict(module, optimizer, options=options)
        copy.deepcopy(state)  # silent
        torch.save(state, io.BytesIO())

    _warn_of_keepers.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, body)
    texts = [str(w.message) for w in caught if "matrices that one rank steps" in str(w.message)]
    assert len(texts) == 1
    assert "onefold.save" in texts[0]


@again_but("cpu")
@pytest.mark.parametrize("offload", [None, "optimizer", "cpu"])
def test_a_rank_without_rows_of_a_parameter_counts_its_steps_as_the_others(offload, tmp_path):
    """Any rank may write the number into a checkpoint, and bias correction follows it."""

    def body(rank):
        module = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)))
        optimizer = ADAMW(module.parameters())
        onefold.shard(module, optimizer, stage=3, units=[module[0]], offload=offload)
        steps(module, optimizer, count=3)
        own = [float(optimizer.state[p]["step"]) for p in module.parameters()]
        onefold.save(tmp_path / "saved", module, optimizer)
        onefold.load(tmp_path / "saved", module, optimizer)
        return own, [float(optimizer.state[p]["step"]) for p in module.parameters()]

    assert run_ranks(3, body) == [([3.0] * 4, [3.0] * 4)] * 3


def of_two_dtypes():
    """One row in each of two dtypes: of three ranks, two have none."""
    two = nn.Parameter(torch.ones(1, dtype=torch.float64))
    return By(lambda self, x: x * self.one * self.two, one=nn.Parameter(torch.ones(1)), two=two)


@every_rank(3)
def test_loaded_states_of_ranks_without_rows_have_the_dtype_of_their_parameter(rank, tmp_path):
    module = of_two_dtypes()
    optimizer = ADAMW(module.parameters(), foreach=False)
    onefold.shard(module, optimizer, stage=2)
    ends = []
    for _ in range(2):
        module(torch.ones(1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(weights_of(module))
        if len(ends) == 1:
            onefold.save(tmp_path / "saved", module, optimizer)
    onefold.load(tmp_path / "saved", module, optimizer)
    module(torch.ones(1)).sum().backward()
    optimizer.step()
    assert all(map(torch.equal, weights_of(module), ends[1]))
    for parameter, state in optimizer.state.items():
        assert state["exp_avg"].dtype == parameter.dtype


@again_but("2-3", "3-1")
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 1)])
def test_lbfgs_resumes_with_its_history_on_any_number_of_ranks(before, after, tmp_path):
    rows = torch.randn(12, 6, generator=torch.Generator().manual_seed(1)).double()

    def run(rank, world_size, loads):
        module = seeded(build).double()
        optimizer = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)
        onefold.shard(module, optimizer, stage=0)

        def closure():
            optimizer.zero_grad()
            loss = (module(rows.chunk(world_size)[rank]) - 1).pow(2).mean()
            loss.backward()
            return loss

        if loads:
            onefold.load(tmp_path / "saved", module, optimizer)
        for number in range(2 if loads else 4):
            if not loads and number == 2:
                onefold.save(tmp_path / "saved", module, optimizer)
            optimizer.step(closure)
        assert len(next(iter(optimizer.state.values()))["old_dirs"]) > 4
        return weights_of(module)

    wanted = run_ranks(before, run, before, False)[0]
    for ours, theirs in zip(run_ranks(after, run, after, True)[0], wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def scaled():
    """A weight without dimensions, in bfloat16."""
    ones = lambda *shape: nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
    forward = lambda self, x: x.bfloat16() * self.scale + self.shift
    return By(forward, scale=ones(), shift=ones(3))


@again_but("load_state_dict-3")
@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("loads", ["onefold.load", "load_state_dict"])
@every_rank()
def test_loaded_moments_of_a_narrow_number_are_as_wide_as_those_of_rows(
    rank, world_size, loads, tmp_path
):
    """torch's `load_state_dict` narrows them to the parameter; a kernel would write past them."""
    module = scaled()
    optimizer = ADAMW(module.parameters())
    onefold.shard(module, optimizer, stage=1)
    for number in range(2):
        module(torch.ones(3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 0 and loads == "load_state_dict":
            optimizer.load_state_dict(optimizer.state_dict())
        elif number == 0:
            onefold.save(tmp_path / "saved", module, optimizer)
            onefold.load(tmp_path / "saved", module, optimizer)
    for state in optimizer.state.values():
        assert {state["exp_avg"].dtype, state["exp_avg_sq"].dtype} == {torch.float32}


class Recounting(torch.optim.Optimizer):
    """Elementwise: every step replaces its states, a number and a mean, as torch's own never do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["mean"] = 0.9 * state.get("mean", torch.zeros_like(p)) + p.grad
                state["count"] = state.get("count", 0) + 1
                p.add_(state["mean"], alpha=-group["lr"] / state["count"])


@again_but("3-cpu")
@worlds_in_turn
@pytest.mark.parametrize(("stage", "offload"), [(0, None), (1, "optimizer"), (3, None), (3, "cpu")])
def test_values_that_a_step_replaces_are_shown_and_saved(tmp_path, stage, offload):
    def trained(count):
        module = seeded(build)
        optimizer = Recounting(module.parameters())
        onefold.shard(module, optimizer, stage=stage, offload=offload)
        for seed in range(count):
            steps(module, optimizer, 1, seed)
        return module, optimizer

    def body(rank):
        module, optimizer = trained(3)
        shown = optimizer.state_dict()["state"]
        assert {state["count"] for state in shown.values()} == {3}
        onefold.save(tmp_path / "three", module, optimizer)
        other, its_optimizer = trained(0)
        onefold.load(tmp_path / "three", other, its_optimizer)
        for each in ((module, optimizer), (other, its_optimizer)):
            for seed in (3, 4):
                steps(*each, 1, seed)
            assert {state["count"] for state in each[1].state.values()} == {5}
        return weights_of(module), weights_of(other), weights_of(trained(5)[0])

    for resumed_weights, own, wanted in run_ranks(2, body):
        for a, b, c in zip(resumed_weights, own, wanted, strict=True):
            assert torch.equal(a, c)
            assert torch.equal(b, c)


ADAFACTOR = partial(torch.optim.Adafactor, lr=1e-2)


def test_adafactor_loads_its_own_state_on_ranks_that_keep_no_matrix():
    def body(rank):
        module, optimizer = ready(ADAFACTOR, 2)
        steps(module, optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        steps(module, optimizer)
        undisturbed, its_optimizer = ready(ADAFACTOR, 2)
        steps(undisturbed, its_optimizer)
        steps(undisturbed, its_optimizer)
        return weights_of(module), weights_of(undisturbed)

    for own, wanted in run_ranks(3, body):
        assert all(map(torch.equal, own, wanted))


@again_but("make1")
@pytest.mark.parametrize("make", [MUON, ADAFACTOR])
def test_a_checkpoint_after_own_states_were_loaded_holds_them_alone(tmp_path, make):
    def body(rank):
        module, optimizer = ready(make, 2)
        steps(module, optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        onefold.save(tmp_path / "run", module, optimizer)
        other, its_optimizer = ready(make, 2)
        onefold.load(tmp_path / "run", other, its_optimizer)
        for each in ((module, optimizer), (other, its_optimizer)):
            steps(*each)
        return weights_of(module), weights_of(other)

    for own, loaded in run_ranks(2, body):
        assert all(map(torch.equal, own, loaded))


@again_but("float32-float64")
@pytest.mark.parametrize(("first", "then"), [("float64", "float32"), ("float32", "float64")])
def test_whole_matrix_states_load_into_a_step_of_another_dtype(tmp_path, first, then):
    def sharded(master):
        module = seeded(build)
        optimizer = ADAFACTOR(module.parameters())
        precision = onefold.Precision(master=getattr(torch, master))
        return onefold.shard(module, optimizer, stage=2, precision=precision), optimizer

    def body(rank):
        module, optimizer = sharded(first)
        steps(module, optimizer)
        onefold.save(tmp_path / "first", module, optimizer)
        other, its_optimizer = sharded(then)
        onefold.load(tmp_path / "first", other, its_optimizer)
        for each in ((module, optimizer), (other, its_optimizer)):
            steps(*each)
        return weights_of(module), weights_of(other)

    for own, loaded in run_ranks(2, body):
        for a, b in zip(own, loaded, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@again_but("Muon-3", "Adafactor-2")
@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("make", MATRICES, ids=["Muon", "Adafactor"])
@every_rank()
def test_states_that_torch_narrows_to_the_dtype_of_parameters_are_stepped_in_fp32(
    rank, make, world_size
):
    """Masters of bfloat16 weights have states in fp32; `load_state_dict` rounds these."""
    results = []
    for reloads in (False, True):
        module = seeded(build).to(torch.bfloat16)
        optimizer = make(module.parameters())
        onefold.shard(module, optimizer, stage=3)
        for _ in range(2):
            module(torch.ones(5, 6, dtype=torch.bfloat16)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if reloads:
                optimizer.load_state_dict(optimizer.state_dict())
        module(torch.ones(5, 6, dtype=torch.bfloat16)).pow(2).mean().backward()
        optimizer.step()
        results.append(weights_of(module))
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=0.015)
