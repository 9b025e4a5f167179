"""Optimizers that programs draw beside torch's own, and how parameters are handed to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Make = Callable[[Any], torch.optim.Optimizer]


class SignMomentum(torch.optim.Optimizer):
    """Elementwise: the sign of a mean of gradients, smoothed at 0 (Lion, arXiv 2302.06675)."""

    def __init__(self, params: Any, lr: float = 1e-2, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].lerp_(p.grad, 1 - group["beta"])
                p.add_(state["mean"] / (state["mean"].abs() + 1e-3), alpha=-group["lr"])
        return loss


class Counting(torch.optim.Optimizer):
    """Elementwise: a state that is a number, and a buffer that the second step makes."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                if state["step"] > 1:
                    state.setdefault("late", torch.zeros_like(p)).add_(p.grad, alpha=0.1)
                p.add_(p.grad + state.get("late", 0), alpha=-group["lr"] / state["step"])
        return loss


class Normalized(torch.optim.Optimizer):
    """A step of a parameter depends on its gradient's norm (LARS, arXiv 1708.03888)."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / (p.grad.norm() + 1e-2), alpha=-group["lr"])
        return loss


class Coupled(torch.optim.Optimizer):
    """A step of a parameter depends on the gradients of all."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        trained = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        total = sum(float(p.grad.abs().max()) for p in trained if p.numel())
        for p in trained:
            p.add_(p.grad, alpha=-self.param_groups[0]["lr"] / (1 + total))
        return loss


def of_all(make: Make) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    return lambda module: [make(module.parameters())]


def of_trained(make: Make) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    return lambda module: [make([p for p in module.parameters() if p.requires_grad])]


def of_named(make: Make) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    return lambda module: [make(module.named_parameters())]


def of_groups(make: Make) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    """Matrices in one group, the others in another, with a rate of its own."""

    def optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [p for p in module.parameters() if p.dim() > 1]
        others = [p for p in module.parameters() if p.dim() <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "lr": 3e-3}]
        return [make([group for group in groups if group["params"]])]

    return optimizers


def of_decay(make: Make) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    """Matrices decay, the others do not: the usual groups of a fine-tuning script."""

    def optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [p for p in module.parameters() if p.dim() > 1]
        others = [p for p in module.parameters() if p.dim() <= 1]
        groups = [(matrices, 0.1), (others, 0.0)]
        return [make([{"params": ps, "weight_decay": decay} for ps, decay in groups if ps])]

    return optimizers


def of_two(make: Make) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    """Two optimizers: matrices in one, the others in an SGD."""

    def optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [p for p in module.parameters() if p.dim() == 2]
        others = [p for p in module.parameters() if p.dim() != 2]
        found = [make(matrices)] if matrices else []
        return found + ([torch.optim.SGD(others, lr=0.02)] if others else [])

    return optimizers


def of_half(make: Make) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    """An optimizer of every other parameter."""
    return lambda module: [make(list(module.parameters())[::2])]
