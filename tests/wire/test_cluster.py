"""Several hosts: real links between namespaces, torchrun on each, and the counters of both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import cluster
import pytest
from cluster import Mark, per_step, table
from hosts import Counted, Counters, Hosts, HostsError, bits_per_s, names, refusal

from tests.support.commands import onefold
from tests.support.forking import HANG_S
from tests.support.rows import again_but

CLUSTER = Path(cluster.__file__)
JOB = ("--model", "tiny", "--steps", "3", "--batch", "1", "--seq", "16", "--sample", "0", "--json")
UNTOLD = cluster.UNTOLD


@pytest.fixture(scope="module")
def permitted():
    why = refusal()
    if why is not None:
        pytest.skip(why)


def counters(between, inside):
    return Counters(Counted(between, 1, 0, 0), Counted(inside, 1, 0, 0))


def test_bytes_of_a_step_are_those_between_the_first_and_the_last_line_that_tells_of_one():
    marks = [
        Mark(10, [counters(1000, 5), counters(2000, 7)]),
        Mark(20, [counters(1500, 9), counters(2000, 9)]),
        Mark(30, [counters(1600, 25), counters(2300, 7)]),
    ]
    counted = per_step(marks)
    assert (counted.first, counted.last) == (10, 30)
    assert counted.between == (600 + 300) / 20
    assert counted.inside == (20 + 0) / 20
    assert "+15.0%" in table(counted, 40)[2]
    assert per_step(marks[:1]) is None


def test_a_rate_is_a_number_of_bits_per_second():
    assert bits_per_s("1gbit") == 1e9
    assert bits_per_s("100mbit") == 1e8
    for wrong in ("fast", "1 gbit", "100mb", ""):
        with pytest.raises(HostsError, match="expected a rate"):
            bits_per_s(wrong)


def test_without_iproute2_the_command_says_so_in_one_line_and_exits_with_2():
    done = subprocess.run(
        [sys.executable, str(CLUSTER)],
        env={**os.environ, "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "got no ip and no tc" in done.stderr
    assert "hint:" in done.stderr


pytestmark = pytest.mark.process


@pytest.mark.again(
    "tests/wire/test_axes_processes.py::test_processes_have_the_bits_of_threads_under_every_kind_of_wire"
)
def test_two_hosts_train_to_the_bits_of_one_and_their_counters_tell_what_went_where(permitted):
    alone = onefold("train", "--ranks", "4", *JOB)
    assert alone.returncode == 0, alone.stderr
    with Hosts(2, "1gbit") as hosts:
        before = [host.counters() for host in hosts]
        ended = hosts.torchrun(
            "-m", "onefold", "train", *JOB, ranks=2, env=UNTOLD, timeout_s=HANG_S
        )
        sent = [host.counters() - then for host, then in zip(hosts, before, strict=True)]
    assert [each.code for each in ended] == [0, 0], ended[0].err + ended[1].err
    assert ended[1].out == ""  # rank 0 speaks for all
    told, wanted = json.loads(ended[0].out), json.loads(alone.stdout)
    assert told["ranks"] == 4
    assert told["losses"] == wanted["losses"]
    assert told["held_out"] == wanted["held_out"]
    # stage 3 sends 3 (N - 1) / N of the model a step from each of N ranks; some of it stays inside
    model_nbytes = 4 * told["num_parameters"]
    between = sum(each.between.sent_nbytes for each in sent)
    inside = sum(each.inside.sent_nbytes for each in sent)
    assert between + inside > 3 * 3 * 3 * model_nbytes
    assert between > inside > model_nbytes
    received = sum(each.between.received_nbytes for each in sent)
    assert received == pytest.approx(between, rel=0.01)
    assert not any(name.startswith(f"onefold-{os.getpid()}-") for name in names())


def test_each_direction_of_each_link_has_the_rate_and_each_host_addresses_of_its_own(permitted):
    with Hosts(3, "100mbit") as hosts:
        for host in hosts:
            said = subprocess.check_output(["tc", "-n", host.name, "qdisc"], text=True)
            assert "tbf" in said
            assert "rate 100Mbit" in said
            shown = host.popen(["cat", "/proc/net/fib_trie"], stdout=subprocess.PIPE)
            assert host.address in shown.communicate()[0]
        switch = hosts[0].name.rpartition("-")[0] + "-switch"
        said = subprocess.check_output(["tc", "-n", switch, "qdisc"], text=True)
        assert said.count("rate 100Mbit") == 3


def test_a_run_that_hangs_is_an_error_that_names_the_hosts_and_leaves_no_process(permitted):
    with Hosts(2) as hosts:
        with pytest.raises(TimeoutError) as caught:
            hosts.torchrun("--no-python", "sleep", "1000", ranks=1, timeout_s=10)
        assert "host 0 still runs" in str(caught.value)
        found = [subprocess.check_output(["ip", "netns", "pids", h.name]).split() for h in hosts]
        assert all(found)
    assert are_gone(pid.decode() for pids in found for pid in pids)


def are_gone(pids: Iterable[str]) -> bool:
    """True once they have ended, and the init process has seen it; it may be busy."""
    left, deadline = list(pids), time.monotonic() + HANG_S
    while (left := [pid for pid in left if Path("/proc", pid).exists()]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.05)
    return not left


def test_hosts_of_a_process_that_is_gone_are_removed_by_the_next(permitted):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stale = f"onefold-{gone.pid}-0"
    subprocess.run(["ip", "netns", "add", stale], check=True)
    sleeper = subprocess.Popen(["ip", "netns", "exec", stale, "sleep", "1000"])
    with Hosts(1) as hosts:
        assert stale not in names()
        assert hosts[0].name in names()
    assert sleeper.wait(HANG_S) == -signal.SIGKILL


def test_an_exception_and_a_rate_that_is_none_leave_nothing_behind(permitted):
    with pytest.raises(ZeroDivisionError), Hosts(2) as hosts:
        1 / len([host for host in hosts if host.index > 7])
    with pytest.raises(HostsError, match="expected a rate"), Hosts(2, "swift"):
        pass
    assert not any(name.startswith(f"onefold-{os.getpid()}-") for name in names())


def heed_interrupts() -> None:
    """A suite that runs in a shell's background ignores SIGINT, and all that it starts would."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@again_but("2")
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_the_command_ends_with_the_signal_and_takes_its_hosts_and_ranks_with_it(
    permitted, tmp_path, stop
):
    flags = ["--ranks", "1", "--report", str(tmp_path), "--steps", "999999"]
    with subprocess.Popen(
        [sys.executable, str(CLUSTER), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=heed_interrupts,
    ) as process:
        try:
            assert process.stdout is not None
            assert any(line.startswith("999,999 steps") for line in process.stdout)
            own = [name for name in names() if name.startswith(f"onefold-{process.pid}-")]
            assert len(own) == 3
            found = [subprocess.check_output(["ip", "netns", "pids", n], text=True) for n in own]
            ranks = [pid for pids in found for pid in pids.split()]
            assert len(ranks) == 4  # torchrun and its rank, twice
            process.send_signal(stop)
            assert process.wait(HANG_S) == 128 + stop
        finally:
            process.terminate()
    assert are_gone(ranks)
    assert not set(own) & set(names())
