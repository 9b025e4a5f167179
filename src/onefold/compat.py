"""What torch 2.11 to 2.15 call by different names, or lack. No other file chooses between these.

torch 2.11 and 2.12   older names of three collectives, and no rule for `detach_` of a DTensor
torch 2.11            no rule for `is_pinned` of a DTensor, no time limit in the launcher, no
                      exchange of bytes between storages, and another name of the function by which
                      stages of a pipeline learn shapes

`untraced` alone asks for private names of dynamo, which are the same in all of these.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed
from torch._C._dynamo import eval_frame

from onefold.errors import ConfigError

Given = ParamSpec("Given")
Returned = TypeVar("Returned")

_SKIPS_ITS_FRAME = eval_frame._FrameExecStrategy(
    eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
)


def untraced(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Keep dynamo from tracing a function and what it calls, for little where nobody traces.

    `torch._disable_dynamo` takes eight calls more, which a hook of each gradient would pay. Dynamo
    asks for the attribute where a trace meets a function, and for the strategy of its code where
    one is called from C, as hooks are (torch 2.11 to 2.15).
    """
    disabled: Callable[Given, Returned] = torch._disable_dynamo(function)

    @wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        return (function if running_trace() is None else disabled)(*args, **kwargs)

    return unseen(call)


def unseen(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Keep dynamo from tracing a function; what it calls is traced, unless it sees to that."""
    hook: Any = function
    hook._torchdynamo_disable = True
    eval_frame.set_code_exec_strategy(hook.__code__, _SKIPS_ITS_FRAME)
    return function


running_trace = eval_frame.get_eval_frame_callback
"""Not None where dynamo traces what is called."""


@dataclass(frozen=True, slots=True)
class Names:
    """How this torch calls functions whose names differ between versions."""

    all_gather: str  # of a process group
    all_to_all: str  # of a process group
    reduce_scatter: str  # of torch.distributed
    swap: str  # of an untyped storage: exchange the bytes of two; empty if there is none

    @staticmethod
    def from_package(package: Any) -> Names:
        """Find the names in `package`, which is torch. Raises `ConfigError` if one is missing."""
        group, storage = package.distributed.ProcessGroup, package.UntypedStorage
        return Names(
            all_gather=_first(group, "all_gather_single", "_allgather_base"),
            all_to_all=_first(group, "all_to_all_single", "alltoall_base"),
            reduce_scatter=_first(
                package.distributed, "reduce_scatter_single", "reduce_scatter_tensor"
            ),
            swap="_swap_data_ptr_" if _offers(storage, "_swap_data_ptr_") else "",
        )


def _offers(owner: Any, name: str) -> bool:
    return getattr(owner, name, None) is not None


def _first(owner: Any, *names: str) -> str:
    """The first of `names` that `owner` offers, the newest first."""
    for name in names:
        if _offers(owner, name):
            return name
    hint = "pip install 'torch>=2.11,<2.16'"
    raise ConfigError(f"{owner.__name__} of torch to have {' or '.join(names)}", "none", hint=hint)


NAMES = Names.from_package(torch)

LEARN_SHAPES = {"_forward_metadata_inference", "_shape_inference"}
"""Functions of a pipeline's stage that run its module on memory without values, to learn shapes: of
torch 2.12 and later, and of 2.11."""


def known_fields(kind: Callable[..., Any], **fields: Any) -> dict[str, Any]:
    """The ones among `fields` that `kind` takes in this torch."""
    known = inspect.signature(kind).parameters
    return {name: value for name, value in fields.items() if name in known}


def add_missing_rules() -> None:
    """Let inference mode gather DTensors, and DLPack see that they are not pinned.

    The one calls `detach_`, for which torch 2.11 has no rule: torch 2.13 gives it that of `detach`.
    The other calls `is_pinned`, which torch 2.12 answers for the rows of a rank.
    """
    from torch.distributed.tensor import DTensor

    rules = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    aten = torch.ops.aten
    rule = rules.get(aten.detach.default)  # torch 2.15 keeps both rules elsewhere
    if rule is not None:
        rules.setdefault(aten.detach_.default, rule)
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers.setdefault(aten.is_pinned.default, lambda op, args, _: op(args[0]._local_tensor))


def lacks() -> str:
    """Say what does not work with this torch; empty from torch 2.12 on."""
    if NAMES.swap:  # the others are new in 2.12, too
        return ""
    return (
        "no ring of buffers on GPUs, no Adagrad with offload, ranks are killed after 30 s, "
        "no pipelines in a V over gloo"
    )
