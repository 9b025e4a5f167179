"""The sharded module, or the stages of a pipeline, that a checkpoint is of.

Stages are saved and loaded together, as the one model that they are, under its names: a checkpoint
loads at any other split of the axes, and in one process. Optimizers of stages are parts of one:
group I of the checkpoint holds the parameters of group I of every stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from onefold.checkpoint.agreement import together
from onefold.checkpoint.directory import OptimizerRecord
from onefold.checkpoint.packed_weights import notes_of
from onefold.engine.engine import Engine
from onefold.engine.joining import binding_of
from onefold.engine.pipelined import TIE, TiedCopy
from onefold.engine.registry import engine_of
from onefold.engine.structure import rename
from onefold.errors import CheckpointError, ConfigError
from onefold.layout.ledger import Ledger
from onefold.layout.module_tree import ModuleTree, uncompiled
from onefold.unit.cut_dtensor import own_view
from onefold.unit.parameter import UnitParameter
from onefold.wire.collectives import Group

EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, slots=True)
class RankNames:
    """The other names of weights on one rank: inside its modules, and over stages."""

    aliases: dict[str, str]
    copies: dict[str, TiedCopy]


def join_names(of_ranks: Iterable[RankNames]) -> dict[str, str]:
    """Return the other names of all weights, each with the name under which it is saved."""
    ranks = list(of_ranks)
    first = {
        tie.key: name for rank in ranks for name, tie in rank.copies.items() if not tie.is_copy
    }
    names = {
        name: first[tie.key]
        for rank in ranks
        for name, tie in rank.copies.items()
        if tie.key in first and name != first[tie.key]
    }
    for rank in ranks:
        names |= {alias: names.get(name, name) for alias, name in rank.aliases.items()}
    return names


Modules = nn.Module | Sequence[nn.Module]
Optimizers = Optimizer | Sequence[Optimizer] | None


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """A sharded module and optimizers of its parameters, to save or to load into.

    `names`: fqns of the parameters that are meant; None: all of them. `number`: that of this rank
    among all ranks that save together, those of other stages of a pipeline included; None: its
    number among the ranks of this module. `left_out`: fqns of weights that another stage saves.
    """

    engine: Engine
    module: nn.Module
    optimizers: tuple[Optimizer, ...] = ()
    names: frozenset[str] | None = None
    number: int | None = None
    left_out: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Take names from `module`, maybe a wrapper. A collective where adapters came."""
        self.engine.note_structure()
        rename(self.engine, ModuleTree.from_root(self.module))
        for name, parameter in self.module.named_parameters():
            if id(parameter) not in self.engine.by_sharded:
                got = f"a wrapper with {name!r}, which is not"
                hint = "pass the module that was given to onefold.shard, or shard the wrapper"
                raise CheckpointError("a module whose parameters are sharded", got, hint=hint)

    def with_optimizers(self, chosen: Iterable[object]) -> ShardedModel:
        """This model with optimizers of its parameters. Raises `CheckpointError` for others."""
        optimizers: list[Optimizer] = []
        for choice in chosen:
            if not isinstance(choice, Optimizer):
                wanted = "optimizer to be a torch.optim.Optimizer, or several"
                hint = "pass schedulers, scalers and the like as extra={'scheduler': ...}"
                raise CheckpointError(wanted, f"a {type(choice).__name__}", hint=hint)
            for tensor in (tensor for group in choice.param_groups for tensor in group["params"]):
                if id(tensor) not in self.engine.by_sharded:
                    raise CheckpointError(
                        f"{type(choice).__name__} to hold this module's parameters alone",
                        f"a tensor {list(tensor.shape)} that is not among them",
                        hint="save modules that share an optimizer as parts of one module",
                    )
            optimizers.append(choice)
        return replace(self, optimizers=tuple(optimizers))

    @property
    def rank(self) -> int:
        """This rank among all that save together."""
        return self.engine.context.everyone.rank if self.number is None else self.number

    @property
    def is_first(self) -> bool:
        """True on the rank that writes the state that all ranks of this module hold."""
        return self.engine.context.everyone.rank == 0

    def all_names(self) -> set[str]:
        """Return the names of its weights and buffers, others of tied weights included."""
        own = {parameter.fqn for parameter in self.parameters()}
        return own | self.buffers().keys() | self.aliases().keys() | self.notes().keys()

    def parameters(self) -> list[UnitParameter]:
        parameters = [p for unit in self.engine.units for p in unit.parameters if p.places]
        parameters = [p for p in parameters if p.fqn not in self.left_out]
        return [p for p in parameters if self.names is None or p.fqn in self.names]

    def ties(self) -> dict[str, TiedCopy]:
        """Return the weights that other stages of a pipeline hold, too, by name."""
        ties = ((p.fqn, getattr(p.sharded, TIE, None)) for p in self.parameters())
        return {fqn: tie for fqn, tie in ties if tie is not None}

    def without_copies(self) -> ShardedModel:
        """This model without the copies of weights that another stage of the pipeline saves."""
        copies = frozenset(fqn for fqn, tie in self.ties().items() if tie.is_copy)
        return replace(self, left_out=copies)

    def trainable(self) -> ShardedModel:
        """This model without its frozen parameters, such as the base of adapters."""
        names = frozenset(p.fqn for p in self.parameters() if p.sharded.requires_grad)
        return replace(self, names=names)

    def parameter(self, tensor: Tensor) -> UnitParameter:
        """Return the parameter of a sharded tensor."""
        return self.engine.by_sharded[id(tensor)]

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of a parameter, or of that for which an optimizer steps a tensor."""
        known = self.engine.by_sharded.get(id(tensor))
        for optimizer in self.optimizers if known is None else ():
            binding = binding_of(optimizer)
            if binding is not None:
                held = self.stepped_by(optimizer)
                known = next((p for p in held if binding.stand_in(p) is tensor), known)
        return None if known is None else known.fqn

    def groups(self) -> list[dict[str, Any]]:
        """Return the param groups of all optimizers, one after the other."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def records(self) -> list[OptimizerRecord]:
        """Return the class and the number of param groups of each optimizer."""
        return [
            OptimizerRecord(f"{type(o).__module__}.{type(o).__qualname__}", len(o.param_groups))
            for o in self.optimizers
        ]

    def stepped_by(self, optimizer: Optimizer) -> list[UnitParameter]:
        """Return the parameters that an optimizer holds."""
        groups = optimizer.param_groups
        return [self.parameter(tensor) for group in groups for tensor in group["params"]]

    def aliases(self) -> dict[str, str]:
        """Return the other names of tied weights, each with the name under which it is saved."""
        known = {p.fqn for p in self.parameters()}
        named = self.module.named_parameters(remove_duplicate=False)
        fqns = ((name, self.parameter(sharded).fqn) for name, sharded in named)
        return {name: fqn for name, fqn in fqns if name != fqn and fqn in known}

    def buffers(self) -> dict[str, Tensor]:
        """Return the persistent buffers by name."""
        return dict(persistent_buffers(self.module))

    def notes(self) -> dict[str, Tensor]:
        """Return the small tensors that say how packed weights are packed, by name."""
        return notes_of(self.parameters())

    def extra_states(self) -> dict[str, nn.Module]:
        """Return modules with a `get_extra_state` of their own, by the name of that state."""
        return {
            f"{prefix}.{EXTRA_STATE}" if prefix else EXTRA_STATE: part
            for prefix, part in self.module.named_modules()
            if type(part).get_extra_state is not nn.Module.get_extra_state
        }

    def companion_rows(self) -> dict[str, list[tuple[UnitParameter, Tensor]]]:
        """Return own rows of averages, by the name of the average."""
        known = set(self.parameters())
        rows = {key: c.saved_rows() for key, c in self.engine.companions.alive().items()}
        return {k: [pair for pair in of if pair[0] in known] for k, of in rows.items() if of}

    def wait_steps(self) -> None:
        """Wait for background steps, free unsharded weights, let masters follow edited weights."""
        engine = self.engine
        engine.rest()
        waits = any(unit.gradient.reduction.waits for unit in engine.units)
        if waits or engine.context.everyone is not engine.group:
            engine.complete()  # sums of a node, or of a piece, are no mean that others could load
        for unit in engine.units:
            unit.wait_step()
            unit.check_untouched()
            unit.refresh_master()


def persistent_buffers(
    module: nn.Module, *, all_names: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of a state dict; with `all_names`, a shared module's by each name."""
    for prefix, part in module.named_modules(remove_duplicate=not all_names):
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


@dataclass(frozen=True, slots=True)
class Stages:
    """The modules of this rank, and the group of all ranks that save them together."""

    modules: tuple[nn.Module, ...]
    group: Group
    is_pipeline: bool

    @staticmethod
    def from_modules(modules: Modules) -> Stages:
        """Find the ranks: those of the module, or of all stages that `onefold.pipeline` drives.

        Raises `CheckpointError` for several modules without a pipeline; on every rank, for other
        modules than all stages of a rank, and for axes that do not multiply to the world.
        """
        if not isinstance(modules, nn.Module | Sequence):
            hint = "as in onefold.save(path, module, optimizer); onefold.load takes the same order"
            raise ConfigError(
                "a module, or all stages of a rank", f"a {type(modules).__name__}", hint=hint
            )
        wrapped = [modules] if isinstance(modules, nn.Module) else modules
        own = tuple(map(uncompiled, wrapped))
        engines = list(map(engine_of, own))
        pipeline, everyone = engines[0].pipeline, engines[0].context.everyone
        if pipeline is None and (engines[0].is_undriven or len(own) > 1):
            got = "a stage that no schedule drives" if engines[0].is_undriven else f"{len(own)}"
            hint = "onefold.pipeline(schedule) joins the stages of a pipeline; else one by one"
            raise CheckpointError("one module, without a pipeline", got, hint=hint)
        if pipeline is None or not pipeline.has_parts:
            return Stages(own, everyone, is_pipeline=False)
        world = Group.from_handle(dist.group.WORLD if dist.is_initialized() else None)

        def check() -> None:
            is_whole = len(set(engines)) == pipeline.num_stages
            if {engine.pipeline for engine in engines} != {pipeline} or not is_whole:
                wanted = f"all {pipeline.num_stages} stages of this rank"
                hint = "onefold.save(directory, [first_stage, second_stage], optimizers)"
                raise CheckpointError(wanted, f"{len(own)} modules", hint=hint)
            ranks = pipeline.group.world_size
            if ranks * everyone.world_size != world.world_size:
                raise CheckpointError(
                    f"a pipeline axis and the ranks of a stage that multiply to {world.world_size}",
                    f"{ranks} and {everyone.world_size}",
                    hint='mesh=mesh["dp"] for onefold.shard, group=mesh["pp"].get_group() for '
                    "PipelineStage",
                )

        together(world, check)
        return Stages(own, world, is_pipeline=True)

    @property
    def data_ranks(self) -> Group:
        """The ranks of this module alone."""
        return engine_of(self.modules[0]).group

    @property
    def ledger(self) -> Ledger:
        """The bytes that the first module holds."""
        return engine_of(self.modules[0]).ledger

    def compare_messages(self) -> None:
        """Raise if ranks of a device mixed weights: a checkpoint of them replaces a good one.

        A collective, so not a part of what one rank alone may refuse.
        """
        for module in self.modules:
            engine_of(module).context.compare_logs(waits=True)

    def models(self, optimizers: Optimizers) -> list[ShardedModel]:
        """Return the modules with their optimizers, at rest, and with the names of this moment.

        Several modules: each has the optimizers that hold a parameter of it. Raises
        `CheckpointError`: no optimizers of these modules; a weight that cannot be saved.
        """
        chosen = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
        chosen = [optimizer for optimizer in chosen if optimizer is not None]
        number = self.group.rank if self.is_pipeline else None
        models = [
            ShardedModel(engine, module, number=number).with_optimizers(
                chosen if len(self.modules) == 1 else _own(chosen, engine)
            )
            for module, engine in zip(self.modules, map(engine_of, self.modules), strict=True)
        ]
        for model in models:
            model.wait_steps()
        return models


def _own(optimizers: Iterable[Any], engine: Engine) -> list[Any]:
    """The optimizers that hold a parameter of this module; all that are none."""

    def holds(optimizer: Optimizer) -> bool:
        held = (tensor for group in optimizer.param_groups for tensor in group["params"])
        return any(id(tensor) in engine.by_sharded for tensor in held)

    return [o for o in optimizers if not isinstance(o, Optimizer) or holds(o)]


def restore_group(group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Give a param group its saved hyper-parameters; tensors and members of an Enum stay."""
    for key, value in saved.items():
        now = group.get(key)
        if key == "params" or (isinstance(now, Enum) and now == value):
            continue
        if isinstance(now, DTensor) and isinstance(value, Tensor):
            now._local_tensor.copy_(own_view(now, value))
        elif isinstance(now, Tensor):
            now.fill_(value) if not isinstance(value, Tensor) else now.copy_(value)
        else:
            group[key] = value.item() if isinstance(value, Tensor) and now is not None else value
