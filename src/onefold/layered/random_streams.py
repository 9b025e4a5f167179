"""Random numbers of micro-batches that take turns: each draws from a stream of its own.

The first micro-batch goes on with the generator as it is. Each other one has a seed, drawn from a
copy of that generator. So dropout is the same in every order. It is that of a loop which calls
`torch.manual_seed(seed)` before each micro-batch but the first.

All threads share the generators. So another thread than the main one takes them only for a module
that has Dropout layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import current_thread, main_thread

import torch
from torch import Tensor, nn

from onefold.engine.first_batch import has_dropout


def seeds_of(number: int) -> list[int]:
    """Return the seeds of micro-batches 1 to `number - 1`, and leave the generator as it is."""
    copy = torch.Generator()
    copy.set_state(torch.default_generator.get_state())
    return torch.randint(2**62, (max(0, number - 1),), generator=copy).tolist()


class RandomStreams:
    """The generators of the CPU and of one device, as each micro-batch has left them."""

    def __init__(self, number: int, device: torch.device, module: nn.Module) -> None:
        is_taken = current_thread() is main_thread() or has_dropout(module)
        self._generators = [torch.default_generator] if is_taken else []
        if device.type == "cuda" and is_taken:
            index = device.index if device.index is not None else torch.cuda.current_device()
            self._generators.append(torch.cuda.default_generators[index])
        begun = self._states()
        self._left: list[list[Tensor]] = [begun]
        for seed in seeds_of(number):
            seeded = [torch.Generator(g.device).manual_seed(seed) for g in self._generators]
            self._left.append([generator.get_state() for generator in seeded])
        self._begun = list(self._left)

    @contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Draw from the stream of one micro-batch in this block."""
        self._set(self._left[number])
        try:
            yield
        finally:
            self._left[number] = self._states()

    def end(self) -> None:
        """Go on where the first micro-batch has stopped: nowhere else, if nothing is drawn."""
        self._set(self._left[0])

    def undo(self) -> None:
        """Set the generators, and all streams, to what they were."""
        self._left = list(self._begun)
        self._set(self._begun[0])

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
