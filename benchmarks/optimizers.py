"""Which optimizer runs how: every class of torch, pytorch_optimizer and their like, in small.

    pip install --target DIR --no-deps pytorch_optimizer lion-pytorch schedulefree torchao \
        prodigyopt dadaptation
    PYTHONPATH=DIR python benchmarks/optimizers.py [--only NAME ...] [--resumes]

Each class trains a small model in plain torch, and the same with Onefold at stages 0 to 3 in one
process and on two ranks (threads), and with `offload="cpu"`. All ranks read the same batch, so that
gradients are bitwise those of plain torch. A run is "right" if every weight went as far as in plain
torch, to 1e-3 of the largest change of its parameter: Newton-Schulz and fused kernels round
otherwise. Each draw of random numbers in a step begins from the same seed, so classes that draw
can be compared. "Saves and resumes": two ranks train half of the steps and save, at stage 3 if
that is right, else at stage 0; three ranks load into a module of other values and train the rest.
The weights are compared with those of plain torch without a pause. With `--resumes` only this is
run, for classes that lack it or that are named, and added to the newest results; `--only` measures
the named classes again. Classes coupled by sums keep their sums in fp64 (torch's default dtype):
rounded to fp32, they depend on the order of the parameters, and the table of results says how much.
A class that wraps an optimizer is built after `shard`.

The result is a file in `results`, and the table in docs/reference/optimizers.md.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from contest.results import RESULTS, provenance, write_block
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import onefold
from onefold.engine.behaviour import Behaviour, behaviour_of
from onefold.engine.step_checks import wrapped_by
from onefold.errors import OnefoldError

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))
from tests.support.ranks import run_ranks, seeded  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "optimizers.md"
PACKAGES = (
    "torch.optim", "pytorch_optimizer", "lion_pytorch", "schedulefree", "prodigyopt",
    "dadaptation", "torchao.optim",
)  # fmt: skip
STEPS = 8
TOLERANCE = 1e-3
RUNS = {
    **{f"stage {stage}": (2, {"stage": stage}) for stage in range(4)},
    "one process": (1, {"stage": 3}),
    "offload": (2, {"stage": 3, "offload": "cpu"}),
}
NEEDS: dict[str, dict[str, Any]] = {
    "AliG": {"max_lr": 0.1}, "SGD": {"momentum": 0.9}, "Ranger21": {"num_iterations": 100},
    "BSAM": {"num_data": 100, "foreach": False},
}  # fmt: skip
"""Arguments without which a class cannot be built, or has no state."""

Make = Callable[[nn.Module], torch.optim.Optimizer]
Way = tuple[str, bool, Make]


DRAWS = {
    "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "normal",
    "bernoulli", "multinomial", "dropout", "normal_", "uniform_", "bernoulli_", "random_",
    "exponential_",
}  # fmt: skip
DRAWING = threading.Lock()  # ranks share the generator


class SameDraws(TorchFunctionMode):
    """Lets every draw of this thread begin from one seed: it depends on the shape alone."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") not in DRAWS:
            return func(*args, **(kwargs or {}))
        with DRAWING:
            torch.default_generator.manual_seed(0)
            return func(*args, **(kwargs or {}))


class Mixed(nn.Module):
    """Matrices, one of 4096 elements, and vectors."""

    def __init__(self, *, has_vectors: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64, bias=has_vectors)
        self.norm = nn.LayerNorm(64, elementwise_affine=has_vectors)
        self.last = nn.Linear(64, 9, bias=has_vectors)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())


def classes() -> Iterator[tuple[str, Any]]:
    """Every optimizer of the packages that are installed, by its full name."""
    for package in PACKAGES:
        try:
            module = importlib.import_module(package)
        except ImportError as error:
            print(f"{package}: {error}", file=sys.stderr)
            continue
        for name, kind in sorted(vars(module).items()):
            is_class = inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
            if is_class and kind is not torch.optim.Optimizer and not inspect.isabstract(kind):
                yield f"{package}.{name}", kind


def ways(kind: type[torch.optim.Optimizer]) -> Iterator[Way]:
    """Ways to train with a class, the common one first: a word, whether with vectors, how built."""
    options = NEEDS.get(kind.__name__, {})

    def flagged(module: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in module.parameters() if p.dim() == 2]
        others = [p for p in module.parameters() if p.dim() != 2]
        groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
        return kind(groups, **options)

    def plain(module: nn.Module) -> torch.optim.Optimizer:
        return kind(module.parameters(), **options)

    def of_module(module: nn.Module) -> torch.optim.Optimizer:
        return kind(module, **options)  # type: ignore[arg-type]

    def around(module: nn.Module) -> torch.optim.Optimizer:
        return kind(torch.optim.AdamW(module.parameters()), **options)  # type: ignore[arg-type]

    def with_base(module: nn.Module) -> torch.optim.Optimizer:
        return kind(module.parameters(), torch.optim.SGD, lr=0.1)  # type: ignore[call-arg]

    def of_model_and_base(module: nn.Module) -> torch.optim.Optimizer:
        return kind(module, module.parameters(), torch.optim.SGD, lr=0.1)  # type: ignore[arg-type, call-arg]

    def of_base_and_model(module: nn.Module) -> torch.optim.Optimizer:
        inner = torch.optim.SGD(module.parameters(), lr=0.1)
        return kind(module.parameters(), inner, module, Constant())  # type: ignore[call-arg, arg-type]

    yield "", True, plain
    yield "groups", True, flagged
    yield "matrices", False, plain
    yield "closure", True, plain
    yield "graph", True, plain
    yield "float", True, plain
    yield "around", True, around
    yield "base", True, with_base
    yield "module", True, of_module
    yield "fused", True, of_module
    yield "base", True, of_model_and_base
    yield "pair", True, of_base_and_model


class Constant:
    """A schedule of the radius in which GSAM looks."""

    def step(self) -> float:
        return 0.05


class Reversed(nn.Module):
    """A module whose parameters come in the reverse order."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(list(self.module.parameters(recurse))[::-1])


@dataclass(frozen=True)
class Part:
    """The steps of a run that is saved, or loaded: where its checkpoint lies, and how many."""

    saves: Path | None = None
    loads: Path | None = None
    steps: int = STEPS


WHOLE = Part()


def train(
    way: Way, choices: dict[str, Any] | None, *, is_reversed: bool = False, part: Part = WHOLE
) -> list[Tensor]:
    """Return each weight and its change after some steps, and in evaluation where that differs."""
    word, has_vectors, make = way
    dtype = torch.float32 if word == "float" else torch.float64

    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        module = Mixed(has_vectors=has_vectors).to(dtype)
        return module, make(Reversed(module) if is_reversed else module)

    module, optimizer = seeded(built)  # together: some optimizers draw when they are built
    start = [p.detach().clone() for p in module.parameters()]
    if part.loads:
        module, optimizer = seeded(built, seed=1)
    act = {name: getattr(optimizer, name, None) for name in ("train", "eval")}
    if choices is not None:
        is_around = wrapped_by(optimizer) is not None
        onefold.shard(module, None if is_around else optimizer, **choices)
        optimizer = make(module) if is_around else optimizer  # it may gather: no lock
        act = {name: getattr(optimizer, name, None) for name in act}
    if part.loads:
        onefold.load(part.loads, module, optimizer)
    if callable(act["train"]):
        act["train"]()
    run_steps(word, module, optimizer, part.steps)
    if part.saves:
        onefold.save(part.saves, module, optimizer)
    moved = [now - before for now, before in zip(values(module, choices), start, strict=True)]
    if callable(act["eval"]):
        act["eval"]()
        moved += [n - b for n, b in zip(values(module, choices), start, strict=True)]
    return moved


def run_steps(word: str, module: nn.Module, optimizer: Any, count: int) -> None:
    """Train on one batch, as the `word` of a way says."""
    dtype = next(module.parameters()).dtype
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).to(dtype)

    @torch.enable_grad()
    def closure() -> Any:
        optimizer.zero_grad()
        loss = module(x).square().mean() * 3
        if word == "fused":  # backward steps
            optimizer.fused_backward(loss, lr=0.1)  # type: ignore[attr-defined]
        else:
            loss.backward(create_graph=word == "graph")
        return (None, loss.detach()) if word == "pair" else loss.detach()

    closures: list[Any] = [closure] if word in ("closure", "base", "pair") else []
    for _ in range(count):
        if word not in ("closure", "pair"):
            closure()
        if word == "fused":
            continue
        with SameDraws():
            optimizer.step(*closures)


def stepper(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that steps the parameters: the one inside, if there is one."""
    inner = wrapped_by(optimizer)
    return stepper(getattr(optimizer, inner)) if inner else optimizer


def values(module: nn.Module, choices: dict[str, Any] | None) -> list[Tensor]:
    if choices is None:
        return [p.detach().clone() for p in module.parameters()]
    with onefold.unsharded(module):
        return [p.detach().clone() for p in module.parameters()]


def compare(way: Way, name: str, wanted: list[Tensor], *, sends: bool) -> str:
    """Return "right", or what a run came to instead; a class that `sends` needs a process group."""
    world, choices = RUNS[name]

    def run() -> list[list[Tensor]]:
        alone = world == 1 and not sends
        return [train(way, choices)] if alone else run_ranks(world, lambda _: train(way, choices))

    return verdict(run, wanted)


def resumes(way: Way, runs: dict[str, str], wanted: list[Tensor]) -> str:
    """Return "right" if a run goes on from its checkpoint, or what it came to instead."""
    stage = next((s for s in (3, 0) if runs[f"stage {s}"] == "right"), None)
    if stage is None:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        saved, choices = Path(folder) / "saved", {"stage": stage}
        before, after = Part(saves=saved, steps=STEPS // 2), Part(loads=saved, steps=STEPS // 2)

        def run() -> list[list[Tensor]]:
            run_ranks(2, lambda _: train(way, choices, part=before))
            return run_ranks(3, lambda _: train(way, choices, part=after))

        return verdict(run, wanted)


def verdict(run: Callable[[], list[list[Tensor]]], wanted: list[Tensor]) -> str:
    """Return "right" if the ranks of a run come to `wanted`, or what they came to instead."""
    try:
        ranks = run()
    except OnefoldError as error:
        return f"refused: {error}"
    except Exception as error:  # the table says which
        return f"error: {type(error).__name__}: {error}"
    worst = max(distance(moved, wanted) for moved in ranks)
    return "right" if worst < TOLERANCE else f"wrong: {worst:.2g}"


def distance(moved: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference, relative to the largest change of its parameter."""
    return max(
        ((a - b).abs().max() / b.abs().max().clamp_min(1e-12)).item()
        for a, b in zip(moved, wanted, strict=True)
    )


def measure(
    kind: type[torch.optim.Optimizer], known: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train with a class in plain torch in the first way that works, then in every run.

    With the runs that are `known`, only resume.
    """
    problem = ""
    for way in ways(kind):
        try:
            behaviour, inner, wanted = in_plain_torch(way)
        except Exception as error:  # it may need another way
            problem = problem or f"{type(error).__name__}: {error}"
            continue
        if not all(tensor.isfinite().all() for tensor in wanted):
            problem = "not finite in plain torch"
            continue
        with sums_in(torch.float64 if behaviour.adds else torch.float32):
            sends = bool(behaviour.sends)
            runs = known or {n: compare(way, n, wanted, sends=sends) for n in RUNS}
            resumed = "the inner one" if inner else resumes(way, runs, wanted)
        result = {"way": way[0], "behaviour": inner + word_of(behaviour), "runs": runs}
        result["resumes"] = resumed
        return {**result, "by_order": by_order(way)} if behaviour.adds else result
    skipped = problem.splitlines()[0][:160] if problem else "cannot be built"
    return {"skipped": skipped, "refused": refusal_of(kind)}


def in_plain_torch(way: Way) -> tuple[Behaviour, str, list[Tensor]]:
    """Return what a probe finds, whether an optimizer is wrapped, and plain torch's changes.

    A class that sends is one rank of one.
    """

    def plain(rank: int = 0) -> tuple[Behaviour, str, list[Tensor]]:
        optimizer = way[2](Mixed(has_vectors=way[1]))
        behaviour = behaviour_of(stepper(optimizer))
        with sums_in(torch.float64 if behaviour.adds else torch.float32):
            wanted = train(way, None)
        return behaviour, "wraps another: " if wrapped_by(optimizer) else "", wanted

    try:
        return plain()
    except ValueError as error:
        if "process group" not in str(error):
            raise
        return run_ranks(1, plain)[0]


def refusal_of(kind: type[torch.optim.Optimizer]) -> str:
    """Return what `onefold.shard` says of a class that plain torch cannot train here."""
    try:
        module = Mixed()
        onefold.shard(module, kind(module.parameters(), **NEEDS.get(kind.__name__, {})))
    except OnefoldError as error:
        return str(error).splitlines()[0]
    except Exception:  # it needs other arguments
        return ""
    return ""


def by_order(way: Way) -> float:
    """How far weights of plain torch go otherwise if its parameters come in the reverse order."""
    return distance(train(way, None, is_reversed=True), train(way, None))


@contextmanager
def sums_in(dtype: torch.dtype) -> Iterator[None]:
    """Let optimizers keep numbers in a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def word_of(behaviour: Behaviour) -> str:
    if behaviour.searches:
        return "searches"
    if behaviour.differentiates:
        return "differentiates"
    if behaviour.sends:
        return "sends"
    if behaviour.kind == "elementwise":
        return "elementwise" if behaviour.in_blocks else "elementwise, not in blocks"
    return "coupled by sums" if behaviour.adds else behaviour.kind


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of classes")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--resumes", action="store_true", help="resume; all else as measured last")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    newest = json.loads(max(RESULTS.glob("*-optimizers.json")).read_text())
    known = newest["classes"] if arguments.resumes or arguments.only else {}
    notes = {"note": newest["note"]} if known and "note" in newest else {}
    results: dict[str, Any] = dict(known)
    for name, kind in classes():
        runs = known.get(name, {}).get("runs")
        is_new = "resumes" not in known.get(name, {}) and (not known or bool(runs))
        if any(part in name for part in arguments.only) if arguments.only else is_new:
            results[name] = measure(kind, runs if arguments.resumes else None)
            print(name, line_of(results[name]), flush=True)
            write(results, notes, arguments.results)
    write_block(PAGE, "optimizers", table(results))


def write(results: dict[str, Any], notes: dict[str, str], folder: Path) -> None:
    """Replace the file of results by the classes that are finished."""
    path = folder / f"{date.today().isoformat()}-optimizers.json"
    path.write_text(json.dumps({**provenance(), **notes, "classes": results}, indent=1) + "\n")


def line_of(result: dict[str, Any]) -> str:
    if "runs" not in result:
        return f"skipped: {result['skipped']}"
    runs = result["runs"] | {"resumes": result["resumes"]}
    words = [f"{n}: {v[:150]}" for n, v in runs.items() if v != "right"]
    return " | ".join([result["behaviour"], result["way"], *words])


def table(results: dict[str, Any]) -> list[str]:
    """Return a row for each class; runs that are not right show what they came to."""
    head = "| class | runs as | stages 0, 1, 2, 3 | one process | offload | saves and resumes |"
    lines = [head, "|---|---|---|---|---|---|"]
    for name, result in results.items():
        if "runs" not in result:
            why = result["skipped"].replace("|", " ")
            every = (
                ", ".join(["refused"] * 4) + " | refused | refused |"
                if result["refused"]
                else " | | |"
            )
            lines.append(f"| `{name}` | not run: {why} | {every} |")
            continue
        words = {run: value.split(":")[0] for run, value in result["runs"].items()}
        stages = ", ".join(words[f"stage {stage}"] for stage in range(4))
        cells = [f"`{name}`", result["behaviour"], stages, words["one process"], words["offload"]]
        cells.append(result.get("resumes", "").split(":")[0])
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
