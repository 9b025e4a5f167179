"""Programs on a mesh of pipeline, data, sequence and tensor ranks, beside one plain process.

A leg's options have the lengths of `AXES`, arguments of `shard`, and of its pipeline: `schedule`,
`micros` (micro-batches), `window`, `scales` (torch scales sums of means). `flat`: data and sequence
ranks are one axis; `early`: sequences are split before `shard`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import onefold
from onefold.engine.registry import engine_of
from tests.support.programs.frame import Process, Program, Value, differences
from tests.support.programs.mesh_blocks import Looking, Net, cut_tensors
from tests.support.programs.optimizers import Make

AXES = ("pp", "dp", "cp", "tp")
EACH_ONE = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
"""Schedules with one stage a rank."""
EACH_TWO = {
    "Interleaved1F1B": ScheduleInterleaved1F1B, "LoopedBFS": ScheduleLoopedBFS,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": ScheduleZBVZeroBubble, "DualPipeV": ScheduleDualPipeV,
}  # fmt: skip
BACK = ("ZBVZeroBubble", "DualPipeV")  # the last stage lies beside the first one
SEQUENCES, LENGTH = 24, 6  # of a batch: divide by all micro-batches, data and sequence ranks
TIED = [("parts.words.words.weight", "parts.head.weight")]
Named = dict[str, Any]
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class MeshProgram(Program):
    """A program whose module is a `Net` of so many words."""

    words: int = 12

    def process(self, folder: str, kind: type[Process] = Process, **place: Any) -> Process:
        """A process of a kind, on a mesh; dataclasses keep the fields of their bases."""
        return _on_mesh(kind)(self, folder, **place)


@dataclass
class OnMesh(Process):
    """One rank of a mesh, or the plain process."""

    mesh: DeviceMesh | None = None
    data: DeviceMesh | None = None
    stages: list[Any] = field(default_factory=list)
    schedule: Any = None
    splits: list[Any] = field(default_factory=list)  # of sequences, by stage
    loss_fn: Callable[[Tensor, Tensor], Tensor] = field(init=False, repr=False)

    @property
    def options(self) -> dict[str, Any]:
        return self.program.legs[self.leg].options

    def size(self, axis: str) -> int:
        return self.options.get(axis, 1)

    @property
    def modules(self) -> list[Net]:
        """This rank's stages; a plain process has one."""
        return [self.model] if isinstance(self.model, Net) else list(self.model)  # type: ignore

    @property
    def is_piped(self) -> bool:
        return not self.is_plain and self.size("pp") > 1

    # building

    def _shard(self, options: dict[str, Any], whole: nn.Module) -> None:
        options, sizes = dict(options), tuple(options.get(axis, 1) for axis in AXES)
        for name in (*AXES, "schedule", "micros", "window", "scales", "flat", "early"):
            options.pop(name, None)
        self.mesh = mesh = init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
        self.data = mesh["dp"] if self.size("cp") == 1 else mesh["cp"]
        if self.size("dp") > 1 and self.size("cp") > 1:
            both = mesh["dp", "cp"]
            self.data = both._flatten("data") if self.options.get("flat", True) else both
        net, pp = self.model, mesh.get_local_rank("pp")
        kind = self.options.get("schedule", "1F1B") if self.size("pp") > 1 else "none"
        num = self.size("pp") * (2 if kind in EACH_TWO else 1)
        other = num - 1 - pp if kind in BACK else pp + self.size("pp")
        mine = [pp, other] if kind in EACH_TWO else [pp]
        self.model = nn.ModuleList(net.stage(index, num) for index in mine)  # type: ignore
        if self.size("tp") > 1:
            for module in self.modules:
                cut_tensors(module, mesh["tp"])
        of_each = [self.program.optimizers(module) for module in self.modules]
        self.optimizers = [optimizer for several in of_each for optimizer in several]
        if self.program.schedule is not None:
            self.schedules = [self.program.schedule(optimizer) for optimizer in self.optimizers]
        if self.options.get("early"):
            self._split()
        arguments = self._in_folder(options)
        for module, optimizers in zip(self.modules, of_each, strict=True):
            onefold.shard(module, optimizers, mesh=self.data, **arguments)
        if not self.options.get("early"):
            self._split()
        if self.is_piped:
            self._pipe(kind, mine, num)
        if self.leg:
            self.load(self.checkpoint(self.leg - 1))

    def _split(self) -> None:
        assert self.mesh is not None
        has_inputs = self.size("pp") == 1
        for module in self.modules if self.size("cp") > 1 else ():
            if not any(isinstance(each, Looking) for each in module.modules()):
                continue  # a stage without attention
            self.splits.append(onefold.split_sequence(module, self.mesh["cp"], inputs=has_inputs))

    def _pipe(self, kind: str, mine: list[int], num: int) -> None:
        assert self.mesh is not None
        group = self.mesh.get_group("pp")
        self.stages = [
            PipelineStage(module, index, num, torch.device("cpu"), group=group)
            for index, module in zip(mine, self.modules, strict=True)
        ]
        several: Any = self.stages if kind in EACH_TWO else self.stages[0]
        made = (EACH_ONE | EACH_TWO)[kind](
            several, self.options["micros"], loss_fn=lambda out, labels: self.loss_fn(out, labels),
            scale_grads=self.options.get("scales", False),
        )  # fmt: skip
        tied = TIED if self.modules[0].is_tied else None
        self.schedule = onefold.pipeline(made, window=self.options.get("window"), tied=tied)

    # batches and losses

    def batch(self) -> Batch:  # type: ignore[override]
        """Tokens and labels [SEQUENCES, LENGTH] of all ranks."""
        self.batches += 1
        made = torch.Generator().manual_seed(self.batches)
        words = self.program.words  # type: ignore[attr-defined]
        rows = torch.randint(0, words, (SEQUENCES, LENGTH + 1), generator=made)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def own(self, rows: Tensor) -> Tensor:
        """The rows of this data rank, or all."""
        if self.is_plain or self.mesh is None:
            return rows
        return rows.chunk(self.size("dp"))[self.mesh.get_local_rank("dp")]

    def cut(self, rows: Tensor, *, are_labels: bool = False) -> Tensor:
        """The positions of this sequence rank."""
        if not self.splits:
            pieces = rows.chunk(1 if self.is_plain else self.size("cp"), 1)
            return pieces[self.mesh.get_local_rank("cp") if len(pieces) > 1 else 0].contiguous()
        split = self.splits[0]
        return split.labels(rows, shift=False) if are_labels else split.split(rows).contiguous()

    def backward(self, batch: Batch, part: float = 1.0, *, weighs: bool = False) -> Tensor:
        """Backward of the mean loss of a batch's tokens, times `part`; its loss, without a graph.

        `weighs`: by `onefold.weigh`; without it, ranks have the same number of labels each.
        """
        tokens, labels = (self.own(each) for each in batch)
        if self.is_piped:
            return self._run("step", tokens, labels, part, weighs)
        out = self.model(tokens) if self.is_plain else self.modules[0](tokens)
        loss = self._loss(out, self.cut(labels, are_labels=True), part, weighs)
        loss.backward()
        return self.mean_of_data(loss.detach())

    def _loss(self, out: Tensor, labels: Tensor, part: float, weighs: bool) -> Tensor:
        total = loss_sum(out, labels)
        if weighs and not self.is_plain:
            return onefold.weigh(total, self.count(labels), mesh=self.all_data()) * part
        return total * part / self.count(labels)

    def count(self, labels: Tensor) -> Tensor:
        return (labels != -100).sum().clamp(min=1)

    def _run(self, call: str, tokens: Tensor, labels: Tensor, part: float, weighs: bool) -> Tensor:
        """A step of the schedule, whose losses are means of micro-batches, or parts of a sum."""
        mine = self.cut(labels, are_labels=True)
        scales, count = self.options.get("scales", False), self.count(mine)

        def of_micro(out: Tensor, labels: Tensor) -> Tensor:
            if weighs:
                weighed = onefold.weigh(loss_sum(out, labels), count, mesh=self.all_data())
                return weighed * part * (self.options["micros"] if scales else 1)
            return loss_sum(out, labels) * part / (self.count(labels) if scales else count)

        self.loss_fn, losses = of_micro, list[Tensor]()
        given = dict[str, Any]()
        if any(stage.is_last for stage in self.stages):
            given = {"target": mine, "losses": losses}
        arguments = ()
        if any(stage.is_first for stage in self.stages):
            arguments = (self.cut(tokens),)
            positions = torch.arange(tokens.shape[1]).expand_as(tokens)
            given["position_ids"] = self.cut(positions)
        getattr(self.schedule, call)(*arguments, **given)
        total = torch.stack([each.detach() for each in losses]).sum() if losses else None
        if total is not None and scales:
            total = total / len(losses)
        found = [each for each in self.of_stages(total) if each is not None]
        return self.mean_of_data(found[0])

    def all_data(self) -> Any:
        """One group of data and sequence ranks."""
        assert self.data is not None and self.mesh is not None  # noqa: PT018
        if self.data.ndim == 1:
            return self.data
        return self.mesh["dp", "cp"]._flatten("all")

    def mean_of_data(self, value: Tensor) -> Tensor:
        value = value.clone()
        for axis in ("dp", "cp") if self.mesh is not None else ():
            dist.all_reduce(value, group=self.mesh.get_group(axis))
            value /= self.size(axis)
        return value

    def of_stages(self, mine: Any) -> list[Any]:
        """What all ranks of the pipeline have; one a rank."""
        if not self.is_piped:
            return [mine]
        assert self.mesh is not None
        found: list[Any] = [None] * self.size("pp")
        dist.all_gather_object(found, mine, group=self.mesh.get_group("pp"))
        return found

    # all stages

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank; a tied weight has both names."""
        for module in self.modules:
            yield from module.named_parameters(remove_duplicate=False)

    def note_named(self, what: str, mine: dict[str, Value]) -> None:
        """Note values by names, of all stages, in the order of the whole module."""
        whole = {name: full(value) for name, value in mine.items()}
        found = {name: value for each in self.of_stages(whole) for name, value in each.items()}
        for name in sorted(found):
            self.note(f"{what} of {name}", found[name])

    def norm(self, most: float, norm_type: float, how: str) -> Tensor:
        """Clip by the norm of all stages."""
        parameters = self.parameters
        if self.is_plain or how == "torch":
            return torch.nn.utils.clip_grad_norm_(parameters, most, norm_type)
        clipped: Any = self.modules if how == "modules" else parameters
        return onefold.clip_grad_norm_(clipped, most, norm_type)

    def accumulating(self, is_last: bool) -> Any:
        """As in `Process`, of all stages."""
        stack = ExitStack()
        for module in () if self.is_plain or is_last else self.modules:
            stack.enter_context(onefold.accumulate(module))
        return stack

    def unsharded(self, writeback: bool = False) -> Any:
        stack = ExitStack()
        for module in () if self.is_plain else self.modules:
            stack.enter_context(onefold.unsharded(module, writeback=writeback))
        return stack if not self.is_plain else nullcontext()

    # checkpoints

    def save(self, folder: str) -> None:
        """Save all stages, and what they hold, bit for bit."""
        extra = {"schedules": [schedule.state_dict() for schedule in self.schedules[:1]]}
        onefold.save(folder, self._saved(self.modules), self.optimizers, extra=extra)
        states = self._states()
        if self.rank == 0:
            torch.save(states, f"{folder}.states")
        dist.barrier()

    def load(self, folder: str) -> Any:
        """Load, and compare bit for bit with what was saved."""
        extra = onefold.load(folder, self._saved(self.modules), self.optimizers)
        for schedule in self.schedules:
            schedule.load_state_dict(extra["schedules"][0])
        lines = differences(self._states(), torch.load(f"{folder}.states"), {})
        assert not lines, f"loaded other bits: {lines[:4]}"
        dist.barrier()
        return extra

    def _saved(self, modules: list[Net]) -> Any:
        return modules if self.is_piped else modules[0]

    def _states(self) -> Named:
        """Weights, masters and moments of all stages, whole."""
        mine = Named()
        holders = {q: o.state[q] for o in self.optimizers for q in o.state}
        for module in self.modules:
            for parameter in (each for unit in engine_of(module).units for each in unit.parameters):
                name = parameter.fqn
                mine[name] = full(parameter.sharded)
                mine[f"{name} master"] = full(parameter.wrap(parameter.stepped))
                for key, value in holders.get(parameter.sharded, {}).items():
                    mine[f"{name} {key}"] = full(value)
        found = {name: value for each in self.of_stages(mine) for name, value in each.items()}
        if self.modules[0].is_tied:  # one process has one weight, stages have copies
            found = {k: v for k, v in found.items() if not k.startswith("parts.head.weight")}
        return dict(sorted(found.items()))


def loss_sum(out: Tensor, labels: Tensor) -> Tensor:
    """The sum of the losses of tokens that have a label."""
    out = out.float() if out.dtype.itemsize < 4 else out
    return F.cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="sum")


def full(value: Any) -> Any:
    """A whole copy of a tensor, without a graph; a collective where it is cut."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, Tensor) else value


_KINDS: dict[type[Process], type[Process]] = {}


def _on_mesh(kind: type[Process]) -> type[Process]:
    if kind is Process:
        return OnMesh
    return _KINDS.setdefault(kind, dataclass(type(f"{kind.__name__}OnMesh", (OnMesh, kind), {})))


def in_groups(make: Make) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    """Matrices in one group and the others in another one; a stage may have none of either."""

    def optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [p for p in module.parameters() if p.dim() > 1]
        others = [p for p in module.parameters() if p.dim() <= 1]
        return [make([{"params": matrices}, {"params": others, "lr": 3e-3}])]

    return optimizers


# operations


def take_step(
    p: OnMesh, parts: int = 1, deferred: bool = True, clip: float | None = None,
    norm_type: float = 2.0, how: str = "modules", weighs: bool = False, zero: bool | None = True,
) -> None:  # fmt: skip
    """A step of some calls of backward, of schedules on a pipeline."""
    for index in range(parts):
        tokens, labels = p.batch()
        if weighs:  # rows without labels, and rows with few
            labels[::3, 1:] = labels[1::5] = -100
        with p.accumulating(is_last=index + 1 == parts or not deferred):
            p.note("loss", p.backward((tokens, labels), 1 / parts, weighs=weighs))
    if clip is not None:
        p.note("norm", p.norm(clip, norm_type, how).double())
    if p.keeps_gradients:
        p.note_named("grad", {name: q.grad for name, q in p.named()})
    p.step(zero)


@torch.no_grad()
def look(p: OnMesh, is_inference: bool = False) -> None:
    """A loss without backward, by the schedule on a pipeline."""
    tokens, labels = (p.own(each) for each in p.batch())
    if p.is_piped:
        p.note("loss", p._run("eval", tokens, labels, 1.0, False))
        return
    with torch.inference_mode() if is_inference else nullcontext():
        out = p.modules[0](tokens)
        loss = p._loss(out, p.cut(labels, are_labels=True), 1.0, False)
    p.note("loss", p.mean_of_data(loss.clone()))


@torch.no_grad()
def read_outputs(p: OnMesh, length: int = LENGTH) -> None:
    """Whole outputs of each data rank, of a length that sequence ranks need not divide."""
    tokens = p.batch()[0][:, :length]
    out = p.modules[0](p.own(tokens))
    if p.splits:
        out = p.splits[0].gather(out, length=length)
    out = out.contiguous()
    if not p.is_plain and p.mesh is not None:
        found = [torch.empty_like(out) for _ in range(p.size("dp"))]
        dist.all_gather(found, out, group=p.mesh.get_group("dp"))
        out = torch.cat(found)
    p.note("outputs", out)


def step_over(p: OnMesh, length: int = LENGTH - 1) -> None:
    """A step on rows of another length, whose ends may be padding."""
    tokens, labels = p.batch()
    p.note("loss", p.backward((tokens[:, :length], labels[:, :length]), weighs=True))
    p.step()


def read_all(p: OnMesh, how: str = "full_tensor") -> None:
    """Every weight in full."""
    if how == "unsharded":
        with p.unsharded():
            p.note_named("weight", {name: full(q) for name, q in p.named()})
    elif how == "full_state_dict" and not p.is_plain:
        found = [onefold.full_state_dict(module, rank0_only=False) for module in p.modules]
        p.note_named("weight", {n: value for each in found for n, value in each.items()})
    else:
        p.note_named("weight", dict(p.named()))


def read_moments(p: OnMesh) -> None:
    """Every element of the optimizers' states."""
    found = dict[str, Value]()
    states = {q: optimizer.state[q] for optimizer in p.optimizers for q in optimizer.state}
    for name, q in p.named():
        for key, value in sorted(states.get(q, {}).items()):
            if isinstance(value, Tensor) and value.shape == q.shape and value.dim():
                found[f"{name} {key}"] = value
    p.note_named("state", found)


def freeze_part(p: OnMesh, name: str = "0", frozen: bool = True) -> None:
    """Freeze or train one part."""
    for own, q in p.named():
        if own.startswith(f"parts.{name}."):
            q.requires_grad_(not frozen)


def skip_backward(p: OnMesh) -> None:
    """Gradients that no step takes."""
    p.backward(p.batch())
    p.clear(zero=True)


def save_and_restore(p: OnMesh) -> None:
    """Another step, undone by a load."""
    p.clear()
    batch = p.batch()
    if not p.is_plain:
        folder = f"{p.folder}/here{p.batches}"
        p.save(folder)
        p.backward(batch)
        for optimizer in p.optimizers:
            optimizer.step()
        p.clear()
        p.load(folder)


def edit_whole(p: OnMesh) -> None:
    """Edit whole weights."""
    with p.unsharded(writeback=True), torch.no_grad():
        for q in dict.fromkeys(q for _, q in p.named()):
            q.mul_(0.9)
