"""Methods of `nn.Module` that would put other tensors in place of shards, made right or refused.

`load_state_dict` takes whole or sharded tensors, of the module or a part of it. `to`, `float`,
`cuda` and their like pass where they change nothing and are refused where they would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor, nn

from onefold.engine.engine import Engine
from onefold.errors import StateError, expected
from onefold.unit.parameter import UnitParameter


def install(module: nn.Module, engine: Engine) -> None:
    """Guard the module and its parts.

    Shapes are checked where each submodule loads. Names are checked for the whole module, in front
    of torch's own method: its hooks are not told whether the caller asked for strictness.
    """
    alive = ref(engine)
    for part in module.modules():
        part.__dict__["_apply"] = _Mover(part, alive)
        if part._parameters:
            part.register_load_state_dict_pre_hook(_Cutter(alive))
    module.__dict__["load_state_dict"] = _Loader(module)


class _Mover:
    """`Module._apply` of a sharded module: what `to`, `float`, `cuda` and `share_memory` call."""

    def __init__(self, module: nn.Module, engine: ReferenceType[Engine]) -> None:
        self.module = ref(module)
        self.engine = engine

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        module, engine = self.module(), self.engine()
        assert module is not None, "a method outlived its module"
        assert engine is not None, "a module outlived its engine"
        parts = list(module.modules()) if recurse else [module]
        for sharded in (sharded for part in parts for sharded in part._parameters.values()):
            parameter = engine.by_sharded.get(id(sharded))
            if parameter is not None:
                probe = parameter.local.new_empty(0)
                moved = fn(probe)
                if moved is not probe:
                    change = f"one to be replaced by {moved.dtype} on {moved.device}"
                    raise parameter.unit.touched(parameter, change)
        for part in parts:
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = fn(buffer)
        return module


class _Cutter:
    """Turns a submodule's entries of a state dict into what its faces can copy from."""

    def __init__(self, engine: ReferenceType[Engine]) -> None:
        self.engine = engine

    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any],
        *_: object,
    ) -> None:  # fmt: skip
        engine = self.engine()
        if engine is None or engine.is_summoned:
            return
        engine.rest()
        if metadata.get("assign_to_params_buffers"):
            raise StateError(
                expected(
                    "load_state_dict(..., assign=False)",
                    "assign=True, which would replace shards by whole tensors",
                    hint="leave assign out; values are copied into the shards",
                )
            )
        for name, sharded in module._parameters.items():
            value = state.get(prefix + name)
            parameter = engine.by_sharded.get(id(sharded))
            if parameter is not None and isinstance(value, Tensor):
                state[prefix + name] = _fitted(prefix + name, parameter, value)


class _Loader:
    """`load_state_dict` of the sharded module itself: names first, then torch's method."""

    def __init__(self, module: nn.Module) -> None:
        self.module = ref(module)

    def __call__(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        module = self.module()
        assert module is not None, "a method outlived its module"
        if strict:
            wanted = module.state_dict(keep_vars=True).keys()
            missing = [name for name in wanted if name not in state_dict]
            unexpected = [name for name in state_dict if name not in wanted]
            if missing or unexpected:
                raise StateError(
                    expected(
                        "a state dict with the module's names",
                        f"missing {missing[:5]}, unexpected {unexpected[:5]}",
                        hint="load it with strict=False to take what fits",
                    )
                )
        return type(module).load_state_dict(module, state_dict, strict, assign)


def _fitted(name: str, parameter: UnitParameter, value: Tensor) -> Tensor:
    if tuple(value.shape) != parameter.slot.shape:
        raise StateError(
            expected(
                f"{name!r} of shape {list(parameter.slot.shape)}",
                f"shape {list(value.shape)}",
                where=parameter.unit.context.where,
                hint="the state dict is of another configuration of this module",
            )
        )
    return parameter.shown_like_sharded(value)
