"""Who is where: the ranks of all islands in one group, and which rows each shares with others.

Islands are rows of a mesh, or the groups of ranks that shard together in the world. They agree by
the one group, as ranks do in every other collective: a rank that fails or does not come is an error
on all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from onefold.errors import ConfigError, Failure
from onefold.layout.cut import cut_of
from onefold.outer.anchors import Share
from onefold.outer.parcels import Owners, ParcelMessage, parcels_of
from onefold.wire.codec import Codec
from onefold.wire.collectives import Group
from onefold.wire.ranks import Ranks, meet
from onefold.wire.together import difference


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a rank tells the others: `facts` must be the same on all, the rest is its island's."""

    facts: list[str]
    ranks: tuple[int, ...]  # of its island, as the world numbers them
    shares: tuple[float, ...] | None
    by_rows: list[bool]  # how the island cuts each unit

    @staticmethod
    def introduce(group: Group, shares: Sequence[Share], facts: Sequence[str]) -> "Introduction":
        """Describe the island of `group`, with the parameters that it exchanges."""
        context = shares[0].unit.context
        is_in_hops = context.routes.gather_hops is not None
        model = [
            f"{parameter.fqn} {list(parameter.slot.shape)} of {str(share.dtype)[6:]} in unit "
            f"{share.unit.name}"
            for share in shares
            for parameter in share.parameters
        ]
        by_rows = [is_in_hops or share.unit.is_tiled for share in shares]
        return Introduction([*facts, *model], tuple(group.global_ranks()), context.shares, by_rows)


def meet_everyone(own: Group, mesh: DeviceMesh | None) -> Group:
    """Connect the ranks of all islands. A collective of them; `own`: the ranks of this island."""
    if not dist.is_initialized():
        raise _no_islands([[0]])
    timeout = None if own.peers is None else own.peers.timeout
    ranks = list(range(dist.get_world_size()))
    if mesh is not None:
        ranks = _ranks_of(mesh, own.global_ranks())
    return meet(Ranks(Group.over(ranks, on_cpu=True)), timeout).everyone


def _ranks_of(mesh: DeviceMesh, own: list[int]) -> list[int]:
    """All ranks of a mesh (island, rank), whose rows are the ranks that shard together."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2 or own not in mesh.mesh.tolist():
        got = f"a {type(mesh).__name__}"
        if isinstance(mesh, DeviceMesh):
            got = f"{mesh.mesh.tolist()}, and a module that is sharded over ranks {own}"
        hint = 'mesh = init_device_mesh(device, (2, 4), mesh_dim_names=("island", "rank")), then '
        hint += 'onefold.shard(module, optimizer, mesh=mesh["rank"])'
        raise ConfigError("a mesh of two axes whose rows are the islands' ranks", got, hint=hint)
    return sorted(mesh.mesh.flatten().tolist())


def compare(group: Group, said: Sequence[Introduction]) -> Failure | None:
    """Find what keeps these ranks from training as islands; None if nothing does."""
    islands = {rank.ranks for rank in said}
    if len(islands) < 2 or sorted(chain(*islands)) != group.global_ranks():
        return Failure(ConfigError, str(_no_islands(sorted(map(list, islands)))))
    hint = "islands may differ in their number of ranks, mesh and offload alone"
    what = "choices and parameters of islands"
    return difference(group, [rank.facts for rank in said], what, hint, ConfigError)


def _no_islands(ranks: list[list[int]]) -> ConfigError:
    got = f"islands of ranks {' and '.join(map(str, ranks))}"
    if len(ranks) == 1:
        got = f"one, of {len(ranks[0])} ranks: all that there are"
    hint = 'shard over the ranks of an island, onefold.shard(..., mesh=mesh["rank"])'
    return ConfigError("at least two islands, and each rank in one", got, hint=hint)


class Places:
    """The islands, in the order of their first ranks, and this rank among them.

    Attributes:
        group: all ranks of all islands.
        island: the number of this rank's island.
        weights: the number of ranks of each island.
    """

    def __init__(
        self, group: Group, said: Sequence[Introduction], shares: list[Share], codec: Codec | None
    ) -> None:
        """`said`: by every rank of the group, in rank order."""
        self.group, self._shares, self._codec = group, shares, codec
        number_of = {rank: number for number, rank in enumerate(group.global_ranks())}
        self._islands = sorted({one.ranks: one for one in said}.values(), key=lambda one: one.ranks)
        self._numbers = [[number_of[rank] for rank in one.ranks] for one in self._islands]
        self.weights = [len(one.ranks) for one in self._islands]
        self.island = self._islands.index(said[group.rank])
        self._rank = self._numbers[self.island].index(group.rank)
        self._messages: dict[tuple[int, bool], list[ParcelMessage]] = {}

    def others(self, owners: Owners) -> list[tuple[int, int]]:
        """Return the owners on other islands: the island, and the rank's number in the group."""
        return [
            (island, self._numbers[island][rank])
            for island, rank in enumerate(owners)
            if island != self.island
        ]

    def messages(self, index: int, *, exact: bool) -> list[ParcelMessage]:
        """Return the messages of this rank's rows of one unit."""
        key = index, exact
        if key not in self._messages:
            rows_of = self._shares[index].rows
            cuts = [
                [
                    cut_of(rows.cut.shape, len(one.ranks), one.shares, by_rows=one.by_rows[index])
                    for one in self._islands
                ]
                for rows in rows_of
            ]
            parcels = parcels_of(rows_of, cuts, self.island, self._rank)
            codec, dtype = None if exact else self._codec, self._shares[index].dtype
            self._messages[key] = [ParcelMessage(parcel, dtype, codec) for parcel in parcels]
        return self._messages[key]
