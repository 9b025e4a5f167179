"""Cut sequences, and the arguments of a module's forward, into the piece of one rank.

`Calls` is for plain modules; transformers_split.py has those of models of transformers.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, nn

from onefold.engine.watch import tensors_in
from onefold.errors import ConfigError

Arguments = dict[str, Any]
"""Arguments by name; positional ones of an unknown name are called "0", "1", ..."""


IGNORED = -100
"""The label of a position without a target, as `cross_entropy` has it."""


@dataclass(frozen=True, slots=True)
class SequencePieces:
    """Equal pieces of `length` positions over `parts` ranks; the last ones end in padding."""

    length: int
    parts: int
    index: int

    @property
    def local(self) -> int:
        """Positions of each piece, padding included."""
        return -(-self.length // self.parts)

    @property
    def padded(self) -> int:
        """Positions of all pieces."""
        return self.local * self.parts

    @property
    def padding(self) -> int:
        """Positions beyond the sequence."""
        return self.padded - self.length

    def cut(self, tensor: Tensor, dim: int, pad: float = 0) -> Tensor:
        """Return this rank's piece of a whole tensor along `dim`, padded with `pad`."""
        start = min(self.index * self.local, self.length)
        stop = min(start + self.local, self.length)
        piece = tensor.narrow(dim, start, stop - start)
        if stop - start == self.local:
            return piece
        shape = list(piece.shape)
        shape[dim] = self.local - (stop - start)
        return torch.cat([piece, piece.new_full(shape, pad)], dim)

    def labels(self, labels: Tensor, *, shift: bool) -> Tensor:
        """Return this rank's piece of whole labels [rows, length], shifted before the cut."""
        if shift:
            beyond = labels.new_full((labels.shape[0], 1), IGNORED)
            labels = torch.cat([labels[:, 1:], beyond], 1)
        return self.cut(labels, 1, IGNORED).contiguous()

    def positions(self, device: torch.device) -> Tensor:
        """Return this rank's global positions, [1, local]; those of padding are 0."""
        return self.cut(torch.arange(self.length, device=device), 0)[None]


class Calls:
    """How a module's forward is called for one piece of its sequence.

    Every tensor whose second axis is the sequence is cut, and global positions are passed.
    """

    has_own_masks = False  # every attention has a mask that covers padding

    def __init__(self, module: nn.Module, positions: str | None) -> None:
        if positions is not None and not takes(module, positions):
            wanted = f"a forward that takes the positions of its tokens as {positions!r}"
            got = f"{type(module).__name__}.forward{inspect.signature(module.forward)}"
            hint = "positions that the module counts itself would begin at 0 on each rank: "
            hint += "add the argument, name another by positions=, or pass positions=None if no "
            hint += "part of the module needs them"
            raise ConfigError(wanted, got, hint=hint)
        self._positions = positions

    def local(self, whole: Arguments, pieces: SequencePieces) -> Arguments:
        """Cut the arguments of a forward over the `whole` sequence."""
        main = main_tensor(whole)
        arguments, name = dict(whole), self._positions
        if name is not None and arguments.get(name) is None:
            arguments[name] = torch.arange(pieces.length, device=main.device)[None]
        elif name is not None and arguments[name].ndim == 1:
            arguments[name] = arguments[name][None]
        return {key: cut_tensors(value, main, pieces) for key, value in arguments.items()}

    def around(self, whole: Arguments, pieces: SequencePieces) -> AbstractContextManager[object]:
        return nullcontext()

    def outputs(self, outputs: Any) -> Any:
        """Return the outputs without those that one piece cannot give."""
        return outputs

    def remove(self) -> None:
        """Undo what was changed for these calls."""


def main_tensor(whole: Mapping[str, Any]) -> Tensor:
    """Return the first tensor with rows and positions, whose second axis is the sequence."""
    values = [value for name, value in whole.items() if not name.endswith("mask")]
    main = next((tensor for tensor in tensors_in(values) if tensor.ndim > 1), None)
    if main is None or main.ndim > 3:
        wanted = "tokens [rows, positions], or vectors for each, as first argument of a forward"
        got = "none" if main is None else f"shape {list(main.shape)}"
        hint = "call the module that onefold.split_sequence was given with whole rows"
        raise ConfigError(wanted, got, hint=hint)
    return main


def cut_tensors(value: Any, main: Tensor, pieces: SequencePieces) -> Any:
    """Cut the tensors [rows or 1, positions, ...] in a value; masks of four axes stay whole."""
    if isinstance(value, Tensor):
        rows_and_positions = tuple(value.shape[:2]) in (tuple(main.shape[:2]), (1, pieces.length))
        return pieces.cut(value, 1) if rows_and_positions and value.ndim < 4 else value
    if type(value) in (tuple, list):
        return type(value)(cut_tensors(item, main, pieces) for item in value)
    if type(value) is dict:
        return {key: cut_tensors(item, main, pieces) for key, item in value.items()}
    return value


def positional_names(module: nn.Module) -> Iterator[str]:
    """Yield the names of a forward's positional arguments, then "3", "4", ... without end."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in _parameters(module) if p.kind in kinds]
    return chain(names, map(str, count(len(names))))


def takes(module: nn.Module, name: str) -> bool:
    """True if the forward has the argument, or takes any."""
    return any(
        p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in _parameters(module)
    )


def _parameters(module: nn.Module) -> Iterator[inspect.Parameter]:
    forward: Callable[..., Any] = module.forward
    yield from inspect.signature(forward).parameters.values()
