"""gloo listens where the other hosts can reach this one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from onefold.errors import ConfigError
from onefold.wire import interfaces
from onefold.wire.interfaces import GLOO, addresses, choose, own_address_towards, use_link_to_hosts
from tests.support.forking import HANG_S

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux")
LOOPBACK = {"127.0.0.1": "lo", "::1": "lo"}


@pytest.fixture
def launched(monkeypatch):
    def launch(**variables):
        for name in (GLOO, "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return launch


def test_the_interface_with_the_address_towards_the_master_is_chosen():
    by_address = {**LOOPBACK, "10.0.0.2": "eth0", "192.168.7.1": "ib0"}
    assert choose("192.168.7.1", by_address) == "ib0"
    assert choose("10.9.9.9", by_address) is None  # none has it: gloo is to choose


def test_a_master_that_is_a_loopback_address_leaves_the_only_other_interface():
    by_address = {**LOOPBACK, "10.0.0.2": "eth0", "fd00::2": "eth0", "fe80::1": "veth7"}
    assert choose("127.0.1.1", by_address, "node-0") == "eth0"


@pytest.mark.parametrize("more", [{}, {"10.0.0.2": "eth0", "172.17.0.1": "docker0"}])
def test_a_loopback_master_beside_none_or_several_interfaces_is_an_error_that_names_them(more):
    with pytest.raises(ConfigError) as caught:
        choose("127.0.1.1", {**LOOPBACK, **more}, "node-0")
    message = str(caught.value)
    assert "'node-0', which is 127.0.1.1 here" in message
    assert ("docker0, eth0" if more else "with no address") in message
    assert "--master-addr" in message.rpartition("hint:")[2]
    assert GLOO in message.rpartition("hint:")[2]


@on_linux
def test_the_system_tells_the_interface_of_each_address_and_the_way_to_a_host():
    assert addresses()["127.0.0.1"] == "lo"
    assert own_address_towards("127.0.0.1") == "127.0.0.1"
    assert own_address_towards("no.such.host.invalid") is None


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"},  # one host
        {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"},  # a launcher that does not say: one host
        {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", GLOO: "ib0"},  # chosen already
        {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "no.such.host.invalid"},
    ],
)
def test_nothing_is_chosen_on_one_host_or_over_a_users_choice(launched, variables):
    launched(**variables)
    use_link_to_hosts()
    assert os.environ.get(GLOO) == variables.get(GLOO)


def test_a_launcher_that_does_not_say_gets_the_interface_towards_its_master(launched, monkeypatch):
    launched(WORLD_SIZE="4", MASTER_ADDR="node-0")
    monkeypatch.setattr(interfaces, "own_address_towards", lambda host: "10.0.0.2")
    monkeypatch.setattr(interfaces, "addresses", lambda: {**LOOPBACK, "10.0.0.2": "eth0"})
    monkeypatch.setenv(GLOO, "")  # put back after the test
    use_link_to_hosts()
    assert os.environ[GLOO] == "eth0"


def test_ranks_that_wait_for_ever_to_meet_are_ended_with_a_message():
    code = (
        "import time; from onefold.wire.world import ending_process\n"
        "with ending_process(60, str): pass\n"
        "with ending_process(0.1, lambda: 'expected peers'): time.sleep(1000)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S
    )
    assert (done.returncode, done.stderr) == (1, "onefold: expected peers\n")
