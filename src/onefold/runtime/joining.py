"""Joining optimizers to the engines whose parameters they hold, before or after `shard`."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import finalize, ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from onefold.runtime.engine import Engine
from onefold.runtime.optimizer import ELEMENTWISE, OptimizerBinding
from onefold.runtime.runs import cannot_cut


def binding_of(optimizer: Optimizer) -> OptimizerBinding | None:
    """The binding that `shard` gave this optimizer, if it did."""
    for hook in optimizer._optimizer_step_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, OptimizerBinding):
            return owner
    return None


def bind(optimizer: Optimizer, engine: Engine) -> OptimizerBinding:
    """Join an optimizer that holds faces of `engine` to it."""
    binding = binding_of(optimizer)
    if binding is None:
        binding = OptimizerBinding(optimizer, engine)
    elif engine not in binding.engines:
        binding.join(optimizer, engine)
    return binding


def check_state(fqn: str, parameter: nn.Parameter, optimizer: Optimizer) -> None:
    """Raise `ConfigError` if an optimizer that has stepped holds state that cannot be cut."""
    if type(optimizer) in ELEMENTWISE:
        for name, value in optimizer.state.get(parameter, {}).items():
            is_tensor = isinstance(value, Tensor)
            if is_tensor and value.numel() != 1 and value.shape != parameter.shape:
                raise cannot_cut(fqn, name, parameter.shape, value.shape)


def adopt_later(engine: Engine) -> None:
    """Bind optimizers that are built on the module's parameters after `shard`, at their first step.

    torch's own step hook for all optimizers is used, and removed with the module.
    """
    alive = ref(engine)

    def before_any_step(optimizer: Optimizer, *_: object) -> None:
        current = alive()
        if current is None:
            return
        binding = binding_of(optimizer)
        if binding is not None:
            binding.stand_innermost(optimizer)
            if current in binding.engines:
                return
        faces = (tensor for group in optimizer.param_groups for tensor in group["params"])
        if any(id(tensor) in current.by_face for tensor in faces):
            bind(optimizer, current)

    handle = register_optimizer_step_pre_hook(before_any_step)
    finalize(engine, handle.remove)


def replace_parameters(
    optimizer: Optimizer, faces: dict[int, nn.Parameter], originals: Iterable[nn.Parameter]
) -> None:
    """Let groups and state speak of faces: `faces` maps the id of each original to its face."""
    for group in optimizer.param_groups:
        group["params"] = [faces.get(id(tensor), tensor) for tensor in group["params"]]
    state = optimizer.state
    moved = {
        faces[id(original)]: state.pop(original)
        for original in originals
        if original in state and faces[id(original)] is not original
    }
    for face, entry in moved.items():
        state[face] = entry
