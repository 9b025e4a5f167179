"""Load and save every architecture of transformers that a small generic configuration builds.

Each is built from a small configuration and saved by transformers. Then, on 2 ranks at stage 3:

    meta      a model on meta reads the folder, rows by rows: all tensors bitwise as saved
    sharded   a sharded model of other values reads it: likewise
    names     `onefold.save_pretrained` writes the names, dtypes and shapes that transformers writes
    back      `from_pretrained` opens that folder with the same tensors

`python -m benchmarks.architectures --results FILE [--only WORD] [--part K/N]`; 35 minutes of two
cores. Ranks are threads, so models are built one at a time.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers.models.auto import modeling_auto

import onefold
from tests.support.ranks import run_ranks

SMALL = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32, "width": 32,
    "intermediate_size": 48, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "ffn_dim": 48, "d_ff": 48, "n_inner": 48, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "num_decoder_layers": 2, "depth": 2, "num_encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "num_key_value_heads": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "head_dim": 8, "d_kv": 8, "vocab_size": 99, "max_position_embeddings": 64, "n_positions": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "image_size": 32, "patch_size": 8, "projection_dim": 16,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "state_size": 8, "num_codebooks": 2, "num_mel_bins": 8, "max_source_positions": 32,
    "max_target_positions": 32, "rotary_dim": 8,
}  # fmt: skip
SECONDS = 60
"""The most for one architecture."""


def small(config: Any) -> Any:
    """Make a configuration small, and those inside it."""
    for name, value in SMALL.items():
        if isinstance(getattr(config, name, None), int) and not isinstance(value, bool):
            try:
                setattr(config, name, value)
            except Exception:
                continue
    for name, inside in list(vars(config).items()):
        if isinstance(inside, transformers.PretrainedConfig):
            setattr(config, name, small(inside))
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        if isinstance(getattr(config, name, None), int) and getattr(config, name) >= 99:
            setattr(config, name, 1)
    if isinstance(getattr(config, "layer_types", None), list):
        config.layer_types = config.layer_types[:2]
    return config


def classes() -> Iterator[tuple[str, str]]:
    """Yield model types and the names of classes that transformers lists for them."""
    seen = set[str]()
    mappings = sorted(name for name in vars(modeling_auto) if name.endswith("_MAPPING_NAMES"))
    for mapping in mappings:
        for kind, names in getattr(modeling_auto, mapping).items():
            for name in [names] if isinstance(names, str) else names:
                if name not in seen and not name.endswith("Config"):
                    seen.add(name)
                    yield kind, name


def build(kind: str, name: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class: Any = getattr(transformers, name).config_class or CONFIG_MAPPING[kind]
    known = {n: v for n, v in SMALL.items() if isinstance(getattr(config_class(), n, None), int)}
    last: Exception | None = None
    for make in (lambda: config_class(**known), lambda: small(config_class())):
        try:
            config = make()
            for attribute, inside in list(vars(config).items()):
                if isinstance(inside, transformers.PretrainedConfig):
                    setattr(config, attribute, small(inside))
            torch.manual_seed(0)
            return getattr(transformers, name)(config)
        except Exception as error:
            last = error
    assert last is not None
    raise last


def content(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each tensor in a folder's files."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                part = file.get_slice(name)
                found[name] = part.get_dtype(), tuple(part.get_shape())
    return found


def differing(state: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    return [
        name for name, value in wanted.items()
        if not isinstance(value, torch.Tensor) or name not in state
        or not torch.equal(state[name], value)
    ]  # fmt: skip


def try_one(kind: str, name: str) -> dict[str, str]:
    """Return what each of the four trials gave: "equal", or what went wrong."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            model = build(kind, name)
            if sum(p.numel() for p in model.parameters()) > 40_000_000:
                return {"built": "larger than 40 million parameters"}
            model.save_pretrained(folder / "theirs")
        except Exception as error:
            return {"built": f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"}
        wanted = {n: v.clone() for n, v in model.state_dict().items()}
        with torch.device("meta"):
            empty = type(model)(copy.deepcopy(model.config))
        on_meta = [copy.deepcopy(empty) for _ in range(2)]
        torch.manual_seed(1)
        other = type(model)(copy.deepcopy(model.config))
        sharded = [copy.deepcopy(other) for _ in range(2)]
        told: dict[str, str] = {}

        def load(rank: int, is_meta: bool) -> dict[str, Any]:
            module = (on_meta if is_meta else sharded)[rank]
            if is_meta:
                onefold.load_pretrained(module, folder / "theirs")
            onefold.shard(module, stage=3)
            if not is_meta:
                onefold.load_pretrained(module, folder / "theirs")
                onefold.save_pretrained(module, folder / "ours")
            return onefold.full_state_dict(module)

        for word, is_meta in (("meta", True), ("sharded", False)):
            try:
                wrong = differing(run_ranks(2, load, is_meta)[0], wanted)
                told[word] = f"wrong: {wrong[:3]}" if wrong else "equal"
            except Exception as error:
                told[word] = f"refused: {str(error).splitlines()[0][:200]}"
        if (folder / "ours").exists():
            ours, theirs = content(folder / "ours"), content(folder / "theirs")
            odd = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
            told["names"] = f"differ: {odd[:3]}" if odd else "equal"
            told["back"] = opened(model, folder, wanted)
        return told


def opened(model: Any, folder: Path, wanted: dict[str, Any]) -> str:
    """Compare what transformers reads of our folder with the model, or with its own folder."""

    def read(name: str) -> dict[str, Any] | str:
        try:
            return dict(type(model).from_pretrained(folder / name).state_dict())
        except Exception as error:
            return f"refused: {str(error).splitlines()[0][:120]}"

    ours = read("ours")
    if isinstance(ours, dict) and not differing(ours, wanted):
        return "equal"
    theirs = read("theirs")
    if isinstance(ours, str) or isinstance(theirs, str):
        return "as from their own folder" if ours == theirs else str(ours)[:150]
    wrong = differing(ours, theirs)
    return f"wrong: {wrong[:3]}" if wrong else "as from their own folder"


def summary(table: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Sort classes by what the trials gave."""
    tried = {name: row for name, row in sorted(table.items()) if "meta" in row}
    equal = [name for name, row in tried.items() if set(row.values()) == {"equal"}]
    return {
        "transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0],
        "ranks": 2, "stage": 3, "tried": len(tried), "equal in all four": equal,
        "others": {name: row for name, row in tried.items() if name not in equal},
        "not built by a small configuration": {
            name: row["built"] for name, row in sorted(table.items()) if name not in tried
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--part", default="0/1", help="K/N: each Nth architecture")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    part, parts = map(int, arguments.part.split("/"))
    table: dict[str, dict[str, str]] = {}

    def late(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    chosen = [c for c in classes() if arguments.only in c[1]][part::parts]
    for kind, name in chosen:
        signal.alarm(SECONDS)
        try:
            table[name] = try_one(kind, name)
        except BaseException as error:
            table[name] = {"built": f"{type(error).__name__}: {str(error)[:80]}"}
        signal.alarm(0)
        gc.collect()
        bad = {word: said for word, said in table[name].items() if said != "equal"}
        print(name, bad or "equal", flush=True)
        if arguments.results:
            arguments.results.write_text(json.dumps(summary(table), indent=1) + "\n")
    tried = {name: row for name, row in table.items() if "meta" in row}
    for word in ("meta", "sharded", "names", "back"):
        print(word, Counter(row.get(word, "none").partition(":")[0] for row in tried.values()))


if __name__ == "__main__":
    main()
