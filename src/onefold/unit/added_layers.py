"""Initial values of adapters that PEFT has put into a model on `meta`.

PEFT writes them in its constructors, which is lost there: a product of LoRA is no longer zero. And
the rule of the model around them, which knows linear layers alone, writes over them (peft 0.21.2,
transformers 5: std 0.02 in both factors; a test shows that the model begins as its base).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from typing import Any

from torch import Tensor, nn

from onefold.errors import ConfigError
from onefold.layout.module_tree import ModuleTree

IsMissing = Callable[[Tensor], bool]
ASKED = "init_lora_weights"
"""The option of PEFT that says which values, and the argument of its own rule for them."""


def reset_adapters(tree: ModuleTree, is_missing: IsMissing) -> None:
    """Give the factors of LoRA the values of PEFT's rule; leave those that were loaded.

    Raises: ConfigError: values that only PEFT's constructors make.
    """
    configs = dict[str, Any]()
    for _, part in tree.parts:
        found = getattr(part, "peft_config", None)
        configs |= found if isinstance(found, Mapping) else {}
    for fqn, part in tree.parts:
        for adapter in _missing_adapters(part, is_missing) if configs else ():
            asked = getattr(configs.get(adapter), ASKED, None)
            reset: Any = getattr(part, "reset_lora_parameters", None)
            if reset is None or ASKED not in signature(reset).parameters or asked is None:
                raise _unknown(fqn, f"{type(part).__module__}.{type(part).__name__}")
            if not (isinstance(asked, bool) or str(asked).lower() == "gaussian"):
                raise _unknown(fqn, f"{ASKED}={asked!r}")
            if asked is False:  # then they are those of linear layers
                for factor in _factors(part, adapter):
                    factor.reset_parameters()
            reset(adapter, asked)


def _missing_adapters(part: nn.Module, is_missing: IsMissing) -> Iterator[str]:
    """The adapters of a layer of PEFT that have no values; none of any other module.

    A copy that PEFT trains whole (`modules_to_save`) is no such layer: the model's rule is its own.
    """
    if getattr(part, "get_base_layer", None) is None:
        return
    tables = (getattr(part, name, None) for name in getattr(part, "adapter_layer_names", ()))
    held = dict[str, list[Any]]()
    for table in tables:
        if isinstance(table, nn.ModuleDict | nn.ParameterDict):
            for key, value in table.items():
                is_module = isinstance(value, nn.Module)
                held.setdefault(key, []).extend(value.parameters() if is_module else [value])
    yield from (key for key, tensors in held.items() if any(map(is_missing, tensors)))


def _factors(part: Any, adapter: str) -> Iterator[Any]:
    for table in (part.lora_A, part.lora_B):
        if adapter in table:
            yield table[adapter]


def _unknown(fqn: str, got: str) -> ConfigError:
    wanted = f"adapters on the meta device to be of LoRA, {ASKED} True, False or 'gaussian'"
    hint = "load the base on a real device before get_peft_model, or load the adapter's weights"
    return ConfigError(wanted, f"{got} in {fqn!r}", hint=hint)
