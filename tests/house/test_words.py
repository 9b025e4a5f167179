"""Pages, help and messages use the words of the field. docs/tools/words.py has the list."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

from onefold.app.cli.main import _parser
from tests.support.sources import FILES, ROOT, nodes_of, text_of

TOOLS = ROOT / "docs" / "tools"
sys.path.insert(0, str(TOOLS))
WORDS = runpy.run_path(str(TOOLS / "words.py"))
sys.path.remove(str(TOOLS))
found_words = WORDS["found_words"]


def test_a_word_that_the_project_does_not_use_is_found():
    wrong = [
        "Losses beside DDP",
        "step times were told without fitting",
        "coded messages",
        "a second shard of the node",
        "the model is no chain",
        "a step has the bits of any other",
        "states that rest in CPU memory",
        "Resting states",
        "one engine, and a stage is data",
        "loads the file anew",
        "as ever",
        "quantised bases",
        "neighbours in a node",
        "a whole script",
        "weights are cut over the ranks",
        'pip install "onefold[hf]"',
    ]
    assert [text for text in wrong if len(found_words(text)) != 1] == []


def test_words_of_the_field_pass():
    right = [
        "besides activations", "the rest on the device", "`--rest int8`", "a rank-told value",
        "quantized communication and secondary shards", "pip install '.[hf]'",
    ]  # fmt: skip
    assert [word for text in right for word in found_words(text)] == []


def test_code_and_addresses_are_no_words_and_commands_to_copy_are():
    page = "[a](told.md) `x` <!-- told -->\n\n```python\ntold = 1\n```\n"
    assert found_words(WORDS["prose"](page)) == []
    console = '\n```console\n$ pip install "onefold[hf]"\n```\n'
    assert len(found_words(WORDS["prose"](console))) == 1


def test_pages_use_the_words_of_the_field():
    wrong = [
        f"{page.relative_to(ROOT)}: {word}"
        for page in WORDS["pages"]()
        for word in found_words(WORDS["prose"](text_of(page)))
    ]
    assert wrong == []


def test_the_help_of_every_command_uses_the_words_of_the_field():
    parser = _parser()
    (group,) = parser._subparsers._group_actions
    helps = [" ".join(each.format_help().split()) for each in (parser, *group.choices.values())]
    assert [word for text in helps for word in found_words(text)] == []


def texts(path: Path) -> list[str]:
    """Every text of a source file that is no docstring: messages, hints, labels."""
    nodes = nodes_of(path)
    comments = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = (node for node in nodes if isinstance(node, ast.Constant))
    return [n.value for n in constants if isinstance(n.value, str) and id(n) not in comments]


def test_messages_use_the_words_of_the_field():
    wrong = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in FILES
        for text in texts(path)
        if " " in text
        for word in found_words(text)
    ]
    assert wrong == []
