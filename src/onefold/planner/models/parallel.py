"""The tensor parallel plan of the byte GPT: which rank computes which heads and hidden features."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)


class SameOnAll(ParallelStyle):
    """Every rank computes the same: for norms and small tables."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            whole = [Replicate()]
            return tuple(
                DTensor.from_local(tensor, mesh, whole, run_check=False) for tensor in inputs
            )

        def leave(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:  # noqa: ARG001 - torch's names
            return output.to_local()

        hooks: Any = {"input_fn": enter, "output_fn": leave}  # torch declares that they return None
        return distribute_module(module, device_mesh, **hooks)


PLAN: dict[str, type[ParallelStyle]] = {
    "tokens": SameOnAll, "positions": SameOnAll, "norm": SameOnAll,
    "head": SameOnAll, "blocks.*.attention_norm": SameOnAll, "blocks.*.mlp_norm": SameOnAll,
    "blocks.*.attention.qkv": ColwiseParallel, "blocks.*.attention.out": RowwiseParallel,
    "blocks.*.up": ColwiseParallel, "blocks.*.down": RowwiseParallel,
}  # fmt: skip
"""Attention by heads and the hidden layer by features (Megatron-LM, arXiv 1909.08053)."""


def parallelize_gpt(module: nn.Module, mesh: DeviceMesh) -> None:
    """Cut a GPT, or a stage of one, over the ranks of `mesh`, in place."""
    there = dict(module.named_modules())
    plan = {name: style() for name, style in PLAN.items() if name.split(".")[0] in there}
    parallelize_module(module, mesh, plan)
