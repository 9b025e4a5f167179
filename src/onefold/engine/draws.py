"""Random operations of one thread: seen, and given numbers of their own.

A probe must see whether a class draws. The global generator does not tell: other threads draw from
it too, and setting it back would rewind their numbers.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onefold.unit.deferred import with_generator

MOST = 10_000
"""Draws of one step: more are a loop that waits for another number, which never comes."""


class Draws(TorchDispatchMode):
    """Gives each random operation of this thread numbers that depend on the seed and its sizes.

    So two runs of a step draw the same numbers for tensors of one shape, in any order. No generator
    of the process is read or changed. An operation that takes no generator, as dropout, raises
    `RuntimeError`.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.num, self._seed = 0, seed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        self.num += 1
        if self.num > MOST:
            raise RuntimeError(f"more than {MOST} random operations in one step")
        func, at = with_generator(func)
        generator = torch.Generator().manual_seed(self._seed)
        if at < len(args):
            return func(*args[:at], generator, *args[at + 1 :], **kwargs)
        return func(*args, **{**kwargs, "generator": generator})
