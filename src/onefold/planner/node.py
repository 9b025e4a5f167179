"""What a mesh of two axes adds to the bytes of a rank: what it keeps and receives for its node.

second shard    numel / neighbours of the weights, and a tag for each node, in every unit
sums            as many gradients: of two units at a time, or of all between micro-batches
replicas        what one reduction between nodes that are replicas receives
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onefold.layout.axes import NodeLayout
from onefold.state.unit import Unit

REDUCTIONS = 2
"""Whose sums are there at a time: one hops between nodes while the next is summed inside."""


@dataclass(frozen=True, slots=True)
class NodeBytes:
    """Bytes by kind; `sums` by unit. Nothing where there is one axis."""

    secondary: int = 0
    sums: tuple[int, ...] = ()
    rests: bool = False  # sums stay between micro-batches
    received: int = 0

    @staticmethod
    def of(units: Sequence[Unit]) -> NodeBytes:
        """Of units that were just built."""
        whole = [unit for unit in units if not unit.is_tiled]
        routes = units[0].setting.routes if units else None
        if routes is not None and routes.replicas is not None:
            nodes = routes.replicas.group.world_size
            own = [(unit, sum(p.local.numel() for p in unit.parameters)) for unit in whole]
            return NodeBytes(received=_received(own, nodes))
        if routes is None or routes.hops is None:
            return NodeBytes()
        hops = routes.hops
        numels = [NodeLayout.build(unit.wire.slots, hops.axes).numel for unit in whole]
        pairs = list(zip(whole, numels, strict=True))
        return NodeBytes(
            secondary=sum((n + hops.axes.nodes) * u.compute_dtype.itemsize for u, n in pairs)
            if hops.keeps_weights
            else 0,
            sums=tuple(n * u.dtype.itemsize for u, n in pairs),
            rests=hops.keeps_gradients,
            received=_received(pairs, hops.axes.nodes),
        )

    def kinds(self, *, accumulates: bool) -> dict[str, int]:
        """The most bytes of each kind."""
        largest = sorted(self.sums)
        held = largest if self.rests and accumulates else largest[-REDUCTIONS:]
        found = {"secondary": self.secondary, "partial_grad": sum(held), "wire": self.received}
        return {kind: nbytes for kind, nbytes in found.items() if nbytes}


def _received(held: Sequence[tuple[Unit, int]], nodes: int) -> int:
    """A node's part of what a rank holds, and flags, from every node; of two from the other one."""
    nbytes = [
        (numel // nodes + len(unit.parameters) + 1) * unit.compute_dtype.itemsize
        for unit, numel in held
    ]
    return max(nbytes, default=0) * (nodes if nodes > 2 else 1)
