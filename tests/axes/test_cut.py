"""Cuts end to end: stacked experts by another dimension, and ranks with unequal shares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import onefold
from onefold import ConfigError
from onefold.app.train.memory_table import measure
from onefold.checkpoint.offline import export
from onefold.engine.registry import engine_of
from onefold.layout.cut import cut_of
from tests.support.planned import is_equal
from tests.support.ranks import every_rank, run_processes, run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn
from tests.support.training import Job, assert_close, assert_same_bits, run_job, train_plain

NUM_EXPERTS, HIDDEN, WIDTH, NUM_CLASSES = 8, 48, 24, 7
WORLD = 3
WEIGHTS = [(1, 3), (1, 0, 2), (2, 1, 1)]
BALANCED = {"experts.up": 1, "experts.down": 1, "gate.weight": 0}
"""The dimension by which 3 ranks cut each matrix that is large enough."""


class Experts(nn.Module):
    """Experts in two stacked tensors, of which the first is also used as a flat view."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(NUM_EXPERTS, HIDDEN, WIDTH))
        self.down = nn.Parameter(torch.empty(NUM_EXPERTS, WIDTH, HIDDEN))
        self.scale = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up, std=0.1)
        nn.init.normal_(self.down, std=0.1)
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        hidden = torch.einsum("td,ehd->teh", x, self.up).relu()
        y = torch.einsum("teh,edh->ted", hidden, self.down)
        flat = self.up.view(-1)  # law 6: a plain contiguous weight, whatever it is cut by
        return (y * weights.unsqueeze(-1)).sum(1) * self.scale + flat.square().mean()


class Model(nn.Module):
    """A gate, stacked experts and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS)
        self.experts = Experts()
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.experts(x, self.gate(x).softmax(-1)))


def loss_of(module: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(module(x), y)


def batches(steps: int = 3) -> list[Any]:
    made = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(12, WIDTH, generator=made),
            torch.randint(0, NUM_CLASSES, (12,), generator=made),
        )
        for _ in range(steps)
    ]


JOB = Job(Model, batches(), loss_of)


def faces_of(module: nn.Module) -> dict[str, Any]:
    return dict(module.named_parameters())


def step(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, batch: Any) -> Tensor:
    parts = [t.chunk(dist.get_world_size())[rank] for t in batch]
    loss = loss_of(module, parts)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    optimizer.step()
    return norm


def sharded(shares: tuple[int, ...] | None = None, **choices: Any) -> tuple[nn.Module, Any]:
    """A sharded model and its AdamW."""
    module = seeded(Model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    mesh = choices.pop("mesh", None)
    onefold.shard(module, optimizer, mesh=mesh, shares=shares, **choices)
    return module, optimizer


# another dimension


@again_but("{}-0.1", "{'precision': 'bf16'}-None", "{'offload': 'optimizer'}-0.1")
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"offload": "optimizer"}], ids=str)
def test_stacked_experts_train_to_the_same_bits_at_every_stage(options, clip):
    job = replace(JOB, clip=clip, options=options)
    stage_1 = run_job(job, WORLD, 1)
    for stage in (2, 3):
        assert_same_bits(run_job(job, WORLD, stage), stage_1)
    if not options:
        assert_close(stage_1, train_plain(job))
    if not options and clip is None:
        assert_same_bits(run_job(job, WORLD, 0), stage_1)


@again_but("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_cut_by_another_dimension_changes_no_bit(stage, monkeypatch):
    balanced = run_job(JOB, WORLD, stage)
    monkeypatch.setattr("onefold.layout.cut.MIN_RANK_NUMEL", 2**40)
    cut_of.cache_clear()
    try:
        assert_same_bits(run_job(JOB, WORLD, stage), balanced)
    finally:
        cut_of.cache_clear()


@pytest.mark.parametrize("kind", ["muon", "adafactor"])
def test_matrix_optimizers_step_whole_matrices(kind):
    def optimizer(parameters):
        parameters = list(parameters)
        if kind == "adafactor":
            return torch.optim.Adafactor(parameters, lr=1e-2)
        return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=1e-2)

    def build():
        return nn.Sequential(nn.Linear(1024, 8), nn.Linear(8, NUM_CLASSES))

    made = torch.Generator().manual_seed(3)
    data = [
        (
            torch.randn(12, 1024, generator=made),
            torch.randint(0, NUM_CLASSES, (12,), generator=made),
        )
        for _ in range(2)
    ]
    job = Job(build, data, loss_of, optimizer)
    relative = 1e-6 if kind == "adafactor" else 1e-3  # Newton-Schulz is in bfloat16
    assert_close(run_job(job, WORLD, 3), train_plain(job), relative)


@again_but("True")
@pytest.mark.parametrize("feedback", [False, True])
def test_quantized_messages_carry_every_slab(feedback):
    def body(rank):
        module, optimizer = sharded(
            wire=onefold.Wire(weights="int8", gradients="int8", feedback=feedback)
        )
        for batch in batches():
            step(module, optimizer, rank, batch)
            optimizer.zero_grad()
        with onefold.unsharded(module):
            return {n: p.detach().clone() for n, p in module.named_parameters()}

    plain = run_job(JOB, WORLD, 3).weights
    for got in run_ranks(WORLD, body):
        for name, weight in plain.items():
            torch.testing.assert_close(got[name], weight, rtol=0, atol=0.05, msg=name)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_face_is_a_dtensor_of_the_dimension_that_is_cut(stage):
    def body(rank):
        module, optimizer = sharded(stage=stage)
        wanted = faces_of(seeded(Model))
        for name, face in faces_of(module).items():
            assert isinstance(face, DTensor)
            assert face.shape == wanted[name].shape
            assert torch.equal(face.full_tensor(), wanted[name]), name
            if name in BALANCED:
                assert face.placements == (Shard(BALANCED[name]),), name
        local = faces_of(module)["experts.up"].to_local()
        assert local.shape == (NUM_EXPERTS, HIDDEN // WORLD, WIDTH)
        step(module, optimizer, rank, batches()[0])
        up = faces_of(module)["experts.up"]
        assert up.grad.placements == up.placements
        total = torch.cat([p.grad.full_tensor().reshape(-1) for p in module.parameters()]).norm()
        torch.testing.assert_close(total, torch.tensor(0.5), rtol=1e-4, atol=0)

    run_ranks(WORLD, body)


@worlds_in_turn
@pytest.mark.parametrize(
    ("stage", "shares"),
    [(0, (2, 1, 1)), (1, (1, 0, 2)), (1, (2, 1, 1)), (3, (1, 0, 2)), (3, (2, 1, 1))],
)
def test_own_bytes_of_unequal_shares_are_those_of_the_closed_form(stage, shares):
    def body(rank):
        module, optimizer = sharded(shares, stage=stage)
        step(module, optimizer, rank, batches()[0])
        assert is_equal(measure(engine_of(module).recipe, onefold.report(module)))

    run_ranks(WORLD, body)


def test_own_bytes_are_a_third_of_the_experts_and_those_of_the_closed_form():
    def body(rank):
        module, optimizer = sharded()
        step(module, optimizer, rank, batches()[0])
        assert is_equal(measure(engine_of(module).recipe, onefold.report(module)))
        units = engine_of(module).units
        return sum(p.local.numel() for u in units for p in u.parameters if p.slot.cut.dim == 1)

    held = run_ranks(WORLD, body)
    assert max(held) <= 1.05 * sum(held) / WORLD


def test_edits_in_unsharded_reach_the_right_elements():
    def body(rank):
        module, _ = sharded()
        with onefold.unsharded(module, writeback=True), torch.no_grad():
            module.experts.up.copy_(
                torch.arange(module.experts.up.numel()).view_as(module.experts.up)
            )
        return module.experts.up.full_tensor()

    for got in run_ranks(WORLD, body):
        assert torch.equal(got.reshape(-1), torch.arange(got.numel()).float())


class Counted(Experts):
    """Experts whose initial values say where each element belongs."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.arange(p.numel()).view(p.shape))


@pytest.mark.parametrize("shares", [None, (1, 0, 2)])
def test_a_module_on_meta_is_initialised_as_one_built_whole(shares):
    def body(rank):
        with torch.device("meta"):
            module = Counted()
        onefold.shard(module, shares=shares)
        return {n: p.full_tensor() for n, p in module.named_parameters()}

    for got in run_ranks(WORLD, body):
        for name, weight in Counted().named_parameters():
            assert torch.equal(got[name], weight), name


# checkpoints, of either cut


def resumed(path: Any, world: int, shares: tuple[int, ...] | None, stage: int) -> dict[str, Tensor]:
    """Everything by name, whole, after loading on `world` ranks."""

    def body(rank):
        module, optimizer = sharded(shares, stage=stage)
        onefold.load(path, module, optimizer)
        return everything(module, optimizer)

    return run_ranks(world, body)[0]


def everything(module: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    found = {}
    for name, face in faces_of(module).items():
        found[name] = whole(face.detach())
        for key, value in optimizer.state.get(face, {}).items():
            found[f"{name} {key}"] = whole(value)
    return found


def whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def saved(path: Any, world: int, shares: tuple[int, ...] | None) -> dict[str, Tensor]:
    def body(rank):
        module, optimizer = sharded(shares)
        for batch in batches(2):
            step(module, optimizer, rank, batch)
            optimizer.zero_grad()
        onefold.save(path, module, optimizer)
        return everything(module, optimizer)

    return run_ranks(world, body)[0]


@again_but("3-None", "2-old2", "3-old3")
@pytest.mark.parametrize(("old_world", "old"), [(3, None), (2, None), (2, (1, 3)), (3, (1, 0, 2))])
def test_checkpoints_move_between_cuts(tmp_path, old_world, old):
    wanted = saved(tmp_path / "saved", old_world, old)
    cuts = [(1, None), (2, None), (3, None), (4, None), (2, (1, 3)), (3, (1, 0, 2))]
    for world, shares in cuts:
        got = resumed(tmp_path / "saved", world, shares, 3)
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(got[name], value), (world, shares, name)


@again_but("3-shares2")
@pytest.mark.parametrize(("world", "shares"), [(3, None), (2, (1, 3)), (3, (1, 0, 2))])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_what_we_write_and_the_reverse(tmp_path, world, shares):
    wanted = saved(tmp_path / "saved", world, shares)
    plain = {"model": dict(seeded(Model).state_dict())}
    reader = dcp.HuggingFaceStorageReader(str(tmp_path / "saved"))
    dcp.load(plain, storage_reader=reader, no_dist=True)
    for name in faces_of(Model()):
        assert torch.equal(plain["model"][name], wanted[name]), name

    def body(rank):
        module, _ = sharded(shares)
        state = {"model": module.state_dict()}
        dcp.save(state, checkpoint_id=tmp_path / "torchs")
        other, _ = sharded(shares)
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / "torchs")
        return {n: p.full_tensor() for n, p in other.named_parameters()}

    for got in run_ranks(world, body):
        for name, weight in seeded(Model).named_parameters():
            assert torch.equal(got[name], weight), name


@again_but("3-shares2")
@pytest.mark.parametrize(("world", "shares"), [(3, None), (2, (1, 3)), (3, (1, 0, 2))])
def test_pretrained_files_go_round(tmp_path, world, shares):
    def body(rank):
        module, _ = sharded(shares)
        onefold.save_pretrained(module, tmp_path / "hf")
        other, _ = sharded(shares)
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        onefold.load_pretrained(other, tmp_path / "hf")
        with torch.device("meta"):
            late = Model()
        onefold.load_pretrained(late, tmp_path / "hf")
        onefold.shard(late, shares=shares)
        return [{n: p.full_tensor() for n, p in m.named_parameters()} for m in (other, late)]

    for found in run_ranks(world, body):
        for got in found:
            for name, weight in seeded(Model).named_parameters():
                assert torch.equal(got[name], weight), name


def test_an_export_writes_boxes_to_their_places(tmp_path):
    wanted = saved(tmp_path / "saved", 3, None)
    export(tmp_path / "saved", tmp_path / "hf")
    module = onefold.load_pretrained(Model(), tmp_path / "hf")
    onefold.shard(module)
    for name, p in module.named_parameters():
        assert torch.equal(whole(p.detach()), wanted[name]), name


# unequal shares


@again_but("shares1-3", "shares2-1")
@worlds_in_turn
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("shares", WEIGHTS)
def test_unequal_shares_train_to_the_same_bits(shares, stage):
    def body(rank, weights):
        module, optimizer = sharded(weights, stage=stage)
        norms = [step(module, optimizer, rank, batch) for batch in batches(1)]
        optimizer.zero_grad()
        for x, y in (tuple(t.chunk(len(shares))[rank] for t in batch) for batch in batches()):
            loss_of(module, (x, y)).backward()
            optimizer.step()
            optimizer.zero_grad()
        own = {n: p.to_local().numel() for n, p in module.named_parameters()}
        with onefold.unsharded(module):
            weights = {n: p.detach().clone() for n, p in module.named_parameters()}
        return whole(norms[0]), own, weights

    even = run_ranks(len(shares), body, None)
    for rank, (norm, own, weights) in enumerate(run_ranks(len(shares), body, shares)):
        torch.testing.assert_close(norm, even[0][0], rtol=1e-6, atol=0)
        fair = NUM_EXPERTS * HIDDEN * WIDTH * shares[rank] / sum(shares)
        assert own["experts.up"] <= 1.05 * fair
        for name, weight in even[0][2].items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6, msg=name)


@again_but("shares2")
@pytest.mark.parametrize("shares", WEIGHTS)
def test_faces_of_unequal_shares_read_right(shares):
    def body(rank):
        module, optimizer = sharded(shares)
        wanted = dict(seeded(Model).named_parameters())
        for name, face in faces_of(module).items():
            value = wanted[name].detach()
            assert torch.equal(face.full_tensor(), value), name
            assert torch.equal(module.state_dict()[name].full_tensor(), value), name
            assert torch.equal((face.detach() * 2).full_tensor(), value * 2), name
            assert torch.equal(face.data.full_tensor(), value), name
            torch.testing.assert_close(whole(face.detach().norm()), value.norm())
            assert whole(face.detach().max()) == value.max()
            assert whole(face.detach().mean()) == pytest.approx(value.mean().item(), abs=1e-6)
            assert torch.equal(whole(face.detach().sum(0) if face.dim() else face.detach()),
                               value.sum(0) if value.dim() else value) or face.dim()  # fmt: skip
            if face.dim() > 1:
                assert torch.equal(whole(face.detach()[0]), value[0]), name
                assert torch.equal(whole(face.detach().t() if face.dim() == 2 else face.detach()),
                                   value.t() if value.dim() == 2 else value)  # fmt: skip
        loss_of(module, [t.chunk(len(shares))[rank] for t in batches()[0]]).backward()
        for p in module.parameters():
            torch.testing.assert_close(p.grad.norm().item(), whole(p.grad).norm().item())
            torch.testing.assert_close(whole(p.grad.abs().max()), whole(p.grad).abs().max())
            if p.dim():
                wanted, p.grad[-1] = whole(p.grad), 7.0
                wanted[-1] = 7.0
                assert torch.equal(whole(p.grad), wanted)
        optimizer.step()

    run_ranks(len(shares), body)


@again_but("inf")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping_by_any_norm_works_beside_a_rank_that_holds_nothing(norm_type):
    def body(rank, weights):
        module, _ = sharded(weights)
        loss_of(module, [t.chunk(3)[rank] for t in batches()[0]]).backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 1e-3, norm_type=norm_type)
        return [whole(norm), *(whole(p.grad) for p in module.parameters())]

    even = run_ranks(3, body, (1, 1, 1))[0]
    for found in run_ranks(3, body, (1, 0, 2)):
        for got, wanted in zip(found, even, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-9)


@every_rank(3)
def test_a_mesh_of_unequal_shares_is_not_taken_for_an_even_one(rank):
    even, _ = sharded()
    uneven, _ = sharded((1, 0, 2))
    for module in (even, uneven, even, uneven):
        doubled = {n: (p.detach() * 2).full_tensor() for n, p in module.named_parameters()}
        for name, weight in seeded(Model).named_parameters():
            assert torch.equal(doubled[name], weight * 2), name


@pytest.mark.parametrize(
    "shares", [(1,), (0, 0, 0), (1, -1, 2), (1, float("nan"), 1), (1, True, 1)]
)
def test_shares_that_mean_nothing_are_refused(shares):
    def body(rank):
        with pytest.raises(ConfigError, match="shares"):
            sharded(shares)

    run_ranks(WORLD, body)


def test_ranks_that_disagree_on_shares_are_refused_on_every_rank():
    def body(rank):
        with pytest.raises(ConfigError, match=r"shares=\(1, 0, 2\)"):
            sharded((1, 0, 2) if rank else None)

    run_ranks(WORLD, body)


@again_but("bf16-shares1", "cpu-shares1", "disk-shares0", "int8-shares1")
@pytest.mark.parametrize("shares", [(1, 0, 2), (1, 3)])
@pytest.mark.parametrize(
    "choices",
    [
        {"precision": "bf16"}, {"offload": "cpu"}, {"offload": "disk"},
        {"wire": onefold.Wire(weights="int8", gradients="int8")},
    ],
    ids=["bf16", "cpu", "disk", "int8"],
)  # fmt: skip
def test_unequal_shares_train_in_every_tier_precision_and_wire(tmp_path, shares, choices):
    if choices.get("offload") == "disk":
        choices = {"offload": f"disk:{tmp_path}"}

    def body(rank, weights):
        module, optimizer = sharded(weights, **choices)
        for batch in batches():
            step(module, optimizer, rank, batch)
            optimizer.zero_grad()
        with onefold.unsharded(module):
            return {n: p.detach().clone() for n, p in module.named_parameters()}

    even = run_ranks(len(shares), body, None)[0]
    for found in run_ranks(len(shares), body, shares):
        for name, weight in even.items():
            atol = 1e-5 if "offload" in choices else 0.05
            torch.testing.assert_close(found[name], weight, rtol=0, atol=atol, msg=name)


def test_nodes_that_are_replicas_balance_stacked_experts():
    def body(rank):
        module, optimizer = sharded(
            mesh=init_device_mesh("cpu", (2, 3)), wire=onefold.Wire(secondary="optimizer")
        )
        assert faces_of(module)["experts.up"].placements == (Shard(1),)
        for batch in batches():
            step(module, optimizer, rank, batch)
            optimizer.zero_grad()
        with onefold.unsharded(module):
            return {n: p.detach().clone() for n, p in module.named_parameters()}

    plain = run_job(replace(JOB, clip=0.5), 6, 3).weights
    for found in run_ranks(6, body):
        for name, weight in plain.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-5, msg=name)


@every_rank(6)
def test_two_hops_and_tiles_keep_rows(rank):
    hops, _ = sharded(mesh=init_device_mesh("cpu", (2, 3)), wire="zero++")
    assert faces_of(hops)["experts.up"].placements == (Shard(0),)
    tiled = nn.Linear(1024, 8)
    onefold.shard(tiled, offload=onefold.Offload(tile=4096))
    assert tiled.weight.placements == (Shard(0),)


def in_process(rank: int, shares: tuple[int, ...] | None) -> None:
    module, optimizer = sharded(shares)
    for batch in batches(2):
        step(module, optimizer, rank, batch)
        optimizer.zero_grad()
    own = {n: p.full_tensor() for n, p in module.named_parameters()}
    with onefold.unsharded(module):
        for name, p in module.named_parameters():
            assert torch.equal(own[name], p), name


@again_but("shares1")
@pytest.mark.process
@pytest.mark.parametrize("shares", [None, (1, 0, 2)])
def test_real_processes_cut_as_threads_do(shares):
    run_processes(WORLD, in_process, shares)
