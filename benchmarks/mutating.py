"""Faults that benchmarks/mutants.py puts into a source file, and the counting of its statements.

A fault is named by its file, function, statement and kind, not by a line, so that it is found again
when lines move. Left out, as no test should see them: messages (`raise`, f-strings, functions that
return `str`, `__repr__`), `assert`, annotations, docstrings. So is module and class level: it runs
once, at import, for all tests alike.
"""

from __future__ import annotations

import ast
import copy
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

FLIPPED = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
WAITS = re.compile("wait|synchronize|barrier|join|consume|agree|settle|record_event|finish")
TALKS = re.compile("^(warn|warning|warn_once|debug|info|print|add_note|cast)$")
RANK = re.compile("(^|_)rank$")
SYMMETRIC = {"isinstance", "issubclass", "getattr", "hasattr", "setattr", "min", "max", "cast"}
OPPOSED = [
    ("intra", "inter"), ("send", "recv"), ("first", "last"), ("forward", "backward"),
    ("begin", "end"), ("start", "stop"), ("before", "after"), ("src", "dst"), ("local", "world"),
    ("min", "max"), ("sharded", "full"), ("gather", "reduce"), ("partial", "reduced"),
]  # fmt: skip
KINDS = (
    "compare", "boundary", "branch", "logic", "arithmetic", "constant", "swap", "rank", "phase",
    "drop", "wait",
)  # fmt: skip
HITS = "_HITS"


@dataclass(frozen=True)
class Mutant:
    """One fault: its name (file ... at), its text, and the line where it was drawn."""

    file: str
    function: str
    statement: str
    nth: int
    """Which of the function's statements of this text."""
    kind: str
    at: int
    """Which of the statement's faults of this kind."""
    after: str
    line: int

    @property
    def name(self) -> str:
        """What names the fault in any later source."""
        return "|".join(str(v) for k, v in asdict(self).items() if k not in ("after", "line"))


def mutants_of(
    file: str, source: str, members: dict[str, list[str]]
) -> Iterator[tuple[Mutant, str]]:
    """Each fault that fits into `source`, with the source that has it.

    `members` holds the members of each enum by its class's name.
    """
    tree = ast.parse(source)
    words = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    words |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for function, node in functions_of(tree):
        texts = Counter[str]()
        for statement in statements_of(node):
            text = _header(statement)
            nth, kinds = texts[text], Counter[str]()
            texts[text] += 1
            for kind, old, new in _faults(statement, members, words):
                at = kinds[kind]
                kinds[kind] += 1
                mutated = _replaced(source, old, new)
                after = _header(_with(statement, old, new))
                yield (
                    Mutant(file, function, text, nth, kind, at, after, statement.lineno),
                    mutated,
                )


def functions_of(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions with their qualified names, those of texts left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from functions_of(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef):
            is_text = isinstance(child.returns, ast.Name) and child.returns.id == "str"
            if not is_text and child.name not in ("__repr__", "__str__"):
                yield f"{prefix}{child.name}", child
            yield from functions_of(child, f"{prefix}{child.name}.")
        elif not isinstance(child, ast.expr):
            yield from functions_of(child, prefix)


def statements_of(function: ast.AST) -> Iterator[ast.stmt]:
    """Statements of a function in order, not those of functions and classes inside it."""
    for child in ast.iter_child_nodes(function):
        if isinstance(child, ast.stmt):
            if not isinstance(child, ast.FunctionDef | ast.ClassDef):
                yield child
                yield from statements_of(child)
        elif isinstance(child, ast.excepthandler | ast.match_case):
            yield from statements_of(child)


def _header(statement: ast.stmt) -> str:
    return ast.unparse(statement).split("\n")[0]


def _faults(
    statement: ast.stmt, members: dict[str, list[str]], words: set[str]
) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """Kind, node and what takes its place."""
    if isinstance(statement, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
        return
    if isinstance(statement, ast.Expr) and (
        not isinstance(statement.value, ast.Call) or TALKS.match(_called(statement.value))
    ):
        return
    if kind := _dropped(statement):
        yield kind, statement, ast.Pass()
    for node in _expressions(statement):
        test = getattr(node, "test", None)
        if test is not None and not isinstance(test, ast.Compare | ast.UnaryOp | ast.BoolOp):
            yield "branch", test, ast.UnaryOp(ast.Not(), test)
        if isinstance(node, ast.expr):
            for kind, new in _wrong(node, members, words):
                yield kind, node, new


def _dropped(statement: ast.stmt) -> str:
    """Kind of the fault that leaves the statement out; "" where no kind does."""
    if isinstance(statement, ast.Expr):
        return "wait" if WAITS.search(_called(statement.value)) else "drop"
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    if isinstance(statement, ast.Assign | ast.AugAssign):
        is_kept = isinstance(targets[0], ast.Attribute | ast.Subscript)
        return "drop" if is_kept or isinstance(statement, ast.AugAssign) else ""
    return "drop" if isinstance(statement, ast.Delete | ast.Break | ast.Continue) else ""


def _called(node: ast.AST) -> str:
    function = getattr(node, "func", None)
    return getattr(function, "attr", getattr(function, "id", ""))


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """The statement, and the expressions that are its own: no texts, no annotations."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop(0)
        yield node
        for name, value in ast.iter_fields(node):
            children = value if isinstance(value, list) else [value]
            for child in children:
                is_own = isinstance(
                    child, ast.expr | ast.withitem | ast.keyword | ast.comprehension
                )
                is_text = isinstance(child, ast.JoinedStr | ast.Lambda) or name == "annotation"
                if is_own and not is_text and not TALKS.match(_called(child)):
                    waiting.append(child)


def _wrong(
    node: ast.expr, members: dict[str, list[str]], words: set[str]
) -> Iterator[tuple[str, ast.expr]]:
    """Kinds of faults at an expression, and the expressions that have them."""
    if isinstance(node, ast.Compare):
        for kind, table in (("compare", FLIPPED), ("boundary", BOUNDARY)):
            if other := table.get(type(node.ops[0])):
                yield kind, ast.Compare(node.left, [other(), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "logic", ast.BoolOp(other, node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "branch", node.operand
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and _is_numeric(node):
        yield "arithmetic", ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        is_flag = isinstance(node.value, bool)
        yield "constant", ast.Constant(not node.value if is_flag else node.value + 1)
    elif isinstance(node, ast.Call) and _may_swap(node):
        first, second, *rest = node.args
        yield "swap", ast.Call(node.func, [second, first, *rest], node.keywords)
    elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield from _renamed(node, members, words)


def _may_swap(node: ast.Call) -> bool:
    pair = node.args[:2]
    is_plain = all(isinstance(each, ast.Name | ast.Attribute) for each in pair)
    is_ordered = _called(node) not in SYMMETRIC and len({ast.dump(each) for each in pair}) == 2
    return is_plain and is_ordered


def _is_numeric(node: ast.BinOp) -> bool:
    lists = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)
    sides = (node.left, node.right)
    return not any(isinstance(s, lists) or isinstance(getattr(s, "value", 0), str) for s in sides)


def _renamed(
    node: ast.Name | ast.Attribute, members: dict[str, list[str]], words: set[str]
) -> Iterator[tuple[str, ast.expr]]:
    word = node.attr if isinstance(node, ast.Attribute) else node.id
    if RANK.search(word):  # ranks of a pair change places
        yield "rank", ast.BinOp(node, ast.BitXor(), ast.Constant(1))
    others = []
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        siblings = members.get(node.value.id, [])
        if word in siblings:
            others = [siblings[(siblings.index(word) + 1) % len(siblings)]]
    for pair in OPPOSED:
        for one, other in (pair, pair[::-1]):
            changed = re.sub(f"(?<![a-z]){one}(?![a-z])", other, word)
            if changed != word and changed in words:
                others.append(changed)
    for other in others[:1]:
        new = copy.copy(node)
        setattr(new, "attr" if isinstance(node, ast.Attribute) else "id", other)
        yield "phase", new


def _with(statement: ast.stmt, old: ast.AST, new: ast.AST) -> ast.stmt:
    """The statement with `new` in place of `old`."""
    if statement is old:
        return new  # type: ignore[return-value]

    def changed(value: Any) -> Any:
        if value is old:
            return new
        if isinstance(value, list):
            return [changed(each) for each in value]
        if isinstance(value, ast.expr | ast.withitem | ast.keyword | ast.comprehension):
            return type(value)(**{k: changed(v) for k, v in ast.iter_fields(value)})
        return value

    fields = {name: changed(value) for name, value in ast.iter_fields(statement)}
    return type(statement)(**fields, lineno=statement.lineno)


def _replaced(source: str, old: ast.AST, new: ast.AST) -> str:
    """The source with the text of `new` in place of `old`; every other line stays where it was."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    begin = starts[old.lineno - 1] + old.col_offset  # type: ignore[attr-defined]
    end = starts[old.end_lineno - 1] + old.end_col_offset  # type: ignore[attr-defined]
    text = ast.unparse(new)
    if isinstance(new, ast.expr):
        text = f"({text})"
    text += "\\\n" * (old.end_lineno - old.lineno)  # type: ignore[attr-defined]
    whole = source.encode()
    return (whole[:begin] + text.encode() + whole[end:]).decode()


def counted(source: str, first: int) -> tuple[str, list[int]]:
    """The source with a mark before each statement of a function, and the statements' lines.

    Mark number `first + i` is set when the statement of the i-th line begins. A mark is one byte
    of memory that all processes of a test share: threads, autograd's too, and forks are seen.
    """
    tree, lines = ast.parse(source), list[int]()

    def mark(node: ast.AST, is_inside: bool) -> None:
        is_inside = is_inside or isinstance(node, ast.FunctionDef)
        for child in ast.iter_child_nodes(node):
            mark(child, is_inside and not isinstance(child, ast.ClassDef))
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if is_inside and isinstance(body, list):
                setattr(node, name, [each for old in body for each in marked(old)])

    def marked(statement: ast.stmt) -> list[ast.stmt]:
        lines.append(statement.lineno)
        text = f"{HITS}[{first + len(lines) - 1}] = 1"
        return [*ast.parse(text).body, statement]

    mark(tree, False)
    is_text = isinstance(tree.body[0], ast.Expr)
    future = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    at = max(int(is_text), *(tree.body.index(n) + 1 for n in future), 0)
    tree.body[at:at] = ast.parse(f"from onefold._hits import HITS as {HITS}").body
    return ast.unparse(ast.fix_missing_locations(tree)), lines


def enum_members(sources: list[str]) -> dict[str, list[str]]:
    """Members of each enum by its class's name."""
    found = {}
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(b) for b in node.bases):
                assigned = [n.targets[0] for n in node.body if isinstance(n, ast.Assign)]
                found[node.name] = [t.id for t in assigned if isinstance(t, ast.Name)]
    return found
