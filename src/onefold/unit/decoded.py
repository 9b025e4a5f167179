"""DecodedWeight: a weight whose bytes rest and travel quantized. PackedMatrix: what modules show.

at rest, gathered   uint8 [nbytes]           the message of all elements (unit/formats.py)
unsharded           compute dtype [shape]    decoded when its modules start, freed with the unit

A weight that is multiplied in its bytes is decoded only where an operation asks for its numbers.
They are freed whenever the unit rests, also where its bytes stay, and where the numbers of another
unit are decoded. Its modules show a PackedMatrix: it has the shape, dtype and device of the
numbers, but no numbers, as one NaN stands in for them all. `F.linear` (nn.Linear) and `torch.addmm`
(transformers' Conv1D) multiply with the gathered bytes. `stack[index]` of a stack of matrices, as
experts are, is the PackedMatrix of one. Any other operation gets the decoded numbers.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_iter, tree_map

from onefold.compat import untraced
from onefold.layout.ledger import Kind
from onefold.layout.packed import QuantizedWeight
from onefold.unit import refusals
from onefold.unit.buffer import Buffer
from onefold.unit.context import Context
from onefold.unit.dtensors import without_backward
from onefold.unit.formats import MATRIX_FORMATS, MatrixParts, format_of
from onefold.unit.functions import VALUES, is_passive


class DecodedWeight:
    """The numbers of a quantized weight, valid from `fill` to `release`, and its products."""

    def __init__(
        self, quantized: QuantizedWeight, message: Tensor, context: Context, label: str
    ) -> None:
        """`message`: uint8 [nbytes], a view of the unit's full buffer; `label`: in errors."""
        self.shape, self.dtype = quantized.shape_of_numbers, quantized.dtype_of_numbers
        self.compute_dtype = context.compute or self.dtype
        self.is_multiplied, self.is_transposed = quantized.is_multiplied, quantized.is_transposed
        self.message, self.label, self._format = message, label, format_of(quantized.word)
        self._context = context
        self._buffer: Buffer | None = None
        self._view: Tensor  # the numbers, once there is a buffer
        self._target: Tensor  # the same memory as it is decoded to
        self.matrices: list[MatrixParts] = []  # that are multiplied with
        if self.is_multiplied:
            self._products = MATRIX_FORMATS[quantized.word]
            self.matrices = self._products.matrices(message, self.shape_in_message)
        else:
            self._room_for_values().release()

    @property
    def view(self) -> Tensor:
        """The numbers [shape], which are valid after `fill`."""
        self._room_for_values()
        return self._view

    @property
    def tensor(self) -> Tensor:
        """The flat numbers."""
        return self._room_for_values().tensor

    @property
    def shown(self) -> Tensor:
        """The values of the parameter that modules show."""
        return self.stand_in(len(self.shape)) if self.is_multiplied else self.view

    def stand_in(self, num_dims: int) -> Tensor:
        """A tensor without numbers, in the last `num_dims` dimensions."""
        nan = torch.full((), torch.nan, dtype=self.compute_dtype, device=self.message.device)
        return nan.expand(self.shape[-num_dims:])

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the weight's PackedMatrix."""
        return {"_onefold_weight": self, "_onefold_index": 0 if len(self.shape) == 2 else None}

    def _room_for_values(self) -> Buffer:
        if self._buffer is None:
            numel, context = self.shape.numel(), self._context
            with torch.inference_mode(False):  # else nothing may resize it
                self._buffer = Buffer(
                    numel, self.compute_dtype, Kind.UNSHARDED, context.store, context.ledger
                )
                self._target = self._buffer.view(0, self.shape_in_message)
                self._view = self._turned(self._target.data)  # a refill is no edit of it
            self._buffer.release()
        return self._buffer

    @property
    def shape_in_message(self) -> tuple[int, ...]:
        """The shape that was quantized: rows are outputs."""
        shape = tuple(self.shape)
        return (*shape[:-2], shape[-1], shape[-2]) if self.is_transposed else shape

    def _turned(self, numbers: Tensor) -> Tensor:
        return numbers.transpose(-1, -2) if self.is_transposed else numbers

    def fill(self) -> None:
        """Decode the gathered message, unless that was done since the last `release`."""
        if self.is_multiplied and (self._buffer is None or not self._buffer.is_held):
            self._context.numbers.note(self.message, self.release)
        room = self._room_for_values()
        if not room.is_held:
            room.reallocate()
            self._format.decode(self.message, self._target)

    def release(self) -> None:
        """Free the numbers."""
        if self._buffer is not None:
            self._buffer.release()

    def plain(self, message: Tensor) -> Tensor:
        """The numbers of a message, in memory of their own and their own dtype."""
        numbers = message.new_empty(self.shape_in_message, dtype=self.dtype)
        self._format.decode(message, numbers)
        return self._turned(numbers).contiguous()

    def message_of(self, numbers: Tensor) -> Tensor:
        """Quantize numbers [shape] anew. Numbers decoded from blocks give the same bytes."""
        message = self.message.new_empty(self.message.shape)
        self._format.encode(self._turned(numbers.detach().to(message.device)), message)
        return message

    def product(self, x: Tensor, matrix: MatrixParts) -> Tensor:
        """Multiply inputs [..., K] with a matrix [N, K]; return [..., N]."""
        if not self.message.untyped_storage().size():
            raise refusals.RELEASED(where=self.label)
        product = self._products.linear(x.detach(), matrix)
        if torch.is_grad_enabled() and x.requires_grad:
            return without_backward(product, partial(refusals.NO_BACKWARD, where=self.label), x)
        return product


class PackedMatrix(nn.Parameter):
    """A matrix, or a stack of them, that is multiplied with while it is packed."""

    _onefold_weight: DecodedWeight
    _onefold_index: int | None  # of the matrix; None of a stack

    @classmethod
    @untraced
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        in_bytes = _IN_BYTES.get(func)
        product = None if in_bytes is None else in_bytes(*args, **kwargs)
        return _on_numbers(func, args, kwargs) if product is None else product


# in bytes; None where the numbers are needed


def _linear(x: Any, weight: Any, bias: Any = None) -> Tensor | None:
    product = _multiplied(x, weight, is_transposed=False)
    return product if product is None or bias is None else product + bias


def _addmm(bias: Any, x: Any, weight: Any, **options: Any) -> Tensor | None:
    product = None if options else _multiplied(x, weight, is_transposed=True)
    return None if product is None else product + bias


def _multiplied(x: Any, shown: Any, *, is_transposed: bool) -> Tensor | None:
    if isinstance(x, PackedMatrix) or not isinstance(shown, PackedMatrix):
        return None
    weight, index = shown._onefold_weight, shown._onefold_index
    if index is None or weight.is_transposed != is_transposed or x.dtype != weight.compute_dtype:
        return None
    matrix = weight.matrices[index]
    if x.shape[-1] != matrix.shape[1] or torch.is_autocast_enabled(x.device.type):
        return None
    return weight.product(x, matrix)


def _item(stack: Any, index: Any) -> Tensor | None:
    weight: DecodedWeight = stack._onefold_weight
    is_scalar = isinstance(index, Tensor) and not index.dim() and index.dtype != torch.bool
    is_integer = is_scalar or (isinstance(index, int) and not isinstance(index, bool))
    if stack._onefold_index is not None or len(weight.shape) != 3 or not is_integer:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        matrix = PackedMatrix(weight.stand_in(2), requires_grad=False)
    matrix._onefold_weight = weight
    matrix._onefold_index = range(len(weight.matrices))[int(index)]
    return matrix


_IN_BYTES: dict[Any, Any] = {F.linear: _linear, torch.addmm: _addmm, Tensor.__getitem__: _item}


def _on_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run any other operation on decoded numbers; bookkeeping on the stand-in."""
    if is_passive(func) and func not in VALUES:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    leaves = list(tree_iter((args, kwargs)))
    shown = {id(leaf): leaf for leaf in leaves if isinstance(leaf, PackedMatrix)}
    numbers = {key: _numbers_of(leaf) for key, leaf in shown.items()}
    versions = [tensor._version for tensor in numbers.values()]
    plain_args, plain_kwargs = tree_map(lambda leaf: numbers.get(id(leaf), leaf), (args, kwargs))
    with torch.set_grad_enabled(False):
        outputs = func(*plain_args, **plain_kwargs)
    label = next(iter(shown.values()))._onefold_weight.label
    if versions != [tensor._version for tensor in numbers.values()]:
        raise refusals.EDIT_OF_PACKED(where=label)
    sources = [
        x for x in leaves if isinstance(x, Tensor) and id(x) not in shown and x.requires_grad
    ]
    if not sources or not torch.is_grad_enabled():
        return outputs

    def refuse_backward(output: Any) -> Any:
        if not (isinstance(output, Tensor) and output.is_floating_point()):
            return output
        return without_backward(output, partial(refusals.NO_BACKWARD, where=label), *sources)

    return tree_map(refuse_backward, outputs)


def _numbers_of(shown: PackedMatrix) -> Tensor:
    weight, index = shown._onefold_weight, shown._onefold_index
    weight.fill()
    return weight.view if index is None or len(weight.shape) == 2 else weight.view[index]
