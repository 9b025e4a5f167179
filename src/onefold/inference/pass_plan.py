"""Predict passes over streamed weights: do they fit, how fast are they? `onefold plan --inference`.

Source of the time model: a pass of streamed weights takes the longer of reading and computing, and
the first unit's read before (ZeRO-Inference, DeepSpeed 2022; FlexGen, arXiv 2303.06865, section 4).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from onefold.fit.kept_units import held_by
from onefold.inference.stream import recipe_of_stream
from onefold.planner.costs import HostRates
from onefold.planner.machines import Machine
from onefold.planner.passes import (
    ForwardTrace,
    PassBytes,
    Use,
    names_of_users,
    pass_bytes,
    streamed_nbytes,
    trace_forward,
)
from onefold.planner.storages import Untraceable
from onefold.planner.trace import without_values
from onefold.planner.work import Work
from onefold.recipe import Recipe

MAX_BATCH, WORTH = 4096, 1.05
"""The largest batch that a plan tries, and the gain for which it takes twice as many sequences."""


@dataclass(frozen=True, slots=True)
class InferenceAsk:
    """The choices of a plan. Sizes are bytes of one rank; None: not known, so not checked."""

    budget: int
    rest: str | None
    offload: str | None  # "cpu", "disk" or None
    ranks: int
    device_type: str
    context: int
    batch: int | None  # None: the best one
    memory: int
    host_memory: int | None = None
    disk: int | None = None
    machine: Machine | None = None


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One batch of sequences, each with `context` tokens of keys and values."""

    batch: int
    memory: int  # of a rank's device
    seconds: float  # of a pass; 0: not known
    tokens_per_s: float  # of all sequences
    bound: str  # by what a pass is bound: a link, "memory", "compute" or "launches"


@dataclass(frozen=True, slots=True)
class InferencePlan:
    """The prediction for one rank, and for all of them together where it says so."""

    ask: InferenceAsk
    recipe: Recipe
    numel: int
    held: PassBytes
    num_stay: int
    kv_nbytes: int  # a token of one sequence, on average over the context
    one: BatchPlan
    best: BatchPlan
    missing: dict[str, int]  # bytes that are short, by place
    estimates: tuple[str, ...]
    is_traced: bool

    @property
    def fits(self) -> bool:
        """True if nothing is short at batch 1, or at the batch that was asked for."""
        return not self.missing

    @property
    def link(self) -> str:
        """The way of weights in a pass: "disk", "host", "ranks"; empty where nothing moves."""
        return _link(self.recipe) if self.held.read else ""


def plan_inference(module: nn.Module, ask: InferenceAsk) -> InferencePlan:
    """Plan passes of `module`, whose values are neither read nor changed.

    Raises `ConfigError` for a budget that is too small, as `onefold.stream` does.
    """
    skeleton, packed = without_values(module).eval(), without_values(module).eval()
    ranks = Recipe(world_size=ask.ranks, local_world_size=ask.ranks, device_type=ask.device_type)
    offload = "disk:." if ask.offload == "disk" else ask.offload
    recipe, plans = recipe_of_stream(
        packed, ranks, budget=ask.budget, rest=ask.rest, offload=offload
    )
    users = names_of_users(packed, plans)

    def traced(seq: int, *, is_step: bool) -> ForwardTrace:
        tokens = torch.zeros(1, seq, dtype=torch.int64, device="meta")
        options = _of_a_decoder(module, tokens, is_step=is_step)
        return trace_forward(skeleton, users, tokens, ask.device_type, options)

    estimates: tuple[str, ...] = ()
    try:
        prompt, step = traced(ask.context, is_step=False), traced(1, is_step=True)
    except Untraceable as error:
        estimates = (f"activations and the order of units, as it cannot be traced ({error})",)
        work = Work(flops=2.0 * sum(parameter.numel() for parameter in module.parameters()))
        prompt = step = ForwardTrace(_in_order(recipe), 0, work, 0)
    if step.cache_nbytes == 0:  # without a cache a pass computes the whole context again
        step = prompt
    held = pass_bytes(recipe, step.uses)
    has_encoder = bool(_of_a_decoder(module, torch.empty(1, 1), is_step=False))
    planner = _Batches(ask, recipe, held, prompt, step, has_encoder=has_encoder)
    single = planner.at(1)
    best = planner.at(ask.batch) if ask.batch else single if estimates else planner.best()
    return InferencePlan(
        ask, recipe, sum(p.numel() for p in module.parameters()), held,
        sum(unit.stays for unit in recipe.units), planner.kv_nbytes, single,
        best, planner.missing(single if ask.batch is None else best), estimates,
        is_traced=not estimates,
    )  # fmt: skip


def _of_a_decoder(module: nn.Module, tokens: torch.Tensor, *, is_step: bool) -> dict[str, Any]:
    """The other arguments of a decoder behind an encoder, which runs once, with the prompt."""
    config: Any = getattr(module, "config", None)
    if not getattr(config, "is_encoder_decoder", False):
        return {}
    options: dict[str, Any] = {"decoder_input_ids": tokens[:, :1]}
    if is_step:
        shape, dtype = (*tokens.shape, config.hidden_size), next(module.parameters()).dtype
        options["encoder_outputs"] = (torch.zeros(shape, dtype=dtype, device="meta"),)
    return options


def _in_order(recipe: Recipe) -> tuple[Use, ...]:
    """Uses of units one after the other, as in the module tree."""
    uses: list[Use] = []
    waiting: list[Use] = []
    for index, unit in enumerate(recipe.units):
        if unit.tile_nbytes:
            uses.append(Use(index, "rows" if index == 0 else "blocks"))
            continue
        if not unit.is_joined:
            uses, waiting = uses + waiting, []
        uses.append(Use(index, "enter", index))
        waiting.append(Use(index, "leave", index))
    return tuple(uses + waiting)


class _Batches:
    """Memory and seconds of passes over more and more sequences."""

    def __init__(
        self, ask: InferenceAsk, recipe: Recipe, held: PassBytes, prompt: ForwardTrace,
        step: ForwardTrace, *, has_encoder: bool,
    ) -> None:  # fmt: skip
        self._ask, self._recipe, self._held, self._step = ask, recipe, held, step
        self._prompt_peak = prompt.peak
        self._cache = step.cache_nbytes * ask.context
        if not has_encoder:  # of the prompt; layers with a window keep its last tokens
            self._cache = min(self._cache, prompt.cache_nbytes)
        self.kv_nbytes = -(-self._cache // ask.context)
        used = {use.unit for use in step.uses}
        self._computed = sum(
            unit.decoded + (unit.unsharded or unit.weight)
            for index, unit in enumerate(held_by(recipe))
            if index in used
        )  # bytes that kernels read
        reads = [
            streamed_nbytes(replace(recipe, units=(unit,)))
            for unit in recipe.units
            if not unit.tile_nbytes
        ]
        self._largest_read = max(reads, default=0)

    def at(self, batch: int) -> BatchPlan:
        seconds, bound = self._seconds(batch)
        speed = batch / seconds if seconds else 0.0
        return BatchPlan(batch, self._memory(batch), seconds, speed, bound)

    def best(self) -> BatchPlan:
        """Return the batch that fits from which on twice as many gain little; 1 if none fits."""
        plan, batch = self.at(1), 2
        while batch <= MAX_BATCH and self._memory(batch) <= self._ask.memory:
            more = self.at(batch)
            if more.tokens_per_s < WORTH * plan.tokens_per_s:
                break
            plan, batch = more, 2 * batch
        return plan

    def missing(self, plan: BatchPlan) -> dict[str, int]:
        """Return the bytes that are short at a batch, by place."""
        ask, parameters = self._ask, self._recipe.offload.parameters
        needs = {"device": plan.memory}
        rooms: dict[str, int | None] = {"device": ask.memory, "host": ask.host_memory,
                                        "disk": ask.disk}  # fmt: skip
        if not self._recipe.rests_near:
            needs["disk" if parameters == "disk" else "host"] = self._held.at_rest
        return {
            place: need - room
            for place, need in needs.items()
            if (room := rooms[place]) is not None and need > room
        }

    def _memory(self, batch: int) -> int:
        """Weights, keys and values, and the activations of one prompt or of a step of all."""
        cache = self._cache * batch
        working = max(0, self._prompt_peak - self._cache, batch * self._step.peak)
        return self._held.peak + cache + working  # the prompt's trace holds its cache as well

    def _seconds(self, batch: int) -> tuple[float, str]:
        """Return the seconds of a pass, and its longest part; 0 without a machine."""
        machine = self._ask.machine
        if machine is None:
            return 0.0, ""
        work, efficiency = self._step.work, machine.efficiency
        cache = self._cache * batch
        traffic = self._computed + cache + batch * work.nbytes
        flops = batch * (work.flops + work.attention_flops)
        parts = {
            "memory": traffic / (machine.memory_rate * efficiency.memory),
            "compute": flops / (machine.peak(_dtype(self._recipe, machine)) * efficiency.matmul),
            "launches": work.num_kernels * machine.kernel_seconds,
        }
        inside = machine.inside.nbytes_per_second * efficiency.link
        host = HostRates.shared_by(machine, self._ask.ranks).link
        rates = {"disk": machine.disk_rate, "host": host, "ranks": inside}
        link = _link(self._recipe)
        rate = rates[link]
        parts[link] = self._held.read / rate
        first = self._largest_read / rate if self._held.read else 0.0
        bound = max(parts, key=lambda part: parts[part])
        return parts[bound] + first, bound


def _link(recipe: Recipe) -> str:
    if recipe.offload.parameters == "disk":
        return "disk"
    return "ranks" if recipe.rests_near else "host"


def _dtype(recipe: Recipe, machine: Machine) -> str:
    words: dict[Any, str] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    member = recipe.units[0].members[0]
    word = words.get(member.compute_dtype, "tf32" if "tf32" in machine.flops else "fp32")
    return word if word in machine.flops else next(iter(machine.flops))
