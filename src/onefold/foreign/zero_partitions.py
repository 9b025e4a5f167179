"""ZeRO files of DeepSpeed: each rank's flat partition of masters and moments.

Stages 1 and 2 put the parameters of a group one after the other, in the order of `param_shapes`,
and cut the flat tensor in as many parts as ranks. The file of the last rank lacks its padding.
Stage 3 cuts each parameter by itself: every rank has ceil(numel / ranks) elements of it, the last
ones padded. See docs/adr/0037.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch

from onefold.checkpoint.listing import MODEL, OPTIM, Extents
from onefold.errors import CheckpointError
from onefold.foreign.deepspeed_files import (
    OPTIMIZER_NAMES,
    Group,
    ModelStates,
    States,
    named,
    stage_of,
    states_of,
)
from onefold.foreign.flat_pieces import FlatRun, joined_runs, run_of
from onefold.foreign.torch_files import StoredTensor, read_archive
from onefold.foreign.trees import Tree

_FP32, STEP = "fp32", "step"
_NOT_SET = ("params", STEP, "bias_correction")
"""Keys of a param group that are no settings of torch's classes."""


def part_of(shape: Extents, num_ranks: int, rank: int) -> tuple[int, int]:
    """Return the slots that stage 3 gives a rank of a parameter, and how many are not padding."""
    numel = prod(shape)
    slots = -(-numel // num_ranks)
    return slots, max(0, min(slots, numel - rank * slots))


def add_partitions(tree: Tree, files: list[str], models: list[ModelStates]) -> None:
    """Add the weights that are trained, their optimizer states, and the param groups."""
    model = models[0]
    optims = [
        named(read_archive(tree.folder / file, OPTIMIZER_NAMES), "optimizer file") for file in files
    ]
    states = [named(optim["optimizer_state_dict"], "optimizer states") for optim in optims]
    _compare_files(files, states, models)
    own, groups = zip(*map(states_of, states), strict=True)
    _compare_states(files, own)
    if not model.is_cut:
        _compare_sizes(states, model)
    runs = defaultdict[tuple[str, str], list[FlatRun]](list)
    dtypes = dict[tuple[str, str], torch.dtype]()
    for rank, (file, state) in enumerate(zip(files, states, strict=True)):
        places = (
            _places_3(state, model, len(files), rank)
            if model.is_cut
            else _places_flat(state, model, rank)
        )
        for name, group, first, numel in places:
            flats = _flats(state, own[rank], group)
            for key, flat in flats.items():
                if dtypes.setdefault((name, key), flat.dtype) != flat.dtype:
                    raise ValueError(f"parts of {name[:80]!r} of several dtypes")
                runs[name, key].append(run_of(flat, file, first, numel))
    shapes = model.shapes
    if {name for name, _ in runs} != shapes.keys():
        raise ValueError("partitions of other parameters than the model states list")
    for (name, key), parts in runs.items():
        saved = joined_runs(name, shapes[name], dtypes[name, key], parts)
        tree.add((MODEL, name) if key == _FP32 else (OPTIM, "state", name, key), saved)
    if own[0] or not model.fields.get("global_steps"):  # not where the states are on NVMe
        add_groups(tree, model, groups[0], own[0], files[0])


def _compare_files(
    files: list[str], states: list[dict[str, Any]], models: list[ModelStates]
) -> None:
    """Raise `CheckpointError` for files of several stages, and for missing ranks."""
    stages = {file: stage_of(state) for file, state in zip(files, states, strict=True)}
    wanted = {3} if models[0].is_cut else {1, 2}
    for file, stage in stages.items():
        if stage not in wanted or stage != stages[files[0]]:
            got = f"stage {stage} in {file!r}"
            hint = "the files are of several saves; each has a folder of its own"
            other = f"stage {stages[files[0]]}" if stage in wanted else f"stage {min(wanted)}"
            raise CheckpointError(f"all files to be of {other}, as the first", got, hint=hint)
    number = models[0].fields["dp_world_size"]
    for kind, got in (("optim", len(files)), ("model", len(models))):
        if got != (number if kind == "optim" or models[0].is_cut else 1):
            hint = "copy the files of all ranks into one folder"
            wanted_files = f"files of {kind} states of {number} ranks"
            raise CheckpointError(wanted_files, f"{got} files", hint=hint)
    steps = {model.file: model.fields.get("global_steps") for model in models}
    if len(set(steps.values())) > 1:
        raise CheckpointError("all files to be of one step", str(steps), hint="save again")


def _compare_states(files: list[str], own: Sequence[States]) -> None:
    """Raise `ValueError` for a rank with other optimizer states than the first."""
    keys = [{index: {*state} for index, state in each.items()} for each in own]
    for file, each in zip(files, keys, strict=True):
        if each != keys[0]:
            raise ValueError(f"other optimizer states in {file!r} than in {files[0]!r}")


def _compare_sizes(states: list[dict[str, Any]], model: ModelStates) -> None:
    """Raise `ValueError` unless partitions have as many elements as the shapes, at stages 1, 2."""
    for index, shapes in enumerate(model.groups):
        numel = sum(state["single_partition_of_fp32_groups"][index].sizes[0] for state in states)
        paddings = states[0].get("param_alignment_paddings")
        wanted = sum(map(prod, shapes.values())) + sum(paddings[index] if paddings else ())
        if numel != wanted:
            raise ValueError(f"{numel} elements of param group {index}, whose shapes have {wanted}")


def _places_flat(
    state: dict[str, Any], model: ModelStates, rank: int
) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, group, first element and number of elements of each part, at stages 1 and 2.

    The order of the shapes counts. The file's own `param_slice_mappings` has another one if
    `round_robin_gradients` is set, so it is not read.
    """
    for group, (shapes, flat) in enumerate(
        zip(model.groups, state["single_partition_of_fp32_groups"], strict=True)
    ):
        length = flat.sizes[0] + state["group_paddings"][group]
        paddings = state.get("param_alignment_paddings")
        at = -rank * length
        for name, shape, padding in zip(
            shapes, shapes.values(), paddings[group] if paddings else [0] * len(shapes), strict=True
        ):
            first, stop = max(at, 0), min(at + prod(shape), length)
            if first < stop:
                yield name, group, first, stop - first
            at += prod(shape) + padding


def _places_3(
    state: dict[str, Any], model: ModelStates, num_ranks: int, rank: int
) -> Iterator[tuple[str, int, int, int]]:
    """The same at stage 3. A param group may have several flat tensors, of whole parameters."""
    lengths = [flat.sizes[0] for flat in state["fp32_flat_groups"]]
    flat, first = 0, 0
    for group in model.groups:
        for name, shape in group.items():
            slots, numel = part_of(shape, num_ranks, rank)
            while flat < len(lengths) and first == lengths[flat]:
                flat, first = flat + 1, 0
            yield name, flat, first, numel
            first += slots
    if flat != len(lengths) - 1 or first != lengths[flat]:
        raise ValueError("partitions of other sizes than the model states list")


def _flats(state: dict[str, Any], own: States, index: int) -> dict[str, StoredTensor]:
    """Return the flat tensors with a number: the masters, and states of the optimizer."""
    key = "fp32_flat_groups" if "fp32_flat_groups" in state else "single_partition_of_fp32_groups"
    states = {
        k: v for k, v in own.get(index, {}).items() if isinstance(v, StoredTensor) and v.sizes
    }
    return {_FP32: state[key][index], **states}


def add_groups(tree: Tree, model: ModelStates, groups: list[Group], own: States, file: str) -> None:
    """Add param groups, and states that are single numbers, which DeepSpeed keeps by group."""
    if len(groups) != len(model.groups):
        raise ValueError(f"{len(groups)} param groups, of which {len(model.groups)} have shapes")
    for index, (group, shapes) in enumerate(zip(groups, model.groups, strict=True)):
        numbers = own.get(index if len(own) == len(groups) else 0, {})
        numbers = {key: v for key, v in numbers.items() if not _has_elements(v)}
        if group.get("bias_correction", True) is not True:
            hint = "no optimizer of torch steps so; load without an optimizer"
            raise CheckpointError("an Adam with bias_correction", "one without", hint=hint)
        if STEP in group:  # as DeepSpeed's FusedAdam of earlier versions kept it
            numbers = {STEP: torch.tensor(float(group[STEP])), **numbers}
        for name in shapes:
            for key, value in numbers.items():
                number = torch.tensor(float(value)) if isinstance(value, int | float) else value
                if f"{OPTIM}.state.{name}.{key}" not in tree.paths:
                    tree.add((OPTIM, "state", name, key), number, file)
        named_here = {key: v for key, v in group.items() if key not in _NOT_SET}
        for key, value in {**named_here, "params": [*shapes]}.items():
            tree.add((OPTIM, "param_groups", index, key), value, file)


def _has_elements(value: Any) -> bool:
    return isinstance(value, StoredTensor) and value.sizes != ()
