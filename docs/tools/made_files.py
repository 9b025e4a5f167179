"""Write files that a tool makes, or check them with `--check`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def write_or_check(wanted: Mapping[Path, str], arguments: Sequence[str]) -> int:
    """Write each file; with `--check` write none, and return 1 if one differs."""
    if "--check" in arguments:
        return int(any(not p.exists() or p.read_text() != text for p, text in wanted.items()))
    for path, text in wanted.items():
        path.write_text(text)
    return 0
