"""`manifest.json`: what a checkpoint is of, and what its files must be. Its presence is the commit.

The checkpoint's names, shapes and pieces are in `.metadata`, which is what
`torch.distributed.checkpoint` reads; the manifest holds what that cannot: sizes and checksums, the
step, the world, the optimizers' classes.
"""

from __future__ import annotations

import json
import time
import zlib
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from onefold.checkpoint.blocks import LOAD_ANOTHER, FileRecord
from onefold.errors import CheckpointError, expected

NAME = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """One optimizer: its class, and how many of the checkpoint's param groups are its own."""

    kind: str
    num_groups: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.num_groups} param group{'s' * (self.num_groups != 1)}"

    @staticmethod
    def of(optimizer: object) -> str:
        """The name by which classes are compared."""
        return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that is known of a checkpoint besides its tensors."""

    save_id: str
    step: int  # optimizer steps done
    stage: int
    world_size: int
    optimizers: list[OptimizerRecord]
    files: dict[str, FileRecord] = field(default_factory=dict)
    saved_at: str = ""  # UTC
    versions: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] | None = None  # of a Hugging Face model
    format: int = FORMAT

    def encode(self) -> bytes:
        """JSON on two lines: a checksum, and what it is of."""
        body = json.dumps(asdict(self), separators=(",", ":"))
        return f'{{"crc32":"{_crc(body)}","manifest":\n{body}}}\n'.encode()


def stamp() -> dict[str, Any]:
    """When, and by which versions, a checkpoint is saved."""
    found = {"saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "versions": {}}
    for package in ("onefold", "torch"):
        try:
            found["versions"][package] = version(package)
        except PackageNotFoundError:  # a source tree that was not installed
            found["versions"][package] = "unknown"
    return found


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint; `CheckpointError` if it is missing, damaged or newer."""
    path = folder / NAME
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise CheckpointError(
            expected(
                f"file {NAME!r} in checkpoint {str(folder)!r}",
                "none, so its save was not finished, or the file was deleted",
                hint="load an earlier checkpoint",
            )
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(folder, str(error)) from error
    head, _, rest = text.partition("\n")
    body = rest.removesuffix("}\n")
    if body == rest or head != f'{{"crc32":"{_crc(body)}","manifest":':
        raise _unreadable(folder, "other bytes")
    found = json.loads(body)
    if found["format"] > FORMAT:
        raise CheckpointError(
            expected(
                f"a checkpoint of format {FORMAT} or older",
                f"format {found['format']}, saved by {found['versions']}",
                hint="install that version of onefold",
            )
        )
    found["files"] = {name: FileRecord(**record) for name, record in found["files"].items()}
    found["optimizers"] = [OptimizerRecord(**record) for record in found["optimizers"]]
    return Manifest(**found)


def _crc(body: str) -> str:
    return f"{zlib.crc32(body.encode()):08x}"


def _unreadable(folder: Path, got: str) -> CheckpointError:
    return CheckpointError(
        expected(
            f"file {NAME!r} of checkpoint {str(folder)!r} as it was saved",
            got,
            hint=LOAD_ANOTHER,
        )
    )
