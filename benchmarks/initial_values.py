"""Initial values on `meta` against the plain constructor, for the model classes of transformers.

    python benchmarks/initial_values.py [--only TYPE ...] [--out FILE] [--least-nbytes N]

Each model type of `AutoModel` that builds from a small configuration is built twice from one seed:
plainly on the CPU, and on `meta` with `onefold.shard` at stage 3 in one process. A class is
"right" if every parameter and every buffer is bitwise equal and the generator ends in the same
state; "refused" if `shard` raises an error that names a tensor; else "different". All tensors drop
their values while initialisers run, however small they are (`--least-nbytes 0`).

A child process handles several classes. The file is written after each child, and a second run goes
on with those that are missing. Classes that do not build are listed with the reason; classes that
are parts of other models (towers) are left to those.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import warnings
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
from contest.results import RESULTS, provenance

import onefold
from onefold.unit import deferred

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size"), 64),
    **dict.fromkeys(("encoder_hidden_size", "decoder_hidden_size", "n_embed", "width"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads",), 2),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "n_inner", "d_inner"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    "head_dim": 16, "d_kv": 16, "num_experts_per_tok": 2, "vocab_size": 512, "image_size": 64,
}  # fmt: skip
"""Values of configurations that make a model small."""
DEPTHS = {key: value for key, value in SMALL.items() if "layer" in key or key in ("vocab_size",)}
"""The few of them that fit nearly every class."""
MOST_NUMEL = 60_000_000
SECONDS = 90  # for one class


class Slow(BaseException):
    """A class took too long. No library catches it."""


def shrink(config: Any, values: dict[str, Any]) -> Any:
    """Make a configuration and those inside it small, where they have these names."""
    for value in list(vars(config).values()):
        if isinstance(value, type(config)) or type(value).__name__.endswith("Config"):
            shrink(value, values)
    for name, value in values.items():
        known = getattr(config, name, None)
        if isinstance(known, int) and not isinstance(known, bool) and known > value:
            setattr(config, name, value)
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        kinds, layers = vars(config).get(name), getattr(config, "num_hidden_layers", None)
        if isinstance(kinds, list) and isinstance(layers, int):
            setattr(config, name, kinds[:layers])
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        known, most = getattr(config, name, None), getattr(config, "vocab_size", None)
        if isinstance(known, int) and isinstance(most, int) and known >= most:
            setattr(config, name, 0)
    return config


def built(kind: type, config_class: type, values: dict[str, Any]) -> Any:
    return kind(shrink(config_class(), values))


def numel(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def fitting(kind: type, config_class: type) -> dict[str, Any]:
    """The values with which a class builds; raises the reason if there are none."""
    reason: Exception = RuntimeError("nothing was tried")
    for values in (SMALL, DEPTHS, {}):
        try:
            with torch.device("meta"):
                count = numel(built(kind, config_class, values))
            if count > MOST_NUMEL:
                raise RuntimeError(f"{count:,} parameters")
            built(kind, config_class, values)
        except Slow:
            raise
        except Exception as error:
            reason = error
            continue
        return values
    raise reason


def tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def verdict(kind: type, config_class: type) -> dict[str, Any]:
    """Compare one class."""
    try:
        values = fitting(kind, config_class)
    except Slow:
        return {"verdict": "not built", "why": f"more than {SECONDS} s"}
    except Exception as error:
        return {"verdict": "not built", "why": f"{type(error).__name__}: {error}"[:160]}
    torch.manual_seed(0)
    wanted = tensors(built(kind, config_class, values))
    wanted = {name: value.detach() for name, value in wanted.items()}
    end = torch.get_rng_state()
    with torch.device("meta"):
        module = built(kind, config_class, values)
    torch.manual_seed(0)
    try:
        onefold.shard(module, stage=3)
    except Slow:
        raise
    except Exception as error:
        is_ours = isinstance(error, onefold.OnefoldError)
        said = str(error)[:300]
        return {"verdict": "refused" if is_ours else "raw error", "why": said}
    is_same_end = torch.equal(end, torch.get_rng_state())
    with onefold.unsharded(module):
        got = {name: value.detach() for name, value in tensors(module).items()}
        differ = [
            name
            for name, value in wanted.items()
            if name not in got or not torch.equal(got[name].nan_to_num(), value.nan_to_num())
        ]
    found: dict[str, Any] = {"verdict": "right", "tensors": len(wanted)}
    if differ or not is_same_end:
        found = {"verdict": "different", "tensors": len(wanted), "differ": differ[:5]}
    return found


def judge(names: list[str], out: Path) -> None:
    """Compare classes, and add each to a file of lines."""
    from transformers import AutoConfig  # noqa: F401 - fills the tables
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    def late(*_: Any) -> None:
        raise Slow

    signal.signal(signal.SIGALRM, late)
    for name in names:
        signal.alarm(SECONDS)
        try:
            config_class = CONFIG_MAPPING[name]
            kinds: Any = MODEL_MAPPING[config_class]
            kind = kinds[0] if isinstance(kinds, tuple) else kinds
            if config_class.base_config_key:
                found = {"verdict": "a part", "why": "a part of another model"}
            else:
                found = {"class": kind.__name__, **verdict(kind, config_class)}
        except Slow:
            found = {"verdict": "not built", "why": f"more than {SECONDS} s"}
        except Exception as error:
            found = {"verdict": "not built", "why": f"{type(error).__name__}: {error}"[:160]}
        signal.alarm(0)
        with out.open("a") as file:
            file.write(json.dumps({"type": name, **found}) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="initial values on meta")
    parser.add_argument("--only", nargs="*", help="model types")
    parser.add_argument("--out", type=Path, help="the file of results")
    parser.add_argument("--least-nbytes", type=int, default=0)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        warnings.simplefilter("ignore")
        deferred.LEAST_NBYTES = asked.least_nbytes
        judge(asked.only, asked.child)
        return 0
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    out = asked.out or RESULTS / f"{date.today()}-initial-values.json"
    lines = out.with_suffix(".lines")
    if out.exists() and not lines.exists():  # go on
        rows = json.loads(out.read_text())["classes"]
        lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tried = lines.read_text().splitlines() if lines.exists() else []
    known = {json.loads(line)["type"] for line in tried}
    names = [name for name in asked.only or sorted(MODEL_MAPPING_NAMES) if name not in known]
    counts = Counter[str]()
    for start in range(0, len(names), 12):
        part = names[start : start + 12]
        command = [sys.executable, __file__, "--child", str(lines), "--only", *part]
        command += ["--least-nbytes", str(asked.least_nbytes)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL)
        if done.returncode:
            print(
                f"a child that began with {part[0]} ended with {done.returncode}", file=sys.stderr
            )
        rows = [json.loads(line) for line in lines.read_text().splitlines()]
        counts = Counter(row["verdict"] for row in rows)
        print(len(rows), dict(counts), flush=True)
        result = {"provenance": provenance(), "counts": counts, "classes": rows}
        out.write_text(json.dumps(result, indent=1) + "\n")
    lines.unlink(missing_ok=True)
    return int(counts["different"] + counts["raw error"] > 0)


if __name__ == "__main__":
    sys.exit(main())
