"""Train with Hugging Face libraries: Trainer, TRL, PEFT and raw Accelerate loops. Generate.

    trainer = Trainer(model=model, args=args, callbacks=[onefold.hf.Callback(stage=3)])
    model.generate(**inputs, past_key_values=onefold.hf.KVCache(budget=2 << 30, disk=folder))

Names are resolved on first use, so `import onefold.hf` imports none of these libraries.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `as`: type checkers take these names for public ones
    from onefold.adapters.hf.accelerate import adopt as adopt
    from onefold.adapters.hf.trainer import Callback as Callback
    from onefold.adapters.hf.trainer import TrainerMixin as TrainerMixin
    from onefold.adapters.hf.wrap import adopt_frozen as adopt_frozen
    from onefold.adapters.hf.wrap import adopt_trainer as adopt_trainer
    from onefold.inference.kv_cache import KVCache as KVCache
    from onefold.inference.prefilling import prefill as prefill

_HOMES = {
    "Callback": "onefold.adapters.hf.trainer",
    "KVCache": "onefold.inference.kv_cache",
    "TrainerMixin": "onefold.adapters.hf.trainer",
    "adopt": "onefold.adapters.hf.accelerate",
    "adopt_frozen": "onefold.adapters.hf.wrap",
    "adopt_trainer": "onefold.adapters.hf.wrap",
    "prefill": "onefold.inference.prefilling",
}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'onefold.hf' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
