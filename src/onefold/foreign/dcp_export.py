"""Write a checkpoint as a folder of torch.distributed.checkpoint (DCP), piece by piece.

Names and nested keys are those of `torch.distributed.checkpoint.state_dict`, as FSDP2 saves them:
`model` and `optim`, so `dcp.load` and torch's converters read it.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.storage import WriteResult

from onefold.checkpoint.agreement import as_checkpoint_error
from onefold.checkpoint.directory import Draft
from onefold.checkpoint.listing import MODEL, OPTIM, Keys, Piece, Place, SavedTensor, Wanted
from onefold.checkpoint.offline import Exported, open_exported, weights_of
from onefold.checkpoint.safetensors import bytes_of
from onefold.checkpoint.source import Source
from onefold.foreign import PEERS


def export_dcp(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, dtype: torch.dtype | None
) -> Exported:
    """Write weights, buffers and optimizer state as `dcp.save({"model": ..., "optim": ...})` does.

    Needs one process, no process group, and memory for the largest piece. `dtype`: as in `export`;
    float32 makes masters the weights, as FSDP2 keeps them. Tied weights are written once.

    Raises: CheckpointError: nothing to export, damage, a target that exists, a full disk.
    """
    saved = open_exported(Path(source), PEERS)
    draft = Draft(Path(os.path.abspath(target)))
    draft.check()
    planner = _Planner(saved, dtype)
    try:
        draft.begin()
        writer = _Writer(draft.folder, saved.aliases)
        _write_items(planner, writer)
        files = {path.name: path.stat().st_size for path in sorted(draft.folder.iterdir())}
        draft.publish()
    except BaseException as error:
        draft.abandon()
        raise as_checkpoint_error(error) from error
    return Exported(saved.path, saved.step, files, planner.num_tensors)


def _write_items(planner: _Planner, writer: _Writer) -> None:
    """Write all items: the calls of `dcp.save`, which warns where there is no process group."""
    writer.set_up_storage_writer(True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    dealt, metadata = planner.create_global_plan([local])
    (plan,) = writer.prepare_global_plan(dealt)
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])


class _Planner(dcp.SavePlanner):
    """Plan one item for each piece, which is read when it is written."""

    def __init__(self, source: Source, dtype: torch.dtype | None) -> None:
        weights = {f"{MODEL}.{e.name}": (n, e.dtype) for n, e in weights_of(source, dtype)}
        states = {n: (n, t.dtype) for n, t in source.tensors.items() if _is_optim(source, n)}
        self._source = source
        self._tensors = weights | states
        self._paths: dict[str, Keys] = {f"{MODEL}.{a}": (MODEL, a) for a in source.aliases}
        self._pieces: dict[tuple[str, torch.Size | None], Piece] = {}
        self.num_tensors = len(self._tensors)

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        """Nothing: the checkpoint is known."""

    def create_local_plan(self) -> plans.SavePlan:
        """List the pieces of tensors, and objects."""
        source, items = self._source, list[plans.WriteItem]()
        for name, (read, dtype) in self._tensors.items():
            self._paths[name] = source.paths[name]
            items += self._items_of(name, source.tensors[read], dtype)
        for name in source.objects:
            if source.paths[name][0] in (MODEL, OPTIM):
                self._paths[name] = source.paths[name]
                items.append(plans.WriteItem(MetadataIndex(name), plans.WriteItemType.BYTE_IO))
        return plans.SavePlan(items)

    def _items_of(
        self, name: str, saved: SavedTensor, dtype: torch.dtype
    ) -> Iterator[plans.WriteItem]:
        empty = Piece((0,) * len(saved.shape), saved.shape, Place("", 0, 0))
        for piece in saved.pieces or [empty]:
            offsets, sizes = torch.Size(piece.offsets), torch.Size(piece.sizes)
            self._pieces[name, offsets] = piece
            data = plans.TensorWriteData(
                ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=dtype),
                torch.Size(saved.shape),
            )  # fmt: skip
            kind = plans.WriteItemType.SHARD
            yield plans.WriteItem(MetadataIndex(name, offsets), kind, tensor_data=data)

    def create_global_plan(
        self, all_plans: list[plans.SavePlan]
    ) -> tuple[list[plans.SavePlan], Metadata]:
        """Return the plan of the one process, and what the folder will list."""
        dealt, metadata = default_planner.create_default_global_save_plan(all_plans)
        return dealt, dataclasses.replace(metadata, planner_data=self._paths)

    def finish_plan(self, new_plan: plans.SavePlan) -> plans.SavePlan:
        """Return the plan as it is."""
        return new_plan

    def resolve_data(self, write_item: plans.WriteItem) -> Tensor | io.BytesIO:
        """Read one piece, or one object."""
        name = write_item.index.fqn
        if write_item.type == plans.WriteItemType.BYTE_IO:
            packed = io.BytesIO()
            torch.save(self._source.read_object(name), packed)
            return packed
        piece = self._pieces[name, write_item.index.offset]
        read, dtype = self._tensors[name]
        values = torch.empty(piece.sizes, dtype=self._source.tensors[read].dtype)
        if values.numel():
            wanted = Wanted(piece, values.dtype, 0, values.numel())
            with self._source.store.open_file(piece.place.file, [wanted]) as file:
                file.read_elements(wanted, bytes_of(values))
        return values.to(dtype)


def _is_optim(source: Source, name: str) -> bool:
    return source.paths[name][0] == OPTIM


class _Writer(dcp.FileSystemWriter):
    """Lists a tied weight under all its names."""

    def __init__(self, folder: Path, aliases: Mapping[str, str]) -> None:
        super().__init__(folder)
        self._aliases = {f"{MODEL}.{a}": f"{MODEL}.{name}" for a, name in aliases.items()}

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata`."""
        again = []
        for alias, name in self._aliases.items():
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
            again += [
                dataclasses.replace(result, index=dataclasses.replace(result.index, fqn=alias))
                for of_rank in results
                for result in of_rank
                if result.index.fqn == name
            ]
        super().finish(metadata, [*results, again])
