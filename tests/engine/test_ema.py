"""`onefold.ema`: the average of torch's `AveragedModel`, kept in shards."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import onefold
from onefold.engine.registry import engine_of
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import every_rank, run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn

DECAY = 0.9

CHOICES = [{"stage": stage} for stage in (0, 1, 2, 3)] + [
    {"stage": 2, "offload": "optimizer"},
    {"stage": 3, "offload": "cpu"},
    {"stage": 3, "offload": "disk"},
    {"stage": 3, "precision": "bf16"},
    {"stage": 1, "dtype": torch.bfloat16},
    {"stage": 3, "dtype": torch.bfloat16, "offload": "optimizer"},
]


def each_choice(first):
    """Every choice, at 1, 2 and 3 ranks in turn from `first` on.

    Ranks average their own rows alike whatever is chosen, and the average of a plain run is looked
    at for every stage at every world size.
    """
    pairs = [(choices, 1 + (first + index) % 3) for index, choices in enumerate(CHOICES)]
    return pytest.mark.parametrize(("choices", "world_size"), pairs, ids=str)


worlds = pytest.mark.parametrize("world_size", [1, 2, 3])


def ready(choices, folder="", seed=0):
    chosen = dict(choices)
    module = seeded(Model, seed=seed).to(chosen.pop("dtype", torch.float32))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4)
    if chosen.get("offload") == "disk":
        chosen["offload"] = f"disk:{folder}"
    onefold.shard(module, optimizer, **chosen)
    return module, optimizer


def own_batch(rank, world_size, batch):
    return batch.chunk(world_size)[rank]


def step(module, optimizer, batch):
    next_token_loss(module, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def averaged():
    """A module at stage 3 after three steps, and its average."""
    module, optimizer = ready({"stage": 3})
    average = onefold.ema(module, decay=DECAY)
    for batch in token_batches(3):
        step(module, optimizer, batch)
        average.update()
    return module, average


def whole(value):
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().clone()


def masters(module):
    """What is averaged, in full: masters where there are any, else weights."""
    module.state_dict()  # waits for steps in the background
    found = {}
    for unit in engine_of(module).units:
        unit.wait_step()
        for p in unit.parameters:
            found[p.fqn] = whole(p.wrap(p.stepped))
    return found


def averages(average):
    return {name: whole(value) for name, value in average.state_dict()["averages"].items()}


def bits(module):
    found = []
    for unit in engine_of(module).units:
        unit.wait_step()
        found += [unit.weight.tensor.clone(), unit.stepped.clone()]
    return found


@again_but(
    "{'stage': 0}-1", "{'stage': 3}-1", "{'stage': 3, 'offload': 'disk'}-1",
    "{'stage': 3, 'precision': 'bf16'}-2", "{'stage': 1, 'dtype': torch.bfloat16}-3",
    "{'stage': 3, 'dtype': torch.bfloat16, 'offload': 'optimizer'}-1",
)  # fmt: skip
@each_choice(0)
@every_rank()
def test_it_averages_what_the_optimizer_steps_as_torch_does(rank, world_size, choices, tmp_path):
    module, optimizer = ready(choices, tmp_path)
    average = onefold.ema(module, decay=DECAY)
    plain = seeded(Model)  # fp32, and fed with the very values that are stepped
    plain.load_state_dict(masters(module))
    theirs = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for batch in token_batches(4):
        step(module, optimizer, own_batch(rank, world_size, batch))
        average.update()
        plain.load_state_dict(masters(module))
        theirs.update_parameters(plain)
    mine = averages(average)
    assert average.num_updates == 4
    for name, value in theirs.module.named_parameters():
        assert mine[name].dtype is torch.float32
        torch.testing.assert_close(mine[name], value.detach(), rtol=1e-6, atol=1e-7)


@again_but("1-3", "3-2")
@worlds_in_turn
@worlds
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_it_is_the_average_of_a_plain_run(world_size, stage):
    plain = seeded(Model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-4)
    theirs = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for batch in token_batches(4):
        step(plain, optimizer, batch)
        theirs.update_parameters(plain)
    with torch.no_grad():
        logits = theirs(token_batches(1)[0])

    def body(rank):
        module, optimizer = ready({"stage": stage})
        average = onefold.ema(module, decay=DECAY)
        for batch in token_batches(4):
            step(module, optimizer, own_batch(rank, world_size, batch))
            average.update()
        for name, value in averages(average).items():
            wanted = theirs.module.get_parameter(name).detach()
            torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)
        with average.applied(), torch.no_grad():
            shown = module(token_batches(1)[0])
        torch.testing.assert_close(shown, logits, rtol=1e-5, atol=1e-5)

    run_ranks(world_size, body)


@again_but(
    "{'stage': 0}-3", "{'stage': 3}-3", "{'stage': 3, 'offload': 'disk'}-3",
    "{'stage': 3, 'precision': 'bf16'}-1", "{'stage': 1, 'dtype': torch.bfloat16}-2",
    "{'stage': 3, 'dtype': torch.bfloat16, 'offload': 'optimizer'}-3",
)  # fmt: skip
@each_choice(2)
@every_rank()
def test_the_block_leaves_every_bit_and_the_run_as_it_was(rank, world_size, choices, tmp_path):
    losses = []
    for is_averaged in (False, True):
        module, optimizer = ready(choices, tmp_path)
        average = onefold.ema(module, decay=DECAY) if is_averaged else None
        losses.append([])
        for batch in token_batches(4):
            mine = own_batch(rank, world_size, batch)
            step(module, optimizer, mine)
            if average is not None:
                average.update()
                before = bits(module)
                with average.applied(), torch.no_grad():
                    shown = masters(module)
                    for name, value in averages(average).items():
                        assert torch.equal(shown[name], value), name
                    next_token_loss(module, mine)
                after = bits(module)
                assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
            with torch.no_grad():
                losses[-1].append(next_token_loss(module, mine).item())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("stage", [0, 1, 3])
@every_rank(2)
def test_an_exception_in_the_block_brings_the_weights_back(rank, stage):
    module, optimizer = ready({"stage": stage, "dtype": torch.bfloat16})
    average = onefold.ema(module, decay=DECAY)
    step(module, optimizer, token_batches(1)[0])
    before = bits(module)
    with pytest.raises(ValueError, match="mine"), average.applied():
        raise ValueError("mine")
    assert all(torch.equal(a, b) for a, b in zip(bits(module), before, strict=True))
    step(module, optimizer, token_batches(1)[0])


@again_but("2-1")
@pytest.mark.parametrize(("saving", "loading"), [(2, 3), (3, 2), (2, 1)])
def test_dcp_resumes_it_at_another_number_of_ranks(saving, loading, tmp_path):
    def save(rank):
        _module, average = averaged()
        dcp.save({"ema": average.state_dict()}, checkpoint_id=tmp_path / "ema")
        return averages(average)

    def load(rank):
        module, _ = ready({"stage": 3}, seed=7)
        average = onefold.ema(module, decay=DECAY)
        state = {"ema": average.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / "ema")
        average.load_state_dict(state["ema"])
        assert average.num_updates == 3
        return averages(average)

    wanted, found = run_ranks(saving, save)[0], run_ranks(loading, load)[0]
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@again_but("3")
@pytest.mark.parametrize("stage", [0, 3])
def test_save_and_load_keep_it_at_any_number_of_ranks_and_stage(stage, tmp_path):
    def save(rank):
        module, optimizer = ready({"stage": stage})
        average = onefold.ema(module, decay=DECAY)
        for batch in token_batches(3):
            step(module, optimizer, batch)
            average.update()
        onefold.save(tmp_path / "run", module, optimizer)
        return averages(average)

    def load(rank):
        module, optimizer = ready({"stage": 3 - stage}, seed=7)
        average = onefold.ema(module, decay=DECAY)
        onefold.load(tmp_path / "run", module, optimizer)
        assert average.num_updates == 3
        return averages(average)

    wanted = run_ranks(2, save)[0]
    for world_size in (1, 2, 3):
        found = run_ranks(world_size, load)[0]
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


SHARES = {1: None, 2: [3, 1], 3: [1, 0, 2]}


@again_but("3")
@pytest.mark.parametrize("saving", [2, 3])
def test_save_and_load_keep_it_over_uneven_shares(saving, tmp_path):
    def started(seed=0):
        module = seeded(Model, seed=seed)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        onefold.shard(module, optimizer, stage=3, shares=SHARES[torch.distributed.get_world_size()])
        return module, optimizer, onefold.ema(module, decay=DECAY)

    def save(rank):
        module, optimizer, average = started()
        for batch in token_batches(2):
            step(module, optimizer, batch)
            average.update()
        onefold.save(tmp_path / "run", module, optimizer)
        return averages(average)

    def load(rank):
        module, optimizer, average = started(seed=7)
        onefold.load(tmp_path / "run", module, optimizer)
        assert average.num_updates == 2
        return averages(average)

    wanted = run_ranks(saving, save)[0]
    for world_size in (1, 2, 3):
        found = run_ranks(world_size, load)[0]
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@every_rank(2)
def test_extra_holds_no_shards_as_they_would_not_reshard(rank, tmp_path):
    module, average = averaged()
    with pytest.raises(onefold.CheckpointError, match=r"averages of onefold\.ema"):
        onefold.save(tmp_path / "run", module, extra={"ema": average})
    assert not (tmp_path / "run").exists()


class Complex(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.phase = torch.nn.Parameter(torch.full((3, 2), 1 + 1j, dtype=torch.cfloat))
        self.scale = torch.nn.Parameter(torch.ones(2, 2))

    def forward(self, x):
        return (x.to(torch.cfloat) @ self.phase.mT).abs() + (x @ self.scale).sum(-1, keepdim=True)


@worlds
def test_complex_parameters_average(world_size):
    def body(rank):
        module = Complex()
        onefold.shard(module, torch.optim.SGD(module.parameters()), stage=3)
        average = onefold.ema(module, decay=DECAY)
        average.update()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(2)
        average.update()
        return averages(average)

    for found in run_ranks(world_size, body):
        torch.testing.assert_close(found["scale"], torch.full((2, 2), 1.1))
        torch.testing.assert_close(found["phase"], torch.full((3, 2), 1.1 + 1.1j))


def test_load_warns_of_an_average_that_no_ema_of_the_module_takes(tmp_path):
    module, average = averaged()
    onefold.save(tmp_path / "run", module)
    other, _ = ready({"stage": 3}, seed=7)
    with pytest.warns(UserWarning, match=r"'average\.0' of the checkpoint is not loaded"):
        onefold.load(tmp_path / "run", other)
    assert average.num_updates == 3


@every_rank(2)
def test_the_average_alone_is_saved_in_the_block_and_a_new_one_begins_with_it(rank, tmp_path):
    module, average = averaged()
    with average.applied():
        onefold.save(tmp_path / "ema", module)
        plain = onefold.full_state_dict(module, rank0_only=False)
    other, _ = ready({"stage": 1}, seed=3)
    onefold.load(tmp_path / "ema", other)
    again = averages(onefold.ema(other))
    for name, value in averages(average).items():
        assert torch.equal(value, again[name])
        assert torch.equal(value, plain[name])


@every_rank(2)
def test_a_report_has_its_bytes(rank):
    module, optimizer = ready({"stage": 3})
    average = onefold.ema(module)
    step(module, optimizer, token_batches(1)[0])
    average.update()
    report = onefold.report(module)
    assert report.nbytes("ema") == report.nbytes("weight")
    assert "ema" not in report.differing()


@every_rank(2)
def test_wrong_calls_are_refused(rank):
    module, optimizer = ready({"stage": 3})
    with pytest.raises(onefold.StateError, match="hint: "):
        onefold.ema(Model())
    for decay in (-0.1, 1.5, "0.9", None, True):
        with pytest.raises(onefold.ConfigError, match="decay"):
            onefold.ema(module, decay)
    assert [onefold.ema(module, decay).decay for decay in (0, 1)] == [0, 1]
    average = onefold.ema(module)
    with average.applied(), pytest.raises(onefold.StateError, match=f"rank {rank}"):
        average.update()
    with onefold.unsharded(module), pytest.raises(onefold.StateError, match="unsharded"):
        average.update()
    state = copy.copy(average.state_dict())
    state["averages"] = {n: v for n, v in state["averages"].items() if n != "norm.bias"}
    with pytest.raises(onefold.StateError, match=r"'norm\.bias'"):
        average.load_state_dict(state)
    step(module, optimizer, token_batches(1)[0])
