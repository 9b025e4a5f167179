"""The ranks that take part, and their collectives: of `torch.distributed`, or by lanes.

Values that should be equal travel only where a digest differs: docs/adr/0039.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import methodcaller
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from onefold.compat import NAMES
from onefold.errors import OnefoldError, WireError
from onefold.tier import accelerator
from onefold.wire.digest import StepDigest
from onefold.wire.lanes import ALL_GATHER, ALL_TO_ALL, MAX, Lanes, ReduceOp
from onefold.wire.peers import Peers
from onefold.wire.ticket import Ticket, Waitable
from onefold.wire.watching import DeviceWatch

T = TypeVar("T")

_MADE = WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], object]]()
"""By world: the groups that `Group.over` has made, by backend and ranks."""

MESSAGE, VOTE = "a message to all ranks", "a vote of all ranks"
NOT_BEGUN = "the process group is destroyed, or an earlier collective of it failed"
ENDED = (
    "look for the first error among the other ranks; else one was killed, perhaps for its memory, "
    "or ranks call other collectives"
)


@contextmanager
def named(wanted: str, hint: str = ENDED) -> Iterator[None]:
    """Raise a `WireError` for an error of gloo, NCCL or the store in the block."""
    try:
        yield
    except OnefoldError:
        raise
    except RuntimeError as error:
        raise WireError(wanted, str(error).splitlines()[0], hint=hint) from error


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks among which state is sharded. `handle` is None for a world of one without a group.

    All ranks here are ranks inside the group, not global ones.
    """

    rank: int
    world_size: int
    handle: dist.ProcessGroup | None
    peers: Peers | None = None  # for tensors on the CPU, in place of `handle`
    watch: DeviceWatch | None = None  # over messages of a device, which go by `handle`
    packs: bool = False  # all regions of a message travel as one, in place of where they lie
    local: tuple[int, int] | None = None  # local rank and local world size, of ranks that have met
    digest: StepDigest = field(default_factory=StepDigest, compare=False)  # of what no lane carries

    @staticmethod
    def from_handle(handle: dist.ProcessGroup | None) -> Group:
        if handle is None:
            return Group(0, 1, None)
        return Group(dist.get_rank(handle), dist.get_world_size(handle), handle)

    @staticmethod
    def over(
        ranks: list[int], *, on_cpu: bool = False, known: Sequence[dist.ProcessGroup] = ()
    ) -> Group:
        """The group of these global ranks, this one among them: one of `known`, or made once.

        A collective over these ranks, who all know the same groups. NCCL connects a group at its
        first message (torch 2.13), unless the world is bound to a device: see
        `fit.communicators`.

        `on_cpu`: for tensors in CPU memory, which the backend of the world may not send.
        """
        world = cast("dist.ProcessGroup", dist.group.WORLD)
        lacks_cpu = on_cpu and not _sends_cpu(world)
        if len(ranks) == dist.get_world_size() and not lacks_cpu:
            return Group.from_handle(world)
        if same := [each for each in known if dist.get_process_group_ranks(each) == ranks]:
            return Group.from_handle(same[0])
        backend = "gloo" if splits_world() or lacks_cpu else None
        made, key = _MADE.setdefault(world, {}), (backend, *ranks)
        if key not in made:
            with named(f"ranks {ranks} to begin a group"):
                made[key] = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
        handle = made[key]
        return Group.from_handle(handle if isinstance(handle, dist.ProcessGroup) else None)

    def global_ranks(self) -> list[int]:
        """The ranks as the default process group numbers them, in rank order."""
        return [0] if self.handle is None else dist.get_process_group_ranks(self.handle)

    @property
    def is_nccl(self) -> bool:
        """True if tensors of an accelerator go by NCCL or its like, and not by way of the CPU."""
        if self.handle is None:
            return False
        pairs = [pair.split(":") for pair in dist.get_backend_config(self.handle).split(",")]
        own = dist.Backend.default_device_backend_map
        return any(kind != "cpu" and own.get(kind) == name != "gloo" for kind, name in pairs)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Waitable:
        """Start sending `tensor` of rank `source` into `tensor` of all others, in place."""
        if self.peers is not None and tensor.device.type == "cpu":
            # backends send real numbers
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            return self._begin_work(lambda lanes: lanes.broadcast(real, source))
        return self._issue(
            lambda group: dist.broadcast(tensor, group=group, group_src=source, async_op=True),
            tensor,
        )

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Waitable:
        """Start gathering equal shards in rank order into `out`."""
        if out.is_complex():
            out, shard = torch.view_as_real(out), torch.view_as_real(shard)
        if self.peers is not None and out.device.type == "cpu":
            return self._begin_work(lambda lanes: lanes.all_gather(out, shard))
        return self._issue(methodcaller(NAMES.all_gather, out, shard, ALL_GATHER), out)

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor) -> Waitable:
        """Start summing `full` over the ranks; rank r gets the r-th of equal pieces in `out`."""
        reduce_scatter = getattr(dist, NAMES.reduce_scatter)
        return self._issue(lambda group: reduce_scatter(out, full, group=group, async_op=True), out)

    def all_to_all(
        self, out: torch.Tensor, sent: torch.Tensor, numels_out: list[int], numels_sent: list[int]
    ) -> Waitable:
        """Start sending consecutive pieces of `sent` to ranks 0, 1, ...; `out` likewise.

        Empty lists: pieces of one size.
        """
        if out.is_complex():
            out, sent = torch.view_as_real(out), torch.view_as_real(sent)
        if self.peers is not None and out.device.type == "cpu":
            return self._begin_work(
                lambda lanes: lanes.all_to_all(out, sent, numels_out, numels_sent)
            )
        send = methodcaller(NAMES.all_to_all, out, sent, numels_out, numels_sent, ALL_TO_ALL)
        return self._issue(send, out)

    def begin_one(self, device: torch.device) -> None:
        """Have the backend of a device begin all collectives up to `end_one` as one."""
        if isinstance(self.handle, dist.ProcessGroup):
            self.handle._start_coalescing(device)

    def end_one(self, device: torch.device) -> Waitable:
        """Begin what was called since `begin_one`; the work of all of it."""
        return self._issue(lambda group: group._end_coalescing(device), None)

    def coalesces(self, device: torch.device) -> bool:
        """True if the backend of a device begins several collectives as one."""
        if device.type == "cpu" or not self.is_nccl or self.handle is None:
            return False
        return self.handle._get_backend(device).supports_coalescing

    def track(self, works: list[Waitable], label: str) -> Sequence[Waitable]:
        """The works of one message; with peers as one, which says where ranks are if it waits.

        Works of a device stay as they are: see `QueuedWork`.
        """
        if self.peers is None or not all(isinstance(work, dist.Work) for work in works):
            return works
        return self.peers.track(cast("list[dist.Work]", works), label)

    def agree(self, message: Hashable, label: str, like: torch.Tensor) -> None:
        """Before the first work of a message of tensors such as `like`: see `Peers.agree`.

        Messages that no lane carries are compared at the end of a step: see `compare_logs`.
        """
        if self.peers is not None and like.device.type == "cpu":
            self.peers.agree(message, label)
        elif self.world_size > 1:
            self.digest.log_message(without_rank(label), self, like.device)

    def compare_logs(self, device: torch.device, *, waits: bool) -> None:
        """Raise if ranks began other messages of a device, or one failed: see `StepDigest`.

        A collective. Nothing to do where lanes carry all messages.
        """
        has_lanes = self.peers is not None and device.type == "cpu"
        if self.world_size > 1 and not has_lanes:
            self.digest.compare_logs(self, device, waits=waits)

    def wait(self, work: Waitable, label: str) -> None:
        """Wait for the one work of a message."""
        Ticket(self.track([work], label), label=label).wait()

    def _begin_work(self, start: Callable[[Lanes], dist.Work]) -> dist.Work:
        assert self.peers is not None, "checked by the caller"
        try:
            return start(self.peers.lanes)
        except RuntimeError as error:
            raise self.peers.broken("a collective to start", error) from None

    def _issue(
        self, start: Callable[[dist.ProcessGroup], Waitable | None], out: torch.Tensor | None
    ) -> Waitable:
        work = None
        if isinstance(self.handle, dist.ProcessGroup):
            with named("a collective to start", hint=NOT_BEGUN):
                work = start(self.handle)
        if work is None:
            raise WireError(
                "expected this rank to be in the process group, got no work\n"
                "hint: pass a mesh or group that contains every rank that calls onefold.shard"
            )
        return work if out is not None and out.is_cpu else QueuedWork(work)

    def all_reduce_max(self, tensor: torch.Tensor, label: str = VOTE) -> None:
        """Replace `tensor` by its maximum over the ranks; blocks."""
        self._all_reduce(tensor, MAX, label)

    def total(self, number: int) -> int:
        """The sum of a number over the ranks; blocks."""
        total = torch.tensor([number], device="cpu")
        self._all_reduce(total, dist.ReduceOp.SUM, MESSAGE)
        return int(total)

    def _all_reduce(self, tensor: torch.Tensor, kind: ReduceOp, label: str) -> None:
        if self.peers is not None and tensor.device.type == "cpu":
            self.agree((VOTE, str(kind), tensor.numel()), label, tensor)
            work = self._begin_work(lambda lanes: lanes.all_reduce(tensor, kind))
            self.wait(work, label)
        elif self.handle is not None:
            with named(f"{label} to complete"):
                is_far = tensor.is_cpu and self._lacks_cpu
                near = tensor.to(accelerator.kind() or "cpu") if is_far else tensor
                dist.all_reduce(near, kind, group=self.handle)
                tensor.copy_(near)

    @property
    def _lacks_cpu(self) -> bool:
        """True if the backend sends tensors of devices alone, none in CPU memory."""
        return self.is_nccl and not _sends_cpu(self.handle)

    def all_reduced(self, tensor: torch.Tensor, *, is_max: bool = False) -> torch.Tensor:
        """The sum of `tensor` over the ranks, or its maximum; blocks."""
        total = tensor.clone()
        if self.handle is not None:
            kind = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
            with named("a sum over all ranks to complete"):
                dist.all_reduce(total, kind, group=self.handle)
        return total

    def gather(self, value: T) -> list[T]:
        """Every rank's small `value`, in rank order; blocks. It pickles: for set-up and control.

        Mostly all ranks say the same. One message of 40 bytes compares that, whatever their number;
        values travel where they differ.
        """
        if self.world_size == 1:
            return [value]
        text = pickle.dumps(value)
        digest = torch.frombuffer(
            bytearray(blake2b(text, digest_size=16).digest()), dtype=torch.int64
        )
        facts = torch.cat([digest, ~digest, torch.tensor([len(text)], device="cpu")])
        self.all_reduce_max(facts, MESSAGE)
        *most, longest = facts.tolist()
        if all(first == ~last for first, last in zip(most[:2], most[2:], strict=True)):
            return [value] * self.world_size
        return [pickle.loads(one) for one in self._gather_texts(text, longest)]

    def _gather_texts(self, text: bytes, longest: int) -> list[bytes]:
        """The texts of all ranks; none is longer than `longest`."""
        if self._lacks_cpu:
            return self._by_store(text, range(self.world_size))
        sent = _framed(text, longest)
        received = sent.new_empty(self.world_size * sent.numel())
        self.agree((MESSAGE, sent.numel()), MESSAGE, sent)
        self.wait(self.all_gather(received, sent), MESSAGE)
        return [_unframed(room) for room in received.split(sent.numel())]

    def gather_at_first(self, value: T) -> list[T]:
        """Every rank's `value` on rank 0, nothing on others; blocks. It pickles, as `gather`."""
        if self.world_size == 1:
            return [value]
        text, ranks = pickle.dumps(value), self.world_size
        longest = self._longest(text)
        if self._lacks_cpu:
            texts = self._by_store(text, range(ranks * (self.rank == 0)))
            return [pickle.loads(one) for one in texts]
        sent = _framed(text, longest)
        numel, own = sent.numel(), sent.numel() * (self.rank == 0)
        received = sent.new_empty(own * ranks)
        self.agree((MESSAGE, "to rank 0", numel), MESSAGE, sent)
        work = self.all_to_all(received, sent, [own] * ranks, [numel] + [0] * (ranks - 1))
        self.wait(work, MESSAGE)
        return [pickle.loads(_unframed(room)) for room in received.view(-1, numel)]

    def take_first(self, value: T) -> T:
        """Rank 0's small `value`, on every rank; blocks. It pickles: for set-up and control."""
        if self.world_size == 1:
            return value
        text = pickle.dumps(value) if self.rank == 0 else b""
        longest = self._longest(text)
        if self._lacks_cpu:
            return pickle.loads(self._by_store(text, [0])[0])
        sent = _framed(text, longest)
        self.agree((MESSAGE, sent.numel()), MESSAGE, sent)
        self.wait(self.broadcast(sent, 0), MESSAGE)
        return value if self.rank == 0 else pickle.loads(_unframed(sent))

    def _longest(self, text: bytes) -> int:
        """The length of the longest text of all ranks."""
        length = torch.tensor([len(text)], device="cpu")
        self.all_reduce_max(length, MESSAGE)
        return int(length)

    def _by_store(self, text: bytes, wanted: Sequence[int]) -> list[bytes]:
        """The texts of some ranks, by the store of the group: no object goes over NCCL.

        Texts before are read by now: each call begins with a sum over all ranks.
        """
        store = cast("dist.ProcessGroup", self.handle).get_group_store()
        with named(f"{MESSAGE} to complete"):
            number = store.add(f"onefold/texts/{self.rank}", 1)
            if number > 1:
                store.delete_key(f"onefold/text/{number - 1}/{self.rank}")
            store.set(f"onefold/text/{number}/{self.rank}", text)  # type: ignore[arg-type]
            keys = [f"onefold/text/{number}/{rank}" for rank in wanted]
            return [*map(bytes, store.multi_get(keys))]


def splits_world() -> bool:
    """True if NCCL makes a group by splitting the world's communicator: all ranks take part."""
    world = cast("dist.ProcessGroup", dist.group.WORLD)
    bound = world.bound_device_id
    return bound is not None and world._get_backend(bound).supports_splitting


def _sends_cpu(handle: dist.ProcessGroup | None) -> bool:
    return "cpu:" in dist.get_backend_config(handle)


def _framed(text: bytes, longest: int) -> torch.Tensor:
    """The length of a text in 8 bytes, the text, and zeros up to that of the longest."""
    frame = len(text).to_bytes(8, "little") + text
    return torch.frombuffer(bytearray(frame.ljust(8 + longest, b"\0")), dtype=torch.uint8)


def _unframed(room: torch.Tensor) -> bytes:
    frame = room.numpy().tobytes()
    return frame[8 : 8 + int.from_bytes(frame[:8], "little")]


def without_rank(label: str) -> str:
    """The part of a label that is the same on every rank."""
    return label.partition(" on ")[0]


class QueuedWork:
    """A message on a device: waiting for it makes the current stream wait, never the host.

    It is no `dist.Work`, so that nothing waits for it with a limit: NCCL then blocks the host until
    the message is complete, and aborts the communicator at the limit.
    """

    __slots__ = ("_work",)

    def __init__(self, work: Waitable) -> None:
        self._work = work

    def wait(self) -> object:
        return self._work.wait()

    def is_completed(self) -> bool:
        """See `Waitable.is_completed`; asks the device, without waiting."""
        return self._work.is_completed()
