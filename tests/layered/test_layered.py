"""Laws of `onefold.accumulate_layers`: all micro-batches pass through one unit before the next."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import layered as link
import pytest
import torch
import torch.distributed as dist
from hosts import refusal
from torch import Tensor, nn
from torch.nn import functional as F

import onefold
from onefold.engine.registry import engine_of
from onefold.layered.accumulate import Accumulation, accumulate_layers
from onefold.layered.orders import seeds_of
from onefold.planner.models.gpt import GPT, GPTConfig
from onefold.tier.disk import BlockFile
from tests.support.free_memory import has_free
from tests.support.models import VOCAB, WIDTH, Block, Model
from tests.support.ranks import every_rank, run_processes, run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn

LENGTHS = (6, 4, 9)
"""Tokens of the micro-batches: no two have the same shape."""


def next_token(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def microbatches(rank: int, step: int = 0, lengths: Any = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randint(0, VOCAB, (3, length), generator=generator) for length in lengths]


def sharded(build: Any = Model, **choices: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = seeded(build)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    return onefold.shard(module, optimizer, **choices), optimizer


def loop(module: nn.Module, batches: Any, loss: Any = next_token) -> Tensor:
    """The plain order."""
    total = torch.zeros(())
    for number, batch in enumerate(batches):
        is_last = number + 1 == len(batches)
        with nullcontext() if is_last else onefold.accumulate(module):
            output = module(**batch) if isinstance(batch, dict) else module(batch)
            part = loss(output, batch) / len(batches)
            part.backward()
        total = total + part.detach()
    return total


def whole(tensor: Any) -> Tensor:
    shown = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return shown.detach().clone()


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    named = module.named_parameters()
    return {name: None if p.grad is None else whole(p.grad) for name, p in named}


def assert_same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = other[name] is None if value is None else torch.equal(value, other[name])
        assert same, name


def train(
    run: Any, rank: int, build: Any = Model, steps: int = 3, batches: Any = microbatches,
    **choices: Any,
) -> tuple[list[Tensor], dict[str, Any], dict[str, Any], nn.Module]:  # fmt: skip
    """Losses, the last gradients, the weights after the last step, and the module."""
    module, optimizer = sharded(build, **choices)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(run(module, batches(rank, step)))
        found = gradients(module)
        optimizer.step()
    return losses, found, {n: whole(p) for n, p in module.named_parameters()}, module


def layers(module: nn.Module, batches: Any) -> Tensor:
    return onefold.accumulate_layers(module, batches, next_token)


def assert_same_runs(one: Any, other: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True)), "losses"
    assert_same(one[1], other[1])
    assert_same(one[2], other[2])


def notes(module: nn.Module) -> str:
    return " ".join(onefold.report(module).notes)


# bits


@again_but("3-None")
@worlds_in_turn
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@every_rank()
def test_layers_give_the_bits_of_a_loop_that_sums_micro_batches_before_ranks(
    rank, world_size, precision
):
    wanted = train(loop, rank, stage=1, precision=precision)
    for stage in range(4):
        found = train(layers, rank, stage=stage, precision=precision)
        assert_same_runs(found, wanted)
        assert "'layers' order" in notes(found[3])
    if world_size == 1 and precision is None:
        assert_same_runs(train(loop, rank, stage=3), wanted)


@again_but(
    "{'stage': 2, 'offload': 'optimizer', 'precision': 'bf16'}",
    "{'stage': 3, 'wire': Wire(weights='int8', gradients='exact', secondary=None, feedback=False)}",
)
@pytest.mark.parametrize(
    "choices",
    [
        {"stage": 3, "offload": "optimizer"},
        {"stage": 3, "offload": "cpu"},
        {"stage": 2, "offload": "optimizer", "precision": "bf16"},
        {"stage": 3, "wire": "zero++"},
        {"stage": 3, "wire": onefold.Wire(gradients="int8")},
        {"stage": 3, "wire": onefold.Wire(weights="int8")},
    ],
    ids=str,
)
@every_rank(2)
def test_layers_and_kept_weights_give_the_bits_of_the_loop_on_every_tier_and_wire(rank, choices):
    def keep(module: nn.Module, batches: Any) -> Tensor:
        return onefold.accumulate_layers(module, batches, next_token, order="keep")

    wanted = train(loop, rank, **choices | {"stage": 1, "offload": None})
    for run in (layers, keep):
        assert_same_runs(train(run, rank, **choices), wanted)


def test_layers_give_the_bits_of_the_loop_with_all_state_on_a_disk(tmp_path):
    offload = onefold.Offload(parameters="disk", optimizer="disk", disk=str(tmp_path))

    def body(rank: int) -> None:
        assert_same_runs(train(layers, rank, stage=3, offload=offload), train(loop, rank, stage=1))

    run_ranks(2, body)


@every_rank(2)
def test_weights_in_row_blocks_are_equal_up_to_rounding_and_no_costs_are_guessed(rank):
    wanted = train(loop, rank, steps=1, stage=1)
    found = train(layers, rank, steps=1, stage=3, offload=onefold.Offload("cpu", tile=600))
    assert torch.equal(found[0][0], wanted[0][0])
    for name, value in found[1].items():
        torch.testing.assert_close(value, wanted[1][name], rtol=1e-5, atol=1e-7)
    assert "'layers' order" in notes(found[3])
    assert "sends" not in notes(found[3])


def gpt(recomputes: bool = True) -> GPT:
    model = GPT(GPTConfig(num_layers=3, width=16, num_heads=2, lr=1e-3), max_seq=16)
    model.recomputes = recomputes
    return model


@every_rank(2)
def test_recompute_changes_no_bit_and_leaves_only_inputs_of_blocks_alive(rank):
    wanted = train(loop, rank, lambda: gpt(False), stage=1)
    for recomputes in (False, True):
        found = train(layers, rank, lambda r=recomputes: gpt(r), stage=3)
        assert_same_runs(found, wanted)
    borders = engine_of(found[3]).facts.about(Accumulation).border_nbytes
    assert borders == 4 * 3 * sum(LENGTHS) * 16 * 4, "4 borders of [rows, tokens, width] fp32"


@every_rank(2)
def test_a_tied_head_is_equal_up_to_rounding_and_gathered_no_more_than_in_a_plain_step(rank):
    def build() -> nn.Module:
        return Model(tied=True)

    def one(module: nn.Module, batches: Any) -> Tensor:
        return loop(module, batches[:1])

    plain = onefold.report(train(one, rank, build, steps=1, stage=3)[3]).traffic
    wanted = train(loop, rank, build, steps=1, stage=1)
    found = train(layers, rank, build, steps=1, stage=3)
    assert torch.equal(found[0][0], wanted[0][0])
    for name, value in found[1].items():
        torch.testing.assert_close(value, wanted[1][name], rtol=1e-5, atol=1e-7)
    module = found[3]
    traffic = onefold.report(module).traffic
    assert traffic["gather"].calls <= plain["gather"].calls
    assert traffic["reduce_scatter"].calls == len(engine_of(module).units)


@every_rank(2)
def test_an_order_with_one_micro_batch_is_a_plain_step(rank):
    def one(rank: int, step: int) -> list[Tensor]:
        return microbatches(rank, step)[:1]

    wanted = train(loop, rank, batches=one, stage=3)
    for order in ("layers", "keep", "plain"):

        def run(module: nn.Module, batches: Any, order: Any = order) -> Tensor:
            return accumulate_layers(module, batches, next_token, order=order)

        assert_same_runs(train(run, rank, batches=one, stage=3), wanted)


class Dropping(Model):
    """Drops elements in the stem, between blocks and in the head."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.embed(tokens), 0.2)
        for block in self.blocks:
            x = F.dropout(torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False), 0.2)
        return self.head(F.dropout(self.norm(x), 0.2))


def test_dropout_is_that_of_a_loop_that_seeds_each_micro_batch():
    module, other = sharded(Dropping, stage=3)[0], sharded(Dropping, stage=3)[0]
    batches = microbatches(0)
    torch.manual_seed(7)
    found, after = layers(module, batches), torch.rand(1)
    torch.manual_seed(7)
    plain = accumulate_layers(other, batches, next_token, order="plain")
    assert torch.equal(found, plain)
    assert torch.equal(after, torch.rand(1))
    assert_same(gradients(module), gradients(other))
    other.zero_grad()
    torch.manual_seed(7)
    seeds = seeds_of(len(batches))
    total = torch.zeros(())
    for number, batch in enumerate(batches):
        if number:
            torch.manual_seed(seeds[number - 1])
        part = next_token(other(batch), batch) / len(batches)
        part.backward()
        total += part.detach()
    assert torch.equal(total, found)
    assert_same(gradients(module), gradients(other))
    module, other = sharded()[0], sharded()[0]
    torch.manual_seed(7)
    layers(module, batches)
    loop(other, batches)
    wanted = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(wanted, torch.rand(1)), "a module without dropout leaves the generator"


# bytes


@again_but("3")
@pytest.mark.parametrize("world_size", [2, 3])
@every_rank()
def test_stage_3_sends_two_gathers_and_one_reduction_of_a_unit_whatever_their_number(
    rank, world_size
):
    def sent(number: int, run: Any) -> dict[str, tuple[int, int]]:
        def batches(rank: int, step: int) -> list[Tensor]:
            return microbatches(rank, step, (4,) * number)

        module = train(run, rank, batches=batches, stage=3)[3]
        report = onefold.report(module)
        return {name: (t.calls, t.sent_nbytes) for name, t in report.last_step.items()}

    units = len(engine_of(sharded(stage=3)[0]).units)
    plain, found = sent(1, loop), sent(8, layers)
    assert sent(1, layers) == found
    assert found["reduce_scatter"] == plain["reduce_scatter"]
    assert found["gather"][0] == 2 * units - 1, "the head goes backward at once"
    total = torch.tensor(sum(found[name][1] for name in ("gather", "reduce_scatter")))
    dist.all_reduce(total)
    psi = sum(p.nbytes for p in seeded(Model).parameters()) * (world_size - 1)
    head = sum(p.nbytes for p in seeded(Model).head.parameters()) * (world_size - 1)
    assert total == pytest.approx(3 * psi - head, rel=0.05), "besides flags and padding"


@pytest.mark.again(
    "tests/layered/test_layered.py::test_stage_3_sends_two_gathers_and_one_reduction_of_a_unit_whatever_their_number"
)
@pytest.mark.process
@pytest.mark.skipif(refusal() is not None, reason=str(refusal()))
def test_the_interface_of_a_host_sends_three_times_its_part_of_the_weights():
    options = link.parser().parse_args(["--model", "tiny", "--steps", "1", "--rate", "1gbit"])
    found = link.over_a_link("onefold layers", options)
    own = found["weight_nbytes"] / 2
    assert 2.9 * own < found["ledger_nbytes"] < 3.0 * own
    assert found["interface_nbytes"] == pytest.approx(found["ledger_nbytes"], rel=0.05)


@again_but("3-keep")
@worlds_in_turn
@pytest.mark.parametrize("order", ["layers", "keep"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_memory_is_within_5_percent_of_the_plan_in_each_kind_and_together(world_size, order):
    def build() -> GPT:
        model = GPT(GPTConfig(num_layers=6, width=96, num_heads=4, lr=1e-3), max_seq=32)
        model.recomputes = True
        return model

    def run(module: nn.Module, batches: Any) -> Tensor:
        return accumulate_layers(module, batches, next_token, order=order)

    def body(rank: int, **choices: Any) -> None:
        def eight(rank: int, step: int) -> list[Tensor]:
            return microbatches(rank, step, (8,) * 8)

        module = train(run, rank, build, batches=eight, **choices)[3]
        assert onefold.report(module).differing() == {}

    rows = {2: ({"stage": 2}, {"stage": 3}), 3: ({"stage": 0}, {"stage": 3, "offload": "cpu"})}
    for choices in rows[world_size]:
        run_ranks(world_size, lambda rank, choices=choices: body(rank, **choices))


@every_rank(2)
def test_kept_weights_and_gradients_send_one_gather_and_one_reduction(rank):
    def keep(module: nn.Module, batches: Any) -> Tensor:
        return accumulate_layers(module, batches, next_token, order="keep")

    module = train(keep, rank, stage=3)[3]
    traffic, units = onefold.report(module).traffic, len(engine_of(module).units)
    assert traffic["gather"].calls == traffic["reduce_scatter"].calls == 3 * units
    assert onefold.report(module).memory["unsharded"]["device"].now == 0


def test_layers_read_each_weight_from_disk_twice_a_step(tmp_path, monkeypatch):
    counted: dict[str, int] = {"nbytes": 0}
    read = BlockFile.read_block

    def counting(self: Any, offset: int, into: Any) -> None:
        counted["nbytes"] += len(into)
        read(self, offset, into)

    monkeypatch.setattr(BlockFile, "read_block", counting)

    def nbytes(number: int, run: Any) -> int:
        offload = onefold.Offload(parameters="disk", disk=str(tmp_path))
        module = sharded(stage=3, offload=offload)[0]
        counted["nbytes"] = 0
        run(module, microbatches(0, lengths=(4,) * number))
        return counted["nbytes"]

    once = nbytes(1, loop)
    assert once > 0
    assert nbytes(8, loop) > 7 * once
    assert 0.9 * once < nbytes(8, layers) <= once, "forward and backward; the head once"


# chains, and models that are none


def sequential() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(nn.Linear(8, WIDTH), *layers, nn.Linear(WIDTH, 4))


class Branching(nn.Module):
    """Blocks whose outputs skip others, and an encoder that all decoder blocks read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.downs = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.ups = nn.ModuleList(Crossing() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x, skipped = self.embed(x), []
        for down in self.downs:
            x = down(x)
            skipped.append(x)
        encoded = self.norm(x)
        for up in self.ups:
            x = up(x + skipped.pop(), encoded=encoded)
        return x


class Crossing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, *, encoded: Tensor) -> Tensor:
        return self.block(x) * encoded


class Skipping(Model):
    """The head reads what the stem has made: that crosses all blocks in no argument of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.BatchNorm1d(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.counts(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) + first)


def rows(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(number, 8, generator=generator) for number in (2, 3, 4)]


def square(output: Tensor, _: Any) -> Tensor:
    return output.square().mean()


@again_but("Branching")
@pytest.mark.parametrize("build", [sequential, Branching])
@every_rank(2)
def test_sequences_and_branches_between_blocks_run_in_layers(rank, build):
    def run(module: nn.Module, batches: Any) -> Tensor:
        return accumulate_layers(module, batches, square)

    wanted = train(
        lambda m, b: loop(m, b, square), rank, build, batches=rows, stage=1
    )  # fmt: skip
    found = train(run, rank, build, batches=rows, stage=3)
    assert_same_runs(found, wanted)
    assert "'layers' order" in notes(found[3])


@every_rank(2)
def test_a_skip_connection_around_the_blocks_is_named_and_runs_in_the_plain_order(rank):
    wanted = train(loop, rank, Skipping, stage=3)
    found = train(layers, rank, Skipping, stage=3)
    assert_same_runs(found, wanted)
    module: Any = found[3]
    assert "'plain' order" in notes(module)
    assert "skip connection" in notes(module)
    assert module.counts.num_batches_tracked == 3 * len(LENGTHS), "buffers saw each batch once"


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: nn.Linear(8, 3), "no list of repeated blocks"),
        (lambda: Reentrant(), "use_reentrant=True"),
        (lambda: InPlace(), "the part after layers.0 changes its input in place"),
        (lambda: Wandering(), "micro-batch 0 is before"),
    ],
    ids=["no blocks", "reentrant", "in place", "paths"],
)  # fmt: skip
def test_a_module_that_cannot_be_cut_says_why_and_runs_in_the_plain_order(build, why):
    def run(module: nn.Module, batches: Any) -> Tensor:
        return accumulate_layers(module, batches, square)

    wanted = train(lambda m, b: loop(m, b, square), 0, build, batches=rows, stage=3)
    found = train(run, 0, build, batches=rows, stage=3)
    assert_same_runs(found, wanted)
    assert why in notes(found[3])


class Wandering(nn.Module):
    """Some micro-batches skip a block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers if len(x) < 4 else self.layers[:2]:
            x = self.run(layer, x)
        return x

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x).tanh()


class InPlace(Wandering):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu_()
        return x


class Reentrant(Wandering):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x.requires_grad_(), use_reentrant=True)
        return x


# inputs, losses, failures


def test_a_micro_batch_of_one_rank_alone_that_calls_other_blocks_is_a_named_error():
    def some(rank: int, step: int) -> list[Tensor]:
        return rows(rank, step) if rank == 1 and step == 1 else [torch.ones(2, 8)] * 3

    def body(rank: int) -> None:
        with pytest.raises(onefold.WireError, match="all ranks in the same collective"):
            train(
                lambda m, b: accumulate_layers(m, b, square), rank, Wandering, batches=some, stage=3
            )  # fmt: skip

    run_processes(2, body)


@every_rank(3)
def test_ranks_may_have_different_numbers_of_micro_batches(rank):
    def some(rank: int, step: int) -> list[Tensor]:
        return microbatches(rank, step, (5,) * (1 + 2 * rank))

    found = train(layers, rank, batches=some, stage=3)
    assert_same_runs(found, train(loop, rank, batches=some, stage=1))
    units = len(engine_of(found[3]).units)
    assert onefold.report(found[3]).traffic["gather"].calls == 3 * (2 * units - 1)


class WithLoss(Model):
    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        logits = super().forward(tokens)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def test_a_module_gets_the_entries_of_a_micro_batch_that_its_forward_takes():
    x = microbatches(0)[0]
    whole_batch: list[Any] = []

    def loss(output: Any, batch: Any) -> Tensor:
        whole_batch.append(batch)
        return output["loss"] if isinstance(output, dict) else next_token(output, batch[1])

    wanted = layers(sharded()[0], [x, x])
    assert torch.equal(accumulate_layers(sharded()[0], [(x, x)] * 2, loss), wanted)
    assert len(whole_batch[0]) == 2
    module = sharded(WithLoss)[0]
    pairs = accumulate_layers(module, [(x, x)] * 2)
    assert torch.equal(accumulate_layers(module, [{"tokens": x, "labels": x, "id": 3}] * 2), pairs)


def test_bad_calls_are_named_errors_and_leave_the_module_as_it_was():
    module = sharded(stage=3)[0]
    batches = microbatches(0)
    with pytest.raises(onefold.ConfigError, match="at least one micro-batch"):
        accumulate_layers(module, [])
    with pytest.raises(onefold.ConfigError, match='order to be "auto"'):
        accumulate_layers(module, batches, next_token, order="sideways")  # type: ignore[arg-type]
    with pytest.raises(onefold.ConfigError, match="one number with a graph"):
        accumulate_layers(module, batches)
    with pytest.raises(onefold.StateError, match="with gradients"), torch.no_grad():
        layers(module, batches)
    with pytest.raises(onefold.StateError, match=r"onefold\.shard"):
        layers(Model(), batches)
    assert_same(gradients(module), dict.fromkeys(gradients(module)))
    found, wanted = layers(module, batches), loop(sharded(stage=3)[0], batches)
    assert torch.equal(found, wanted)


@again_but("embed-layers", "blocks.2.up-keep", "head-keep", "loss-layers", "backward-keep")
@pytest.mark.parametrize("order", ["layers", "keep"])
@pytest.mark.parametrize("where", ["embed", "blocks.2.up", "head", "loss", "backward"])
@every_rank(2)
def test_a_micro_batch_that_fails_ends_all_others_and_the_next_step_is_right(rank, where, order):
    module, optimizer = sharded(stage=3)
    wanted = train(layers, rank, steps=1, stage=3)
    calls = []

    def fail(*_: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("a bad micro-batch")

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            fail()
            return gradient

    def loss(logits: Tensor, tokens: Tensor) -> Tensor:
        if where == "loss":
            fail()
        return next_token(Failing.apply(logits) if where == "backward" else logits, tokens)

    handle = None
    if where not in ("loss", "backward"):
        handle = module.get_submodule(where).register_forward_hook(fail)
    with pytest.raises(KeyError, match="a bad micro-batch"):
        accumulate_layers(module, microbatches(rank), loss, order=order)
    if handle is not None:
        handle.remove()
    assert onefold.report(module).memory["unsharded"]["device"].now == 0
    assert engine_of(module).schedule.forward_depth == 0
    optimizer.zero_grad()
    assert torch.equal(layers(module, microbatches(rank)), wanted[0][0])
    assert_same(gradients(module), wanted[1])


# choice


def test_the_pick_keeps_weights_where_they_fit_and_says_what_the_others_cost(monkeypatch):
    free = {"nbytes": 1 << 40}
    has_free(monkeypatch, lambda: 2 * free["nbytes"])

    def auto_order(module: nn.Module, batches: Any) -> Tensor:
        return accumulate_layers(module, batches, next_token, order="auto")

    def body(rank: int, order: str) -> None:
        wanted = train(loop, rank, stage=1)
        found = train(auto_order, rank, stage=3)
        if order != "plain":
            assert_same_runs(found, wanted)
        line = notes(found[3])
        assert f"{order!r} order, 3 micro-batches" in line
        for other in ("plain", "keep", "layers"):
            assert f"{other!r} sends" in line

    for nbytes, order in ((1 << 40, "keep"), (40_000, "layers"), (100, "plain")):
        free["nbytes"] = nbytes
        run_ranks(2, body, order)


def test_the_pick_for_a_model_that_is_no_chain_keeps_as_many_units_as_fit(monkeypatch):
    has_free(monkeypatch, 2 * 62_000)

    def run(module: nn.Module, batches: Any) -> Tensor:
        return accumulate_layers(module, batches, next_token, order="auto")

    def body(rank: int) -> None:
        wanted = train(loop, rank, Skipping, stage=3, steps=2)
        found = train(run, rank, Skipping, stage=3, steps=2)
        for name, value in found[1].items():
            torch.testing.assert_close(value, wanted[1][name], rtol=1e-3, atol=1e-5)
        assert "no sequence of blocks: a skip connection" in notes(found[3])
        assert re.search("[1-4] of 5 units kept", notes(found[3])), notes(found[3])
        assert "'layers' sends" not in notes(found[3])
        kept, plain = (onefold.report(each[3]).last_step for each in (found, wanted))
        assert kept["gather"].calls < plain["gather"].calls
        assert kept["reduce_scatter"].calls < plain["reduce_scatter"].calls
        assert onefold.report(found[3]).memory["unsharded"]["device"].now == 0

    run_ranks(2, body)


def test_stages_that_gather_once_a_step_run_the_loop():
    def run(module: nn.Module, batches: Any) -> Tensor:
        return accumulate_layers(module, batches, next_token, order="auto")

    module = train(run, 0, stage=2)[3]
    assert "'plain' order" in notes(module)
