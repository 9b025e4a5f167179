"""The eight parts of the campaign on one device; benchmarks/gpu.py runs each in a process.

    python benchmarks/gpu_parts.py kernels --device cpu --small

Each prints its rows as JSON on the last line. A row that a device cannot have says why.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from contest.case import Case as OneCase
from contest.case import batches, build_model, loss_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import onefold
from onefold.compose import routes
from onefold.compose.routes import Links
from onefold.layout.ledger import Ledger
from onefold.layout.rows import Layout
from onefold.tier import accelerator
from onefold.wire import fused
from onefold.wire.codec import codec_of
from onefold.wire.collectives import Group
from onefold.wire.message_cut import MessageLayout
from onefold.wire.transport import Reduction

ROOT = Path(__file__).parents[1]
CODECS = ("int8", "int4", "int8+h", "int4+h")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ask:
    """Where a part runs, and whether in miniature."""

    device: torch.device
    is_small: bool

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Wait for the device."""
        accelerator.synchronize(self.device)

    def seconds(self, call: Callable[[], object], rounds: int = 5) -> float:
        """The median time of a call that has run once before."""
        call()
        found: list[float] = []
        for _ in range(2 if self.is_small else rounds):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            found.append(time.perf_counter() - start)
        return median(found)


def absent(what: str, why: str) -> Row:
    """A row without a measurement."""
    return {"what": what, "absent": why}


# 1: correctness


def correctness(ask: Ask) -> list[Row]:
    """Tests of the device, kernels to the bit, and a loopback through the whole transport."""
    rows = [
        _ended(what, [sys.executable, "-m", program, ask.device.type], ask)
        for what, program in PROGRAMS.items()
    ]
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/laws/test_gpu.py"]
    if ask.is_cuda:
        rows.append(_ended("tests of the device", tests, ask))
        rows.append(_ended("tests, with torch's sanitizer", tests, ask, TORCH_CUDA_SANITIZER="1"))
    else:
        rows.append(absent("tests of the device", "they need CUDA"))
    with alone(ask):
        for codec in ("exact", *CODECS):
            for packs in (False, True):
                wanted = looped(Ask(torch.device("cpu"), True), codec, packs=False)
                same = all(map(torch.equal, wanted, looped(ask, codec, packs=packs)))
                what = f"loopback, {codec}, {'flat' if packs else 'grouped'}"
                rows.append({"what": what, "is_right": same})
        for stage in range(4):
            quiet, sent = (losses_of(stage, loops=loops) for loops in (False, True))
            what = f"loopback of whole steps, stage {stage}"
            rows.append({"what": what, "is_right": torch.equal(quiet, sent)})
    return rows


def losses_of(stage: int, *, loops: bool) -> Tensor:
    """Losses of a rank that `loops` messages to itself, or sends none, in CPU memory."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    routes.LOOPS = loops
    try:
        onefold.shard(module, optimizer, stage=stage)
    finally:
        routes.LOOPS = False
    losses = []
    for rows in torch.randn(3, 32, 64).to(module[0].weight.device):
        losses.append(module(rows).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).detach().cpu()


PROGRAMS = {
    "bits of kernels": "tests.support.programs.fused_bits",
    "products of kernels": "tests.support.programs.product_bits",
}


def _ended(what: str, command: list[str], ask: Ask, **variables: str) -> Row:
    """Whether a command of the repository ends well; its last line if not."""
    is_of_triton = command[2] in PROGRAMS.values()
    if is_of_triton and not ask.is_cuda:
        variables["TRITON_INTERPRET"] = "1"
        command = command[:3]
    if is_of_triton and not _has_triton():
        return absent(what, "Triton is not installed")
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True
    )
    lines = (done.stdout + done.stderr).strip().splitlines() or [""]
    return {"what": what, "is_right": done.returncode == 0, "said": lines[-1][:200]}


def _has_triton() -> bool:
    from importlib.util import find_spec

    return find_spec("triton") is not None


@contextmanager
def alone(ask: Ask) -> Any:
    """A group of one rank, of NCCL on a GPU."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    store = dist.HashStore()
    names = "cpu:gloo,cuda:nccl" if ask.is_cuda else "gloo"
    dist.init_process_group(
        names, store=store, rank=0, world_size=1, device_id=ask.device if ask.is_cuda else None
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


SHAPES = [("large", (1 << 10, 96)), ("bias", (5,)), ("uneven", (7, 3)), ("other", (1 << 10, 64))]


def looped(ask: Ask, codec: str, *, packs: bool) -> list[Tensor]:
    """What a rank alone receives from itself, by the whole transport, in CPU memory."""
    torch.manual_seed(0)
    full, sums = torch.randn(1 << 18), [torch.randn(1 << 17) for _ in SHAPES]
    layout, group = Layout.build(SHAPES, 1), Group.from_handle(dist.group.WORLD)
    links = Links(ask.device, Ledger(), torch.float32, loops=True, packs=packs)
    transport = links.transport(group, codec)
    group = transport.group
    offsets = [slot.full_offset for slot in layout.slots]
    flat = full[: layout.full_numel].to(ask.device)
    transport.gather(flat, MessageLayout(layout.slots, offsets, group, 4), "gather").wait()
    partials = [
        values[: slot.numel].to(ask.device, torch.bfloat16)
        for values, slot in zip(sums, layout.slots, strict=True)
    ]
    out = [torch.ones(slot.numel, device=ask.device) for slot in layout.slots]
    cut = MessageLayout(layout.slots, None, group, 2)
    transport.reduce_scatter(
        Reduction(partials, cut, out, [True, False, True, False], "reduce")
    ).wait()
    return [tensor.cpu() for tensor in (flat, *out)]


# 2: the host


class Launches(TorchDispatchMode):
    """Counts operations that are not views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += not (function.is_view or "empty" in function.name())
        return function(*args, **(kwargs or {}))


def host(ask: Ask) -> list[Row]:
    """Launches and host time of a unit in a step, and whether the host waits for the device."""
    rows: list[Row] = []
    case = OneCase("tiny" if ask.is_small else "small", ranks=1, device=ask.device.type)
    for stage in (None, 0, 3):
        step, num_units = training(ask, case, stage)
        step()
        with Launches() as launches:
            step()
        found = {"what": f"stage {stage}" if stage is not None else "plain torch"}
        found["launches_of_a_unit"] = launches.count / num_units
        ask.wait()
        start = time.perf_counter()
        step()
        found["host_ms_of_a_unit"] = (time.perf_counter() - start) / num_units * 1e3
        ask.wait()
        found["step_ms"] = ask.seconds(step) * 1e3
        if ask.is_cuda:
            found["is_right"] = _waits_for_nothing(step)
            found["busy_share"] = _busy_share(step)
        rows.append(found)
    return rows


def training(ask: Ask, case: OneCase, stage: int | None, **options: Any) -> tuple[Any, int]:
    """A step of a model of the contest; the number of its blocks."""
    torch.manual_seed(0)
    model = build_model(case)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, fused=True if stage is None else None
    )
    if stage is not None:
        onefold.shard(model, optimizer, stage=stage, **options)
    ((tokens, targets),) = batches(case, 0, 0)

    def step() -> None:
        loss_of(model(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, case.shape.num_layers


def _waits_for_nothing(step: Callable[[], None]) -> bool:
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def _busy_share(step: Callable[[], None]) -> float:
    """The share of a step in which a kernel runs."""
    kinds = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profile:
        step()
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(e.time_range.start, e.time_range.end) for e in kernels]
    whole = max(e for _, e in spans) - min(s for s, _ in spans)
    return sum(end - start for start, end in spans) / whole


# 5: inference


def inference(ask: Ask) -> list[Row]:
    """Weights streamed through the device as a share of the link; products of quantized weights."""
    width, rows = 256 if ask.is_small else 4096, list[Row]()
    link = _link(ask, 1 << (16 if ask.is_small else 28))
    rows.append({"what": "link to the device, pinned", "gb_per_s": link / 1e9})
    if ask.is_cuda:
        rows.append(_streamed(ask, width, link))
    else:
        rows.append(absent("streamed weights", "they are in the memory that computes"))
    return [*rows, *(row for rest in ("int8", "int4") for row in _products(ask, rest, width))]


def _streamed(ask: Ask, width: int, link: float) -> Row:
    """Weights in CPU memory that pass through the device, as a share of the link."""
    dtype = torch.bfloat16
    model = nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=dtype) for _ in range(8)))
    nbytes = sum(p.nbytes for p in model.parameters())
    onefold.stream(model, budget=6 * width * width, offload="cpu")
    x = torch.randn(1, width, dtype=dtype, device=ask.device)
    with torch.no_grad():
        rate = nbytes / ask.seconds(lambda: model(x))
    return {"what": "streamed weights", "gb_per_s": rate / 1e9, "of_link": rate / link}


def _products(ask: Ask, rest: str, width: int) -> list[Row]:
    """Products of a quantized matrix, compared with bf16."""
    exact, packed = (nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(2))
    exact, small = exact.to(ask.device), nn.Sequential(packed)
    onefold.stream(small, rest=rest, offload="device")

    def seconds(module: nn.Module, count: int) -> float:
        x = torch.randn(count, width, dtype=torch.bfloat16, device=ask.device)
        with torch.no_grad():
            return ask.seconds(lambda: module(x))

    return [
        {
            "what": f"{rest}, {count} rows, one call",
            "times_as_fast_as_bf16": seconds(exact, count) / seconds(small, count),
        }
        for count in (1, 16, 256)
    ]


def _link(ask: Ask, nbytes: int) -> float:
    """Bytes a second of one pinned copy to the device."""
    there = torch.empty(nbytes, dtype=torch.uint8, device=ask.device)
    here = accelerator.pinned(nbytes, torch.uint8)
    return nbytes / ask.seconds(lambda: there.copy_(here, non_blocking=True))


# 6: kernels


def _encoded(ask: Ask, word: str, values: Tensor) -> Row:
    """The rate of a codec, by torch's operations (on a CPU the C kernel) and by the GPU's."""
    codec, numel = codec_of(word), len(values)
    message = torch.zeros(codec.nbytes(numel), dtype=torch.uint8, device=ask.device)
    by_torch = ask.seconds(lambda: codec.encode(values, message))
    found = {"what": f"{word}, encode", "torch_gb_per_s": values.nbytes / by_torch / 1e9}
    if fused.kernels_for(ask.device) is not None:
        own = fused.FusedCodec(codec)
        row = own.row(numel, message.data_ptr(), is_quantized=True, values=values.data_ptr())
        seconds = ask.seconds(lambda: own.encode([row], ask.device, torch.float32, has_base=False))
        found["gb_per_s"] = values.nbytes / seconds / 1e9
    return found


def kernels(ask: Ask) -> list[Row]:
    """Codecs and sums in GB/s, with kernels and by torch; grouped and flat messages to oneself."""
    numel, rows = 1 << (14 if ask.is_small else 26), list[Row]()
    values = torch.randn(numel, device=ask.device)
    out = torch.zeros_like(values)
    rows += [_encoded(ask, word, values) for word in CODECS]
    parts = [*torch.randn(8, numel // 8, device=ask.device)]
    target = out[: numel // 8]

    def summed() -> None:
        torch.add(parts[0], parts[1], out=target)
        for part in parts[2:]:
            target.add_(part)
        target.mul_(0.125)

    nbytes = 4 * (numel + numel // 8)
    found = {"what": "sum of 8 ranks", "torch_gb_per_s": nbytes / ask.seconds(summed) / 1e9}
    if fused.kernels_for(ask.device) is not None:
        seconds = ask.seconds(lambda: fused.mean([(parts, target, True)], 0.125, torch.float32))
        found["gb_per_s"] = nbytes / seconds / 1e9
    rows.append(found)
    with alone(ask):
        for packs in (False, True):
            seconds = ask.seconds(partial(looped, ask, "exact", packs=packs))
            what = f"loopback, {'flat' if packs else 'grouped'}"
            rows.append({"what": what, "ms": seconds * 1e3})
    return rows


# 7: limits


def limits(ask: Ask) -> list[Row]:
    """Out of memory in a step: a message with the smallest change that fits, then a step again."""
    if not ask.is_cuda:
        return [absent("out of memory", "the CPU has no limit that torch sets")]
    case = OneCase("small", ranks=1, device="cuda")
    step, _ = training(ask, case, 3)
    step()
    whole = torch.cuda.get_device_properties(ask.device).total_memory
    used = torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.02 * used / whole)
    said = ""
    try:
        step()
    except (torch.OutOfMemoryError, onefold.OnefoldError) as error:
        said = str(error)
    torch.cuda.set_per_process_memory_fraction(1.0)
    step()
    return [{"what": "out of memory, then a step", "is_right": bool(said), "said": said[:300]}]


# 8: processes


def processes(ask: Ask) -> list[Row]:
    """The contexts on the device: one a process, whatever threads work."""
    if not ask.is_cuda:
        return [absent("contexts", "the CPU has none")]
    step, _ = training(ask, OneCase("tiny", ranks=1, device="cuda"), 3, offload="optimizer")
    step()
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    own = [line for line in lines if line.split(",")[0].strip() == str(os.getpid())]
    return [{"what": "contexts of a process", "is_right": len(own) <= 1, "said": "; ".join(own)}]


PARTS: dict[str, Callable[[Ask], list[Row]]] = {
    "correctness": correctness, "host": host, "inference": inference, "kernels": kernels,
    "limits": limits, "processes": processes,
}  # fmt: skip


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device, 0 if options.device != "cpu" else None)
    rows = PARTS[options.part](Ask(device, options.small))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
