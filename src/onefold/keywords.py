"""Say which keyword was meant where a public function is called with one that it lacks.

The names are those that DeepSpeed, FSDP, FSDP2, Accelerate and Lightning have for the same choice.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from onefold.config import nearest_word
from onefold.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])


class UnknownKeyword(ConfigError, TypeError):
    """A keyword that the function lacks. Python's own error for it is a `TypeError`, too."""


def names_keywords(meant: Mapping[str, str]) -> Callable[[Function], Function]:
    """Decorate a function: an unknown keyword raises `UnknownKeyword` with what to write instead.

    The signature stays the same. Errors from inside the function pass as they are.

    Args:
        meant: what to write, by the names that other libraries have, separated by spaces; "{}" is
            the value that was passed.
    """
    hints = {name: hint for names, hint in meant.items() for name in names.split()}

    def decorate(function: Function) -> Function:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                known = list(signature(function).parameters)
                unknown = [name for name in kwargs if name not in known]
                ran = error.__traceback__ is not None and error.__traceback__.tb_next is not None
                if ran or not unknown:
                    raise
                problem = _problem(function.__name__, unknown[0], known, kwargs, hints)
            raise problem

        return call  # type: ignore[return-value]

    return decorate


def _problem(
    function: str,
    name: str,
    known: list[str],
    given: Mapping[str, object],
    hints: Mapping[str, str],
) -> UnknownKeyword:
    hint = hints.get(name, "").format(repr(given[name])) or nearest_word(name, known)
    wanted = f"arguments of onefold.{function}: {', '.join(known)}"
    return UnknownKeyword(wanted, f"{name}=", hint=hint or f"leave {name}= out")


SHARD = {
    "level zero zero_stage zero_level zero_optimization_stage": "stage={}",
    "sharding_strategy reshard_after_forward": (
        "stage=3 is FULL_SHARD, stage=2 SHARD_GRAD_OP, stage=0 NO_SHARD; a mesh of two "
        'axes with wire="replicas" is HYBRID_SHARD'
    ),
    "mixed_precision mp_policy dtype param_dtype compute_dtype amp": 'precision="bf16" or "fp16"',
    "bf16 bfloat16": 'precision="bf16"',
    "fp16 half float16": 'precision="fp16"',
    "offload_optimizer offload_optimizer_device": 'offload="optimizer"',
    "cpu_offload offload_policy offload_params offload_param offload_param_device": (
        'offload="optimizer" moves optimizer state to CPU memory, offload="cpu" parameters too'
    ),
    "nvme_path offload_path offload_folder": 'offload="disk:PATH"',
    "process_group group device_mesh dp_mesh": "mesh= takes a DeviceMesh or a ProcessGroup",
    "auto_wrap_policy wrap_policy modules_to_wrap transformer_layer_cls_to_wrap": (
        "units= takes a list of submodules, or a predicate over modules"
    ),
    "compression zero_quantized_weights zero_quantized_gradients zero_hpz_partition_size": (
        'wire="zero++"'
    ),
    "model": "the module is the first argument: onefold.shard(model, optimizer)",
    "optim optimizers opt": "optimizer= takes one optimizer, or a list of several",
    "config ds_config config_params deepspeed_config": (
        "onefold.shard(module, optimizer, **onefold.from_deepspeed(config))"
    ),
    "gradient_accumulation_steps accumulation_steps": "with onefold.accumulate(module): ...",
    "max_grad_norm gradient_clipping clip_grad": (
        "call onefold.clip_grad_norm_, or torch.nn.utils.clip_grad_norm_, before the step"
    ),
    "use_orig_params": "leave it out: parameters always keep their names and objects",
    "sync_module_states": "leave it out: all ranks start from the values of rank 0",
}
"""What to write for `onefold.shard`, by the names of other libraries."""
