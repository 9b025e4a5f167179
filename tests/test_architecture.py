"""What keeps the house habitable: short files, one door, one place for collectives."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import onefold

SOURCE = Path(onefold.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
MAX_FILE_LINES = 420
MAX_FUNCTION_LINES = 60
COLLECTIVES = {
    "all_gather", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "gather", "reduce", "reduce_scatter",
    "reduce_scatter_single", "scatter", "send", "recv", "isend", "irecv",
}  # fmt: skip


def name(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_and_functions_stay_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_every_module_says_what_it_is_for(path):
    if path.name != "__main__.py":
        assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_the_house_rules_hold(path):
    """No hasattr, no global, no star import, no environment variable in the engine's rooms."""
    tree = ast.parse(path.read_text())
    room = path.relative_to(SOURCE).parts[0]
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global)
        assert not (isinstance(node, ast.ImportFrom) and any(a.name == "*" for a in node.names))
        if isinstance(node, ast.Name):
            assert node.id != "hasattr"
        if isinstance(node, ast.Attribute) and room in (
            "engine",
            "unit",
            "wire",
            "tier",
            "layout",
            "native",
        ):
            assert node.attr != "environ"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_only_one_file_of_the_library_calls_collectives(path):
    room = path.relative_to(SOURCE).parts[0]
    if path.name == "collectives.py" or room in ("cli", "mesh", "tools", "train"):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert not (node.value.id in ("dist", "distributed") and node.attr in COLLECTIVES)


def test_the_public_names_exist_and_are_all_there_is():
    for public in onefold.__all__:
        assert getattr(onefold, public) is not None
    assert sorted(onefold.__all__) == onefold.__all__
    with pytest.raises(AttributeError, match="no attribute 'shrad'"):
        onefold.shrad  # noqa: B018


def test_importing_onefold_imports_nothing_heavy():
    """`import onefold` starts nothing and loads not even torch; the names do, when used."""
    code = "import sys, onefold; print('torch' in sys.modules, 'rich' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]
