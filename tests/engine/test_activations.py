"""What backward needs of forward rests on another tier meanwhile, and comes back bit for bit."""

from __future__ import annotations

import errno
import gc
import os
import random
import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.config import Offload
from onefold.engine.activations import Limits, SavedActivations
from onefold.engine.registry import engine_of
from onefold.errors import TierError
from onefold.layout.ledger import Kind, Ledger
from onefold.tier.area import Area
from onefold.tier.disk import SwapFile
from onefold.tier.scratch import DiskScratch, HostScratch
from onefold.tier.slots import SlotPool
from onefold.tier.workers import Workers
from tests.support.forking import HANG_S
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.programs.blocks import By
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn
from tests.support.training import Job, assert_same_bits, train_sharded

CPU = torch.device("cpu")
ROWS, WIDTH = 32, 64
STRETCH = ROWS * WIDTH * 4  # bytes of one activation of the small networks here


class Disk:
    """Saved activations on disk for one plain module, and what they did there."""

    def __init__(self, paths, module=None, weights=(), limits=None, num_threads=2):
        self.ledger = Ledger()
        self.files = [SwapFile(path, 0) for path in paths]
        workers = Workers(num_threads, "test-activation")
        self.scratch = DiskScratch(
            self.files, workers, SlotPool.on_host(self.ledger), CPU, self.ledger
        )
        limits = limits or Limits(least=1024, window=2 * STRETCH)
        self.saved = SavedActivations(self.scratch, CPU, weights, module, limits)

    @contextmanager
    def around(self):
        self.saved.begin()
        try:
            yield
        finally:
            self.saved.end()

    @property
    def leased(self):
        usage = self.ledger.usage.get((Kind.ACTIVATION, "disk"))
        return usage.now if usage else 0

    @property
    def peak(self):
        usage = self.ledger.usage.get((Kind.ACTIVATION, "disk"))
        return usage.peak if usage else 0

    @property
    def written(self):
        return sum(file.written_nbytes for file in self.files)

    @property
    def read(self):
        return sum(file.read_nbytes for file in self.files)

    @property
    def length(self):
        return sum(file._nbytes for file in self.files)

    def settle(self):
        """Return when workers are through with what was begun."""
        for _, transfer, _ in self.saved._leaving:
            transfer.wait()


def until(is_so, timeout_s=HANG_S):
    """Workers let go of what they hold a moment after others see it done."""
    end = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


EAGER = Limits(least=1, window=0)
"""Everything leaves at once."""

ALL_NEAR = Limits(least=1, window=1 << 30)
"""Everything fits into the window."""


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, c = x.shape
        parts = (p.view(b, t, 4, c // 4).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("scale", torch.full((ROWS, WIDTH), 0.5))

    def forward(self, x):
        x = x + self.drop(self.attention(self.first(x)))
        hidden = torch.relu_(self.up(self.second(x)))
        return x + self.drop(self.down(hidden)) * self.scale.view(1, ROWS, WIDTH)


class Network(nn.Module):
    """A transformer whose middle block is used twice and whose first activation is used last."""

    def __init__(self, recompute=None):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 8)
        self.recompute = recompute

    def forward(self, x):
        first = x = torch.sin(x)
        for index in (0, 1, 1, 2):
            block = self.blocks[index]
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute)
        return self.head(x * first + first.mean(-1, keepdim=True).expand_as(x))


def batch(requires_grad=False):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, ROWS, WIDTH, generator=generator).requires_grad_(requires_grad)


def grads_of(module, x, disk=None, backward=lambda loss: loss.backward()):
    """The gradients of parameters and input, with what autograd saves on `disk`."""
    torch.manual_seed(5)  # dropout
    module.zero_grad()
    if disk is None:
        loss = module(x).square().mean()
    else:
        with disk.around():
            loss = module(x).square().mean()
    backward(loss)
    found = [p.grad.clone() for p in module.parameters()]
    if x.requires_grad:
        found.append(x.grad)
        x.grad = None
    return found


def assert_equal(got, wanted):
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)


# laws of values


@again_but("plain-none", "recompute-none", "reentrant-all", "reentrant-some", "reentrant-none")
@pytest.mark.parametrize("limits", [EAGER, None, ALL_NEAR], ids=["all", "some", "none"])
@pytest.mark.parametrize("recompute", [None, False, True], ids=["plain", "recompute", "reentrant"])
def test_gradients_are_bitwise_those_of_activations_that_stay(tmp_path, limits, recompute):
    module = seeded(partial(Network, recompute))
    disk = Disk([tmp_path], module, limits=limits)
    wanted = grads_of(module, batch(True))
    for _ in range(3):
        assert_equal(grads_of(module, batch(True), disk), wanted)
    assert (disk.written > 0) == (limits is not ALL_NEAR)
    until(lambda: disk.leased == 0)


def test_several_backwards_over_one_graph_give_the_same_gradients(tmp_path):
    module = seeded(Network)
    disk = Disk([tmp_path], module, limits=EAGER)
    once = grads_of(module, batch())

    def twice(loss):
        loss.backward(retain_graph=True)
        for p in module.parameters():
            p.grad = None
        read = disk.read
        loss.backward()
        assert disk.read == read  # what came back has stayed

    assert_equal(grads_of(module, batch(), disk, twice), once)


def test_two_graphs_may_be_alive_and_run_backward_in_any_order(tmp_path):
    module = seeded(Network)
    disk = Disk([tmp_path], module)
    wanted = grads_of(module, batch(), backward=lambda loss: loss.backward())
    for order in ((0, 1), (1, 0)):
        losses = []
        for _ in range(2):
            torch.manual_seed(5)
            with disk.around():
                losses.append(module(batch()).square().mean())
        for index in order:
            module.zero_grad()
            losses[index].backward()
            assert_equal([p.grad for p in module.parameters()], wanted)


def test_gradients_of_gradients_are_the_same(tmp_path):
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    disk = Disk([tmp_path], module, limits=EAGER)

    def second(loss):
        (first,) = torch.autograd.grad(loss, [module[0].weight], create_graph=True)
        first.square().sum().backward()

    wanted = grads_of(module, batch(True), None, second)
    assert_equal(grads_of(module, batch(True), disk, second), wanted)


@again_but("RNN")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_cells_that_change_parts_of_a_storage_in_place_are_the_same(tmp_path, kind):
    cell = lambda: kind(WIDTH, 12, num_layers=2, bidirectional=True, batch_first=True)
    module = seeded(lambda: By(lambda self, x: self.cell(x)[0], cell=cell()))
    disk = Disk([tmp_path], module, limits=EAGER)
    wanted = grads_of(module, batch(True))
    for _ in range(2):
        assert_equal(grads_of(module, batch(True), disk), wanted)


def test_parts_with_counters_of_their_own_are_told_apart(tmp_path):
    disk = Disk([tmp_path], limits=EAGER)
    parts = torch.zeros(ROWS, 2 * WIDTH).unsafe_chunk(2, 1)
    with disk.around():
        outs = []
        for value, part in enumerate(parts):
            part.fill_(value + 1.0)
            outs.append(Keeper.apply(torch.ones(1, requires_grad=True), part))
            disk.settle()
    for value, out in enumerate(outs):
        out.sum().backward()
        assert bool((Keeper.seen[0] == value + 1.0).all())


class Keeper(torch.autograd.Function):
    """Shows what backward gets of what forward saved."""

    seen: list[torch.Tensor]

    @staticmethod
    def forward(ctx, x, *others):
        ctx.save_for_backward(*others)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Keeper.seen = list(ctx.saved_tensors)
        return (grad,) + (None,) * len(Keeper.seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_dtype_shape_strides_and_alignment_come_back(tmp_path, dtype):
    disk = Disk([tmp_path], limits=EAGER)
    whole = torch.randint(0, 2, (6, 50, 40)).to(dtype)
    views = [
        whole, whole.transpose(0, 2), whole[1:3], whole[..., 5:], whole[:, ::7], whole[3, 2:3],
        whole[:, :1].expand(6, 50, 40), whole.unfold(1, 8, 2), whole[5, 49, 39:],
    ]  # fmt: skip
    copies = [view.clone() for view in views]
    with disk.around():
        out = Keeper.apply(torch.ones(3, requires_grad=True), *views)
    disk.settle()
    strides = [view.stride() for view in views]
    places = [view.data_ptr() % 64 for view in views]
    del whole, views
    out.sum().backward()
    assert disk.read > 0
    for got, wanted, stride, place in zip(Keeper.seen, copies, strides, places, strict=True):
        assert torch.equal(got, wanted)
        assert got.dtype == dtype
        assert got.stride() == stride
        assert got.data_ptr() % 64 == place


def test_a_tensor_of_many_pieces_comes_back(tmp_path):
    disk = Disk([tmp_path], limits=EAGER, num_threads=3)
    big = torch.randint(0, 1 << 30, (9 << 18,)).view(9, -1)[:, 3:]  # 9 MiB and odd
    with disk.around():
        out = Keeper.apply(torch.ones(1, requires_grad=True), big)
    disk.settle()
    wanted = big.clone()
    out.sum().backward()
    assert torch.equal(Keeper.seen[0], wanted)
    assert Keeper.seen[0].data_ptr() != big.data_ptr()


# laws of what moves


def saved_bytes(disk, *tensors):
    """Bytes on disk once a graph has saved these tensors."""
    with disk.around():
        out = Keeper.apply(torch.ones(1, requires_grad=True), *tensors)
    disk.settle()
    found = disk.leased
    del out
    until(lambda: disk.leased == 0)
    return found


def test_bytes_that_several_operations_save_move_once(tmp_path):
    disk = Disk([tmp_path], limits=EAGER)
    x = torch.randn(ROWS, WIDTH)
    assert saved_bytes(disk, x) == STRETCH
    assert saved_bytes(disk, x, x.view(-1), x.t(), x.detach()) == STRETCH


def test_interleaved_parts_of_one_projection_move_once(tmp_path):
    disk = Disk([tmp_path], limits=EAGER)
    parts = torch.randn(ROWS, 3 * WIDTH).chunk(3, -1)
    assert saved_bytes(disk, *parts) == 3 * STRETCH


def test_a_batch_cut_from_a_data_set_moves_alone(tmp_path):
    disk = Disk([tmp_path], limits=EAGER)
    data = torch.randn(100 * ROWS, WIDTH)
    assert saved_bytes(disk, data[ROWS : 2 * ROWS]) == STRETCH


def test_a_batch_and_a_longer_one_from_the_same_row_both_come_back(tmp_path):
    disk = Disk([tmp_path], limits=EAGER)
    data = torch.randn(100 * ROWS, WIDTH)
    batches = [data[:ROWS], data[: 2 * ROWS]]
    with disk.around():
        out = Keeper.apply(torch.ones(1, requires_grad=True), *batches)
    disk.settle()
    out.sum().backward()
    assert all(map(torch.equal, Keeper.seen, batches))


def test_bytes_that_changed_in_between_are_not_taken_for_the_same(tmp_path):
    disk = Disk([tmp_path], limits=EAGER)
    x = torch.zeros(ROWS, WIDTH)
    with disk.around():
        first = Keeper.apply(torch.ones(1, requires_grad=True), x)
        disk.settle()
        with torch.no_grad():
            x += 1
        second = Keeper.apply(torch.ones(1, requires_grad=True), x)
    second.sum().backward()
    assert torch.equal(Keeper.seen[0], torch.ones(ROWS, WIDTH))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


def test_a_freed_tensor_is_not_taken_for_another_at_its_address(tmp_path):
    disk = Disk([tmp_path], limits=EAGER)
    outs = []
    for value in range(20):
        x = torch.full((ROWS, WIDTH), float(value))
        with disk.around():
            outs.append(Keeper.apply(torch.ones(1, requires_grad=True), x))
        disk.settle()
        del x
    for value, out in enumerate(outs):
        out.sum().backward()
        assert bool((Keeper.seen[0] == value).all())


def test_weights_buffers_and_what_is_small_or_sparse_stay(tmp_path):
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(ROWS, WIDTH))
            self.register_buffer("mask", torch.ones(ROWS, WIDTH))

    module = Other()
    flat = torch.randn(4 * ROWS * WIDTH)
    disk = Disk([tmp_path], module, [flat], Limits(least=STRETCH, window=0))
    small = torch.randn(ROWS, WIDTH - 1)
    sparse = torch.eye(2 * WIDTH).to_sparse()
    broad = torch.randn(1, WIDTH).expand(100 * ROWS, WIDTH)
    stays = [module.weight, module.mask.t(), flat.data[100:], small, sparse, broad]
    assert saved_bytes(disk, *stays) == 0
    assert saved_bytes(disk, torch.randn(ROWS, WIDTH)) == STRETCH


def test_nothing_moves_in_evaluation_or_outside_of_forward(tmp_path):
    module = seeded(Network)
    disk = Disk([tmp_path], module, limits=EAGER)
    with torch.no_grad(), disk.around():
        module(batch())
    module(batch()).sum().backward()
    assert disk.written == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_of_blocks_that_are_recomputed_only_inputs_move(tmp_path, reentrant):
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    disk = Disk([tmp_path], module, limits=EAGER)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    block = nn.Sequential(module, nn.Tanh())
    with disk.around():
        y = checkpoint(block, x.exp(), use_reentrant=reentrant)
        y = checkpoint(block, y, use_reentrant=reentrant)
    disk.settle()
    # of exp the result, which is the input of the first block, and the input of the second
    assert disk.peak == 2 * STRETCH
    written = disk.written
    y.sum().backward()
    assert disk.written == written  # nothing leaves again in recompute


def test_a_root_that_is_recomputed_whole_moves_nothing_in_backward(tmp_path):
    module = seeded(Network)
    disk = Disk([tmp_path], module, limits=EAGER)

    def run(x):
        with disk.around():
            return module(x)

    torch.manual_seed(5)
    loss = checkpoint(run, batch(True), use_reentrant=True).square().mean()
    loss.backward()
    assert disk.written == 0
    assert_equal([p.grad for p in module.parameters()], grads_of(seeded(Network), batch()))


def test_the_innermost_hooks_decide(tmp_path):
    disk = Disk([tmp_path], limits=EAGER)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with disk.around():
        with save_on_cpu():
            y = x.exp()
        assert disk.peak == 0
        z = y.exp()
    assert disk.peak == STRETCH
    z.sum().backward()
    assert torch.equal(x.grad, x.detach().exp().exp() * x.detach().exp())


# laws of memory


def chain(disk, depth, look=lambda alive: None):
    """Forward of `depth` activations; the storages of all of them."""
    storages = []
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with disk.around():
        y = x
        for _ in range(depth):
            y = torch.tanh(y)
            storages.append(StorageWeakRef(y.untyped_storage()))
            look(sum(not each.expired() for each in storages))
        y = y.sum()
    return y, storages, x


def test_memory_is_free_once_it_is_written(tmp_path):
    disk = Disk([tmp_path])
    _y, storages, _x = chain(disk, 20)
    disk.settle()
    until(lambda: sum(not each.expired() for each in storages) == 2)  # the window of the newest
    assert not storages[-1].expired()
    assert disk.leased == 18 * STRETCH


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_slow_disk_holds_forward_up_and_memory_does_not_grow(tmp_path, monkeypatch, num_threads):
    write = os.pwritev

    def slowly(fd, buffers, offset):
        time.sleep(0.003)
        return write(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", slowly)
    disk = Disk([tmp_path], num_threads=num_threads)
    most = []
    _graph = chain(disk, 40, most.append)
    # a window of the newest, one on its way out, and the one that is being computed; and a worker
    # holds what it has just written for an instant more
    assert max(most) <= 2 + 2 + 1 + num_threads


def test_the_newest_bytes_are_not_written(tmp_path):
    disk = Disk([tmp_path])
    graph = chain(disk, 2)
    disk.settle()
    assert disk.written == 0
    graph[0].backward()
    assert disk.read == 0


def test_backward_runs_behind_a_window_of_reads(tmp_path):
    disk = Disk([tmp_path])
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    near = []
    with disk.around():
        y = x
        for _ in range(12):
            y = torch.tanh(y)
            y.register_hook(lambda grad: near.append(disk.read // STRETCH))
    disk.settle()
    y.sum().backward()
    until(lambda: disk.read == 10 * STRETCH)
    # with k unpacked a window of two is ahead, and the two newest had not left
    assert all(begun <= k for k, begun in enumerate(near))
    assert near[-1] >= 9


def test_the_file_does_not_grow_from_step_to_step(tmp_path):
    disk = Disk([tmp_path])
    lengths = []
    for _ in range(4):
        graph = chain(disk, 12)
        disk.settle()
        graph[0].backward()
        del graph
        until(lambda: disk.leased == 0)
        lengths.append(disk.length)
    assert lengths == [10 * STRETCH] * 4


def test_a_graph_that_is_dropped_gives_its_places_back(tmp_path):
    disk = Disk([tmp_path])
    for _ in range(3):
        graph = chain(disk, 12)
        assert disk.leased > 0
        del graph
        until(lambda: disk.leased == 0)
    assert disk.length <= 10 * STRETCH
    assert disk.read == 0


def test_an_exception_in_forward_releases_everything(tmp_path):
    disk = Disk([tmp_path])

    def fail():
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        with disk.around():
            for _ in range(12):
                x = torch.tanh(x)
            raise ValueError("mid-forward")

    with pytest.raises(ValueError, match="mid-forward"):
        fail()
    gc.collect()
    until(lambda: disk.leased == 0)
    before = disk.written
    torch.randn(ROWS, WIDTH, requires_grad=True).exp().sum().backward()
    assert disk.written == before  # the hooks are gone
    chain(disk, 12)[0].backward()


def test_several_paths_take_turns(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    disk = Disk(folders)
    for _ in range(2):
        graph = chain(disk, 22)
        disk.settle()
        graph[0].backward()
        del graph
        until(lambda: disk.leased == 0)
    first, second = (file.written_nbytes for file in disk.files)
    assert first == second


def test_stretches_of_an_area_never_overlap_and_become_one_again():
    area, draw = Area("disk", Ledger()), random.Random(0)
    for ground in (0, 1):
        area.add(ground, 0, 64 * 4096)
    leases = []
    for _ in range(500):
        if leases and draw.random() < 0.5:
            leases.pop(draw.randrange(len(leases)))
        lease = area.lease(draw.randint(1, 12) * 4096, draw.randint(0, 1))
        if lease is not None:
            leases.append(lease)
        for ground in (0, 1):
            own = sorted((a.offset, a.offset + a.nbytes) for a in leases if a.ground == ground)
            ends = [0, *(stop for _, stop in own)]
            assert all(start >= end for (start, _), end in zip(own, ends, strict=False))
            assert ends[-1] <= 64 * 4096
    leases.clear()
    del lease
    whole = [area.lease(64 * 4096, ground) for ground in (0, 1)]
    assert [lease.ground for lease in whole if lease] == [0, 1]
    assert area.lease(4096) is None


# laws of errors


def change_after_saving(disk, depth):
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with disk.around():
        y = x.exp()
        z = y
        for _ in range(depth):
            z = z.tanh()
    disk.settle()
    with torch.no_grad():
        y.add_(1)
    return z


@pytest.mark.parametrize("depth", [0, 12], ids=["near", "written"])
@pytest.mark.parametrize("least", [1, 1 << 30], ids=["moves", "stays"])
def test_a_tensor_that_was_changed_after_it_was_saved_is_refused(tmp_path, depth, least):
    disk = Disk([tmp_path], limits=Limits(least, 2 * STRETCH))
    z = change_after_saving(disk, depth)
    with pytest.raises(RuntimeError, match=r"version 0.*modified by an inplace operation"):
        z.sum().backward()


def failing(code, real, after=0):
    calls = []

    def call(*args):
        calls.append(args)
        if len(calls) > after:
            raise OSError(code, os.strerror(code))
        return real(*args)

    return call


def forward_and_backward(disk):
    graph = chain(disk, 20)
    disk.settle()
    graph[0].backward()


@pytest.mark.parametrize(
    ("name", "code"),
    [("pwritev", errno.EIO), ("preadv", errno.EIO), ("posix_fallocate", errno.ENOSPC)],
)
@pytest.mark.parametrize("after", [0, 5])
def test_a_disk_that_fails_is_a_tier_error_and_the_next_step_may_go_on(
    tmp_path, monkeypatch, name, code, after
):
    disk = Disk([tmp_path])
    with monkeypatch.context() as patch:
        patch.setattr(os, name, failing(code, getattr(os, name), after))
        with pytest.raises(TierError, match=errno.errorcode[code]) as caught:
            forward_and_backward(disk)
        assert caught.value.errno == code
        assert "hint:" in str(caught.value)
    del caught
    forward_and_backward(disk)
    until(lambda: disk.leased == 0)


def test_a_failed_write_is_told_in_backward_even_of_bytes_that_are_still_near(
    tmp_path, monkeypatch
):
    disk = Disk([tmp_path])
    monkeypatch.setattr(os, "pwritev", failing(errno.EIO, os.pwritev))
    graph = chain(disk, 3)  # one leaves
    until(lambda: all(transfer.is_completed() for _, transfer, _ in disk.saved._leaving))
    with pytest.raises(TierError, match="EIO"):
        graph[0].backward()


# the whole library


def offloaded(rank, job, world_size, stage, limits):
    """`train_sharded` with limits that suit a tiny module; and the bytes that moved."""
    moved = []
    shard = job.build

    def loss(module, tokens):
        saved = engine_of(module).saved
        if saved is not None:
            saved.limits = limits
        found = next_token_loss(module, tokens)
        usage = engine_of(module).ledger.usage.get((Kind.ACTIVATION, "disk"))
        moved.append(usage.peak if usage else 0)
        return found

    changed = Job(shard, job.batches, loss, clip=job.clip, options=job.options)
    return train_sharded(rank, changed, world_size, stage), max(moved)


@again_but("1-3", "3-2")
@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_training_with_activations_on_disk_gives_the_same_bits(tmp_path, world_size, stage):
    offload = Offload(activations="disk", disk=tmp_path)
    job = Job(Model, token_batches(), next_token_loss, clip=0.1)
    wanted = run_ranks(world_size, train_sharded, job, world_size, stage)
    job.options = {"offload": offload}
    found = run_ranks(world_size, offloaded, job, world_size, stage, EAGER)
    for (result, moved), plain in zip(found, wanted, strict=True):
        assert_same_bits(result, plain)
        assert moved > 0


def test_it_composes_with_parameters_and_states_on_disk(tmp_path):
    job = Job(Model, token_batches(), next_token_loss)
    wanted = run_ranks(2, train_sharded, job, 2, 3)
    every = Offload(optimizer="disk", parameters="disk", activations="disk", disk=tmp_path)
    job.options = {"offload": every}
    found = run_ranks(2, offloaded, job, 2, 3, EAGER)
    for (result, _), plain in zip(found, wanted, strict=True):
        assert_same_bits(result, plain)


def test_a_failed_forward_leaves_the_module_ready_for_the_next(tmp_path):
    module = seeded(Model)
    onefold.shard(module, stage=3, offload=Offload(activations="disk", disk=tmp_path))
    engine_of(module).saved.limits = EAGER
    (tokens,) = token_batches(1)
    with pytest.raises(IndexError):
        module(tokens + 1000)
    with pytest.raises(TypeError):
        module()
    assert engine_of(module).saved._begun == []
    next_token_loss(module, tokens).backward()
    gc.collect()
    usage = engine_of(module).ledger.usage[Kind.ACTIVATION, "disk"]
    until(lambda: usage.now == 0)
    assert usage.peak > 0


def test_where_the_cpu_computes_the_cpu_tier_costs_nothing():
    module = seeded(Model)
    onefold.shard(module, offload=Offload(activations="cpu"))
    assert engine_of(module).saved is None


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_activations_leave_a_gpu_and_gradients_stay_the_same(tmp_path, tier):
    device = torch.device("cuda", torch.cuda.current_device())
    module = seeded(Network).to(device).eval()
    ledger = Ledger()
    if tier == "cpu":
        scratch = HostScratch(device, ledger)
    else:
        workers = Workers(2, "test-activation")
        slots = SlotPool.on_host(ledger)
        scratch = DiskScratch([SwapFile(tmp_path, 0)], workers, slots, device, ledger)
    saved = SavedActivations(scratch, device, (), module, Limits(1, 2 * STRETCH))
    results = []
    for begins in (False, True, True, True):
        module.zero_grad()
        if begins:
            saved.begin()
        loss = module(batch().to(device)).square().mean()
        if begins:
            saved.end()
        loss.backward()
        del loss
        results.append([p.grad.clone() for p in module.parameters()])
    for result in results[1:]:
        assert_equal(result, results[0])
    usage = ledger.usage[Kind.ACTIVATION, tier]
    assert usage.peak > 0
    until(lambda: usage.now == 0)
