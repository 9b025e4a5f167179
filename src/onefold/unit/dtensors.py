"""The classes of a parameter object. The class changes with its form (unit/forms.py).

    ShardedParameter     DTensor(Shard(d)): this rank's piece of a parameter that is sharded at rest
    ReplicatedParameter  all rows of the fp32 weight, where modules compute with a narrower copy
    UnshardedParameter   all rows, gathered or cast, while modules run
    PlainSharded         one process: the weight at rest, which modules read, with a master
    StaleParameter       an object whose values are gone: every use is an error

After tensor parallel modules compute with DTensors over the model axes: UnshardedDTensor and
StaleDTensor are these two classes for them.

A module's own forward never reads one of the first two: its unit shows the unsharded parameter
first. Any other differentiable use (a tied head by `F.linear(x, self.embed.weight)`, a penalty on
`model.parameters()`) calls `__torch_function__` of the sharded parameter. It has the unit gathered
and passes the unsharded parameter on. So the gradient flows to the tensor that computes.
See docs/adr/0004.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter, tree_map

from onefold.compat import running_trace, unseen, untraced
from onefold.errors import StateError
from onefold.unit import refusals, whole
from onefold.unit.context import UnitInUse
from onefold.unit.functions import (
    GET_DATA,
    NEW,
    READS,
    SET_DATA,
    VALUES,
    fills,
    is_passive,
    writes,
)
from onefold.unit.grad_slot import GradSlot
from onefold.unit.logical import (
    LogicalValues,
    as_logical,
    count_edits,
    dtensor_over,
    gathered,
    needs_plain,
    refuse_lost_out,
    run_sharded,
)
from onefold.unit.quantized_bytes import refuse_edit

Owner = Callable[[], Any]
"""A weak reference to the `UnitParameter` of a tensor, which is built of these classes."""


def _dispatch(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> Any:
    """Run `func` on sharded parameters, or on unsharded ones where it computes with them."""
    kwargs = kwargs or {}
    if is_passive(func) and (func is not Tensor.copy_ or isinstance(args[0], AT_REST)):
        return _bookkeeping(func, args, kwargs)
    leaves = list(tree_iter((args, kwargs)))
    owners = {id(leaf): leaf.owner() for leaf in leaves if isinstance(leaf, AT_REST)}
    owners = {key: owner for key, owner in owners.items() if owner is not None}
    as_bytes = {key: owner.shown_sharded() for key, owner in owners.items() if owner.decoded}
    own_args, own_kwargs = _replaced((args, kwargs), as_bytes)
    refuse_edit(func, own_args, own_kwargs)
    if fills(func):
        for owner in owners.values():
            owner.unit.wait_step()
        with torch._C.DisableTorchFunctionSubclass():
            return run_sharded(func, args, kwargs)
    if (used := _used_in_tiles(func, args, kwargs, owners.values())) is not None:
        return used
    with torch._C.DisableTorchFunctionSubclass():
        for owner in owners.values():
            owner.unit.wait_step()
        wanted: list[UnitInUse] = [o.unit for o in owners.values() if o.unit.is_wanted_unsharded(o)]
        if not wanted or _is_into_shards(func, leaves[0], wanted[0]):
            if func in READS:
                own_args, own_kwargs = args, kwargs
            try:
                return _at_rest(func, own_args, own_kwargs)
            except RuntimeError as error:
                wanted = _units_that_compute(owners.values(), leaves)
                if not wanted or writes(func) or type(error) is not RuntimeError:
                    raise  # also a named error: other ranks would not meet in another try
    return _as_computed(func, (args, kwargs), owners, wanted)


def _used_in_tiles(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], owners: Iterable[Any]
) -> Any:
    """What `func` gives with a weight in tiles; None if it needs no tiles."""
    uses = (o.unit.tiled.use(func, args, kwargs) for o in owners if o.unit.tiled)
    return next((used for used in uses if used is not None), None)


def _as_computed(
    func: Callable[..., Any], arguments: Any, owners: dict[int, Any], wanted: list[UnitInUse]
) -> Any:
    """Run `func` on unsharded parameters, as modules compute with them."""
    with torch._C.DisableTorchFunctionSubclass():
        full = {key: owner.unit.unshard_for_use(owner) for key, owner in owners.items()}
        args, kwargs = _replaced(arguments, full)
        versions = {key: weight._version for key, weight in full.items()}
    outputs = func(*args, **kwargs)
    edited = {id(w): owners[key].sharded for key, w in full.items() if w._version > versions[key]}
    if edited:  # what an in-place operation gives back is the parameter itself
        outputs = _replaced(outputs, edited)
    outputs = _own_memory(outputs, list(full.values()))
    for unit in wanted:
        unit.note_use(outputs)
    return outputs


def _units_that_compute(owners: Iterable[Any], leaves: list[Any]) -> list[UnitInUse]:
    """The units of weights that meet activations: torch refuses products with another dtype."""
    plain = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, AT_REST)]
    dtypes = {leaf.dtype for leaf in plain}
    units = {owner.unit: owner.spec.dtype for owner in owners}
    return [u for u, resting in units.items() if u.context.compute in dtypes - {resting}]


def _at_rest(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` on weights at rest, which a forward may see rounded."""
    if needs_plain(func, list(tree_iter((args, kwargs)))):
        refuse_lost_out(func, kwargs)
        args, kwargs = tree_map(gathered, (args, kwargs))
    outputs = run_sharded(func, args, kwargs)
    count_edits(func, [leaf for leaf in tree_iter(args[:1]) if isinstance(leaf, AT_REST)])
    return outputs


def _bookkeeping(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run attribute access on a sharded parameter; note reads and writes with its owner."""
    sharded = args[0] if args else None
    owner = sharded.owner() if isinstance(sharded, AT_REST) else None
    if owner is not None:
        if func in VALUES:
            _await_values(func, owner, args, kwargs)
        if func is Tensor.register_hook:
            raise refusals.TENSOR_HOOK(owner.fqn)
        if func is Tensor.__deepcopy__ and isinstance(sharded, ShardedParameter):
            raise refusals.NO_COPY(owner.fqn)
        is_shown = isinstance(sharded, ShardedParameter) or owner.decoded
        if func is Tensor.detach and is_shown:  # as state_dict() does
            return owner.detached()
        if func == SET_DATA:
            owner.refuse_other_data(args[1])
        elif func == GET_DATA:
            return owner.shown_data()
        elif func in NEW:
            spec = owner.spec
            like = torch.empty(0, dtype=spec.dtype, device=spec.context.store.device)
            return func(like, *args[1:], **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        outputs = run_sharded(func, args, kwargs) if func is Tensor.copy_ else func(*args, **kwargs)
        return as_logical(outputs) if type(outputs) is DTensor else outputs


def _await_values(
    func: Callable[..., Any], owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Wait for a step in the background; refuse to edit quantized bytes."""
    if owner.decoded:
        refuse_edit(func, (owner.shown_sharded(), *args[1:]), kwargs)
    owner.unit.wait_step()


def _replaced(tree: Any, others: dict[int, Any]) -> Any:
    """Put others, by identity, in the place of leaves."""
    return tree_map(lambda leaf: others.get(id(leaf), leaf), tree) if others else tree


def _is_into_shards(func: Callable[..., Any], target: Any, unit: UnitInUse) -> bool:
    """True for a write to a tensor that is cut as the unit is, as a user's average of weights."""
    is_shard = isinstance(target, DTensor) and not isinstance(target, AT_REST)
    return is_shard and target.device_mesh == unit.context.mesh and writes(func)


def _own_memory(outputs: Any, unsharded: list[Tensor]) -> Any:
    """Outputs that stay valid when the unsharded parameters are freed."""
    is_recorded = torch.is_grad_enabled()  # else no graph keeps them unsharded
    freed = () if is_recorded else [weight.untyped_storage().data_ptr() for weight in unsharded]

    def own(output: Any) -> Any:
        if isinstance(output, Iterator):
            return map(own, output)
        if isinstance(output, AT_REST):  # edited in place
            return output
        if isinstance(output, UnshardedParameter):  # a function that gave back its argument
            output = output.view_as(output)
        if freed and isinstance(output, Tensor) and output.untyped_storage().data_ptr() in freed:
            return output.clone()
        return output

    return tree_map(own, outputs)


class _AtRest(GradSlot):
    """A parameter object over the weight at rest; its owner has the unsharded one."""

    def owner(self) -> Any:
        """The `UnitParameter`; None once it is gone."""
        return self._onefold_owner()

    @classmethod
    @untraced
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs)


class ShardedParameter(_AtRest, LogicalValues):  # type: ignore[override]
    """This rank's rows of a sharded parameter, as a `DTensor` with the parameter's logical shape.

    `nn.Parameter` for every `isinstance` check.
    """

    def to_local(self, **options: Any) -> Tensor:  # type: ignore[override]
        self._wait()
        return super().to_local(**options)

    def full_tensor(self, **options: Any) -> Tensor:  # type: ignore[override]
        owner = self._onefold_owner()
        if owner is not None and owner.unit.is_in_forward:  # the gradient has to find its way back
            full: Tensor = _dispatch(Tensor.view_as, (self, self), None)
            return full.full_tensor(**options) if isinstance(full, DTensor) else full
        self._wait()
        return super().full_tensor(**options)

    def _wait(self) -> None:
        owner = self._onefold_owner()
        if owner is not None:
            owner.unit.wait_step()


class GatheredParameter(ShardedParameter):
    """A sharded parameter whose `.data` is all rows, in a copy, for a while."""

    _onefold_full: Tensor

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self._onefold_full


class ReplicatedParameter(_AtRest, nn.Parameter):  # type: ignore[override]
    """The weight at rest, all rows, where modules compute with a narrower copy."""

    def __repr__(self) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"Parameter containing:\n{self.detach().as_subclass(Tensor)!r}"


AT_REST = (ShardedParameter, ReplicatedParameter)


class _Unsharded(Tensor):
    """All rows of a weight while its modules run. Reading `.data` may begin an edit."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _onefold_owner: Owner = staticmethod(lambda: None)  # until introduced

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        if torch.compiler.is_compiling():
            return self.detach()  # whose edits are counted
        self._expect_edit()
        return nn.Parameter.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        self._expect_edit()
        nn.Parameter.data.__set__(self, value)  # type: ignore[attr-defined]

    def _expect_edit(self) -> None:
        owner = self._onefold_owner()
        if owner is not None:
            owner.note_unsharded_data()

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], object]) -> Any:
        """Register a hook; on a model with model axes it runs before a reduction can begin.

        transformers sums gradients over the ranks of tensor parallel in such hooks.
        """
        owner = self._onefold_owner()
        if owner is not None and owner.model is not None:
            return owner.register_first(hook)
        return super().register_post_accumulate_grad_hook(hook)


class UnshardedParameter(_Unsharded, nn.Parameter):  # type: ignore[misc]
    """See `_Unsharded`."""


class UnshardedDTensor(_Unsharded, DTensor):  # type: ignore[misc]
    """See `_Unsharded`: the rows of this rank's piece, as a DTensor over the model axes."""


class PlainSharded(UnshardedParameter):
    """A weight that rests where forward reads it, and has a master that copies its edits."""

    def _expect_edit(self) -> None:
        owner = self._onefold_owner()
        if owner is not None:
            owner.unit.edits.bump(others=1)

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Parameter:
        copied = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied


class Stale(Tensor):
    """A parameter object whose values are gone. Any use of its value raises `StateError`."""

    _why: Callable[[], StateError]

    @classmethod
    @untraced
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stale = next(leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Stale))
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") in ("__hash__", "__repr__", "__format__"):
                return func(torch.empty(0), *args[1:])
            raise stale._why()


class StaleParameter(Stale, nn.Parameter):
    """See `Stale`."""


class StaleDTensor(Stale, DTensor):
    """See `Stale`."""

    def _refuse_stale(self, *_: object, **__: object) -> Any:
        raise self._why()

    to_local = full_tensor = redistribute = _refuse_stale


def drop_values(parameter: nn.Parameter) -> None:
    """Free the bytes of a parameter object that somebody may keep."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = parameter._local_tensor.new_empty(0)
    else:
        parameter.data = parameter.data.new_empty(0)


def introduce(parameter: Tensor, owner: Owner) -> None:
    """Give a parameter object, or a gradient, its owner."""
    setattr(parameter, "_onefold_owner", owner)  # noqa: B010 - torch declares no such attribute


def sharded_parameter(local: Tensor, like: DTensor, owner: Owner, label: str) -> nn.Parameter:
    """A sharded parameter over `local` [own rows] with placement and logical shape of `like`."""
    sharded: Any = dtensor_over(ShardedParameter, local, like._spec)
    sharded._is_param = True
    sharded._onefold_owner = owner
    sharded._label = label
    return sharded


# hooks and outputs; see [Note: torch.compile] in engine/hooks.py


class DirectUse:
    """Refuses a gradient that autograd accumulates into a sharded parameter.

    An operation has used the parameter where `__torch_function__` could not see it.
    """

    def __init__(self, parameter: Owner) -> None:
        self.parameter = parameter

    @untraced
    def __call__(self, sharded: Tensor) -> None:
        parameter = self.parameter()
        if isinstance(sharded.grad, DTensor):  # of an operation that DTensor defines: full_tensor()
            return
        if parameter is not None:
            raise refusals.DIRECT_USE(parameter.fqn, where=parameter.spec.context.where)


@unseen
def on_accumulated(parameter: Owner, accumulated: Tensor) -> None:
    """Tell the unit of an unsharded parameter that its gradient has grown."""
    if running_trace() is not None:  # as `untraced` does, less a call for each gradient
        torch._disable_dynamo(on_accumulated)(parameter, accumulated)
        return
    alive = parameter()
    unit = None if alive is None else alive.find_unit()
    engine = None if unit is None else unit.find_owner()
    if alive is not None and engine is not None:
        if alive.model is not None:
            alive.fit_grad()
        elif alive.sharded is accumulated:
            whole.shown(accumulated.grad)  # type: ignore[arg-type]
        engine.on_grad(alive, unit)


def without_backward(output: Tensor, error: Callable[[], Exception], *sources: Tensor) -> Tensor:
    """Pass `output` on, as computed from `sources`; a backward through it raises `error()`."""
    shown: Tensor = _WithoutBackward.apply(error, output, *sources)  # type: ignore[no-untyped-call]
    return shown


class _WithoutBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, error: Callable[[], Exception], output: Tensor, *_: Tensor) -> Tensor:  # type: ignore[override]
        ctx.error = error
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:  # type: ignore[override]
        raise ctx.error()
