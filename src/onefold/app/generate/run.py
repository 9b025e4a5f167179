"""Generate for `onefold generate`: an ordinary script around one call of `onefold.stream`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import onefold
from onefold.app.generate import sources
from onefold.app.generate.sources import ModelSource
from onefold.app.generate.tokens import TEMPERATURE, Bytes, Streamer, Tokens, Words, sampled_bytes
from onefold.app.train.job import GenerateJob
from onefold.app.train.memory_table import MeasuredMemory, measure
from onefold.engine.engine import Engine
from onefold.engine.registry import engine_of
from onefold.errors import ConfigError, listed
from onefold.fit.rates import RateRow, blocks_of, crossing, in_rounds
from onefold.planner.models.gpt import GPT
from onefold.planner.passes import Use, streamed_nbytes, verb_of
from onefold.recipe import Recipe
from onefold.text import format_bytes
from onefold.tier.disk import BlockFile, DiskStore
from onefold.tier.files import FileStore
from onefold.wire.world import World

if TYPE_CHECKING:
    from onefold.inference.kv_cache import KVReport

MAX_NOTES = 4
"""Matrices that rest exact, by name; of more their number is enough."""

WARM_PASSES = 3
"""Passes that are not measured: the first reads units that stay, the next ones learn the order."""

RATE_S = 0.2
"""Seconds for which the way of weights is measured, about."""

LOOKUP_TOKENS = 10
"""Tokens that prompt lookup proposes for a pass: as many as transformers' documentation takes."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A module whose weights stream, and the tokens it works with."""

    module: nn.Module
    tokens: Tokens
    prompt: list[int]
    num_parameters: int
    source: ModelSource
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class Passes:
    """Forwards of the whole module. Bytes and seconds are means over those after the warm-up."""

    number: int
    seconds: float  # of a pass
    nbytes: int  # that this rank read from its tier in a pass
    is_warm: bool  # False: too few passes; then the first ones count


class PassMeter:
    """Counts the forwards of a module, and the bytes that its disk tier reads."""

    def __init__(self, module: nn.Module) -> None:
        self._engine = engine_of(module)
        self.number = 0
        self.first_s = 0.0  # when the first pass was over
        self.begun_s = time.perf_counter()
        self._from = (0, self.begun_s, self._nbytes_read())
        module.register_forward_hook(lambda *_: self._passed())

    def _passed(self) -> None:
        self.number += 1
        if self.number == 1:
            self.first_s = time.perf_counter()
        if self.number == WARM_PASSES:
            self._from = (self.number, time.perf_counter(), self._nbytes_read())

    def passes(self) -> Passes:
        """Return the means, once the last pass is over."""
        now, read = time.perf_counter(), self._nbytes_read()
        first, begun, before = self._from
        if first == self.number:  # no pass since
            first, begun, before = 0, self.begun_s, 0
        number = max(1, self.number - first)
        return Passes(
            self.number, (now - begun) / number, round((read - before) / number), first > 0
        )

    def _nbytes_read(self) -> int:
        """Bytes read so far, those of the next pass that are under way included."""
        for unit in self._engine.units:
            unit.await_reads()
        return sum(file.read_nbytes for file in files_of(self._engine))


def files_of(engine: Engine) -> Sequence[BlockFile]:
    """Return the files in which this rank's weights rest; none without a disk tier."""
    store = engine.context.tiers.weight
    return store.files if isinstance(store, DiskStore | FileStore) else []


@dataclass(frozen=True, slots=True)
class WeightLink:
    """The slowest way that weights take in a pass. `rate` is 0 where it was not measured."""

    name: str  # "disk", "copies to the device", "other ranks"; empty: nothing moves
    rate: float  # bytes per second, of this rank

    def share(self, passes: Passes) -> float:
        """Return the part of the rate that passes reach."""
        return passes.nbytes / passes.seconds / self.rate if self.rate else 0.0


@dataclass(frozen=True, slots=True)
class Generated:
    """The result of a run; text and numbers of tokens are the same on every rank."""

    text: str
    num_prompt: int
    num_tokens: int
    seconds: float  # from the first pass to the last token
    first_seconds: float  # of the first pass, which reads the prompt and all weights
    passes: Passes
    link: WeightLink
    budget: int
    stays: list[str]  # names of units
    num_units: int
    stay_nbytes: int  # unsharded bytes of units that stay
    expected_nbytes: int  # that a pass reads on this rank, by the closed form
    memory: list[MeasuredMemory]  # by rank
    notes: list[str]

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / max(1e-9, self.seconds)

    @property
    def tokens_a_pass(self) -> float:
        return self.num_tokens / max(1, self.passes.number)


def preflight(job: GenerateJob, source: ModelSource) -> None:
    """Refuse a job that cannot work, before any rank starts."""
    if not job.prompt.strip():
        hint = "--prompt TEXT, or --prompt - and text on stdin"
        raise ConfigError("a prompt", "an empty one", hint=hint)
    if source.config is None:
        for flag, is_set in (("--lookup", job.lookup), ("--kv-budget", job.kv_budget)):
            if is_set:
                hint = f"leave {flag} out: byte models have no KV cache"
                wanted = f"a Hugging Face model for {flag}"
                raise ConfigError(wanted, f"{job.model!r}", hint=hint)
    if job.offload == "disk" and (source.files is None or job.rest is not None):
        got = f"--rest {job.rest}" if job.rest else "random weights"
        hint = "--offload disk:PATH; disk alone reads the files of --model themselves"
        wanted = "exact weights in files for --offload disk"
        raise ConfigError(wanted, got, hint=hint)
    if job.kv_budget is not None and not job.folders:
        hint = "--offload disk:PATH"
        wanted = "a folder for keys and values beyond --kv-budget"
        raise ConfigError(wanted, f"--offload {job.offload}", hint=hint)


def load(job: GenerateJob, source: ModelSource, mesh: Any = None) -> Loaded:
    """Build the module, check the prompt against it, and stream its weights. A collective."""
    torch.manual_seed(job.seed)
    module = sources.build(source, has_values=source.files is None and job.rest is not None)
    tokenizer = sources.tokenizer_of(source)
    tokens: Tokens = Bytes() if tokenizer is None else Words(tokenizer)
    if tokenizer is None:
        sources.check_bytes(module, source)
    prompt = tokens.ids_of(job.prompt)
    _check_length(module, len(prompt), job)
    numel = sum(parameter.numel() for parameter in module.parameters())
    onefold.stream(module, budget=job.budget, rest=job.rest, offload=job.offload, mesh=mesh)
    return Loaded(module, tokens, prompt, numel, source, engine_of(module).recipe)


def _check_length(module: nn.Module, length: int, job: GenerateJob) -> None:
    config = getattr(module, "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int) and length + job.max_new_tokens > limit:
        got = f"{length:,} of the prompt and {job.max_new_tokens:,} new ones"
        hint = f"--max-new-tokens {limit - length}" if length < limit else "a shorter prompt"
        raise ConfigError(f"at most {limit:,} tokens for {job.model!r}", got, hint=hint)


def generate(
    job: GenerateJob, loaded: Loaded, world: World, show: Callable[[str], object]
) -> Generated:
    """Generate, and measure. A collective; `show` receives text as it comes."""
    module, engine = loaded.module, engine_of(loaded.module)
    streamer, meter = Streamer(loaded.tokens, show), PassMeter(module)
    begun, cache = time.perf_counter(), None
    if loaded.source.config is not None:
        cache = _generate(job, loaded, streamer)
    else:
        _write_bytes(job, loaded, engine.context.store.device, streamer)
    seconds = time.perf_counter() - begun
    passes, link = _link(loaded, meter.passes(), world)
    planned = zip(engine.units, engine.recipe.units, strict=True)
    kept = [unit for unit, plan in planned if plan.stays]
    report = onefold.report(module)
    notes = [] if cache is None else [_cache_line(cache.report())]
    notes += listed(list(report.notes), most=MAX_NOTES)
    return Generated(
        text=streamer.text,
        num_prompt=len(loaded.prompt),
        num_tokens=len(streamer.tokens),
        seconds=seconds,
        first_seconds=meter.first_s - begun,
        passes=passes,
        link=link,
        budget=loaded.recipe.inference.budget if loaded.recipe.inference else 0,
        stays=[unit.name for unit in kept],
        num_units=len(engine.units),
        stay_nbytes=sum(unit.unsharded.tensor.nbytes for unit in kept),
        expected_nbytes=_streamed(loaded.recipe, module),
        memory=world.group.gather(measure(loaded.recipe, report)),
        notes=notes,
    )


@torch.no_grad()
def _generate(job: GenerateJob, loaded: Loaded, streamer: Streamer) -> Any:
    """Call the model's own `generate`; return the KV cache in tiers, if there is one."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # of flags in generation_config.json that greedy text ignores
    model: Any = loaded.module
    options: dict[str, Any] = {"do_sample": bool(job.temperature)}
    if job.temperature:
        options["temperature"] = job.temperature
    if loaded.tokens.name == Bytes.name:  # the configuration's ids are those of a tokenizer
        model.generation_config.eos_token_id = None
    if job.lookup:
        options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
    cache = None
    if job.kv_budget is not None:
        cache = options["past_key_values"] = kv_cache(job, model)
    if model.generation_config.pad_token_id is None:
        options["pad_token_id"] = 0  # one row needs none; without it transformers warns
    torch.manual_seed(job.seed)
    device = engine_of(loaded.module).context.store.device
    prompt = torch.tensor([loaded.prompt], device=device)
    model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=job.max_new_tokens,
        streamer=streamer, **options,
    )  # fmt: skip
    return cache


def kv_cache(job: GenerateJob, model: Any) -> Any:
    """Return the cache of keys and values in tiers."""
    from onefold.hf import KVCache

    if model.config.is_encoder_decoder:
        hint = "in Python: EncoderDecoderCache of two onefold.hf.KVCache"
        wanted = "a decoder-only model for --kv-budget"
        raise ConfigError(wanted, type(model).__name__, hint=hint)
    return KVCache(job.kv_budget or 0, disk=job.folders, config=model.config)


def _cache_line(report: KVReport) -> str:
    held = ", ".join(f"{format_bytes(nbytes)} on {tier}" for tier, nbytes in report.held.items())
    written, read = format_bytes(report.written_nbytes), format_bytes(report.read_nbytes)
    tokens = f"{report.tokens:,d} tokens of {format_bytes(report.token_nbytes)}"
    return f"KV cache: {tokens}; full blocks: {held or 'none'}; {written} written, {read} read"


def _write_bytes(job: GenerateJob, loaded: Loaded, device: torch.device, out: Streamer) -> None:
    """Generate with a module that has no `generate`: a pass over all tokens for each new one."""
    module = loaded.module
    for token in sampled_bytes(
        module, loaded.prompt, most=job.max_new_tokens, seed=job.seed, device=device,
        longest=module.positions.num_embeddings if isinstance(module, GPT) else 0,
        temperature=TEMPERATURE if job.temperature is None else job.temperature,
    ):  # fmt: skip
        out.add([token])
    out.end()


def _streamed(recipe: Recipe, module: nn.Module) -> int:
    """Return the bytes that a pass of one token reads on this rank, at most."""
    engine = engine_of(module)
    large = {
        id(parameter.sharded): index
        for index, unit in enumerate(engine.units)
        for parameter in unit.parameters
        if unit.is_tiled
    }
    uses = [
        Use(large[id(parameter)], verb_of(part))
        for part in module.modules()
        for parameter in part._parameters.values()
        if id(parameter) in large
    ]
    return streamed_nbytes(recipe, engine.context.rest_rank, uses)


def _link(loaded: Loaded, passes: Passes, world: World) -> tuple[Passes, WeightLink]:
    """Measure the way that weights take. A collective: ranks that share a disk read together."""
    files = files_of(engine_of(loaded.module))
    if files:
        world.group.gather(0)  # all ranks begin
        row = blocks_of(files, "read")
        return passes, WeightLink("disk", _rate(row) if passes.nbytes and row.amount else 0.0)
    passes = replace(passes, nbytes=_streamed(loaded.recipe, loaded.module))
    if passes.nbytes == 0:
        return passes, WeightLink("", 0.0)
    if loaded.recipe.rests_near:
        return passes, WeightLink("other ranks", 0.0)
    on_cpu = world.device.type == "cpu"
    rate = 0.0 if on_cpu else _rate(crossing(world.device, "h2d"))
    return passes, WeightLink("copies to the device", rate)


def _rate(row: RateRow) -> float:
    return in_rounds([row], RATE_S)[row.name].per_s
