"""The laws on the simulated device: what trains on the CPU trains there alike, without a race."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import onefold
from onefold import Offload, Wire
from onefold.compose import routes
from onefold.layout.ledger import Ledger
from onefold.mixed.speeds import EVERY, WARM_STEPS, measure
from onefold.tier.cpu import CopyStream
from onefold.tier.slots import SlotPool
from onefold.tier.step_device import HostStep
from tests.laws.test_graphs import Tied
from tests.sim import building
from tests.sim import device as sim
from tests.sim.counting import MESSAGES, of_onefold
from tests.sim.device import BACKENDS, check, host_waits
from tests.sim.ranks import run_sim
from tests.sim.training import Recomputing, Spared, device, on_device, step, train_sim
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import seeded
from tests.support.rows import again_but, worlds_in_turn
from tests.support.training import Job, Result, assert_close, assert_same_bits, run_job, train_plain

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.skipif(building.missing() is not None, reason=f"needs {building.missing()}"),
]


class Adapted(Model):
    """A frozen base; each block has an adapter that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.down = nn.Sequential(block.down, nn.Linear(16, 2), nn.Linear(2, 16))
            block.down[0].requires_grad_(False)


class Compiled(Model):
    """Blocks compiled by aot_eager."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")


class Sparse(Model):
    """A block that no batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(nn.Linear(16, 16))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks[:-1]:
            x = block(x)
        return self.head(self.norm(x))


def job(build: Callable[[], nn.Module] = Model, rows: int = 12, **changes: Any) -> Job:
    return Job(build, token_batches(rows=rows), next_token_loss, **changes)


def offloaded(**tiers: Any) -> Job:
    return job(options={"offload": Offload(**tiers)})


TILE = 1024
"""Bytes of a weight that is used tile by tile: the embedding and the head have several."""


def tiled(rank: int) -> dict[str, int]:
    return dict(of_onefold({"stage": 3, "offload": Offload(tile=TILE)}).waits)


def test_tables_in_tiles_cost_no_wait():
    assert run_sim(2, tiled) == [{}, {}]


Cases = dict[str, tuple[Job, tuple[int, ...]]]  # a job, and the stages at which it runs


def tiers(folder: str) -> Cases:
    return {
        "states stepped by the CPU": (offloaded(optimizer="cpu", step="cpu"), (1, 2, 3)),
        "states streamed to the device": (offloaded(optimizer="cpu", step="device"), (1, 3)),
        "half of the states": (offloaded(optimizer="cpu", fraction=0.5, step="cpu"), (2,)),
        "in backward": (offloaded(optimizer="cpu", step_in_backward=True, step="cpu"), (3,)),
        "weights": (offloaded(optimizer="cpu", parameters="cpu", step="cpu"), (3,)),
        "weights, streamed": (offloaded(optimizer="cpu", parameters="cpu", step="device"), (3,)),
        "activations": (offloaded(activations="cpu"), (1, 3)),
        "states on disk": (offloaded(optimizer="disk", disk=folder), (2,)),
        "all on disk": (
            offloaded(optimizer="disk", parameters="disk", activations="disk", disk=folder),
            (3,),
        ),
    }


def orders(folder: str) -> Cases:
    return {
        "accumulation": (job(rows=24, accumulate=2, clip=0.1), (1, 2, 3)),
        "recompute": (job(Recomputing), (2, 3)),
        "unused parameters": (job(Sparse), (2, 3)),
        "adapters": (job(Adapted), (1, 3)),
        "tiles": (offloaded(tile=TILE), (3,)),
    }


def hops(folder: str) -> Cases:
    mesh = {"mesh": (2, 2)}
    twice = {**mesh, "wire": Wire(secondary="gradients")}
    return {
        "two hops": (job(options=mesh), (1, 3)),
        "weights twice": (job(options={**mesh, "wire": Wire(secondary="weights")}), (3,)),
        "replicas": (job(options={**mesh, "wire": Wire(secondary="optimizer")}), (2,)),
        "sums of micro-batches": (job(rows=24, accumulate=2, options=twice), (3,)),
    }


def compiled(folder: str) -> Cases:
    return {"aot_eager": (job(Compiled), (1, 3))}


def in_bf16(folder: str) -> Cases:
    half = {"precision": "bf16"}
    weights, states = Offload(optimizer="cpu", parameters="cpu"), Offload(optimizer="cpu")
    return {
        "bf16": (job(clip=0.1, options=half), (0, 1, 2, 3)),
        "recompute": (job(Recomputing, clip=0.1, options=half), (3,)),
        "weights in CPU memory": (job(clip=0.1, options={**half, "offload": weights}), (3,)),
        "states in CPU memory": (job(clip=0.1, options={**half, "offload": states}), (2,)),
    }


def wires(folder: str) -> Cases:
    words = {
        "int8": Wire(weights="int8", gradients="int8", feedback=True),
        "int4+h": Wire(weights="int4+h", gradients="int4+h"),
    }
    return {word: (job(options={"wire": wire}), (2, 3)) for word, wire in words.items()}


ALONE = (tiers, in_bf16)
"""Tables that run on one rank and on several, each at every other stage of a case."""


def cases_of(table: Callable[[str], Cases], folder: str, world_size: int) -> Cases:
    cases = table(folder)
    if table in ALONE:
        for name, (work, stages) in cases.items():
            cases[name] = work, stages[world_size == 1 :: 2] or stages
    return cases


def run_cases(rank: int, table: Callable[[str], Cases], folder: str, world_size: int) -> Any:
    """Each case at each stage, without a race."""
    results = {}
    for name, (work, stages) in cases_of(table, folder, world_size).items():
        for stage in stages:
            results[name, stage] = train_sim(rank, work, world_size, stage)
            try:
                check()
            except AssertionError as error:
                error.add_note(f"{name}, stage {stage}, rank {rank} of {world_size}")
                raise
    return results


@again_but("tiers-1", "hops-4", "compiled-2")
@worlds_in_turn
@pytest.mark.parametrize(
    ("table", "world_size"), [(tiers, 1), (tiers, 2), (orders, 3), (hops, 4), (compiled, 2)]
)
def test_weights_are_those_of_the_cpu(table, world_size, tmp_path):
    """A rank alone has no process group: users see plain tensors there, not DTensors."""
    backend = BACKENDS if world_size > 1 else None
    ranks = run_sim(world_size, run_cases, table, str(tmp_path), world_size, backend=backend)
    for name, (work, stages) in cases_of(table, str(tmp_path), world_size).items():
        plain = train_plain(replace(work, options={}))
        for result in (rank[name, stage] for rank in ranks for stage in stages):
            assert_close(result, plain)


@again_but("3")
@pytest.mark.parametrize("world_size", [1, 3])
def test_bf16_has_the_losses_of_fp32_up_to_its_rounding(world_size):
    wanted = train_plain(job(clip=0.1)).losses
    for results in run_sim(world_size, run_cases, in_bf16, "", world_size):
        for result in results.values():
            torch.testing.assert_close(result.losses, wanted, rtol=2e-2, atol=0)


def test_quantized_messages_train_as_on_the_cpu():
    """Rounding differs where sums differ by a bit: losses agree to the grain of the codec."""
    ranks = run_sim(2, run_cases, wires, "", 2)
    for word, (work, stages) in wires("").items():
        for stage in stages:
            wanted = run_job(work, 2, stage)
            for rank in ranks:
                torch.testing.assert_close(
                    rank[word, stage].losses, wanted.losses, rtol=5e-3, atol=0
                )


def in_unsharded(module: nn.Module, name: str) -> None:
    with onefold.unsharded(module, writeback=True):
        module.get_parameter(name).mul_(0.5)


EDITS: dict[str, Callable[[nn.Module, str], Any]] = {
    "in place": lambda module, name: module.get_parameter(name).mul_(0.5),
    "of .data": lambda module, name: module.get_parameter(name).data.mul_(0.5),
    "of a list": lambda module, name: torch._foreach_mul_([module.get_parameter(name)], 0.5),
    "by a copy": lambda module, name: module.get_parameter(name).copy_(
        0.5 * module.get_parameter(name).full_tensor()
    ),
    "in unsharded": in_unsharded,
}


def halved(module: nn.Module, tokens: Tensor, name: str, edit: Callable[..., Any]) -> bool:
    """An edit right behind a backward, which the device has not run yet."""
    before = module.get_parameter(name).full_tensor()
    next_token_loss(module, tokens).backward()
    with torch.no_grad():
        edit(module, name)
    return torch.equal(module.get_parameter(name).full_tensor(), 0.5 * before)


def edited(rank: int) -> dict[str, bool]:
    """Edits of weights in CPU memory, from which copies to the device are still to run."""
    module = seeded(Model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0)
    onefold.shard(module, optimizer, stage=3, offload=Offload(optimizer="cpu", parameters="cpu"))
    tokens, name = on_device(token_batches()[0]), "blocks.0.up.weight"
    kept = {"of kept .data": module.get_parameter(name).data}
    kept["of a state dict"] = module.state_dict()[name]
    edits = EDITS | {way: lambda *_, kept=tensor: kept.mul_(0.5) for way, tensor in kept.items()}
    found = {}
    for way, edit in edits.items():
        found[way] = halved(module, tokens, name, edit)
        try:
            check()
        except AssertionError as error:
            error.add_note(way)
            raise
        optimizer.zero_grad()
    return found


def test_an_edit_of_weights_waits_for_copies_that_read_them():
    for found in run_sim(2, edited, max_us=2000, share=1.0):
        assert len(found) == len(EDITS) + 2
        assert all(found.values()), found


def refilled(rank: int) -> None:
    """The host fills a slot again, whose bytes are on their way to the device."""
    step = HostStep(SlotPool.on_host(Ledger()), device())
    for value in (1.0, 2.0):
        with step.lend(4096, fills_by_host=True) as slot, step.working(None):
            values = slot.tensor(1024, torch.float32).fill_(value)
            on_device = values.to(device(), non_blocking=True)
            step.leave(slot)
    del on_device


def test_a_slot_that_the_disk_fills_has_been_read():
    run_sim(1, refilled, backend=None)


def ended(rank: int) -> bool:
    copies = CopyStream(device())
    with copies:
        copies.copy([torch.empty(1000, device=device())], [torch.ones(1000).pin_memory()])
    event = copies.mark()
    del copies
    return event.query()


def test_a_stream_of_copies_ends_after_them():
    assert run_sim(1, ended, backend=None, max_us=20_000, share=1.0) == [True]


def spared(rank: int, stage: int, mesh: tuple[int, int] | None) -> tuple[int, int]:
    """Waits of the host in a steady step: of the rank's backward, and of its optimizer's step."""
    module, plain = seeded(Spared), seeded(Spared)
    for block in (*module.blocks, *plain.blocks):
        block.uses_rare = rank == 0
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    axes = None if mesh is None else init_device_mesh("sim", mesh, mesh_dim_names=("node", "rank"))
    onefold.shard(module, optimizer, stage=stage, mesh=axes)
    tokens = token_batches()[0]
    next_token_loss(plain, tokens).backward()
    on_sim = on_device(tokens)
    for _ in range(3):
        optimizer.zero_grad()
        torch.accelerator.synchronize()
        sim.native.reset()
        next_token_loss(module, on_sim).backward()
        waits = sum(host_waits().values())
        grads = {name: parameter.grad for name, parameter in module.named_parameters()}
        optimizer.step()
    check()
    in_step = sum(host_waits().values()) - waits
    for name, grad in grads.items():
        assert (grad is None) == name.endswith(".spare"), (name, grad)
    wanted = [plain.blocks[0].rare.grad if rank == 0 else torch.zeros(16)]
    dist.all_reduce(wanted[0])
    rare = grads["blocks.0.rare"]
    rare = (rare.full_tensor() if stage else rare).cpu()
    torch.testing.assert_close(rare, wanted[0] / dist.get_world_size())
    return waits, in_step


@again_but("2-None", "3-mesh3")
@worlds_in_turn
@pytest.mark.parametrize(
    ("stage", "mesh"), [(0, None), (2, None), (3, None), (3, (2, 2)), (2, (2, 2))]
)
def test_unused_parameters_of_all_units_cost_one_wait_of_a_backward(stage, mesh):
    """Whether another rank has used a parameter, the host learns when all are reduced."""
    for rank in run_sim(4 if mesh else 2, spared, stage, mesh):
        assert rank in ((1, 0), (0, 0))


def measured(rank: int) -> tuple[int, int, float]:
    """Waits of the host while each step is timed and speeds are exchanged; steps that were."""
    module = seeded(Model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer, stage=2)
    speeds = measure(module)
    speeds._fit.STEPS = speeds._fit.SECONDS = 1_000_000  # not ready: each step is timed
    for number, tokens in enumerate([on_device(batch) for batch in token_batches(steps=3 * EVERY)]):
        if number == EVERY:
            torch.accelerator.synchronize()
            sim.native.reset()
        next_token_loss(module, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        while not torch.accelerator.current_stream().query():  # else it is a step behind or more
            time.sleep(1e-3)
    return sum(host_waits().values()), speeds._fit.steps, speeds._fit.seconds


def test_speeds_of_ranks_are_measured_without_a_wait():
    for waits, steps, seconds in run_sim(2, measured):
        assert waits == 0
        assert steps >= 3 * EVERY - WARM_STEPS - 2
        assert seconds > 0


def looped(rank: int, loops: bool) -> tuple[list[Result], list[int]]:
    """A rank alone at each stage, and the messages of its steps."""
    routes.LOOPS = loops
    results, messages = [], []
    for stage in range(4):
        sim.native.reset()
        results.append(train_sim(rank, job(Spared, rows=4, clip=0.1), 1, stage))
        counts = sim.native.counts()
        messages.append(sum(counts.get(kind, 0) for kind in MESSAGES))
        check()
    return results, messages


def test_one_rank_that_sends_to_itself_trains_bit_for_bit_as_one_that_does_not():
    """One GPU runs the whole transport in whole steps."""
    (alone, none), (own, some) = [run_sim(1, looped, each)[0] for each in (False, True)]
    for one, other in zip(own, alone, strict=True):
        assert_same_bits(one, other)
    assert not any(none)
    assert all(some)


def backward_after_a_step(rank: int, stage: Any, offload: Any) -> list[str]:
    """The errors of graphs from before a step, of small and of large weights."""
    errors = []
    for width in (8, 512):
        module = seeded(Tied, width)
        optimizer = torch.optim.AdamW(module.parameters())
        onefold.shard(module, optimizer, stage=stage, offload=offload)
        loss = module(on_device(torch.arange(15).view(3, 5) + rank)).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        try:
            loss.backward()
        except onefold.OnefoldError as error:
            errors.append(str(error))
    return errors


@again_but("3-offload2")
@worlds_in_turn
@pytest.mark.parametrize(("stage", "offload"), [(2, None), (3, None), (3, Offload("cpu", "cpu"))])
def test_a_graph_from_before_a_step_is_an_error_on_a_device_too(stage, offload):
    for errors in run_sim(2, backward_after_a_step, stage, offload):
        assert len(errors) == 2
        for error in errors:
            assert "run backward before the optimizer steps" in error


def save_and_resume(rank: int, folder: str) -> tuple[Result, Result]:
    """All steps at once; and the last ones by another stage, from a checkpoint of the first."""
    work = job()
    whole = train_sim(rank, work, 2, 3)
    batches = list(map(on_device, work.batches))
    module = seeded(work.build)
    optimizer = work.optimizer(module.parameters())
    onefold.shard(module, optimizer, stage=3)
    step(module, optimizer, work, batches[0], rank, 2)
    onefold.save(folder, module, optimizer)
    again = seeded(work.build, seed=7)
    optimizer = work.optimizer(again.parameters())
    onefold.shard(again, optimizer, stage=1)
    onefold.load(folder, again, optimizer)
    losses = [step(again, optimizer, work, batch, rank, 2) for batch in batches[1:]]
    with onefold.unsharded(again):
        weights = {name: p.detach().cpu().clone() for name, p in again.named_parameters()}
    return whole, Result(torch.stack(losses).cpu(), weights)


def test_a_checkpoint_goes_on_at_another_stage_bit_for_bit(tmp_path):
    for whole, resumed in run_sim(2, save_and_resume, str(tmp_path / "saved")):
        assert_same_bits(resumed, Result(whole.losses[1:], whole.weights))


def streamed(rank: int, tokens: Tensor, folder: Any) -> list[Tensor]:
    """Logits of a module whose weights come from CPU memory, and from disk."""
    found = []
    for offload in ("cpu", f"disk:{folder}"):
        module = seeded(partial(Model, 6)).eval()
        budget = sum(p.nbytes for p in module.parameters()) // 2 + 20_000
        onefold.stream(module, budget=budget, offload=offload)
        with torch.no_grad():
            inputs = tokens.to(device()), tokens  # and where its parameters rest
            found += [module(batch).cpu() for batch in inputs]
        del module
        gc.collect()
    return found


def test_streamed_weights_give_the_logits_of_the_cpu(tmp_path):
    tokens = token_batches()[0]
    with torch.no_grad():
        wanted = seeded(partial(Model, 6)).eval()(tokens)
    (found,) = run_sim(1, streamed, tokens, str(tmp_path), backend=None)
    for logits in found:
        torch.testing.assert_close(logits, wanted)
