"""A plan with model axes: each rank of a pipeline is planned on its data axis."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onefold.config import stage_of
from onefold.errors import ConfigError
from onefold.planner.clusters import Cluster
from onefold.planner.composed import ComposedJob, kept_nbytes, rank_trace
from onefold.planner.composition import Composition, forecast_steps, pipeline_step, sent_on
from onefold.planner.costs import Conditions
from onefold.planner.machines import machine_of
from onefold.planner.memory import forecast
from onefold.planner.models.gpt import GPT, GPTConfig
from onefold.planner.planned_axes import Anatomy, ModelAxes
from onefold.planner.planning import plan
from onefold.planner.result import Plan
from onefold.planner.simulate import simulate
from onefold.planner.trace import Trace, tokens_of, trace
from onefold.planner.work import AxisMessage, ModelWork, UnitWork, Work
from onefold.recipe import Recipe
from tests.support.commands import onefold
from tests.support.planned import peak_of, sent_for
from tests.support.ranks import run_processes
from tests.support.rows import worlds_in_turn

LAYERS, WIDTH, HEADS, SEQ, ROWS, VOCAB = 8, 64, 4, 32, 2, 256
TOKENS, ITEMSIZE = ROWS * SEQ, 4
HIDDEN = TOKENS * WIDTH * ITEMSIZE
"""Bytes of the activations between two blocks of a micro-batch."""
BLOCK, TABLES, HEAD = 12 * WIDTH**2 + 4 * WIDTH, (VOCAB + SEQ) * WIDTH, (VOCAB + 2) * WIDTH


def gpt(*, tied: bool = False) -> nn.Module:
    config = GPTConfig(num_layers=LAYERS, width=WIDTH, num_heads=HEADS, lr=1e-3, is_tied=tied)
    with torch.device("meta"):
        return GPT(config, SEQ)


class Routed(nn.Module):
    """A block with a stack of six experts, of which each token meets two."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.top_k = HEADS, 2
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 6, bias=False)
        self.experts = nn.Module()
        self.experts.up = nn.Parameter(torch.empty(6, 2 * WIDTH, WIDTH))
        self.experts.down = nn.Parameter(torch.empty(6, WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(self.norm(x)).softmax(-1)
        inside = torch.einsum("btd,efd->btef", x, self.experts.up).relu()
        return x + torch.einsum("btef,edf,bte->btd", inside, self.experts.down, weights)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Routed() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Listed(Routed):
    """The same with a list of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(self.norm(x)).softmax(-1)
        return x + sum(e(x) * w for e, w in zip(self.experts, weights.split(1, -1), strict=True))


def listed() -> nn.Module:
    with torch.device("meta"):
        model = Mixture()
        model.blocks = nn.ModuleList(Listed() for _ in range(LAYERS))
    return model


def mixture() -> nn.Module:
    with torch.device("meta"):
        return Mixture()


BUILDS = {"gpt": gpt, "tied": lambda: gpt(tied=True), "mixture": mixture, "listed": listed}


@cache
def traced(name: str) -> tuple[Trace, Anatomy]:
    module = BUILDS[name]()
    found = trace(module, tokens_of(ROWS, SEQ))
    return found, Anatomy.dissect(module, found.units)


def job_of(name: str, axes: ModelAxes, world_size: int, local_world_size: int = 8) -> ComposedJob:
    recipe = Recipe(world_size=world_size, local_world_size=local_world_size)
    return ComposedJob(axes, traced(name)[1], recipe, TOKENS, ITEMSIZE)


def ranks_of(name: str, axes: ModelAxes, world_size: int, num_micro: int = 1) -> list[Trace]:
    job = job_of(name, axes, world_size)
    return [rank_trace(traced(name)[0], job, rank, num_micro) for rank in range(axes.pp)]


def planned(name: str = "gpt", *, ranks: int = 8, memory: str = "8GiB", **options: Any) -> Plan:
    axes = ModelAxes(**{key: options.pop(key) for key in ("tp", "pp", "cp", "ep", "virtual")
                   if key in options})  # fmt: skip
    cluster = Cluster(ranks=ranks, device_type="cuda", memory=memory, machine="h100-80")
    return plan(BUILDS[name](), cluster=cluster, seq=SEQ, batch=ROWS, axes=axes, **options)


def composed(found: Plan) -> Composition:
    made = found.taken.composed
    assert made is not None
    return made


# without axes


def test_axes_of_one_rank_leave_every_plan_as_it_is():
    with_axes, without = planned(), plan(
        gpt(), cluster=Cluster(ranks=8, memory="8GiB", machine="h100-80"), seq=SEQ, batch=ROWS
    )  # fmt: skip
    assert list(with_axes.lines(is_wide=True)) == list(without.lines(is_wide=True))
    assert with_axes.as_dict() == without.as_dict()


@worlds_in_turn
@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("stage", range(4))
def test_the_one_rank_of_no_axes_holds_and_sends_what_the_model_does(name, stage):
    whole, (rank,) = traced(name)[0], ranks_of(name, ModelAxes(), 2)
    recipe = Recipe(stage=stage_of(stage), world_size=2, local_world_size=2)
    found, wanted = (forecast(each, recipe, accumulate=2) for each in (rank, whole))
    assert found == wanted
    assert [(e.kind, e.now, e.peak, e.logits) for e in rank.events] == [
        (e.kind, e.now, e.peak, e.logits) for e in whole.events
    ]


# parameters


@pytest.mark.parametrize(
    ("pp", "virtual"), [(1, 1), (2, 1), (4, 1), (8, 1), (3, 1), (2, 4), (3, 2)]
)
def test_the_parameters_of_all_ranks_are_the_models(pp, virtual):
    axes = ModelAxes(pp=pp, virtual=virtual)
    numels = [each.numel for each in ranks_of("gpt", axes, pp)]
    assert sum(numels) == traced("gpt")[0].numel == TABLES + LAYERS * BLOCK + HEAD
    names = [m.fqn for each in ranks_of("gpt", axes, pp) for u in each.units for m in u.members]
    assert sorted(names) == sorted(name for name, _ in gpt().named_parameters())


def test_the_last_rank_has_a_copy_of_a_tied_weight_and_its_work():
    first, last = ranks_of("tied", ModelAxes(pp=2), 2)
    assert first.numel + last.numel == traced("tied")[0].numel + VOCAB * WIDTH
    assert [m.fqn for m in last.units[0].members] == ["tokens.weight"]
    head = 2 * TOKENS * VOCAB * WIDTH
    assert last.units[0].forward.flops == head
    assert first.units[0].forward.flops == 0


def test_virtual_pieces_take_turns_on_the_ranks():
    found = composed(planned(pp=2, virtual=2, accumulate=2))
    assert [rank.blocks for rank in found.ranks] == [(0, 1, 4, 5), (2, 3, 6, 7)]


@pytest.mark.parametrize(("tp", "dp"), list(product((1, 2, 4), (1, 2))))
def test_weights_and_states_of_dp_and_tp_are_closed_forms(tp, dp):
    """Stage 0 holds 4 + 4 + 8 bytes a parameter, stage 3 a dp-th of them."""
    (rank,) = ranks_of("gpt", ModelAxes(tp=tp), tp * dp)
    vectors = (4 * LAYERS + 2) * WIDTH
    numel = (TABLES + LAYERS * BLOCK + HEAD - vectors) // tp + vectors
    assert rank.numel == numel
    for stage, share in ((0, 1), (3, dp)):
        recipe = Recipe(stage=stage_of(stage), world_size=dp, device_type="cuda")
        resting = forecast(rank, recipe).resting
        assert resting["weight", "device"] == 4 * numel // share
        assert resting["optimizer", "device"] == 8 * numel // share


def test_where_heads_do_not_divide_the_fullest_rank_counts():
    (rank,) = ranks_of("gpt", ModelAxes(tp=3), 3)
    block = next(unit for unit in rank.units if unit.name == "blocks.0")
    shapes = {member.fqn.removeprefix("blocks.0."): member.shape for member in block.members}
    assert shapes["attention.qkv.weight"] == (3 * WIDTH // 2, WIDTH)  # two of four heads
    assert (
        "tp 3 does not divide 4 heads: the fullest rank counts" in planned(ranks=3, tp=3).estimates
    )


# activations


@pytest.mark.parametrize(("pp", "virtual"), [(2, 1), (4, 1), (2, 2)])
def test_activations_of_all_ranks_are_the_models_and_the_inputs_that_ranks_receive(pp, virtual):
    axes = ModelAxes(pp=pp, virtual=virtual)
    job, whole = job_of("gpt", axes, pp), traced("gpt")[0]
    ranks = ranks_of("gpt", axes, pp)
    kept = sum(kept_nbytes(each.events, each.units, job) for each in ranks)
    received = (pp * virtual - 1) * HIDDEN
    assert kept == kept_nbytes(whole.events, whole.units, job) + received


def test_a_rank_holds_as_many_micro_batches_as_are_in_flight():
    axes, job = ModelAxes(pp=4), job_of("gpt", ModelAxes(pp=4), 4)
    alone, many = ranks_of("gpt", axes, 4), ranks_of("gpt", axes, 4, num_micro=8)
    for rank, (one, more) in enumerate(zip(alone, many, strict=True)):
        kept = kept_nbytes(one.events, one.units, job)
        assert peak_of(more) - peak_of(one) == (4 - rank - 1) * kept
    assert [axes.in_flight(rank, 8) for rank in range(4)] == [4, 3, 2, 1]
    assert [axes.in_flight(rank, 2) for rank in range(4)] == [2, 2, 2, 1]


@pytest.mark.parametrize(("pp", "virtual"), [(2, 2), (4, 3), (8, 3)])
def test_interleaving_holds_more_by_a_share_of_a_micro_batch_on_the_first_rank(pp, virtual):
    """L (1 + (p-1) / (p v)) blocks, where 1F1B holds L: Korthikanti, arXiv 2205.05198, 4.2.3."""
    axes = ModelAxes(pp=pp, virtual=virtual)
    assert axes.in_flight(0, 99) == pytest.approx(pp * (1 + (pp - 1) / (pp * virtual)))


@pytest.mark.parametrize(("tp", "cp"), [(1, 4), (2, 2), (4, 1)])
def test_tp_and_cp_divide_activations_and_work(tp, cp):
    """But for the gathered inputs of attention and feed-forward, which a rank of tp keeps whole."""
    axes = ModelAxes(tp=tp, cp=cp)
    (rank,), job = ranks_of("gpt", axes, 4), job_of("gpt", axes, 4)
    whole = traced("gpt")[0]
    kept, all_kept = (kept_nbytes(each.events, each.units, job) for each in (rank, whole))
    gathered = LAYERS * 2 * (1 - 1 / tp) * HIDDEN / cp
    assert kept == pytest.approx(all_kept / 4 + gathered, abs=1)
    for mine, its in zip(rank.units, whole.units, strict=True):
        assert mine.forward.flops == its.forward.flops / 4
        assert mine.backward.attention_flops == its.backward.attention_flops / 4
        assert mine.num_kernels == its.num_kernels


class Attention(nn.Module):
    """Queries, keys and values apart, so that tp can cut their columns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 256, bias=False), nn.Linear(256, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.feed = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed(self.second(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Plain() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def hold_what_was_planned(rank: int, numel: int, kept: int) -> None:
    """Cut a stack by torch's tensor parallelism, and count what its forward keeps."""
    import torch.distributed.tensor.parallel as tp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh, model = init_device_mesh("cpu", (2,)), Stack()
    gathers = tp.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    columns = ("attention.q", "attention.k", "attention.v", "feed.up")
    cut = {
        **dict.fromkeys(("first", "second"), tp.SequenceParallel()),
        **dict.fromkeys(("attention", "feed"), gathers),
        **dict.fromkeys(columns, tp.ColwiseParallel()),
        **dict.fromkeys(
            ("attention.out", "feed.down"), tp.RowwiseParallel(output_layouts=Shard(1))
        ),
    }
    for block in model.blocks:
        tp.parallelize_module(block, mesh, cut)
    table = tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    tp.parallelize_module(model, mesh, {"tokens": table})

    def local(tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    parameters = [local(parameter) for parameter in model.parameters()]
    saved: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        own = local(tensor)
        saved[own.untyped_storage()._cdata] = own
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(torch.zeros(ROWS, SEQ, dtype=torch.int64))
    for parameter in parameters:
        saved.pop(parameter.untyped_storage()._cdata, None)
    held = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    assert sum(parameter.numel() for parameter in parameters) == numel
    assert held == pytest.approx(kept, rel=0.05)


@pytest.mark.process
def test_a_rank_of_tp_holds_what_torchs_tensor_parallelism_keeps():
    whole = trace(Stack(), tokens_of(ROWS, SEQ))
    axes, recipe = ModelAxes(tp=2), Recipe(world_size=2, local_world_size=2)
    job = ComposedJob(axes, Anatomy.dissect(Stack(), whole.units), recipe, TOKENS, ITEMSIZE)
    rank = rank_trace(whole, job, 0, 1)
    kept = kept_nbytes(rank.events, rank.units, job)
    run_processes(2, hold_what_was_planned, rank.numel, kept)


class Half(nn.Module):
    """The second half of a GPT, as a stage of a pipeline."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(model.blocks[LAYERS // 2 :])
        self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("stage", range(4))
def test_a_derived_rank_is_the_plan_of_the_stages_own_module(stage):
    """The module of a stage is built and traced: bytes sent are equal, memory to 2 %."""
    derived = ranks_of("gpt", ModelAxes(pp=2), 4)[1]
    given = torch.zeros(ROWS, SEQ, WIDTH, device="meta", requires_grad=True)
    own = trace(Half(gpt()), (given,))
    recipe = Recipe(stage=stage_of(stage), world_size=2, local_world_size=2)
    found, wanted = (forecast(each, recipe, accumulate=3) for each in (derived, own))
    assert found.sent == wanted.sent
    assert found.resting["weight", "device"] == wanted.resting["weight", "device"]
    assert found.memory_nbytes == pytest.approx(wanted.memory_nbytes, rel=0.02)


# bytes of axes


def blocks_of(made: Composition) -> list[int]:
    return [len(rank.blocks) for rank in made.ranks]


@worlds_in_turn
@pytest.mark.parametrize(
    ("stage", "tp", "cp", "pp"),
    [(1, 2, 1, 1), (2, 1, 2, 1), (1, 1, 1, 4), (2, 1, 1, 4), (2, 2, 2, 2), (1, 4, 1, 2)],
)
def test_bytes_of_axes_are_closed_forms_of_a_gpt(stage, tp, cp, pp):
    micro = 4
    made = composed(planned(tp=tp, cp=cp, pp=pp, accumulate=micro, stage=stage, offload=None))
    sent = {line.axis: line.sent_nbytes for line in made.lines}
    run, first, last = Conditions(accumulate=micro), made.ranks[0], made.ranks[-1]
    local = HIDDEN / cp
    for rank in made.ranks:
        ends = (rank is first) + (rank is last)
        reduced = 2 * (tp - 1) / tp * local * (4 * len(rank.blocks) + ends)
        assert sent_on("tp", rank.work, run) == pytest.approx(micro * reduced)
        exchanged = (cp - 1) / cp * 4 * local / tp * 2 * len(rank.blocks)
        assert sent_on("cp", rank.work, run) == pytest.approx(micro * exchanged)
        neighbours = (rank is not first) + (rank is not last)
        assert sent_on("pp", rank.work, run) == pytest.approx(micro * neighbours * local / tp)
    data = 8 // (tp * pp)
    fullest = max(rank.work.numel for rank in made.ranks)
    passes = {1: 2, 2: 1 + micro}[stage]
    assert sent["data"] == pytest.approx(passes * (data - 1) / data * fullest * ITEMSIZE)
    assert {line.axis: line.ranks for line in made.lines} == {"data": data} | {
        name: size for name, size in {"tp": tp, "pp": pp, "cp": cp}.items() if size > 1
    }


def test_recompute_repeats_the_messages_of_forward():
    plain, again = (
        plan("tiny", cluster=Cluster(ranks=4, memory="8GiB"), seq=SEQ, axes=ModelAxes(tp=2),
             stage=2, recompute=recompute, offload=None)
        for recompute in (False, True)
    )  # fmt: skip
    (work,), (more,) = ([rank.work for rank in composed(each).ranks] for each in (plain, again))
    run, layers, hidden = Conditions(), 4, SEQ * 128 * 4
    assert sent_on("tp", work, run) == (4 * layers + 2) * hidden
    assert sent_on("tp", more, run) == (6 * layers + 2) * hidden


@pytest.mark.parametrize("ep", [2, 3, 4])
def test_a_rank_of_ep_has_whole_experts_of_a_list(ep):
    """Six experts; of four ranks two have two, and the plan is theirs."""
    (rank,) = ranks_of("listed", ModelAxes(ep=ep), 4 * ep)
    experts = [unit for unit in rank.units if unit.name.endswith(".experts")]
    own = -(-6 // ep)
    assert [unit.numel for unit in experts] == [own * WIDTH**2] * LAYERS
    assert rank.numel == traced("listed")[0].numel - LAYERS * (6 - own) * WIDTH**2


@pytest.mark.parametrize("ep", [2, 3])
def test_experts_have_a_data_axis_of_their_own(ep):
    world = 2 * ep
    (rank,) = ranks_of("mixture", ModelAxes(ep=ep), world)
    experts = [unit for unit in rank.units if unit.name.endswith(".experts")]
    assert len(experts) == LAYERS
    stack = 6 * 2 * 2 * WIDTH**2
    assert all(unit.numel == stack // ep for unit in experts)
    assert rank.numel == traced("mixture")[0].numel - LAYERS * (stack - stack // ep)
    recipe = Recipe(stage=stage_of(2), world_size=world, device_type="cuda")
    dense = rank.numel - LAYERS * stack // ep
    wanted = sum(
        2 * 4 * numel * (ranks - 1) / ranks
        for numel, ranks in ((dense, world), (LAYERS * stack // ep, world // ep))
    )
    assert sum(forecast(rank, recipe).sent.values()) == pytest.approx(wanted, rel=0.01)
    shuffled = 4 * 2 * HIDDEN * (ep - 1) / ep  # out and back, in forward and backward, two of six
    assert sent_on("ep", rank.work(TOKENS), Conditions()) == pytest.approx(LAYERS * shuffled)


@pytest.mark.parametrize("axis", ["tp", "cp", "ep", "pp"])
@pytest.mark.parametrize("local_world_size", [1, 2, 8])
def test_a_message_costs_the_bytes_of_its_closed_form(axis, local_world_size):
    sizes = {axis: 4}
    group = ModelAxes(**sizes).group(axis, local_world_size, 16)
    message = AxisMessage(axis, 1e6, group, 2, 1)
    cost = message.cost(machine_of("h100-80"))
    assert cost.nbytes == pytest.approx(message.sent)
    work = ModelWork((UnitWork("", 0, messages=(message,)),), 1)
    assert sent_on(axis, work, Conditions(recompute=1.0)) == 5 * message.sent


def test_time_on_tp_is_the_time_of_its_all_reduces():
    """4 a block, 1 a table, 1 a head; each 2 (t - 1) / t B bytes and 2 (t - 1) hops."""
    found = planned(tp=4, stage=2, offload=None, accumulate=2)
    step, machine = found.taken.step, machine_of("h100-80")
    assert step is not None
    hops = 2 * 3 * machine.inside.latency
    one = hops + 2 * 3 / 4 * HIDDEN / machine.inside.nbytes_per_second
    assert step.exposed_axes == pytest.approx(2 * (4 * LAYERS + 2) * one)


@pytest.mark.parametrize(
    ("sizes", "data", "near"),
    [
        ({"tp": 8}, 8, 1), ({"tp": 4}, 16, 2), ({"tp": 2, "pp": 2}, 16, 4), ({"cp": 4}, 64, 8),
        ({"tp": 16}, 4, 1), ({"tp": 2, "pp": 16}, 2, 2), ({"tp": 2, "pp": 8, "cp": 4}, 4, 4),
    ],
)  # fmt: skip
def test_the_data_axis_is_dp_by_cp_of_which_a_node_has_one_tpth(sizes, data, near):
    """64 ranks on nodes of 8; tp takes neighbours."""
    recipe = ModelAxes(**sizes).data(Recipe(world_size=64, local_world_size=8))
    assert (recipe.world_size, recipe.local_world_size) == (data, near)


def test_recompute_waits_for_the_messages_of_forward_again():
    message = AxisMessage("tp", 1e6, ModelAxes(tp=2).group("tp", 8, 8), 2, 2)
    unit = UnitWork("", 1000, Work(1e9), Work(2e9), messages=(message,))
    work, machine = ModelWork((unit,), 1), machine_of("h100-80")
    waits = [
        simulate(work, Recipe(), machine, Conditions(recompute=share)).exposed_axes
        for share in (0.0, 1.0)
    ]
    one = message.cost(machine).seconds
    assert waits == pytest.approx([4 * one, 6 * one])


# the pipeline's time


@pytest.mark.parametrize(("pp", "virtual", "micro"), list(product((1, 2, 4), (1, 3), (1, 4, 32))))
def test_the_bubble_of_equal_ranks_is_a_closed_form(pp, virtual, micro):
    """(p - 1) / (v m + p - 1) of the pipeline's time: Narayanan, arXiv 2104.04473, 2.2.2."""
    axes = ModelAxes(pp=pp, virtual=virtual if pp > 1 else 1)
    unit = UnitWork("", 1000, Work(1e12), Work(2e12))
    recipe, run = Recipe(world_size=1), Conditions(accumulate=micro)
    works = [(ModelWork((unit,), 1), None)] * pp
    step, _ = pipeline_step(works, recipe, axes, machine_of("h100-80"), run)
    busy = step.compute + step.memory
    share = (pp - 1) / (axes.virtual * micro + pp - 1)
    assert axes.bubble_share(micro) == share
    assert step.bubble / (step.bubble + busy) == pytest.approx(share)
    assert step.seconds == pytest.approx(busy + step.bubble + step.optimizer)


def test_the_slowest_rank_decides_and_waits_for_one_micro_batch_of_the_others():
    recipe, run = Recipe(world_size=1), Conditions(accumulate=10)
    machine = machine_of("h100-80")
    works = [
        (ModelWork((UnitWork("", 1000, Work(flops)),), 1), None) for flops in (1e12, 4e12, 2e12)
    ]
    step, slowest = pipeline_step(works, recipe, ModelAxes(pp=3), machine, run)
    one = 1e12 / (machine.peak("bf16") * machine.efficiency.matmul)
    assert slowest == 1
    assert step.compute == pytest.approx(40 * one)
    assert step.bubble == pytest.approx(3 * one, rel=0.01)


def test_the_step_is_the_sum_of_its_parts():
    found = planned(tp=2, pp=2, accumulate=4, stage=3, offload=None)
    step = found.taken.step
    assert step is not None
    parts = (
        step.compute + step.memory + step.contention + step.exposed_gather + step.exposed_reduce
        + step.exposed_axes + step.optimizer + step.stragglers + step.bubble + step.exposed_launches
    )  # fmt: skip
    assert step.seconds == pytest.approx(parts)
    assert step.tokens_per_s == pytest.approx(ROWS * SEQ * 4 * 2 / step.seconds)
    shares = {line.axis: line.share for line in composed(found).lines}
    assert shares["tp"] == pytest.approx(step.exposed_axes / step.seconds)
    assert shares["pp"] == pytest.approx(step.bubble / step.seconds)


# windows


def window_of(memory: str, micro: int = 4) -> Composition:
    return composed(planned(pp=2, accumulate=micro, stage=3, offload=None, memory=memory))


def test_stage_3_of_a_pipeline_chooses_its_window_from_free_memory():
    wide = window_of("1GiB")
    assert all(rank.keeps and rank.sums for rank in wide.ranks)
    needs = [rank.forecast.memory_nbytes for rank in wide.ranks]
    assert needs[0] > needs[1]
    assert wide.window is None
    tight = window_of(f"{needs[0] - 1}B")  # `onefold.pipeline` must be told, as activations need it
    assert not tight.ranks[0].keeps
    assert max(rank.forecast.memory_nbytes for rank in tight.ranks) < needs[0]
    assert tight.window
    assert [rank.window for rank in window_of("1KiB").ranks] == [frozenset()] * 2
    assert window_of("1KiB").window == 0


def test_gradients_that_are_summed_where_they_are_take_time_at_every_stage():
    """Two reads and a write an element, seven times; stage 3 of a kept window does as stage 1."""
    work, machine = ModelWork((UnitWork("", 10**9),), 1), machine_of("h100-80")
    first, third = (
        Recipe(stage=stage_of(stage), world_size=8, local_world_size=8) for stage in (1, 3)
    )
    run = Conditions(accumulate=8)
    added = 7 * 3 * 2 * 10**9 / (machine.memory_rate * machine.efficiency.memory)
    for recipe, window in ((first, None), (first, {0}), (third, {0})):
        kept = None if window is None else frozenset(window)
        step = simulate(work, recipe, machine, run, window=kept)
        assert step.memory == pytest.approx(added)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stage_of_a_pipeline_reduces_what_rests_after_its_last_backward(stage):
    """As a run does (axes/pipelines/driver.py); stage 2 has nothing that rests."""
    micro, units = 3, tuple(UnitWork(str(n), 10**6, Work(1e10), Work(2e10)) for n in range(3))
    recipe = Recipe(stage=stage_of(stage), world_size=8, local_world_size=8)
    step = simulate(
        ModelWork(units, 1),
        recipe,
        machine_of("h100-80"),
        Conditions(accumulate=micro),
        window=frozenset(range(3)),
    )
    last = max(span.end for span in step.spans if span.what == "backward")
    late = [span.start >= last for span in step.spans if span.what == "reduce"]
    assert late.count(True) == (1 if stage == 2 else 3)
    assert len(late) == (3 * micro if stage == 2 else 3)


def test_messages_of_windows_are_closed_forms():
    """One gather and one reduction a step; one and m (stage 2); 2 m - (the last unit's) and m."""
    micro, data, recipe = 5, 4, Recipe(world_size=4, device_type="cuda")
    rank = ranks_of("gpt", ModelAxes(pp=2), 8)[0]
    own = (data - 1) / data * rank.numel * ITEMSIZE
    everyone = frozenset(range(len(rank.units)))
    sent = [
        forecast_steps(rank, replace(recipe, stage=stage_of(stage)), micro, window).sent
        for stage, window in ((3, everyone), (2, everyone), (3, frozenset()))
    ]
    assert [each["gather"] / own for each in sent[:2]] == [1, 1]
    assert [each["reduce_scatter"] / own for each in sent] == [1, micro, micro]
    assert 2 * micro - 1 <= sent[2]["gather"] / own <= 2 * micro


def test_messages_of_a_window_of_some_units_are_closed_forms():
    """One gather and one reduction a step of its units; 2 m and m of the others."""
    micro, recipe, machine = 5, Recipe(world_size=4, device_type="cuda"), machine_of("h100-80")
    rank = ranks_of("gpt", ModelAxes(pp=2), 8)[0]
    last = len(rank.units) - 1
    window = frozenset({0, last})
    own = [3 / 4 * ITEMSIZE * unit.numel for unit in rank.units]
    kept, others = own[0] + own[last], sum(own[1:last])
    found = forecast_steps(rank, recipe, micro, window)
    assert found.sent["gather"] == pytest.approx(kept + 2 * micro * others)
    assert found.sent["reduce_scatter"] == pytest.approx(kept + micro * others)
    run, work = Conditions(accumulate=micro), rank.work(TOKENS)
    steps = [
        simulate(work, recipe, machine, run, window=each)
        for each in (frozenset(range(len(rank.units))), window, frozenset())
    ]
    sent = [sent_for(each, "gather") + sent_for(each, "reduce") for each in steps]
    assert sent == sorted(sent)
    assert len(set(sent)) == 3


def test_a_step_of_many_micro_batches_is_told_from_three():
    rank, recipe = ranks_of("gpt", ModelAxes(pp=2), 8)[0], Recipe(world_size=4)
    for window in (None, frozenset(range(len(rank.units))), frozenset(), frozenset({0, 2})):
        told = forecast_steps(rank, recipe, 7, window)
        played = forecast(rank, recipe, accumulate=7, window=window)
        assert (told.sent, told.peaks) == (played.sent, played.peaks)


# bad input, and the command


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("gpt", {"tp": 3}, "axes that divide the world of 8 ranks, got tp 3 x pp 1 x cp 1 = 3"),
        ("gpt", {"tp": 2, "pp": 2, "cp": 4}, "= 16"),
        ("gpt", {"tp": 0}, "tp to be a whole number of at least 1"),
        ("gpt", {"virtual": 2}, "virtual stages of a pipeline"),
        ("gpt", {"tp": 8}, "tp of at most 4 heads"),
        ("gpt", {"cp": 8}, "cp of at most 4 heads"),
        ("gpt", {"pp": 8, "virtual": 2}, "at most 8 pipeline stages"),
        ("gpt", {"ep": 2}, "a model with experts for ep"),
        ("mixture", {"ep": 8}, "ep of at most 6 experts"),
        ("mixture", {"pp": 4, "ep": 4}, "ep to divide the 2 ranks of dp x cp"),
        ("mixture", {"ep": 2, "wire": "zero++"}, "the exact wire with cp and ep"),
        ("plain", {"pp": 2}, "a model of repeated blocks"),
    ],
)  # fmt: skip
def test_bad_axes_are_named_errors(monkeypatch, name, options, said):
    monkeypatch.setitem(BUILDS, "plain", lambda: nn.Linear(4, 4))
    with pytest.raises(ConfigError) as caught:
        planned(name, **options)
    assert said in str(caught.value)
    assert "\nhint: " in str(caught.value)


@pytest.mark.parametrize(
    ("pp", "mesh", "data"),
    [
        (1, '(2, 4, 2), mesh_dim_names=("nodes", "dp", "tp"))', 'mesh["nodes", "dp"]'),
        (2, '(2, 4, 2), mesh_dim_names=("pp", "dp", "tp"))', 'mesh["dp"]'),
    ],
)
def test_the_mesh_has_nodes_where_messages_of_data_hop_between_them(pp, mesh, data):
    """Two nodes: as ranks of a pipeline, they have data axes of their own."""
    found = plan(
        "tiny", cluster=Cluster(ranks=8, nodes=2, memory="8GiB"), seq=SEQ, stage=2, offload=None,
        wire="recommended", axes=ModelAxes(tp=2, pp=pp),
    )  # fmt: skip
    assert mesh in " ".join(str(found).split())
    assert found.line.endswith(f"mesh={data})")


GIVEN = ("--model", "tiny", "--seq", "64", "--gpus", "8", "--mem", "2GiB", "--cluster", "h100-80")


def test_the_command_prints_a_line_for_each_axis_and_rank():
    done = onefold("plan", *GIVEN, "--tp", "2", "--pp", "2", "--accumulate", "4")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("tiny: 862,464 parameters, 8 ranks as pp 2 x dp 2 x tp 2")
    first = next(index for index, line in enumerate(lines) if line.startswith("axis"))
    assert [line.split()[:2] for line in lines[first + 1 : first + 4]] == [
        ["data", "2"], ["tp", "2"], ["pp", "2"],
    ]  # fmt: skip
    assert lines[first + 3].endswith("sends; bubble 20 %")
    assert "  mesh = init_device_mesh" in done.stdout
    assert any('mesh=mesh["dp"])' in line for line in lines)
    assert "--tp 2" in lines[-1]
    assert all(len(line) <= 80 for line in lines)


def test_json_has_the_same():
    done = onefold("plan", *GIVEN, "--tp", "2", "--pp", "4", "--accumulate", "4", "--json")
    told = json.loads(done.stdout)["best"]["composition"]
    assert {line["axis"] for line in told["axes"]} == {"data", "tp", "pp"}
    assert told["bubble_share"] == pytest.approx(3 / 7)
    assert [rank["micro_batches_in_flight"] for rank in told["pipeline"]] == [4, 3, 2, 1]
    assert sum(len(rank["blocks"]) for rank in told["pipeline"]) == 4


def test_bad_axes_end_the_command_with_2():
    for flags, said in (
        ((*GIVEN, "--tp", "3"), "axes that divide"),
        ((*GIVEN, "--pp", "x"), "--pp to be a whole number"),
        (("--inference", "--tp", "2"), "--tp without --inference"),
    ):
        done = onefold("plan", *flags)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert said in done.stderr
