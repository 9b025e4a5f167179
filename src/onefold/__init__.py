"""Onefold keeps every training state exactly once: ZeRO stages 0-3 for plain PyTorch scripts.

    import onefold
    onefold.shard(model, optimizer, stage=3)

Names are resolved on first use, so importing this package costs nothing and starts nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onefold.adapters.deepspeed.convert import from_deepspeed
    from onefold.api import accumulate, report, shard, stream, unsharded
    from onefold.axes.clipping import clip_grad_norm_
    from onefold.axes.pipelines.drive import pipeline
    from onefold.axes.sequence.splitting import split_sequence
    from onefold.checkpoint.full import full_state_dict
    from onefold.checkpoint.load import load
    from onefold.checkpoint.pretrained import load_pretrained, save_pretrained
    from onefold.checkpoint.save import save
    from onefold.config import Offload, Precision
    from onefold.engine.ema import MovingAverage, ema
    from onefold.engine.precision import GradScaler
    from onefold.errors import (
        CheckpointError,
        ConfigError,
        OnefoldError,
        StateError,
        TierError,
        WireError,
    )
    from onefold.inference.stream import generating
    from onefold.layered.accumulate import accumulate_layers
    from onefold.layered.choice import measure_noise
    from onefold.mixed.reshare import reshare
    from onefold.mixed.sampler import RowSampler, weigh
    from onefold.outer.islands import Islands, islands
    from onefold.outer.meeting import Meeting
    from onefold.outer.periods import Periods
    from onefold.planner.planned_axes import ModelAxes
    from onefold.planner.planning import Cluster, plan
    from onefold.planner.result import Plan
    from onefold.recording.recorder import record
    from onefold.recording.report import Report
    from onefold.wire_config import Wire

__version__ = "0.1.0"

_HOMES = {
    "accumulate": "onefold.api",
    "generating": "onefold.inference.stream",
    "report": "onefold.api",
    "shard": "onefold.api",
    "stream": "onefold.api",
    "unsharded": "onefold.api",
    "full_state_dict": "onefold.checkpoint.full",
    "load": "onefold.checkpoint.load",
    "load_pretrained": "onefold.checkpoint.pretrained",
    "save_pretrained": "onefold.checkpoint.pretrained",
    "save": "onefold.checkpoint.save",
    "clip_grad_norm_": "onefold.axes.clipping",
    "Offload": "onefold.config",
    "Precision": "onefold.config",
    "from_deepspeed": "onefold.adapters.deepspeed.convert",
    "MovingAverage": "onefold.engine.ema",
    "ema": "onefold.engine.ema",
    "CheckpointError": "onefold.errors",
    "ConfigError": "onefold.errors",
    "OnefoldError": "onefold.errors",
    "StateError": "onefold.errors",
    "TierError": "onefold.errors",
    "WireError": "onefold.errors",
    "Islands": "onefold.outer.islands",
    "islands": "onefold.outer.islands",
    "Meeting": "onefold.outer.meeting",
    "Periods": "onefold.outer.periods",
    "record": "onefold.recording.recorder",
    "Report": "onefold.recording.report",
    "RowSampler": "onefold.mixed.sampler",
    "GradScaler": "onefold.engine.precision",
    "pipeline": "onefold.axes.pipelines.drive",
    "accumulate_layers": "onefold.layered.accumulate",
    "measure_noise": "onefold.layered.choice",
    "Cluster": "onefold.planner.planning",
    "ModelAxes": "onefold.planner.planned_axes",
    "Plan": "onefold.planner.result",
    "plan": "onefold.planner.planning",
    "reshare": "onefold.mixed.reshare",
    "split_sequence": "onefold.axes.sequence.splitting",
    "weigh": "onefold.mixed.sampler",
    "Wire": "onefold.wire_config",
}

__all__ = [
    "CheckpointError",
    "Cluster",
    "ConfigError",
    "GradScaler",
    "Islands",
    "Meeting",
    "ModelAxes",
    "MovingAverage",
    "Offload",
    "OnefoldError",
    "Periods",
    "Plan",
    "Precision",
    "Report",
    "RowSampler",
    "StateError",
    "TierError",
    "Wire",
    "WireError",
    "accumulate",
    "accumulate_layers",
    "clip_grad_norm_",
    "ema",
    "from_deepspeed",
    "full_state_dict",
    "generating",
    "islands",
    "load",
    "load_pretrained",
    "measure_noise",
    "pipeline",
    "plan",
    "record",
    "report",
    "reshare",
    "save",
    "save_pretrained",
    "shard",
    "split_sequence",
    "stream",
    "unsharded",
    "weigh",
]


_ROOMS = {"experts": "onefold.axes.experts", "hf": "onefold.hf", "lightning": "onefold.lightning"}
"""Imported on first use: `onefold.hf.Callback` after `import onefold`."""


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(_ROOMS[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'onefold' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
