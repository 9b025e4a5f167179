"""Cast the arguments of a unit's forward; agree on all ranks whether gradients are finite."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence

from onefold.engine.captured import check_scale
from onefold.engine.engine import Engine
from onefold.engine.pipelined import Pipeline, calling_pipelines
from onefold.tier import accelerator
from onefold.unit.dtensors import ShardedParameter
from onefold.unit.unit import unit_of
from onefold.wire.collectives import VOTE, Group

_OF_PACKED = ("data", "sorted_indices", "unsorted_indices")


def map_tensors(change: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Apply `change` to the tensors in tuples (named ones, too), lists and dicts.

    Objects of other classes (caches, masks) pass through unchanged and keep their identity.
    """
    if isinstance(values, Tensor):
        return change(values)
    if isinstance(values, PackedSequence):  # its `batch_sizes` are always on the CPU
        moved = {name: map_tensors(change, getattr(values, name)) for name in _OF_PACKED}
        return values._replace(**moved)
    if isinstance(values, tuple) and getattr(values, "_fields", None):  # a named tuple
        return type(values)._make(map_tensors(change, value) for value in values)  # type: ignore[attr-defined]
    if type(values) in (tuple, list):
        return type(values)(map_tensors(change, value) for value in values)
    if type(values) is dict:
        return {key: map_tensors(change, value) for key, value in values.items()}
    return values


def cast_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Cast the floating-point tensors that a module is called with; None if all have the dtype."""
    if not kwargs and all(
        [isinstance(v, Tensor) and (v.dtype is dtype or not v.is_floating_point()) for v in args]
    ):
        return None
    return cast_floating(args, dtype), cast_floating(kwargs, dtype)


def cast_floating(values: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in tuples, lists and dicts to `dtype`."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, values)


class GradScaler(torch.amp.GradScaler):
    """torch's dynamic loss scale, for sharded gradients.

    Each rank sees only its shard of the gradients. An overflow on any rank skips the step, and
    lowers the scale, on every rank: those of all data, tensor and expert axes, and of all stages of
    a pipeline. A stage without parameters that computes the loss calls `update` alone. `device`
    defaults to the accelerator, or to the CPU where there is none.
    """

    def __init__(self, device: str | None = None, **options: Any) -> None:
        super().__init__(device or accelerator.kind() or "cpu", **options)
        self._pipelines: dict[Pipeline, Tensor | None] = {}  # that share this step: their verdicts

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or several, by the scale; see torch.amp.GradScaler."""
        if self._enabled:
            check_scale()
        for pipeline in calling_pipelines():
            self._pipelines.setdefault(pipeline, None)
        return super().scale(outputs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Change the scale for the next step; see torch.amp.GradScaler."""
        for pipeline in self._pipelines if self._enabled else ():
            verdict = self._agreed(pipeline)
            self._per_optimizer_states[id(pipeline)]["found_inf_per_device"] = {
                verdict.device: verdict
            }
        self._pipelines.clear()
        super().update(new_scale)

    def _agreed(self, pipeline: Pipeline) -> Tensor:
        """Return 1.0 if a stage has a gradient that is not finite, once a step. A collective."""
        verdict = self._pipelines.get(pipeline)
        if verdict is None:
            label = f"overflow flag of all stages: {pipeline.places}"
            verdict = _overflow(pipeline.engines, pipeline.scalers, label).squeeze()
            self._pipelines[pipeline] = verdict
        return verdict

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:  # fmt: skip
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        engines: dict[Engine, None] = {}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            grad, is_sharded = parameter.grad, isinstance(parameter, ShardedParameter)
            if is_sharded and (owner := parameter.owner()):
                engine = unit_of(owner).owner
                if isinstance(engine, Engine):
                    engines.setdefault(engine)
            if grad is not None and is_sharded:
                grad = grad._local_tensor if isinstance(grad, DTensor) else grad.detach()
            if grad is not None:
                by_kind[grad.device, grad.dtype].append(grad)
        verdicts: dict[torch.device, Tensor] = {found_inf.device: found_inf.clone()}
        for (device, _), grads in by_kind.items():
            verdict = verdicts.setdefault(device, found_inf.to(device, copy=True))
            with torch.no_grad():
                torch._amp_foreach_non_finite_check_and_unscale_(
                    grads, verdict, inv_scale.to(device)
                )
        for engine in engines:
            for verdict in verdicts.values():
                engine.context.everyone.all_reduce_max(verdict)
        for pipeline in {engine.pipeline: None for engine in engines if engine.pipeline}:
            of_all = self._agreed(pipeline)
            verdicts = {device: of_all.to(v).maximum(v) for device, v in verdicts.items()}
        return verdicts


def are_gradients_finite(engine: Engine) -> bool:
    """Return False if a gradient is not finite on some rank: then on all. A collective.

    A rank sees its own rows only, so it asks the others, also those of other pipeline stages. A
    GPU's host waits for the answer. This reads the gradients as they are now, also where they were
    cleared, zeroed or unscaled since the reduction, or stepped by another optimizer. Stages of one
    rank whose optimizers step one after the other get one answer.
    """
    if not engine.units:
        return True
    pipeline = engine.pipeline
    is_finite = None if pipeline is None else pipeline.verdicts.pop(engine, None)
    if is_finite is None and pipeline is None:
        is_finite = not _overflow([engine]).item()
    elif is_finite is None and pipeline is not None:
        label = f"gradients of all stages: {pipeline.places}"
        is_finite = not _overflow(pipeline.engines, pipeline.steppers, label).item()
        others = (each for each in pipeline.engines if each is not engine and each.units)
        pipeline.verdicts.update(dict.fromkeys(others, is_finite))
    for unit in engine.units if not is_finite else ():
        unit.gradient.reduction.feedback.forget(unit.parameters)
    return bool(is_finite)


def is_step_sound(engines: Iterable[Engine]) -> bool:
    """Return False if quantized gradients are not finite on some rank: no rank steps. A collective.

    Quantization may hide that a gradient was not finite, so a loss scale might miss it. Exact
    messages are not checked: gradients are as in plain PyTorch. `engines` have quantized ones.
    """
    unsound = [engine for engine in engines if not are_gradients_finite(engine)]
    for engine in unsound:
        engine.ledger.skip_step()
        if engine.group.rank == 0:
            warnings.warn(
                f"step {engine.ledger.steps + 1} is skipped on every rank: gradients are not "
                "finite on at least one",
                RuntimeWarning,
                stacklevel=5,
            )
    return not unsound


def _overflow(engines: Iterable[Engine], axis: Group | None = None, label: str = VOTE) -> Tensor:
    """Return 1.0 if a gradient is not finite on some rank of a module, or of `axis`, else 0.0."""
    sharers = list(engines)
    is_bad = torch.zeros(1, device=sharers[0].context.store.device)
    parameters = (p for engine in sharers for unit in engine.units for p in unit.parameters)
    grads = [rows for p in parameters if (rows := p.own_grad()) is not None and rows.numel()]
    if grads:  # the largest magnitude is NaN if an element is
        largest = torch.stack([n.to(is_bad) for n in torch._foreach_norm(grads, math.inf)])
        is_bad += largest.isfinite().logical_not().any()
    groups = {tuple(each.global_ranks()): each for each in (e.context.everyone for e in sharers)}
    for group in groups.values():
        group.all_reduce_max(is_bad)
    if axis is not None:
        axis.all_reduce_max(is_bad, label)
    return is_bad
