"""DTensors that read as the unsharded value: gradients, `.data`, and results computed from them.

torch's DTensor gives `norm.item()` of this rank's part: a plain script would log another number on
each rank. And DTensor loses an indexed write, because it writes to a gathered copy.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_iter, tree_map

from onefold.compat import add_missing_rules, untraced
from onefold.layout.ranges import Ranges
from onefold.unit import cut_dtensor, refusals
from onefold.unit.functions import (
    ELEMENTWISE,
    NEW,
    READS,
    REFUSALS,
    SET_DATA,
    SHAPED,
    fills,
    has_no_identity,
    is_list,
    is_norm,
    is_view,
    writes,
)
from onefold.unit.gathered_view import view_of_rows
from onefold.unit.quantized_bytes import plain_bytes, refuse_edit
from onefold.unit.shown_grads import await_readers
from onefold.wire.peers import in_words


class LogicalValues(DTensor):
    """A DTensor that may stand beside plain tensors, as a parameter of a plain module may.

    Its ranks may hold unequal shares, which torch's own methods do not expect.
    """

    _label = "a sharded tensor"  # in errors
    awaits_readers = True

    @property
    def __tensor_flatten__(self) -> Any:  # type: ignore[override]
        """Refuse to be taken apart: torch.compile ends its graph at any use, and traces none."""
        raise AttributeError("__tensor_flatten__")

    def full_tensor(self, **options: Any) -> Tensor:
        full = cut_dtensor.full_tensor(self)
        try:
            return super().full_tensor(**options) if full is None else full
        except RuntimeError as error:
            raise in_words(self.device_mesh, error) from None

    def redistribute(self, *args: Any, **options: Any) -> DTensor:
        placements = args[1] if args[1:] else options.get("placements")
        whole = cut_dtensor.redistributed(self, placements)
        return super().redistribute(*args, **options) if whole is None else whole

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        items: list[Any] = super().__create_write_items__(fqn, object)
        return cut_dtensor.write_items(self, fqn, items) if cut_dtensor.is_weighted(self) else items

    def __create_chunk_list__(self) -> list[Any]:
        if cut_dtensor.is_weighted(self):
            return [cut_dtensor.box_of(self)]
        chunks: list[Any] = super().__create_chunk_list__()
        return chunks


def run_sharded(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` on DTensors, right where DTensor is not: empty shards, indexed writes.

    Raises `StateError` for an in-place operation with a plain tensor that is not elementwise.
    """
    refuse_edit(func, args, kwargs)
    if func in SHAPED and not isinstance(args[0], DTensor):
        return func(args[0], args[0].new_empty(()).expand(args[1].shape))
    if func is Tensor.__setitem__ and isinstance(args[0], DTensor):
        return _set_item(*args)
    if makes_view(func, args) and _cuts_rows(func, args, kwargs):
        return view_of_rows(func, args[0], *tree_map(gathered, (args[1:], kwargs)))
    if func is Tensor.__getitem__ and isinstance(args[0], DTensor) and is_list(args[1]):
        return args[0].full_tensor()[tree_map(gathered, args[1])]
    if fills(func):
        return _fill(func, args, kwargs)
    if getattr(func, "__name__", "").startswith("_foreach_") and writes(func):
        return func(*(_own_rows(args[0], operand) for operand in args), **kwargs)
    if args and writes(func):
        operands, kwargs = _like_target(func, args[0], (args[1:], kwargs))
        args = (args[0], *operands)
    shown = args[0] if args else None
    if has_no_identity(func, args, kwargs):
        args, kwargs = tree_map(_with_rows, (args, kwargs))
    return _run_by_dtensor(func, args, kwargs, shown)


def _run_by_dtensor(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], shown: Any
) -> Any:
    """Run `func`; raise `StateError` for an operation that DTensor does not define.

    `shown`: the first argument as it was given.
    """
    try:
        outputs = as_logical(func(*args, **kwargs))
        return _shown_where(shown, outputs) if is_norm(func) else outputs
    except RuntimeError as error:
        sharded: Any = next((x for x in tree_iter((args, kwargs)) if isinstance(x, DTensor)), None)
        if not any(words in str(error) for words in REFUSALS):
            raise in_words(getattr(sharded, "device_mesh", None), error) from None
        label = getattr(sharded, "_label", LogicalValues._label)
        raise refusals.UNREADABLE(label, getattr(func, "__name__", repr(func))) from error


def _shown_where(grads: Any, norms: Any) -> Any:
    """Show norms on the device where gradients are shown: torch moves each of them there.

    Gradients of parameters in CPU memory are shown there, and their values are on the device.
    """
    first = next((leaf for leaf in tree_iter(grads) if isinstance(leaf, DTensor)), None)
    if first is None or first.device == first._local_tensor.device:
        return norms
    empty = torch.empty(0, dtype=first.dtype, device=first.device)
    return tree_map(
        lambda norm: dtensor_over(LogicalTensor, norm._local_tensor, norm._spec, empty), norms
    )


def _refuse_lost_write(target: DTensor) -> None:
    """Raise `StateError` for a view that DTensor made of a gathered copy."""
    base = target._base if target._is_view() else None
    if not isinstance(base, DTensor):
        return
    own, seen = base._local_tensor.untyped_storage(), target._local_tensor.untyped_storage()
    if own.data_ptr() != seen.data_ptr():
        raise refusals.LOST_WRITE(getattr(base, "_label", LogicalValues._label))


def makes_view(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """True for a view, outside of any graph, of a tensor that ranks share."""
    if not (args and is_view(func) and isinstance(args[0], LogicalValues)):
        return False
    is_recorded = torch.is_grad_enabled() and args[0].requires_grad
    return not is_recorded and not any(p.is_partial() for p in args[0].placements)


def _cuts_rows(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for a view that needs rows of other ranks. Nothing is sent: DTensor tries on `meta`."""
    target, *others = args
    is_torchs = not (cut_dtensor.is_weighted(target) or torch.is_inference_mode_enabled())
    if not is_torchs or any(map(is_list, others)) or func is Tensor.__iter__:
        return True
    if not target.numel():  # torch's rule for view(-1) of [0, 3] never ends
        return True
    try:
        rows = dtensor_over(DTensor, target._local_tensor.to("meta"), target._spec)
        views = func(rows, *others, **kwargs)
    except RuntimeError:  # DTensor does not define it on these rows
        return True
    kept = [placement.is_shard() for placement in target.placements]
    return any([p.is_shard() for p in view.placements] != kept for view in tree_iter(views))


def _set_item(target: DTensor, index: Any, value: Any) -> None:
    """`target[index] = value`, on all ranks alike: a collective."""
    index, value = tree_map(gathered, (index, value))
    full = target.full_tensor()
    full[index] = value
    target.copy_(_cut_like(target, full))


def _set_data(target: LogicalValues, value: Tensor) -> None:
    """`target.data = value`, copied: DTensor would set the data of a wrapper that has none."""
    if value.shape != target.shape:
        raise refusals.MIXED_WRITE(target._label, f".data = a tensor of {list(value.shape)}")
    with torch.no_grad():
        run_sharded(Tensor.copy_, (target, value), {})


def _fill(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Have `func` fill a plain tensor of the whole shape, and keep own rows."""
    leaves = tree_iter((args, kwargs))
    target = next((leaf for leaf in leaves if isinstance(leaf, DTensor)), None)
    if target is None:
        return func(*args, **kwargs)
    full = torch.empty(target.shape, dtype=target.dtype, device=target._local_tensor.device)
    full.requires_grad_(target.requires_grad)  # torch refuses to write to such a leaf
    args, kwargs = tree_map(lambda leaf: full if leaf is target else leaf, (args, kwargs))
    values = func(*args, **kwargs)
    with torch.no_grad():
        own = _cut_like(target, values.detach())
        return target.copy_(own) if values is full else as_logical(own)


def _like_target(func: Callable[..., Any], target: Any, operands: Any) -> Any:
    """The operands of a write: gathered if `target` is plain, cut like it if it is not."""
    if isinstance(target, list | tuple):  # of torch._foreach_
        return operands if isinstance(target[0], DTensor) else tree_map(gathered, operands)
    if not isinstance(target, DTensor):
        return tree_map(gathered, operands)

    def cut(operand: Any) -> Any:
        if not isinstance(operand, Tensor) or isinstance(operand, DTensor) or not operand.dim():
            return operand
        name = getattr(func, "__name__", "")
        if name not in ELEMENTWISE:
            raise refusals.MIXED_WRITE(getattr(target, "_label", LogicalValues._label), f"{name}()")
        return _cut_like(target, operand.to(target.device).expand(target.shape))

    return tree_map(cut, operands)


def _own_rows(targets: Any, operands: Any) -> Any:
    """Own rows of each operand of a function that writes to a list, cut as its target is."""
    if not isinstance(operands, list | tuple):
        return gathered(operands)
    return [_rows_like(target, value) for target, value in zip(targets, operands, strict=False)]


def _rows_like(target: Any, value: Any) -> Any:
    if not isinstance(target, DTensor) or not isinstance(value, Tensor):
        return gathered(value)
    if isinstance(value, DTensor):
        if value.placements == target.placements and value.shape == target.shape:
            return value._local_tensor
        value = value.full_tensor()
    return _cut_like(target, value.expand(target.shape))._local_tensor if value.dim() else value


def _cut_like(target: DTensor, full: Tensor) -> DTensor:
    """Own rows of a plain tensor of the shape of `target`; nothing is sent."""
    if cut_dtensor.is_weighted(target):
        return dtensor_over(DTensor, cut_dtensor.own_view(target, full), target._spec)
    mesh, full = target.device_mesh, full if torch.is_grad_enabled() else full.detach()
    replicated = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=target.placements)


def gathered(leaf: Any) -> Any:
    """Gather a DTensor to where it is shown.

    Also inside `torch.tensor([leaf])`, which suspends tensor subclasses.
    """
    if not isinstance(leaf, DTensor):
        return leaf
    exclude, keys = torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey
    with exclude(keys.Python, False), exclude(keys.PythonTLSSnapshot, False):  # both in torch 2.12
        return leaf.full_tensor().to(leaf.device)


def _with_rows(leaf: Any) -> Any:
    """A DTensor, gathered if the shard of some rank is empty."""
    if not isinstance(leaf, DTensor):
        return leaf
    mesh = leaf.device_mesh
    for axis, placement in enumerate(leaf.placements):
        if isinstance(placement, Shard):
            shares = mesh.shares if isinstance(mesh, cut_dtensor.WeightedMesh) else None
            if Ranges.over(leaf.shape[placement.dim], mesh.size(axis), shares).has_empty:
                return leaf.redistribute(placements=[Replicate()] * mesh.ndim)
    return leaf


def needs_plain(func: Callable[..., Any], leaves: list[Any]) -> bool:
    """True where no DTensor operation is defined, as with a plain tensor.

    Writes keep their target: on a copy they would do nothing.
    """
    if writes(func) or func is Tensor.detach or func in SHAPED or makes_view(func, leaves):
        return False
    if cut_dtensor.needs_whole(func, leaves) or func is torch.allclose:  # not defined by DTensor
        return True
    if not any(isinstance(leaf, LogicalValues) for leaf in leaves):
        return False
    if torch.is_inference_mode_enabled():  # where DTensor's views are not defined either
        return True
    return any(
        isinstance(leaf, Tensor)
        and not isinstance(leaf, DTensor)
        and (leaf.dim() > 0 or leaf.requires_grad)  # a gradient flows into no plain number
        for leaf in leaves
    )


def refuse_lost_out(func: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Raise `StateError` for `out=` of an operation that gathers its operands, `out` as well."""
    refuse_edit(func, (), kwargs)
    for leaf in tree_iter(kwargs.get("out")):
        if isinstance(leaf, LogicalValues):
            raise refusals.MIXED_WRITE(leaf._label, f"{func.__name__}(out=...)")


def count_edits(func: Callable[..., Any], edited: list[Tensor]) -> None:
    """Count the edits of functions that change lists in place, which DTensor hides."""
    name = getattr(func, "__name__", "")
    if name.startswith("_foreach_") and name.endswith("_"):
        increment_version(edited)


def dtensor_over(
    kind: type[DTensor], local: Tensor, spec: object, empty: Tensor | None = None
) -> DTensor:
    """A `kind` of DTensor over `local` with the placement and logical shape of `spec`.

    The constructor's compiler guard would cost more than everything else here. And a wrapper that
    inherits an offset into a flat buffer would look to `copy.deepcopy` as if it had a storage: so
    it is made of a tensor without elements, which may be given as `empty`.
    """
    like = local.new_empty(0) if empty is None else empty
    shown = kind.__new__(kind, like, spec, requires_grad=False)  # type: ignore[call-arg]
    shown._local_tensor = local
    return shown


class LogicalTensor(LogicalValues):
    """A gradient, or a result of sharded parameters and gradients.

    Reading a number gathers the value first: a collective, as all of DTensor's operations.
    """

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        kind = DetachedShard if isinstance(self, DetachedShard) else LogicalTensor
        await_readers([self])
        copied = memo[id(self)] = dtensor_over(kind, self._local_tensor.clone(), self._spec)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        await_readers([self])
        return dtensor_over(DTensor, self._local_tensor, self._spec).__reduce_ex__(protocol)

    @classmethod
    @untraced
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.to and not kwargs and args[1:] == (args[0].device,):
                return args[0]  # where it is; torch asks that of the norm of each gradient
            leaves = list(tree_iter((args, kwargs)))
            await_readers(leaves)
            if func in NEW:
                return func(args[0]._local_tensor, *args[1:], **kwargs)
            if func == SET_DATA:
                return _set_data(*args)
            if writes(func) and isinstance(leaves[0], DTensor):
                _refuse_lost_write(leaves[0])
            if func is torch._foreach_norm and not all(isinstance(t, DTensor) for t in args[0]):
                return [run_sharded(func, ([t], *args[1:]), kwargs)[0] for t in args[0]]
            if func in READS or needs_plain(func, leaves):
                refuse_lost_out(func, kwargs)
                plain_args, plain_kwargs = tree_map(gathered, (args, kwargs))
                if func in READS:
                    plain_args = tree_map(plain_bytes, plain_args)
                return func(*plain_args, **plain_kwargs)
            return run_sharded(func, args, kwargs)


add_missing_rules()
# torch clips a list of gradients by one operation for each list where it knows their class
getattr(_foreach_utils, "_foreach_supported_types", []).append(LogicalTensor)


def as_logical(outputs: Any) -> Any:
    """Let DTensors among the outputs of one operation read as the unsharded value."""
    for output in outputs if isinstance(outputs, tuple | list) else (outputs,):
        if type(output) is DTensor:
            output.__class__ = LogicalTensor
    return outputs


class ShownData(LogicalTensor):
    """`.data` of a sharded parameter: edits are counted, reads are not."""

    shows_weights = True

    @classmethod
    @untraced
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = super().__torch_function__(func, types, args, kwargs)
        count_edits(func, [leaf for leaf in tree_iter(args[:1]) if isinstance(leaf, ShownData)])
        return outputs


@cache
def warn_of_shards() -> None:
    """Warn, once per process, that a file gets shards in place of whole tensors."""
    warnings.warn(
        "torch.save of a sharded module's or optimizer's state_dict() writes this rank's rows "
        "alone, which no other rank can load. To resume, use onefold.save. For one plain file, "
        "call onefold.full_state_dict(module), or get_optimizer_state_dict of "
        "torch.distributed.checkpoint.state_dict with StateDictOptions(full_state_dict=True), on "
        "every rank, and save the result on rank 0.",
        stacklevel=5,  # of the line that calls torch.save
    )


class DetachedShard(LogicalTensor):
    """A shard in the state dict of a module or optimizer, which warns when it is pickled."""

    shows_weights = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._spec.mesh.size() > 1:
            warn_of_shards()
        return super().__reduce_ex__(protocol)

    def untyped_storage(self) -> Any:
        raise refusals.NO_STORAGE(list(self._spec.shape))
