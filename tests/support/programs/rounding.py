"""What rounding alone makes of a program: plain torch with noise where Onefold rounds.

    of a compute dtype    each weight, each output of a module, and the sums that gradients are, by
                          up to half a unit in the last place
    of quantized weights  matrices in a forward, by up to half a step of the codec
    of quantized grads    each rank's gradient of a matrix, by up to half a step

A step of a codec is the largest element over 127 (int8) or 7 (int4); "-diff" sends whole weights
once they were loaded or edited, so it counts as the rest.

So a bound on a note comes from what the noise makes of it in this very program, not from a
constant: a loss that ends in a valley is judged closely, one that blows rounding up loosely.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import onefold
from onefold.wire_config import PRESETS
from tests.support.programs.drawing import Drawn, DrawnLeg
from tests.support.programs.frame import ROWS, Process, Value

LEVELS = {"int8": 127, "int4": 7}
STEPPED = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
SUMMED = 4 * ROWS  # words that a batch looks up, so roundings of one sum at most
OF_STEPS = 8.0  # these round gates or scores, products and states about 64 times: a random walk


@dataclass(frozen=True)
class Rounding:
    """Sizes of errors in one leg: relative to an element (`unit`), else to the largest one."""

    unit: float = 0.0
    weights: float = 0.0
    gradients: float = 0.0
    sums: float = 0.0  # of sums in a narrow dtype, of which a rank's gradient is made
    keeps_errors: bool = False

    @classmethod
    def of(cls, leg: DrawnLeg, *, is_narrow: bool) -> Rounding:
        """The rounding that a leg's arguments ask for."""
        options = dict(leg.options)
        precision, choice = options.get("precision", ""), eval(options.get("wire", "None"), NAMES)
        text = precision + "".join(call for call in leg.operations if "autocast" in call)
        narrow = is_narrow or re.search("bf16|bfloat16|autocast", text)
        wire = PRESETS[choice] if isinstance(choice, str) else choice or onefold.Wire()
        if leg.world_size == 1:
            wire = onefold.Wire()
        return cls(
            unit=2.0**-8 if narrow else 2.0**-23,
            weights=max(step_of(precision), step_of(str(wire.weights))),
            gradients=step_of(str(wire.gradients)),
            sums=2.0**-8 if narrow or "reduce=torch.bfloat16" in precision else 0.0,
            keeps_errors=wire.feedback,
        )

    def __mul__(self, times: float) -> Rounding:
        sizes = {name: times * getattr(self, name) for name in SIZES}
        return replace(self, **sizes)


SIZES = ("unit", "weights", "gradients", "sums")
NAMES = {"onefold": onefold}


def step_of(text: str) -> float:
    """The step of the coarsest codec that a text names, relative to the largest element."""
    return max((1 / levels for word, levels in LEVELS.items() if word in text), default=0.0)


@dataclass
class Noisy(Process):
    """The plain process with noise of the size of rounding errors."""

    roundings: list[Rounding] = field(default_factory=list)
    seed: int = 0
    of_batch: torch.dtype = torch.float32
    is_inside: bool = False
    seen_weights: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    kept: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.source = torch.Generator().manual_seed(self.seed)

    @property
    def tables(self) -> list[nn.Parameter]:
        """Weights of embeddings: their gradients are summed row by row in the narrow dtype."""
        kinds = (nn.Embedding, nn.EmbeddingBag)
        return [module.weight for module in self.model.modules() if isinstance(module, kinds)]

    @property
    def now(self) -> Rounding:
        return self.roundings[self.leg]

    def noise(self, like: Tensor) -> Tensor:
        """Uniform between -0.5 and 0.5."""
        return torch.rand(like.shape, generator=self.source, dtype=torch.float64) - 0.5

    def batch(self) -> Tensor:
        """The next global batch, whose rows are rounded as in the program."""
        return super().batch().to(self.of_batch).to(self.program.dtype)

    # weights and outputs

    @contextmanager
    def rounding(self) -> Iterator[None]:
        """Weights are rounded in the block, as a forward and its backward see them."""
        if self.is_inside:
            yield
            return
        own = [(weight, weight.detach().clone()) for weight in self.parameters]
        self.is_inside = True
        try:
            for weight, value in own:
                weight.data.copy_(self.in_forward(weight, value))
            shown = [weight.detach().clone() for weight in self.parameters]
            yield
            for (weight, value), before in zip(own, shown, strict=True):
                if not torch.equal(weight, before):  # a hook has stepped it
                    wide = torch.complex128 if value.is_complex() else torch.float64
                    value.copy_(value.to(wide) + (weight.detach().to(wide) - before.to(wide)))
        finally:
            self.is_inside = False
            for weight, value in own:
                weight.data.copy_(value)

    def rounded(self, value: Tensor, times: float = 1.0) -> Tensor:
        if not (value.is_floating_point() and self.now.unit):
            return value
        return value * (1 + times * self.now.unit * self.noise(value)).to(value.dtype)

    def in_forward(self, weight: nn.Parameter, value: Tensor) -> Tensor:
        """The values of a weight that a forward sees: the same ones until it changes."""
        if not value.is_floating_point() or not value.numel():
            return value
        wide = value.double()
        before, noisy = self.seen_weights.get((self.leg, id(weight)), (wide, None))
        if noisy is not None and torch.equal(before, wide):
            return noisy
        noisy = wide * (1 + self.now.unit * self.noise(value))
        if value.dim() > 1:
            noisy += self.now.weights * wide.abs().max() * self.noise(value)
        self.seen_weights[self.leg, id(weight)] = wide, noisy
        return noisy

    # gradients

    def loss(self, batch: Tensor, model: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The mean loss; its gradients have errors of each rank's part."""
        model = self.model if model is None else model
        losses = [(model(part).float() - 1).square().mean() for part in self.parts(batch)]
        total = sum(losses[1:], losses[0]) / len(losses)
        now = self.now
        if not ((now.gradients or now.sums) and total.requires_grad):
            return total
        for rank, part in enumerate(self.parts(batch)):
            grads = self.gradients_of(model, part)
            for name, weight in self.model.named_parameters():
                if name in grads and weight.requires_grad:
                    error = self.error_of(grads[name] / len(losses), rank, weight)
                    total = total + ((weight - weight.detach()) * error.to(weight.dtype)).sum()
        return total

    def mean(self, losses: list[Tensor]) -> Tensor:
        """The mean of losses that an operation computes; its gradients have errors as well."""
        total = super().mean(losses)
        weights = [q for q in self.parameters if q.requires_grad and q.is_floating_point()]
        for rank, part in enumerate(losses if self.now.gradients or self.now.sums else ()):
            mine = torch.autograd.grad(
                part / len(losses), weights, retain_graph=True, allow_unused=True
            )
            for weight, grad in zip(weights, mine, strict=True):
                if grad is not None and grad.numel():
                    error = self.error_of(grad.double(), rank, weight)
                    total = total + ((weight - weight.detach()) * error.to(weight.dtype)).sum()
        return total

    def gradients_of(self, model: Callable[[Tensor], Tensor], part: Tensor) -> dict[str, Tensor]:
        """The gradients of one rank's rows, by names; a copy computes them."""
        root, called = copy.deepcopy((self.model, model))
        (called(part).float() - 1).square().mean().backward()
        return {
            name: weight.grad.double()
            for name, weight in root.named_parameters()
            if weight.grad is not None and weight.numel() and weight.is_floating_point()
        }

    def error_of(self, grad: Tensor, rank: int, weight: nn.Parameter) -> Tensor:
        """The error of a rank's message; with feedback, the next one takes it back."""
        # of terms that may cancel, so relative to the largest element
        error = self.now.sums * grad.abs().max() * self.noise(grad)
        if any(weight is table for table in self.tables):
            error *= SUMMED**0.5
        if grad.dim() > 1:
            error += self.now.gradients * grad.abs().max() * self.noise(grad)
        if not self.now.keeps_errors:
            return error
        before, self.kept[rank, id(weight)] = self.kept.get((rank, id(weight))), error
        return error if before is None else error - before


@contextmanager
def noise_in(process: Noisy) -> Iterator[None]:
    """Modules are called, and gradients computed, with this process's rounded weights."""

    def in_rounding(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            with process.rounding():
                out = original(*args, **more)
            if not isinstance(args[0], nn.Module):
                return out
            times = OF_STEPS if isinstance(args[0], STEPPED) else 1.0
            return tree_map_only(Tensor, lambda value: process.rounded(value, times), out)

        return call

    with ExitStack() as patches:
        for owner, name in (
            (nn.Module, "__call__"),
            (Tensor, "backward"),
            (torch.autograd, "grad"),
        ):
            new = in_rounding(getattr(owner, name))
            patches.enter_context(mock.patch.object(owner, name, new))
        yield


def asks_for_bfloat16(drawn: Drawn) -> bool:
    """True if a module of wider weights computes in bfloat16."""
    return not drawn.is_narrow and any(
        Rounding.of(leg, is_narrow=False).unit == 2.0**-8 for leg in drawn.legs
    )


def run_noisy(drawn: Drawn, folder: str, seed: int, times: float = 1.0) -> dict[str, Value]:
    """Notes of the plain process with `times` the noise, in dtypes that do not round."""
    roundings = [Rounding.of(leg, is_narrow=drawn.is_narrow) * times for leg in drawn.legs]
    return _run(drawn, folder, roundings, seed)


def run_wide(drawn: Drawn, folder: str) -> dict[str, Value]:
    """Notes of the plain process, with bfloat16 weights in fp32."""
    return _run(drawn, folder, [Rounding() for _ in drawn.legs], 0)


def _run(drawn: Drawn, folder: str, roundings: list[Rounding], seed: int) -> dict[str, Value]:
    program = drawn.program()

    def build() -> nn.Module:
        module = program.build()
        if program.dtype == torch.bfloat16:
            module.to(torch.bfloat16)  # the values that the program begins with
        for weight in module.parameters():
            if weight.dtype == torch.bfloat16:
                weight.data = weight.data.float()
        return module

    dtype = torch.float32 if program.dtype == torch.bfloat16 else program.dtype
    process = replace(program, build=build, dtype=dtype).process(
        folder, Noisy, is_plain=True, roundings=roundings, seed=seed, of_batch=program.dtype
    )
    with noise_in(process):
        for leg in range(len(drawn.legs)):
            process.run_leg(leg)
    return process.seen
