"""Deal the rows of each global batch to ranks, unevenly where they differ; weigh their losses."""

import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from copy import copy
from functools import partial
from hashlib import blake2b
from math import isfinite
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler, default_collate

from onefold.errors import ConfigError, StateError
from onefold.mixed.speeds import RowSpeeds, even, measure
from onefold.wire import ranks as meshes
from onefold.wire.moves import mean_count

_SCALE = 1 << 30  # weights as whole numbers


class RowSampler(Sampler[list[int]]):
    """A `batch_sampler` that deals each global batch to the ranks by weights.

    One permutation of the whole dataset, a function of the seed and the epoch, is cut into global
    batches. They do not depend on the rank, the number of ranks or the shares. Each rank takes
    consecutive rows of each global batch. Weigh losses with `onefold.weigh`. A loader that
    Accelerate or Trainer has prepared deals the same rows.

    Args:
        dataset: a dataset with a length, or the number of its rows.
        rows: rows of a global batch, over all ranks.
        shares: one weight a rank; None: equal ones. Weight zero: no rows.
        shuffle: permute the rows in each epoch. False: in their order.
        seed: of the permutation; the same on every rank.
        drop_last: leave out the last global batch if it has less than `rows` rows. Else ranks may
            get no row of it: see `collate`.
        mesh: the ranks that take different rows, as in `onefold.weigh`. Default: the whole world.

    Raises:
        ConfigError: an empty dataset, a batch without rows or larger than the dataset that
            `drop_last` would leave out, or shares that are not one weight a rank.

    Example:
        >>> sampler = onefold.mixed.RowSampler(dataset, rows=64, seed=0)
        >>> loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=sampler.collate(dataset))
        >>> sampler.follow(model)            # rows move to the ranks that compute faster
        >>> for epoch in range(epochs):
        ...     sampler.set_epoch(epoch)
        ...     for x, y in loader:
        ...         onefold.weigh(loss_sum(model(x), y), len(y)).backward()
    """

    def __init__(
        self, dataset: Any, rows: int, *, shares: Sequence[float] | None = None,
        shuffle: bool = True, seed: int = 0, drop_last: bool = False,
        mesh: meshes.MeshChoice = None,
    ) -> None:  # fmt: skip
        group = meshes.of_tokens(mesh)
        self._rank, self._world_size = group.rank, group.world_size
        self._numel = dataset if isinstance(dataset, int) else len(dataset)
        self._rows = rows
        self._is_shuffled, self._drops_last = shuffle, drop_last
        self._seed, self._epoch = seed, 0
        self._speeds: RowSpeeds | None = None
        self._start = 0  # row of the epoch at which the next iteration begins
        self._next = 0  # row of the epoch that is dealt next
        self._is_loaded = False  # the next iteration begins at a position that was loaded
        self._moves = 0  # another position was set, so many times
        if rows < 1 or self._numel < (rows if drop_last else 1):
            wanted = "at least one global batch of at least one row"
            hint = "lower rows, or pass drop_last=False"
            got = f"{self._numel} rows in the dataset, rows={rows}"
            raise ConfigError(wanted, got, hint=hint)
        self.shares = even(self._world_size)
        if shares is not None:
            self.set_shares(shares)

    def __len__(self) -> int:
        """Return global batches of an epoch, the same on every rank."""
        return self._num_batches * _copies_for(sys._getframe(1), self)

    @property
    def _num_batches(self) -> int:
        return self._numel // self._rows if self._drops_last else -(-self._numel // self._rows)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of this rank's rows of each global batch; it may be none."""
        copies = _copies_for(sys._getframe(1), self)
        return _Dealt(self, (rows for rows in self._deal() for _ in range(copies)))

    def _deal(self) -> Iterator[list[int]]:
        order = self._order()
        self._next, self._start, self._is_loaded = self._start, 0, False
        stop = self._num_batches * self._rows if self._drops_last else self._numel
        while self._next < stop:
            batch = order[self._next : min(self._next + self._rows, stop)]
            self._next += self._rows
            if self._speeds is not None:
                self.shares = self._speeds.shares
            own = split_rows(len(batch), self.shares)[self._rank]
            yield batch[own.start : own.stop].tolist()

    def _order(self) -> Tensor:
        if not self._is_shuffled:
            return torch.arange(self._numel)
        # torch's generator takes 32 bits of a seed; a sum would repeat epochs of the next seed
        digest = blake2b(f"{self._seed} {self._epoch}".encode(), digest_size=4).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest))
        return torch.randperm(self._numel, generator=generator)

    def set_epoch(self, epoch: int) -> None:
        """Permute anew, from the first row; as with `DistributedSampler`, before each epoch.

        The epoch of a loaded state goes on where it was.

        Raises:
            StateError: an earlier epoch than that of a loaded position, which would be lost.
        """
        if self._is_loaded and epoch < self._epoch:
            wanted = f"epoch {self._epoch}, of the position that was loaded, or a later one"
            hint = "a loader of Accelerate counts epochs from 0: call loader.set_epoch(epoch), "
            hint += "with the epoch of the position, before the first iteration"
            raise StateError(wanted, epoch, hint=hint)
        if epoch != self._epoch:
            self._epoch, self._start, self._next, self._is_loaded = epoch, 0, 0, False
            self._moves += 1

    def set_shares(self, shares: Sequence[float]) -> None:
        """Deal by these weights from the next global batch on. Call it alike on every rank.

        Workers of a `DataLoader` read ahead: shares then change some batches later, on every rank
        in the same one. Ends `follow`.
        """
        self._speeds = None
        self.shares = check_shares(shares, self._world_size)

    def follow(self, module: nn.Module) -> None:
        """Deal by the measured speeds of the ranks from now on, see `Report.row_shares`.

        Call it on every rank, after `onefold.shard`. Each rank measures the compute time of its
        steps. Ranks exchange four numbers once in five steps.

        Raises:
            ConfigError: the module is sharded over other ranks than those of the sampler.
        """
        speeds = measure(module)
        ranks = speeds.group.rank, speeds.group.world_size
        if ranks != (self._rank, self._world_size):
            wanted = f"a module over the ranks of the sampler, rank {self._rank} of "
            wanted += f"{self._world_size}"
            hint = "pass the same mesh to onefold.shard and onefold.mixed.RowSampler"
            raise ConfigError(wanted, f"rank {ranks[0]} of {ranks[1]}", hint=hint)
        speeds.begin_at(self.shares)
        self._speeds = speeds

    def collate(
        self, dataset: Any, collate_fn: Callable[[list[Any]], Any] = default_collate,
        empty: Callable[[Any], Any] | None = None,
    ) -> Callable[[list[Any]], Any]:  # fmt: skip
        """Return a `collate_fn` that also makes the batch of a rank without rows.

        Args:
            dataset: the dataset; its first row gives dtypes and dimensions.
            collate_fn: for batches with rows.
            empty: makes the other batches from that of the first row. None: cuts each tensor to
                length zero. Models of transformers refuse such a batch: return the row with labels
                of -100, so that none of its tokens counts.
        """
        return partial(_collate, dataset, collate_fn, empty or _without_rows)

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return the position in the data, equal on every rank and for any number of ranks.

        Args:
            batches: global batches of this epoch that were trained on. Needed with workers of a
                `DataLoader`, which read ahead. None: all that were dealt.
        """
        dealt = self._next if batches is None else batches * self._rows
        return {
            "seed": self._seed, "epoch": self._epoch, "next_row": min(dealt, self._numel),
            "num_rows": self._numel, "shares": list(self.shares),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position. Shares of another number of ranks become equal ones.

        Call it before `iter(loader)`: workers read ahead, and an iteration that has begun raises
        `StateError` when it goes on.

        Raises:
            StateError: the position is one in a dataset of another length, or of another sampler.
        """
        hint = "resume with the dataset and the sampler of the run that was saved"
        try:
            place = [state[name] for name in ("seed", "epoch", "next_row", "num_rows")]
            shares = tuple(float(share) for share in state["shares"])
            seed, epoch, row, numel = map(int, place)
        except (KeyError, TypeError, ValueError) as error:
            got = f"{type(error).__name__}: {error}"
            raise StateError("a position of a RowSampler", got, hint=hint) from error
        if numel != self._numel or not 0 <= row <= numel:
            wanted = f"a position in a dataset of {self._numel} rows"
            raise StateError(wanted, f"row {row} of {numel}", hint=hint)
        self._seed, self._epoch, self._start, self._next = seed, epoch, row, row
        self._is_loaded = True
        self._moves += 1
        self.shares = shares if len(shares) == self._world_size else even(self._world_size)
        if self._speeds is not None:
            self._speeds.begin_at(self.shares)


class _Dealt(Iterator[list[int]]):
    """The batches of one iteration, which ends with a move to another position."""

    def __init__(self, sampler: RowSampler, batches: Iterator[list[int]]) -> None:
        self._sampler, self._batches = sampler, batches
        self._moves: int | None = None  # before this iteration began

    def __next__(self) -> list[int]:
        moves = self._sampler._moves
        if self._moves not in (None, moves):
            wanted = "the position in the data to stay while an iteration goes on"
            got = "load_state_dict or set_epoch after it had dealt rows"
            hint = "set the position first, then call iter(loader): its workers read ahead"
            raise StateError(wanted, got, hint=hint)
        self._moves = moves
        return next(self._batches)


def _copies_for(caller: FrameType, sampler: RowSampler) -> int:
    """How many times the caller is to see each batch of the sampler.

    [Note: prepared] `Accelerator.prepare` wraps a batch sampler into one that keeps one of N
    batches on each of N ranks (`BatchSamplerShard` of Accelerate 1.15). The batches here are this
    rank's already, so it sees each one N times, and keeps one. With `dispatch_batches=True`, rank 0
    reads for all ranks (`DataLoaderDispatcher`), and would never see the rows of the others.
    """
    frame = caller if sampler._world_size > 1 else None
    while frame is not None:
        if getattr(frame.f_locals.get("self"), "slice_fn", None) is not None:
            hint = "pass dispatch_batches=False in the DataLoaderConfiguration of the Accelerator"
            wanted = "each rank to read its own rows of a RowSampler"
            raise ConfigError(wanted, "rank 0 that reads for all ranks", hint=hint)
        frame = frame.f_back
    dealer = caller.f_locals.get("self")
    if getattr(dealer, "batch_sampler", None) is not sampler:
        return 1
    num_ranks: int = getattr(dealer, "num_processes", 1)
    if num_ranks not in (1, sampler._world_size):
        wanted = f"a loader prepared for the {sampler._world_size} ranks of the RowSampler"
        hint = "do not prepare the loader: the sampler deals the rows of each rank"
        raise ConfigError(wanted, f"one for {num_ranks}", hint=hint)
    return num_ranks


def _collate(
    dataset: Any, inner: Callable[[list[Any]], Any], empty: Callable[[Any], Any], rows: list[Any]
) -> Any:
    return inner(rows) if rows else empty(inner([dataset[0]]))


def _without_rows(value: Any) -> Any:
    """Return a batch of length zero; its tensors keep their other dimensions and dtypes."""
    if isinstance(value, Tensor):
        return value[:0] if value.dim() else value
    if isinstance(value, MutableMapping):
        batch = copy(value)
        for key, entry in value.items():
            batch[key] = _without_rows(entry)
        return batch
    if not isinstance(value, list | tuple):
        return value
    if not any(isinstance(entry, Tensor | MutableMapping | list | tuple) for entry in value):
        return value[:0]  # strings, which torch does not stack
    items = [_without_rows(entry) for entry in value]
    return type(value)(*items) if type(value) not in (list, tuple) else type(value)(items)


def weigh(loss_sum: Tensor, num_tokens: int | Tensor, *, mesh: meshes.MeshChoice = None) -> Tensor:
    """Scale a summed loss so that averaged gradients are those of the mean over all tokens.

    `onefold.shard`, like DDP, averages gradients over ranks. This rank's sum is divided by the
    mean of the ranks' token counts. So the average over ranks is the sum of all token losses
    divided by the number of all tokens, however tokens are spread. A collective. Ranks without
    tokens call it too, with 0, and run backward.

    Args:
        loss_sum: the sum of this rank's token losses, a scalar.
        num_tokens: how many tokens it adds up. With several micro-batches a step: the tokens of
            this rank in all of them, in each call.
        mesh: the ranks that call it: a mesh or a group, such as the data axes of a pipeline's last
            stage. Default: the whole world; ranks of a tensor axis then count alike.

    Returns:
        The scaled loss, a scalar in fp32 or wider; zero if no rank has tokens.

    Example:
        >>> sums = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
        >>> onefold.weigh(sums, (labels != -100).sum()).backward()
    """
    group = meshes.resolve(mesh).everyone
    dtype = torch.promote_types(loss_sum.dtype, torch.float32)  # fp16 ends at 65,504 tokens
    return loss_sum.to(dtype) / mean_count(num_tokens, group, loss_sum.device).to(dtype)


def check_shares(shares: Sequence[float], world_size: int) -> tuple[float, ...]:
    """Return weights of rows, scaled to a sum of 1.

    Raises `ConfigError` unless there is one finite weight a rank, none negative and one positive.
    """
    weights = tuple(float(share) for share in shares)
    hint = f"pass {world_size} weights, such as {[3, *[1] * (world_size - 1)]}"
    if len(weights) != world_size:
        raise ConfigError(f"{world_size} shares of rows, one a rank", weights, hint=hint)
    if any(not isfinite(share) or share < 0 for share in weights) or sum(weights) <= 0:
        raise ConfigError("finite shares of rows, none negative", weights, hint=hint)
    return tuple(share / sum(weights) for share in weights)


def split_rows(rows: int, shares: Sequence[float]) -> list[range]:
    """Return the rows of a global batch for each rank: contiguous, in rank order.

    Each rank gets its part rounded down. Ranks with the largest remainders get one row more. A rank
    with a positive weight gets one row at least, if there are enough; a rank with weight zero none.
    """
    weights = [round(share / sum(shares) * _SCALE) for share in shares]
    total = sum(weights)
    counts = [rows * weight // total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda rank: -(rows * weights[rank] % total))
    for rank in by_remainder[: rows - sum(counts)]:
        counts[rank] += 1
    without = [rank for rank, share in enumerate(shares) if share > 0 and counts[rank] == 0]
    if rows >= sum(share > 0 for share in shares):
        for rank in without:
            counts[counts.index(max(counts))] -= 1
            counts[rank] = 1
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
