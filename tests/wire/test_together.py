"""If one rank raises, all raise: whatever it is, by name, and long before the timeout."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from onefold.checkpoint import contents, save, targets
from onefold.checkpoint.checked_files import BlockWriter
from onefold.checkpoint.rank_files import RankFiles
from onefold.engine.registry import engine_of
from onefold.errors import CheckpointError, ConfigError, OnefoldError, TierError, WireError
from onefold.mixed import resharing
from onefold.wire import lanes
from onefold.wire import together as together_room
from onefold.wire.collectives import Group
from onefold.wire.together import collect, first, same, together
from tests.support.ports import free_port
from tests.support.ranks import run_processes, run_ranks
from tests.support.rows import again_but

LIMIT_S = 2.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
"""Two seconds on a machine that is not busy; ranks otherwise wait for minutes."""
ERRORS = [MemoryError, KeyboardInterrupt, ValueError, OSError, RuntimeError, GeneratorExit]


def outcome(act):
    """The error that `act` raises, and the seconds until then."""
    begun = time.monotonic()
    try:
        act()
    except BaseException as error:
        return error, time.monotonic() - begun
    return None, time.monotonic() - begun


def check(outcomes, bad, error, kind, message="on purpose"):
    """Rank `bad` has raised its own error, and the others a `kind` that names it."""
    for rank, (found, seconds) in enumerate(outcomes):
        assert seconds < LIMIT_S, (rank, seconds)
        if rank == bad:
            assert type(found) is error, (rank, found)
        else:
            assert type(found) is kind, (rank, found)
            assert f"rank {bad}: " in str(found)
            assert message in str(found)
            assert issubclass(error, OnefoldError) or error.__name__ in str(found)


def world() -> Group:
    return Group.from_handle(dist.group.WORLD)


def fail(error, rank, bad, value=None):
    if rank == bad:
        raise error("on purpose")
    return value


# the primitive


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("error", [*ERRORS, SystemExit, TierError, ConfigError])
def test_an_error_of_one_rank_of_any_class_is_raised_by_all(size, error):
    bad = size - 1
    runs = run_ranks(
        size, lambda rank: outcome(lambda: together(world(), lambda: fail(error, rank, bad)))
    )
    check(runs, bad, error, error if issubclass(error, OnefoldError) else WireError)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_first_rank_decides_for_all_and_its_failure_is_theirs(size):
    def body(rank):
        values = first(world(), lambda: ["from", rank]), collect(world(), lambda: rank)
        return values, outcome(lambda: first(world(), lambda: fail(ValueError, rank, 0)))

    runs = run_ranks(size, body)
    for values, _ in runs:
        assert values == (["from", 0], list(range(size)))
    check([found for _, found in runs], 0, ValueError, WireError)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_rank_with_other_facts_is_named_with_its_first_difference(size):
    def body(rank):
        def compare(facts):
            return same(world(), lambda: facts, "facts", hint="none", kind=ConfigError)

        assert compare(["one", "two"]) == [["one", "two"]] * size
        return outcome(lambda: compare(["one", "two" if rank < size - 1 else "three"]))

    runs = run_ranks(size, body)
    if size == 1:
        assert runs[0][0] is None
        return
    for rank, (error, _) in enumerate(runs):
        last = size - 1
        told = (rank, "two", last, "three") if rank < last else (last, "three", 0, "two")
        number, own, other_rank, other = told
        wanted = f"got {own!r} on rank {number} but {other!r} on rank {other_rank}"
        assert isinstance(error, ConfigError)
        assert wanted in str(error)


def test_ranks_of_another_axis_hear_of_an_error_from_those_that_share_one():
    def body(rank):
        rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        axes = [Group.from_handle(rows[rank // 2]), Group.from_handle(columns[rank % 2])]
        return outcome(lambda: together(axes, lambda: fail(ValueError, rank, 1), ConfigError))

    check(run_ranks(4, body), 1, ValueError, ConfigError)


# the calls


def module_of(_: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    return module, torch.optim.AdamW(module.parameters())


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("error", [TypeError, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["shard", "stream"])
def test_code_of_the_user_that_raises_on_one_rank_ends_shard_and_stream(size, error, call):
    bad = size - 1

    class Word(str):
        __hash__ = str.__hash__

        def __eq__(self, other):
            raise error("on purpose")

    def body(rank):
        module, _ = module_of(rank)
        if call == "shard":
            units = lambda part: fail(error, rank, bad, value=False)
            return outcome(lambda: onefold.shard(module, units=units))
        rest = Word("int8") if rank == bad else "int8"
        return outcome(lambda: onefold.stream(module, rest=rest))

    check(run_ranks(size, body), bad, error, ConfigError)


class Torn:
    """State of the user's that cannot be saved."""

    def __init__(self, error):
        self.error = error

    def state_dict(self):
        raise self.error("on purpose")


STRETCHES = {
    "save: collect": (contents.Contents, "from_models", MemoryError),
    "save: facts": (contents, "fingerprints", ValueError),
    "save: write": (RankFiles, "write_files", OSError),
    "save: files": (save.RankFiles, "seal_files", KeyboardInterrupt),
    "load: files": (targets.Targets, "read_values", RuntimeError),
    "load: names": (targets.Targets, "_compare_groups", KeyboardInterrupt),
    "load: finish": (targets.Targets, "deliver", MemoryError),
    "reshare: shares": (resharing, "weights_of", TypeError),
    "reshare: notes": (resharing._Ready, "notes", KeyboardInterrupt),
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("stretch", STRETCHES)
def test_a_rank_that_fails_between_messages_ends_the_others_by_name(
    size, stretch, tmp_path, monkeypatch
):
    owner, name, error = STRETCHES[stretch]
    call = stretch.partition(":")[0]
    if call == "reshare" and size == 1:
        pytest.skip("a rank alone has nothing to move")
    gate = {"is_open": False}
    before = getattr(owner, name)

    def gated(*args: Any, **options: Any) -> Any:
        if gate["is_open"] and dist.get_rank() == size - 1:
            raise error("on purpose")
        return before(*args, **options)

    monkeypatch.setattr(owner, name, gated)

    def body(rank):
        module, optimizer = module_of(rank)
        onefold.shard(module, optimizer)
        onefold.save(tmp_path / "first", module, optimizer)
        dist.barrier()
        gate["is_open"] = True
        act = {
            "save": lambda: onefold.save(tmp_path / "second", module, optimizer),
            "load": lambda: onefold.load(tmp_path / "first", module, optimizer),
            "reshare": lambda: onefold.mixed.reshare(module, [1, *[2] * (size - 1)]),
        }[call]
        return outcome(act)

    runs = run_ranks(size, body)
    own = CheckpointError if error is OSError else error
    kind = WireError if call == "reshare" else CheckpointError
    if call == "reshare" and error is TypeError:
        kind = ConfigError
    check(runs, size - 1, own, kind)
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_amid_a_file_is_raised_itself_not_what_its_archive_makes_of_it(
    error, tmp_path, monkeypatch
):
    """torch's archive closes after it, and fails for the bytes that are missing."""
    before, parts = BlockWriter.write_checked, []

    def gated(self, data):
        if dist.get_rank() == 1 and len(data) < 200:  # parts of an archive
            parts.append(data)
            if len(parts) == 3:
                raise error("on purpose")
        return before(self, data)

    monkeypatch.setattr(BlockWriter, "write_checked", gated)

    def body(rank):
        module, optimizer = module_of(rank)
        onefold.shard(module, optimizer)
        return outcome(lambda: onefold.save(tmp_path / "torn", module, optimizer))

    check(run_ranks(2, body), 1, error, CheckpointError)
    assert not (tmp_path / "torn").exists()


def test_a_save_in_the_handler_of_another_error_fails_with_its_own(tmp_path, monkeypatch):
    """As scripts do that save before they end: the error they handle is not the one of the save."""

    def failing(*_):
        raise RuntimeError("on purpose")

    monkeypatch.setattr(BlockWriter, "write_checked", failing)

    def body(rank):
        module, optimizer = module_of(rank)
        onefold.shard(module, optimizer)
        try:
            raise ZeroDivisionError("the script's own")
        except ZeroDivisionError:
            return outcome(lambda: onefold.save(tmp_path / "torn", module, optimizer))

    for error, _ in run_ranks(1, body):
        assert isinstance(error, RuntimeError)
        assert "on purpose" in str(error)


def test_a_save_that_one_rank_could_not_prepare_leaves_the_group_in_step(tmp_path):
    def body(rank):
        module, optimizer = module_of(rank)
        onefold.shard(module, optimizer)
        extra = Torn(ZeroDivisionError) if rank == 1 else None
        found = outcome(lambda: onefold.save(tmp_path / "a", module, optimizer, extra=extra))
        onefold.save(tmp_path / "a", module, optimizer)
        onefold.load(tmp_path / "a", module, optimizer)
        return found

    check(run_ranks(3, body), 1, ZeroDivisionError, CheckpointError)


# between messages that have no place for an error: real processes


class Reset(nn.Linear):
    """Its values are made unit by unit, between the messages of other units."""

    error: type[BaseException] | None = None

    def reset_parameters(self):
        if self.error is not None and dist.is_initialized() and not self.weight.is_meta:
            raise self.error("on purpose")
        super().reset_parameters()


def fails_in_shard(rank: int, world_size: int, error: type[BaseException]) -> None:
    with torch.device("meta"):
        module = nn.Sequential(*(Reset(6, 6) for _ in range(4)))
    if rank == 1:
        module[2].error = error
    found = outcome(lambda: onefold.shard(module, units=list(module)))
    check([found], 0, error, error) if rank == 1 else check_other(found, error, WireError)


def check_other(found, error, kind):
    raised, seconds = found
    assert type(raised) is kind, raised
    assert f"rank 1: {error.__name__}: on purpose" in str(raised)
    assert seconds < LIMIT_S, seconds


@pytest.mark.process
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_rank_that_fails_among_the_messages_of_shard_ends_those_that_wait(error):
    run_processes(3, fails_in_shard, 3, error)


def fails_in_reshare(rank: int, folder: str) -> None:
    module, optimizer = module_of(rank)
    onefold.shard(module, optimizer)
    if rank == 1:
        resharing.move = lambda *_: fail(MemoryError, 0, 0)
    found = outcome(lambda: onefold.mixed.reshare(module, [1, 2, 1]))
    check([found], 0, MemoryError, MemoryError) if rank == 1 else check_other(
        found, MemoryError, WireError
    )


@pytest.mark.process
def test_a_rank_that_fails_among_the_messages_of_reshare_ends_those_that_wait(tmp_path):
    run_processes(3, fails_in_reshare, str(tmp_path))


def refuses(rank: int) -> None:
    """Rank 1 is given what no rank can take, or fails where the others gather."""
    module, optimizer = module_of(rank)
    for wrong in ({"mesh": "pp"}, {"timeout": -1}):
        arguments = wrong if rank == 1 else {}
        raised, seconds = outcome(lambda: onefold.shard(module, optimizer, **arguments))
        assert seconds < LIMIT_S, seconds
        assert type(raised) is ConfigError, raised
        assert rank == 1 or f"rank 1: expected {next(iter(wrong))} to be" in str(raised)
    onefold.shard(module, optimizer)  # the same objects, in step again
    if rank == 1:
        engine_of(module).note_structure = lambda: fail(MemoryError, 0, 0)
    raised = outcome(lambda: onefold.unsharded(module).__enter__())
    check([raised], 0, MemoryError, MemoryError) if rank == 1 else check_other(
        raised, MemoryError, WireError
    )


@pytest.mark.process
def test_a_rank_that_fails_before_ranks_meet_or_in_unsharded_ends_those_that_wait():
    run_processes(3, refuses)


def fails_while_it_connects(rank, error):
    """Rank 1, before its first connection, between two of them and after the last."""
    search = lanes._sockets
    for number in range(1, 6):
        calls = []

        def counted(number=number, calls=calls):
            calls.append(0)
            return fail(error, rank, 1 if len(calls) == number else -1, search())

        lanes._sockets = counted
        found = outcome(lambda: onefold.shard(nn.Linear(8, 8)))
        if rank == 1:
            check([found], 0, error, error)
        else:
            check_other(found, error, WireError)
    lanes._sockets = search
    onefold.shard(nn.Linear(8, 8))  # in step again


@again_but("KeyboardInterrupt")
@pytest.mark.process
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_rank_that_fails_while_it_connects_ends_those_that_wait(error):
    run_processes(3, fails_while_it_connects, error)


# ranks that have not met: no roll call tells who has ended


CALLS: dict[str, Any] = {
    "gather": lambda: world().gather(1),
    "sum": lambda: world().all_reduced(torch.ones(1)),
    "vote": lambda: world().all_reduce_max(torch.ones(1)),
    "weigh": lambda: onefold.weigh(torch.ones(()), 3),
}


def loses_a_rank(rank, call, port):
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    if rank == 0:  # which holds the store
        dist.barrier()
        os._exit(0)
    dist.barrier()
    time.sleep(0.5)
    for act in (CALLS[call], lambda: onefold.shard(nn.Linear(8, 8))):
        found, seconds = outcome(act)
        assert type(found) is WireError, found
        assert "expected " in str(found)
        assert "hint: " in str(found)
        assert seconds < LIMIT_S
    os._exit(0)  # the barrier after a body would wait for rank 0


@pytest.mark.process
@pytest.mark.parametrize("call", CALLS)
def test_a_lost_rank_is_a_named_error_also_among_ranks_that_have_not_met(call):
    run_processes(2, loses_a_rank, call, free_port())


def refuse_in_turn(rank, folder):
    """Rank 0 refuses the first call and is in the second before rank 1 has begun the first."""
    together_room.LINGER_S = 0.0
    module, store = nn.Linear(2, 2), dist.group.WORLD.get_group_store()
    if rank == 0:
        with pytest.raises(ConfigError, match="timeout to be"):
            onefold.shard(module, timeout=-7)
        store.set("first is over", "1")
        with pytest.raises(OnefoldError, match=r"rank 1: .*timeout to be .* -9"):
            onefold.shard(module, timeout=60)
    else:
        store.wait(["first is over"])
        while not store.add("onefold/1/call/here", 0):  # rank 0 waits in its second call
            time.sleep(0.01)
        with pytest.raises(OnefoldError, match=r"rank 0: .*timeout to be .* -7"):
            onefold.shard(module, timeout=60)
        with pytest.raises(ConfigError, match="timeout to be"):
            onefold.shard(module, timeout=-9)


@pytest.mark.process
def test_a_refusal_ends_with_its_call_also_for_a_rank_that_comes_late(tmp_path):
    run_processes(2, refuse_in_turn, str(tmp_path), timeout_s=60)
