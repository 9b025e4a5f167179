"""An offloaded step keeps the link to a device busy: the real blocks, on the clocks of a device.

The clocks stand for no measurement: no GPU has run this. They show that nothing in the order of
copies, kernels, waits and launches keeps the link idle.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from onefold.engine import blocks
from onefold.engine.blocks import Segment, UnitStep, reserve_slots
from onefold.engine.rules import rule_of
from onefold.layout.ledger import Kind, Ledger
from onefold.tier import accelerator
from onefold.tier.step_device import NUM_STREAMS, STREAMED_NBYTES, DeviceStep
from onefold.tier.store import Allocation
from onefold.unit.buffer import Buffer
from tests.support.link_model import DEVICE, LinkModel, Machine, ModelWorkers, Places, Stream
from tests.support.rows import again_but

BILLION_1_3 = [103e6, *[50.4e6] * 24]
"""Elements of the units of a GPT of 24 layers of width 2048."""
BILLION_7 = [131e6, *[202.4e6] * 32, 131e6]
"""Those of a Llama of 32 layers of width 4096."""


class MetaStore:
    """Memory of a tier without bytes."""

    device = DEVICE
    is_far = False

    def __init__(self, name: str, model: LinkModel) -> None:
        self.name = name
        self._model = model

    def allocate(self, numel: int, dtype: torch.dtype, *, is_brief: bool = False) -> Allocation:
        tensor = torch.empty(numel, dtype=dtype, device=DEVICE)
        return Allocation(self._model.hosts(tensor) if self.name == "cpu" else tensor)


class OneUnit:
    """What a step asks of a unit: bf16 weights on the device, fp32 states in CPU memory."""

    master: Buffer

    def __init__(self, numel: int, context: SimpleNamespace, stores: dict[str, MetaStore]) -> None:
        def buffer(dtype: torch.dtype, kind: Kind, tier: str) -> Buffer:
            return Buffer(numel, dtype, kind, stores[tier], context.ledger)

        self.name, self.context = "unit", context
        self.weight = buffer(torch.bfloat16, Kind.WEIGHT, "device")
        self.master = buffer(torch.float32, Kind.MASTER, "cpu")
        moments = ("exp_avg", "exp_avg_sq")
        self.moments = {name: buffer(torch.float32, Kind.OPTIMIZER, "cpu") for name in moments}
        self.grad = torch.empty(numel, dtype=torch.bfloat16, device=DEVICE)


@pytest.fixture
def model(monkeypatch):
    model = LinkModel(Machine())
    monkeypatch.setattr(accelerator, "new", lambda device: Stream(model))
    for name in ("current", "record"):
        monkeypatch.setattr(accelerator, name, getattr(model, name))
    monkeypatch.setattr(accelerator, "synchronize", lambda device: None)
    return model


def run(model: LinkModel, numels: list[float]) -> tuple[float, int]:
    """Step units of so many elements; return the share of the link's time, and the blocks."""
    ledger, workers = Ledger(), ModelWorkers(model, NUM_STREAMS)
    stores = {name: MetaStore(name, model) for name in ("device", "cpu")}
    device = DeviceStep(DEVICE, ledger)
    device.places = Places(model, NUM_STREAMS)
    tiers = SimpleNamespace(
        weight=stores["device"], state=stores["cpu"], steppers=workers, step_device=device
    )
    context = SimpleNamespace(store=stores["device"], tiers=tiers, ledger=ledger, where="rank 0")
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.empty(1))])
    rule = rule_of(optimizer, optimizer.param_groups[0])
    steps: list[UnitStep] = []
    for number in numels:
        unit = OneUnit(int(number), context, stores)
        reserve_slots([unit])
        state = {"step": torch.ones(()), **{k: v.tensor for k, v in unit.moments.items()}}
        segment = Segment(0, unit.grad, rule, tuple(unit.moments), state, False, None)
        steps.append(UnitStep(unit, [segment]))
    with workers.running():
        begun, model.host_waits = model.clock(), 0
        for step in steps:
            step.wait()
        seconds = model.clock() - begun
    assert segment.state["step"] == 2
    crossed = STREAMED_NBYTES * sum(map(int, numels))
    assert model.link_nbytes == {"in": crossed, "out": crossed}
    return crossed / model.machine.link / seconds, len(workers.tasks)


@again_but("7 billion")
@pytest.mark.parametrize("numels", [BILLION_1_3, BILLION_7], ids=["1.3 billion", "7 billion"])
def test_a_streamed_step_takes_nine_tenths_of_the_link_with_one_wait_a_block(model, numels):
    share, num_blocks = run(model, numels)
    print(f"\n{share:.3f} of the link, {num_blocks} blocks, {model.host_waits} host waits")
    assert share > 0.9
    assert model.host_waits <= num_blocks


def test_blocks_of_a_cpu_would_leave_the_link_idle(model, monkeypatch):
    monkeypatch.setattr(blocks, "LINK_BLOCK_NUMEL", blocks.BLOCK_NUMEL)
    share, _ = run(model, BILLION_1_3[:2])
    assert share < 0.8
