"""Find the model that a name stands for, and build it without values.

a folder with config.json and *.safetensors   a Hugging Face model, read by each rank
a folder with *.safetensors alone             the byte GPT, as `onefold export` writes it
a checkpoint, or a folder of them             exported into a temporary folder first
config.json, a preset, module:function        random weights
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

import onefold
from onefold.checkpoint.checked_files import nbytes_of
from onefold.checkpoint.directory import find
from onefold.checkpoint.offline import export
from onefold.checkpoint.safetensors import PretrainedFiles
from onefold.errors import CheckpointError, ConfigError
from onefold.foreign import PEERS
from onefold.planner.models.gpt import GPT, PRESETS, VOCAB
from onefold.planner.models.loader import (
    DtypeWord,
    build_model,
    check_config,
    config_path,
    described,
    dtype_of,
    is_config,
    published,
    refuse,
)
from onefold.tier.host import no_garbage

CONFIG = "config.json"
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model",
              "vocab.json", "vocab.txt")  # fmt: skip
"""Files that say that a folder has a tokenizer."""

ENCODERS = frozenset({
    "bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
    "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta",
    "xlm-roberta-xl", "xmod",
})  # fmt: skip
"""Types of models of transformers 5.23 that see the tokens after the one that they would predict,
unless their configuration or their class says otherwise."""

LONGEST = 1024
"""Tokens that a preset without weights has positions for."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model to generate with. `files`: the folder of its weights; None: random weights."""

    name: str
    config: Path | None  # of a Hugging Face model
    files: Path | None

    @property
    def note(self) -> str:
        """What a user should know about the weights; empty if they are as expected."""
        return "random weights: the text has no meaning" if self.files is None else ""


@contextmanager
def opened(model: str) -> Iterator[ModelSource]:
    """Yield the source that `model` names; a checkpoint is exported for as long as it is used.

    Raises `ConfigError` for a name that is none, and `CheckpointError` for a damaged checkpoint.
    """
    path = Path(model)
    is_saved = path.is_dir() and is_checkpoint(path)  # its files are safetensors, too
    if not path.is_dir() or (any(path.glob("*.safetensors")) and not is_saved):
        yield _of_files(model)
        return
    if not is_saved:
        raise _without_weights(model, "safetensors files or a checkpoint")
    with TemporaryDirectory(prefix="onefold_") as folder:
        target = Path(folder, "weights")
        export(path, target, PEERS)
        yield replace(_of_files(str(target)), name=model)


def _without_weights(model: str, wanted: str) -> ConfigError:
    path = Path(model)
    got = f"a folder with a {CONFIG} alone" if (path / CONFIG).exists() else "neither there"
    hint = f"--model {model}/{CONFIG} takes random weights; `onefold inspect` lists checkpoints"
    if is_checkpoint(path):
        got, hint = "a checkpoint", f"`onefold export {model} OUT` writes its weights: --model OUT"
    return ConfigError(f"{wanted} in --model {model!r}", got, hint=hint)


def check_trained(model: str, seq: int) -> None:
    """Raise `ConfigError` for a model that cannot be trained on rows of `seq` bytes."""
    path = Path(model)
    if not path.is_dir():
        refuse(model, seq)
        if is_config(model):
            _refuse_encoder(config_path(model))
        return
    if not any(path.glob("*.safetensors")) or is_checkpoint(path):
        raise _without_weights(model, "safetensors files")
    if _of_files(model).config is not None:  # no encoder
        refuse(model, seq)
        return
    longest = _byte_gpt(path).positions.num_embeddings
    if longest < seq:
        hint = f"pass --seq {longest} or less"
        raise ConfigError(f"rows of at most {longest} bytes for {model!r}", seq, hint=hint)


def build_trained(
    model: str, seq: int, *, is_cut: bool, dtype: DtypeWord | None = None
) -> nn.Module:
    """Build the module that a run trains: of a folder, on `meta`, with its files' values promised.

    That of a configuration is built on `meta`, too, and filled by `onefold.shard`. `is_cut` and
    `dtype`: as in `build_model`.
    """
    path = Path(model)
    on_meta = not is_cut and is_config(model)
    with torch.device("meta") if on_meta or path.is_dir() else nullcontext():
        if not path.is_dir():
            return build_model(model, seq, is_cut=is_cut, dtype=dtype)
        if (path / CONFIG).exists():
            module = build_model(model, seq, dtype=dtype)
        else:
            module = _byte_gpt(path).to(dtype_of(dtype))
    return onefold.load_pretrained(module, path)


def is_checkpoint(path: Path) -> bool:
    """True for a checkpoint, or a directory of them.

    False for a folder that transformers opens, also one of Trainer: its weights are read in place.
    """
    try:
        newest = find(path, PEERS)[0]
    except (CheckpointError, OSError):
        return False
    return newest.manifest is not None or not any(path.glob("model*.safetensors"))


def _of_files(model: str) -> ModelSource:
    path = published().get(model) or Path(model)
    is_folder = path.is_dir()
    config = path / CONFIG if is_folder else path
    has_config = config.exists() if is_folder else path.suffix == ".json"
    if is_folder:
        _check_files(path)
    if has_config:
        _refuse_encoder(config)
    if is_folder or has_config:
        return ModelSource(model, config if has_config else None, path if is_folder else None)
    if model not in PRESETS and ":" not in model:
        names = ", ".join([*PRESETS, *published()])
        known = f"a folder of weights, a {CONFIG}, {names} or module:function"
        got = f"{model!r}, which is {'a file' if path.exists() else 'not there'}"
        hint = "name the folder that holds the safetensors files"
        raise ConfigError(f"--model to be {known}", got, hint=hint)
    refuse(model, LONGEST)
    return ModelSource(model, None, None)


def _refuse_encoder(path: Path) -> None:
    """Raise `ConfigError` for a config.json of an encoder, or of no model."""
    config = check_config(path)
    classes = str(config.get("architectures"))
    writes = config.get("is_decoder") or "ForCausalLM" in classes or "LMHeadModel" in classes
    if config["model_type"] in ENCODERS and not writes:
        wanted = f"a model that continues text in {str(path)!r}"
        hint = "an encoder sees the next token: train it in a loop of your own, with onefold.shard"
        raise ConfigError(wanted, f"{config['model_type']}, an encoder", hint=hint)


def _check_files(folder: Path) -> None:
    """Raise `CheckpointError` for a pipe or a device, which would be read without end."""
    for path in folder.iterdir():
        try:
            if not path.is_dir():
                nbytes_of(path)
        except OSError as error:
            hint = "download or save the folder again"
            wanted = f"regular files in {str(folder)!r}"
            raise CheckpointError(wanted, f"{path.name!r}: {error.strerror}", hint=hint) from error


def build(source: ModelSource, *, has_values: bool = False) -> nn.Module:
    """Build the module, on `meta`; with `has_values` one of random weights on the CPU.

    A module with files has promised values (`onefold.load_pretrained`).
    """
    module = skeleton(source, has_values=has_values)
    if source.files is not None:
        onefold.load_pretrained(module, source.files)
    return module.eval()


def skeleton(source: ModelSource, *, has_values: bool = False) -> nn.Module:
    """Build the module without its files' values."""
    if source.config is not None:
        module = _of_config(source, source.config, has_values=has_values and source.files is None)
    elif source.files is not None:
        module = _byte_gpt(source.files)
    else:
        module = build_model(source.name, LONGEST)
        if has_values and isinstance(module, GPT):
            module = GPT(PRESETS[source.name], LONGEST)
    return module.eval()


def _of_config(source: ModelSource, path: Path, *, has_values: bool) -> nn.Module:
    try:
        with no_garbage():  # collecting garbage is a quarter of transformers' import time
            from transformers import (
                AutoConfig,
                AutoModelForCausalLM,
                AutoModelForSeq2SeqLM,
                GenerationConfig,
            )
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        if source.files is not None:
            _check_layers(config, source.files)
        kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        with nullcontext() if has_values else torch.device("meta"):
            module = kind.from_config(config, trust_remote_code=False)
        if (path.parent / "generation_config.json").exists():
            options = GenerationConfig.from_pretrained(path.parent, local_files_only=True)
            module.generation_config = options
    except CheckpointError:
        raise
    except Exception as error:
        wanted = f"{str(path)!r} to describe a language model that generates"
        hint = "AutoModelForCausalLM.from_config must be able to build it"
        raise ConfigError(wanted, described(error), hint=hint) from error
    return module


def _check_layers(config: Any, folder: Path) -> None:
    """Raise `CheckpointError` for more layers than tensors: building them might never end."""
    num_tensors = len(PretrainedFiles(folder).places)
    layers = getattr(config, "num_hidden_layers", 0)
    if not isinstance(layers, int) or layers > num_tensors:
        wanted = f"a {CONFIG} of at most {num_tensors} layers, one a tensor, in {str(folder)!r}"
        raise CheckpointError(wanted, f"{layers!r:.40}", hint="download or save the folder again")


def _byte_gpt(folder: Path) -> GPT:
    """Build the GPT whose sizes the tensors in the files have."""
    files = PretrainedFiles(folder)
    try:
        seq, width = files.shape("positions.weight")
        named = (name.split(".") for name in files.places)
        layers = 1 + max(int(parts[1]) for parts in named if parts[0] == "blocks")
    except (KeyError, ValueError, IndexError):
        seq, width, layers = 0, 0, 0
    presets = {(preset.num_layers, preset.width): preset for preset in PRESETS.values()}
    config = presets.get((layers, width))
    if config is None:
        got = "none, and weights of another model than the byte GPT"
        hint = "save with onefold.save_pretrained, which writes it, or copy it there"
        raise ConfigError(f"a {CONFIG} next to the weights in {str(folder)!r}", got, hint=hint)
    is_tied = "head.weight" not in files.places
    with torch.device("meta"):
        return GPT(replace(config, is_tied=is_tied), seq)


def tokenizer_of(source: ModelSource) -> Any:
    """Return the tokenizer beside the configuration; None where bytes are the tokens."""
    if source.config is None:
        return None
    folder = source.config.parent
    if not any((folder / name).exists() for name in TOKENIZERS):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        hint = "without tokenizer files, bytes are the tokens"
        wanted = f"a tokenizer that loads in {str(folder)!r}"
        raise ConfigError(wanted, described(error), hint=hint) from error


def check_bytes(module: nn.Module, source: ModelSource) -> None:
    """Raise `ConfigError` for a model without a tokenizer that has no token for each byte."""
    vocab = getattr(getattr(module, "config", None), "vocab_size", VOCAB)
    if isinstance(vocab, int) and vocab < VOCAB:
        wanted = f"a tokenizer next to {str(source.config)!r}, or {VOCAB} tokens, one for each byte"
        hint = "copy tokenizer.json there"
        raise ConfigError(wanted, f"no tokenizer, and {vocab} tokens", hint=hint)
