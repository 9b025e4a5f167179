"""Messages lead to pages that their reader can open: in a checkout, and from an installed wheel."""

from __future__ import annotations

import ast
import re
from email.message import Message
from pathlib import Path

import pytest

from onefold import pages

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
DOCS = "https://example.org/onefold/blob/v1/docs/index.md"
IN_A_WHEEL = re.compile(r"(?:docs|examples|benchmarks)/[\w/.-]+|in a checkout|README")


@pytest.fixture
def a_wheel(monkeypatch, tmp_path):
    """The package as if it was installed; yields its metadata."""
    told = Message()
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "metadata", lambda name: told)
    pages.page.cache_clear()
    yield told
    pages.page.cache_clear()


def test_in_a_checkout_a_page_is_its_file():
    assert pages.page("docs/guides/ema.md") == "docs/guides/ema.md"
    assert pages.page("docs/guides/ema.md#usage") == "docs/guides/ema.md#usage"


def test_in_a_wheel_a_page_is_its_address_in_the_release(a_wheel):
    a_wheel["Project-URL"] = "Issues, https://example.org/onefold/issues"
    a_wheel["Project-URL"] = f"Documentation, {DOCS}"
    base = DOCS.removesuffix("docs/index.md")
    assert pages.page("docs/guides/ema.md#usage") == f"{base}docs/guides/ema.md#usage"
    assert pages.page("examples/three_axes.py") == f"{base}examples/three_axes.py"


def test_a_wheel_without_an_address_says_where_the_page_is(a_wheel):
    assert pages.page("docs/guides/ema.md") == "docs/guides/ema.md in Onefold's repository"


def texts(tree: ast.AST) -> set[ast.Constant]:
    """All texts of a file, but documentation: strings that are statements."""
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = {node for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return {node for node in found if isinstance(node.value, str) and id(node) not in said}


def test_no_message_names_a_path_that_a_wheel_lacks_but_by_way_of_page():
    """A path alone is a constant that `page` gets, and exists."""
    named = [(path, node.value) for path in SOURCES for node in texts(ast.parse(path.read_text()))
             if IN_A_WHEEL.search(node.value)]  # fmt: skip
    assert len(named) >= 6
    for path, text in named:
        assert IN_A_WHEEL.fullmatch(text.partition("#")[0]), (path.name, text)
        assert (ROOT / text.partition("#")[0]).is_file(), (path.name, text)
        assert path.name == "pages.py" or "page(" in path.read_text(), path.name
