"""Pipeline schedules over sharded stages: Onefold and FSDP2, right or wrong, and over slow links.

    python benchmarks/pipeline.py --only matrix     every schedule, 2 minutes
    python benchmarks/pipeline.py --only wire       two hosts (needs root), 10 minutes

The matrix: every schedule of torch x {stages 0-3, FSDP2 that keeps weights or reshards them} x
{fp32, bf16}, 4 ranks = 2 stages of ranks x 2 data ranks. Each cell has fresh processes. It tells
the largest relative error of a gradient beside one process, and the gathers and reductions of a
unit in one step. FSDP2's are counted as the process group is called.

The wire: the data axis runs between two hosts (network namespaces, 200 Mbit/s), the pipeline axis
inside each (loopback, 1 Gbit/s). 1F1B with 8 micro-batches, engines in turns, seconds per step.
Results go to `benchmarks/results/DATE-pipeline-PART.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from contest.results import RESULTS, provenance, rounded, write_block
from hosts import Hosts, slow_down
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import onefold
from onefold.engine.driving import Verb
from onefold.engine.registry import engine_of

GUIDE = Path(__file__).parent.parent / "docs" / "guides" / "pipeline.md"
SCHEDULES = (
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble",
    "DualPipeV",
)  # fmt: skip
SINGLE, LOOPS = ("GPipe", "1F1B"), ("ZBVZeroBubble", "DualPipeV")
ENGINES = ("onefold 0", "onefold 1", "onefold 2", "onefold 3", "fsdp2 keep", "fsdp2 reshard")
WIRE_ENGINES = ("onefold 0", "onefold 3", "fsdp2 keep", "fsdp2 reshard")
TOLERANCE = {"fp32": 1e-5, "bf16": 0.05}
CELL_S = 60.0
WIRE_MICROBATCHES = 8


class Block(nn.Module):
    """A residual block of two matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def blocks(num: int, width: int) -> nn.Sequential:
    """All blocks of the model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(num)))


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean squared error, in fp32."""
    return (output.float() - target).pow(2).mean()


def sharded(engine: str, module: nn.Sequential, mesh: DeviceMesh, dtype: str) -> Any:
    """Shard one stage module; return its optimizer."""
    if engine.startswith("onefold"):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
        precision = None if dtype == "fp32" else dtype
        onefold.shard(module, optimizer, stage=int(engine[-1]), mesh=mesh, precision=precision)  # type: ignore[arg-type]
        return optimizer
    mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if dtype == "bf16" else None
    options: dict[str, Any] = {} if mixed is None else {"mp_policy": mixed}
    for part in (*module, module):
        fully_shard(part, mesh=mesh, reshard_after_forward=engine == "fsdp2 reshard", **options)
    return torch.optim.AdamW(module.parameters(), lr=1e-4)


def build(engine: str, kind: str, model: nn.Sequential, mesh: DeviceMesh, case: Any) -> Any:
    """Return this rank's stages, its optimizers and the schedule."""
    pp, size = mesh["pp"].get_local_rank(), mesh["pp"].size()
    num = size if kind in SINGLE else 2 * size
    mine = [pp] if kind in SINGLE else [pp, num - 1 - pp if kind in LOOPS else pp + size]
    per, group = len(model) // num, mesh["pp"].get_group()
    stages, optimizers = [], []
    for i in mine:
        module = model[i * per : (i + 1) * per]
        optimizers.append(sharded(engine, module, mesh["dp"], case["dtype"]))
        stages.append(PipelineStage(module, i, num, torch.device("cpu"), group=group))
    given = stages[0] if kind in SINGLE else stages
    schedule = get_schedule_class(kind)(given, case["microbatches"], loss_fn=mean_loss)  # type: ignore[arg-type]
    if engine.startswith("onefold"):
        onefold.pipeline(schedule)  # type: ignore[arg-type]
    return stages, optimizers, schedule


def step(stages: list[Any], schedule: Any, inputs: Tensor, targets: Tensor) -> None:
    """Run the schedule once."""
    arguments = [inputs] if any(stage.is_first for stage in stages) else []
    target = {"target": targets} if any(stage.is_last for stage in stages) else {}
    schedule.step(*arguments, **target)


def cell(rank: int, url: str, folder: str, engine: str, kind: str, dtype: str) -> None:
    """One rank of one cell of the matrix: write errors and counts of the second step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", url, rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    dp, width = mesh["dp"].get_local_rank(), 16
    inputs, targets = torch.randn(2, 2, 8, width, generator=torch.Generator().manual_seed(1))
    wanted = blocks(8, width)
    mean_loss(wanted(inputs.flatten(0, 1)), targets.flatten(0, 1)).backward()
    case = {"dtype": dtype, "microbatches": 4}
    stages, optimizers, schedule = build(engine, kind, blocks(8, width), mesh, case)
    counts: Counter[str] = Counter()
    is_ours = engine.startswith("onefold")
    counter = nullcontext() if is_ours else Collectives(counts)
    for each in stages if is_ours else ():
        count(engine_of(each.submod), counts)
    step(stages, schedule, inputs[dp], targets[dp])
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    for mine, whole in ((p, w) for each in stages for p, w in pairs(each.submod, wanted)):
        with torch.no_grad():  # the first step, the inference of shapes included, is not counted
            restore(mine, whole)
    counts.clear()
    with counter:
        step(stages, schedule, inputs[dp], targets[dp])
    error = 0.0
    for mine, whole in ((p, w) for each in stages for p, w in pairs(each.submod, wanted)):
        grad, reference = mine.grad, whole.grad
        if grad is None or reference is None:
            error = float("inf")
            continue
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        error = max(error, float((grad - reference).norm() / reference.norm()))
    units = sum(len(each.submod) for each in stages)
    found = {"error": error, "gathers": counts["gather"] / units}
    found["reductions"] = counts["reduce_scatter"] / units
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


class Collectives(TorchDispatchMode):
    """Counts the gathers and reductions that a process group is asked for."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a collective by its name."""
        name = str(func)
        for verb in ("gather", "reduce_scatter"):
            self.counts[verb] += name.startswith("c10d") and verb in name
        return func(*args, **(kwargs or {}))


def pairs(module: nn.Sequential, wanted: nn.Sequential) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Parameters of a stage, and those of the whole model under the same names."""
    return [(p, wanted.get_parameter(name)) for name, p in module.named_parameters()]


def restore(mine: nn.Parameter, whole: nn.Parameter) -> None:
    """Write the first step's weights back."""
    if isinstance(mine, DTensor):
        from torch.distributed.tensor import distribute_tensor

        value: Any = distribute_tensor(whole.detach(), mine.device_mesh, mine.placements)
        mine.copy_(value)
    else:
        mine.copy_(whole)


def count(engine: Any, counts: Counter[str]) -> None:
    """Count the gathers and reductions that an engine's executor sees."""
    do = engine.executor.do
    names = {Verb.GATHER: "gather", Verb.REDUCE: "reduce_scatter"}

    def counted(actions: Any) -> None:
        listed = list(actions)
        counts.update(names[verb] for verb, _ in listed if verb in names)
        do(listed)

    engine.executor.do = counted


def matrix() -> list[dict[str, Any]]:
    """Run every cell; a cell that raises or hangs says so."""
    found = []
    for dtype in ("fp32", "bf16"):
        for kind in SCHEDULES:
            for engine in ENGINES:
                found.append({"schedule": kind, "dtype": dtype, "engine": engine})
                found[-1] |= run_cell(engine, kind, dtype)
                print(*(f"{name} {value}" for name, value in found[-1].items()), sep=", ")
    return found


def run_cell(engine: str, kind: str, dtype: str) -> dict[str, Any]:
    """One cell in fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"file://{folder}/store", folder, engine, kind, dtype)
        context = mp.start_processes(cell, arguments, nprocs=4, join=False, start_method="fork")
        deadline = time.monotonic() + CELL_S
        try:
            while not context.join(timeout=1):
                if time.monotonic() > deadline:
                    for process in context.processes:
                        process.kill()
                    return {"verdict": f"hangs for {CELL_S:g} s"}
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            said = [line for line in str(error).splitlines() if "Error: " in line]
            return {"verdict": "raises " + (said or str(error).strip().splitlines())[0]}
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(4)]
    error = max(each["error"] for each in ranks)
    is_right = error <= TOLERANCE[dtype]
    gathers, reductions = (max(each[name] for each in ranks) for name in ("gathers", "reductions"))
    is_there = error < float("inf")
    wrong = f"wrong by {error:.1e}" if is_there else "wrong: gradients are missing"
    return {
        "verdict": "right" if is_right else wrong,
        "error": error if is_there else None,
        "gathers": gathers,
        "reductions": reductions,
    }


def table(result: dict[str, Any]) -> list[str]:
    """Lines of Markdown: what each engine sends, and the schedules that it gets wrong."""
    lines = [
        f"{result['date']}, torch {result['versions']['torch']}, {len(SCHEDULES)} schedules, "
        f"fp32 and bf16, 4 micro-batches, 4 gloo ranks, by `{result['command']}`.",
        "",
        "| engine | gathers | reductions | right | not right |",
        "|---|---|---|---|---|",
    ]
    for engine in ENGINES:
        rows = [row for row in result["rows"] if row["engine"] == engine]
        wrong = [row for row in rows if row["verdict"] != "right"]
        failing = sorted(
            {f"{row['schedule']}: {row['verdict'].split()[0].strip(':')}" for row in wrong}
        )
        most = {
            name: max((row[name] for row in rows if name in row), default=0)
            for name in ("gathers", "reductions")
        }
        lines.append(
            f"| {engine} | {most['gathers']:g} | {most['reductions']:g} | "
            f"{len(rows) - len(wrong)} of {len(rows)} | {', '.join(failing)} |".replace(
                "|  |", "| |"
            )
        )
    return lines


def wire(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds per step of each engine in each round, over two hosts."""
    found = []
    with Hosts(2, "200mbit") as hosts:
        for host in hosts:
            slow_down(host.name, "lo", "1gbit")
        for number in range(options.rounds):
            first = number % len(WIRE_ENGINES)
            for engine in WIRE_ENGINES[first:] + WIRE_ENGINES[:first]:
                case = {"engine": engine, "width": options.width, "steps": options.steps}
                before = [host.counters() for host in hosts]
                ended = hosts.torchrun(
                    __file__, "--rank", json.dumps(case), ranks=2, timeout_s=options.timeout,
                    env={"PYTHONPATH": os.pathsep.join([*map(str, sys.path)])},
                )  # fmt: skip
                if any(each.code for each in ended):
                    found.append({**case, "round": number, "failed": ended[0].err[-500:]})
                    print(found[-1])
                    continue
                between = sum(
                    (h.counters() - b).between.sent_nbytes
                    for h, b in zip(hosts, before, strict=True)
                )
                told = json.loads(ended[0].out.strip().splitlines()[-1])
                found.append({**case, "round": number, "between_nbytes": between, **told})
                print(
                    f"round {number}: {engine}: {told['seconds']:.3f} s a step, loss {told['loss']}"
                )
    timed = [each for each in found if "seconds" in each]
    by_engine = {
        engine: median(each["seconds"] for each in timed if each["engine"] == engine)
        for engine in {each["engine"] for each in timed}
    }
    for engine, seconds in by_engine.items():
        print(f"{engine}: {seconds:.3f} s, {seconds / by_engine['onefold 0']:.2f}x of onefold 0")
    return found


def wire_rank(case: dict[str, Any]) -> None:
    """One rank of a timed run: the median of its steps, told by the last rank of the pipeline."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))  # hosts are data ranks
    model = blocks(8, case["width"])
    made = {"dtype": "fp32", "microbatches": WIRE_MICROBATCHES}
    stages, optimizers, schedule = build(case["engine"], "1F1B", model, mesh, made)
    shape = 2, WIRE_MICROBATCHES * 2, 64, case["width"]
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    seconds, losses = list[float](), list[float]()
    for _ in range(case["steps"] + 1):
        inputs, targets = torch.randn(shape, generator=generator)
        dist.barrier()
        began = time.perf_counter()
        told = list[Any]()
        arguments = [inputs] if stages[0].is_first else []
        target = {"target": targets, "losses": told} if stages[0].is_last else {}
        schedule.step(*arguments, **target)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        seconds.append(time.perf_counter() - began)
        losses.append(float(torch.stack(told).mean()) if told else 0.0)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, losses[-1])
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": median(seconds[1:]), "loss": sum(everyone) / 2}))
    dist.destroy_process_group()


def main() -> int:
    """Run the parts that were asked for; write their results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["matrix", "wire"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4, help="measured, after one that is not")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one run")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="only write the page again")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        wire_rank(json.loads(options.rank))
        return 0
    for part, run in (("matrix", matrix), ("wire", lambda: wire(options))):
        if options.only in (None, part) and not options.page:
            about = provenance()
            result = json.dumps(rounded({**about, "rows": run()})).replace('{"', '\n{"')
            path = options.results / f"{date.today().isoformat()}-pipeline-{part}.json"
            path.write_text(result.lstrip() + "\n")
    if options.results == RESULTS:
        newest = max(RESULTS.glob("*-pipeline-matrix.json"))
        write_block(GUIDE, "pipeline", table(json.loads(newest.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
