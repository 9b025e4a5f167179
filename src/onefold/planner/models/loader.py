"""Build models by name: a preset, a Hugging Face config.json, or a function of the user's.

`refuse` checks a name before any rank starts; `build_model` builds the module.
"""

import json
import os
import shutil
import sys
import sysconfig
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from onefold.config import PRECISIONS, check_word
from onefold.errors import ConfigError
from onefold.layout.units import repeated_blocks
from onefold.planner.models.gpt import GPT, PRESETS, VOCAB
from onefold.planner.trace import without_values
from onefold.tier import accelerator
from onefold.tier.host import no_garbage
from onefold.versions import install_command

DtypeWord = Literal["fp32", "bf16", "fp16"]
"""The words of `--dtype` and `onefold.plan(dtype=)`."""
SWITCHES = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
"""Methods of models of transformers, the newest first."""


def refuse(model: str, seq: int) -> None:
    """Raise `ConfigError` for a model that cannot be built, without building it."""
    if model in PRESETS:
        return
    if is_config(model):
        _check_numbers(model, seq)
    elif ":" in model:
        load_function(model)
    else:
        names = [*PRESETS, *published()]
        known = f"a model that is {', '.join(names)}, a config.json or module:function"
        close = get_close_matches(model.lower(), names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "a function has a colon: module:function"
        if "/" in model:
            hint = "there is no such folder, and nothing is downloaded: "
            hint += f"`hf download {model} config.json --local-dir DIR`, then --model DIR"
        raise ConfigError(known, repr(model), hint=hint)


def build_model(
    model: str, seq: int, *, is_cut: bool = False, dtype: DtypeWord | None = None
) -> nn.Module:
    """Build the module that `model` names, for rows of up to `seq` tokens.

    Presets are built on `meta` and filled by `onefold.shard`: no rank ever holds a whole one.
    `is_cut`: model axes will cut it first, so it is built whole, with the same values. `dtype`: of
    the weights; None: that of the configuration, else fp32.
    """
    chosen = dtype_of(dtype)
    if model in PRESETS:
        with torch.device("cpu" if is_cut else "meta"):
            return GPT(PRESETS[model], seq).to(chosen)
    if is_config(model):
        return _from_config(model, seq, chosen)
    if chosen is not None:
        raise own_dtype(repr(model))
    return call_function(model, load_function(model), nn.Module)


def dtype_of(word: str | None) -> torch.dtype | None:
    """Return the dtype of weights that `word` names; None for None. Raises `ConfigError`."""
    if word is None:
        return None
    hint = "leave it out for the dtype of the model's configuration"
    check_word("dtype", word, tuple(PRECISIONS), hint)
    return PRECISIONS[word].compute


def own_dtype(name: str) -> ConfigError:
    """Return the error for `dtype` with a module that its owner builds."""
    wanted = "dtype with a preset or a Hugging Face configuration"
    return ConfigError(wanted, name, hint="build the module in that dtype: model.bfloat16()")


def named_model(
    model: nn.Module | str | os.PathLike[str], seq: int, *, recomputes: bool,
    dtype: DtypeWord | None = None,
) -> tuple[str, nn.Module]:  # fmt: skip
    """Return the name of a model and the model that trains, without values if it was named.

    A module that was passed, and can be switched to recompute its blocks, is copied for that.
    """
    if isinstance(model, nn.Module):
        if dtype is not None:
            raise own_dtype("a module")
        name = type(model).__name__
        if recomputes and recompute_line(model):
            model = without_values(model)
            recompute(model, name)
        return name, model.train()
    name = os.fspath(model)
    refuse(name, seq)
    with torch.device("meta"):
        module = build_model(name, seq, dtype=dtype)
    if recomputes:
        recompute(module, name)
    return name, module.train()


def recompute_line(model: nn.Module) -> str:
    """Return the statement that lets `model` recompute its blocks; empty if it has no switch."""
    if isinstance(model, GPT):
        return "model.recomputes = True"
    switch = next((name for name in SWITCHES if callable(getattr(model, name, None))), "")
    return f"model.{switch}()" if switch else ""


def recompute(model: nn.Module, name: str) -> None:
    """Let the model keep only the inputs of its blocks, and run them again in backward."""
    switch = recompute_line(model).removeprefix("model.").removesuffix("()")
    if isinstance(model, GPT):
        model.recomputes = True
    elif switch:
        getattr(model, switch)()
    else:
        wanted = "a preset or a Hugging Face model to recompute activations of"
        hint = "call torch.utils.checkpoint in the module's own forward"
        raise ConfigError(wanted, repr(name), hint=hint)


def check_compiler() -> None:
    """Raise `ConfigError` where torch.compile has no C++ compiler to make CPU code with."""
    compiler = os.environ.get("CXX", "g++")
    if accelerator.kind() is None and shutil.which(compiler) is None:
        got = f"no {compiler!r} on the PATH"
        hint = "install g++, name another compiler in CXX, or leave --compile out"
        raise ConfigError("a C++ compiler for torch.compile", got, hint=hint)


def compile_blocks(model: nn.Module) -> None:
    """Let torch.compile run the repeated blocks, of which equal ones share one graph."""
    for block in repeated_blocks(model) or [model]:
        block.compile()


def default_lr(model: str) -> float:
    """Return a peak learning rate that suits the preset; a careful one for other models."""
    return PRESETS[model].lr if model in PRESETS else 3e-4


def logits_of(module: nn.Module, tokens: Tensor) -> Tensor:
    """Return logits [B, T, V] for tokens [B, T]: the module's output, or its `.logits`."""
    output = module(tokens)
    logits = getattr(output, "logits", output)
    shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if not isinstance(shape, list) or shape[:-1] != list(tokens.shape) or shape[-1] < VOCAB:
        wanted = f"the model to give logits {[*tokens.shape, VOCAB]} or wider for its tokens"
        hint = "return [batch, positions, vocabulary] logits, or an object with .logits; "
        hint += "tokens are bytes, so the vocabulary is at least 256"
        raise ConfigError(wanted, shape, hint=hint)
    return logits


def load_function(name: str) -> Callable[[], Any]:
    """Import `module:function`. The module may be in the working directory."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        hint = "it names a function that is called without arguments, as in package.models:build"
        raise ConfigError("module:function", repr(name), hint=hint)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function: Any = import_module(module_name)
        for part in function_name.split("."):
            function = getattr(function, part)
    except (Exception, SystemExit) as error:
        hint = "name an importable module and a function in it, as in package.models:build"
        raise ConfigError(f"{name!r} to import", described(error), hint=hint) from error
    if not callable(function):
        got = f"type {type(function).__name__}"
        hint = "it is called without arguments and returns a torch.nn.Module"
        raise ConfigError(f"{name!r} to be a function", got, hint=hint)
    return function


def call_function(name: str, function: Callable[[], Any], wanted: type | tuple[type, ...]) -> Any:
    """Call the user's function, and check that it returns a `wanted`."""
    kinds = wanted if isinstance(wanted, tuple) else (wanted,)
    meaning = f"{name}() to return a {' or '.join(kind.__name__ for kind in kinds)}"
    try:
        result = function()
    except Exception as error:
        hint = "it is called without arguments"
        raise ConfigError(meaning, described(error), hint=hint) from error
    if not isinstance(result, kinds):
        hint = "return the module itself"
        raise ConfigError(meaning, f"type {type(result).__name__}", hint=hint)
    return result


def described(error: BaseException) -> str:
    """Describe an exception in one line, with the line of the user's file that led to it."""
    text = str(error).strip().splitlines()
    line = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    not_theirs = (sysconfig.get_paths()["stdlib"], __file__, "<frozen")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(not_theirs):
            return f"{line} ({Path(frame.filename).name}:{frame.lineno})"
    return line


# Hugging Face


def published() -> dict[str, Path]:
    """Return the configurations of published models, by the names of these presets."""
    return {path.stem: path for path in sorted(Path(__file__).with_name("presets").iterdir())}


def is_config(model: str) -> bool:
    return model.endswith(".json") or model in published() or Path(model).exists()


def config_path(model: str) -> Path:
    path = published().get(model) or Path(model)
    return path / "config.json" if path.is_dir() else path


def check_config(path: Path) -> dict[str, Any]:
    """Return a Hugging Face config.json from which a model can be built."""
    try:
        if path.exists() and not path.is_file():
            raise OSError("not a regular file")
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        wanted = f"a readable Hugging Face config.json at {str(path)!r}"
        hint = "pass the config.json itself, or the folder that holds it"
        raise ConfigError(wanted, described(error), hint=hint) from error
    if not isinstance(config, dict) or "model_type" not in config:
        hint = "pass the config.json of a Hugging Face language model"
        raise ConfigError(f"{str(path)!r} to have a model_type", "a file without it", hint=hint)
    if find_spec("transformers") is None:
        wanted = "the transformers package, to build a model from its config"
        hint = f"{install_command('transformers', 'accelerate')}, or install onefold[hf]; "
        hint += "byte models need no package"
        raise ConfigError(wanted, "an environment without it", hint=hint)
    return config


def _check_numbers(model: str, seq: int) -> None:
    """Check for 256 tokens, one of each byte, and for enough positions."""
    path = config_path(model)
    config = check_config(path)
    vocab = config.get("vocab_size", VOCAB)
    if isinstance(vocab, int) and vocab < VOCAB:
        hint = "tokens are bytes: set vocab_size to 256 or more"
        raise ConfigError(f"{str(path)!r} to have {VOCAB} tokens", vocab, hint=hint)
    limit = config.get("max_position_embeddings") or config.get("n_positions") or seq
    if isinstance(limit, int) and limit < seq and not config.get("is_encoder_decoder"):
        hint = f"pass --seq {limit} or less"
        what = f"rows of at most {limit} tokens for {str(path)!r}"
        raise ConfigError(what, f"--seq {seq}", hint=hint)


def _given_config(model: str) -> Path | None:
    """Return a user's configuration; None for a published one, and for byte models in a folder."""
    path = config_path(model)
    return None if model in published() or not path.is_file() else path


def left_out(
    model: str, module: nn.Module, *, dtype: str | None = None, otherwise: str = ""
) -> tuple[str, ...]:
    """Say what a plan of `module`, built from the configuration `model`, does not count.

    `dtype`: the one that was requested. `otherwise`: how to request one.
    """
    if (path := _given_config(model)) is None:
        return ()
    config, own = check_config(path), str(next(module.parameters()).dtype)
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    counted = f"weights are counted in {own.removeprefix('torch.')}"
    notes: list[str] = []
    if isinstance(quantized := config.get("quantization_config"), dict):
        method = quantized.get("quant_method", "without a quant_method")
        notes.append(f"{counted}: quantization_config ({method}) is not planned")
    elif dtype is None and not any(part.get("dtype") or part.get("torch_dtype") for part in parts):
        unknown = f"{counted}, as {path.name} names no dtype; its files may have another one"
        notes.append(unknown + otherwise)
    return (*notes, *parts_left_out(model, module))


def parts_left_out(model: str, module: nn.Module) -> tuple[str, ...]:
    """Say which parts of the model of the configuration `model` are not in `module`."""
    if (path := _given_config(model)) is None:
        return ()
    import transformers

    named = str((check_config(path).get("architectures") or [""])[0])
    kind: Any = getattr(transformers, named, type(module))
    if kind is type(module):
        return ()
    try:
        whole_config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.device("meta"):
            whole = kind(whole_config)
    except Exception as error:  # whatever a model's own code raises
        unknown = f"{kind.__name__} may have parts that are left out: it cannot be built"
        return (f"{unknown} ({type(error).__name__}: {str(error)[:80]})",)
    mine, all_of_it = (sum(p.numel() for p in m.parameters()) for m in (module, whole))
    missing = f"{all_of_it - mine:,} of the {all_of_it:,} parameters of {kind.__name__} are left "
    missing += f"out: this is the {type(module).__name__} in it"
    return (missing,) if mine < all_of_it else ()


def _from_config(model: str, seq: int, dtype: torch.dtype | None) -> nn.Module:
    _check_numbers(model, seq)
    try:
        with no_garbage():  # collecting garbage is a quarter of transformers' import time
            from transformers import AutoConfig, AutoModelForCausalLM

            config = AutoConfig.from_pretrained(
                config_path(model), local_files_only=True, trust_remote_code=False
            )
            if config.is_encoder_decoder:
                raise TypeError(f"{config.model_type} has an encoder too, and takes two texts")
            config.use_cache = False
            wanted = {} if dtype is None else {"dtype": dtype}
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **wanted)
    except Exception as error:
        wanted = f"{model!r} to describe a causal language model"
        hint = "AutoModelForCausalLM.from_config must be able to build it"
        raise ConfigError(wanted, described(error), hint=hint) from error
