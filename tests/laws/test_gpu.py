"""On a CUDA device: the same losses as on the CPU, and no memory left behind."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist

import onefold
from onefold.compose import routes
from onefold.compose.routes import Links
from onefold.engine import blocks
from onefold.engine.registry import engine_of
from onefold.layout.ledger import Ledger
from onefold.layout.message_plan import SHARE_NBYTES
from onefold.layout.rows import Layout
from onefold.tier.step_device import DeviceStep
from onefold.tier.store import GRAIN_NUMEL
from onefold.wire.codec import codec_of
from onefold.wire.collectives import Group
from onefold.wire.message_cut import MessageLayout
from onefold.wire.transport import Reduction
from onefold.wire.wrapped import Streamed
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import seeded
from tests.support.rows import worlds_in_turn

pytestmark = pytest.mark.gpu


def losses(stage: int | None, precision: str | None, offload: object = None) -> torch.Tensor:
    """Of a module that `shard` moves to the device; stage None: of plain PyTorch on the CPU."""
    module = seeded(Model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    if stage is not None:
        onefold.shard(module, optimizer, stage=stage, precision=precision, offload=offload)
        assert {p.device.type for p in module.parameters()} == {"cuda"} or offload is not None
    found = []
    for batch in token_batches():
        loss = next_token_loss(module, batch if stage is None else batch.to("cuda"))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().float().cpu())
    return torch.stack(found)


@worlds_in_turn
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("precision", "relative"), [(None, 1e-4), ("bf16", 2e-2)])
def test_a_gpu_computes_the_losses_of_the_cpu(stage, precision, relative):
    wanted = losses(None, None)
    torch.testing.assert_close(losses(stage, precision), wanted, rtol=relative, atol=0)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_states_streamed_to_a_gpu_have_the_bits_of_states_that_rest_there(precision, monkeypatch):
    for name in ("BLOCK_NUMEL", "LINK_BLOCK_NUMEL"):  # several blocks for each unit
        monkeypatch.setattr(blocks, name, GRAIN_NUMEL)
    wanted = losses(2, precision)
    streamed = onefold.Offload(optimizer="cpu", step="device")
    assert torch.equal(losses(2, precision, streamed), wanted)


def test_a_gpu_chooses_who_steps_states_in_cpu_memory_and_says_why():
    module = seeded(Model).to("cuda")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer, stage=2, offload="optimizer")
    streams = isinstance(engine_of(module).context.tiers.step_device, DeviceStep)
    told = "streamed to the device" if streams else "stepped by the CPU"
    assert told in str(onefold.report(module))


@pytest.mark.parametrize("word", ["int8", "int4", "int8+h", "int4+h"])
def test_messages_of_a_gpu_have_the_bits_of_the_cpu(word):
    codec, numel = codec_of(word), 100_003
    values = torch.randn(numel) * 10.0 ** torch.randint(-30, 30, (numel,))
    values[7::5001] = torch.tensor(float("inf"))
    found = []
    for device in ("cpu", "cuda"):
        message = torch.empty(codec.nbytes(numel), dtype=torch.uint8, device=device)
        out, total = torch.empty(numel, device=device), torch.ones(numel, device=device)
        codec.encode(values.to(device), message)
        codec.decode(message, out)
        codec.add(message, total)
        found.append((message.cpu(), out.cpu(), total.cpu()))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@contextmanager
def no_waits() -> Iterator[None]:
    """Within it an operation for which the host waits is an error."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it does not detect all of them
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def looped():
    """A transport by NCCL of a rank that sends to itself, as on several devices."""
    store = dist.HashStore()
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    group = Group.from_handle(dist.group.WORLD)
    yield group, Links(device, Ledger(), torch.float32, loops=True).transport(group)
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_messages_by_nccl_arrive_in_stream_order(looped, dtype):
    """Small, medium and large regions, uneven ones too: one launch a message, no wait of a host."""
    group, transport = looped
    assert isinstance(transport, Streamed)
    shapes = [("large", (SHARE_NBYTES // 4 + 1, 3)), ("small", (5,)), ("uneven", (70_001, 3))]
    layout = Layout.build(shapes, 1)
    offsets = [slot.full_offset for slot in layout.slots]
    gathered = MessageLayout(layout.slots, offsets, group, dtype.itemsize)
    reduced = MessageLayout(layout.slots, None, group, dtype.itemsize)
    for index in range(3):
        full = torch.randn(layout.full_numel, device="cuda", dtype=dtype)
        before = full.clone()
        partials = [torch.randn(slot.numel, device="cuda", dtype=dtype) for slot in layout.slots]
        wanted = [partial.float() for partial in partials]
        out = [torch.empty(slot.numel, device="cuda") for slot in layout.slots]
        with no_waits() if index else nullcontext():  # the first copies indices to the device
            transport.gather(full, gathered, "gather").wait()
            reduction = Reduction(partials, reduced, out, [True] * 3, "reduce")
            transport.reduce_scatter(reduction).wait()
        assert torch.equal(full, before)
        assert all(map(torch.equal, out, wanted))


class Sparse(Model):
    """Two of three blocks are used, in turn."""

    turn = 0

    def forward(self, tokens):
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            x = x if index == self.turn % 3 else block(x)
        self.turn += 1
        return self.head(self.norm(x))


@worlds_in_turn
@pytest.mark.parametrize("build", [Model, Sparse])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_steady_step_on_a_gpu_waits_for_nothing(build, stage):
    module = seeded(build)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer, stage=stage, precision="bf16")
    batches = [batch.to("cuda") for batch in token_batches(6)]
    for step, batch in enumerate(batches):
        with no_waits() if step >= 3 else nullcontext():
            next_token_loss(module, batch).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_whole_steps_whose_messages_go_by_nccl_have_the_bits_of_steps_without(
    stage, looped, monkeypatch
):
    wanted = losses(stage, None)
    monkeypatch.setattr(routes, "LOOPS", True)
    assert torch.equal(losses(stage, None), wanted)


@pytest.mark.parametrize("group", ["none", "one"])
@pytest.mark.parametrize("step", ["cpu", "device"])
def test_weights_that_rest_off_the_gpu_train_there(group, step, request, tmp_path):
    """Alone a rank shows plain tensors, and with a process group DTensors."""
    if group == "one":
        request.getfixturevalue("looped")
    wanted = losses(3, None)
    for where in ("cpu", "disk") if step == "cpu" else ("cpu",):  # it streams from CPU memory
        folder = tmp_path if where == "disk" else None
        offload = onefold.Offload(where, where, step=step, disk=folder)
        torch.testing.assert_close(losses(3, None, offload), wanted, rtol=1e-5, atol=0)


def test_a_state_saved_by_plain_torch_is_stepped_on_a_gpu():
    """torch leaves its step counts on the CPU."""
    plain = seeded(Model)
    before = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    next_token_loss(plain, token_batches()[0]).backward()
    before.step()
    module = seeded(Model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer, stage=2)
    optimizer.load_state_dict(before.state_dict())
    next_token_loss(module, token_batches()[0].to("cuda")).backward()
    optimizer.step()


def test_a_deleted_model_leaves_no_memory_on_the_device():
    losses(3, "bf16")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    losses(3, "bf16")
    assert torch.cuda.memory_allocated() == before
