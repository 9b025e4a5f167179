"""`module.load_state_dict` on a sharded module: names and shapes checked, whole tensors cut."""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor, nn

from onefold.errors import StateError, expected
from onefold.runtime.engine import Engine
from onefold.state.unit import UnitParameter


def guard(module: nn.Module, engine: Engine) -> None:
    """Make `load_state_dict` of the module take whole or sharded tensors, and refuse others."""
    alive = ref(engine)
    strictness: list[bool] = []

    def before(
        module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any],
        strict: bool, *_: object,
    ) -> None:  # fmt: skip
        current = alive()
        strictness[:] = [strict]
        if current is None or current.is_summoned:
            return
        current.rest()
        if metadata.get("assign_to_params_buffers"):
            raise StateError(
                expected(
                    "load_state_dict(..., assign=False)",
                    "assign=True, which would replace shards by whole tensors",
                    hint="leave assign out; values are copied into the shards",
                )
            )
        for name, parameter in _named(module, current):
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor):
                state_dict[prefix + name] = _fitted(name, parameter, value)

    def after(module: nn.Module, keys: Any) -> None:
        missing, unexpected = list(keys.missing_keys), list(keys.unexpected_keys)
        if strictness == [True] and (missing or unexpected):
            raise StateError(
                expected(
                    "a state dict with the module's names",
                    f"missing {missing[:5]}, unexpected {unexpected[:5]}",
                    hint="load it with strict=False to take what fits",
                )
            )

    module.register_load_state_dict_pre_hook(before)
    module.register_load_state_dict_post_hook(after)


def _named(module: nn.Module, engine: Engine) -> list[tuple[str, UnitParameter]]:
    return [
        (name, engine.by_face[id(face)])
        for name, face in module.named_parameters(remove_duplicate=False)
        if id(face) in engine.by_face
    ]


def _fitted(name: str, parameter: UnitParameter, value: Tensor) -> Tensor:
    if tuple(value.shape) != parameter.slot.shape:
        raise StateError(
            expected(
                f"{name!r} of shape {list(parameter.slot.shape)}",
                f"shape {list(value.shape)}",
                where=f"rank {parameter.unit.setting.rank}",
                hint="the state dict is of another configuration of this module",
            )
        )
    return parameter.shown_like_face(value)
