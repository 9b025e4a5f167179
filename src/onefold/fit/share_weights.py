"""From numbers that a user gives to integer weights, one a rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onefold.errors import ConfigError
from onefold.layout.cut import Shares

AUTO = "auto"

SharesChoice = str | Sequence[float] | None
"""None cuts evenly, "auto" by free memory, a list by one weight a rank."""

PARTS = 1000
"""Floats become parts of this many, or of 100 a rank where that is more."""


def is_auto(choice: object) -> bool:
    """True for the word that has shares measured."""
    return isinstance(choice, str) and choice == AUTO


def weights_of(choice: object) -> tuple[int, ...]:
    """Return integer weights without a common divisor.

    Integers keep their ratios exactly. Floats become thousandths of their sum (hundredths of the
    mean share, above 10 ranks): rounded by largest remainder, at least one for a weight above 0.

    Raises:
        ConfigError: not a list of finite numbers from 0 up, one of them above 0.

    >>> weights_of([6, 2]), weights_of([0.75, 0.25]), weights_of([2, 2])
    ((3, 1), (3, 1), (1, 1))
    """
    numbers = _numbers(choice)
    if numbers is None or not any(numbers):
        raise _refused(choice)
    if not all(number == int(number) for number in numbers):
        total = sum(numbers)
        parts = max(PARTS, 100 * len(numbers))
        numbers = in_parts([number / total for number in numbers], parts)
    integers = [int(number) for number in numbers]
    divisor = math.gcd(*integers)
    return tuple(number // divisor for number in integers)


def unless_even(shares: Shares) -> Shares:
    """Return None where all weights are equal: the even cut, which plain DTensors describe."""
    return None if shares is None or len(set(shares)) == 1 else shares


def in_parts(fractions: Sequence[float], parts: int) -> list[int]:
    """Round fractions that sum to 1 to `parts` parts; each fraction above 0 keeps one at least."""
    exact = [fraction * parts for fraction in fractions]
    whole = [int(fraction) for fraction in exact]
    left = parts - sum(whole)
    by_remainder = sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])
    for index in by_remainder[: max(0, left)]:
        whole[index] += 1
    return [max(part, 1) if f > 0 else 0 for part, f in zip(whole, fractions, strict=True)]


def _numbers(choice: object) -> list[float] | None:
    """Return the finite numbers of a list, from 0 up; None for anything else."""
    if not isinstance(choice, Sequence) or isinstance(choice, str | bytes):
        return None
    numbers: list[float] = []
    for number in choice:
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not math.isfinite(number) or number < 0:
            return None
        numbers.append(number)
    return numbers


def _refused(choice: object) -> ConfigError:
    return ConfigError(
        '`shares` to be None, "auto", or one weight a rank: finite numbers from 0 up, not all '
        "of them 0",
        repr(choice),
        hint="shares=[3, 1] gives rank 0 three quarters of the state",
    )
