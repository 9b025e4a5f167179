"""What a message consists of is planned once: the planner counts what units send."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import onefold
from onefold import Wire
from onefold.config import STAGES, stage_of
from onefold.engine import blocked_adam
from onefold.engine.registry import engine_of
from onefold.layout import message_plan
from onefold.layout import messages as layout_messages
from onefold.planner import message_counts as planner_messages
from onefold.planner.memory import forecast
from onefold.planner.message_counts import planned_unit
from onefold.planner.models.gpt import GPT, GPTConfig
from onefold.planner.trace import trace
from onefold.planner.work import UnitWork
from onefold.recipe import Member, Recipe
from onefold.wire.kernels import compiling
from tests.support.planned import most_of
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import worlds_in_turn

SRC = Path(onefold.__file__).parent
SIZES = {"PACK_NBYTES": 64, "SHARE_NBYTES": 1, "ALIGN_NBYTES": 128, "FEW_RANKS": 1}


@pytest.fixture
def fresh_plans() -> Iterator[None]:
    """Plans are cached, and a size is changed here."""
    planner_messages._messages_of.cache_clear()
    yield
    planner_messages._messages_of.cache_clear()


def sent_and_planned(rank, wire):
    """Bytes by collective and the wire's buffers after one step of one unit, and as planned."""
    module = seeded(lambda: nn.Sequential(nn.Linear(67, 129), nn.Linear(129, 67)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    onefold.shard(module, optimizer, stage=1, wire=wire, units=[module])
    recipe = engine_of(module).recipe
    (unit,) = (planned_unit(UnitWork(u.name, u.numel, members=u.members), recipe, rank)
               for u in recipe.units)  # fmt: skip
    module(torch.ones(2, 67)).sum().backward()
    optimizer.step()
    report, messages = onefold.report(module), unit.messages
    sent = {name: report.last_step[name].sent_nbytes for name in ("gather", "reduce_scatter")}
    planned = {"gather": messages.gather.sent, "reduce_scatter": messages.reduce.sent}
    held = sum(usage.peak for usage in report.memory["wire"].values())
    return (sent, held), (planned, sum(messages.gather.buffers) + sum(messages.reduce.buffers))


@worlds_in_turn
@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize("size", [None, *SIZES])
@pytest.mark.parametrize("world_size", [2, 3])
def test_plan_and_run_agree_when_a_size_changes_in_its_one_place(world_size, size, monkeypatch):
    """With exact and with quantized messages, to the byte: sent, and held in buffers."""
    if size is not None:
        room = layout_messages if size == "ALIGN_NBYTES" else message_plan
        monkeypatch.setattr(room, size, SIZES[size])
    for wire in (Wire(), Wire(weights="int8", gradients="int4")):
        for counted, planned in run_ranks(world_size, sent_and_planned, wire):
            assert counted == planned, (wire, size)


def test_a_planned_step_widens_gradients_in_blocks_of_the_size_that_the_kernel_has(monkeypatch):
    with torch.device("meta"):
        module = GPT(GPTConfig(num_layers=1, width=64, num_heads=2, lr=1e-3), 32).bfloat16()
    traced = trace(module, (torch.zeros(1, 32, dtype=torch.int64),))
    monkeypatch.setattr(blocked_adam, "kernel", lambda: None)  # no C kernel was compiled
    for numel in (64, 128):
        monkeypatch.setattr(blocked_adam, "CPU_BLOCK_NUMEL", numel)
        found = forecast(traced, Recipe(stage=stage_of(1), world_size=3))
        assert most_of(found, "staging") == 4 * numel


@pytest.mark.parametrize(("nodes", "local_world_size"), [(3, 1), (1, 3)])
def test_a_hop_of_one_rank_sends_and_holds_nothing(nodes, local_world_size):
    member = Member("w", (300, 300), torch.float32, torch.float32)
    recipe = Recipe(
        stage=STAGES[3], world_size=nodes * local_world_size, local_world_size=local_world_size,
        has_axes=True, wire=Wire(weights="int8", gradients="int8"),
    )  # fmt: skip
    messages = planned_unit(UnitWork("unit", member.numel, members=(member,)), recipe).messages
    inside, between = (messages.gather, messages.reduce), (messages.cross, messages.second_hop)
    for message in inside if local_world_size == 1 else between:
        assert message == planner_messages.NOTHING
    for message in between if local_world_size == 1 else inside:
        assert message.sent > 0
        assert message.buffers


def constants(path: Path) -> set[str]:
    """Names of a module's constants that are written as numbers: `1 << 20`, `64 * 1024`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(map(is_size, ast.walk(node.value))):
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def is_size(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value > 15


def test_the_planner_writes_no_size_of_a_kernel_block_or_message_itself():
    found = {
        f"{path.name}: {name}"
        for path in (SRC / "planner").glob("*.py")
        for name in constants(path)
        if re.search("NBYTES|NUMEL|BLOCK|GROUP|ALIGN", name)
    }
    assert found == {"costs.py: GPU_NBYTES"}, "these are passes over memory, counted"


def test_a_size_of_messages_is_written_in_one_file():
    home = constants(SRC / "layout" / "message_plan.py")
    assert home == set(SIZES)
    rooms = [path for room in ("wire", "planner", "outer") for path in (SRC / room).glob("*.py")]
    assert [path.name for path in rooms if constants(path) & home] == []


def test_kernels_in_c_have_the_numbers_of_torchs_way_from_python():
    text = (SRC / "wire" / "kernels" / "codec.c").read_text()
    for name in compiling.NUMBERS:
        assert re.search(rf"\b{name}\b", text), name
        assert not re.search(rf"#define {name}\b|\b{name} *=[^=]", text), name
