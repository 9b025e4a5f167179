"""The pages are true: their programs run, their commands parse, their messages and links exist.

A `python` block runs as it stands, in one process and on two ranks, after `import onefold, torch`.
Comments above it say more:

    <!-- given: model, optimizer -->   names that a test provides; the block starts a new program
    <!-- ranks: 4 -->                  ranks on which the program runs
    <!-- processes: 2 -->              ranks in processes of their own, as a launcher starts them
    <!-- not run: REASON -->           a block that cannot run here
"""

from __future__ import annotations

import ast
import difflib
import re
import runpy
import shlex
import tomllib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import onefold
from onefold import hf
from onefold.app.cli.main import main
from tests.support.hf_ranks import run_forks
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but
from tests.support.sources import FILES, ROOT, nodes_of, text_of

TOOLS = ROOT / "docs" / "tools"
RUN = [ROOT / "README.md", ROOT / "docs" / "index.md"]
RUN += sorted(
    path
    for room in ("start", "guides", "coming-from")
    for path in (ROOT / "docs" / room).glob("*.md")
)

BLOCK = re.compile(r"((?:^<!--[^\n]*-->\n)*)^( *)```(\w+)[^\n]*\n(.*?)^\2```", re.S | re.M)
MARK = re.compile(r"<!-- (given|ranks|processes|not run): (.*?) -->")


@dataclass
class Program:
    """Blocks of a page that follow one another, from the first on that names what is given."""

    line: int
    given: list[str] = field(default_factory=list)
    ranks: tuple[int, ...] = (1, 2)
    is_forked: bool = False
    blocks: list[str] = field(default_factory=list)


def blocks(path: Path, language: str) -> Iterator[tuple[int, dict[str, str], str]]:
    """Line, marks and text of each block in a language."""
    text = text_of(path)
    for found in BLOCK.finditer(text):
        if found[3] == language:
            line = text.count("\n", 0, found.start(4)) + 1
            indent = re.compile(f"^{found[2]}", re.M)
            yield line, dict(MARK.findall(found[1])), indent.sub("", found[4])


def programs(path: Path) -> list[Program]:
    """What runs of a page, in order."""
    found: list[Program] = []
    for line, marks, text in blocks(path, "python"):
        if "not run" in marks:
            assert len(marks["not run"].split()) >= 3, f"{path}:{line}: say why it cannot run"
            continue
        if "given" in marks or not found:
            given = [name.strip() for name in marks.get("given", "").split(",") if name]
            found.append(Program(line, given))
        if "ranks" in marks:
            found[-1].ranks = (int(marks["ranks"]),)
        if "processes" in marks:
            found[-1].ranks, found[-1].is_forked = (int(marks["processes"]),), True
        found[-1].blocks.append("\n" * (line - 1) + text)  # tracebacks name the page's line
    return found


class Net(nn.Module):
    """Tokens to logits: what the pages call GPT."""

    def __init__(self, config: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(config))
        self.head = nn.Linear(16, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.head(x)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def provided() -> dict[str, Any]:
    """What a page may take as given; every rank has its own."""
    model = seeded(Net)
    rows = torch.arange(32 * 9).reshape(32, 9) % 251
    return {
        "GPT": Net, "config": 2, "model": model, "loss_fn": loss_fn,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "dataset": [(row[:-1], row[1:]) for row in rows],
        "batches": [(rows[:4, :-1], rows[:4, 1:])], "tokens": rows[:4],
        "x": rows[:4, :-1], "y": rows[:4, 1:],
        "loss_sum": lambda model, tokens: model(tokens).square().sum(),
    }  # fmt: skip


def run(rank: int, program: Program, path: Path) -> None:
    known = provided()
    names = {"__name__": "page", "onefold": onefold, "torch": torch} | {
        name: known[name] for name in program.given
    }
    for text in program.blocks:
        exec(compile(text, str(path), "exec"), names)


def run_on(ranks: int, program: Program, path: Path) -> None:
    if program.is_forked:
        pytest.importorskip("accelerate")
        run_forks(ranks, run, program, path)
    elif ranks == 1:
        run(0, program, path)
    else:
        run_ranks(ranks, run, program, path)


@again_but("docs", "start")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo
@pytest.mark.parametrize("room", sorted({path.parent for path in RUN}), ids=lambda room: room.name)
def test_the_programs_of_the_pages_run(room, tmp_path, monkeypatch):
    """On one of its numbers of ranks, in turn."""
    failed = []
    pages = [path for path in RUN if path.parent == room]
    for number, (path, program) in enumerate((p, each) for p in pages for each in programs(p)):
        (folder := tmp_path / str(number)).mkdir()
        monkeypatch.chdir(folder)
        ranks = program.ranks[number % len(program.ranks)]
        try:
            run_on(ranks, program, path)
        except Exception:
            place = f"{path.relative_to(ROOT)}:{program.line}, ranks {ranks}"
            failed.append(f"{place}:\n{traceback.format_exc()}")
    assert not failed, "\n".join(failed)


class Dropping(Net):
    """A model whose training draws from torch's generator."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * F.dropout(torch.ones(()), 0.5)


def weights_after(
    rank: int, program: Program, model: type[nn.Module] = Net
) -> tuple[int, dict[str, Tensor]]:
    names = {"torch": torch, **provided(), "model": seeded(model)}
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters(), lr=1e-3)
    for text in program.blocks:
        exec(compile(text, "page", "exec"), names)
    return names["step"], onefold.full_state_dict(names["model"], rank0_only=False)


def test_the_recipe_for_the_position_in_the_data_resumes_at_the_next_row(tmp_path, monkeypatch):
    """The second run goes on at step 6 of 8: from the start it would save step 3 again."""
    monkeypatch.chdir(tmp_path)
    program, *_ = programs(ROOT / "docs" / "guides" / "data-position.md")
    whole, *_ = run_ranks(3, weights_after, program)
    assert whole[0] == 8
    again, *_ = run_ranks(3, weights_after, program)
    assert again[0] == 8
    for name, weight in whole[1].items():
        assert torch.equal(weight, again[1][name])
    assert [steps for steps, _ in run_ranks(2, weights_after, program)] == [8, 8]


def test_the_recipe_for_the_position_in_the_data_resumes_dropout_too(tmp_path, monkeypatch):
    """In one process: ranks that are threads share a generator."""
    monkeypatch.chdir(tmp_path)
    program, *_ = programs(ROOT / "docs" / "guides" / "data-position.md")
    (_, whole), (_, again) = (weights_after(0, program, Dropping) for _ in range(2))
    for name, weight in whole.items():
        assert torch.equal(weight, again[name]), name


def peak(stage: int, offload: str, **choices: Any) -> str:
    """The peak of one of eight devices at a stage and offload, as the page on memory prints it."""
    cluster = {"ranks": 8, "device_type": "cuda", "memory": 24 << 30}
    rows = onefold.plan("large", cluster=cluster, seq=1024, **choices).as_dict()["rows"]
    (nbytes,) = (r["nbytes"] for r in rows if (r["stage"], r["offload"]) == (stage, offload))
    return f"{nbytes['device'] / 2**30:.1f}"


def test_the_page_on_memory_shows_what_the_planner_predicts():
    """Each line adds one change to the line above."""
    page = text_of(ROOT / "docs" / "guides" / "out-of-memory.md")
    shown = re.findall(r"^\| \S.*?\| ([\d.]+)&nbsp;GiB \| ([\d.]+)&nbsp;GiB \|", page, re.M)
    whole: dict[str, Any] = {"precision": "fp32", "batch": 8, "accumulate": 2}
    fewer = whole | {"batch": 4, "accumulate": 4}
    narrow = fewer | {"precision": "bf16"}
    again = narrow | {"recompute": True}
    steps = [peak(stage, "none", **whole) for stage in (0, 1, 2)]
    steps += [peak(2, "none", **choices) for choices in (fewer, narrow, again)]
    steps += [peak(3, offload, **again) for offload in ("none", "optimizer", "cpu", "disk")]
    assert shown == list(pairwise(steps))


def test_most_blocks_run():
    marked = [marks for path in RUN for _, marks, _ in blocks(path, "python")]
    assert sum("not run" in marks for marks in marked) <= len(marked) / 3
    assert len(marked) > 20


@again_but("docs/guides/choose-a-stage.md-0", "docs/guides/choose-a-stage.md-1")
@pytest.mark.parametrize(
    ("page", "number"), [("README.md", 0), ("docs/guides/choose-a-stage.md", 0),
                         ("docs/guides/choose-a-stage.md", 1)],
)  # fmt: skip
def test_a_page_shows_what_the_planner_prints(page, number, capsys):
    """The last command before a block of text prints the block."""
    pytest.importorskip("transformers")
    line, _, shown = list(blocks(ROOT / page, "text"))[number]
    above = "\n".join(text_of(ROOT / page).splitlines()[:line])
    typed = re.findall(r"^\$ (onefold plan .*)$", above, re.M)[-1]
    assert main(shlex.split(typed, comments=True)[1:]) == 0
    assert shown in capsys.readouterr().out


def test_the_readme_links_to_files_that_exist():
    text = text_of(ROOT / "README.md")
    linked = re.findall(r"\]\(([^)#]+)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    linked = [link for link in linked if not link.startswith("https://")]
    assert len(linked) > 15
    assert [link for link in linked if not (ROOT / link).exists()] == []


def test_generated_parts_are_what_their_scripts_write(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    tools = ("memory_figure.py", "scale_figure.py", "cli_page.py")
    ended = {tool: runpy.run_path(str(TOOLS / tool))["main"](["--check"]) for tool in tools}
    assert {tool: code for tool, code in ended.items() if code} == {}


# reading level

READING = runpy.run_path(str(TOOLS / "reading_level.py"))
WORDS = " ".join(["word"] * 31)


def test_a_long_sentence_is_found():
    for text in (
        f"{WORDS}.",
        f"Short. {WORDS}. Short.",
        f"- {WORDS}",
        f"| a | {WORDS} |",
        f"# {WORDS}",
        "word\n" * 31,
        " ".join(["`a b c`"] * 31),
        " ".join(["word"] * 16) + "; " + " ".join(["word"] * 16),
        f"[{WORDS}](page.md)",
    ):
        ((number, _),) = READING["long_sentences"](text)
        assert number >= 31, text


def test_short_sentences_pass():
    right = [
        " ".join(["word"] * 30) + ".",
        "Ten words are in this one, which is not long. " * 9,
        f"```text\n{WORDS}\n```",
        f"<!-- {WORDS} -->",
        "\n".join(["- an item of five words"] * 9),
        "| " + " | ".join(["five words of a cell"] * 9) + " |",
        "Take `" + WORDS + "` as one word.",
        "A heading of four\n\n" + " ".join(["word"] * 28),
        "These are the choices:\n\n- " + " ".join(["word"] * 28),
    ]
    assert [text for text in right if READING["long_sentences"](text)] == []


def test_pages_for_newcomers_have_no_long_sentence(capsys):
    assert READING["main"]([]) == 0, capsys.readouterr().out


# messages


def template(node: ast.expr) -> str:
    """The text of a message in the source, with … for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
        )
    if isinstance(node, ast.BinOp):
        return template(node.left) + template(node.right)
    return "…"


def is_text(node: ast.expr) -> bool:
    """True for a message or a part of one; a plain word is none."""
    return isinstance(node, ast.JoinedStr | ast.BinOp) or (" " in str(getattr(node, "value", "")))


def messages_of_the_source() -> list[str]:
    found = []
    for path in FILES:
        named: dict[str, str] = {}  # the latest text of each name, such as `wanted` and `got`
        nodes = [node for node in nodes_of(path) if hasattr(node, "lineno")]
        for node in sorted(nodes, key=lambda node: node.lineno):
            if isinstance(node, ast.Constant | ast.JoinedStr):
                found.append(template(node))
            elif isinstance(node, ast.Call) and node.args:
                # of `expected` and of functions that raise through it: what, then what came
                told = [named.get(ast.unparse(each), template(each)) for each in node.args[:2]]
                if is_text(node.args[0]) or ast.unparse(node.args[0]) == "wanted":
                    found.append("expected " + ", got ".join(told))
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                named[node.targets[0].id] = template(node.value)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                named[node.target.id] = named.get(node.target.id, "…") + template(node.value)
    return found


def messages_of_the_page() -> list[str]:
    page = text_of(ROOT / "docs" / "guides" / "troubleshooting.md")
    tables = page.split("| message | meaning | what to do |")[1:]
    rows = [line for table in tables for line in table.split("\n\n")[0].splitlines()[2:]]
    return [re.match(r"\| `(.*?)` \|", row)[1] for row in rows]


def test_the_messages_of_the_page_are_those_of_the_source():
    """A failure shows the nearest message that the source has now: put that on the page."""
    known, wrong = messages_of_the_source(), []
    for message in messages_of_the_page():
        parts = [re.escape(part.strip()) for part in message.split("…") if part.strip()]
        if not any(re.search(".*".join(parts), each, re.S) for each in known):
            near = difflib.get_close_matches(message, known, n=2, cutoff=0.2)
            wrong.append(f"no message reads {message!r}; near are {near}")
    assert wrong == []


# the package and the site


def test_pins_cover_the_tools_of_the_site():
    project = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]
    pinned = {line.partition("==")[0] for line in text_of(ROOT / "constraints.txt").split()}
    wanted = {re.match(r"[\w-]+", each)[0] for each in project["optional-dependencies"]["docs"]}
    assert wanted <= pinned


def test_the_tree_of_the_house_names_every_room():
    tree = text_of(ROOT / "docs" / "design.md").partition("```text\nsrc/onefold/")[2]
    tree = tree.partition("```")[0]
    rooms = {path.parent.name for path in (ROOT / "src" / "onefold").glob("*/__init__.py")}
    named = set(re.findall(r"(\w+)/(?= |$)", tree, re.M))
    assert rooms <= named, "rooms that the tree of docs/design.md does not have"
    assert named <= rooms, "rooms of docs/design.md that are gone"


def test_every_decision_is_named_where_it_was_taken():
    """A reader of the code finds the reasons: each ADR stands in the head of a file."""
    files = [*(ROOT / "src").rglob("*.py"), ROOT / "pyproject.toml"]
    named = {n for path in files for n in re.findall(r"\b0\d{3}\b", path.read_text())}
    decisions = {path.name[:4] for path in (ROOT / "docs" / "adr").glob("0*.md")}
    assert decisions - named == set()


def test_every_public_name_is_in_the_reference():
    pages = [path.read_text() for path in sorted((ROOT / "docs" / "reference").glob("*.md"))]
    named = re.findall(r"^::: onefold\.(\w+)$", "\n".join(pages), re.M)
    assert sorted(named) == sorted(onefold.__all__)
    shown = "\n".join(
        re.findall(r"^::: onefold\.(?:adapters\.)?hf\.(\w+)$", "\n".join(pages), re.M)
    )
    assert sorted(shown.split()) == sorted(hf.__all__)
    assert set(re.findall(r"#onefold\.(\w+)\)", pages[0])) <= set(onefold.__all__)


SITE = runpy.run_path(str(TOOLS / "check_site.py"))


def test_a_site_without_faults_passes_and_each_fault_is_found(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#there">b</a><h1 id="here"></h1>')
    (tmp_path / "b.html").write_text('<a href="a.html">a</a><h1 id="there"></h1>')
    assert SITE["problems"](tmp_path) == []
    (tmp_path / "b.html").write_text(
        '<a href="c.html">c</a><a href="a.html#gone">a</a><a href="https://example.com">e</a>'
        '<script src="https://example.com/x.js"></script>'
    )
    found = SITE["problems"](tmp_path)
    assert [line.partition(": ")[2].split()[:2] for line in found] == [
        ["no", "anchor"], ["loads", "https://example.com/x.js"], ["no", "file"], ["no", "anchor"],
    ]  # fmt: skip
