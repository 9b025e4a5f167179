"""Choose seeds of drawn programs that together cover many pairs of values.

    python -m tests.support.programs.choosing > tests/support/programs/chosen.py
    python -m tests.support.programs.choosing meshes > tests/support/programs/chosen_meshes.py

A value is a class of a module or optimizer, an operation, or an option with its argument. Two of
them are a pair where one leg of a program has both. Each turn takes the seed that adds most pairs,
the lower one of equals. A seed is left out if plain torch cannot run its first program, and if the
library refuses it and `MOST_REFUSED` refused ones are chosen: such a program runs few of its pairs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from itertools import combinations, pairwise, product

from tests.support.programs.catalogue import POOL
from tests.support.programs.drawing import Drawn, DrawnLeg, draw
from tests.support.programs.judging import Judge
from tests.support.programs.mesh_drawing import MeshDrawn, MeshJudge, draw_mesh
from tests.support.programs.meshes import AXES
from tests.support.ranks import run_ranks

NUM_CHOSEN, MOST_REFUSED = 120, 12
MESH_POOL, NUM_MESHES, MESHES_REFUSED = 1000, 34, 3

Pair = tuple[str, str]


def combined_values(drawn: Drawn, leg: DrawnLeg) -> set[str]:
    """Return what one leg of a program combines."""
    modules = {name for block in drawn.blocks for name in re.findall(r"[A-Z]\w*(?=\()", block)}
    optimizer = re.findall(r"\w+(?=\()|foreach|fused", drawn.optimizer)
    calls = {call.partition("(")[0] for call in leg.operations}
    options = {name if name == "shares" else f"{name}={argument}" for name, argument in leg.options}
    if isinstance(drawn, MeshDrawn):  # few operations, whose arguments matter
        calls |= {argument for call in leg.operations for argument in re.findall(r"\w+=\w+", call)}
        calls |= {"tied"} if drawn.is_tied else set()
    return (
        {*modules, *optimizer, drawn.groups, drawn.dtype, f"{leg.world_size} ranks"}
        | calls | options
    )  # fmt: skip


def pairs_of(drawn: Drawn) -> set[Pair]:
    """Return the pairs of values that a program covers, also before and after a move of a mesh."""
    pairs = {
        pair for leg in drawn.legs for pair in combinations(sorted(combined_values(drawn, leg)), 2)
    }
    moves = pairwise(drawn.legs) if isinstance(drawn, MeshDrawn) else ()
    for places in (map(places_of, legs) for legs in moves):
        pairs |= {(f"from {one}", f"to {other}") for one, other in product(*places)}
    return pairs


def places_of(leg: DrawnLeg) -> list[str]:
    """Return where a leg on a mesh has its states."""
    names = (*AXES, "stage", "schedule", "flat")
    return [f"{name}={value}" for name, value in leg.options if name in names]


def covered_pairs(seeds: Iterable[int], draws: Callable[[int], Drawn] = draw) -> set[Pair]:
    """Return the pairs that the first programs of seeds cover."""
    return set().union(*(pairs_of(draws(seed)) for seed in seeds))


def choose_seeds(
    pool: Iterable[int],
    number: int,
    keeps: Callable[[int], bool],
    draws: Callable[[int], Drawn] = draw,
    cost: Callable[[Drawn], float] = lambda _: 1.0,
) -> list[int]:
    """Choose seeds of a pool greedily, those alone that `keeps` accepts; in the order of choice.

    Each turn takes the seed that adds most pairs for its cost.
    """
    drawn = {seed: draws(seed) for seed in pool}
    left = {seed: pairs_of(each) for seed, each in drawn.items()}
    costs = {seed: cost(each) for seed, each in drawn.items()}
    chosen: list[int] = []
    while left and len(chosen) < number:
        best = max(left, key=lambda seed: (len(left[seed]) / costs[seed], -seed))
        new = left.pop(best)
        if keeps(best):
            chosen.append(best)
            left = {seed: own - new for seed, own in left.items()}
    return chosen


def run_cost(drawn: Drawn) -> float:
    """Return about how much work it is to judge a program: calls of operations, on all ranks.

    Plain torch runs a lossy program eleven times, an exact one six times (judging.py).
    """
    runs = 11 + 12 * ("Rprop" in drawn.optimizer) if drawn.is_lossy else 6
    calls = sum(len(leg.operations) + 1 for leg in drawn.legs)
    calls *= 3 if "LBFGS" in drawn.optimizer else 1
    ranks = sum((len(leg.operations) + 2) * leg.world_size for leg in drawn.legs)
    return runs * calls + (2 if drawn.is_lossy else 3) * ranks


def cheap_first(seeds: Iterable[int]) -> list[int]:
    """Return seeds so that the first ones cover most for their cost: a suite runs as it can pay."""
    drawn = {seed: draw(seed) for seed in seeds}
    left, ordered = {seed: pairs_of(each) for seed, each in drawn.items()}, list[int]()
    while left:
        best = max(left, key=lambda seed: (len(left[seed]) / run_cost(drawn[seed]) ** 0.7, -seed))
        new = left.pop(best)
        ordered.append(best)
        left = {seed: own - new for seed, own in left.items()}
    return ordered


def mesh_cost(drawn: Drawn) -> float:
    """As `run_cost`: a call on the ranks of a mesh is as much work as many calls of plain torch."""
    ranks = sum((len(leg.operations) + 4) * leg.world_size for leg in drawn.legs)
    cut = sum(leg.world_size for leg in drawn.legs if dict(leg.options)["tp"] != "1")
    return (run_cost(drawn) / 3 + 4 * ranks + 10 * cut) ** 0.7


def runs_through(
    judge: Judge, refused: list[int], draws: Callable[[int], Drawn] = draw, most: int = MOST_REFUSED
) -> Callable[[int], bool]:
    """Return a test of seeds: true for one that is right, and for the first refused ones."""

    def keeps(seed: int) -> bool:
        kind = judge.judge(draws(seed), compares=seed % 2 == 0).kind
        if kind != "refused":
            return kind != "redrawn"
        refused.append(seed)
        return len(refused) <= most

    return keeps


def print_rows(name: str, seeds: list[int]) -> str:
    rows = [seeds[at : at + 12] for at in range(0, len(seeds), 12)]
    lines = "".join(f"    {', '.join(map(str, row))},\n" for row in rows)
    return f"{name} = (\n{lines})  # fmt: skip"


def choose_meshes() -> None:
    """Print the module of chosen seeds of programs on a mesh."""
    refused: list[int] = []
    keeps = runs_through(MeshJudge(run_ranks), refused, draw_mesh, MESHES_REFUSED)
    seeds = choose_seeds(range(MESH_POOL), NUM_MESHES, keeps, draw_mesh, mesh_cost)
    sets = (range(NUM_MESHES), seeds, range(MESH_POOL))
    counts = [len(covered_pairs(several, draw_mesh)) for several in sets]
    print(
        '"""Seeds of drawn programs on a mesh that choosing.py took: most new pairs for their cost'
        f" first.\n\nPairs of values: {counts[0]:,} by the seeds 0-{NUM_MESHES - 1}, "
        f"{counts[1]:,} by these, {counts[2]:,} by the pool of {MESH_POOL:,}.\n"
        'After a change of mesh_drawing.py, choose again.\n"""\n\n'
        + print_rows("CHOSEN_MESHES", seeds)
    )


def main() -> None:
    """Print the module of chosen seeds."""
    if sys.argv[1:] == ["meshes"]:
        choose_meshes()
        return
    refused: list[int] = []
    seeds = choose_seeds(range(POOL), NUM_CHOSEN, runs_through(Judge(run_ranks), refused))
    seeds = cheap_first(set(seeds) - set(refused)) + sorted(set(seeds) & set(refused))
    sets = (range(60), range(NUM_CHOSEN), seeds, range(POOL))
    counts = [len(covered_pairs(several)) for several in sets]
    print(
        '"""Seeds of drawn programs that choosing.py took; the first cover most for their '
        f"cost, the\nlast {MOST_REFUSED} are refused.\n\n"
        f"Pairs of values: {counts[0]:,} by the seeds 0-59, {counts[1]:,} by 0-{NUM_CHOSEN - 1}, "
        f"{counts[2]:,} by these,\n{counts[3]:,} by the pool of {POOL:,}. "
        'After a change of the catalogue or of drawing.py, choose again.\n"""\n\n'
        + print_rows("CHOSEN", seeds)
    )


if __name__ == "__main__":
    main()
