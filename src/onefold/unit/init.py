"""Giving values to parameters before they are cut: from `meta`, and the same on every rank.

See docs/adr/0030.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from onefold.errors import ConfigError
from onefold.layout.module_tree import ModuleTree
from onefold.layout.packed import QuantizedWeight
from onefold.layout.units import Owned, UnitPlan
from onefold.unit.added_layers import reset_adapters
from onefold.unit.deferred import Deferred, has_nan
from onefold.unit.promises import Values
from onefold.wire.collectives import Group

if TYPE_CHECKING:
    from onefold.tier.files import FileRows
    from onefold.unit.parameter import UnitParameter

Room = Callable[[int], AbstractContextManager[None]]
"""A context that explains an error for want of so many bytes."""


def initialise(
    tree: ModuleTree, parameters: Iterable[Owned], device: torch.device, room: Room,
    values: Values | None = None,
) -> Deferred | None:  # fmt: skip
    """Run initialisers for parameters and buffers on `meta` that `values` does not have.

    Afterwards they are real, and without memory if they are large: `settle` of the result computes
    one. A model with a `config` is built once more, so that values are bitwise those of its
    constructor. Where that is not possible, each module runs its `reset_parameters` and then its
    library's rule, after the modules inside it. Loaded and promised tensors are never written.

    Raises: ConfigError: an initialiser left a tensor out, or the constructor made other values than
    these rules. What `room` raises for want of memory. The module is as it was.
    """
    places = [
        _Place(store, name, tensor, f"{prefix}.{name}".lstrip("."), module)
        for prefix, module in tree.parts
        for store in (module._parameters, module._buffers)
        for name, tensor in store.items()
        if tensor is not None
    ]
    missing = {
        id(place.tensor): place
        for place in places
        if place.tensor.is_meta and not (values is not None and place.fqn in values)
    }
    if not missing:
        return None
    owners = {id(owned.parameter): owned for owned in parameters}
    for key in missing.keys() & owners.keys():
        _refuse_cut(owners[key])
    deferred = Deferred(device)
    largest = max(place.tensor.nbytes for place in missing.values())
    try:
        with room(largest):
            rules = _Rules(deferred, places, set(missing))
            with deferred, torch.no_grad():
                rules.initialise(tree.root)
                rules.complete(tree.root)
                reset_adapters(tree, rules.lacks_values)
        made = {key: place.store[place.name] for key, place in missing.items()}
        for key, place in missing.items():
            if deferred.is_unset(made[key]):
                raise _left_out(place)
            rules.check(place)
    finally:
        for place in places:
            place.store[place.name] = place.tensor
    for place in places:
        if id(place.tensor) in made and place.store is place.module._buffers:
            place.store[place.name] = made[id(place.tensor)]
    for key in missing.keys() & owners.keys():
        trains = missing[key].tensor.requires_grad
        owners[key].materialise(nn.Parameter(made[key].detach(), requires_grad=trains))
    return deferred


@dataclass(frozen=True, slots=True)
class _Place:
    """One place of a parameter or buffer in a module tree."""

    store: dict[str, Any]  # of the module: its parameters, or its buffers
    name: str
    tensor: Tensor
    fqn: str
    module: nn.Module


class _Rules:
    """Gives values to tensors without memory, module by module, in the order of constructors."""

    def __init__(self, deferred: Deferred, places: Iterable[_Place], missing: set[int]) -> None:
        self._deferred, self._missing = deferred, missing
        self._seen = set[nn.Module]()
        self._own: dict[nn.Module, set[int]] = {}
        self._given: dict[int, Tensor] = {}  # by id of the tensor in its place
        self._writers: dict[int, set[nn.Module]] = {}  # of a tensor's last values, by its id
        self._blanks = blanks = dict[int, Tensor]()
        for place in places:
            key, is_given = id(place.tensor), id(place.tensor) not in missing
            self._own.setdefault(place.module, set()).add(key)
            if key not in blanks:
                blanks[key] = deferred.blank(place.tensor, is_given=is_given)
                if place.store is place.module._parameters:
                    trains = place.tensor.requires_grad and blanks[key].is_floating_point()
                    blanks[key] = nn.Parameter(blanks[key], requires_grad=trains)
                if is_given:
                    vars(blanks[key])[HF_FLAG] = True
                    self._given[id(blanks[key])] = place.tensor
            place.store[place.name] = blanks[key]
        several = Counter(key for keys in self._own.values() for key in keys)
        self._shared = [key for key, count in several.items() if count > 1]

    def initialise(self, module: nn.Module) -> None:
        """Initialise the modules inside, then the module itself."""
        self._seen.add(module)
        inside = set[int]().union(*(self._own.get(part, ()) for part in module.modules()))
        vars(module).pop(HF_FLAG, None)
        if not inside & self._missing:
            return
        given = {n: self._given[id(t)] for n, t in _named_tensors(module) if id(t) in self._given}
        if _rebuild(module, given):
            return
        for child in module.children():
            if child not in self._seen:
                self.initialise(child)
        reset = _method(module, "reset_parameters") or _method(module, "_reset_parameters")
        if reset is not None:
            self._call(reset, module)
        names = ("initialize_weights", "init_weights", "_init_weights")
        rule = next(filter(None, (_method(module, name) for name in names)), None)
        if rule is None and (by_module := _method(module, "_init_weights", 1)) is not None:
            rule = partial(module.apply, cast("Any", by_module))
        if rule is not None:
            self._call(rule, module)

    def lacks_values(self, tensor: Tensor) -> bool:
        """True for a tensor in its place now that was neither loaded nor real."""
        return id(tensor) not in self._given

    def _call(self, rule: Callable[[], object], module: nn.Module) -> None:
        """Run a rule, and note which shared tensors it writes."""
        before = {key: self._blanks[key]._version for key in self._shared}
        rule()
        for key, version in before.items():
            if self._blanks[key]._version != version:
                is_own = key in self._own.get(module, ())
                self._writers[key] = self._writers.get(key, set()) | {module} if is_own else set()

    def check(self, place: _Place) -> None:
        """Refuse a tensor whose constructor makes other values than these rules.

        Operations in place count a tensor's version up on `meta`, too (but not through `.data`).
        """
        blank, writers = self._blanks[id(place.tensor)], self._writers.get(id(place.tensor), ())
        kinds = {type(module).__name__ for module in writers}  # of one: the same distribution
        if place.store[place.name] is not blank:
            return  # of a second model, which its constructor has made
        if len(kinds) > 1:
            wanted = f"one module to initialize {place.fqn!r}, which is on the meta device"
            hint = "add init_weights to the model, which sets it, or build it on a real device"
            raise ConfigError(wanted, " and ".join(sorted(kinds)), hint=hint)
        writes = 0 if place.tensor.is_inference() else place.tensor._version  # those count none
        if writes > blank._version:
            wanted = f"reset_parameters or init_weights to make all initial values of {place.fqn!r}"
            got = "a constructor that writes more of them on the meta device"
            hint = "move this into init_weights of the model, build it on a real device, "
            hint += "or load its weights with onefold.load_pretrained before onefold.shard"
            raise ConfigError(wanted, got, hint=hint)

    def complete(self, module: nn.Module) -> None:
        """Set what no rule has set as the constructor of a model does."""
        named = [(name, t) for name, t in _named_tensors(module) if id(t) not in self._given]
        unset = [(name, t) for name, t in named if self._deferred.is_unset(t)]
        made = _twin(module) if unset else {}
        for name, tensor in unset if made else ():
            tensor.copy_(made[name])
        if unset and not made:
            for child in module.children():
                self.complete(child)


HF_FLAG = "_is_hf_initialized"
"""Where transformers notes that a tensor, or a whole module, has its values."""


def _method(module: nn.Module, name: str, count: int = 0) -> Callable[..., object] | None:
    """A method that needs so many arguments; None where there is none."""
    method = getattr(module, name, None)
    if not callable(method):
        return None
    several = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    parameters = signature(method).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind not in several]
    return method if len(needed) == count else None


def _rebuild(module: nn.Module, given: dict[str, Tensor]) -> bool:
    """Give a module the values of a second one of its class and configuration, if it is alike.

    `given`: tensors that have values, by name. They may be the constructor's: `torch.Tensor(n)` is
    real under `torch.device("meta")`, and may hold anything.
    """
    if any(value.is_meta for value in given.values()):
        return False
    probe = _twin(module, is_on_meta=True) if given else {}
    unasked = [n for n in given if n in probe and not probe[n].is_meta]  # real, and loaded or not
    if len(unasked) < len(given):
        _refuse_old_memory(module, {name: given[name] for name in unasked}, given)
        return False
    made = _twin(module)
    for prefix, part in module.named_modules() if made else ():
        for store in (part._parameters, part._buffers):
            for name in [name for name, tensor in store.items() if tensor is not None]:
                store[name] = made[f"{prefix}.{name}".lstrip(".")]
    for name, value in given.items() if made else ():
        value.copy_(made[name])
    return bool(made)


def _refuse_old_memory(
    module: nn.Module, unasked: dict[str, Tensor], given: Mapping[str, Tensor]
) -> None:
    """Raise `ConfigError` where a part of the weights is loaded, and `unasked` may hold anything.

    They are real although the model was built on `meta`. Their constants are those of a second
    model; what was written in place has counted a version up.
    """
    unwritten = {n for n, t in unasked.items() if t.is_inference() or not t._version}
    if not unwritten or all(name in given for name, _ in module.named_parameters()):
        return
    made = _twin(module)
    for name in sorted(unwritten):
        if not torch.equal(given[name], made[name]):
            wanted = f"parameter {name!r} on the meta device, as others of {type(module).__name__}"
            got = "one that its constructor made on a real device, which may hold anything"
            hint = "build the module on a real device, or load all of its weights"
            raise ConfigError(wanted, got, hint=hint)


def _twin(module: nn.Module, *, is_on_meta: bool = False) -> dict[str, Any]:
    """Build a model once more from its `config`; return its tensors, {} if they are not alike."""
    config = getattr(module, "config", None)
    if config is None or next(iter(signature(type(module)).parameters), "") != "config":
        return {}
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    usual, asked = torch.get_default_dtype(), getattr(config, "dtype", None)
    try:
        if dtypes == {asked} and isinstance(asked, torch.dtype):
            torch.set_default_dtype(asked)
        with ExitStack() as around:
            if is_on_meta:  # draws on the CPU do not count
                around.enter_context(Deferred(torch.device("cpu")))
                around.enter_context(torch.device("meta"))
            with torch.enable_grad():
                twin = type(module)(copy.deepcopy(config))
    except Exception:  # it wants more than its configuration
        return {}
    finally:
        torch.set_default_dtype(usual)
    return dict(_named_tensors(twin)) if _outline(twin) == _outline(module) else {}


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers, under all of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _outline(module: nn.Module) -> list[tuple[str, torch.dtype, torch.Size, int]]:
    """Name, dtype, shape and first place of each parameter and buffer."""
    first: dict[int, int] = {}
    named = enumerate(_named_tensors(module))
    return [(name, t.dtype, t.shape, first.setdefault(id(t), i)) for i, (name, t) in named]


def _left_out(place: _Place) -> ConfigError:
    kind = type(place.module).__name__
    if not callable(getattr(place.module, "reset_parameters", None)):
        wanted = f"{kind} to have reset_parameters(), since it is on the meta device"
        hint = "add the method, build the module on a real device, or load its weights "
        hint += "with onefold.load_pretrained before onefold.shard"
        return ConfigError(wanted, f"a module without it, which has {place.fqn!r}", hint=hint)
    got = f"a tensor that it left uninitialized, {place.fqn!r}"
    hint = f"initialize {place.name!r} in reset_parameters, or build the module on a real device"
    return ConfigError(f"{kind}.reset_parameters() to set {place.name!r}", got, hint=hint)


def materialise(
    plan: UnitPlan, device: torch.device, room: Room, deferred: Deferred | None,
    values: Values | None = None,
) -> None:  # fmt: skip
    """Give memory and initial values to the unit's parameters that were on `meta`.

    Parameters that `values` has get a stand-in without memory: `Unit.adopt` reads their rows.
    """
    for owned in plan.members:
        if values is not None and owned.fqn in values:
            _replace(owned, torch.empty((), dtype=owned.parameter.dtype, device=device))
        elif deferred is not None:
            with room(owned.parameter.nbytes):
                was_made = deferred.settle(owned.parameter)
            if was_made and has_nan(owned.parameter.detach()):
                wanted = f"initializers to set all elements of parameter {owned.fqn!r}"
                hint = "initialize all of it, or build the module on a real device"
                raise ConfigError(wanted, "one with NaN", hint=hint)


def fill_buffers(
    tree: ModuleTree, device: torch.device, deferred: Deferred | None, values: Values | None
) -> None:
    """Give buffers that were on `meta` memory and initial values; read those that `values` has."""
    for prefix, module in tree.parts:
        for name, buffer in module._buffers.items():
            fqn = f"{prefix}.{name}".lstrip(".")
            if buffer is None:
                continue
            if deferred is not None:
                deferred.settle(buffer)
            if values is not None and fqn in values:
                if buffer.is_meta:
                    buffer = module._buffers[name] = torch.empty_like(buffer, device=device)
                values.fill(fqn, None, buffer)


VALUES = "a message of rank 0's values"


def agree_on_values(tensors: Iterable[Tensor], group: Group) -> None:
    """Give every rank the values of rank 0, one tensor at a time."""
    if group.world_size == 1:
        return
    with torch.no_grad():
        for tensor in tensors:
            if tensor.numel():
                sent = tensor.detach().contiguous()
                group.agree((VALUES, sent.nbytes), VALUES, sent)
                group.wait(group.broadcast(sent, 0), VALUES)
                if sent.data_ptr() != tensor.data_ptr():
                    tensor.copy_(sent)


def rows_in_files(parameter: UnitParameter, rows: FileRows, values: Values | None) -> Tensor:
    """Let own rows of a parameter rest where its file has them; return them as they lie there."""
    assert values is not None, "only promised values lie in files"
    path, offset, dtype = values.where(parameter.fqn)
    local, hint = parameter.local, 'offload="disk:PATH", which keeps a copy in that folder'
    if str(local.dtype) != f"torch.{dtype}":
        wanted = f"parameter {parameter.fqn!r} in the dtype of its file, {dtype}"
        advice = hint if " " in dtype else f"build the module in {dtype}, or {hint}"
        raise ConfigError(wanted, local.dtype, hint=advice)
    spans = [
        span for span in parameter.slot.cut.spans(parameter.spec.context.rest_rank) if local.numel()
    ]
    if len(spans) > 1:
        wanted = f"this rank's rows of parameter {parameter.fqn!r} side by side in {path.name}"
        raise ConfigError(wanted, f"{len(spans)} parts of it", hint=hint)
    first, last = spans[0] if spans else (0, 0)
    start = offset + first * local.itemsize
    return rows.place(path, start, parameter.span.start, last - first).view(local.shape)


def _replace(owned: Owned, value: Tensor, *, is_cut: bool = False) -> None:
    """A real parameter in place of a meta one, for all its owners."""
    original = owned.parameter
    shown = value if is_cut else value.expand(owned.values.shape)
    if isinstance(original, QuantizedWeight):
        real: nn.Parameter = original.over(shown)
    else:
        real = nn.Parameter(shown, requires_grad=original.requires_grad)
    owned.materialise(real)


def _refuse_cut(owned: Owned) -> None:
    """Raise `ConfigError` for a piece on meta: initialisers draw the values of whole tensors."""
    if owned.model is not None:
        wanted = f"parameter {owned.fqn!r} to have values before model axes cut it"
        hint = "call onefold.load_pretrained(module, directory) before onefold.shard, or "
        hint += "build the module on a real device before parallelize_module"
        raise ConfigError(wanted, f"one on the meta device: {owned.model}", hint=hint)


def move(owned: Owned, device: torch.device) -> None:
    """Let a parameter's values lie on `device`."""
    if owned.model is None or owned.parameter is owned.values:
        owned.parameter.data = owned.parameter.data.to(device)
    elif owned.values.device != device:
        cut = owned.model.over(owned.values.detach().to(device))
        _replace(owned, cut, is_cut=True)
