"""Files of the repository as tests of prose read them: each is read and parsed once a process."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "onefold"
FILES = tuple(sorted(PACKAGE.rglob("*.py")))
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a source file, its module first."""
    return tuple(ast.walk(ast.parse(text_of(path))))
