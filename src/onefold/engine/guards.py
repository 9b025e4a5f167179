"""Guard methods of `nn.Module` that would replace shards by other tensors; refuse wrappers.

`load_state_dict` takes unsharded or sharded tensors, of the module or a part of it. `to`, `float`,
`cuda` and their like pass where they change nothing, and are refused where they would.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onefold.engine.engine import Engine
from onefold.errors import StateError
from onefold.layout.module_tree import ModuleTree
from onefold.unit import refusals
from onefold.unit.parameter import UnitParameter

GENERATES_TOGETHER = {"_is_fsdp_managed_module": True, "_fsdp_use_orig_params": True}
"""Attributes of a model of transformers that is gathered in every forward.

`generate` reads the first: all ranks then run until the last one has finished. So do some encoders
(Wav2Vec2, HuBERT and others, in transformers 5.23): they then run every layer, without LayerDrop,
which ranks would decide apart. Dynamo reads both: without the second it does not trace the module.
"""


SAVES = "save_pretrained"


def install(tree: ModuleTree, engine: Engine) -> None:
    """Guard a module and its parts.

    Shapes are checked where each submodule loads. Names are checked for the module as a whole,
    before torch's own method runs: its hooks do not know whether the caller asked for strictness.
    """
    guard_parts(tree.modules, engine)
    guard_root(tree.root)


def guard_root(module: nn.Module) -> None:
    """Guard the methods of the module as a whole."""
    module.__dict__["load_state_dict"] = partial(_load_state_dict, ref(module))
    module.__dict__["_ddp_params_and_buffers_to_ignore"] = _NoWrapper()


def guard_parts(parts: Iterable[nn.Module], engine: Engine) -> None:
    """Guard those of a module's parts that are not guarded yet."""
    is_gathered = engine.recipe.shards_parameters and engine.group.world_size > 1
    for part in parts:
        if "_apply" not in part.__dict__:
            _put_first(part, "_apply", _Unpickled(_apply, ref(part), ref(engine)))
            part.__dict__["__deepcopy__"] = _refuse_copy
            part.__dict__.setdefault("_distribute_module_applied", _NotAfterwards())
            part.register_load_state_dict_pre_hook(partial(_cut_entries, ref(engine)))
            if callable(getattr(part, "resize_token_embeddings", None)):  # of transformers
                part.__dict__["resize_token_embeddings"] = _refuse_resize
                is_model = callable(getattr(type(part), "resize_token_embeddings", None))
                if engine.recipe.is_sharded and is_model:  # PEFT's wrapper saves adapters
                    part.__dict__[SAVES] = partial(_save_whole, ref(part), ref(engine))
            if is_gathered and (_must_run_together(part, engine) or _drops_layers(part, engine)):
                part.__dict__.update(GENERATES_TOGETHER)


def _must_run_together(part: nn.Module, engine: Engine) -> bool:
    """True for a gathered part whose `generate` would hang where one rank has finished first.

    The class is asked: wrappers of adapters pass on the attributes of the model inside. `generate`
    asks all ranks of the process group, so these must be the ranks of the module.
    """
    is_everyone = engine.group.world_size == dist.get_world_size()
    return is_everyone and callable(getattr(type(part), "generate", None))


def _drops_layers(part: nn.Module, engine: Engine) -> bool:
    """True for a gathered part whose forward asks whether to run all layers on all ranks."""
    code = getattr(inspect.unwrap(type(part).forward), "__code__", None)
    drops = code is not None and "is_fsdp_managed_module" in code.co_names
    share = getattr(getattr(part, "config", None), "layerdrop", 0.0)
    if drops and share and engine.group.rank == 0:
        warnings.warn(
            f"layerdrop={share} of {type(part).__name__} has no effect at stage 3: transformers "
            "runs every layer where parameters are sharded. hint: stages 0 to 2 drop layers",
            stacklevel=2,
        )
    return drops


def _save_whole(
    alive: ReferenceType[nn.Module], alive_engine: ReferenceType[Engine], *args: Any, **kwargs: Any
) -> Any:
    """`save_pretrained` of a model of transformers, which would write this rank's rows."""
    part, engine = alive(), alive_engine()
    has_state = kwargs.get("state_dict") is not None
    if part is None or engine is None or engine.is_unsharded or has_state:
        save: Any = getattr(type(part), SAVES)
        return save(part, *args, **kwargs)
    hint = "onefold.save_pretrained(model, directory), on every rank; or pass "
    hint += "state_dict=onefold.full_state_dict(model)"
    wanted = f"{type(part).__name__}.save_pretrained with unsharded weights"
    raise StateError(wanted, "a sharded model", where=f"rank {engine.group.rank}", hint=hint)


def _refuse_resize(*_: object, **__: object) -> None:
    hint = "add tokens and resize before the model is sharded, or its Trainer is built"
    raise StateError("resize_token_embeddings before onefold.shard", "a call after it", hint=hint)


def _put_first(part: nn.Module, name: str, value: object) -> None:
    """Set an attribute that comes before all others in the state of the part."""
    marks = part.__dict__
    others = dict(marks)
    marks.clear()
    marks.update({name: value, **others})


class _Unpickled(partial[Any]):
    """Refuses `pickle` and `torch.save` of its part by name; `copy.copy` shares it.

    It comes first in the part's state: weak references of hooks would end in a TypeError.
    """

    def __reduce_ex__(self, protocol: object) -> Any:
        raise refusals.MODULE_COPY()


def _refuse_copy(_: object) -> None:
    """For `copy.deepcopy` of a part: copies would share its hooks."""
    raise refusals.MODULE_COPY()


class _NoWrapper:
    """Refuses `DistributedDataParallel(module)`, which reads here what it shall leave alone."""

    def __iter__(self) -> Iterator[str]:
        got = "DistributedDataParallel around it"
        hint = "leave DistributedDataParallel out: onefold.shard averages gradients over "
        hint += "the ranks. Give a transformers.Trainer callbacks=[onefold.hf.Callback()]"
        raise StateError("a sharded module to be trained as it is", got, hint=hint)


class _NotAfterwards:
    """Refuses `parallelize_module` of a sharded part, which asks here whether it ran before."""

    def __bool__(self) -> bool:
        hint = "parallelize_module(model, mesh['tp'], plan) first, then "
        hint += "onefold.shard(model, optimizer, mesh=mesh['dp'])"
        raise StateError("parallelize_module before onefold.shard", "a call after it", hint=hint)


def _apply(
    alive: ReferenceType[nn.Module], alive_engine: ReferenceType[Engine],
    fn: Callable[[Tensor], Tensor], recurse: bool = True,
) -> nn.Module:  # fmt: skip
    """`Module._apply` of a sharded module: `to`, `float`, `cuda` and `share_memory` call it."""
    module, engine = alive(), alive_engine()
    assert module is not None, "a method outlived its module"
    assert engine is not None, "a module outlived its engine"
    parts = list(module.modules()) if recurse else [module]
    everything = (sharded for part in parts for sharded in part._parameters.values())
    for number, sharded in enumerate(everything, start=1):
        parameter = engine.by_sharded.get(id(sharded))
        if parameter is not None:
            probe = parameter.local.new_empty(8)
            probe.view(torch.uint8).fill_(number % 100)  # no NaN of any dtype
            moved = fn(probe)
            if not _is_same(probe, moved):
                change = f"one to be replaced by {moved.dtype} on {moved.device}"
                raise parameter.touched(change)
    for part in parts:
        for name, buffer in part._buffers.items():
            if buffer is not None:
                moved = fn(buffer)
                part._buffers[name] = buffer if _is_same(buffer, moved) else moved
    return module


def _is_same(before: Tensor, after: Tensor) -> bool:
    """True for a tensor that was not moved; `to("cpu:1")` copies what is on "cpu" already."""
    if after is before:
        return True
    is_alike = after.device == before.device and after.dtype == before.dtype
    return is_alike and after.device.type == "cpu" and torch.equal(before, after)


def _cut_entries(
    alive: ReferenceType[Engine], module: nn.Module, state: dict[str, Any], prefix: str,
    metadata: dict[str, Any], *_: object,
) -> None:  # fmt: skip
    """Replace a submodule's entries of a state dict by tensors like its sharded parameters."""
    engine = alive()
    if engine is None or engine.is_unsharded:
        return
    engine.rest()
    for name, sharded in module._parameters.items():
        value = state.get(prefix + name)
        parameter = engine.by_sharded.get(id(sharded))
        if parameter is None or not isinstance(value, Tensor):
            continue
        if metadata.get("assign_to_params_buffers"):  # a new adapter on meta may be assigned
            raise StateError(
                f"load_state_dict(..., assign=False) for {prefix + name!r}",
                "assign=True, which would replace shards by unsharded tensors",
                hint="leave assign out; values are copied into the shards",
            )
        state[prefix + name] = _fitted(prefix + name, parameter, value)


def _load_state_dict(
    alive: ReferenceType[nn.Module], state_dict: Mapping[str, Any], *args: Any, **options: Any
) -> Any:
    """`load_state_dict` of the sharded module itself: check names, then call its class's method.

    That gets the arguments of the caller alone: an override may know fewer. Modules that translate
    names while they load are asked, as in torch: what fits is loaded before the others are named.
    """
    module = alive()
    assert module is not None, "a method outlived its module"
    wanted = "a state dict with the module's names"
    hint = "load it with strict=False to take the entries that fit"
    if options.get("assign") is False:  # torch's set_model_state_dict says so to every module
        del options["assign"]
    if args[0] if args else options.get("strict", True):
        names = module.state_dict(keep_vars=True).keys()
        missing = [name for name in names if name not in state_dict]
        unexpected = [name for name in state_dict if name not in names]
        if (missing or unexpected) and not translates(module):
            got = f"missing {missing[:5]}, unexpected {unexpected[:5]}"
            raise StateError(wanted, got, hint=hint)
    try:
        return type(module).load_state_dict(module, state_dict, *args, **options)
    except RuntimeError as error:
        if type(error) is not RuntimeError or not str(error).startswith("Error(s) in loading"):
            raise
        raise StateError(wanted, f"these: {error}", hint=hint) from error


def translates(module: nn.Module) -> bool:
    """True if the module, or one inside, may change entries of a state dict while it loads."""
    return type(module).load_state_dict is not nn.Module.load_state_dict or any(
        sizes_buffers(part) or len(part._load_state_dict_pre_hooks) > 1  # the first is ours
        for part in module.modules()
    )


def sizes_buffers(part: nn.Module) -> bool:
    """True if the class has its own way to load, which may give buffers the size of the entry."""
    return type(part)._load_from_state_dict is not nn.Module._load_from_state_dict


def _fitted(name: str, parameter: UnitParameter, value: Tensor) -> Tensor:
    if tuple(value.shape) != parameter.shape:
        wanted = f"{name!r} of shape {list(parameter.shape)}"
        got = f"shape {list(value.shape)}"
        hint = "the state dict is of another configuration of this module"
        raise StateError(wanted, got, where=parameter.unit.context.where, hint=hint)
    return parameter.shown_like_sharded(value)
