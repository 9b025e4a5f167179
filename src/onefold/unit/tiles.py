"""Gather, use and reduce a weight in row blocks, so that it is never unsharded as one.

For a `Linear` or `Embedding` too large for the memory of one unit (memory-centric tiling of
ZeRO-Infinity, arXiv 2104.07857, section 5.1.3; there the user repositions the module, and its
parameters get other names). Here the parameter stays one, cut by rows over the ranks. A
*tile* is the next few own rows of every rank. The module passes its sharded parameter to `F.linear`
or `F.embedding`, and the parameter passes the call on to `TiledWeight.use`.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import functional as F

from onefold.errors import StateError
from onefold.layout.ledger import Kind
from onefold.layout.messages import flags_of
from onefold.layout.observer import Stream, watched
from onefold.layout.ranges import Ranges
from onefold.layout.rows import Slot, round_up
from onefold.tier.store import GRAIN_NUMEL
from onefold.unit import refusals
from onefold.unit.buffer import Buffer
from onefold.unit.gather import UnitGather
from onefold.unit.gradient import UnitGradient
from onefold.unit.parameter import UnitParameter
from onefold.unit.tile_rows import check_rows, places, read_rows, sum_rows
from onefold.wire.message_cut import MessageLayout
from onefold.wire.ticket import DONE, Ticket
from onefold.wire.transport import Reduction


@dataclass(frozen=True, slots=True)
class Tile:
    """Some rows of every rank: the rows that are gathered at one moment."""

    rows: tuple[tuple[int, int], ...]  # per rank: [start, stop) of the weight
    own: tuple[int, int]  # [start, stop) in elements of this rank's piece
    gather: MessageLayout
    reduce: MessageLayout

    @property
    def num_rows(self) -> int:
        return sum(stop - start for start, stop in self.rows)


class _Use:
    """One use in a forward, alive as long as its graph."""

    __slots__ = ("__weakref__",)


class TiledWeight:
    """A weight [R, C] that Linear and Embedding use tile by tile."""

    def __init__(
        self, parameter: UnitParameter, gather: UnitGather, gradient: UnitGradient,
        owner: Callable[[], Any], tile_nbytes: int,
    ) -> None:  # fmt: skip
        self.parameter, self.gradient, self._gather = parameter, gradient, gather
        self._owner = owner
        self._context = parameter.spec.context
        self.num_rows, self.num_columns = parameter.slot.shape
        self.dtype = parameter.spec.compute_dtype
        self.tiles = _tiles(parameter, tile_nbytes)
        self.tile_rows = [tile.rows for tile in self.tiles]
        numel = max(tile.num_rows for tile in self.tiles) * self.num_columns
        numel += self._context.num_flags
        store, ledger = self._context.store, self._context.ledger
        self._rooms = [
            Buffer(numel, self.dtype, Kind.UNSHARDED, store, ledger, is_counted=False) for _ in "ab"
        ]
        for room in self._rooms:
            room.release()
        self._open: WeakSet[_Use] = WeakSet()  # uses whose backward is still to come

    # for sharded parameters (unit/dtensors.py)

    def use(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `F.linear` or `F.embedding` by tiles; None for functions that need own rows only.

        A collective. Raises `StateError` for any other use that needs the unsharded weight.
        """
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func is F.embedding:
            return self._embedding(*args, **kwargs)
        if self.parameter.unit.is_wanted_unsharded(self.parameter):
            name = getattr(func, "__name__", repr(func))
            raise self._refused_use(f"{name}()")
        return None

    def _refused_use(self, got: str) -> StateError:
        wanted = f"tiled weight {self.parameter.fqn!r} to be used by Linear or Embedding"
        hint = "with a larger Offload.tile this weight is gathered in one piece"
        return StateError(wanted, got, where=self._context.where, hint=hint)

    def _linear(self, x: Tensor, weight: object, bias: Tensor | None = None) -> Tensor:
        if x.dtype == self.parameter.spec.dtype:  # which `weight.dtype` says, outside of tiles
            x = x.to(self.dtype)
        y: Tensor = _Linear.apply(x, self._anchor(), self)  # type: ignore[no-untyped-call]
        return y if bias is None else y + bias

    def _embedding(
        self, tokens: Tensor, weight: object, padding_idx: int | None = None,
        max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:  # fmt: skip
        if max_norm is not None or scale_grad_by_freq or sparse:
            raise self._refused_use("an Embedding with max_norm, scale_grad_by_freq or sparse")
        if self._context.is_inference:
            check_rows(tokens, self.num_rows)
            return self._rows_of(tokens)
        if padding_idx is not None and padding_idx < 0:
            padding_idx += self.num_rows
        return _Embedding.apply(tokens, self._anchor(), self, padding_idx)  # type: ignore[no-untyped-call, no-any-return]

    def _anchor(self) -> Tensor:
        """An input that makes autograd run backward if the weight trains."""
        with torch._C.DisableTorchFunctionSubclass():
            wants = self.parameter.sharded.requires_grad and torch.is_grad_enabled()
        return torch.empty(0, requires_grad=wants)

    def opened(self) -> _Use:
        """A forward has used the weight; its backward is to come."""
        use = _Use()
        self._open.add(use)
        return use

    def refuse_graph(self) -> None:
        """A backward begins: it cannot build a graph, as tiles are gone when that is used."""
        if torch.is_grad_enabled():
            raise refusals.TILED_GRAPH(self.parameter.fqn, where=self._context.where)

    # tiles

    def whole_tiles(self) -> Iterator[tuple[Tile, Tensor]]:
        """Each tile with its rows [num_rows, C], in the order of ranks; the next is on its way."""
        following = self._start_tile(0)
        for number, tile in enumerate(self.tiles):
            ticket = following
            room = self._rooms[number % 2]
            following = self._start_tile(number + 1) if number + 1 < len(self.tiles) else DONE
            ticket.wait()
            numel = tile.num_rows * self.num_columns
            self._gather.check_flags(room.tensor[numel : numel + self._context.num_flags])
            yield tile, room.tensor[:numel].view(tile.num_rows, self.num_columns)
            room.release()

    def _start_tile(self, number: int) -> Ticket:
        """Begin to gather a tile into its room."""
        tile, room, context = self.tiles[number], self._rooms[number % 2], self._context
        rank, num_flags = context.rank, context.num_flags
        room.reallocate()
        numel = tile.num_rows * self.num_columns
        before = sum(stop - start for start, stop in tile.rows[:rank]) * self.num_columns
        own = room.tensor[before : before + tile.own[1] - tile.own[0]]
        if context.world_size == 1 and self._gather.weights.weight.far is not None:
            self._gather.weights.join_step(raises=True)
            return Ticket([context.tiers.fetchers.give(lambda: self._copy_near(tile.own, own))])
        message = room.tensor[: numel + num_flags]
        self._gather.bring_and_flag(lambda: self._copy_near(tile.own, own), [own], message[numel:])
        if context.world_size == 1:
            return DONE
        label = f"gather of a tile of {self.parameter.fqn!r} on rank {rank}"
        return context.transport.gather(message, tile.gather, label)

    def _rows_of(self, tokens: Tensor) -> Tensor:
        """The rows of the tokens [...] of this rank: [..., C]. A collective that moves them alone.

        Each rank reads the rows that it holds of all ranks' tokens, and ranks gather those.
        """
        context = self._context
        mine = torch.unique(tokens)
        group = context.transport.group
        wanted = sorted(set[int]().union(*group.gather(mine.tolist())))
        tokens_of_all = torch.tensor(wanted, dtype=mine.dtype, device=mine.device)
        bounds = self.parameter.slot.cut.ranges[: context.world_size]
        ends = [0, *(bisect_left(wanted, stop) for _, stop in bounds)]
        columns, first = self.num_columns, bounds[context.rank][0]
        own_rows = slice(ends[context.rank], ends[context.rank + 1])
        numel, store = len(wanted) * columns, context.store
        room = Buffer(numel + context.num_flags, self.dtype, Kind.UNSHARDED, store, context.ledger)
        flat = room.tensor
        rows = flat[:numel].view(len(wanted), columns)

        def bring() -> None:
            for row, into in zip(wanted[own_rows], rows[own_rows], strict=True):
                at = (row - first) * columns
                self._copy_near((at, at + columns), into)

        self._gather.bring_and_flag(bring, [rows[own_rows]], flat[numel:])
        if context.world_size > 1:
            layout = _message(self.parameter, [end * columns for end in ends], self.parameter.fqn)
            label = f"gather of rows of {self.parameter.fqn!r} on {context.where}"
            context.transport.gather(flat, layout, label).wait()
            self._gather.check_flags(flat[numel:])
        return F.embedding(torch.searchsorted(tokens_of_all, tokens), rows)

    def _copy_near(self, span: tuple[int, int], into: Tensor) -> None:
        """Own elements [start, stop) of the weight at rest, in the compute dtype."""
        offset = self.parameter.span.start
        start, stop = offset + span[0], offset + span[1]
        weights = self._gather.weights
        far, flat = weights.weight.far, weights.weight.tensor
        if far is None:
            into.copy_(flat[start:stop])
            return
        first = start // GRAIN_NUMEL * GRAIN_NUMEL
        last = min(round_up(stop, GRAIN_NUMEL), len(flat))
        with self._context.tiers.slots.lend((last - first) * flat.dtype.itemsize) as room:
            near = room.tensor(last - first, flat.dtype)
            observer = self._context.ledger.observer
            with watched(observer, Stream.TIER, "fetch", weights.name, near.nbytes):
                far.fetch(first, near)
            into.copy_(near[start - first : stop - first])

    def closed(self, use: _Use) -> None:
        """Backward of a use is over; after the last use the gradient is complete."""
        self._open.discard(use)
        owner = self._owner()
        if not self._open and owner is not None:
            owner.note_reduced(self.gradient)


class _TileReducer:
    """Averages one use's gradient over the ranks, tile by tile, one of them under way."""

    def __init__(self, tiled: TiledWeight) -> None:
        parameter, gradient = self._parameter, self._gradient = tiled.parameter, tiled.gradient
        self._context = parameter.spec.context
        gradient.unit.join_step()  # it may still read the rows that are written now
        gradient.check_there(parameter)
        with torch._C.DisableTorchFunctionSubclass():
            gradient.drop_cleared()
            mean = gradient.mean_rows([parameter])
        (self._rows,), (self._fresh,) = mean.rows, mean.fresh
        self._ticket = DONE

    def reduce(self, tile: Tile, partial: Tensor) -> None:
        """`partial` [num_rows, C]: this rank's gradient of a tile."""
        context = self._context
        own = self._rows[slice(*tile.own)]
        flat = partial.reshape(-1)
        self._ticket.wait()
        if context.world_size == 1:
            own.copy_(flat) if self._fresh else own.add_(flat)
            return
        label = f"reduce_scatter of a tile of {self._parameter.fqn!r} on {context.where}"
        reduction = Reduction([flat], tile.reduce, [own], [self._fresh], label)
        self._ticket = context.transport.reduce_scatter(reduction)

    def show_mean(self) -> None:
        """Wait for the last tile, and show the mean; other uses may add to it."""
        self._ticket.wait()
        with torch.no_grad():
            self._gradient.show_use(self._parameter)


def _tiles(parameter: UnitParameter, tile_nbytes: int) -> list[Tile]:
    """Tiles of about `tile_nbytes` in the compute dtype, each with rows of every rank."""
    spec, context, slot = parameter.spec, parameter.spec.context, parameter.slot
    columns, world_size = prod(slot.shape[1:]), context.world_size
    height = max(1, tile_nbytes // (columns * spec.compute_dtype.itemsize * world_size))
    bounds = slot.cut.ranges[:world_size]
    tiles: list[Tile] = []
    for first in range(0, max(stop - start for start, stop in bounds), height):
        rows = tuple(
            (min(start + first, stop), min(start + first + height, stop)) for start, stop in bounds
        )
        own_start = bounds[context.rank][0]
        own = tuple((row - own_start) * columns for row in rows[context.rank])
        ends = [0]
        for start, stop in rows:
            ends.append(ends[-1] + (stop - start) * columns)
        gather = _message(parameter, ends, spec.name)
        reduce = _message(parameter, ends, spec.name, has_flags=False)
        tiles.append(Tile(rows, (own[0], own[1]), gather, reduce))
    return tiles


def _message(
    parameter: UnitParameter, ends: list[int], name: str, *, has_flags: bool = True
) -> MessageLayout:
    """A message of each rank's elements up to its end, and the flags of a gather behind them."""
    context, itemsize = parameter.spec.context, parameter.spec.compute_dtype.itemsize
    group, num_flags = context.transport.group, context.num_flags
    region = Slot(parameter.fqn, (ends[-1],), 0, Ranges.ending_at(ends))
    if not has_flags:
        return MessageLayout([region], None, group, itemsize, name)
    flags = [flags_of(num_flags)] if num_flags else []
    offsets = [0, ends[-1]][: 1 + len(flags)]
    return MessageLayout([region, *flags], offsets, group, itemsize, name)


def _columns(flat: Tensor, tile: Tile) -> Tensor:
    """[T, num_rows]: the tile's columns of a gradient of outputs [T, R]."""
    return torch.cat([flat[:, start:stop] for start, stop in tile.rows], dim=1)


class _Linear(torch.autograd.Function):
    """x [..., C] times the transpose of a tiled weight [R, C]: [..., R]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, tiled: TiledWeight) -> Tensor:
        ctx.tiled = tiled
        ctx.use = tiled.opened() if anchor.requires_grad or x.requires_grad else None
        ctx.save_for_backward(x)
        flat = x.reshape(-1, tiled.num_columns)
        y = x.new_empty(len(flat), tiled.num_rows, dtype=tiled.dtype)
        for tile, weight in tiled.whole_tiles():
            first = 0
            for start, stop in tile.rows:
                y[:, start:stop] = flat @ weight[first : first + stop - start].t()
                first += stop - start
        return y.view(*x.shape[:-1], tiled.num_rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x,), tiled = ctx.saved_tensors, ctx.tiled
        tiled.refuse_graph()
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        flat, out = x.reshape(-1, tiled.num_columns), grad.reshape(-1, tiled.num_rows)
        grad_x = torch.zeros_like(flat) if wants_x else None
        reducer = _TileReducer(tiled) if wants_weight else None
        tiles = tiled.whole_tiles() if wants_x else ((tile, None) for tile in tiled.tiles)
        for tile, weight in tiles:
            columns = _columns(out, tile)
            if grad_x is not None and weight is not None:
                grad_x.addmm_(columns, weight)
            if reducer is not None:
                reducer.reduce(tile, columns.t() @ flat)
        if reducer is not None:
            reducer.show_mean()
            tiled.closed(ctx.use)
        return None if grad_x is None else grad_x.view(x.shape), None, None


class _Embedding(torch.autograd.Function):
    """Rows of a tiled weight [R, C] for tokens [...]: [..., C]."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, anchor: Tensor, tiled: TiledWeight, padding_idx: int | None
    ) -> Tensor:
        ctx.tiled, ctx.padding_idx = tiled, padding_idx
        ctx.use = tiled.opened() if anchor.requires_grad else None
        ctx.save_for_backward(tokens)
        flat = tokens.reshape(-1)
        check_rows(flat, tiled.num_rows)
        y = torch.empty(len(flat), tiled.num_columns, dtype=tiled.dtype, device=flat.device)
        numbers, rows = places(flat, tiled.tile_rows)
        for number, (_, weight) in enumerate(tiled.whole_tiles()):
            y = read_rows(y, weight, numbers == number, rows)
        return y.view(*tokens.shape, tiled.num_columns)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (tokens,), tiled = ctx.saved_tensors, ctx.tiled
        tiled.refuse_graph()
        if ctx.needs_input_grad[1]:
            flat, out = tokens.reshape(-1), grad.reshape(-1, tiled.num_columns)
            if ctx.padding_idx is not None:
                out = out.masked_fill((flat == ctx.padding_idx).unsqueeze(1), 0)
            reducer = _TileReducer(tiled)
            numbers, rows = places(flat, tiled.tile_rows)
            for number, tile in enumerate(tiled.tiles):
                partial = sum_rows(out, tile.num_rows, numbers == number, rows)
                reducer.reduce(tile, partial)
            reducer.show_mean()
            tiled.closed(ctx.use)
        return None, None, None, None
