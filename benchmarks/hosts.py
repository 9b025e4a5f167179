"""A few hosts on one machine: network namespaces behind a switch, their links slowed to a rate.

    with Hosts(2, rate="1gbit") as hosts:
        hosts.torchrun("-m", "onefold", "train", ranks=2)
        print([host.counters() for host in hosts])

Each host has its own loopback, its own `eth0` with an address in 10.77.0.0/24, and its own sockets;
processes share cores, memory and files. What ranks of one host say to each other goes through the
kernel's loopback `lo`, what they say to another host through `eth0`: the two counters of a host are
the bytes inside and between. Everything is inside namespaces, so that removing those leaves
nothing. Needs root and iproute2 (`ip`, `tc`).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

INTERFACE = "eth0"
PORT = 29500
"""Where rank 0 keeps the store; free on every fresh host."""

LATENCY = "50ms"
"""A packet that would wait longer in a slowed link is dropped, as a switch would."""

MIN_BURST_NBYTES = 128 * 1024
"""A link lets so much pass at once at least: the kernel hands over segments of up to 64 KiB."""

BURST_S = 0.002
"""With both, one TCP stream carries 119 MB/s at "1gbit" and 12 MB/s at "100mbit", headers apart."""

_NAME = re.compile(r"onefold-(\d+)-\w+")
_RATE = re.compile(r"(\d+)([kmg])bit")
_STOPS = (signal.SIGTERM, signal.SIGHUP)


class HostsError(RuntimeError):
    """The system refused a namespace, a link or a rate."""


@dataclass(frozen=True, slots=True)
class Counted:
    """What an interface has carried since it was made; headers of Ethernet, IP and TCP included."""

    sent_nbytes: int
    sent_packets: int
    received_nbytes: int
    received_packets: int

    def __sub__(self, before: Counted) -> Counted:
        return Counted(
            self.sent_nbytes - before.sent_nbytes,
            self.sent_packets - before.sent_packets,
            self.received_nbytes - before.received_nbytes,
            self.received_packets - before.received_packets,
        )


@dataclass(frozen=True, slots=True)
class Counters:
    """A host's traffic with other hosts, and between its own processes."""

    between: Counted
    inside: Counted

    def __sub__(self, before: Counters) -> Counters:
        return Counters(self.between - before.between, self.inside - before.inside)


@dataclass(frozen=True, slots=True)
class Ended:
    """One host's share of a run: exit code and what was written."""

    code: int
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace; `index` counts from 0."""

    name: str
    index: int
    address: str

    @property
    def environment(self) -> dict[str, str]:
        """What libraries need to be told here: which interface leads to the others, few threads."""
        return {
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
        }

    def popen(
        self, command: Sequence[str], env: Mapping[str, str | None] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a command on this host, in a session of its own; `options` are those of Popen.

        `env` is laid over this process's environment and the host's; None takes a variable away.
        """
        merged = {**os.environ, **self.environment, **(env or {})}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            env={name: value for name, value in merged.items() if value is not None},
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            **options,
        )

    def counters(self) -> Counters:
        """Bytes and packets since the host was made, from its /proc/net/dev."""
        table = _run("ip", "netns", "exec", self.name, "cat", "/proc/net/dev")
        rows = dict(line.split(":", 1) for line in table.splitlines()[2:])
        rows = {name.strip(): [int(each) for each in row.split()] for name, row in rows.items()}

        def counted(name: str) -> Counted:
            row = rows[name]  # received: bytes, packets, six more; then the same of sent
            return Counted(row[8], row[9], row[0], row[1])

        return Counters(counted(INTERFACE), counted("lo"))


class Hosts:
    """`count` hosts while entered; `rate` ("1gbit", "100mbit") limits each direction of each link.

    Processes that are left in them are killed at the end, which comes with the block, an exception,
    SIGINT, SIGTERM or SIGHUP. After SIGKILL the next use cleans up. Raises `HostsError`.
    """

    def __init__(self, count: int, rate: str | None = None) -> None:
        prefix = f"onefold-{os.getpid()}-"
        self._switch = f"{prefix}switch"
        self._rate = rate
        self._hosts = [Host(f"{prefix}{k}", k, f"10.77.0.{k + 1}") for k in range(count)]
        self._runs: list[_Run] = []
        self._before: dict[int, Any] = {}

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    def __enter__(self) -> Hosts:
        why = refusal()
        if why is not None:
            raise HostsError(why)
        remove_stale()
        if threading.current_thread() is threading.main_thread():
            self._before = {stop: signal.signal(stop, _raise_exit) for stop in _STOPS}
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill what still runs on the hosts, and remove them."""
        ignored = {}
        if self._before:  # a second request must not stop half-way
            ignored = {s: signal.signal(s, signal.SIG_IGN) for s in (*_STOPS, signal.SIGINT)}
        for name in (*(host.name for host in self._hosts), self._switch):
            remove(name)
        for run in self._runs:
            run.close()
        self._runs = []
        for stop, handler in {**ignored, **self._before}.items():
            signal.signal(stop, handler)
        self._before = {}

    def torchrun(
        self,
        *arguments: str,
        ranks: int,
        env: Mapping[str, str | None] | None = None,
        timeout_s: float = 120,
        on_line: Callable[[str], None] | None = None,
    ) -> list[Ended]:
        """The same command on every host, up to its end on all of them.

        `ranks` is processes per host. `on_line` is called, in a thread, with each line that host 0
        writes. Raises `TimeoutError`, with the last lines of each host, if any of them hangs.
        """
        runs = [
            _Run(host, self.command(host, *arguments, ranks=ranks), env,
                 on_line if host.index == 0 else None)
            for host in self
        ]  # fmt: skip
        self._runs += runs
        deadline = time.monotonic() + timeout_s
        while any(run.process.poll() is None for run in runs):
            if time.monotonic() > deadline:
                raise TimeoutError(_hanging(runs, timeout_s))
            time.sleep(0.05)
        return [run.ended() for run in runs]

    def command(self, host: Host, *arguments: str, ranks: int) -> list[str]:
        """What a user types on a host: where host 0 is, and which host this one is."""
        where = ["--master-addr", self[0].address, "--master-port", str(PORT)]
        place = ["--nnodes", str(len(self)), "--node-rank", str(host.index), *where]
        return ["torchrun", *place, "--nproc-per-node", str(ranks), *arguments]

    def _build(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "switch", "up")
        for host in self:
            port = f"port{host.index}"
            _run("ip", "netns", "add", host.name)
            _run("ip", "link", "add", INTERFACE, "netns", host.name, "type", "veth",
                 "peer", "name", port, "netns", self._switch)  # fmt: skip
            _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            _run("ip", "-n", self._switch, "link", "set", port, "master", "switch")
            for name, device in ((host.name, "lo"), (host.name, INTERFACE), (self._switch, port)):
                _run("ip", "-n", name, "link", "set", device, "up")
            if self._rate is not None:
                slow_down(host.name, INTERFACE, self._rate)
                slow_down(self._switch, port, self._rate)


class _Run:
    """One host's process, and what it writes."""

    def __init__(
        self,
        host: Host,
        command: list[str],
        env: Mapping[str, str | None] | None,
        on_line: Callable[[str], None] | None,
    ) -> None:
        self.host = host
        self._on_line = on_line
        self._lines: list[str] = []
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the run
        # the torchrun of this Python, wherever PATH leads
        command = [str(Path(sys.executable).with_name("torchrun")), *command[1:]]
        self.process = host.popen(command, env, stdout=subprocess.PIPE, stderr=self._errors)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            if self._on_line is not None:
                self._on_line(line.rstrip("\n"))

    def ended(self) -> Ended:
        """What came of it, once the process has ended."""
        self._reader.join(5)
        return Ended(self.process.returncode, "".join(self._lines), self.written())

    def written(self) -> str:
        """Its standard error so far."""
        self._errors.seek(0)
        return self._errors.read()

    def close(self) -> None:
        """Let go of what the process has left; it has been killed."""
        self.process.wait()
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()


def refusal() -> str | None:
    """Why hosts cannot be made here, in one line; None if they can."""
    hint = "hint: run as root on Linux, with the package iproute2 installed"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"expected the commands ip and tc, got no {' and no '.join(missing)}; {hint}"
    name = f"onefold-{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "del", name)
    except HostsError as error:
        return f"expected to make a network namespace, got: {error}; {hint}"
    return None


def slow_down(namespace: str, device: str, rate: str) -> None:
    """Let `device` send no faster than `rate`, through a token bucket (tc-tbf)."""
    burst = max(MIN_BURST_NBYTES, int(bits_per_s(rate) / 8 * BURST_S))
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf",
         "rate", rate, "burst", str(burst), "latency", LATENCY)  # fmt: skip


def bits_per_s(rate: str) -> float:
    """`rate` as a number. Raises `HostsError` for anything but "100mbit" and the like."""
    match = _RATE.fullmatch(rate)
    if match is None:
        raise HostsError(f'expected a rate such as "100mbit" or "1gbit", got {rate!r}')
    return int(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def names() -> list[str]:
    """Namespaces of this file, of any process."""
    lines = _run("ip", "netns", "list").splitlines()
    return [line.split()[0] for line in lines if _NAME.fullmatch(line.split()[0])]


def remove_stale() -> None:
    """Remove the hosts of processes that are gone."""
    for name in names():
        match = _NAME.fullmatch(name)
        if match is not None and not Path("/proc", match[1]).exists():
            remove(name)


def remove(name: str) -> None:
    """Kill every process of a namespace, and remove it; nothing if it is not there."""
    if not Path("/run/netns", name).exists():
        return
    deadline = time.monotonic() + 60
    while (pids := _run("ip", "netns", "pids", name).split()) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)
    _run("ip", "netns", "del", name)


def _hanging(runs: Sequence[_Run], timeout_s: float) -> str:
    told = [f"expected every host to end within {timeout_s:g} s"]
    for run in runs:
        code = run.process.poll()
        state = "still runs" if code is None else f"ended with {code}"
        last = run.written().splitlines()[-5:]
        told.append("\n    ".join([f"host {run.host.index} {state}", *last]))
    return "\n".join(told)


def _raise_exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _run(*command: str) -> str:
    """The output of a short command. Raises `HostsError` with what it complained about."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    except FileNotFoundError as error:
        raise HostsError(f"{command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        raise HostsError(f"`{shlex.join(command)}`: {said[-1]}") from error
    return done.stdout
