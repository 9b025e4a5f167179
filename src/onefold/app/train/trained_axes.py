"""What a rank of a run takes: its part of the model (`--tp --pp --cp`) and its rows (`--rows`).

tp   ranks share each layer: heads of attention, hidden features (tensor parallel)
pp   ranks have blocks one after the other, and pass micro-batches on (pipeline)
cp   ranks share each row: a piece of its positions (sequence, or context, parallel)

The other ranks have rows of their own: the data axis.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import onefold
from onefold.app.train.corpus import own_rows
from onefold.app.train.job import Job
from onefold.errors import ConfigError
from onefold.mixed.sampler import check_shares, split_rows
from onefold.mixed.speeds import RowSpeeds, even, measure
from onefold.pages import page
from onefold.planner.models.gpt import GPT, PRESETS, GPTStage
from onefold.planner.models.loader import logits_of
from onefold.wire.world import World

AUTO = "auto"

Loss = Callable[[Tensor, Tensor], Tensor]


def preflight(job: Job, world_size: int) -> None:
    """Refuse axes and shares of rows that cannot work, before any rank starts."""
    if job.model_ranks == 1:
        if isinstance(job.row_shares, tuple):
            check_shares(job.row_shares, world_size)
        return
    if job.row_shares is not None:
        hint = "leave --rows out: ranks that share a layer or a row have the same rows"
        raise ConfigError("no --rows with --tp, --pp and --cp", "both", hint=hint)
    axes = f"--tp {job.tp} --pp {job.pp} --cp {job.cp}"
    if world_size % job.model_ranks:
        hint = f"--ranks {job.model_ranks}, or a multiple of it"
        raise ConfigError(f"{axes} to divide the ranks", f"{world_size} ranks", hint=hint)
    sizes = PRESETS.get(job.model)
    if sizes is None:
        wanted = f"--model {', '.join(PRESETS)} with --tp, --pp and --cp"
        hint = f"{page('examples/three_axes.py')} does the same in a script of yours"
        raise ConfigError(wanted, job.model, hint=hint)
    if sizes.num_heads % job.tp:
        wanted = f"--tp to divide the {sizes.num_heads} heads of {job.model}"
        raise ConfigError(wanted, job.tp, hint="each rank has whole heads")
    if job.pp > sizes.num_layers:
        wanted = f"--pp of at most {sizes.num_layers}, the blocks of {job.model}"
        raise ConfigError(wanted, job.pp, hint="each stage has a block at least")
    if job.cp > job.seq:
        wanted = f"--cp of at most --seq {job.seq}"
        raise ConfigError(wanted, job.cp, hint="each rank has a position at least")
    if job.pp > 1:
        _check_pipeline(job)


def _check_pipeline(job: Job) -> None:
    if job.accumulate < job.pp:
        wanted = f"--accumulate of at least --pp {job.pp}, the micro-batches of a pipeline"
        hint = f"--accumulate {4 * job.pp} leaves each stage idle for a fifth of the time"
        raise ConfigError(wanted, job.accumulate, hint=hint)
    others = {
        "--compile": job.compile,
        "--report": job.report is not None,
        "--precision fp16": job.precision == "fp16",
        "--offload with --clip 0 (steps in backward)": job.steps_in_backward,
    }
    for flag, is_given in others.items():
        if is_given:
            raise ConfigError(f"no {flag} with --pp", "both", hint=f"leave {flag} out")
    if job.cp > 1 and job.seq % job.cp:
        wanted = f"--cp to divide --seq {job.seq} with --pp"
        raise ConfigError(wanted, job.cp, hint="stages pass on pieces of equal length")


class RunAxes:
    """This rank's place on the axes, its part of the model, and the loss of its positions."""

    def __init__(self, job: Job, world: World) -> None:
        self._job = job
        self._device = world.device
        self.mesh: DeviceMesh | None = None
        self._data: DeviceMesh | None = None
        self.data_rank, self.num_data = world.rank, world.world_size
        self._split: Any = None
        self._schedule: Any = None
        self._stage: Any = None
        if job.model_ranks > 1:
            self.num_data = world.world_size // job.model_ranks
            sizes = {"pp": job.pp, "dp": self.num_data, "cp": job.cp, "tp": job.tp}
            sizes = {name: size for name, size in sizes.items() if size > 1 or name == "dp"}
            self.mesh = init_device_mesh(
                world.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
            )
            self.data_rank = self.mesh.get_local_rank("dp")
            self._data = self.mesh["dp" if job.cp == 1 else "cp"]
            if job.cp > 1 and self.num_data > 1:
                self._data = self.mesh["dp", "cp"]._flatten("data")

    @property
    def data(self) -> DeviceMesh | None:
        """The ranks over which state is sharded: they hold the same and see other tokens."""
        return self._data

    @property
    def weight(self) -> float:
        """The factor of summed losses whose mean over the sharding ranks is that over tokens."""
        return self.num_data * self._job.cp / self._job.tokens_per_step

    def part_of(self, module: nn.Module) -> nn.Module:
        """Return this rank's part: its stage, in which layers are cut over the tensor axis."""
        if self.mesh is None:
            return module
        assert isinstance(module, GPT), "others were refused before the ranks started"
        part: nn.Module = module
        if self._job.pp > 1:
            part = GPTStage(module, self.mesh.get_local_rank("pp"), self._job.pp)
        if self._job.tp > 1:
            from onefold.planner.models.parallel import parallelize_gpt

            parallelize_gpt(part, self.mesh["tp"])
        return part

    def join(self, module: nn.Module) -> None:
        """Split sequences and build the schedule, once `module` is sharded."""
        if self.mesh is None:
            return
        job = self._job
        if job.cp > 1:
            self._split = onefold.split_sequence(module, self.mesh["cp"], inputs=job.pp == 1)
        if job.pp > 1:
            from torch.distributed.pipelining import PipelineStage, Schedule1F1B

            self._stage = PipelineStage(
                module, self.mesh.get_local_rank("pp"), job.pp, self._device,
                group=self.mesh["pp"].get_group(),
            )  # fmt: skip
            schedule = Schedule1F1B(
                self._stage, job.accumulate, loss_fn=self._weighed, scale_grads=False
            )
            self._schedule = onefold.pipeline(schedule, tied=[])

    def _weighed(self, logits: Tensor, targets: Tensor) -> Tensor:
        return summed(logits, targets) * self.weight

    def summed_loss(self, module: nn.Module, rows: Tensor) -> Tensor:
        """Return the loss in nats, summed over the tokens of rows [R, T + 1] that are this rank's.

        Not for pipelines.
        """
        inputs, targets = rows[:, :-1], rows[:, 1:]
        if self._split is None:
            return summed(logits_of(module, inputs), targets)
        return summed(module(inputs), self._split.split(targets, pad=IGNORED))

    @property
    def is_pipeline(self) -> bool:
        """True if a schedule runs forward and backward."""
        return self._schedule is not None

    def run_pipeline(self, rows: Tensor, *, trains: bool) -> Tensor:
        """Run all micro-batches of rows [R, T + 1] through the pipeline.

        Returns a loss whose mean over all ranks of the world is that of the batch, weighed as in
        training.
        """
        inputs, targets = rows[:, :-1], rows[:, 1:].contiguous()
        positions = torch.arange(inputs.shape[1], device=rows.device).expand_as(inputs)
        if self._split is not None:
            inputs, targets, positions = (
                self._split.split(t) for t in (inputs, targets, positions)
            )
        losses: list[Tensor] = []
        call = self._schedule.step if trains else self._schedule.eval
        if self._stage.is_first:
            arguments: tuple[Tensor, ...] = (inputs.contiguous(),)
            options: dict[str, Any] = {"position_ids": positions.contiguous()}
        else:
            arguments, options = (), {}
        if self._stage.is_last:
            options |= {"target": targets, "losses": losses}
        call(*arguments, **options)
        total = torch.stack(losses).sum() if losses else torch.zeros((), device=rows.device)
        return cast("Tensor", total.detach() * self._job.pp)


IGNORED = -100


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy in nats, summed over tokens."""
    return F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), reduction="sum", ignore_index=IGNORED
    )


class RowDeal:
    """Decides before each step which rows of the global batch this rank takes."""

    def __init__(self, job: Job, module: nn.Module, rank: int, world_size: int) -> None:
        self._rows = job.rows
        self._rank, self._world_size = rank, world_size
        self._shares: tuple[float, ...] | None = None
        self._speeds: RowSpeeds | None = None
        if job.row_shares == AUTO:
            self._speeds = measure(module)
        elif isinstance(job.row_shares, tuple):
            self._shares = check_shares(job.row_shares, world_size)

    @property
    def own(self) -> range:
        """This rank's rows of the next global batch."""
        shares = self._shares if self._speeds is None else self._speeds.shares
        if shares is None:
            return own_rows(self._rows, self._rank, self._world_size)
        return split_rows(self._rows, shares)[self._rank]

    @property
    def stateful(self) -> dict[str, Any]:
        """What a checkpoint keeps: shares that were measured."""
        return {} if self._speeds is None else {"row_shares": self}

    def state_dict(self) -> dict[str, Any]:
        """Return the measured shares."""
        assert self._speeds is not None, "see `stateful`"
        return {"shares": list(self._speeds.shares)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with shares; those of another number of ranks become equal ones."""
        assert self._speeds is not None, "see `stateful`"
        same = len(state["shares"]) == self._world_size
        self._speeds.begin_at(tuple(state["shares"]) if same else even(self._world_size))
