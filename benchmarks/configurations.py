"""Plans of published configurations against transformers on `meta`, for training and inference.

    python benchmarks/configurations.py [--only NAME ...] [--out FILE]
    python benchmarks/configurations.py --page [FILE]     write the page's table from a result

benchmarks/configurations.json holds the keys of each config.json that shape the model. Of each,
transformers builds the class that `architectures` names. Training is planned on 8 GPUs of 80 GB in
bf16, inference on one of them at 4,096 tokens of context.

A plan is "equal" if it counts the parameters and the bytes of weights of that class, and the bytes
that fill the last cache line of a tensor; "part" if it counts fewer, and a line says how many are
left out; "refused" if an error says why. Everything else is "different". A plan must also say which
dtype it counts where a configuration names none, or where its files are quantized.

A child process handles several models. A second run goes on with those that are missing.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
from contest.results import RESULTS, provenance, write_block

import onefold
from onefold.app.cli.main import main as command
from onefold.text import format_bytes

FILE = Path(__file__).with_name("configurations.json")
PAGE = Path(__file__).parent.parent / "docs" / "measurements" / "memory.md"
GPUS, CONTEXT = {"ranks": 8, "machine": "h100-80"}, 4096
CACHE_LINE = 64
CHUNK = 4
"""Models of one process."""


def published() -> dict[str, dict[str, Any]]:
    """Kind, published size and configuration of each model by its name."""
    return json.loads(FILE.read_text())


def first_sentence(error: Exception | str, path: Path) -> str:
    """The reason in one line, without the name of a temporary folder."""
    line = " ".join(str(error).split()).replace(str(path), path.name)
    return line.removeprefix("onefold plan: ").partition(". ")[0]


def named_dtype(config: dict[str, Any]) -> str | None:
    """The dtype that a configuration names, or one of its parts."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    return next((d for part in parts if (d := part.get("dtype") or part.get("torch_dtype"))), None)


def on_meta(path: Path) -> dict[str, Any]:
    """What transformers builds: the class, its parameters, and their bytes in the named dtype."""
    import transformers

    written = json.loads(path.read_text())
    architecture, dtype = written["architectures"][0], named_dtype(written) or "float32"
    try:
        config = transformers.AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        kind: Any = getattr(transformers, architecture)
        with torch.device("meta"):
            parameters = list(kind._from_config(config, dtype=dtype).parameters())
    except Exception as error:  # whatever a model's own code raises
        return {"architecture": architecture, "not built": first_sentence(error, path)}
    return {
        "architecture": architecture, "parameters": sum(p.numel() for p in parameters),
        "tensors": len(parameters), "nbytes": sum(p.nbytes for p in parameters),
        "dtype": dtype,
    }  # fmt: skip


def training(path: Path) -> dict[str, Any]:
    """What `onefold.plan` says. At stage 0 each rank keeps all weights."""
    try:
        plan = onefold.plan(path, cluster=GPUS, precision="bf16")
    except onefold.ConfigError as error:
        return {"refused": first_sentence(error, path)}
    (row,) = (row for row in plan.rows if (row.stage, row.offload) == (0, "none"))
    nbytes = row.as_dict()["device_nbytes"]["parameters"]
    return {"parameters": plan.numel, "nbytes": nbytes, "says": list(plan.estimates)}


def inference(path: Path) -> dict[str, Any]:
    """What `onefold plan --inference` says; weights are exact."""
    words = ["--gpus", "1", "--cluster", "h100-80", "--context", str(CONTEXT), "--json"]
    said, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(errors):
        command(["plan", "--inference", "--model", str(path), *words])
    if not said.getvalue():
        return {"refused": first_sentence(errors.getvalue(), path)}
    plan = json.loads(said.getvalue())
    return {
        "parameters": plan["parameters"], "nbytes": plan["at_rest"],
        "kv_nbytes_a_token": plan["kv_nbytes_a_token"], "says": plan["estimates"],
    }  # fmt: skip


def verdict(plan: dict[str, Any], wanted: dict[str, Any], *, must_say: bool) -> str:
    """Judge one plan. `must_say`: it has to say which dtype it counts."""
    if "refused" in plan:
        return "refused"
    if must_say and not any("weights are counted in" in line for line in plan["says"]):
        return "different"
    if "parameters" not in wanted:
        return "different"
    numel = wanted["parameters"]
    missing = numel - plan["parameters"]
    # parts that are left out have the dtype of all others
    filling = plan["nbytes"] - wanted["nbytes"] + missing * wanted["nbytes"] // numel
    if not 0 <= filling < CACHE_LINE * wanted["tensors"]:
        return "different"
    if missing == 0:
        return "equal"
    line = f"{missing:,} of the {numel:,} parameters of"
    return "part" if missing > 0 and any(line in said for said in plan["says"]) else "different"


def compared(path: Path) -> dict[str, Any]:
    """Compare the plans of a config.json with transformers."""
    config, wanted = json.loads(path.read_text()), on_meta(path)
    must_say = "quantization_config" in config or named_dtype(config) is None
    plans = {"training": training(path), "inference": inference(path)}
    judged = {
        name: {"verdict": verdict(plan, wanted, must_say=must_say), **plan}
        for name, plan in plans.items()
    }
    return {"meta": wanted, **judged}


def judge(name: str, out: Path) -> None:
    """Compare one model, and add it to a file of lines."""
    model = published()[name]
    config = model.pop("config")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(config))
        row = {"model": name, **model, **compared(path)}
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")


def cell(plan: dict[str, Any]) -> str:
    """One plan in a cell of the table."""
    if plan["verdict"] == "refused":
        return "refused"
    counted = f"{plan['parameters']:,}, " if plan["verdict"] == "part" else ""
    return f"{plan['verdict']}: {counted}{format_bytes(plan['nbytes'])}"


def said(row: dict[str, Any]) -> str:
    """What the two plans say, each line once."""
    found: dict[str, None] = {}
    for name in ("training", "inference"):
        plan = row[name]
        lines = [plan["refused"].partition(", got ")[2]] if "refused" in plan else plan["says"]
        found.update(
            dict.fromkeys(line.partition(" <")[0].partition(" hint: ")[0] for line in lines)
        )
    return "; ".join(found)


def table(result: dict[str, Any]) -> list[str]:
    """The lines of the page."""
    head = ("model", "kind", "parameters, transformers", "training", "inference", "what plans say")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in result["models"]:
        numel = row["meta"].get("parameters")
        cells = (row["model"], row["kind"], f"{numel:,}" if numel else "not built",
                 cell(row["training"]), cell(row["inference"]), said(row))  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    counts = ", ".join(f"{number} {name}" for name, number in result["counts"].items())
    models = len(result["models"])
    return [*lines, "", f"{models} models, {2 * models} plans: {counts}."]


def main() -> int:
    parser = argparse.ArgumentParser(description="plans of published configurations")
    parser.add_argument("--only", nargs="*", help="names of models")
    parser.add_argument("--out", type=Path, help="the file of results")
    parser.add_argument("--page", nargs="?", const=True, help="write the table of a result")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        warnings.simplefilter("ignore")
        for name in asked.only:
            judge(name, asked.child)
        return 0
    if asked.page:
        newest = max(RESULTS.glob("*-configurations.json")) if asked.page is True else asked.page
        write_block(PAGE, "configurations", table(json.loads(Path(newest).read_text())))
        return 0
    out = asked.out or RESULTS / f"{date.today()}-configurations.json"
    lines = out.with_suffix(".lines")
    tried = lines.read_text().splitlines() if lines.exists() else []
    known = {json.loads(line)["model"] for line in tried}
    names = [name for name in asked.only or published() if name not in known]
    counts = Counter[str]()
    for start in range(0, len(names), CHUNK):
        child = [sys.executable, __file__, "--child", str(lines)]
        done = subprocess.run([*child, "--only", *names[start : start + CHUNK]])
        if done.returncode:
            print(f"the process of {names[start]} ended with {done.returncode}", file=sys.stderr)
        rows = [json.loads(line) for line in lines.read_text().splitlines()]
        counts = Counter(row[kind]["verdict"] for row in rows for kind in ("training", "inference"))
        print(len(rows), dict(counts), flush=True)
        about = provenance() | {"transformers": version("transformers")}
        result = {"provenance": about, "counts": counts, "models": rows}
        out.write_text(json.dumps(result, indent=1) + "\n")
    lines.unlink(missing_ok=True)
    return int(counts["different"] > 0)


if __name__ == "__main__":
    sys.exit(main())
