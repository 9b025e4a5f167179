"""Watch the messages of a device: a thread says where ranks are if one does not arrive.

A host waits for no message of a device, and may wait for none with a limit: NCCL then blocks it,
and aborts the communicator at the limit. So each message leaves an event behind, and a thread asks
the events. Where no rank can go on, or the time is up, the thread ends the communicator, so that
the device goes on and the host with it, and the next message raises the reason.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import finalize, ref

import torch
import torch.distributed as dist

from onefold.errors import OnefoldError, WireError
from onefold.tier import accelerator
from onefold.wire.lanes import Lane, PhaseNow
from onefold.wire.roll_call import PATIENCE_S, POLL_S, RollCall, Waiting, time_is_up


@dataclass(frozen=True, slots=True)
class QueuedMessage:
    """One message that the device has yet to complete, and its place among this rank's."""

    mark: accelerator.Event  # the end of the message in its stream
    label: str
    phase: str
    number: int
    thread: int


class DeviceBackend:
    """What the watch asks of the backend that sends a device's messages."""

    def __init__(self, handle: dist.ProcessGroup) -> None:
        self._handle = ref(handle)

    def error(self) -> str:
        """The name of an error that ended its communicator; "" without one."""
        backend, name = self._backend(), "SUCCESS"
        with suppress(RuntimeError, AttributeError):  # of backends that do not tell
            name = name if backend is None else backend.get_error().name
        return "" if name == "SUCCESS" else name

    def end(self) -> None:
        """End the communicator: what waits for its messages goes on."""
        with suppress(RuntimeError):
            if (backend := self._backend()) is not None:
                backend.abort()

    def _backend(self) -> Any:
        handle, kind = self._handle(), accelerator.kind()
        return None if handle is None else handle._get_backend(torch.device(str(kind)))


class DeviceWatch:
    """Watches this rank's messages among the ranks of one group.

    Attributes:
        failure: why no further message can arrive; None while all do.
    """

    def __init__(
        self,
        backend: DeviceBackend,
        roll_call: RollCall,
        phase: PhaseNow,
        name: str,
        time_limit: Callable[[], float],
    ) -> None:
        """`name`: of the group; `time_limit`: returns the seconds after which a rank gives up."""
        self.failure: OnefoldError | None = None
        self.lane = Lane(f"{name}/device", None)
        self._roll_call, self._phase = roll_call, phase
        self._time_limit, self._backend = time_limit, backend
        self._queued: deque[QueuedMessage] = deque()
        self._oldest: QueuedMessage | None = None
        self._since = 0.0  # it became the oldest
        self._has_told = False
        self._quit: threading.Event | None = None  # None: no thread yet

    def note(self, mark: accelerator.Event, label: str, device: torch.device) -> None:
        """A message is queued that ends with `mark`."""
        self.lane.begin()
        thread = threading.get_ident()
        self._queued.append(QueuedMessage(mark, label, self._phase.name, self.lane.issued, thread))
        if self._quit is None:
            self._quit = threading.Event()
            arguments = (ref(self), self._quit, device)
            name = "onefold-device-watch"
            threading.Thread(target=_watch, args=arguments, daemon=True, name=name).start()
            finalize(self, self._quit.set)

    def check(self) -> None:
        """Raise the failure, if there is one."""
        if self.failure is not None:
            raise self.failure

    def look(self) -> None:
        """Forget what has arrived; end the wait for the oldest message if it is hopeless."""
        while self._queued and self._queued[0].mark.query():
            self._queued.popleft()
        oldest = self._queued[0] if self._queued else None
        if oldest is not self._oldest:
            self._oldest, self._since = oldest, time.monotonic()
            if self._has_told:
                self._has_told = False
                self._roll_call.wait_for(None)
        if oldest is not None and self.failure is None:
            self.failure = self._trouble(oldest, time.monotonic() - self._since)
            if self.failure is not None:
                # the host may be inside of the device's driver, where nothing can be raised
                os.write(2, f"onefold: {self.failure}\n".encode())
                self._backend.end()

    def _trouble(self, message: QueuedMessage, waited_s: float) -> OnefoldError | None:
        roll_call = self._roll_call
        if waited_s >= PATIENCE_S:
            place = (message.phase, self.lane.name, message.number, message.thread)
            roll_call.wait_for(Waiting(message.label, *place))
            self._has_told = True
        if roll_call.verdict is not None:
            return WireError(roll_call.no_rank_can_go_on(roll_call.verdict))
        if error := self._backend.error():
            hint = "look for the first error of the other ranks, and for NCCL_DEBUG=WARN"
            got = f"{error} of the backend; before that, ranks were here:\n{roll_call.last_words()}"
            return WireError(f"{message.label} to complete on the device", got, hint=hint)
        if waited_s <= self._time_limit():
            return None
        wanted = f"{message.label} to complete on the device"
        return WireError(time_is_up(wanted, self._time_limit(), roll_call.table))


def _watch(alive: ref[DeviceWatch], quit: threading.Event, device: torch.device) -> None:
    accelerator.use(device)
    while not quit.wait(POLL_S):
        watch = alive()
        if watch is None:
            return
        watch.look()
        del watch
