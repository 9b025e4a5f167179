"""Refuse modules, parameters and optimizers that cannot be sharded, before anything is touched."""

from collections.abc import Sequence

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from onefold.engine.joining import check_state
from onefold.engine.registry import is_sharded
from onefold.errors import ConfigError
from onefold.layout import packed
from onefold.layout.model_axes import is_owned
from onefold.layout.module_tree import ModuleTree
from onefold.layout.ranges import Shares
from onefold.layout.units import Owned
from onefold.recipe import Recipe

_WRAPPERS = (
    "DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule",
    "DeepSpeedEngine",
)  # fmt: skip


def _is_wrapper(kind: type) -> bool:
    """True for another library's data parallelism, known by name: nothing is imported for this."""
    return kind.__name__ in _WRAPPERS and kind.__module__.startswith(("torch.", "deepspeed."))


def as_list(optimizer: object) -> list[Optimizer]:
    """Return the optimizers of `shard(optimizer=)`; raise `ConfigError` for other objects."""
    if optimizer is None:
        return []
    values = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    optimizers: list[Optimizer] = []
    for value in values:
        if not isinstance(value, Optimizer):
            got = f"a {type(value).__name__}"
            hint = "onefold.shard(module, optimizer, stage=3)"
            raise ConfigError("optimizer to be a torch.optim.Optimizer", got, hint=hint)
        optimizers.append(value)
    return optimizers


def check_module(tree: ModuleTree) -> None:
    """Raise `ConfigError` unless this is a module that is not sharded yet."""
    kind = type(tree.root).__name__
    if not tree.parts:
        hint = "onefold.shard(module, optimizer)"
        raise ConfigError("a torch.nn.Module to shard", f"a {kind}", hint=hint)
    for part in tree.modules:
        wrappers = [base.__name__ for base in type(part).__mro__ if _is_wrapper(base)]
        if wrappers:
            got = f"one of {wrappers[0]}"
            hint = "pass the plain module: onefold.shard averages gradients over the ranks"
            raise ConfigError("a module that no other library makes data-parallel", got, hint=hint)
        _check_one_device(part)
    if any(map(is_sharded, tree.modules)):
        got = "one that onefold.shard has sharded already, whole or in part"
        hint = "call onefold.shard once, on the outermost module"
        raise ConfigError(f"a {kind} that is not sharded yet", got, hint=hint)


def _check_one_device(part: nn.Module) -> None:
    """Raise `ConfigError` for a model that Accelerate has dispatched to several devices."""
    placed = part.__dict__.get("hf_device_map")
    devices = set(map(str, placed.values())) if isinstance(placed, dict) else set[str]()
    if len(devices) > 1 or "disk" in devices:
        got = f"one that from_pretrained dispatched to {', '.join(sorted(devices))}"
        hint = 'load it without device_map="auto", or with device_map={"": device} of '
        hint += "this rank; onefold.shard shards it over the ranks"
        raise ConfigError("a model on one device", got, hint=hint)


def check_parameters(parameters: Sequence[Owned]) -> None:
    """Raise `ConfigError` for lazy, foreign, shared or hooked parameters."""
    for owned in parameters:
        kind = type(owned.parameter)
        if isinstance(owned.parameter, UninitializedParameter):
            got = f"a {kind.__name__}"
            hint = "run the module once before onefold.shard, so that lazy layers get shapes"
            raise ConfigError(f"parameter {owned.fqn!r} to have a shape", got, hint=hint)
        if owned.is_packed and owned.table is None:
            _check_packed(owned)
        if is_owned(owned.parameter):
            wanted = f"parameter {owned.fqn!r} to belong to one sharded module"
            hint = "shard a module that contains both, once"
            raise ConfigError(wanted, "a parameter that another sharded module holds", hint=hint)
        if owned.parameter._backward_hooks:
            got = "one with register_hook, which would not see the reduced gradient"
            hint = "use register_post_accumulate_grad_hook after onefold.shard, or change "
            hint += "gradients between backward and step"
            raise ConfigError(f"parameter {owned.fqn!r} without tensor hooks", got, hint=hint)


def _check_packed(owned: Owned) -> None:
    """Raise `ConfigError` for a quantized weight whose bytes cannot be sharded as they are."""
    problem = packed.problem_of(owned.parameter, owned.owners)
    if problem is not None:
        got, hint = problem
        raise ConfigError(f"parameter {owned.fqn!r} to be quantized for good", got, hint=hint)


def check_optimizers(optimizers: Sequence[Optimizer], parameters: Sequence[Owned]) -> None:
    """Raise `ConfigError` for optimizers without such parameters, or with unusable state."""
    known = {id(owned.parameter) for owned in parameters}
    for optimizer in optimizers:
        held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        if not any(id(tensor) in known for tensor in held):
            wanted = f"{type(optimizer).__name__} to hold parameters of this module"
            hint = "build the optimizer on module.parameters() of the module to shard, "
            hint += "after moving or casting it"
            raise ConfigError(wanted, "none of them", hint=hint)
        check_state(optimizer, {owned.parameter: owned.fqn for owned in parameters})
    trained = [owned for owned in parameters if owned.parameter.requires_grad]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held_ids = {id(tensor) for group in groups for tensor in group["params"]}
    if optimizers and trained and not any(id(owned.parameter) in held_ids for owned in trained):
        got = f"one of frozen parameters alone, without {trained[0].fqn!r}"
        hint = "build the optimizer after adapters were added"
        raise ConfigError("an optimizer of parameters that train", got, hint=hint)


def check_shares(shares: Shares, recipe: Recipe) -> None:
    """Raise `ConfigError` unless each rank has a weight that the stage takes."""
    if shares is None:
        return
    ranks = recipe.shard_world
    if len(shares) != ranks:
        wanted, hint = f"`shares` with one weight for each of {ranks} ranks", "in rank order"
        raise ConfigError(wanted, f"{len(shares)}: {list(shares)}", hint=hint)
    if not all(shares) and not recipe.is_sharded:
        wanted = "`shares` above 0 at stage 0, where every rank holds all state"
        raise ConfigError(wanted, str(list(shares)), hint="stage=1 or higher")


def check_mixed_tiers(
    tiers: Sequence[tuple[object, ...]], device_type: str, *, opens_stage: bool
) -> None:
    """Raise `ConfigError` where ranks have chosen tiers that do not go together."""
    if len(set(tiers)) > 1 and opens_stage:
        raise mixed_tiers('the same tiers on every rank, for stage="auto"')
    twins = {states != "device" and weights == "device" for states, weights, *_ in tiers}
    if device_type != "cpu" and len(twins) > 1:
        wanted = "masters of the same weights on every rank, for checkpoints"
        raise mixed_tiers(f"{wanted}: Offload(optimizer=) without parameters= on all or none")


def mixed_tiers(wanted: str) -> ConfigError:
    """The error for tiers of ranks that do not go together."""
    hint = "pass the same offload= on every rank, or a stage as a number"
    return ConfigError(wanted, "ranks with different offload=", hint=hint)
