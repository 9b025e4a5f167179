"""Weights with several names: a checkpoint has them once, and lists them under each name.

The parameters of one module may be tied, or those of several stages of a pipeline. What belongs to
such a weight, its master and optimizer state, is saved under its first name alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from onefold.checkpoint.contents import COMPANION, MASTER, MODEL, OPTIM, TiedCopy, path_of


@dataclass(frozen=True, slots=True)
class RankNames:
    """The other names of weights on one rank: inside its modules, and over stages."""

    aliases: dict[str, str]
    copies: dict[str, TiedCopy]


def join_names(of_ranks: Iterable[RankNames]) -> dict[str, str]:
    """Return the other names of all weights, each with the name under which it is saved."""
    ranks = list(of_ranks)
    first = {
        tie.key: name for each in ranks for name, tie in each.copies.items() if not tie.is_copy
    }
    found = {
        name: first[tie.key]
        for each in ranks
        for name, tie in each.copies.items()
        if tie.key in first and name != first[tie.key]
    }
    for each in ranks:
        found |= {alias: found.get(name, name) for alias, name in each.aliases.items()}
    return found


def first_names(metadata: Metadata) -> dict[str, str]:
    """Return, for each name, the first one of the same bytes: its own if it has its own bytes."""
    by_place: dict[tuple[str, int], str] = {}
    return {
        index.fqn: by_place.setdefault((info.relative_path, info.offset), index.fqn)
        for index, info in metadata.storage_data.items()
    }


def spread_ties(metadata: Metadata) -> dict[str, str]:
    """Give each name of a weight its master and optimizer state, so that any of them can be loaded.

    Changes `metadata`, which was read. Returns the other names, each with the first one.
    """
    prefix = f"{MODEL}."
    others = {
        alias.removeprefix(prefix): name.removeprefix(prefix)
        for alias, name in first_names(metadata).items()
        if alias != name and alias.startswith(prefix) and name.startswith(prefix)
    }
    if not others:
        return others
    notes = metadata.planner_data = metadata.planner_data or {}
    belonging = defaultdict[str, list[tuple[str, tuple[object, ...]]]](list)
    for name in metadata.state_dict_metadata:
        path = path_of(name, notes.get(name, ()))
        if path[:2] == (OPTIM, "state") or path[0] == COMPANION:
            belonging[path[2]].append((name, path))
    pieces = defaultdict[str, list[MetadataIndex]](list)
    for index in metadata.storage_data:
        pieces[index.fqn].append(index)
    for alias, first in others.items():
        paths = [(name, (*path[:2], alias, *path[3:])) for name, path in belonging[first]]
        for name, path in [(f"{MASTER}.{first}", (MASTER, alias)), *paths]:
            target = ".".join(map(str, path))
            if name in metadata.state_dict_metadata and target not in metadata.state_dict_metadata:
                metadata.state_dict_metadata[target] = metadata.state_dict_metadata[name]
                notes[target] = path
                for index in pieces[name]:
                    place = metadata.storage_data[index]
                    metadata.storage_data[replace(index, fqn=target)] = place
    return others
