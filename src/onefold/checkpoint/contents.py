"""The state that a checkpoint holds of a sharded module and its optimizers, by name.

    model.FQN                   weights at rest and persistent buffers, in their own dtype
    master.FQN                  fp32 masters of narrower weights
    optim.state.FQN.KEY         moments and step counts
    optim.param_groups.I.KEY    hyper-parameters; `params` are names
    grad.FQN                    the mean of the gradients since the last step, between micro-batches
    partial.R.FQN               gradients of rank R that no reduction has averaged yet
    rank.R                      the state of rank R alone: random generators, `extra`, its buffers

The names of `model` and `optim` are those of `torch.distributed.checkpoint.state_dict`.
"""

from __future__ import annotations

import io
import json
import random
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter

from onefold.checkpoint.agreement import refusal
from onefold.checkpoint.manifest import OptimizerRecord
from onefold.checkpoint.quantised import notes_of
from onefold.checkpoint.storage import bytes_of, read_object
from onefold.engine.engine import Engine
from onefold.engine.structure import rename
from onefold.layout.module_tree import ModuleTree
from onefold.unit.parameter import UnitParameter

MODEL, MASTER, OPTIM, RANK = "model", "master", "optim", "rank"
GRAD, PARTIAL = "grad", "partial"
_EXTRA = "_extra_state"

TIE = "_onefold_tie"
"""The attribute of a sharded parameter that several stages of a pipeline hold: a `TiedCopy`."""


@dataclass(frozen=True, slots=True)
class TiedCopy:
    """One copy of a weight that stages share. `key`: the same for all copies."""

    key: str
    is_copy: bool  # False: the first one


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
        rename(self.engine, ModuleTree.of(self.module))
        for name, parameter in self.module.named_parameters():
            if id(parameter) not in self.engine.by_sharded:
                raise refusal(
                    "a module whose parameters are sharded",
                    f"a wrapper with {name!r}, which is not",
                    hint="pass the module that was given to onefold.shard, or shard the wrapper",
                )

    @staticmethod
    def of(engine: Engine, module: nn.Module, optimizer: object) -> ShardedModel:
        """Check that `optimizer` is None, or one or several optimizers of this module."""
        given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        optimizers: list[Optimizer] = []
        for each in given:
            if each is None:
                continue
            if not isinstance(each, Optimizer):
                raise refusal(
                    "optimizer to be a torch.optim.Optimizer, or several",
                    f"a {type(each).__name__}",
                    hint="pass schedulers, scalers and the like as extra={'scheduler': ...}",
                )
            for tensor in (tensor for group in each.param_groups for tensor in group["params"]):
                if id(tensor) not in engine.by_sharded:
                    raise refusal(
                        f"{type(each).__name__} to hold this module's parameters alone",
                        f"a tensor {list(tensor.shape)} that is not among them",
                        hint="save modules that share an optimizer as parts of one module",
                    )
            optimizers.append(each)
        return ShardedModel(engine, module, tuple(optimizers))

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
        found = [p for unit in self.engine.units for p in unit.parameters if p.places]
        found = [p for p in found if p.fqn not in self.left_out]
        return [p for p in found if self.names is None or p.fqn in self.names]

    def ties(self) -> dict[str, TiedCopy]:
        """Return the weights that other stages of a pipeline hold, too, by name."""
        found = ((p.fqn, getattr(p.sharded, TIE, None)) for p in self.parameters())
        return {fqn: tie for fqn, tie in found if tie is not None}

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

    def groups(self) -> list[dict[str, Any]]:
        """Return the param groups of all optimizers, one after the other."""
        return [group for each in self.optimizers for group in each.param_groups]

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
            f"{prefix}.{_EXTRA}" if prefix else _EXTRA: part
            for prefix, part in self.module.named_modules()
            if type(part).get_extra_state is not nn.Module.get_extra_state
        }

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


def path_of(name: str, note: Sequence[Any]) -> tuple[Any, ...]:
    """Return the nested keys of a name: the note of torch's planner, or else read from the name.

    ("optim", "state", FQN, KEY ...) and ("optim", "param_groups", INDEX, KEY ...) have four or
    more. The index stays a string where it is no number.
    """
    state, groups = f"{OPTIM}.state.", f"{OPTIM}.param_groups."
    if len(note) < 4 and name.startswith(state):
        fqn, _, key = name.removeprefix(state).rpartition(".")
        return (OPTIM, "state", fqn, key)
    if len(note) < 4 and name.startswith(groups):
        index, _, key = name.removeprefix(groups).partition(".")
        return (OPTIM, "param_groups", int(index) if index.isdecimal() else index, key)
    return tuple(note) or (name,)


def collect(model: ShardedModel) -> dict[str, Any]:
    """Return this rank's part of the shared state, as views, nested as torch's state dicts are.

    Every rank returns tensors that all ranks hold (stage 0, scalars); torch's planner lets one rank
    write each.
    """
    weights: dict[str, Any] = {}
    master: dict[str, Any] = {}
    for parameter in model.parameters():
        weights[parameter.fqn] = parameter.wrap(parameter.local.detach())
        if parameter.unit.master is not None:
            master[parameter.fqn] = parameter.wrap(parameter.stepped)
    notes = model.notes()
    if model.is_first:
        weights |= model.buffers() | notes
        weights |= {name: part.get_extra_state() for name, part in model.extra_states().items()}
    found: dict[str, Any] = {MODEL: weights}
    if master:
        found[MASTER] = master
    if model.optimizers:
        state = {
            parameter.fqn: {key: plain(v) for key, v in entry.items() if v is not None}
            for optimizer in model.optimizers
            for parameter in model.stepped_by(optimizer)
            if parameter.fqn not in model.left_out
            if (entry := optimizer.state.get(parameter.sharded))
        }
        found[OPTIM] = {"state": state, "param_groups": [_named(g, model) for g in model.groups()]}
    for unit in model.engine.units:
        means, partial = unit.gradient.accumulated()
        for parameter, mean in means.items():
            found.setdefault(GRAD, {})[parameter.fqn] = parameter.wrap(mean)
        for parameter, grad in partial.items():
            own = found.setdefault(PARTIAL, {}).setdefault(str(model.rank), {})
            own[parameter.fqn] = grad
    return found


def _named(group: dict[str, Any], model: ShardedModel) -> dict[str, Any]:
    """Return a param group with names in place of parameters."""
    names = [model.parameter(tensor).fqn for tensor in group["params"]]
    names = [name for name in names if name not in model.left_out]
    return {**{key: plain(v) for key, v in group.items() if key != "params"}, "params": names}


def own_nbytes(state: object) -> int:
    """Return the bytes of this rank's tensors in a nested state."""
    tensors = (each for each in tree_iter(state) if isinstance(each, Tensor))
    own = (each._local_tensor if isinstance(each, DTensor) else each for each in tensors)
    return sum(each.nbytes for each in own)


def config_of(module: nn.Module) -> dict[str, Any] | None:
    """Return a Hugging Face model's configuration as JSON values, with its class and dtype."""
    to_json = getattr(getattr(module, "config", None), "to_json_string", None)
    if not callable(to_json):
        return None
    found = json.loads(str(to_json(use_diff=False)))
    dtypes = {str(p.dtype).removeprefix("torch.") for p in module.parameters()}
    found["architectures"] = [type(module).__name__]
    if len(dtypes) == 1:
        found["dtype"] = dtypes.pop()
    return found


def fingerprints(buffers: dict[str, Tensor]) -> dict[str, int]:
    """Return a checksum of each buffer: ranks compare them to find buffers that differ."""
    return {
        name: zlib.crc32(bytes_of(buffer.detach().cpu().contiguous()))
        for name, buffer in buffers.items()
    }


def check_readable(state: object, name: str = "") -> None:
    """Raise `CheckpointError` for a value that could not be read again without running code."""
    if isinstance(state, Tensor | str | int | float | bool | None):
        return
    if isinstance(state, dict):
        for key, value in state.items():
            check_readable(value, f"{name}.{key}".lstrip("."))
        return
    written = io.BytesIO()
    try:
        torch.save(state, written)
    except Exception as error:
        raise refusal(
            f"{name!r} to hold values that can be saved",
            f"{type(error).__name__}: {error}",
            hint="pass tensors, numbers, strings, lists, dicts, or objects with state_dict()",
        ) from error
    written.seek(0)
    read_object(written, name)


def plain(value: object) -> Any:
    """Return `value` with `state_dict()` in place of objects that have one; numpy's numbers too."""
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()  # type: ignore[attr-defined]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(each) for each in value)  # type: ignore[call-arg]
    state_dict = getattr(value, "state_dict", None)
    return plain(state_dict()) if callable(state_dict) else value


def random_states(engine: Engine) -> dict[str, Any]:
    """Return the states of the generators that dropout, shuffling and augmentation draw from."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    device = engine.context.store.device
    if device.type != "cpu":
        found[device.type] = torch.get_device_module(device).get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["numpy"] = (kind, keys.tolist(), *rest)
    return found


def restore_random_states(engine: Engine, states: dict[str, Any]) -> None:
    """Set the generators to the states that `random_states` returned."""
    torch.set_rng_state(states["torch"])
    version, inner, gauss = states["python"]
    random.setstate((version, tuple(inner), gauss))
    device = engine.context.store.device
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(tuple(states["numpy"]))
