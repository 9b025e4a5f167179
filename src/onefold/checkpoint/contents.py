"""What a sharded module and its optimizers hold, by name.

    model.FQN                   weights at rest and persistent buffers, in their own dtype
    master.FQN                  fp32 masters of narrower weights
    optim.state.FQN.KEY         moments, step counts: whatever the optimizer keeps per parameter
    optim.param_groups.I.KEY    hyper-parameters; `params` are names
    grad.FQN                    the mean of gradients since the last step, between micro-batches
    partial.R.FQN               those of rank R that no reduction has averaged yet
    rank.R                      what belongs to one rank: random states, its `extra`, its buffers

`model` and `optim` have the names that `torch.distributed.checkpoint.state_dict` gives them.
"""

from __future__ import annotations

import io
import json
import random
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from onefold.checkpoint.manifest import OptimizerRecord
from onefold.checkpoint.storage import bytes_of, read_object
from onefold.engine.engine import Engine
from onefold.errors import CheckpointError, expected
from onefold.unit.parameter import UnitParameter

MODEL, MASTER, OPTIM, RANK = "model", "master", "optim", "rank"
GRAD, PARTIAL = "grad", "partial"


@dataclass(slots=True)
class SavedState:
    """What is saved or loaded: a sharded module and the optimizers of its parameters."""

    engine: Engine
    module: nn.Module
    optimizers: list[Optimizer]

    @staticmethod
    def of(engine: Engine, module: nn.Module, optimizer: object) -> SavedState:
        """Check that `optimizer` is one or several optimizers of this module's parameters."""
        given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        subject = SavedState(engine, module, [])
        for each in given:
            if each is None:
                continue
            if not isinstance(each, Optimizer):
                raise CheckpointError(
                    expected(
                        "optimizer to be a torch.optim.Optimizer, or several",
                        f"a {type(each).__name__}",
                        hint="pass schedulers, scalers and the like as extra={'scheduler': ...}",
                    )
                )
            for tensor in (tensor for group in each.param_groups for tensor in group["params"]):
                if id(tensor) not in engine.by_sharded:
                    raise CheckpointError(
                        expected(
                            f"{type(each).__name__} to hold this module's parameters alone",
                            f"a tensor {list(tensor.shape)} that is not among them",
                            hint="save modules that share an optimizer as parts of one module",
                        )
                    )
            subject.optimizers.append(each)
        return subject

    @property
    def rank(self) -> int:
        return self.engine.group.rank

    def parameters(self) -> list[UnitParameter]:
        return [p for unit in self.engine.units for p in unit.parameters]

    def parameter(self, tensor: Tensor) -> UnitParameter:
        return self.engine.by_sharded[id(tensor)]

    def groups(self) -> list[dict[str, Any]]:
        """The param groups of all optimizers, one after the other."""
        return [group for each in self.optimizers for group in each.param_groups]

    def records(self) -> list[OptimizerRecord]:
        return [
            OptimizerRecord(OptimizerRecord.of(o), len(o.param_groups)) for o in self.optimizers
        ]

    def states(self) -> Iterator[tuple[UnitParameter, Optimizer]]:
        """Every parameter that an optimizer holds, with that optimizer."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for tensor in group["params"]:
                    yield self.parameter(tensor), optimizer

    def aliases(self) -> dict[str, str]:
        """The other names of tied weights, and the name under which each lies."""
        known = {p.fqn for p in self.parameters()}
        named = self.module.named_parameters(remove_duplicate=False)
        return {n: self.parameter(sharded).fqn for n, sharded in named if n not in known}

    def buffers(self) -> dict[str, Tensor]:
        """Persistent buffers by name."""
        return dict(persistent_buffers(self.module))

    def extra_states(self) -> dict[str, nn.Module]:
        """Modules that have a `get_extra_state` of their own, by the name of their state."""
        return {
            f"{prefix}.{_EXTRA}" if prefix else _EXTRA: part
            for prefix, part in self.module.named_modules()
            if type(part).get_extra_state is not nn.Module.get_extra_state
        }


_EXTRA = "_extra_state"


def persistent_buffers(
    module: nn.Module, *, all_names: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """The buffers of a state dict; with `all_names` those of shared modules by each name."""
    for prefix, part in module.named_modules(remove_duplicate=not all_names):
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def state_path(name: str, path: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """("optim", "state", FQN, KEY ...) of an optimizer's state; None for other names.

    `path` is what the planner noted; of a checkpoint without such notes the name has to do.
    """
    if not name.startswith(f"{OPTIM}.state."):
        return None
    if len(path) >= 4:
        return tuple(path)
    fqn, _, key = name.removeprefix(f"{OPTIM}.state.").rpartition(".")
    return (OPTIM, "state", fqn, key)


def wait_steps(engine: Engine) -> None:
    """Everything at rest and true: no whole weights, masters that follow edited weights."""
    engine.rest()
    if any(unit.gradient.reduction.waits for unit in engine.units):
        engine.complete()  # sums of one node are no mean that a checkpoint could keep
    for unit in engine.units:
        unit.wait_step()
        unit.check_untouched()
        unit.refresh_master()


def collect(subject: SavedState) -> dict[str, Any]:
    """This rank's part of the shared state, as views; nested as `torch.distributed.checkpoint` has.

    Replicated tensors (stage 0, scalars, buffers) are there on every rank; torch's planner lets one
    of them write each.
    """
    model: dict[str, Any] = {}
    master: dict[str, Any] = {}
    for parameter in subject.parameters():
        model[parameter.fqn] = parameter.wrap(parameter.local.detach())
        if parameter.unit.master is not None:
            master[parameter.fqn] = parameter.wrap(parameter.stepped)
    if subject.rank == 0:
        model |= subject.buffers()
        model |= {name: part.get_extra_state() for name, part in subject.extra_states().items()}
    found: dict[str, Any] = {MODEL: model}
    if master:
        found[MASTER] = master
    if subject.optimizers:
        state = {
            parameter.fqn: {key: plain(v) for key, v in entry.items() if v is not None}
            for parameter, optimizer in subject.states()
            if (entry := optimizer.state.get(parameter.sharded))
        }
        groups = [_named(group, subject) for group in subject.groups()]
        found[OPTIM] = {"state": state, "param_groups": groups}
    for gradient in subject.engine.gradients.values():
        means, partial = gradient.accumulated()
        for parameter, mean in means.items():
            found.setdefault(GRAD, {})[parameter.fqn] = parameter.wrap(mean)
        for parameter, grad in partial.items():
            own = found.setdefault(PARTIAL, {}).setdefault(str(subject.rank), {})
            own[parameter.fqn] = grad
    return found


def _named(group: dict[str, Any], subject: SavedState) -> dict[str, Any]:
    names = [subject.parameter(tensor).fqn for tensor in group["params"]]
    return {**{key: plain(v) for key, v in group.items() if key != "params"}, "params": names}


def own_nbytes(state: object) -> int:
    """Bytes of this rank's tensors in a nested state."""
    if isinstance(state, dict):
        return sum(own_nbytes(value) for value in state.values())
    if isinstance(state, list | tuple):
        return sum(own_nbytes(value) for value in state)
    if isinstance(state, DTensor):
        return state._local_tensor.nbytes
    return state.nbytes if isinstance(state, Tensor) else 0


def config_of(module: nn.Module) -> dict[str, Any] | None:
    """A Hugging Face model's configuration as JSON has it, with the class that it is of."""
    to_json = getattr(getattr(module, "config", None), "to_json_string", None)
    if not callable(to_json):
        return None
    found = json.loads(str(to_json(use_diff=False)))
    dtypes = {str(p.dtype).removeprefix("torch.") for p in module.parameters()}
    found["architectures"] = [type(module).__name__]
    if len(dtypes) == 1:
        found["dtype"] = dtypes.pop()
    return found


# what belongs to one rank


def fingerprints(buffers: dict[str, Tensor]) -> dict[str, int]:
    """A checksum of each buffer, by which ranks see where they differ."""
    return {
        name: zlib.crc32(bytes_of(buffer.detach().cpu().contiguous()))
        for name, buffer in buffers.items()
    }


def check_readable(state: object, name: str = "") -> None:
    """Raise `CheckpointError` for what could not be read again without running code."""
    if isinstance(state, Tensor):
        return
    if isinstance(state, dict):
        for key, value in state.items():
            check_readable(value, f"{name}.{key}".lstrip("."))
    elif not isinstance(state, str | int | float | bool | None):
        _round_trip(state, name)


def _round_trip(value: object, name: str) -> None:
    written = io.BytesIO()
    try:
        torch.save(value, written)
    except Exception as error:
        raise CheckpointError(
            expected(
                f"{name!r} to hold values that can be saved",
                f"{type(error).__name__}: {error}",
                hint="pass tensors, numbers, strings, lists, dicts, or objects with state_dict()",
            )
        ) from error
    written.seek(0)
    read_object(written, name)


def plain(value: object) -> Any:
    """`value` with objects that have a `state_dict()`, and numpy's numbers, as plain values."""
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()  # type: ignore[attr-defined]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(each) for each in value)  # type: ignore[call-arg]
    state_dict = getattr(value, "state_dict", None)
    return plain(state_dict()) if callable(state_dict) else value


def of_rank(subject: SavedState, extra: object) -> dict[str, Any]:
    """What this rank alone has; buffers that differ between ranks come later.

    Raises `CheckpointError` for an `extra` that could not be read again without running code.
    """
    extra = plain(extra)
    _round_trip(extra, "extra")
    return {"extra": extra, "random": random_states(subject.engine), "buffers": {}}


def random_states(engine: Engine) -> dict[str, Any]:
    """The generators that dropout, shuffling and augmentation draw from."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    device = engine.context.store.device
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["numpy"] = (kind, keys.tolist(), *rest)
    return found


def restore_random_states(engine: Engine, states: dict[str, Any]) -> None:
    """Undo `random_states`."""
    torch.set_rng_state(states["torch"])
    version, inner, gauss = states["python"]
    random.setstate((version, tuple(inner), gauss))
    device = engine.context.store.device
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(tuple(states["numpy"]))
