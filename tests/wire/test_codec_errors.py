"""What codecs lose in a mean over ranks is what the theory of uniform quantizers says."""

from __future__ import annotations

import math

import codec_errors as errors
import pytest
import torch

from onefold.wire.codec import GROUPS, LARGEST, codec_of


def expected_largest_squared(group: int) -> float:
    """E[max x^2] of a group of standard normal values: the integral of P(max > sqrt(t))."""
    t = torch.linspace(0, 60, 600_001, dtype=torch.float64)
    within = torch.erf((t / 2).sqrt())
    return torch.trapezoid(1 - within**group, t).item()


def step_error(word: str) -> float:
    """Of unit-normal values: scale^2 / 12, as anywhere in a step is equally likely."""
    return expected_largest_squared(GROUPS[word]) / LARGEST[word] ** 2 / 12


SHARED, OWN = errors.SIGNAL**2, errors.NOISE**2
RANKS = errors.NODES * errors.LOCAL
MEAN = SHARED + OWN / RANKS
"""Power of a rank's gradient is SHARED + OWN, of a node's mean SHARED + OWN / LOCAL."""


@pytest.fixture(scope="module")
def given() -> torch.Tensor:
    return errors.gradients("gaussian")


@pytest.mark.parametrize("word", ["int8", "int4", "int8+h", "int4+h"])
def test_one_message_loses_a_twelfth_of_its_squared_scale(word):
    values = errors.normal(1 << 18, generator=torch.Generator().manual_seed(3))
    lost = (errors.sent(codec_of(word), values) - values).square().mean().item()
    assert lost == pytest.approx(step_error(word.removesuffix("+h")), rel=0.03)


@pytest.mark.parametrize(("inside", "between"), [("int8", "int4"), ("int4", "int4")])
def test_two_hops_lose_what_each_message_loses_over_how_many_are_averaged(given, inside, between):
    first = step_error(inside) * (SHARED + OWN) / RANKS
    second = step_error(between) * (SHARED + OWN / errors.LOCAL) / errors.NODES
    got = errors.nmse(errors.two_hops(given, codec_of(inside), codec_of(between)), given)
    assert got == pytest.approx((first + second) / MEAN, rel=0.05)


def test_a_ring_loses_at_every_hop_in_proportion_to_the_sum_so_far(given):
    """The sum of k ranks has power k^2 SHARED + k OWN: what is lost late is lost of nearly all."""
    lost = sum(step_error("int4") * (k**2 * SHARED + k * OWN) for k in range(1, RANKS))
    got = errors.nmse(errors.ring(given, codec_of("int4")), given)
    assert got == pytest.approx(lost / RANKS**2 / MEAN, rel=0.2)
    two = errors.nmse(errors.two_hops(given, codec_of("int4"), codec_of("int4")), given)
    assert got > 10 * two


def test_with_the_rotation_the_tails_of_gradients_no_longer_matter():
    heavy = errors.gradients("student-t3")
    plain, rotated = (
        errors.nmse(errors.two_hops(heavy, codec_of(inside), codec_of(between)), heavy)
        for inside, between in (("int8", "int4"), ("int8+h", "int4+h"))
    )
    assert rotated < 0.5 * plain
    normal = step_error("int4") * (SHARED + OWN / errors.LOCAL) / errors.NODES / MEAN
    assert rotated == pytest.approx(normal, rel=0.1)
    assert math.isfinite(plain)
