"""Parameters of optimizer groups come in the order of rank 0.

Groups are often made from sets, which Python orders by address: each rank has another order then.
State dicts number parameters by it, some classes find them by position, and ranks exchange rows.
"""

import hashlib
from collections.abc import Sequence

from torch.optim import Optimizer

from onefold.errors import ConfigError
from onefold.layout.units import Owned
from onefold.wire.collectives import Group
from onefold.wire.together import first, together

Names = list[list[list[str]]]
"""By optimizer and group; a parameter of another module has none."""


def names_in_groups(optimizers: Sequence[Optimizer], parameters: Sequence[Owned]) -> Names:
    """Return the names of the parameters of each group of each optimizer, in order."""
    names = {id(owned.parameter): owned.fqn for owned in parameters}
    return [
        [[names.get(id(tensor), "") for tensor in group["params"]] for group in o.param_groups]
        for o in optimizers
    ]


def digest_of(optimizers: Sequence[Optimizer], parameters: Sequence[Owned]) -> str:
    """Return a few letters that tell one order from another."""
    names = names_in_groups(optimizers, parameters)
    return hashlib.sha256(repr(names).encode()).hexdigest()[:16]


def take_order(group: Group, optimizers: Sequence[Optimizer], parameters: Sequence[Owned]) -> None:
    """Put the parameters of every group in the order of rank 0. A collective.

    Raises `ConfigError` where a group holds other parameters than on rank 0.
    """
    mine = names_in_groups(optimizers, parameters)
    wanted = first(group, lambda: mine)
    together(group, lambda: _check_names(mine, wanted, group.rank))
    tensors = {owned.fqn: owned.parameter for owned in parameters}
    known = set(map(id, tensors.values()))
    for optimizer, of_groups in zip(optimizers, wanted, strict=True):
        for held, names in zip(optimizer.param_groups, of_groups, strict=True):
            others = iter([t for t in held["params"] if id(t) not in known])
            held["params"][:] = [tensors[name] if name else next(others) for name in names]


def _check_names(mine: Names, wanted: Names, rank: int) -> None:
    hint = "make groups from the same names on every rank"
    if [len(groups) for groups in mine] != [len(groups) for groups in wanted]:
        got = f"{list(map(len, mine))} on rank {rank} but {list(map(len, wanted))} on rank 0"
        raise ConfigError("as many optimizer groups on every rank", got, hint=hint)
    for groups, others in zip(mine, wanted, strict=True):
        for number, (own, theirs) in enumerate(zip(groups, others, strict=True)):
            differing = sorted(set(own) ^ set(theirs)) or [""] * (len(own) != len(theirs))
            if differing:
                where = f"rank {rank}" if differing[0] in own else "rank 0"
                got = f"{differing[0]!r} on {where} alone"
                expected = f"optimizer group {number} to hold the same parameters on every rank"
                raise ConfigError(expected, got, hint=hint)
