"""`manifest.json`: which run a checkpoint is of, and what its files must be.

Names, shapes and pieces are in `.metadata`, which `torch.distributed.checkpoint` reads. The
manifest adds sizes and checksums, the step, the world size and the classes of the optimizers.
"""

from __future__ import annotations

import json
import time
import zlib
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from onefold.checkpoint.agreement import LOAD_ANOTHER, refusal
from onefold.checkpoint.checked_files import FileRecord

NAME = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """One optimizer: its class, and its number of param groups."""

    kind: str  # module and name of the class
    num_groups: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.num_groups} param group{'s' * (self.num_groups != 1)}"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _versions() -> dict[str, str]:
    found = {}
    for package in ("onefold", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a source tree that was not installed
            found[package] = "unknown"
    return found


@dataclass(frozen=True, slots=True)
class Manifest:
    """The facts about a checkpoint besides its tensors."""

    save_id: str
    step: int  # optimizer steps done
    stage: int
    world_size: int
    optimizers: list[OptimizerRecord]
    files: dict[str, FileRecord] = field(default_factory=dict)
    saved_at: str = field(default_factory=_now)  # UTC
    versions: dict[str, str] = field(default_factory=_versions)
    config: dict[str, Any] | None = None  # of a Hugging Face model
    frozen: bool = True  # False: without parameters that did not require gradients
    format: int = FORMAT

    def encode(self) -> bytes:
        """Return JSON on two lines: the checksum, and the text that it covers."""
        body = json.dumps(asdict(self), separators=(",", ":"))
        return f"{_head(body)}\n{body}}}\n".encode()


def read(folder: Path) -> Manifest:
    """Read a checkpoint's manifest. Raises `CheckpointError`: missing, damaged or newer."""
    path = folder / NAME
    what = f"file {NAME!r} of checkpoint {str(folder)!r} as it was saved"
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise refusal(
            f"file {NAME!r} in checkpoint {str(folder)!r}",
            "no such file: its save did not finish, or the file was deleted",
            hint="load an earlier checkpoint",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise refusal(what, error, hint=LOAD_ANOTHER) from error
    head, _, rest = text.partition("\n")
    body = rest.removesuffix("}\n")
    if body == rest or head != _head(body):
        raise refusal(what, "other bytes", hint=LOAD_ANOTHER)
    found = json.loads(body)
    if found["format"] > FORMAT:
        raise refusal(
            f"a checkpoint of format {FORMAT} or older",
            f"format {found['format']}, saved by {found['versions']}",
            hint="install that version of onefold",
        )
    found["files"] = {name: FileRecord(**record) for name, record in found["files"].items()}
    found["optimizers"] = [OptimizerRecord(**record) for record in found["optimizers"]]
    return Manifest(**found)


def _head(body: str) -> str:
    return f'{{"crc32":"{zlib.crc32(body.encode()):08x}","manifest":'
