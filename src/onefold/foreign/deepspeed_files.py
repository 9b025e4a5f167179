"""The files of DeepSpeed: what is in them, checked for its kind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onefold.checkpoint.listing import Extents, extents
from onefold.errors import CheckpointError
from onefold.foreign.torch_files import StoredTensor, read_archive
from onefold.foreign.unpickling import Built

OPTIMIZER_NAMES = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
"""Classes that an optimizer file names; none is imported or called."""

Group = dict[str, Any]
States = dict[int, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ModelStates:
    """A file of model states. `is_cut`: of stage 3, where `module` has buffers alone.

    `fields`: all values of the file, by key. `groups`: the shapes of each param group's weights.
    """

    file: str
    fields: dict[str, Any]
    module: dict[str, Any]
    groups: list[dict[str, Extents]]
    frozen: dict[str, Extents]
    fragments: dict[str, StoredTensor]
    shared: dict[str, str]
    is_cut: bool

    @property
    def shapes(self) -> dict[str, Extents]:
        """The shapes of all weights that are trained."""
        return {name: shape for group in self.groups for name, shape in group.items()}


def read_model_states(path: Path) -> ModelStates:
    """Read a file of model states. Raises `CheckpointError` for model parallelism too."""
    fields = named(read_archive(path, frozenset()), "model states")
    parallel = fields.get("checkpoint_parallel_dimensions") or {}
    degrees = {"mp_world_size": fields.get("mp_world_size", 1), **named(parallel, "dimensions")}
    for key, degree in degrees.items():
        if degree not in (None, 1):
            hint = "convert it in DeepSpeed to one rank of model parallelism, then load that"
            wanted = f"file {path.name!r} to be of data parallelism alone"
            raise CheckpointError(wanted, f"{key} {degree}", hint=hint)
    if not fields.get("param_shapes"):
        wanted = f"file {path.name!r} to be of ZeRO stage 1, 2 or 3"
        raise CheckpointError(wanted, "no param_shapes: stage 0, or a module alone", hint=(
            "onefold.load_pretrained reads weights saved as safetensors"))  # fmt: skip
    groups = [
        {name: extents(shape) for name, shape in named(group, "shapes").items()}
        for group in fields["param_shapes"]
    ]
    frozen = named(fields.get("frozen_param_shapes") or {}, "frozen shapes")
    module = named(fields["module"], "module")
    buffers = set(fields.get("buffer_names") or ())
    is_cut = path.name.startswith("zero_pp_rank_")
    if is_cut:
        module = {name: module[name] for name in module.keys() & buffers}
    return ModelStates(
        path.name, fields, module, groups,
        {name: extents(shape) for name, shape in frozen.items()},
        named(fields.get("frozen_param_fragments") or {}, "frozen weights"),
        named(fields.get("shared_params") or {}, "tied weights"), is_cut,
    )  # fmt: skip


def named(value: Any, what: str) -> dict[str, Any]:
    """Return a dict whose keys are names. Raises `TypeError` for another value."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"{what} that are no names and values")
    return value


def stage_of(states: dict[str, Any]) -> int:
    """Return the stage of ZeRO that an optimizer's state is of."""
    stage = states["zero_stage"]
    (number,) = stage.arguments if isinstance(stage, Built) else (stage,)
    return int(number)


def states_of(states: dict[str, Any]) -> tuple[States, list[Group]]:
    """Return the base optimizer's state by number, and its param groups."""
    key = "optimizer_state_dict" if stage_of(states) == 3 else "base_optimizer_state"
    if isinstance(states[key], list):
        hint = "save without elastic_checkpoint, or convert with ds_to_universal"
        wanted = "optimizer states with their param groups"
        raise CheckpointError(wanted, "those of elastic_checkpoint", hint=hint)
    base = named(states[key], "the optimizer")
    if not isinstance(base["param_groups"], list):
        raise TypeError("param groups that are none")
    return base["state"], [named(group, "a param group") for group in base["param_groups"]]
