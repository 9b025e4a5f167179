"""What keeps the house habitable: short files, one door, one place for collectives."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

import onefold
from tests.support.sources import FILES, nodes_of, text_of
from tests.support.sources import PACKAGE as SOURCE

MAX_FILE_LINES = 420
MAX_FUNCTION_LINES = 60
ENGINE_ROOMS = ("engine", "unit", "wire", "tier", "layout", "native")
COLLECTIVES = {
    "all_gather", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "gather", "reduce", "reduce_scatter",
    "reduce_scatter_single", "scatter", "send", "recv", "isend", "irecv",
}  # fmt: skip


def at(path: Path, node: ast.AST | None = None) -> str:
    """Where a rule is broken."""
    return str(path.relative_to(SOURCE)) + (f":{getattr(node, 'lineno', 1)}" if node else "")


def length(function: ast.FunctionDef) -> int:
    """Lines of a function's body, without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_files_and_functions_stay_short():
    files = [
        f"{at(path)} has {lines} lines"
        for path in FILES
        if (lines := len(text_of(path).splitlines())) > MAX_FILE_LINES
    ]
    functions = [
        f"{at(path, node)} {node.name} has {length(node)} lines"
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef) and length(node) > MAX_FUNCTION_LINES
    ]
    assert len(FILES) > 100
    assert files + functions == []


def test_every_module_says_what_it_is_for():
    silent = [
        at(path)
        for path in FILES
        if path.name != "__main__.py" and not ast.get_docstring(nodes_of(path)[0])
    ]
    assert silent == []


DEVICE_NAMES = {"cuda", "accelerator", "Stream", "Event", "get_device_module", "cudart"}
"""Attributes of torch that name devices, streams and events."""


def names_a_device(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        parts = {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        return (node.module or "").startswith("torch") and bool(parts & DEVICE_NAMES)
    if isinstance(node, ast.Import):
        return any(
            set(alias.name.split(".")[1:]) & DEVICE_NAMES and alias.name.startswith("torch.")
            for alias in node.names
        )
    is_of_torch = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return is_of_torch and node.value.id == "torch" and node.attr in DEVICE_NAMES


def test_streams_and_devices_are_named_in_one_file():
    """What a simulated accelerator has to replace, and where every wait of a stream begins."""
    naming = {at(path) for path in FILES for node in nodes_of(path) if names_a_device(node)}
    assert naming == {"tier/accelerator.py"}


CLOCKS = {
    "fit/rates.py": "the rates of a machine",
    "mixed/speeds.py": "the steps of a run", "recording/meter.py": "the steps of a run",
    "recording/recorder.py": "one step", "app/train/loop.py": "a run",
    "app/generate/run.py": "a run",
}  # fmt: skip
"""Files that time work, and what they time."""


def test_rates_of_a_machine_are_measured_in_one_file():
    found = {at(path) for path in FILES if re.search(r"\b(perf_counter|timeit)\b", text_of(path))}
    assert found == CLOCKS.keys()


RANK_FILES = {"devices", "interfaces", "launcher", "ranks", "world"}
"""Files of wire/ that find or start the ranks: they read the environment."""


@cache
def room_of(path: Path) -> str:
    return "ranks" if path.stem in RANK_FILES else path.relative_to(SOURCE).parts[0]


def breaks_a_rule(node: ast.AST, room: str) -> bool:
    if isinstance(node, ast.ImportFrom):
        return any(alias.name == "*" for alias in node.names)
    if isinstance(node, ast.Name):
        return node.id == "hasattr"
    if isinstance(node, ast.Attribute):
        return node.attr == "environ" and room in ENGINE_ROOMS
    return isinstance(node, ast.Global)


def test_the_house_rules_hold():
    """No hasattr, no global, no star import, no environment variable in the engine's rooms."""
    broken = [
        at(path, node)
        for path in FILES
        for node in nodes_of(path)
        if breaks_a_rule(node, room_of(path))
    ]
    assert broken == []


def is_collective(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("dist", "distributed")
        and node.attr in COLLECTIVES
    )


def test_only_one_file_of_the_library_calls_collectives():
    calls = [
        at(path, node)
        for path in FILES
        if path.name != "collectives.py" and room_of(path) not in ("app", "ranks")
        for node in nodes_of(path)
        if is_collective(node)
    ]
    assert calls == []


def test_each_rule_sees_what_breaks_it():
    for line in ("from torch import *", "hasattr(a, 'b')", "os.environ", "def f():\n global a"):
        assert any(breaks_a_rule(node, "engine") for node in ast.walk(ast.parse(line))), line
    assert any(map(is_collective, ast.walk(ast.parse("dist.all_reduce(x)"))))
    (function,) = ast.parse('def f():\n "says"\n a\n\n b').body
    assert length(function) == 3


def test_the_public_names_exist_and_are_all_there_is():
    for public in onefold.__all__:
        assert getattr(onefold, public) is not None
    assert sorted(onefold.__all__) == onefold.__all__
    with pytest.raises(AttributeError, match="no attribute 'shrad'"):
        onefold.shrad  # noqa: B018


def test_type_checkers_and_users_find_the_same_public_names():
    nodes = nodes_of(SOURCE / "__init__.py")
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    typed = {n.asname: node.module for node in imports for n in node.names if n.asname}
    assert typed == onefold._MODULES


def test_importing_onefold_imports_nothing_heavy():
    """`import onefold` starts nothing and loads not even torch; the names do, when used."""
    code = "import sys, onefold; print('torch' in sys.modules, 'rich' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]


def test_sharding_at_a_stage_by_number_imports_no_planner_and_no_adapter():
    """Nor does a step; a report asks the planner what it predicts."""
    code = (
        "import sys, torch, onefold; module = torch.nn.Linear(4, 4);"
        "optimizer = torch.optim.AdamW(module.parameters()); onefold.shard(module, optimizer);"
        "module(torch.ones(1, 4)).sum().backward(); optimizer.step();"
        "print(*(f'onefold.{room}' in sys.modules for room in ('planner', 'adapters')));"
        "print(onefold.report(module).predicted['weight'] > 0)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False", "True"]


TWO_RANKS = """
import os, sys, torch, torch.distributed as dist, onefold
folder = sys.argv[1]
child = os.fork()
store = f"file://{folder}/store"
dist.init_process_group("gloo", init_method=store, rank=int(child == 0), world_size=2)
module = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(module.parameters())
onefold.shard(module, optimizer, stage=3)
module(torch.ones(1, 4)).sum().backward()
optimizer.step()
onefold.save(f"{folder}/run", module, optimizer)
onefold.load(f"{folder}/run", module, optimizer)
found = [name for name in sys.modules if name.startswith("torch.distributed.checkpoint")]
if child:
    os.waitpid(child, 0)
    print(len(found))
"""


def test_a_run_its_save_and_its_load_do_not_import_torchs_checkpoints(tmp_path):
    """They are 160 modules, in the memory of each rank. `export --to dcp` uses them."""
    command = [sys.executable, "-c", TWO_RANKS, str(tmp_path)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert out.stdout.split() == ["0"]


OTHERS_ATTRIBUTES = {"grad", "data", "requires_grad", "grad_dtype", "restype", "argtypes", "atexit"}
"""Attributes of tensors, C functions and finalizers, which have no other way to be set."""

OTHERS_OBJECTS = {
    "torch: optimizers, and a tied weight": {
        "optimizer.state", "optimizer.param_groups", "self.head.weight",
    },
    "Python: what a thread has for itself, a hook, an error, an array of ctypes": {
        "state.depth", "self._streams.stream", "self._scratch.tensor", "sys.unraisablehook",
        "error.errno", "view.owner",
    },
    "a model's own switches": {
        "model.recomputes", "config.use_cache", "module.generation_config",
        "model.generation_config.eos_token_id",
    },
    "Transformers and Accelerate": {
        "control.should_save", "outputs.pooler_output", "accelerator.scaler",
        "accelerator.get_state_dict", "accelerator.prepare_optimizer",
        "accelerator.register_save_state_pre_hook",
        "accelerator.register_load_state_pre_hook",
    },
}  # fmt: skip
"""Objects of others that expect to be assigned to. Ours have verbs instead."""


def own_attributes(nodes: Sequence[ast.AST]) -> set[str]:
    """Names of the attributes that classes of a file give their own objects."""
    names = set[str]()
    for found in (node for node in nodes if isinstance(node, ast.ClassDef)):
        names |= {
            node.attr
            for node in ast.walk(found)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if isinstance(node.value, ast.Name) and node.value.id == "self"
        }
        fields = (node.target for node in found.body if isinstance(node, ast.AnnAssign))
        names |= {field.id for field in fields if isinstance(field, ast.Name)}
    return names


def makes_an_object(value: ast.expr) -> bool:
    """True for `Kind(...)`, `Kind[int](...)`, `Kind.from_rows(...)` and copies."""
    called = value.func if isinstance(value, ast.Call) else None
    if isinstance(called, ast.Subscript):
        called = called.value
    word = getattr(called, "attr", getattr(called, "id", ""))
    kind = getattr(getattr(called, "value", None), "id", "")
    return word[:1].isupper() or kind[:1].isupper() or word in ("copy", "deepcopy")


def assigned_from_outside(nodes: Sequence[ast.AST]) -> list[str]:
    """Targets `obj.public`, where obj is neither self nor cls nor made in the same function.

    Attributes of classes of the same file do not count, nor `ctx` of autograd functions.
    """
    others = set[str]().union(*OTHERS_OBJECTS.values())
    allowed = OTHERS_ATTRIBUTES | own_attributes(nodes)
    found: dict[tuple[int, int], str] = {}
    for function in (node for node in nodes if isinstance(node, ast.FunctionDef)):
        assigns = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
        known = {"self", "cls", "ctx"} | {
            target.id
            for node in assigns if makes_an_object(node.value)
            for target in node.targets if isinstance(target, ast.Name)
        }  # fmt: skip
        for node in ast.walk(function):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
                continue
            is_known = isinstance(node.value, ast.Name) and node.value.id in known
            is_allowed = node.attr in allowed or node.attr.startswith("_")
            if not (is_known or is_allowed or ast.unparse(node) in others):
                found[node.lineno, node.col_offset] = ast.unparse(node)
    return [f"{line}: {target}" for (line, _), target in sorted(found.items())]


def test_nobody_assigns_to_a_public_attribute_of_an_object_of_another_file():
    found = {at(path): assigned_from_outside(nodes_of(path)) for path in FILES}
    wrong = {path: targets for path, targets in found.items() if targets}
    assert not wrong, "hint: pass a value, return one, or give the object a verb"


def test_the_law_of_assignments_finds_them():
    def found(text):
        return assigned_from_outside(list(ast.walk(ast.parse(text))))

    outside = "def drive(engine):\n    {}\n"
    for line in ("engine.resting = 1", "engine.schedule.kept |= 1", "engine.a, engine.b = 1, 2",
                 "for engine.a in x: pass", "with x as engine.a: pass"):  # fmt: skip
        assert found(outside.format(line)), line
    for line in ("x = Drive(); x.keeps = 1", "engine.grad = None", "engine._mine = 1"):
        assert not found(outside.format(line)), line
    inside = "class Engine:\n    def __init__(self):\n        self.resting = 0\n"
    assert not found(inside + outside.format("engine.resting = 1"))
