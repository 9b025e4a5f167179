"""PackedMatrix: the parameter that modules show of a weight that is multiplied in its bytes.

It has the shape, dtype and device of the numbers, but no numbers: one NaN stands in for them all.
`F.linear` (nn.Linear) and `torch.addmm` (transformers' Conv1D) multiply with the gathered bytes.
`stack[index]` of a stack of matrices, as experts are, is the PackedMatrix of one. Any other
operation gets the decoded numbers, which are freed when the unit rests.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_iter, tree_map

from onefold.unit import refusals
from onefold.unit.decoded import DecodedWeight
from onefold.unit.dtensors import is_passive, reads_values, without_backward
from onefold.unit.formats import MATRIX_FORMATS, MatrixParts


class Product:
    """The bytes of one weight, and products with its matrices."""

    def __init__(self, weight: DecodedWeight, label: str) -> None:
        self.weight, self.label = weight, label
        self._format = MATRIX_FORMATS[weight.word]
        self.matrices = self._format.matrices(weight.message, weight.shape_in_message)

    def of(self, x: Tensor, matrix: MatrixParts) -> Tensor:
        """Multiply inputs [..., K] with a matrix [N, K]; return [..., N]."""
        if not self.weight.message.untyped_storage().size():
            raise refusals.RELEASED(where=self.label)
        product = self._format.linear(x.detach(), matrix)
        if torch.is_grad_enabled() and x.requires_grad:
            return without_backward(product, partial(refusals.NO_BACKWARD, where=self.label), x)
        return product


class PackedMatrix(nn.Parameter):
    """A matrix, or a stack of them, that is multiplied with while it is packed."""

    _onefold_product: Product
    _onefold_index: int | None  # of the matrix; None of a stack

    @classmethod
    @torch._disable_dynamo
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        in_bytes = _IN_BYTES.get(func)
        found = None if in_bytes is None else in_bytes(*args, **kwargs)
        return _on_numbers(func, args, kwargs) if found is None else found


def attributes_of(weight: DecodedWeight, label: str) -> dict[str, Any]:
    """The attributes of the PackedMatrix of a weight."""
    index = 0 if len(weight.shape) == 2 else None
    return {"_onefold_product": Product(weight, label), "_onefold_index": index}


def shown_of(weight: DecodedWeight) -> Tensor:
    """The values of the parameter that modules show."""
    return stand_in(weight, len(weight.shape)) if weight.is_multiplied else weight.view


def stand_in(weight: DecodedWeight, num_dims: int) -> Tensor:
    """A tensor without numbers, in the last `num_dims` dimensions of a weight."""
    nan = torch.full((), torch.nan, dtype=weight.compute_dtype, device=weight.message.device)
    return nan.expand(weight.shape[-num_dims:])


# in bytes; None where the numbers are needed


def _linear(x: Any, weight: Any, bias: Any = None) -> Tensor | None:
    product = _multiplied(x, weight, is_transposed=False)
    return product if product is None or bias is None else product + bias


def _addmm(bias: Any, x: Any, weight: Any, **options: Any) -> Tensor | None:
    product = None if options else _multiplied(x, weight, is_transposed=True)
    return None if product is None else product + bias


def _multiplied(x: Any, weight: Any, *, is_transposed: bool) -> Tensor | None:
    if isinstance(x, PackedMatrix) or not isinstance(weight, PackedMatrix):
        return None
    product, index = weight._onefold_product, weight._onefold_index
    own = product.weight
    if index is None or own.is_transposed != is_transposed or x.dtype != own.compute_dtype:
        return None
    matrix = product.matrices[index]
    if x.shape[-1] != matrix.shape[1] or torch.is_autocast_enabled(x.device.type):
        return None
    return product.of(x, matrix)


def _item(stack: Any, index: Any) -> Tensor | None:
    product: Product = stack._onefold_product
    is_number = isinstance(index, int) or (isinstance(index, Tensor) and not index.dim())
    is_integer = is_number and not isinstance(index, bool) and not _is_mask(index)
    if stack._onefold_index is not None or len(product.weight.shape) != 3 or not is_integer:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        found = PackedMatrix(stand_in(product.weight, 2), requires_grad=False)
    found._onefold_product = product
    found._onefold_index = range(len(product.matrices))[int(index)]
    return found


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


_IN_BYTES: dict[Any, Any] = {
    F.linear: _linear, torch.addmm: _addmm, Tensor.__getitem__: _item,
}  # fmt: skip


def _on_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run any other operation on decoded numbers; bookkeeping on the stand-in."""
    if is_passive(func) and not reads_values(func):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    leaves = list(tree_iter((args, kwargs)))
    shown = {id(leaf): leaf for leaf in leaves if isinstance(leaf, PackedMatrix)}
    numbers = {key: _numbers_of(leaf) for key, leaf in shown.items()}
    versions = [each._version for each in numbers.values()]
    plain_args, plain_kwargs = tree_map(lambda leaf: numbers.get(id(leaf), leaf), (args, kwargs))
    with torch.set_grad_enabled(False):
        outputs = func(*plain_args, **plain_kwargs)
    label = next(iter(shown.values()))._onefold_product.label
    if versions != [each._version for each in numbers.values()]:
        raise refusals.EDIT_OF_PACKED(where=label)
    sources = [
        x for x in leaves if isinstance(x, Tensor) and id(x) not in shown and x.requires_grad
    ]
    if not sources or not torch.is_grad_enabled():
        return outputs
    error = partial(refusals.NO_BACKWARD, where=label)
    return tree_map(
        lambda out: without_backward(out, error, *sources) if _has_gradient(out) else out,
        outputs,
    )


def _numbers_of(shown: PackedMatrix) -> Tensor:
    weight, index = shown._onefold_product.weight, shown._onefold_index
    weight.fill()
    return weight.view if index is None or len(weight.shape) == 2 else weight.view[index]


def _has_gradient(output: Any) -> bool:
    return isinstance(output, Tensor) and output.is_floating_point()
