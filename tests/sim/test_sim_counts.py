"""What a steady step costs the host: waits, messages and kernels, compared with FSDP2."""

from __future__ import annotations

import pytest

from tests.sim import building
from tests.sim.counting import CASES, Cost, costs
from tests.sim.ranks import run_sim

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(building.missing() is not None, reason=f"needs {building.missing()}"),
]


COMPARED = ("stage 2", "stage 3, clipping")
OFFLOADED, UNUSED = "stage 3, weights in CPU memory", "stage 3, unused parameters"
CLIPPED = f"{OFFLOADED}, clipping"


@pytest.fixture(scope="module")
def of_each() -> dict[str, tuple[Cost, Cost | None]]:
    """By case, on rank 0 of three."""
    return run_sim(3, costs, COMPARED, checks_races=False)[0]


def test_the_host_waits_for_nothing(of_each):
    waits = {name: dict(own.waits) for name, (own, _) in of_each.items() if own.waits}
    assert waits.keys() <= {OFFLOADED, CLIPPED, UNUSED}


def test_unused_parameters_are_waited_for_once_a_step(of_each):
    """The optimizer leaves a parameter alone that no rank used: the host has to know."""
    assert of_each[UNUSED][0].waits.total() <= 1


def test_weights_in_cpu_memory_are_waited_for_once_a_unit_by_the_threads_that_step_them(of_each):
    """A gradient has to arrive before the CPU steps by it."""
    cost = of_each[OFFLOADED][0]
    assert all("step_device.py" in line and "workers.py" in line for line in cost.waits), cost
    assert cost.waits.total() == cost.units


def test_clipping_weights_in_cpu_memory_reads_one_number(of_each):
    """torch wants the factor where parameters are; messages are those of weights on the device."""
    waits = of_each[CLIPPED][0].waits
    of_workers = sum(n for line, n in waits.items() if "workers.py" in line)
    assert waits.total() - of_workers <= 1, waits


def test_a_unit_begins_one_message_a_direction(of_each):
    """A gather, at stage 3 one more for backward; a reduction; one number for clipping.

    The digest of the step is one more.
    """
    for name, (own, _) in of_each.items():
        most = own.units * (3 if CASES[name]["stage"] == 3 else 2) + ("clip" in CASES[name]) + 1
        assert own.messages.total() <= most, (name, own)


def test_kernels_are_eight_a_unit_more_than_fsdp2s_at_most(of_each):
    """Of these four sum three ranks' pieces in rank order."""
    for name, (own, peer) in of_each.items():
        if peer is not None:
            assert own.kernels <= peer.kernels + 8 * own.units, (name, own.kernels, peer.kernels)


def test_bfloat16_costs_two_kernels_a_unit_more(of_each):
    """Gradients of two ranks are widened before they are added; weights are cast as they go."""
    wide, narrow = of_each["stage 3"][0], of_each["stage 3 in bf16"][0]
    assert narrow.kernels <= wide.kernels + 2 * wide.units


def test_messages_are_fsdp2s_and_one_digest_a_step(of_each):
    for name, (own, peer) in of_each.items():
        if peer is not None:
            assert peer.units == own.units
            assert own.messages.total() <= peer.messages.total() + 1, (name, own, peer)
