"""Generate with models larger than memory, beside what the disk could do and beside accelerate.

    python benchmarks/streaming.py --folder /disk                 # all parts
    python benchmarks/streaming.py --folder /disk --only cap --cap 700MiB --layers 28

cap      a Llama-shaped model with random weights in bf16, four times larger than a limit that the
         kernel enforces (a memory cgroup; this needs root), generates from disk, by onefold.stream
         and by accelerate's disk offload. The tokens are compared with those of the resident model.
         The kernel also limits the rate of reads (blkio cgroup), as disks of virtual machines have
         a rate of their own every second. A pass is compared with its bytes over the sequential
         rate, which is measured in the same process before and after.
peer     ours and accelerate's in turns under the same memory limit, from the disk as it is.
ranks    one rank, and two whose reads are limited apart: the time of a pass.
budget   everything fits: streamed and plain generate() in turns.
lookup   prompt lookup on repetitive text over a streamed model: tokens a pass, and tokens a second.

Every case is a process of its own. The bound of a pass is the bytes that do not stay over the rate.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

from contest.results import RESULTS, provenance, rounded

GROUPS = Path("/sys/fs/cgroup")
WANTED = {"cap": 1.10, "peer": 2.0, "ranks": 0.6, "budget": 1.03, "lookup": 2.5, "lookup gain": 0.9}
PIECE_NBYTES, READERS = 4 << 20, (1, 2, 4)
PROMPT, VOCABULARY = 24, 4096
LOOKUP_TOKENS = 128
"""Enough for a model with random weights to repeat itself."""
SPREAD = 1 << 29
"""Bytes that a measurement of the disk reads."""


# one case, in a process of its own


def config_of(asked: argparse.Namespace) -> Any:
    """The configuration of a Llama-shaped model."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=asked.hidden, intermediate_size=asked.hidden * 11 // 4,
        num_hidden_layers=asked.layers, num_attention_heads=asked.hidden // 128,
        num_key_value_heads=asked.hidden // 128, vocab_size=VOCABULARY, dtype=asked.dtype,
        tie_word_embeddings=False,
    )  # fmt: skip


def write_model(asked: argparse.Namespace) -> None:
    """Save random weights as safetensors."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    shutil.rmtree(asked.folder / "model", ignore_errors=True)
    model = LlamaForCausalLM(config_of(asked)).to(getattr(torch, asked.dtype))
    model.save_pretrained(asked.folder / "model", max_shard_size="1GB")


def prompt() -> Any:
    """Tokens [1, PROMPT] that repeat, so that prompt lookup finds some."""
    import torch

    few = torch.randint(VOCABULARY, (1, 4), generator=torch.Generator().manual_seed(1))
    return few.repeat(1, PROMPT // 4)


def disk_rate(folder: Path) -> float:
    """Bytes a second of sequential reads past the page cache, by as many threads as are best."""
    path = max((folder / "model").glob("*.safetensors"), key=lambda each: each.stat().st_size)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        return max(_rate(fd, path.stat().st_size, readers) for readers in READERS)
    finally:
        os.close(fd)


def _rate(fd: int, file_nbytes: int, readers: int) -> float:
    nbytes = min(SPREAD, file_nbytes // PIECE_NBYTES * PIECE_NBYTES)
    rooms = [mmap.mmap(-1, PIECE_NBYTES) for _ in range(readers)]

    def read(reader: int) -> None:
        for start in range(reader * PIECE_NBYTES, nbytes, readers * PIECE_NBYTES):
            os.preadv(fd, [rooms[reader]], start)

    with ThreadPoolExecutor(readers) as pool:
        begun = time.perf_counter()
        list(pool.map(read, range(readers)))
        return nbytes / (time.perf_counter() - begun)


def meta_model(asked: argparse.Namespace) -> Any:
    """The model on `meta`, whose values are promised."""
    import torch
    from transformers import AutoModelForCausalLM

    import onefold

    with torch.device("meta"):  # `.bfloat16()` would cast the rotary frequencies, too
        dtype = getattr(torch, asked.dtype)
        model = AutoModelForCausalLM.from_config(config_of(asked), dtype=dtype).eval()
    return onefold.load_pretrained(model, asked.folder / "model")


def held_model(asked: argparse.Namespace) -> Any:
    """The model as the case holds it."""
    import torch
    from transformers import AutoModelForCausalLM

    import onefold

    if asked.case == "resident":
        return AutoModelForCausalLM.from_pretrained(
            asked.folder / "model", dtype=torch.bfloat16
        ).eval()
    if asked.case == "accelerate":
        return AutoModelForCausalLM.from_pretrained(
            asked.folder / "model", dtype=torch.bfloat16, device_map={"": "disk"},
            offload_folder=asked.folder / "offload",
        ).eval()  # fmt: skip
    offload = "disk" if asked.case == "files" else f"disk:{asked.folder}"
    return onefold.stream(meta_model(asked), budget=asked.budget, offload=offload)


def run_case(asked: argparse.Namespace) -> dict[str, Any]:
    """Generate in this process; the seconds of each pass, tokens and bytes."""
    import torch
    import torch.distributed as dist

    import onefold

    torch.set_num_threads(asked.threads)
    if asked.ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{asked.folder}/store",
                                rank=asked.rank, world_size=asked.ranks)  # fmt: skip
    model = held_model(asked)
    passes: list[float] = []
    model.register_forward_hook(lambda *_: passes.append(time.perf_counter()))
    options = {"prompt_lookup_num_tokens": 8} if asked.lookup else {}
    rates = [disk_rate(asked.folder)] if asked.ranks == 1 else []
    tokens, begun = [], 0.0
    for _ in range(asked.rounds):
        passes.clear()
        begun = time.perf_counter()
        tokens = model.generate(
            prompt(), max_new_tokens=asked.tokens, min_new_tokens=asked.tokens, do_sample=False,
            **options,
        )[0].tolist()  # fmt: skip
    seconds = time.perf_counter() - begun
    rates += [disk_rate(asked.folder)] if asked.ranks == 1 else []
    found: dict[str, Any] = {
        "tokens": tokens, "passes": len(passes), "seconds": seconds, "disk": rates,
        "pass": [after - before for before, after in pairwise(passes)],
    }  # fmt: skip
    if asked.case in ("files", "copy"):
        found |= streamed_bytes(model)
        found["report"] = str(onefold.report(model))
    if asked.ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    return found


def streamed_bytes(model: Any) -> dict[str, int]:
    """Bytes that a pass moves, and those that stay."""
    from onefold.engine.registry import engine_of

    engine = engine_of(model)
    units = list(zip(engine.recipe.units, engine.units, strict=True))
    moving = [unit.weight.tensor.nbytes for plan, unit in units if not plan.stays]
    tables = sum(u.weight.tensor.nbytes for p, u in units if p.tile_nbytes and "embed" in p.name)
    return {
        "moved": sum(moving) - tables,
        "stays": sum(unit.weight.tensor.nbytes for plan, unit in units if plan.stays),
        "model": sum(unit.weight.tensor.nbytes for _, unit in units),
        "num_stay": sum(plan.stays for plan, _ in units),
        "num_units": len(units),
    }


# limits of the kernel


@contextmanager
def memory_limit(nbytes: int, name: str = "") -> Iterator[Path]:
    """A cgroup whose processes may hold `nbytes`, page cache included."""
    is_v1 = (GROUPS / "memory").is_dir()
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    inside = next(path for _, kind, path in own if kind == ("memory" if is_v1 else ""))
    parent = GROUPS / ("memory" if is_v1 else "") / inside.lstrip("/")
    group = (parent if parent.is_dir() else GROUPS / "memory") / f"onefold-{os.getpid()}{name}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(nbytes))
        with suppress(OSError):
            swap = "memory.memsw.limit_in_bytes" if is_v1 else "memory.swap.max"
            (group / swap).write_text(str(nbytes if is_v1 else 0))
        yield group
    finally:
        with suppress(OSError):
            group.rmdir()


def peak_of(group: Path) -> int:
    """The most bytes that the group has held."""
    names = ("memory.max_usage_in_bytes", "memory.peak")
    return next(int((group / n).read_text()) for n in names if (group / n).exists())


@contextmanager
def read_limit(folder: Path, rate: int) -> Iterator[Path]:
    """A cgroup whose processes may read `rate` bytes a second of the disk of `folder`."""
    device = folder.stat().st_dev
    group = GROUPS / "blkio" / f"onefold-{os.getpid()}-{time.monotonic_ns()}"
    group.mkdir()
    try:
        limit = f"{os.major(device)}:{os.minor(device)} {rate}"
        (group / "blkio.throttle.read_bps_device").write_text(limit)
        yield group
    finally:
        with suppress(OSError):
            group.rmdir()


def start(asked: argparse.Namespace, case: str, groups: list[Path], **changes: Any) -> Any:
    """Start a case in its groups."""
    options = {**vars(asked), "case": case, **changes}
    given = json.dumps({k: str(v) if isinstance(v, Path) else v for k, v in options.items()})

    def join() -> None:
        for group in groups:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    return subprocess.Popen(
        [sys.executable, __file__, "--case-json", given], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, preexec_fn=join, text=True,
    )  # fmt: skip


def finish(process: Any) -> dict[str, Any]:
    """The result of a case; its error if it failed."""
    out, error = process.communicate(timeout=1800)
    if process.returncode:
        killed = process.returncode == -signal.SIGKILL
        last = error.strip().splitlines()[-1:] or [""]
        return {"error": "killed: above the memory limit" if killed else last[0]}
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def run(asked: argparse.Namespace, case: str, groups: list[Path], **changes: Any) -> dict[str, Any]:
    """Run a case to its end."""
    return finish(start(asked, case, groups, **changes))


# parts


def cap(asked: argparse.Namespace) -> dict[str, Any]:
    """A model larger than a memory limit, by several ways, from a disk of a steady rate."""
    return capped(asked, asked.cases, asked.rate)


def peer(asked: argparse.Namespace) -> dict[str, Any]:
    """The same beside accelerate, from the disk as it is, twice in turns."""
    turns = [capped(asked, ["files", "accelerate"], 0) for _ in range(2)]
    return {str(number): turn for number, turn in enumerate(turns)}


def capped(asked: argparse.Namespace, cases: list[str], rate: int) -> dict[str, Any]:
    """Each case under the memory limit, and under a limit of reads where `rate` is not 0."""
    found: dict[str, Any] = {"resident": run(asked, "resident", [])}
    for case in cases:
        forget_pages(asked.folder)
        limits = [read_limit(asked.folder, rate)] if rate else []
        with memory_limit(asked.cap) as group, contexts(limits) as disks:
            found[case] = run(asked, case, [group, *disks])
            found[case]["peak"] = peak_of(group)
        show_case(case, found[case], found["resident"], asked.cap)
        shutil.rmtree(asked.folder / "offload", ignore_errors=True)
    ours = [found[case] for case in ("files", "copy") if "pass" in found.get(case, {})]
    peer = found.get("accelerate", {})
    if ours and "pass" in peer:
        best = min(statistics.median(each["pass"]) for each in ours)
        found["times accelerate"] = statistics.median(peer["pass"]) / best
        print(f"tokens a second: {found['times accelerate']:.2f} of accelerate's")
    return found


def forget_pages(folder: Path) -> None:
    """Take the model's files out of the page cache, which no group of ours is charged for."""
    os.sync()
    for path in (folder / "model").iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def show_case(case: str, found: dict[str, Any], resident: dict[str, Any], limit: int) -> None:
    """Print a line."""
    if "error" in found:
        print(f"{case}: {found['error']}")
        return
    seconds = statistics.median(found["pass"])
    line = f"{case}: {seconds:.3f} s a pass, peak {found['peak'] / limit:.2f} of the limit"
    line += f", tokens {'equal' if found['tokens'] == resident['tokens'] else 'DIFFER'}"
    if "moved" in found:
        found["bound"] = found["moved"] / statistics.median(found["disk"])
        found["of bound"] = seconds / found["bound"]
        line += f", {found['of bound']:.2f} of {found['bound']:.3f} s (disk), "
        line += f"model {found['model'] / limit:.2f} of the limit"
    print(line, flush=True)


def ranks(asked: argparse.Namespace) -> dict[str, Any]:
    """One rank, and two with a disk each: both disks are slow."""
    found: dict[str, Any] = {}
    changes = {"cap": 0, "tokens": 6}
    for number in (1, 2):
        (asked.folder / "store").unlink(missing_ok=True)
        started = []
        with contexts([read_limit(asked.folder, asked.rate) for _ in range(number)]) as groups:
            for rank, group in enumerate(groups):
                options = changes | {"ranks": number, "rank": rank, "threads": 1}
                started.append(start(asked, "files", [group], **options))
            results = [finish(process) for process in started]
        if "error" in results[0]:
            return {"error": results[0]["error"]}
        found[str(number)] = results
    seconds = {k: statistics.median(each[0]["pass"]) for k, each in found.items()}
    found["two ranks"] = seconds["2"] / seconds["1"]
    print(f"two ranks take {found['two ranks']:.2f} of one rank's pass ({seconds['1']:.3f} s)")
    return found


@contextmanager
def contexts(managers: list[Any]) -> Iterator[list[Any]]:
    """Enter several context managers."""
    if not managers:
        yield []
        return
    with managers[0] as first, contexts(managers[1:]) as others:
        yield [first, *others]


def budget(asked: argparse.Namespace) -> dict[str, Any]:
    """Plain and streamed generate() in turns, where the budget holds everything."""
    import torch
    from transformers import LlamaForCausalLM

    import onefold

    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    small = argparse.Namespace(**{**vars(asked), "hidden": 1024, "layers": 8})
    models = {}
    for name in ("plain", "streamed"):
        torch.manual_seed(0)
        models[name] = LlamaForCausalLM(config_of(small)).bfloat16().eval()
    onefold.stream(models["streamed"], budget=1 << 34, offload=f"disk:{asked.folder}")
    times: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        model.generate(prompt(), max_new_tokens=2, do_sample=False)
    for turn in range(asked.turns):
        for name in sorted(models, reverse=bool(turn % 2)):
            begun = time.perf_counter()
            models[name].generate(prompt(), max_new_tokens=24, min_new_tokens=24, do_sample=False)
            times[name].append(time.perf_counter() - begun)
    ratio = statistics.median(
        mine / plain for mine, plain in zip(times["streamed"], times["plain"], strict=True)
    )
    print(f"everything fits: {ratio:.3f} of plain generate()")
    return {"seconds": times, "ratio": ratio}


def lookup(asked: argparse.Namespace) -> dict[str, Any]:
    """Prompt lookup over a streamed model, and without."""
    # in fp32: in bf16 ties are many, and a product of nine rows breaks them another way than of one
    small = argparse.Namespace(**{**vars(asked), "hidden": 1024, "layers": 12, "dtype": "float32"})
    write_model(small)
    changes = {**vars(small), "tokens": LOOKUP_TOKENS, "cap": 0, "rounds": 1, "budget": 200 << 20}
    found = {
        "plain": run(asked, "copy", [], **changes, lookup=False),
        "lookup": run(asked, "copy", [], **changes, lookup=True),
    }
    if any("error" in each for each in found.values()):
        return found
    per_pass = LOOKUP_TOKENS / found["lookup"]["passes"]
    gain = found["plain"]["seconds"] / found["lookup"]["seconds"]
    same = found["plain"]["tokens"] == found["lookup"]["tokens"]
    print(f"prompt lookup: {per_pass:.2f} tokens a pass, {gain:.2f} times the tokens a second, "
          f"tokens {'equal' if same else 'DIFFER'}")  # fmt: skip
    return found | {"tokens a pass": per_pass, "gain": gain, "is_same": same}


PARTS = {"cap": cap, "peer": peer, "ranks": ranks, "budget": budget, "lookup": lookup}


def nbytes(text: str) -> int:
    """A size such as 600MiB."""
    from onefold.text import parse_nbytes

    return parse_nbytes("a size", text)


def main() -> int:
    """Measure, print, and keep the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--cap", type=nbytes, default=850 << 20)
    parser.add_argument("--budget", type=nbytes, default=420 << 20)
    parser.add_argument("--rate", type=nbytes, default=500 << 20, help="of each rank's disk")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cases", nargs="+", default=["files", "copy", "accelerate"])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--case-json", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case_json:
        given = {"ranks": 1, "rank": 0, "lookup": False, **json.loads(asked.case_json)}
        one = argparse.Namespace(**given | {"folder": Path(given["folder"])})
        print(json.dumps(run_case(one)))
        return 0
    result: dict[str, Any] = provenance() | {"wanted": WANTED, "model": config_of(asked).to_dict()}
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix="onefold-streaming-") as folder:
        asked.folder = Path(folder)
        write_model(asked)
        for name, part in PARTS.items():
            if asked.only in (None, name):
                result[name] = part(asked)
    asked.results.mkdir(parents=True, exist_ok=True)
    part = f"-{asked.only}" if asked.only else ""
    path = asked.results / f"{date.today().isoformat()}-streaming{part}.json"
    path.write_text(json.dumps(rounded(result), default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
