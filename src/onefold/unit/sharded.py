"""What a parameter shows to the world between a backward and the next forward.

Three faces, one per situation:

    ShardedFace     DTensor(Shard(0)); this rank's rows of a parameter that is sharded at rest
    ReplicatedFace  plain Parameter; the whole fp32 weight where compute sees a narrower copy
    GoneParameter   an object that is no longer a parameter; every use is an error that names it

A module's own forward never meets a face: its unit puts the whole compute weight in place first.
Any other differentiable use - a tied head by `F.linear(x, self.embed.weight)`, a penalty on
`model.parameters()` - reaches the face, which then has its unit gathered and hands the whole weight
on. So it is right wherever it stands, and the gradient flows to the weight that computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol
from weakref import ReferenceType

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter, tree_map

from onefold.errors import StateError
from onefold.unit.logical import LogicalValues, as_logical, count_edits, dtensor_over, needs_plain
from onefold.wire.collectives import Group


class Tiled(Protocol):
    """A weight that is used in row blocks (unit/tiles.py)."""

    def use(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result, or None where the weight need not be whole. A collective."""
        ...


class ParameterOwner(Protocol):
    """What a face needs from its parameter: the fqn, and the whole weight on demand."""

    fqn: str

    @property
    def tiled(self) -> Tiled | None: ...

    @property
    def group(self) -> Group: ...
    def settle(self) -> None: ...
    def check_grad(self) -> None: ...
    def is_differentiable_use(self) -> bool: ...
    def why_no_hook(self) -> str: ...
    def detached(self) -> Tensor: ...
    def refuse_other_data(self, value: Tensor) -> None: ...
    def note_data_access(self) -> None: ...
    def shown_data(self) -> Tensor: ...
    def note_whole_edit(self) -> None: ...
    def whole_for(self) -> Tensor: ...
    def used_by(self, outputs: object) -> None: ...


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_GET_GRAD = Tensor.grad.__get__  # type: ignore[attr-defined]
_COMPUTED_GETTERS = {"T", "H", "mT", "mH", "real", "imag"}
_PASSIVE = {
    Tensor.detach, Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride,
    Tensor.element_size, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex,
    Tensor.requires_grad_, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook,
    Tensor.get_device, Tensor.__len__, Tensor.__hash__, Tensor.__repr__, Tensor.__format__,
    Tensor.data_ptr, Tensor.storage_offset, Tensor.untyped_storage, Tensor.is_shared,
    Tensor.__deepcopy__, Tensor.__reduce_ex__, Tensor.is_same_size, Tensor.is_signed,
    Tensor.zero_, Tensor.copy_, Tensor.fill_, Tensor.normal_, Tensor.uniform_,
    torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor,
    torch.result_type, torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like,
    torch.rand_like, torch.randn_like, Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones,
    Tensor.new_full, Tensor.new_tensor,
}  # fmt: skip
"""What does not read the whole value, or writes in place (initialisers act on the shard)."""


_VALUES = {
    Tensor.detach, Tensor.__repr__, Tensor.__format__, Tensor.data_ptr, Tensor.untyped_storage,
    Tensor.__deepcopy__, Tensor.__reduce_ex__, Tensor.zero_, Tensor.copy_, Tensor.fill_,
    Tensor.normal_, Tensor.uniform_, _GET_DATA, _SET_DATA,
}  # fmt: skip
"""Those of them that read or write values all the same: a step in the background must be over."""


def is_passive(func: Callable[..., Any]) -> bool:
    """True for attribute access and bookkeeping, which a face answers itself."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _COMPUTED_GETTERS
    return func in _PASSIVE


def _dispatch(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> Any:
    """Run `func` on the faces, or on the whole weights where the use is differentiable."""
    kwargs = kwargs or {}
    if is_passive(func):
        return _bookkeeping(func, args, kwargs)
    leaves = list(tree_iter((args, kwargs)))
    owners = {id(leaf): leaf.summoner() for leaf in leaves if isinstance(leaf, FACES)}
    for owner in owners.values():
        used = owner.tiled.use(func, args, kwargs) if owner and owner.tiled else None
        if used is not None:
            return used
    with torch._C.DisableTorchFunctionSubclass():
        must = needs_plain(func, leaves)
        for owner in owners.values():
            if owner is not None:
                owner.settle()
        wanted = [
            owner
            for owner in owners.values()
            if owner is not None and (must or owner.is_differentiable_use())
        ]
        if not wanted:
            outputs = as_logical(func(*args, **kwargs))
            count_edits(func, [leaf for leaf in tree_iter(args[:1]) if isinstance(leaf, FACES)])
            return outputs
        whole = {key: owner.whole_for() for key, owner in owners.items() if owner is not None}
        new_args, new_kwargs = tree_map(lambda leaf: whole.get(id(leaf), leaf), (args, kwargs))
    outputs = _own_memory(func(*new_args, **new_kwargs), list(whole.values()))
    for owner in wanted:
        owner.used_by(outputs)
    return outputs


def _bookkeeping(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Attribute access on a face itself, and what has to be noticed about it."""
    face = args[0] if args else None
    owner = face.summoner() if isinstance(face, FACES) else None
    if owner is not None:
        if func in _VALUES:
            owner.settle()
        elif func == _GET_GRAD:
            owner.check_grad()
        if func is Tensor.register_hook:
            raise StateError(owner.why_no_hook())
        if func is Tensor.detach and isinstance(face, ShardedParameter):  # as state_dict() does
            return owner.detached()
        if func == _SET_DATA:
            owner.refuse_other_data(args[1])
        elif func == _GET_DATA:
            return owner.shown_data()
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _own_memory(outputs: Any, whole: list[Tensor]) -> Any:
    """An output that outlives the moment in which the weights are whole for it."""
    if isinstance(outputs, UnshardedParameter):  # a function that gave back its argument
        outputs = outputs.view_as(outputs)
    if isinstance(outputs, Tensor) and not torch.is_grad_enabled():
        storages = {weight.untyped_storage().data_ptr() for weight in whole}
        if outputs.untyped_storage().data_ptr() in storages:
            return outputs.clone()  # without a graph nothing else keeps the weights whole
    return outputs


class ShardedParameter(LogicalValues):
    """This rank's rows of a sharded parameter, as a `DTensor` with the parameter's logical shape.

    `nn.Parameter` for every `isinstance` check.
    """

    _summoner: ReferenceType[ParameterOwner]

    def summoner(self) -> ParameterOwner | None:
        return self._summoner()

    def to_local(self, **options: Any) -> Tensor:  # type: ignore[override]
        self._settle()
        return super().to_local(**options)

    def full_tensor(self, **options: Any) -> Tensor:  # type: ignore[override]
        self._settle()
        return super().full_tensor(**options)

    def _settle(self) -> None:
        summoner = self._summoner()
        if summoner is not None:
            summoner.settle()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _dispatch(func, args, kwargs)


class ReplicatedParameter(nn.Parameter):
    """The whole weight at rest, where forward computes with a narrower copy of it."""

    _summoner: ReferenceType[ParameterOwner]

    def summoner(self) -> ParameterOwner | None:
        return self._summoner()

    def __repr__(self) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"Parameter containing:\n{self.detach().as_subclass(Tensor)!r}"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _dispatch(func, args, kwargs)


FACES = (ShardedParameter, ReplicatedParameter)


class UnshardedParameter(nn.Parameter):
    """A whole weight while its modules run. Notices when `.data` is taken, perhaps to be edited."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _summoner: Callable[[], ParameterOwner | None] = staticmethod(lambda: None)  # until introduced

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        self._expect_edit()
        return nn.Parameter.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        self._expect_edit()
        nn.Parameter.data.__set__(self, value)  # type: ignore[attr-defined]

    def _expect_edit(self) -> None:
        summoner = self._summoner()
        if summoner is not None:
            summoner.note_whole_edit()


class PlainSharded(UnshardedParameter):
    """A weight that rests whole where forward reads it, and has a master to follow its edits."""

    def _expect_edit(self) -> None:
        summoner = self._summoner()
        if summoner is not None:
            summoner.note_data_access()

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Parameter:
        copied = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied


class StaleParameter(nn.Parameter):
    """A tensor object whose bytes have moved. Any use of its value raises `StateError`."""

    _why: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        gone = next(leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, StaleParameter))
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") in ("__hash__", "__repr__", "__format__"):
                return func(torch.empty(0), *args[1:])
            raise StateError(gone._why)


def bury(parameter: nn.Parameter, why: str) -> None:
    """Make every later use of the object a `StateError` that says `why`."""
    parameter.__class__ = StaleParameter
    setattr(parameter, "_why", why)  # noqa: B010 - the class is new, the object is not


def introduce(parameter: Tensor, summoner: ReferenceType[ParameterOwner]) -> None:
    """Tell a parameter object of whatever face, or a gradient, whose it is."""
    setattr(parameter, "_summoner", summoner)  # noqa: B010 - torch declares no such attribute


def revive(parameter: nn.Parameter) -> None:
    """Undo `bury`: the object is a whole weight that may be read."""
    parameter.__class__ = UnshardedParameter


def sharded_face(
    local: Tensor, like: DTensor, summoner: ReferenceType[ParameterOwner]
) -> nn.Parameter:
    """A face over `local` [own rows] with the placement and logical shape of `like`."""
    face: Any = dtensor_over(ShardedParameter, local, like._spec)
    face._is_param = True
    face._summoner = summoner
    return face
