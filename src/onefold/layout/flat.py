"""Compute the bytes of one unit's state on one rank: the closed forms of docs/concepts/memory.md.

The planner, the budget of the tiers and the table of `onefold train` all use them. Each buffer is
laid out as layout/rows.py lays it out, gaps included.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from onefold.layout.cut import cut_of
from onefold.layout.rows import ALIGN_NUMEL, PIECE_NUMEL, round_up
from onefold.recipe import Member, Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBytes:
    """Bytes of one unit on one rank, by kind of state."""

    numel: int
    rest_numel: int  # in the shard buffer, with gaps
    weight: int
    master: int
    has_master: bool  # in every tier; else only off the device, where weights rest on it
    moments: int
    unsharded: int  # gathered, or cast; 0 where weights compute from where they rest
    decoded: int  # numbers of quantized weights, while modules compute with them
    grad: int  # reduced
    has_rows: bool  # the mean is a buffer of its own: partial gradients are copied, or sent, there
    partials: tuple[int, ...]  # per member; 0 where it needs no gradient

    @property
    def states(self) -> int:
        """Bytes of masters and moments."""
        return self.master + self.moments


def unit_bytes(
    members: Sequence[Member], recipe: Recipe, rank: int | None = None, *, is_tiled: bool = False
) -> UnitBytes:
    """Compute the bytes of a unit with these members.

    Args:
        members: the unit's parameters, all of one dtype.
        recipe: the resolved choices.
        rank: position among the ranks that hold one copy of the states; None: the first of those
            with the largest share.
        is_tiled: the unit is one tiled weight, which is cut by rows.
    """
    first, world, is_cut = members[0], recipe.shard_world, recipe.rest_world > 1
    shares, by_rows = recipe.shares, recipe.has_hops or is_tiled
    at = rank if rank is not None else shares.index(max(shares)) if shares else 0
    own = [
        cut_of(member.shape, world, shares, by_rows=by_rows).piece_numel(at) for member in members
    ]
    numels = [member.numel for member in members]
    trained = [member.requires_grad for member in members]
    full_numel = sum(round_up(numel, ALIGN_NUMEL) for numel in numels)
    multiple = 1 if first.is_packed else PIECE_NUMEL
    rest = sum(round_up(n, multiple) for n in own) if is_cut else full_numel
    stepped, is_narrow = stepped_itemsize(first, recipe)
    offload = recipe.offload
    are_apart = (offload.parameters == "device") != (offload.optimizer == "device")
    is_elsewhere = recipe.device_type != "cpu" and are_apart
    casts = any(member.itemsize != member.compute_itemsize for member in members)
    decoded = sum(member.decoded_nbytes for member in members)
    is_resident = not is_cut and not casts and recipe.rests_near and not decoded
    leaves = offload.optimizer != "device" or not recipe.rests_near
    is_across = recipe.device_type != "cpu" and leaves
    has_rows = recipe.world_size > 1 or is_across or casts  # see unit/local_mean.py
    moments_numel = rest
    if offload.optimizer == "device" and recipe.rests_near:  # torch.optim allocates the moments
        step = 1 if not has_rows else PIECE_NUMEL if is_cut else ALIGN_NUMEL
        pieces = zip(own if is_cut else numels, trained, strict=True)
        moments_numel = sum(round_up(n, step) for n, is_trained in pieces if is_trained)
    trained_numels = [n if is_trained else 0 for n, is_trained in zip(numels, trained, strict=True)]
    grad_numel = rest if has_rows else sum(trained_numels)  # else autograd's own
    computes = first.compute_itemsize
    return UnitBytes(
        numel=sum(numels),
        rest_numel=rest,
        weight=rest * first.itemsize,
        master=rest * stepped if any(trained) and (is_narrow or is_elsewhere) else 0,
        has_master=is_narrow and any(trained),
        moments=moments_numel * stepped * recipe.num_moments if any(trained) else 0,
        unsharded=0 if is_resident else (full_numel + recipe.num_flags) * computes,
        decoded=decoded,
        grad=grad_numel * first.itemsize if any(trained) else 0,
        has_rows=has_rows,
        partials=tuple(numel * computes for numel in trained_numels),
    )


def stepped_itemsize(member: Member, recipe: Recipe) -> tuple[int, bool]:
    """Bytes of an element that the optimizer steps, and whether that is a master of its own."""
    master = recipe.precision.master.itemsize
    is_narrow = member.is_floating and master > member.itemsize
    return (master if is_narrow else member.itemsize), is_narrow
