"""Write one rank's pieces with `torch.distributed.checkpoint` (DCP).

torch plans which rank writes which piece. This file replaces DCP's defaults in three places: views
of flat buffers are written without a copy, tied weights once, and every byte gets a checksum. DCP's
own reader reads the files. See docs/adr/0007.
"""

import dataclasses
import io
import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils.serialization import config

from onefold.checkpoint.agreement import collect, first, together
from onefold.checkpoint.checked_files import BlockReader, BlockWriter, FileRecord
from onefold.checkpoint.directory import METADATA
from onefold.checkpoint.metadata import MARK
from onefold.tier.host import no_garbage
from onefold.wire.collectives import Group


class WritePlanner(dcp.DefaultSavePlanner):
    """Plan the pieces that have elements, and return their tensors without a copy."""

    def create_local_plan(self) -> plans.SavePlan:
        plan = super().create_local_plan()
        items = [item for item in plan.items if not _is_empty_piece(item)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: plans.WriteItem) -> Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        return _with_own_storage(data.detach()) if isinstance(data, Tensor) else data


def _with_own_storage(tensor: Tensor) -> Tensor:
    """Return the same bytes as a tensor whose storage holds nothing else. Copies only over gaps.

    `torch.save` writes whole storages, and this one may be the flat buffer of a unit.
    """
    if not tensor.is_contiguous():
        return tensor.contiguous()
    if tensor.device.type != "cpu" or tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    start = tensor.storage_offset() * tensor.itemsize
    own = tensor.untyped_storage()[start : start + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype).set_(own, 0, tensor.shape, tensor.stride())


def _is_empty_piece(item: plans.WriteItem) -> bool:
    """Return True for a rank's empty piece of a tensor that has elements."""
    data = item.tensor_data
    if item.type != plans.WriteItemType.SHARD or data is None:
        return False
    return prod(data.chunk.sizes) == 0 and (prod(data.size) > 0 or any(data.chunk.offsets))


class RankFiles(filesystem.FileSystem):
    """The files that one rank writes into one folder. DCP's writer creates them."""

    def __init__(self, folder: Path, *, is_cached: bool) -> None:
        self.folder = folder
        self.is_cached = is_cached
        self.writers: list[BlockWriter] = []

    def create(self, name: str) -> BlockWriter:
        """Create one file."""
        self.writers.append(BlockWriter(self.folder / name, is_cached=self.is_cached))
        return self.writers[-1]

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        yield self.create(Path(path).name)

    def finish(self, *, verify: bool = False) -> dict[str, FileRecord]:
        """Wait for the disk. With `verify`, read every file back."""
        try:
            records = {writer.name: writer.finish() for writer in self.writers}
        finally:
            self.abandon()
        if verify:
            for name, record in records.items():
                # without reading ahead: no thread can start while the interpreter exits
                with BlockReader(self.folder / name, record) as reader:
                    reader.verify()
        return records

    def abandon(self) -> None:
        """Close all files without waiting for the disk."""
        for writer in self.writers:
            writer.abandon()


class Writer(dcp.FileSystemWriter):
    """Write one rank's pieces into `files`; `files.finish()` then waits for the disk."""

    def __init__(self, files: RankFiles, aliases: Mapping[str, str]) -> None:
        super().__init__(files.folder, sync_files=False)
        self.files = self.fs = files
        self._aliases = aliases

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id, modules=[MARK])

    def write_data(self, plan: plans.SavePlan, planner: Any) -> Any:
        handled = sys.exc_info()[1]  # by who saves
        try:  # every byte has a checksum already; this switch of torch holds for one thread
            with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
                return super().write_data(plan, planner)
        except Exception as error:
            for writer in self.files.writers:
                if writer.failure is not None:
                    raise writer.failure from None
            before = error.__context__
            if isinstance(error, RuntimeError) and before not in (None, handled):
                raise before from None  # torch's archive fails once more as it closes
            raise

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata`, which lists a tied weight under all its names."""
        written = [result for of_rank in results for result in of_rank]
        again = []
        for alias, name in self._aliases.items():
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
            if metadata.planner_data is not None:
                metadata.planner_data[alias] = tuple(alias.split(".", 1))
            again += [
                dataclasses.replace(result, index=dataclasses.replace(result.index, fqn=alias))
                for result in written
                if result.index.fqn == name
            ]
        metadata.version = filesystem.CURRENT_DCP_VERSION
        metadata.storage_data = {r.index: r.storage_data for r in (*written, *again)}
        metadata.storage_meta = self.storage_meta()
        pickle.dump(metadata, self.files.create(METADATA))


def write(state: dict[str, Any], files: RankFiles, aliases: dict[str, str], group: Group) -> None:
    """Plan together, and write this rank's pieces of `state` into its files. A collective.

    `aliases`: other names of tied weights, each with the one in `state`. If one rank fails, every
    rank raises. The calls are those of `dcp.save`, and the messages are ours: they name a rank that
    is gone or elsewhere.
    """
    planner, writer = WritePlanner(), Writer(files, aliases)

    def plan_own() -> plans.SavePlan:
        planner.set_up_planner(state, writer.storage_meta(), is_coordinator=group.rank == 0)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_all() -> tuple[plans.SavePlan, Metadata]:
        dealt, metadata = planner.create_global_plan(of_ranks)
        return planner.finish_plan(writer.prepare_global_plan(dealt)[group.rank]), metadata

    # torch's planner makes thousands of small objects and no cycles. They start collections over
    # everything the process holds (0.25 of 0.6 s for 300 parameters).
    with no_garbage():
        of_ranks = collect(group, plan_own)
        plan, metadata = together(group, plan_all)
        written = collect(group, lambda: writer.write_data(plan, planner).wait())
        first(group, lambda: writer.finish(metadata, written))
