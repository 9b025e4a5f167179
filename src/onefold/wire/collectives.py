"""The only file that calls `torch.distributed` collectives, and the ranks that take part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

from onefold.errors import WireError
from onefold.ticket import Waitable

_ALL_GATHER, _ALL_TO_ALL = AllgatherOptions(), AllToAllOptions()
_ALL_GATHER.asyncOp = _ALL_TO_ALL.asyncOp = True
"""For calls of the group itself: `torch.distributed`'s functions check as much time again."""


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks among which state is sharded. `handle` is None for a world of one without a group.

    All ranks here are ranks inside the group, not global ones.
    """

    rank: int
    world_size: int
    handle: dist.ProcessGroup | None

    @staticmethod
    def of(handle: dist.ProcessGroup | None) -> Group:
        if handle is None:
            return Group(0, 1, None)
        return Group(dist.get_rank(handle), dist.get_world_size(handle), handle)

    @property
    def is_nccl(self) -> bool:
        """True if tensors of a GPU go by NCCL, maybe beside another backend for the CPU's."""
        return self.handle is not None and "cuda:nccl" in dist.get_backend_config(self.handle)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Waitable:
        """Start sending `tensor` of rank `source` into `tensor` of all others, in place."""
        return self._issue(
            lambda group: dist.broadcast(tensor, group=group, group_src=source, async_op=True)
        )

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Waitable:
        """Start gathering equal shards in rank order into `out`."""
        out, shard = _real(out), _real(shard)
        return self._issue(lambda group: group.all_gather_single(out, shard, _ALL_GATHER))

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor) -> Waitable:
        """Start summing `full` over the ranks; rank r gets the r-th of equal pieces in `out`."""
        return self._issue(
            lambda group: dist.reduce_scatter_single(out, full, group=group, async_op=True)
        )

    def all_to_all(
        self, out: torch.Tensor, sent: torch.Tensor, numels_out: list[int], numels_sent: list[int]
    ) -> Waitable:
        """Start sending consecutive pieces of `sent` to ranks 0, 1, ...; `out` likewise."""
        out, sent = _real(out), _real(sent)
        return self._issue(
            lambda group: group.all_to_all_single(out, sent, numels_out, numels_sent, _ALL_TO_ALL)
        )

    def _issue(self, start: Callable[[dist.ProcessGroup], Waitable | None]) -> Waitable:
        work = None
        if isinstance(self.handle, dist.ProcessGroup):
            try:
                work = start(self.handle)
            except RuntimeError as error:
                raise WireError(
                    f"expected a collective to start, got: {str(error).splitlines()[0]}\n"
                    "hint: the process group is destroyed, or an earlier collective of it failed"
                ) from error
        if work is None:
            raise WireError(
                "expected this rank to be in the process group, got no work\n"
                "hint: pass a mesh or group that contains every rank that calls onefold.shard"
            )
        return work

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` by its maximum over the ranks; blocks."""
        if self.handle is not None:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.handle)

    def all_gather_object(self, value: object) -> list[object]:
        """Every rank's `value`, in rank order; blocks. For set-up only: it pickles."""
        values: list[object] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.handle)
        return values


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Backends send real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
