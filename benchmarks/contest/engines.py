"""The contestants: how each shards the same model, and what one step is in its own words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from contest.case import Case, loss_of

Batches = Sequence[tuple[Tensor, Tensor]]
Step = Callable[[Batches], float]
"""One optimizer step over the micro-batches of this rank; returns their mean loss."""

LR = 3e-4


@dataclass(frozen=True, slots=True)
class Contestant:
    """A running engine: its step, its ledger where it keeps one, the library's own object."""

    step: Step
    ledger: Callable[[], dict[str, int]] | None = None
    engine: Any = None


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine by name, the package it needs, and how it is set up on one rank."""

    name: str
    package: str
    build: Callable[[Case, nn.Module], Contestant]

    @property
    def is_installed(self) -> bool:
        """True if its package can be imported."""
        return find_spec(self.package) is not None


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """The optimizer of every contestant, in torch's fastest implementation."""
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def autocast(case: Case) -> AbstractContextManager[object]:
    """How engines without a precision of their own compute in bf16."""
    return torch.autocast(case.device, torch.bfloat16, enabled=case.dtype == "bf16")


def ordinary_step(
    case: Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    not_last: Callable[[], AbstractContextManager[object]] = nullcontext,
    compute: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Step:
    """The plain training loop; `not_last` is entered around micro-batches but the last."""

    def step(micro_batches: Batches) -> float:
        total = torch.zeros((), device=case.device)
        for number, (tokens, targets) in enumerate(micro_batches, 1):
            is_last = number == len(micro_batches)
            with nullcontext() if is_last else not_last():
                with compute():
                    loss = loss_of(model(tokens), targets) / len(micro_batches)
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return step


def plain(case: Case, model: nn.Module) -> Contestant:
    """No engine: one process."""
    return Contestant(ordinary_step(case, model, adamw(model), compute=lambda: autocast(case)))


def ddp(case: Case, model: nn.Module) -> Contestant:
    """Torch DistributedDataParallel, gradients in its buckets."""
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    step = ordinary_step(
        case, wrapped, adamw(model), not_last=wrapped.no_sync, compute=lambda: autocast(case)
    )
    return Contestant(step)


def zero_redundancy(case: Case, model: nn.Module) -> Contestant:
    """Torch ZeroRedundancyOptimizer over DDP: stage 1."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=True,
        lr=LR,
        fused=True,
    )
    step = ordinary_step(
        case, wrapped, optimizer, not_last=wrapped.no_sync, compute=lambda: autocast(case)
    )
    return Contestant(step)


def fsdp2(case: Case, model: nn.Module, *, reshard: bool, is_offloaded: bool = False) -> Contestant:
    """Torch fully_shard on every block and the root; `reshard` frees weights after forward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    policy = MixedPrecisionPolicy()
    if case.dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if not dist.is_initialized():  # a world of one needs a group here
        dist.init_process_group(case.backend)
    mesh = init_device_mesh(case.device, (dist.get_world_size(),))
    options = {
        "mesh": mesh, "mp_policy": policy, "reshard_after_forward": reshard,
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if is_offloaded else OffloadPolicy(),
    }  # fmt: skip
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    if reshard:  # gradients leave with every micro-batch, or they would be held whole
        return Contestant(ordinary_step(case, model, adamw(model)))

    class NotLast(AbstractContextManager[None]):
        def __enter__(self) -> None:
            model.set_requires_gradient_sync(False)

        def __exit__(self, *_: object) -> None:
            model.set_requires_gradient_sync(True)

    return Contestant(ordinary_step(case, model, adamw(model), not_last=NotLast))


def deepspeed(
    case: Case, model: nn.Module, *, stage: int, offload: dict[str, Any] | None = None
) -> Contestant:
    """DeepSpeed with torch's fused AdamW, or its own on the CPU where it offloads.

    `offload` is what its section about ZeRO says beside the stage; all else is its default.
    """
    import deepspeed as ds

    config = {
        "train_micro_batch_size_per_gpu": case.shape.rows,
        "gradient_accumulation_steps": case.accumulate,
        "zero_optimization": {"stage": stage, **(offload or {})},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": case.dtype == "bf16"},
        "gradient_clipping": 0.0,  # it clips at 1.0 unless told otherwise
        "steps_per_print": 10**9,
    }
    optimizer: torch.optim.Optimizer
    if offload is None:
        optimizer = adamw(model)
    else:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        # left to itself, it swaps fp32 weights out as bf16 on a CPU
        if "offload_param" in offload and case.dtype == "fp32":
            ds.zero.Init(module=model, config_dict_or_path=config)
        optimizer = DeepSpeedCPUAdam(model.parameters(), lr=LR, weight_decay=0.01)
    engine, *_ = ds.initialize(model=model, optimizer=optimizer, config=config)

    def step(micro_batches: Batches) -> float:
        total = torch.zeros((), device=case.device)
        for tokens, targets in micro_batches:
            loss = loss_of(engine(tokens), targets)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / len(micro_batches)
        return total.item()

    return Contestant(step, engine=engine)


def onefold(case: Case, model: nn.Module, *, stage: int, offload: object = None) -> Contestant:
    """This library."""
    import onefold as library

    optimizer = adamw(model)
    precision = "bf16" if case.dtype == "bf16" else None
    library.shard(model, optimizer, stage=stage, precision=precision, offload=offload)

    def ledger() -> dict[str, int]:
        report = library.report(model)
        sent = {f"sent {name}": traffic.sent_nbytes for name, traffic in report.last_step.items()}
        kinds = {kind: report.nbytes(kind) for kind in report.memory}
        return {"now": report.total.now, "peak": report.total.peak, **kinds, **sent}

    step = ordinary_step(case, model, optimizer, not_last=lambda: library.accumulate(model))
    return Contestant(step, ledger)


def _of_stage(
    build: Callable[..., Contestant], stage: int
) -> Callable[[Case, nn.Module], Contestant]:
    return lambda case, model: build(case, model, stage=stage)


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("plain", "torch", plain),
        Engine("ddp", "torch", ddp),
        Engine("onefold 0", "onefold", _of_stage(onefold, 0)),
        Engine("zero-redundancy", "torch", zero_redundancy),
        Engine("onefold 1", "onefold", _of_stage(onefold, 1)),
        Engine("deepspeed 1", "deepspeed", _of_stage(deepspeed, 1)),
        Engine("deepspeed 2", "deepspeed", _of_stage(deepspeed, 2)),
        Engine("onefold 2", "onefold", _of_stage(onefold, 2)),
        Engine("fsdp2 keep", "torch", lambda case, model: fsdp2(case, model, reshard=False)),
        Engine("fsdp2 reshard", "torch", lambda case, model: fsdp2(case, model, reshard=True)),
        Engine("onefold 3", "onefold", _of_stage(onefold, 3)),
        Engine("deepspeed 3", "deepspeed", _of_stage(deepspeed, 3)),
    )
}
"""In the order of their turns: those that are compared are neighbours, so that what the machine
does for a minute touches both."""


def torchao(case: Case, model: nn.Module) -> Contestant:
    """One process with torchao's optimizer, whose states and step are on the CPU."""
    from torchao.optim import CPUOffloadOptimizer

    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, fused=True)
    return Contestant(ordinary_step(case, model, optimizer, compute=lambda: autocast(case)))


CPU_OFFLOAD = {"device": "cpu", "pin_memory": False}
SWAPPED_NUMEL = 8_000_000
"""Elements of a step of DeepSpeed's from disk. Its default of 1e9 holds all states in memory."""


def nvme_offload(model: nn.Module, folder: str) -> dict[str, Any]:
    """DeepSpeed's states and parameters on disk, with buffers as small as the model allows.

    Its defaults are sized for models of many billions: 2 GB of buffers a rank for parameters.
    """
    largest = max(p.numel() for p in model.parameters())
    where = {"device": "nvme", "nvme_path": folder, "pin_memory": False}
    return {
        "offload_optimizer": where,
        "offload_param": {**where, "buffer_size": largest, "buffer_count": 5},
        "sub_group_size": SWAPPED_NUMEL,
    }


def offloaded(folder: str) -> dict[str, Engine]:
    """The contestants with states off the device, by name: stage and tier. `folder` is on disk."""
    on_cpu = {"offload_optimizer": CPU_OFFLOAD}

    def ours(stage: int, offload: str) -> Callable[[Case, nn.Module], Contestant]:
        return lambda case, model: onefold(case, model, stage=stage, offload=offload)

    def theirs(stage: int) -> Callable[[Case, nn.Module], Contestant]:
        return lambda case, model: deepspeed(case, model, stage=stage, offload=on_cpu)

    def from_disk(case: Case, model: nn.Module) -> Contestant:
        return deepspeed(case, model, stage=3, offload=nvme_offload(model, folder))

    def fully_sharded(case: Case, model: nn.Module) -> Contestant:
        return fsdp2(case, model, reshard=True, is_offloaded=True)

    engines = (
        Engine("onefold 2 cpu", "onefold", ours(2, "optimizer")),
        Engine("deepspeed 2 cpu", "deepspeed", theirs(2)),
        Engine("onefold 3 cpu", "onefold", ours(3, "cpu")),
        Engine("deepspeed 3 cpu", "deepspeed", theirs(3)),
        Engine("fsdp2 cpu", "torch", fully_sharded),
        Engine("torchao cpu", "torchao", torchao),
        Engine("onefold 3 disk", "onefold", ours(3, f"disk:{folder}")),
        Engine("deepspeed 3 disk", "deepspeed", from_disk),
    )
    return {engine.name: engine for engine in engines}


def both_ways() -> dict[str, Engine]:
    """Who steps states in CPU memory, of a GPU: the CPU, or the GPU, through which they stream."""
    from onefold import Offload

    def ours(step: str) -> Callable[[Case, nn.Module], Contestant]:
        offload = Offload(optimizer="cpu", step=step)
        return lambda case, model: onefold(case, model, stage=2, offload=offload)

    found = {"onefold 2 stepped": "cpu", "onefold 2 streamed": "device"}
    return {name: Engine(name, "onefold", ours(step)) for name, step in found.items()}


def everyone(folder: str = "") -> dict[str, Engine]:
    """All contestants by name. `folder` is on disk."""
    return ENGINES | offloaded(folder) | both_ways()
