"""From a recipe and its ranks to routes: transports, hops, codecs."""

from dataclasses import dataclass, field, replace

import torch

from onefold.layout.ledger import Ledger
from onefold.recipe import Recipe
from onefold.unit.context import Hops, Routes
from onefold.wire.codec import codec_of
from onefold.wire.collectives import Group
from onefold.wire.exchange import Exchange
from onefold.wire.quantized import Quantized
from onefold.wire.ranks import Ranks
from onefold.wire.transport import Composed, LocalTransport, Transport
from onefold.wire.wrapped import Streamed, Timed
from onefold.wire_config import DIFFERENCE, EXACT, Wire

LOOPS = False
"""A rank alone sends to itself. Tests set it: one device runs the whole transport then."""


@dataclass(frozen=True, slots=True)
class Links:
    """The parts of every transport, whatever ranks it joins."""

    device: torch.device
    ledger: Ledger
    reduce: torch.dtype
    divisor: int = 0  # of sums of gradients; 0: the ranks that a transport joins
    loops: bool = field(default_factory=lambda: LOOPS)
    packs: bool = False
    """Each message of a unit is one flat copy of its regions, in place of a group of collectives
    over regions as they lie. A group saves two copies of all bytes, and uneven pieces need no
    padding (pytorch issue 153673, torchcomms 398). On one GPU, with no links to use, the
    copies were faster: 6.6 against 7.1 ms (docs/measurements/gpu.md)."""

    def transport(self, group: Group, codec: str = EXACT, where: str = "") -> Transport:
        """Make a transport between the ranks of a group, exact or quantized."""
        if group.world_size == 1 and not self.loops:
            return LocalTransport(group)
        is_device = self.device.type != "cpu"
        group = replace(group, packs=self.packs)
        native = is_device and group.is_nccl
        exchange = Exchange(
            group, self.ledger, native=native, where=where, coalesces=group.coalesces(self.device)
        )
        composed = Composed(exchange, reduce=self.reduce, divisor=self.divisor)
        word = codec.removesuffix(DIFFERENCE)
        inner = composed if word == EXACT else Quantized(composed, codec_of(word))
        timed = Timed(inner, self.ledger, is_queued=is_device)
        return Streamed(timed, self.device) if is_device else timed


def routes_of(recipe: Recipe, ranks: Ranks, links: Links) -> Routes:
    """Make the transports of a recipe."""
    wire = recipe.wire
    if (
        ranks.inside is None
        or ranks.between is None
        or not recipe.reduces_in_hops | recipe.are_replicas
    ):
        return _one_axis(wire, ranks.everyone, ranks.everyone, links)
    if recipe.are_replicas:
        inner = Wire(wire.weights_inside, wire.gradients_inside)
        routes = _one_axis(inner, ranks.everyone, ranks.inside, links)
        replicas = links.transport(ranks.between, wire.gradients_between, "between")
        return replace(routes, replicas=replicas, feeds_back=wire.feedback)
    return _two_hops(recipe, ranks, links)


def _one_axis(wire: Wire, everyone: Group, group: Group, links: Links) -> Routes:
    where = "" if group is everyone else "inside"
    exact = links.transport(group, where=where)
    weights, gradients = wire.weights_between, wire.gradients_between
    if group.world_size == 1:
        return Routes(everyone, exact, exact, exact)
    return Routes(
        group=everyone,
        transport=exact,
        gather=exact if weights == EXACT else links.transport(group, weights, where),
        reduce=exact if gradients == EXACT else links.transport(group, gradients, where),
        sends_differences=weights.endswith(DIFFERENCE),
        feeds_back=wire.feedback,
    )


def _two_hops(recipe: Recipe, ranks: Ranks, links: Links) -> Routes:
    """Gradients take two hops, and weights too on a mesh of two axes."""
    inside, between, axes, wire = ranks.inside, ranks.between, ranks.axes, recipe.wire
    assert inside is not None, "checked by the caller"
    assert between is not None, "checked by the caller"
    assert axes is not None, "there are two axes where there are two groups"
    exact = links.transport(ranks.everyone)
    gathers, reduces = (
        Hops(
            axes, links.transport(inside, near, "inside"), links.transport(between, far, "between")
        )
        for near, far in (
            (wire.weights_inside, wire.weights_between),
            (wire.gradients_inside, wire.gradients_between),
        )
    )
    return Routes(
        group=ranks.everyone, transport=exact, gather=exact, reduce=exact,
        gather_hops=gathers if recipe.has_hops else None, reduce_hops=reduces,
        keeps_weights=recipe.keeps_weights,
        sends_differences=wire.weights_between.endswith(DIFFERENCE),
        feeds_back=wire.feedback,
    )  # fmt: skip
