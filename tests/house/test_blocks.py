"""Every command and block of pages and examples fits the parser and the API, run or not.

`test_docs.py` runs blocks. This reads those that cannot run, too: names exist, keyword arguments
are taken, flags, targets and files that a command names are there.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import onefold
from onefold.app.cli.main import _parser
from tests.support.sources import PAGES, ROOT, text_of

EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
FENCE = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```", re.S | re.M)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
BARE = {name: getattr(onefold, name) for name in ("Offload", "Wire", "Precision", "shard")}
UNKNOWN = object()


def blocks(path: Path, *languages: str) -> Iterator[str]:
    for indent, language, text in FENCE.findall(text_of(path)):
        if language in languages:
            yield re.sub(f"^{indent}", "", text, flags=re.M)


class Reader(ast.NodeVisitor):
    """Follows names that Onefold and torch give; everything else is unknown and passes."""

    def __init__(self, names: dict[str, Any] | None = None) -> None:
        self.names = {"onefold": onefold, **(names or {})}
        self.wrong: list[str] = []

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if is_read(alias.name):
                module = self.imported(alias.name)
                root = alias.name.split(".")[0]
                self.names[alias.asname or root] = module if alias.asname else self.imported(root)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module and is_read(node.module):
            module = self.imported(node.module)
            for alias in node.names:
                self.names[alias.asname or alias.name] = self.member(module, alias.name)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            for name in ast.walk(target):
                if isinstance(name, ast.Name):
                    self.names[name.id] = UNKNOWN
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            self.names[node.targets[0].id] = self.value(node.value)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            if isinstance(item.optional_vars, ast.Name):
                self.names[item.optional_vars.id] = UNKNOWN
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.value(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        function = self.value(node.func)
        if isinstance(function, Instance) or not callable(function):
            return
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):  # of a built-in
            return
        if any(kind.kind is kind.VAR_KEYWORD for kind in parameters.values()):
            return
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in parameters:
                self.wrong.append(f"{ast.unparse(node.func)} takes no {keyword.arg}=")

    def imported(self, name: str) -> Any:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and is_read(error.name):
                self.wrong.append(f"no module {name}")
            return UNKNOWN  # an extra that is not installed

    def member(self, owner: Any, name: str) -> Any:
        if owner is UNKNOWN:
            return UNKNOWN
        if isinstance(owner, Instance):
            return owner.member(name, self.wrong)
        try:
            return getattr(owner, name)
        except ImportError:
            return UNKNOWN
        except AttributeError:
            try:
                return importlib.import_module(f"{owner.__name__}.{name}")
            except (ImportError, AttributeError):
                self.wrong.append(f"{getattr(owner, '__name__', owner)} has no {name}")
                return UNKNOWN

    def value(self, node: ast.expr) -> Any:
        """What an expression is, as far as it can be known without running it."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, UNKNOWN)
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value)
            return self.member(owner, node.attr) if is_ours(owner) else UNKNOWN
        if isinstance(node, ast.Call):
            return Instance.of(self.value(node.func))
        return UNKNOWN


class Instance:
    """What a class of Onefold, or a function that returns one, gives."""

    def __init__(self, of: type) -> None:
        self.kind = of

    @staticmethod
    def of(function: Any) -> Any:
        if inspect.isfunction(function) and function.__module__.startswith("onefold"):
            said = function.__annotations__.get("return", "")
            function = function.__globals__.get(said, UNKNOWN) if isinstance(said, str) else said
        is_class = isinstance(function, type) and function.__module__.startswith("onefold")
        return Instance(function) if is_class else UNKNOWN

    def member(self, name: str, wrong: list[str]) -> Any:
        known = any(name in vars(base) or name in vars(base).get("__annotations__", {})
                    for base in self.kind.__mro__)  # fmt: skip
        if not known and f"self.{name}" not in inspect.getsource(self.kind):
            wrong.append(f"{self.kind.__name__} has no {name}")
        return UNKNOWN


def is_read(module: str) -> bool:
    return module.split(".")[0] in ("onefold", "torch")


def is_ours(owner: Any) -> bool:
    if isinstance(owner, Instance):
        return True
    name = owner.__name__ if inspect.ismodule(owner) else getattr(owner, "__module__", None) or ""
    return owner is not UNKNOWN and isinstance(name, str) and is_read(name)


def faults(code: str, names: dict[str, Any] | None = None) -> list[str]:
    reader = Reader(names)
    reader.visit(ast.parse(code))
    return list(dict.fromkeys(reader.wrong))


def test_a_name_or_argument_that_does_not_exist_is_found():
    wrong = {
        "onefold.shart(model)": "onefold has no shart",
        "onefold.shard(model, stages=3)": "onefold.shard takes no stages=",
        "from onefold import Offlod": "onefold has no Offlod",
        "import onefold.nowhere": "no module onefold.nowhere",
        "onefold.Offload(activation='cpu')": "onefold.Offload takes no activation=",
        "s = onefold.mixed.RowSampler(d, rows=8)\ns.set_epochs(1)": "RowSampler has no set_epochs",
        "s = onefold.ema(m)\ns.apply()": "MovingAverage has no apply",
        "torch.nn.Lineal(1, 2)": "torch.nn has no Lineal",
    }
    found = {code: faults(code, {"torch": torch}) for code in wrong}
    assert found == {code: [fault] for code, fault in wrong.items()}


def sources() -> list[tuple[Path, str]]:
    found = [(path, "\n".join(blocks(path, "python"))) for path in PAGES]
    found += [(path, text_of(path)) for path in EXAMPLES]
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        cells = json.loads(text_of(path))["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        found.append((path, "\n".join(code)))
    return found


def test_every_block_of_a_page_and_every_example_fits_the_api():
    found = {str(path.relative_to(ROOT)): faults(code) for path, code in sources()}
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


def test_code_in_sentences_fits_the_api():
    wrong, seen = [], 0
    for path in PAGES:
        for code in INLINE.findall(FENCE.sub("", text_of(path))):
            if re.match(r"onefold\.(?!\w+\.py)|(with|[*]+)?\s*(Offload|Wire|Precision)\(", code):
                code = code.replace("…", "...").removeprefix("with ").removesuffix(":")
                try:
                    found = faults(code, BARE)
                except SyntaxError:  # a name with a placeholder
                    continue
                seen += 1
                wrong += [f"{path.relative_to(ROOT)}: `{code}`: {fault}" for fault in found]
    assert seen > 150
    assert wrong == []


# commands


def parsers() -> dict[str, argparse.ArgumentParser]:
    (group,) = _parser()._subparsers._group_actions
    return dict(group.choices)


def typed(path: Path) -> Iterator[str]:
    """What a reader types: lines of console and shell blocks, joined where they go on."""
    for text in blocks(path, "console", "bash", "shell", "sh"):
        lines = text.replace("\\\n", " ").splitlines()
        yield from (line.strip().removeprefix("$ ") for line in lines if line.strip())


def command_fault(line: str) -> str | None:
    """Why a command cannot be right, or None."""
    words = shlex.split(line, comments=True)
    if "-m" in words and "onefold" in words:
        words = words[words.index("onefold") :]
    if words[:1] == ["onefold"]:
        try:
            _parser().parse_args(words[1:])
        except SystemExit as ended:
            return None if ended.code == 0 else "the parser refuses it"
        except onefold.OnefoldError as error:
            return str(error)
    if words[:1] == ["make"]:
        targets = re.findall(r"^(\w[\w-]*):", text_of(ROOT / "Makefile"), re.M)
        return (
            None if {word for word in words[1:] if "=" not in word} <= {*targets} else "no target"
        )
    scripts = [word for word in words if re.match(r"(examples|benchmarks|tests|docs)/", word)]
    missing = [word for word in scripts if not (ROOT / word.split("::")[0]).exists()]
    return f"no file {missing[0]}" if missing else extra_fault(line)


def extra_fault(line: str) -> str | None:
    """Why a `pip install` cannot work: no index has the package, or there is no such extra."""
    extras = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]
    if not re.match(r"pip install ", line):
        return None
    if re.search(r"[ \"']onefold\b", line):
        return "no index has the package yet"
    named = [name for group in re.findall(r"\.\[([\w,]+)\]", line) for name in group.split(",")]
    return next((f"no extra {name}" for name in named if name not in extras), None)


def test_a_command_that_cannot_work_is_found():
    wrong = [
        "onefold trian", "onefold train --stages 3", "torchrun -m onefold train --nope",
        "onefold train --config none.toml",
        "make trian", "python examples/none.py",
        'pip install "onefold[hf]"', "pip install '.[huf]'",
    ]  # fmt: skip
    assert [line for line in wrong if not command_fault(line)] == []


def test_every_command_of_a_page_can_work(tmp_path, monkeypatch):
    """`--config run.toml` reads the block of TOML that the page shows."""
    monkeypatch.chdir(tmp_path)
    seen, files, faulty = 0, 0, []
    for path in PAGES:
        Path("run.toml").unlink(missing_ok=True)
        for text in blocks(path, "toml"):
            Path("run.toml").write_text(text)
            files += 1
        for line in typed(path):
            seen += 1
            fault = command_fault(line)
            faulty += [f"{path.relative_to(ROOT)}: {line}: {fault}"] if fault else []
    assert seen > 50
    assert files >= 2
    assert faulty == []


def in_sentences() -> Iterator[tuple[Path, str]]:
    for path in [*(page for page in PAGES if page.parent.name != "adr"), *EXAMPLES]:
        text = text_of(path)
        prose = FENCE.sub("", text) if path.suffix == ".md" else text
        for code in INLINE.findall(prose):
            if re.match(r"(onefold [a-z]+( |$)|make [a-z]|pip install )", code):
                yield path, code


def test_commands_in_sentences_name_what_exists():
    known = parsers()
    wrong, seen = [], 0
    for path, code in in_sentences():
        seen += 1
        name, *words = code.split()
        if name != "onefold":
            fault = command_fault(code)
        elif words[0] not in known:
            fault = "no such command"
        else:
            flags = {flag for action in known[words[0]]._actions for flag in action.option_strings}
            used = {word.split("=")[0] for word in words if word.startswith("--")}
            fault = f"no flags {used - flags}" if used - flags else None
        wrong += [f"{path.relative_to(ROOT)}: {code}: {fault}"] if fault else []
    assert seen > 60
    assert wrong == []
