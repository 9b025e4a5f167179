"""`onefold generate` and `onefold plan --inference`, as a user meets them."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.app.cli.main import main
from onefold.app.generate.run import PassMeter
from onefold.app.generate.tokens import Bytes, Streamer, Words, printable
from onefold.engine.registry import engine_of
from onefold.inference.pass_plan import InferenceAsk, plan_inference
from onefold.layout.ledger import Kind
from onefold.planner.models.gpt import GPT, GPTConfig
from onefold.planner.models.loader import build_model, left_out
from tests.support.commands import onefold as command
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn

SIZES = GPTConfig(num_layers=6, width=32, num_heads=2, lr=1e-3)
SEQ = 16


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)


def plain(sizes: GPTConfig = SIZES) -> nn.Module:
    return seeded(GPT, sizes, SEQ).eval()


def nbytes_of(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def too_wide(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line) > 80]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints `runs` of a trained byte GPT, and their export `out`."""
    folder = tmp_path_factory.mktemp("generate")
    flags = ("--steps", "2", "--batch", "1", "--seq", "64", "--sample", "0", "--ranks", "1")
    done = command("train", *flags, "--checkpoint", "runs", cwd=folder)
    assert done.returncode == 0, done.stderr
    done = command("export", "runs", "out", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `save_pretrained` of transformers leaves it: tokens are bytes."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("models") / "llama"
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=6,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def generated(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    """What `onefold generate --json` prints."""
    assert main(["generate", *flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# plan and engine


@again_but("1-None-0.6", "1-int8-0.0", "2-None-0.3", "2-int8-1.0")
@worlds_in_turn
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("rest", [None, "int8"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_plan_reads_and_holds_the_bytes_of_the_engine(world_size, rest, share, tmp_path):
    module = plain()
    budget = int(share * 2 * nbytes_of(module)) + 150_000
    ask = InferenceAsk(
        budget=budget, rest=rest, offload="disk", ranks=world_size, device_type="cpu",
        context=SEQ, batch=None, memory=1 << 30,
    )  # fmt: skip
    made = plan_inference(module, ask)

    def body(rank: int) -> tuple[int, int, int]:
        streamed = onefold.stream(plain(), budget=budget, offload=f"disk:{tmp_path}", rest=rest)
        engine = engine_of(streamed)
        assert [unit.stays for unit in made.recipe.units] == [
            unit.stays for unit in engine.recipe.units
        ]
        meter = PassMeter(streamed)
        with torch.no_grad():
            for _ in range(7):
                streamed(torch.arange(5).view(1, 5))
        passes, ledger = meter.passes(), engine.ledger
        rests = ledger.usage[Kind.WEIGHT, "disk"].now
        return passes.nbytes, ledger.total.peak - rests, rests

    for read, peak, rests in run_ranks(world_size, body):
        assert (made.held.read, made.held.at_rest) == (read, rests)
        assert made.held.peak == peak
    assert made.fits
    assert made.num_stay > 0 or share == 0


@again_but("2")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_plan_reads_tables_by_the_row_and_heads_in_blocks(world_size, tmp_path):
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(2000, 256)
            self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
            self.head = nn.Linear(256, 8000, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.table(tokens)
            for block in self.blocks:
                x = x + block(x)
            return self.head(x)

    with torch.device("meta"):
        module = Wide()
    budget = 3 << 20
    ask = InferenceAsk(
        budget=budget, rest=None, offload="disk", ranks=world_size, device_type="cpu",
        context=1, batch=None, memory=1 << 30,
    )  # fmt: skip
    made = plan_inference(module, ask)
    assert [unit.name for unit in made.recipe.units if unit.tile_nbytes] == [
        "table.weight", "head.weight",
    ]  # fmt: skip

    def body(rank: int) -> tuple[int, int]:
        with torch.device("meta"):
            mine = Wide()
        streamed = onefold.stream(mine, budget=budget, offload=f"disk:{tmp_path}")
        meter = PassMeter(streamed)
        with torch.no_grad():
            for _ in range(5):
                streamed(torch.tensor([[3]]))
        ledger = engine_of(streamed).ledger
        return meter.passes().nbytes, ledger.total.peak - ledger.usage[Kind.WEIGHT, "disk"].now

    read, peak = run_ranks(world_size, body)[0]
    assert made.held.read == read
    assert peak <= made.held.peak <= peak + (2 << 20)  # blocks that may be read at a time


def test_a_plan_traces_the_cache_of_a_model_and_its_activations(llama):
    from onefold.app.generate.sources import opened, skeleton

    with opened(str(llama)) as source:
        module = skeleton(source)
    ask = InferenceAsk(
        budget=1 << 20, rest=None, offload="cpu", ranks=1, device_type="cpu", context=64,
        batch=4, memory=1 << 30,
    )  # fmt: skip
    made = plan_inference(module, ask)
    assert made.kv_nbytes == 2 * 6 * 1 * 16 * 4  # keys, values; layers; heads; width; bytes
    assert made.best.batch == 4
    assert made.best.memory - made.one.memory >= 3 * 64 * made.kv_nbytes
    assert made.estimates == ()


TINY = {"vocab_size": 256, "hidden_size": 32, "num_key_value_heads": 2, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 48, "max_position_embeddings": 128,
        "pad_token_id": 0}  # fmt: skip
WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    "moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
ENCODER = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "decoder_attention_heads": 2,
           "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}  # fmt: skip


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize(("kind", "sizes"), [
    ("Olmo3Config", TINY | WINDOW), ("Gemma3TextConfig", TINY | WINDOW | {"head_dim": 16}),
    ("DeepseekV3Config", TINY | LATENT), ("BartConfig", TINY | ENCODER),
])  # fmt: skip
def test_a_plan_counts_the_keys_and_values_that_the_cache_holds(kind, sizes, device_type):
    """Layers with a window, values narrower than queries, and a decoder behind an encoder."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, kind)(**sizes)
    has_encoder = config.is_encoder_decoder
    auto = transformers.AutoModelForSeq2SeqLM if has_encoder else transformers.AutoModelForCausalLM
    model = auto.from_config(config).eval()
    ask = InferenceAsk(
        budget=1 << 20, rest=None, offload=None, ranks=1, device_type=device_type, context=64,
        batch=4, memory=1 << 30,
    )  # fmt: skip
    made = plan_inference(model, ask)
    assert made.estimates == ()
    tokens = torch.ones(1, 64, dtype=torch.long)
    more = {"decoder_input_ids": tokens} if has_encoder else {}
    with torch.no_grad():
        cache = model(tokens, use_cache=True, **more).past_key_values
    parts = [cache.self_attention_cache, cache.cross_attention_cache] if has_encoder else [cache]
    held = sum(layer.keys.nbytes + layer.values.nbytes for part in parts for layer in part.layers)
    assert 0 <= 64 * made.kv_nbytes - held < 64


@pytest.mark.parametrize(("config", "said"), [
    ({"quantization_config": {"quant_method": "mxfp4"}}, "float32: quantization_config (mxfp4)"),
    ({}, "names no dtype"),
    ({"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}, "bfloat16: quant"),
    ({"dtype": "float32", "architectures": ["GPT2DoubleHeadsModel"]}, "GPT2DoubleHeadsModel are"),
    ({"dtype": "float32", "architectures": ["BertModel"]}, "BertModel may have parts"),
    ({"dtype": "float32", "architectures": ["GPT2LMHeadModel"]}, None),
])  # fmt: skip
def test_a_plan_says_in_which_dtype_weights_count_and_what_is_left_out(tmp_path, config, said):
    pytest.importorskip("transformers")
    sizes = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(sizes | {"vocab_size": 256, "num_labels": 1} | config))
    module = build_model(str(path), 64)
    notes = left_out(str(path), module)
    assert len(notes) == bool(said)
    assert said is None or said in notes[0]
    estimates = onefold.plan(str(path), cluster={"ranks": 1, "memory": 1 << 30}, seq=64).estimates
    assert all(told.startswith(note) for told, note in zip(estimates, notes, strict=True))


# text


def test_a_trained_checkpoint_writes_text_on_one_rank_and_on_two(runs, capsys, monkeypatch):
    monkeypatch.chdir(runs)
    flags = ("--prompt", "def f", "--max-new-tokens", "6", "--budget", "2MiB", "--offload")
    alone = generated(capsys, "--model", "runs", *flags, f"disk:{runs}")
    assert (alone["num_tokens"], alone["passes"]["number"]) == (6, 6)
    assert alone["passes"]["nbytes"] > 0
    assert alone["link_share"] > 0
    assert alone["memory"][0]["now"]["weight"] == alone["memory"][0]["expected"]["weight"]
    done = command("generate", "--model", "out", *flags, f"disk:{runs}", "--ranks", "2", cwd=runs)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printable(alone["text"]) + "\n"
    assert too_wide(done.stderr) == []
    assert "over 2 ranks" in done.stderr
    assert "rank 1" in done.stderr
    assert "1.00 tokens a pass" in done.stderr


def test_a_folder_of_trainer_is_read_in_place(llama, tmp_path, capsys):
    """It is a checkpoint, too, for `onefold.load`."""
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(llama, folder)
    (folder / "trainer_state.json").write_text("{}")
    flags = ("--prompt", "abab", "--max-new-tokens", "5")
    found, wanted = (generated(capsys, "--model", str(m), *flags)["text"] for m in (folder, llama))
    assert found == wanted


def test_text_is_that_of_the_resident_model(llama, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    flags = ("--model", str(llama), "--prompt", "abab", "--max-new-tokens", "9")
    found = generated(capsys, *flags, "--budget", "200KiB", "--offload", f"disk:{tmp_path}")
    model = AutoModelForCausalLM.from_pretrained(llama).eval()
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([list(b"abab")])
    with torch.no_grad():
        wanted = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, do_sample=False,
            pad_token_id=0,
        )[0, 4:]  # fmt: skip
    assert found["text"] == bytes(wanted.tolist()).decode("utf-8", "replace")
    assert 0 < len(found["stays"]) < found["num_units"]
    files = generated(capsys, *flags, "--budget", "200KiB", "--offload", "disk")
    assert (files["text"], files["stays"]) == (found["text"], found["stays"])
    assert files["passes"]["nbytes"] == files["expected_nbytes"]
    looked = generated(capsys, *flags, "--lookup")
    assert looked["text"] == found["text"]
    assert looked["passes"]["number"] <= found["passes"]["number"]


def test_keys_and_values_rest_in_tiers(llama, tmp_path, capsys):
    pytest.importorskip("onefold.inference.kv_cache")
    flags = ("--model", str(llama), "--prompt", "abab", "--max-new-tokens", "9")
    plainly = generated(capsys, *flags, "--offload", f"disk:{tmp_path}")
    tiered = generated(capsys, *flags, "--offload", f"disk:{tmp_path}", "--kv-budget", "1KiB")
    assert tiered["text"] == plainly["text"]


@again_but("int4")
@pytest.mark.parametrize("rest", ["int8", "int4"])
def test_packed_weights_rest_in_fewer_bytes(rest, llama, tmp_path, capsys):
    flags = ("--model", str(llama), "--prompt", "abab", "--max-new-tokens", "3", "--offload")
    exact = generated(capsys, *flags, f"disk:{tmp_path}")
    packed = generated(capsys, *flags, f"disk:{tmp_path}", "--rest", rest)
    at_rest, all_bytes = (each["memory"][0]["now"]["weight"] for each in (packed, exact))
    assert at_rest == packed["memory"][0]["expected"]["weight"] < all_bytes
    assert "model.embed_tokens.weight stays exact: an embedding" in packed["notes"]


@pytest.mark.parametrize("rest", [(), ("--rest", "int8")])
def test_a_config_alone_has_random_weights_and_says_so(rest, llama, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("some text"))
    flags = ("--model", f"{llama}/config.json", "--prompt", "-", "--max-new-tokens", "2")
    assert main(["generate", *flags, *rest]) == 0
    shown = capsys.readouterr()
    assert "random weights" in shown.err
    assert "prompt of 9 bytes" in shown.err
    assert too_wide(shown.err.replace(str(llama), "")) == []


def test_drawn_tokens_depend_on_the_seed_alone(capsys):
    flags = ("--model", "tiny", "--prompt", "a", "--max-new-tokens", "8", "--temperature", "1")
    first, again, other = (generated(capsys, *flags, "--seed", seed)["text"] for seed in "112")
    assert first == again
    assert first != other


def test_text_comes_as_soon_as_its_characters_are_complete():
    shown: list[str] = []
    streamer = Streamer(Bytes(), shown.append)
    streamer.put(torch.tensor([[1, 2]]))  # the prompt
    for token in "aé€".encode():
        streamer.put(torch.tensor([token]))
    streamer.put(torch.tensor([0xE2]))
    assert shown == ["a", "é", "€"]
    streamer.end()
    assert streamer.text == "aé€\ufffd"
    assert printable("a\x1b[31m\tb\n") == "a\\x1b[31m\tb\n"


def test_words_of_a_tokenizer_join_to_its_text():
    class Tokenizer:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": list(text.encode())}

        def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
            return bytes(tokens).decode("utf-8", "replace")

    words = Words(Tokenizer())
    assert words.ids_of("ab") == [97, 98]
    parts = [words.text([token]) for token in "é\n€x".encode()]
    assert "".join(parts) == "é\n€x"
    assert words.text([0xE2]) == ""
    assert words.text([], is_last=True) == "\ufffd"


# bad input


def broken_folder(tmp_path: Path, llama: Path, kind: str) -> str:
    folder = tmp_path / "broken"
    folder.mkdir()
    config = json.loads((llama / "config.json").read_text())
    weights = (llama / "model.safetensors").read_bytes()
    if kind == "config alone":
        (folder / "config.json").write_text(json.dumps(config))
    elif kind == "other sizes":
        (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
        (folder / "model.safetensors").write_bytes(weights)
    elif kind == "cut":
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    elif kind == "no model type":
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(weights)
    elif kind == "no config":
        (folder / "model.safetensors").write_bytes(weights)
    elif kind != "empty":
        (folder / "model.safetensors").write_bytes(weights)
        changes = {
            "layers without end": {"num_hidden_layers": 10**9},
            "code of its own": {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}},
        }
        text = json.dumps(config | changes.get(kind, {}))
        (folder / "config.json").write_text("[" * 100_000 if kind == "deep config" else text)
        (folder / "own.py").write_text("raise SystemExit('code was run')")
        if kind == "pipe":
            os.mkfifo(folder / "tokenizer.json")
    return str(folder)


@pytest.mark.parametrize(("kind", "code", "message"), [
    ("config alone", 2, "safetensors files or a checkpoint"),
    ("empty", 2, "safetensors files or a checkpoint"),
    ("other sizes", 1, "to have the parameters of the module"),
    ("cut", 1, "safetensors"),
    ("no model type", 2, "model_type"),
    ("no config", 2, "a config.json next to the weights"),
    ("layers without end", 1, "a config.json of at most"),
    ("code of its own", 2, "to describe a language model"),
    ("deep config", 2, "a readable Hugging Face config.json"),
    ("pipe", 1, "regular files"),
])  # fmt: skip
def test_a_folder_that_cannot_work_is_an_error_that_names_it(
    kind, code, message, llama, tmp_path, capsys
):
    folder = broken_folder(tmp_path, llama, kind)
    assert main(["generate", "--model", folder, "--prompt", "a"]) == code
    error = capsys.readouterr().err
    assert message in error
    assert "broken" in error
    assert "hint:" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(("flags", "message"), [
    (("--model", "/no/such/folder"), "which is not there"),
    (("--model", "tiny", "--budget", "much"), "--budget to be a number above 0 with a unit"),
    (("--model", "tiny", "--budget", "4KiB", "--offload", "disk:."), "a budget of at least"),
    (("--model", "tiny", "--rest", "int3"), "--rest to be int8 or int4"),
    (("--model", "tiny", "--offload", "tape"), "--offload to be cpu, disk:PATH, disk or none"),
    (("--model", "tiny", "--offload", "disk:"), "--offload to be cpu, disk:PATH, disk or none"),
    (("--model", "tiny", "--offload", "disk"), "exact weights in files for --offload disk"),
    (("--model", "tiny", "--max-new-tokens", "0"), "--max-new-tokens to be a whole number"),
    (("--model", "tiny", "--ranks", "0"), "--ranks to be a whole number"),
    (("--model", "tiny", "--temperature", "-1"), "--temperature to be a number"),
    (("--model", "tiny", "--lookup"), "a Hugging Face model for --lookup"),
    (("--model", "tiny", "--kv-budget", "1MiB"), "a Hugging Face model for --kv-budget"),
    (("--model", "tiny", "--prompt", " "), "a prompt"),
])  # fmt: skip
def test_a_flag_that_cannot_work_is_an_error_that_names_it(flags, message, capsys):
    assert main(["generate", "--prompt", "a", *flags]) == 2
    assert message in capsys.readouterr().err


def test_errors_of_a_model_are_named_before_its_weights_are_read(llama, capsys, monkeypatch):
    flags = ["generate", "--model", str(llama), "--prompt", "a"]
    assert main([*flags, "--max-new-tokens", "200"]) == 2
    assert "at most 128 tokens" in capsys.readouterr().err
    assert main([*flags, "--kv-budget", "1MiB"]) == 2
    assert "a folder for keys and values" in capsys.readouterr().err
    monkeypatch.setattr("onefold.planner.models.loader.find_spec", lambda _: None)
    assert main(flags) == 2
    assert "pip install 'transformers>=" in capsys.readouterr().err


def test_a_path_that_is_not_there_ends_all_ranks(runs, tmp_path):
    flags = ("--model", "out", "--prompt", "a", "--ranks", "2", "--offload", "disk:/no/folder")
    done = command("generate", *flags, cwd=runs)
    assert done.returncode == 1
    assert "/no/folder" in done.stderr
    assert "Traceback" not in done.stderr


# plan


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["plan", "--inference", *flags, "--json"]) in (0, 2)
    return json.loads(capsys.readouterr().out)


def test_a_plan_says_whether_it_fits_and_how_fast(capsys):
    flags = ("--model", "large", "--gpus", "1", "--cluster", "h100-80", "--context", "128")
    whole = planned(capsys, *flags)
    assert (whole["offload"], whole["read_a_pass"]) == ("none", 0)
    some = planned(capsys, *flags, "--budget", "2GiB", "--offload", "cpu")
    packed = planned(capsys, *flags, "--budget", "2GiB", "--offload", "cpu", "--rest", "int8")
    moving = some["at_rest"] - some["stay"]
    assert 0.99 * moving < some["read_a_pass"] <= moving  # less the tables
    assert packed["at_rest"] < 0.3 * some["at_rest"]
    assert some["one"]["tokens_per_s"] < whole["one"]["tokens_per_s"]
    assert some["one"]["bound"] == "host"
    assert some["best"]["tokens_per_s"] >= some["one"]["tokens_per_s"]
    little = planned(capsys, *flags, "--offload", "cpu", "--host-mem", "1GiB")
    assert not little["fits"]
    assert list(little["missing"]) == ["host"]


@again_but("flags2")
@pytest.mark.parametrize("flags", [
    ("--model", "large", "--gpus", "2", "--mem", "2GiB"),
    ("--model", "large", "--gpus", "1", "--cluster", "h100-80", "--budget", "1GiB"),
    ("--model", "tiny", "--ranks", "2", "--budget", "2MiB", "--offload", "disk"),
])  # fmt: skip
def test_a_plan_of_inference_has_80_columns(flags, capsys):
    assert main(["plan", "--inference", *flags]) == 0
    shown = capsys.readouterr().out
    assert too_wide(shown) == []
    assert "onefold generate" in shown
    assert "fits          yes" in shown


def test_a_plan_of_inference_on_cpu_ranks_has_bytes_and_no_times(capsys):
    assert main(["plan", "--inference", "--model", "tiny", "--ranks", "2"]) == 0
    shown = capsys.readouterr().out
    assert ["batch", "memory"] in [line.split() for line in shown.splitlines()]
    assert "the largest power of two that fits" in shown
    for word in ("tokens/s", "measured", "?", "gain less"):
        assert word not in shown


def test_a_pass_of_an_encoder_decoder_reads_its_decoder(tmp_path, capsys):
    pytest.importorskip("transformers")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2}
    config = {"model_type": "t5", "vocab_size": 256, "is_encoder_decoder": True, **sizes,
              "decoder_start_token_id": 0, "pad_token_id": 0}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ("--model", f"{tmp_path}/config.json", "--budget", "80KiB", "--offload")
    plan = planned(capsys, *flags, f"disk:{tmp_path}", "--ranks", "1")
    found = generated(capsys, *flags, f"disk:{tmp_path}", "--prompt", "ab", "--max-new-tokens", "9")
    assert (found["num_tokens"], found["passes"]["number"]) == (9, 9)
    assert 0 < plan["read_a_pass"] == found["passes"]["nbytes"] < 0.7 * plan["at_rest"]
    assert (
        plan["kv_nbytes_a_token"] == 2 * 2 * 3 * 2 * 8 * 4
    )  # keys, values; of both kinds; layers ...
    kept = ("--kv-budget", "1MiB", "--offload", f"disk:{tmp_path}")
    assert main(["generate", *flags[:2], "--prompt", "ab", *kept]) == 2
    assert "a decoder-only model for --kv-budget" in capsys.readouterr().err


def test_a_plan_without_a_trace_says_what_it_estimates():
    class Chooses(GPT):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) if tokens.sum() >= 0 else tokens

    with torch.device("meta"):
        module = Chooses(SIZES, SEQ)
    ask = InferenceAsk(
        budget=200_000, rest=None, offload="disk", ranks=1, device_type="cpu", context=SEQ,
        batch=None, memory=1 << 30,
    )  # fmt: skip
    made = plan_inference(module, ask)
    assert "cannot be traced" in made.estimates[0]
    assert made.held.read == plan_inference(plain(), ask).held.read


@again_but("flags1---budget with --inference", "flags4-a budget of at")
@pytest.mark.parametrize(("flags", "message"), [
    (("--inference", "--stage", "3"), "--stage without --inference"),
    (("--budget", "1GiB"), "--budget with --inference"),
    (("--inference", "--rest", "int3"), "--rest to be int8 or int4"),
    (("--inference", "--offload", "tape"), "--offload to be auto, none, cpu or disk"),
    (("--inference", "--ranks", "1", "--budget", "4KiB", "--offload", "disk"), "a budget of at"),
])  # fmt: skip
def test_a_plan_that_cannot_work_is_an_error_that_names_the_flag(flags, message, capsys):
    assert main(["plan", "--model", "tiny", *flags]) == 2
    assert message in capsys.readouterr().err
