"""Bind optimizers to the engines whose parameters they hold, before or after `shard`.

See docs/adr/0016.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from onefold.compat import untraced
from onefold.engine.behaviour import behaviour_of
from onefold.engine.engine import Engine
from onefold.engine.flat_groups import cannot_cut
from onefold.engine.identity import rename
from onefold.engine.optimizer import OptimizerBinding
from onefold.engine.rules import wrapped_by
from onefold.engine.step_checks import check_step
from onefold.errors import ConfigError, StateError


def binding_of(optimizer: Optimizer) -> OptimizerBinding | None:
    """Return the binding of this optimizer, if it has one."""
    for hook in optimizer._optimizer_step_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, OptimizerBinding):
            return owner
    return None


def bind(optimizer: Optimizer, engine: Engine) -> OptimizerBinding:
    """Bind an optimizer that holds sharded parameters of `engine`."""
    binding = binding_of(optimizer)
    if binding is None:
        binding = OptimizerBinding(optimizer, engine)
    elif engine not in binding.engines:
        binding.join(optimizer, engine)
    return binding


def check_state(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> None:
    """Raise `ConfigError` if an optimizer holds state that cannot be cut, or has no values.

    This probes the class first, where ranks agree on errors: it may raise on one of them alone.
    """
    is_elementwise = behaviour_of(optimizer).kind == "elementwise"
    for parameter, fqn in names.items():
        for name, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                continue
            if value.is_meta:
                wanted = f"state {name!r} of {fqn!r} to have values"
                got = f"one that the constructor of {type(optimizer).__name__} made on meta"
                hint = "build the optimizer after onefold.shard(module): it joins by itself"
                raise ConfigError(wanted, got, hint=hint)
            if is_elementwise and value.numel() != 1 and value.shape != parameter.shape:
                raise cannot_cut(fqn, name, parameter.shape, value.shape)


@dataclass(frozen=True)
class _Adoption:
    """A step hook for all optimizers, which binds those that hold parameters of one engine."""

    engine: ref[Engine]

    @untraced  # [Note: torch.compile] in hooks.py
    def __call__(self, optimizer: Optimizer, *_: object) -> None:
        engine = self.engine()
        if engine is None or wrapped_by(optimizer) is not None:  # the one inside is adopted
            return
        binding = binding_of(optimizer)
        if binding is not None:
            binding.stand_innermost(optimizer)
            if engine in binding.engines:
                return
        held = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        if engine.is_inference and held & _ids_of(engine):
            wanted = "no optimizer on a module that onefold.stream streams"
            got = f"a step of {type(optimizer).__name__}"
            hint = "onefold.shard trains a module: its weights go to the same tiers"
            raise StateError(wanted, got, where=f"rank {engine.group.rank}", hint=hint)
        if not engine.by_sharded.keys().isdisjoint(held):
            check_step(optimizer, engine.recipe)
            bind(optimizer, engine)


def _ids_of(engine: Engine) -> set[int]:
    """Ids of both forms of all parameters: modules of units that stay show the unsharded one."""
    parameters = [parameter for unit in engine.units for parameter in unit.parameters]
    return {id(shown) for p in parameters for shown in (p.sharded, p.unsharded)}


def adopt_later(engine: Engine) -> None:
    """Bind optimizers that are built on the module's parameters after `shard`, at their first step.

    This uses torch's own step hook for all optimizers. Hooks of deleted modules are removed here,
    not when a module is deleted: the collector may run while torch goes over its hooks. It may run
    while a list of them is made, too, and what it frees lets other threads add theirs; dict.copy
    copies in one go.
    """
    for key, hook in dict.copy(_global_optimizer_pre_hooks).items():
        if isinstance(hook, _Adoption) and hook.engine() is None:
            _global_optimizer_pre_hooks.pop(key, None)
    register_optimizer_step_pre_hook(_Adoption(ref(engine)))


def replace_parameters(
    optimizer: Optimizer, sharded: dict[int, nn.Parameter], originals: Iterable[nn.Parameter]
) -> None:
    """Put sharded parameters into groups and state; `sharded` finds them by an original's id."""
    for group in optimizer.param_groups:
        group["params"][:] = [sharded.get(id(tensor), tensor) for tensor in group["params"]]
    rename(optimizer, sharded)
    state = optimizer.state
    moved = {
        sharded[id(original)]: state.pop(original)
        for original in originals
        if original in state and sharded[id(original)] is not original
    }
    for parameter, entry in moved.items():
        state[parameter] = entry
