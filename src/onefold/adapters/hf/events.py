"""Let ranks agree, at the events of a Trainer, on where they are and what comes next.

A flag that one rank alone has set, as to stop early, would let that rank leave the loop while the
others wait for its shards. Two small messages a step prevent it: at the end of a step the flags of
all ranks are joined, and at its beginning a rank that has left is found, and named.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import distributed_c10d

from onefold.engine.engine import Engine
from onefold.errors import OnefoldError, StateError, WireError

FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate")


def meet(engine: Engine, place: str, value: Any = None) -> list[Any]:
    """Return the `value` of every rank, in rank order. A collective.

    Raises `StateError`, on every rank, with the place of each, if one came from another place.
    """
    everyone: list[Any] = engine.group.gather((place, value))
    pairs = [pair if isinstance(pair, tuple) else ("elsewhere", None) for pair in everyone]
    if any(other != place for other, _ in pairs):
        places = "; ".join(f"rank {rank} is at {other}" for rank, (other, _) in enumerate(pairs))
        wanted = "every rank at the same place of the training"
        hint = "save on every rank, and not on rank 0 alone; set control flags "
        hint += "(should_training_stop ...) alike on every rank, or in a callback before "
        hint += "onefold.hf.Callback in the list; give every rank as many batches"
        raise StateError(wanted, places, where=f"rank {engine.group.rank}", hint=hint)
    return [theirs for _, theirs in pairs]


def agree(engine: Engine, event: str, step: int, control: Any) -> None:
    """Set on every rank the flags of a `TrainerControl` that one rank has set. A collective.

    Raises `StateError` on every rank, if a rank is at another event, or has done other steps.
    """
    mine = [bool(getattr(control, name)) for name in FLAGS]
    everyone = meet(engine, f"{event}, after {step} steps", mine)
    for name, votes in zip(FLAGS, zip(*everyone, strict=True), strict=True):
        if any(votes):
            setattr(control, name, True)


@contextmanager
def name_lost_ranks(engine: Engine) -> Iterator[None]:
    """Raise `WireError` where torch's own collectives fail, as Accelerate uses them.

    Another rank has then raised an error in the user's code, and its process has ended.
    """
    try:
        yield
    except RuntimeError as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if isinstance(error, OnefoldError) or last.filename != distributed_c10d.__file__:
            raise
        wanted = "every rank to stay in the training"
        got = f"{str(error).splitlines()[0]}, in torch.distributed.{last.name}"
        hint = "a rank has ended or left the training: look for the first error among the "
        hint += "other ranks"
        raise WireError(wanted, got, where=f"rank {engine.group.rank}", hint=hint) from error
