"""Folders of DeepSpeed 0.19: ZeRO files of stages 1 to 3, and universal folders.

mp_rank_00_model_states.pt                  stages 1, 2: module, shapes, steps, client state
zero_pp_rank_R_mp_rank_00_model_states.pt   stage 3: the same, with the frozen weights' parts
zero_pp_rank_R_mp_rank_00_optim_states.pt   this rank's part of masters and moments, flat
zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt universal: each parameter as a whole

A universal folder has the files of model states as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onefold.checkpoint.agreement import believing
from onefold.checkpoint.checked_files import FileRecord
from onefold.checkpoint.listing import EXTRA, MODEL, OPTIM, Listing, ModuleNames, PieceStore
from onefold.errors import CheckpointError
from onefold.foreign.deepspeed_files import ModelStates, read_model_states
from onefold.foreign.deepspeed_universal import UNIVERSAL, add_universal
from onefold.foreign.flat_pieces import joined_runs, run_of
from onefold.foreign.trees import Tree
from onefold.foreign.zero_partitions import add_partitions, part_of

_STATES = re.compile(
    r"(bf16_|fp16_)?(zero_pp_rank_(\d{1,6})_)?mp_rank_(\d+)_(model|optim)_states\.pt"
)
_OTHERS = {
    r"layer_\d+-": "a pipeline", r".*exp(ert|p_rank)_\d+_": "experts over ranks",
    r".*mp_rank_00_\d+_": "a pipeline", r".*mp_rank_(?!00_)\d+_": "tensor parallelism",
}  # fmt: skip
_KNOWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "data_sampler", "random_ltd", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "universal_checkpoint_info",
}  # fmt: skip
"""What a file of model states has besides what comes back as `extra`."""

_GROUPS = (OPTIM, "param_groups")
_FLAGS = {
    "params", "initial_lr", "bias_correction", "amsgrad", "maximize", "foreach", "capturable",
    "differentiable", "fused", "decoupled_weight_decay", "nesterov",
}  # fmt: skip
"""Settings that classes of the same arithmetic have or lack: DeepSpeed's Adam and torch's."""


@dataclass(frozen=True, slots=True)
class DeepSpeedFormat:
    """Folders with files of model states."""

    writer: str = "DeepSpeed"

    def is_format_of(self, folder: Path) -> bool:
        """True if there are files of model states."""
        return any(folder.glob("*_model_states.pt"))

    def open_listing(
        self, folder: Path, files: Mapping[str, FileRecord], *, is_verified: bool
    ) -> tuple[Listing, PieceStore]:
        """See `PeerFormat`."""
        del is_verified
        _refuse_parallel(folder, files)
        tree = Tree(folder)
        models, optims = _by_rank(files, "model"), _by_rank(files, "optim")
        what = f"the files of {str(folder)!r} to be those of one checkpoint of DeepSpeed"
        with believing(what):
            states = [read_model_states(folder / name) for name in models]
            if (folder / UNIVERSAL).is_dir():
                add_universal(tree, states[0])
            else:
                add_partitions(tree, optims, states)
            _add_rest(tree, states)
        return tree.listing, tree

    def arrange(
        self, listing: Listing, store: PieceStore, names: ModuleNames | None
    ) -> tuple[Listing, PieceStore]:
        """See `PeerFormat`. The keys are ours already."""
        optimizers = names.optimizers if names is not None else []
        for group in {path[2] for path in listing.paths.values() if path[:2] == _GROUPS}:
            has = {path[3] for path in listing.paths.values() if path[:3] == (*_GROUPS, group)}
            for own in optimizers:
                other = sorted((own.settings ^ has) - _FLAGS)
                if other:
                    got = f"one {'with' if other[0] in has else 'without'} {other[0]!r}"
                    hint = "build the optimizer of the class that DeepSpeed stepped"
                    raise CheckpointError(f"the settings of {own.kind}", got, hint=hint)
        return listing, store


def _refuse_parallel(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Raise `CheckpointError` for model parallelism of several ranks."""
    for name in sorted(files):
        for pattern, kind in _OTHERS.items():
            if name.endswith("_states.pt") and re.match(pattern, name):
                raise several(f"file {name!r} of {str(folder)!r}", kind)


def several(what: str, kind: str) -> CheckpointError:
    """Return the error of a checkpoint that model parallelism has cut."""
    hint = "convert it in DeepSpeed to one rank of model parallelism, then load that"
    return CheckpointError(f"{what} to be of data parallelism alone", kind, hint=hint)


def _by_rank(files: Mapping[str, FileRecord], kind: str) -> list[str]:
    """Return the names of a kind of files in rank order. Raises `CheckpointError` for a gap."""
    found = dict[int, str]()
    for name in files:
        match = _STATES.fullmatch(name)
        if match and match[5] == kind:
            rank = int(match[3] or 0)
            if rank in found:
                raise CheckpointError(
                    f"one file of {kind} states of rank {rank}",
                    f"{found[rank]!r} and {name!r}", hint="each save has a folder of its own",
                )  # fmt: skip
            found[rank] = name
    missing = [rank for rank in range(len(found)) if rank not in found]
    if missing or (not found and kind == "model"):
        got = f"none of rank {missing[0]}" if missing else "none of a name that is known"
        hint = "copy the files of all ranks into one folder"
        last = max(found, default=0)
        raise CheckpointError(f"files of {kind} states of ranks 0 to {last}", got, hint=hint)
    return [found[rank] for rank in sorted(found)]


def _add_rest(tree: Tree, states: list[ModelStates]) -> None:
    """Add weights that no optimizer has, buffers, tied names and all that becomes `extra`."""
    first, trained = states[0], {f"{MODEL}.{name}" for name in states[0].shapes}
    for name, shape in first.frozen.items() if first.is_cut else ():
        own = [(state.file, state.fragments[name]) for state in states]
        runs = [
            run_of(flat, file, 0, part_of(shape, len(states), rank)[1])
            for rank, (file, flat) in enumerate(own)
        ]
        if any(flat.dtype != own[0][1].dtype for _, flat in own):
            raise ValueError(f"parts of {name[:80]!r} of several dtypes")
        tree.add((MODEL, name), joined_runs(name, shape, own[0][1].dtype, runs))
    skipped = {*first.shared, *(first.frozen if first.is_cut else ())}
    for name, value in first.module.items():
        if f"{MODEL}.{name}" not in trained and name not in skipped:
            tree.add((MODEL, name), value, first.file)
    tree.tie(first.shared)
    for key, value in first.fields.items():
        if key not in _KNOWN:
            tree.add((EXTRA, key), value, first.file)
