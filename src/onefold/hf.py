"""Train with Hugging Face libraries: Trainer, TRL, PEFT and raw Accelerate loops. Generate.

    trainer = Trainer(model=model, args=args, callbacks=[onefold.hf.Callback(stage=3)])
    model.generate(**inputs, past_key_values=onefold.hf.KVCache(budget=2 << 30, disk=folder))

Names are resolved on first use, so `import onefold.hf` imports none of these libraries.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onefold.adapters.hf.accelerate import adopt
    from onefold.adapters.hf.callback import Callback
    from onefold.adapters.hf.mixin import TrainerMixin
    from onefold.adapters.hf.trl import adopt_trainer
    from onefold.adapters.hf.wrap import adopt_frozen
    from onefold.inference.kv_cache import KVCache
    from onefold.inference.prefilling import prefill

_HOMES = {
    "Callback": "onefold.adapters.hf.callback",
    "KVCache": "onefold.inference.kv_cache",
    "TrainerMixin": "onefold.adapters.hf.mixin",
    "adopt": "onefold.adapters.hf.accelerate",
    "adopt_frozen": "onefold.adapters.hf.wrap",
    "adopt_trainer": "onefold.adapters.hf.trl",
    "prefill": "onefold.inference.prefilling",
}

__all__ = [
    "Callback",
    "KVCache",
    "TrainerMixin",
    "adopt",
    "adopt_frozen",
    "adopt_trainer",
    "prefill",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'onefold.hf' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
