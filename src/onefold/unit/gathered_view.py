"""Views of gathered rows, through which writes reach the rows of every rank: `p[0].zero_()`.

DTensor gathers a tensor to cut the dimension that ranks share, and loses what is written to the
result. A `GatheredView` keeps the sharded tensor and, as every view, its place in the gathered
rows. A write gathers anew, because rows may have changed since, and runs on a view at that place.
Each rank then keeps its own rows.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter, tree_map

from onefold.compat import untraced
from onefold.unit import refusals
from onefold.unit.functions import SET_DATA, VALUES, is_passive, writes
from onefold.unit.quantized_bytes import plain_bytes, refuse_edit


class GatheredView(Tensor):
    """A plain tensor: a view of the gathered rows of a sharded one."""

    _target: DTensor

    @classmethod
    @untraced
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is SET_DATA or (is_passive(func) and func not in VALUES):  # of this object
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if any(isinstance(leaf, GatheredView) for leaf in tree_iter(kwargs.get("out"))):
            raise refusals.LOST_WRITE(_label(args[0] if args else None))
        if writes(func):
            return _write_through(func, args, kwargs)
        viewed = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, GatheredView)]
        outputs = func(*tree_map(_plain_leaf, args), **tree_map(_plain_leaf, kwargs))
        return as_views(outputs, viewed[0]._target, viewed[0])


def view_of_rows(
    func: Callable[..., Any], target: DTensor, others: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the views that a function makes of all rows of a sharded tensor. A collective."""
    rows = _gathered(target)
    return as_views(func(rows, *others, **kwargs), target, rows)


def as_views(outputs: Any, target: DTensor, rows: Tensor) -> Any:
    """Let those of `outputs` that share memory with `rows` write to `target`."""

    def shown(output: Any) -> Any:
        if isinstance(output, Iterator):
            return map(shown, output)
        if not isinstance(output, Tensor) or isinstance(output, DTensor | GatheredView):
            return output
        with torch._C.DisableTorchFunctionSubclass():
            if output.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr():
                return output
            view = output.as_subclass(GatheredView)
        view._target = target
        return view

    return tree_map(shown, outputs)


def _write_through(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = args[0] if args else next(iter(kwargs.values()))  # torch.nn.init passes names
    written = [leaf for leaf in tree_iter(first) if isinstance(leaf, GatheredView)]
    refuse_edit(func, ([view._target for view in written],), {})
    rows = {id(view._target): _gathered(view._target) for view in written}
    fresh = {id(view): _place_in(rows[id(view._target)], view) for view in written}
    plain_args, plain_kwargs = tree_map(
        lambda leaf: fresh[id(leaf)] if id(leaf) in fresh else _plain_leaf(leaf), (args, kwargs)
    )
    outputs = func(*plain_args, **plain_kwargs)
    with torch.no_grad():
        for target in {id(view._target): view._target for view in written}.values():
            target.copy_(rows[id(target)].detach())  # each rank cuts its own
        for view in written:
            _plain_leaf(view).copy_(fresh[id(view)])
    return first if isinstance(outputs, Tensor) and written else outputs


def _gathered(target: DTensor) -> Tensor:
    """All rows, contiguous: views of them keep their place in storage."""
    full = plain_bytes(target.full_tensor().detach())
    is_whole = full.is_contiguous() and not full.storage_offset()
    return full if is_whole else full.clone(memory_format=torch.contiguous_format)


def _place_in(rows: Tensor, view: GatheredView) -> Tensor:
    """The part of gathered rows that a view shows."""
    plain = _plain_leaf(view)
    if plain.dtype != rows.dtype or plain.is_conj() or plain.is_neg():
        raise refusals.LOST_WRITE(_label(view))
    return rows.as_strided(plain.size(), plain.stride(), plain.storage_offset())


def _label(view: object) -> str:
    return getattr(getattr(view, "_target", None), "_label", "a sharded tensor")


def _plain_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, GatheredView):
        return leaf
    with torch._C.DisableTorchFunctionSubclass():
        return leaf.as_subclass(Tensor)
