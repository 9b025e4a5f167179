"""Out of memory: the error says what ran, what is held, and what would need less, once."""

from __future__ import annotations

import errno
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.checkpoint.contents import Contents
from onefold.checkpoint.targets import Targets
from onefold.engine.flat_groups import FlatStep
from onefold.engine.registry import engine_of
from onefold.engine.watch import in_backward
from onefold.errors import TierError
from onefold.layout.ledger import Kind, Ledger
from onefold.unit.shortage import PAGE, explain, explained, is_shortage
from tests.support.fresh import run_scripts
from tests.support.ports import free_port
from tests.support.ranks import every_rank, run_ranks, seeded
from tests.support.rows import worlds_in_turn

SAID = "CUDA out of memory. Tried to allocate 2.00 KiB. made up"
BEGIN = "onefold: out of memory on "


class Blocks(nn.Module):
    """Two blocks, the second of which is computed again in backward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), Hungry()

    def forward(self, x):
        return checkpoint(self.second, self.first(x), use_reentrant=False)


class Hungry(nn.Module):
    """`starves` names the pass that wants more memory than there is."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.starves = ""

    def forward(self, x):
        if self.starves == ("recompute" if in_backward() else "forward"):
            starve()
        if self.starves == "backward":
            x.register_hook(starve)
        return self.inner(x)


class Starved:
    """A transport whose next gather wants more memory than there is."""

    def __init__(self, inner):
        self.inner, self.asked = inner, 0

    def __getattr__(self, name):
        self.asked += name == "gather"
        return starve if name == "gather" and self.asked == 1 else getattr(self.inner, name)


def starve(*_: object, **__: object):
    raise torch.OutOfMemoryError(SAID)


def trained(stage=2, **options):
    """A module with states of one step, and its optimizer."""
    module = seeded(Blocks)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    onefold.shard(module, optimizer, stage=stage, units=[module.first, module.second], **options)
    run(module)
    optimizer.step()
    return module, optimizer


def run(module):
    module(torch.ones(2, 8)).square().sum().backward()


def forward(module, optimizer, folder, patch):
    module.second.starves = "forward"
    module(torch.ones(2, 8))


def gather(module, optimizer, folder, patch):
    gathered = engine_of(module).units[0].gather
    gathered._transport = Starved(gathered._transport)
    module(torch.ones(2, 8))


def recompute(module, optimizer, folder, patch):
    module.second.starves = "recompute"
    run(module)


def step(module, optimizer, folder, patch):
    run(module)
    patch.setattr(FlatStep, "enter", starve)
    optimizer.step()


def closure(module, optimizer, folder, patch):
    module.second.starves = "backward"
    optimizer.step(partial(run, module))


def save(module, optimizer, folder, patch):
    patch.setattr(Contents, "from_models", starve)
    onefold.save(f"{folder}/c", module, optimizer)


def load(module, optimizer, folder, patch):
    onefold.save(f"{folder}/c", module, optimizer)
    patch.setattr(Targets, "deliver", starve)
    onefold.load(f"{folder}/c", module, optimizer)


def unsharded(module, optimizer, folder, patch):
    patch.setattr("onefold.engine.unsharded._show_all", starve)
    with onefold.unsharded(module):
        pass


def layers(module, optimizer, folder, patch):
    onefold.accumulate_layers(module, [torch.ones(2, 8)], starve, order="plain")


PHASES = {
    forward: "in forward of unit 'second'",
    gather: "in forward (gather of unit 'first')",
    recompute: "in recompute of unit 'second'",
    step: "in step",
    closure: "in backward of unit 'second'",
    save: "in onefold.save",
    load: "in onefold.load",
    unsharded: "in onefold.unsharded",
    layers: "after forward",
}


@worlds_in_turn
@pytest.mark.parametrize("fails", PHASES, ids=lambda fails: fails.__name__)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_note_names_the_rank_and_phase_and_holds_the_bytes_of_the_ledger(
    fails, world_size, tmp_path, monkeypatch
):
    def body(rank):
        module, optimizer = trained()
        ledger = engine_of(module).ledger
        dist.barrier()
        with pytest.raises(torch.OutOfMemoryError) as error:
            fails(module, optimizer, tmp_path, monkeypatch)
        return error.value.__notes__, ledger.usage

    with monkeypatch.context():
        for rank, (notes, usage) in enumerate(run_ranks(world_size, body)):
            (note,) = [note for note in notes if note.startswith(BEGIN)]
            first, held, hint = note.splitlines()
            assert first == f"{BEGIN}rank {rank} of {world_size}, {PHASES[fails]}"
            told = dict(re.findall(r"(\w+) ([\d,]+)", held.partition("activations, ")[2]))
            for kind in (Kind.WEIGHT, Kind.OPTIMIZER):
                assert int(told[kind].replace(",", "")) == usage[kind, "device"].now
            assert hint.startswith("hint: ")
            assert hint.endswith("; see docs/guides/out-of-memory.md")


def test_an_error_that_passes_two_seams_is_explained_once_and_as_it_was_at_the_first():
    ledger = Ledger(rank="rank 0 of 1")
    ledger.running[:] = "in forward", "first"
    error = torch.OutOfMemoryError(SAID)
    explain(error, ledger, "gather of unit 'second'")
    ledger.running[:] = "in step", ""
    ledger.add(Kind.GRAD, "device", 5)
    with pytest.raises(torch.OutOfMemoryError) as raised, explained(ledger):
        raise error
    (note,) = raised.value.__notes__
    first, held, _ = note.splitlines()
    assert first == f"{BEGIN}rank 0 of 1, in forward of unit 'first' (gather of unit 'second')"
    assert held == "onefold holds, besides activations, nothing"


def test_the_bytes_of_each_tier_are_said_apart_and_the_others_of_a_device_as_well():
    ledger = Ledger(handed_out=lambda: 100)
    ledger.add(Kind.GRAD, "device", 16)
    ledger.add(Kind.WEIGHT, "device", 64)
    ledger.add(Kind.OPTIMIZER, "cpu", 2048)
    ledger.add(Kind.WEIGHT, "disk", 0)
    assert ledger.describe() == "weight 64, grad 16 bytes on device; optimizer 2,048 bytes on cpu"
    assert ledger.status().endswith("; other tensors, such as activations, 20 bytes")


@pytest.mark.parametrize(
    ("said", "nbytes"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 MiB.", 2 << 20),
        ("CUDA out of memory. Tried to allocate 1.50 GiB.", 3 << 29),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.", 4096),
        ("sim out of memory. Tried to allocate 512 bytes; 8 of 9 are in use.", 512),
        ("no memory", 1),
    ],
)
def test_advice_is_for_the_bytes_that_were_asked_for(said, nbytes):
    asked: list[int] = []
    error = torch.OutOfMemoryError(said)
    explain(error, Ledger(advise=lambda n: asked.append(n) or "a change"))
    assert asked == [nbytes]
    assert "hint: a change; see " in error.__notes__[0]


def test_advice_that_finds_no_memory_itself_hides_no_error():
    def advise(nbytes):
        raise MemoryError

    error = MemoryError("no memory")
    explain(error, Ledger(advise=advise))
    assert "hint: more ranks, a higher stage, or offload; see " in error.__notes__[0]


def test_the_page_that_a_note_names_is_there():
    assert (Path(__file__).parents[2] / PAGE).is_file()


def refused(error, cause=None):
    error.__cause__ = cause
    return error


SHORTAGES = [
    torch.OutOfMemoryError(SAID),
    MemoryError("no memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    refused(TierError("4 bytes", "none", hint="fewer"), RuntimeError("can't allocate memory")),
    refused(TierError("4 bytes", "none", hint="fewer"), refused(TierError("cpu"), MemoryError())),
]
OTHERS = [
    RuntimeError("size mismatch"),
    OSError(errno.ENOSPC, "No space left on device"),
    TierError("4 bytes of disk", "2 free", hint="fewer"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", SHORTAGES + OTHERS, ids=repr)
def test_only_errors_for_want_of_memory_are_explained(error):
    assert is_shortage(error) == (error in SHORTAGES)
    explain(error, Ledger())
    assert len(getattr(error, "__notes__", ())) == (error in SHORTAGES)


@every_rank(2)
def test_a_buffer_that_finds_no_memory_says_all_in_its_error_and_the_phase_in_its_note(rank):
    module, optimizer = trained(stage=3)
    optimizer.zero_grad()
    engine = engine_of(module)
    engine.units[1].unsharded._allocation = SimpleNamespace(restore=starve)
    with pytest.raises(TierError, match=r"on top of what is held: .*weight ") as error:
        module(torch.ones(2, 8))
    (note,) = error.value.__notes__
    first, page = note.splitlines()
    assert first == f"{BEGIN}rank {rank} of 2, in forward (gather of unit 'second')"
    assert page == f"see {PAGE}"


def test_shard_says_that_it_was_shard_and_what_it_held_by_then(monkeypatch):
    held: list[str] = []

    def install(parts, engine, originals):
        held.append(engine.ledger.describe())
        starve()

    monkeypatch.setattr("onefold.compose.build._install", install)
    with pytest.raises(torch.OutOfMemoryError) as error:
        trained()
    first, said, _ = error.value.__notes__[0].splitlines()
    assert first == f"{BEGIN}rank 0 of 1, in onefold.shard"
    assert said == f"onefold holds, besides activations, {held[0]}"
    assert "weight" in said


# one rank alone

SCRIPT = """
import gc, os, sys
import torch, onefold, onefold.checkpoint.save
from onefold.checkpoint.rank_files import RankFiles
from onefold.engine.registry import engine_of
gc.freeze()  # else each of twenty ranks goes over all objects of torch as it ends
ranks = [(*case, rank) for case in CASES for rank in range(case[1])]
for folder, world_size, where, port, rank in ranks:
    if os.fork() == 0:
        break
else:
    for _ in ranks:
        os.wait()
    sys.exit()
os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1")
os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size), MASTER_PORT=str(port))
os.dup2(os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY), 2)
torch.set_num_threads(1)
step = 0

def starve(at, *_):
    if at == where and rank == 1 and step == 1:
        with open(f"{folder}/held", "w") as file:
            file.write(engine_of(model).ledger.describe())
        torch.empty(1 << 60, dtype=torch.uint8)

class Block(torch.nn.Linear):
    def forward(self, x):
        starve("forward")
        x.requires_grad and x.register_hook(lambda _: starve("backward"))
        return super().forward(x)

class Hungry(torch.optim.AdamW):
    def step(self, closure=None):
        starve("step")
        return super().step(closure)

write = RankFiles.write_files
RankFiles.write_files = lambda *args: starve("save") or write(*args)
model = torch.nn.Sequential(Block(8, 8), Block(8, 8))
optimizer = Hungry(model.parameters())
onefold.shard(model, optimizer, stage=3, units=list(model))
for step in range(3):
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    onefold.save(f"{folder}/{step}.d", model, optimizer)
"""
PLACES = {
    "forward": "in forward of unit '0'",
    "backward": "in backward of unit '1'",
    "step": "in step",
    "save": "in onefold.save",
}
CASES = [(where, world_size) for where in PLACES for world_size in (2, 3)]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each rank wrote to stderr, and what the ledger of rank 1 held, by case."""
    folders = {case: str(tmp_path_factory.mktemp(case[0])) for case in CASES}
    cases = [(folders[case], case[1], case[0], free_port()) for case in CASES]
    run_scripts([f"CASES = {cases}\n{SCRIPT}"])
    found = {}
    for case, folder in folders.items():
        texts = [Path(folder, str(rank)).read_text() for rank in range(case[1])]
        assert Path(folder, "held").is_file(), (case, texts)
        found[case] = texts, Path(folder, "held").read_text()
    return found


@worlds_in_turn
@pytest.mark.process
@pytest.mark.parametrize(("where", "world_size"), CASES)
def test_a_rank_alone_without_memory_is_named_by_the_others_which_end(where, world_size, said):
    texts, _ = said[where, world_size]
    for rank in {*range(world_size)} - {1}:
        error = next(line for line in texts[rank].splitlines() if "Error: " in line)
        assert "rank 1" in error, texts[rank]
        assert "can't allocate memory" in error, texts[rank]
        assert BEGIN not in texts[rank]


@worlds_in_turn
@pytest.mark.process
@pytest.mark.parametrize(("where", "world_size"), CASES)
def test_its_own_error_is_explained_once_also_where_torch_alone_raises_it(where, world_size, said):
    texts, held = said[where, world_size]
    assert texts[1].count(BEGIN) == 1, texts[1]
    assert f"{BEGIN}rank 1 of {world_size}, {PLACES[where]}\n" in texts[1]
    assert f"onefold holds, besides activations, {held}\n" in texts[1]
    assert texts[1].index("can't allocate memory") < texts[1].index(BEGIN)
