"""Make a program smaller while it keeps its verdict: fewer legs, calls, blocks; plain choices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.support.programs.drawing import Drawn, DrawnLeg

PLAINER = {
    "dtype": "float32", "schedule": "", "decay": None, "tie": None, "groups": "of_all",
    "optimizer": "torch.optim.SGD(ps, lr=0.05)",
}  # fmt: skip


def shrink(drawn: Drawn, same: Callable[[Drawn], bool], tries: int = 60) -> Drawn:
    """The smallest program that one change after the other reaches while `same` holds.

    Args:
        drawn: the program with a verdict.
        same: runs a program; True if it ends with this verdict.
        tries: programs that may be run.
    """
    found = True
    while found and tries > 0:
        found = False
        for smaller in smaller_ones(drawn):
            if tries <= 0:
                break
            tries -= 1
            if same(smaller):
                drawn, found = smaller, True
                break
    return drawn


def smaller_ones(drawn: Drawn) -> Iterator[Drawn]:
    """Programs with one thing less, what removes most first."""
    for legs in without_one(drawn.legs, least=1):
        yield replace(drawn, legs=legs)
    for name, value in PLAINER.items():
        if getattr(drawn, name) != value:
            yield replace(drawn, **{name: value})
    if drawn.tie is None:
        for blocks in without_one(drawn.blocks, least=1):
            yield replace(drawn, blocks=blocks)
        for index, block in enumerate(drawn.blocks):
            inner = re.match(r"(?:Recomputed|Functional|Chain)\((\w.*\)),?.*\)$", block)
            if inner:
                yield replace(drawn, blocks=swapped(drawn.blocks, index, inner[1]))
    for number, leg in enumerate(drawn.legs):
        for smaller in smaller_legs(leg):
            yield replace(drawn, legs=swapped(drawn.legs, number, smaller))


def smaller_legs(leg: DrawnLeg) -> Iterator[DrawnLeg]:
    for calls in without_one(leg.operations, least=1):
        yield replace(leg, operations=calls)
    for options in without_one(leg.options, least=1):
        if any(name == "stage" for name, _ in options):
            yield replace(leg, options=options)
    for index, call in enumerate(leg.operations):
        name, _, arguments = call.partition("(p, ")
        parts = tuple(arguments.removesuffix(")").split(", ")) if arguments else ()
        for fewer in without_one(parts, least=0):
            text = "".join(f", {part}" for part in fewer)
            yield replace(leg, operations=swapped(leg.operations, index, f"{name}(p{text})"))
    if leg.world_size > 1 and "nodes" not in dict(leg.options):
        yield replace(leg, world_size=leg.world_size - 1)


def without_one(several: tuple, least: int) -> Iterator[tuple]:
    """Without one entry each, the last first."""
    if len(several) > least:
        for index in reversed(range(len(several))):
            yield several[:index] + several[index + 1 :]


def swapped(several: tuple, index: int, entry: object) -> tuple:
    return (*several[:index], entry, *several[index + 1 :])
