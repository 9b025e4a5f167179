"""Tensor parallel first, the data axis last: the local piece of a DTensor is cut once more.

Everything is compared with one plain process that has the whole model and all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

import onefold
from onefold.engine.pipelined import Pipeline
from onefold.engine.registry import engine_of
from onefold.wire.collectives import Group
from tests.support.models import VOCAB, Model
from tests.support.ranks import every_rank, run_ranks, seeded

ROWS, LENGTH = 2, 12  # of one data rank
Named = dict[str, Tensor]


def plan(**others: ParallelStyle) -> dict[str, ParallelStyle]:
    """Sequence parallel between the blocks, tensor parallel inside; 33 and 50 divide by no axis."""
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        **others,
    }


def rows(step: int, dp: int) -> Tensor:
    """The tokens of one step: [data ranks, ROWS, LENGTH]."""
    made = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCAB, (dp, ROWS, LENGTH), generator=made)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def weights_of(model: nn.Module) -> Named:
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def grads_of(model: nn.Module) -> Named:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def made(tied: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    return seeded(Model, 1, tied).to(dtype)


class Run:
    """A model, its optimizer and its mesh on one rank, sharded over dp after tp has cut it."""

    def __init__(
        self, dp: int, tp: int, *, dtype: torch.dtype = torch.float32, tied: bool = False,
        **choices: Any,
    ) -> None:  # fmt: skip
        self.mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        self.dp, self.rank = dp, self.mesh["dp"].get_local_rank()
        self.model = made(tied, dtype)
        if tp > 1:
            parallelize_module(self.model, self.mesh["tp"], plan())
            if tied:  # each style has made a DTensor of its own
                self.model.head.weight = self.model.embed.weight
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        onefold.shard(self.model, self.optimizer, mesh=self.mesh["dp"], **choices)

    def backward(self, step: int) -> None:
        loss_of(self.model, rows(step, self.dp)[self.rank]).backward()

    def train(
        self, steps: int, clip: Callable[[nn.Module], object] = lambda _: None
    ) -> list[Named]:
        grads = []
        for step in range(steps):
            self.backward(step)
            grads.append(grads_of(self.model))
            clip(self.model)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return grads


def one_process(
    dp: int, steps: int, dtype: torch.dtype, *, tied: bool = False,
    clip: Callable[[nn.Module], object] = lambda _: None,
) -> tuple[list[Named], Named]:  # fmt: skip
    model = made(tied, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    grads = []
    for step in range(steps):
        loss_of(model, rows(step, dp).flatten(0, 1)).backward()
        grads.append(grads_of(model))
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
    return grads, weights_of(model)


def check_close(found: Named, wanted: Named, limit: float) -> None:
    """Compare the values of all names as one vector, relative to its norm."""
    assert found.keys() == wanted.keys()
    error = math.sqrt(sum(float((found[n] - wanted[n]).norm()) ** 2 for n in wanted))
    size = math.sqrt(sum(float(value.norm()) ** 2 for value in wanted.values()))
    assert error <= limit * size, f"differs by {error / size:.1e}"


def check_equal(found: Named, wanted: Named) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def trained(rank: int, dp: int, tp: int, steps: int, choices: dict[str, Any]) -> Any:
    run = Run(dp, tp, **choices)
    return run.train(steps), weights_of(run.model)


@pytest.mark.parametrize(("dp", "tp"), [(2, 2)])
def test_gradients_and_weights_are_those_of_one_process_and_bitwise_those_of_other_stages(dp, tp):
    wanted, end = one_process(dp, 2, torch.float64)
    first = None
    for stage in range(4):
        choices = {"stage": stage, "dtype": torch.float64}
        for grads, weights in run_ranks(dp * tp, trained, dp, tp, 2, choices):
            for found, each in zip(grads, wanted, strict=True):
                check_close(found, each, 1e-12)
            check_close(weights, end, 1e-12)
            first = first or (grads, weights)
            check_equal(weights, first[1])
            for found, each in zip(grads, first[0], strict=True):
                check_equal(found, each)
        doubled = {name: grad / 2 for name, grad in first[0][0].items()}
        with pytest.raises(AssertionError, match="differs"):
            check_close(doubled, wanted[0], 1e-12)


def _with_loss_parallel(rank: int) -> Named:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = made(dtype=torch.float64)
    cut = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh["tp"], plan(head=cut))
    onefold.shard(model, mesh=mesh["dp"])
    loss_of(model, rows(0, 2)[mesh["dp"].get_local_rank()]).backward()
    return grads_of(model)


def test_the_loss_may_be_computed_on_cut_logits():
    (wanted, *_), _ = one_process(2, 1, torch.float64)
    with loss_parallel():  # of the process: ranks are its threads
        found = run_ranks(4, _with_loss_parallel)
    for grads in found:
        check_close(grads, wanted, 1e-12)


def test_other_tiers_have_the_same_bits_and_quantized_wires_are_near(tmp_path):
    near = run_ranks(4, trained, 2, 2, 3, {"stage": 3})[0][1]
    for offload in ("cpu", f"disk:{tmp_path}", onefold.Offload(tile=64)):
        for _, weights in run_ranks(4, trained, 2, 2, 3, {"stage": 3, "offload": offload}):
            check_equal(weights, near)
    for choices, limit in (({"wire": "zero++"}, 0.05), ({"precision": "bf16"}, 0.02)):
        for _, weights in run_ranks(4, trained, 2, 2, 3, {"stage": 3, **choices}):
            check_close(weights, near, limit)


# clipping


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_both_ways_to_clip_have_the_norm_of_one_process(order):
    norms: list[float] = []

    def reference(model: nn.Module) -> None:
        found = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, order)
        norms.append(float(found))

    _, end = one_process(2, 2, torch.float64, clip=reference)

    def clipped(rank: int, stage: int, is_own: bool) -> tuple[list[float], Named]:
        run, found = Run(2, 2, stage=stage, dtype=torch.float64), list[float]()

        def clip(model: nn.Module) -> None:
            norm = (
                onefold.clip_grad_norm_(model, 0.1, order)
                if is_own
                else torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, order)
            )
            found.append(float(norm))

        run.train(2, clip)
        return found, weights_of(run.model)

    for stage, is_own in ((0, True), (3, True), (3, False)):
        for found, weights in run_ranks(4, clipped, stage, is_own):
            assert found == pytest.approx(norms, rel=1e-12)
            check_close(weights, end, 1e-12)


def _clip_two_meshes(rank: int, group_axis: str | None) -> tuple[float, float, Named, Named]:
    """One model cut by tp and dp, and one by all ranks alone; or one for each rank of an axis."""
    run = Run(2, 2, dtype=torch.float64)
    run.backward(0)
    if group_axis is not None:  # as pipeline ranks hold other parameters
        axis = Group.from_handle(run.mesh[group_axis].get_group())
        engine_of(run.model).join_pipeline(Pipeline(axis, 1))
        found = onefold.clip_grad_norm_(run.model.parameters(), 0.1)
        return float(found), 0.0, grads_of(run.model), {}
    other = seeded(nn.Linear, 5, 3).to(torch.float64)
    onefold.shard(other)
    other(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    found = onefold.clip_grad_norm_([run.model, other], 0.1)
    grads = grads_of(run.model), grads_of(other)
    again = onefold.clip_grad_norm_([run.model, other], 0.1)
    return float(found), float(again), *grads


def test_gradients_on_several_meshes_are_clipped_by_one_norm():
    (grads, *_), _ = one_process(2, 1, torch.float64)
    other = seeded(nn.Linear, 5, 3).to(torch.float64)
    other(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    squares = sum(float(each.norm()) ** 2 for each in grads.values())
    more = sum(float(each.norm()) ** 2 for each in grads_of(other).values())
    norm = math.sqrt(squares + more)
    for found, again, ours, theirs in run_ranks(4, _clip_two_meshes, None):
        assert found == pytest.approx(norm, rel=1e-12)
        assert again == pytest.approx(0.1, rel=1e-4)
        check_close(ours, {n: g * 0.1 / (norm + 1e-6) for n, g in grads.items()}, 1e-12)
        check_close(theirs, {n: g * 0.1 / (norm + 1e-6) for n, g in grads_of(other).items()}, 1e-12)
    for found, *_ in run_ranks(4, _clip_two_meshes, "tp"):
        assert found == pytest.approx(math.sqrt(2 * squares), rel=1e-12)


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all():
    def body(rank: int) -> bool:
        run = Run(2, 2)
        scaler = onefold.GradScaler("cpu", init_scale=4.0)
        before = weights_of(run.model)
        scaler.scale(loss_of(run.model, rows(0, 2)[run.rank])).backward()
        if rank == 3:
            run.model.blocks[0].up.weight.grad._local_tensor.fill_(math.inf)
        scaler.step(run.optimizer)
        scaler.update()
        check_equal(weights_of(run.model), before)
        return scaler.get_scale() == 2.0

    assert all(run_ranks(4, body))


# the face


@every_rank(4)
def test_faces_have_the_global_shape_and_edits_reach_the_shards(rank, tmp_path):
    run = Run(2, 2)
    model, wanted = run.model, weights_of(made())
    assert [tuple(p.shape) for p in model.parameters()] == [
        tuple(value.shape) for value in wanted.values()
    ]
    face = model.blocks[0].down.weight
    assert face.device_mesh.mesh_dim_names == ("tp", "fsdp")
    assert face.placements == (Shard(1), Shard(0))
    check_equal(weights_of(model), wanted)
    state = onefold.full_state_dict(model)
    assert state.keys() == (wanted.keys() if rank == 0 else set())
    check_equal(state, wanted if rank == 0 else {})
    with onefold.unsharded(model, writeback=True):
        inside = model.blocks[0].down.weight
        assert inside.placements == (Shard(1),)
        assert torch.equal(inside.full_tensor(), wanted["blocks.0.down.weight"])
        loss_of(model, rows(0, 2)[run.rank])
        with torch.no_grad():
            inside.mul_(2)
    wanted["blocks.0.down.weight"] *= 2
    check_equal(weights_of(model), wanted)
    average = onefold.ema(model, decay=0.5)
    run.train(1)
    average.update()
    with average.applied():
        found = weights_of(model)
    check_close(found, weights_of(model), 0.1)
    # other libraries' checkpoints
    saved = {name: value.detach().clone() for name, value in model.state_dict().items()}
    trained_to = weights_of(model)
    dcp.save(saved, checkpoint_id=tmp_path / "dcp")
    model.load_state_dict(wanted)
    check_equal(weights_of(model), wanted)
    into = model.state_dict()
    dcp.load(into, checkpoint_id=tmp_path / "dcp")
    model.load_state_dict(into)
    check_equal(weights_of(model), trained_to)


def _read_stale(rank: int) -> list[str]:
    run, kept, messages = Run(2, 2), list[Any](), list[str]()
    run.model.blocks[0].up.register_forward_pre_hook(lambda up, _: kept.append(up.weight))
    with torch.no_grad():
        run.model(rows(0, 1)[0])
    for use in ("sum", "to_local", "full_tensor"):
        with pytest.raises(onefold.StateError, match=r"blocks\.0\.up\.weight") as caught:
            getattr(kept[0], use)()
        messages.append(str(caught.value))
    return messages


def test_a_dtensor_that_modules_computed_with_is_stale_afterwards():
    assert all(len(messages) == 3 for messages in run_ranks(4, _read_stale))


class TwoAxes(nn.Module):
    """A weight that two model axes have cut; each rank computes with all of it."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(7, 5, bias=False, dtype=torch.float64)])
        if mesh is not None:
            whole_weight, placements = self.inner[0].weight.detach(), [Shard(0), Shard(1)]
            weight = distribute_tensor(whole_weight, mesh, placements, src_data_rank=None)
            self.inner[0].weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner[0].weight
        return x @ (weight.full_tensor() if isinstance(weight, DTensor) else weight).T


def test_a_weight_may_be_cut_by_two_model_axes_and_the_data_axis(tmp_path):
    x = torch.arange(14, dtype=torch.float64).view(2, 7)
    plain = seeded(TwoAxes, None)
    plain(x).square().mean().backward()

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "one", "two"))
        model = seeded(TwoAxes, mesh["one", "two"])
        onefold.shard(model, mesh=mesh["dp"], stage=3)
        own = mesh["dp"].get_local_rank()
        model(x[own : own + 1]).square().mean().backward()
        weight = model.inner[0].weight
        assert weight.device_mesh.shape == (2, 2, 2)
        assert torch.equal(weight.full_tensor(), plain.inner[0].weight)
        check_close(grads_of(model), grads_of(plain), 1e-12)
        onefold.save(tmp_path / "saved", model)
        with torch.no_grad():
            weight.zero_()
        onefold.load(tmp_path / "saved", model)
        assert torch.equal(weight.full_tensor(), plain.inner[0].weight)

    run_ranks(8, body)


# checkpoints


def _states(run: Run) -> Named:
    found = {f"weight {name}": value for name, value in weights_of(run.model).items()}
    for name, parameter in run.model.named_parameters():
        for key, value in run.optimizer.state[parameter].items():
            found[f"{key} {name}"] = whole(torch.as_tensor(value))
    return found


def _saved(rank: int, dp: int, tp: int, stage: int, folder: Any) -> Named:
    run = Run(dp, tp, stage=stage)
    run.train(2)
    onefold.save(folder, run.model, run.optimizer, extra=2)
    onefold.save_pretrained(run.model, f"{folder}-plain")
    return _states(run)


def _loaded(rank: int, dp: int, tp: int, stage: int, folder: Any) -> Named:
    run = Run(dp, tp, stage=stage)
    assert onefold.load(folder, run.model, run.optimizer) == 2
    found = _states(run)
    onefold.load_pretrained(run.model, f"{folder}-plain")
    for name, value in weights_of(run.model).items():
        assert torch.equal(found[f"weight {name}"], value), name
    run.train(1)
    return found


def test_checkpoints_move_between_all_splits_bit_for_bit(tmp_path):
    splits = [(2, 2, 3), (1, 4, 2), (1, 1, 1)]
    for number, (dp, tp, stage) in enumerate(splits):
        wanted, *others = run_ranks(dp * tp, _saved, dp, tp, stage, tmp_path / str(number))
        for other in others:
            check_equal(other, wanted)
        for to in (1, 2):  # and from the other side: each split meets every other one
            dp2, tp2, stage2 = splits[(number + to) % len(splits)]
            folder = tmp_path / str(number)
            for found in run_ranks(dp2 * tp2, _loaded, dp2, tp2, stage2, folder):
                check_equal(found, wanted)


def test_a_run_goes_on_from_a_checkpoint_between_micro_batches(tmp_path):
    def body(rank: int, stage: int) -> None:
        run = Run(2, 2, stage=stage, dtype=torch.float64)
        tokens, folder = rows(0, 2)[run.rank], tmp_path / str(stage)
        with onefold.accumulate(run.model):
            (loss_of(run.model, tokens[:1]) / 2).backward()
        onefold.save(folder, run.model, run.optimizer)
        other = Run(2, 2, stage=stage, dtype=torch.float64)
        onefold.load(folder, other.model, other.optimizer)
        (loss_of(other.model, tokens[1:]) / 2).backward()
        check_close(grads_of(other.model), wanted, 1e-12)

    (wanted, *_), _ = one_process(2, 1, torch.float64)
    for stage in (2, 3):
        run_ranks(4, body, stage)


def test_a_module_on_meta_is_cut_and_reads_its_own_boxes(tmp_path):
    source = made()
    onefold.shard(source)
    onefold.save_pretrained(source, tmp_path / "plain")

    def body(rank: int, loads: bool) -> Named:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with torch.device("meta"):
            model = Model(1)
        parallelize_module(model, mesh["tp"], plan())
        if loads:
            onefold.load_pretrained(model, tmp_path / "plain")
        onefold.shard(model, mesh=mesh["dp"])
        loss_of(model, rows(0, 2)[0]).backward()
        return weights_of(model)

    for found in run_ranks(4, body, True):
        check_equal(found, weights_of(made()))
    with pytest.raises(onefold.ConfigError, match=r"(?s)'embed.weight'.*load_pretrained"):
        run_ranks(4, body, False)


# bad input


def _caught(rank: int, act: Callable[[int, DeviceMesh], object]) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(onefold.OnefoldError) as caught:
        act(rank, mesh)
    return str(caught.value)


def _cut(mesh: DeviceMesh, styles: dict[str, ParallelStyle], **options: Any) -> nn.Module:
    return parallelize_module(made(), mesh["tp"], styles, **options)


def _some(name: str) -> dict[str, ParallelStyle]:
    return {key: style for key, style in plan().items() if key != name}


def _differ(rank: int, mesh: DeviceMesh, axis: str) -> None:
    other = RowwiseParallel(output_layouts=Shard(1))
    styles = plan(**{"blocks.*.up": other}) if mesh[axis].get_local_rank() else plan()
    onefold.shard(_cut(mesh, styles, src_data_rank=None), mesh=mesh["dp"])


def _cut_afterwards(rank: int, mesh: DeviceMesh) -> None:
    model = onefold.shard(made(), mesh=mesh["dp"], stage=rank // 4)
    parallelize_module(model, mesh["tp"], plan())


def _step_matrices(rank: int, mesh: DeviceMesh) -> None:
    model = _cut(mesh, plan())
    matrices = [p for p in model.parameters() if p.dim() == 2]
    onefold.shard(model, torch.optim.Muon(matrices), mesh=mesh["dp"])


BAD: dict[str, tuple[Callable[[int, DeviceMesh], object], str]] = {
    "a plain parameter is left": (
        lambda _, mesh: onefold.shard(_cut(mesh, _some("norm")), mesh=mesh["dp"]),
        "'norm.weight' to be a DTensor",
    ),
    "a name of the plan is no module": (
        lambda _, mesh: onefold.shard(
            _cut(mesh, {**_some("head"), "haed": ColwiseParallel()}), mesh=mesh["dp"]
        ),
        "'head.weight' to be a DTensor",
    ),
    "the data axis is the world": (
        lambda _, mesh: onefold.shard(_cut(mesh, plan())), 'mesh=mesh["dp"]'
    ),
    "the data axis is the model axis": (
        lambda _, mesh: onefold.shard(_cut(mesh, plan()), mesh=mesh["tp"]), 'mesh=mesh["dp"]'
    ),
    "tensor parallel comes last": (_cut_afterwards, "parallelize_module before onefold.shard"),
    "plans differ by data rank": (
        lambda rank, mesh: _differ(rank, mesh, "dp"), "blocks.0.up.weight [33, 16] as"
    ),
    "plans differ by tensor rank": (
        lambda rank, mesh: _differ(rank, mesh, "tp"), "blocks.0.up.weight [33, 16] as"
    ),
    "one rank has another stage": (
        lambda rank, mesh: onefold.shard(
            _cut(mesh, plan()), mesh=mesh["dp"], stage=2 if rank == 3 else 3
        ),
        "'stage=",
    ),
    "one rank has a wrong argument": (
        lambda rank, mesh: onefold.shard(
            _cut(mesh, plan()), "adam" if rank == 2 else None, mesh=mesh["dp"]  # type: ignore[arg-type]
        ),
        "optimizer to be a torch.optim.Optimizer",
    ),
    "an optimizer wants whole matrices": (_step_matrices, "Muon, which steps whole matrices"),
    "a streamed model": (
        lambda _, mesh: onefold.stream(_cut(mesh, plan()), mesh=mesh["dp"]), "onefold.stream"
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Parallelize plan key")  # torch warns, and leaves it plain
@pytest.mark.parametrize("what", BAD)
def test_each_bad_input_is_an_error_on_every_rank(what):
    act, message = BAD[what]
    for found in run_ranks(4, _caught, act):
        assert message in found


def test_a_norm_below_zero_is_refused():
    with pytest.raises(onefold.ConfigError, match="norm_type above 0"):
        onefold.clip_grad_norm_(nn.Linear(2, 2), 1.0, -1.0)
