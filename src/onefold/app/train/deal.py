"""The rows of a global batch that each rank of `onefold train` takes."""

from __future__ import annotations

from typing import Any

from torch import nn

from onefold.app.train.corpus import own_rows
from onefold.app.train.job import Job
from onefold.errors import ConfigError
from onefold.mixed.sampler import check_shares, split_rows
from onefold.mixed.speeds import RowSpeeds, even, measure

AUTO = "auto"


def preflight(job: Job, world_size: int) -> None:
    """Refuse shares of rows that cannot work, before any rank starts."""
    if job.row_shares is None:
        return
    if job.model_ranks > 1:
        hint = "leave --rows out: ranks that share a layer or a row have the same rows"
        wanted = "no --rows beside --tp, --pp and --cp"
        raise ConfigError(wanted, "both", hint=hint)
    if not isinstance(job.row_shares, str):
        check_shares(job.row_shares, world_size)


class RowDeal:
    """Decides before each step which rows of the global batch this rank takes."""

    def __init__(self, job: Job, module: nn.Module, rank: int, world_size: int) -> None:
        self._rows = job.rows
        self._rank, self._world_size = rank, world_size
        self._shares: tuple[float, ...] | None = None
        self._speeds: RowSpeeds | None = None
        if job.row_shares == AUTO:
            self._speeds = measure(module)
        elif job.row_shares is not None:
            self._shares = check_shares([float(each) for each in job.row_shares], world_size)

    @property
    def own(self) -> range:
        """This rank's rows of the next global batch."""
        shares = self._shares if self._speeds is None else self._speeds.shares
        if shares is None:
            return own_rows(self._rows, self._rank, self._world_size)
        return split_rows(self._rows, shares)[self._rank]

    @property
    def stateful(self) -> dict[str, Any]:
        """What a checkpoint keeps: shares that were measured."""
        return {} if self._speeds is None else {"row_shares": self}

    def state_dict(self) -> dict[str, Any]:
        """Return the measured shares."""
        assert self._speeds is not None, "see `stateful`"
        return {"shares": list(self._speeds.shares)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with shares; those of another number of ranks become equal ones."""
        assert self._speeds is not None, "see `stateful`"
        same = len(state["shares"]) == self._world_size
        self._speeds.begin_at(tuple(state["shares"]) if same else even(self._world_size))
