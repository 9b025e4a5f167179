"""Train for `onefold train`: an ordinary script around one call of `onefold.shard`."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import cos, pi

import torch
from torch import Tensor, nn

import onefold
from onefold.app.generate.sources import build_trained, check_trained
from onefold.app.generate.tokens import one_line, sampled_bytes
from onefold.app.tools.step_profile import StepProfile
from onefold.app.train.checkpoints import Checkpoints, StopRequests
from onefold.app.train.checkpoints import preflight as preflight_checkpoints
from onefold.app.train.corpus import Corpus, Windows, open_corpus, own_rows
from onefold.app.train.job import Job
from onefold.app.train.memory_table import MeasuredMemory, measure
from onefold.app.train.room import check_room
from onefold.app.train.run_record import (
    Progress,
    RunRecorder,
    TrainObserver,
    TrainResult,
    known_rates,
    predict,
    trace_of,
    write_report,
)
from onefold.app.train.trained_axes import RowDeal, RunAxes
from onefold.app.train.trained_axes import preflight as preflight_axes
from onefold.config import Offload, check_offload, offload_of, precision_of, stage_of
from onefold.engine.registry import engine_of
from onefold.errors import ConfigError
from onefold.fit.shares import AUTO, weights_of
from onefold.planner.models.loader import (
    check_compiler,
    compile_blocks,
    default_lr,
    dtype_of,
    parts_left_out,
    recompute,
)
from onefold.recording.meter import Meter
from onefold.recording.page import prepare
from onefold.recording.recorder import stage0_nbytes
from onefold.wire.world import World
from onefold.wire_config import wire_of

WARMUP_STEPS = 20
FINAL_LR = 0.05
"""The learning rate rises linearly, then falls along a cosine to this share of its peak."""

LOG_STEPS = 10
"""Ranks exchange their losses once in this many steps."""

HELD_OUT_SHARE, MAX_HELD_OUT_BATCHES = 5, 64
"""Steps per batch of the held-out loss, and the most batches."""


def preflight(job: Job, world_size: int) -> Corpus:
    """Refuse a job that cannot work, before any rank starts; return the text to train on."""
    precision_of(job.precision)
    dtype_of(job.dtype)
    offload_for(job)
    wire_of(job.wire)
    _check_shares(job, world_size)
    preflight_axes(job, world_size)
    num_data = world_size // job.model_ranks
    smallest = num_data * job.accumulate
    if job.rows < smallest:
        parts = f" times {job.accumulate} micro-batches" if job.accumulate > 1 else ""
        wanted = f"at least {smallest} rows in a step, one for each of {num_data} ranks{parts}"
        hint = "take more rows, fewer ranks or fewer micro-batches"
        raise ConfigError(wanted, job.rows, hint=hint)
    check_trained(job.model, job.seq)
    if job.compile:
        check_compiler()
    preflight_checkpoints(job)
    if job.report is not None:
        prepare(job.report)
    if job.profile is not None:
        prepare(job.profile, "a profile")
    return open_corpus(job.data, job.seq)


def _check_shares(job: Job, world_size: int) -> None:
    """Refuse weights that are not those of the ranks over which state is cut."""
    if job.shares is None or job.shares == AUTO:
        return
    weights, ranks = weights_of(job.shares), world_size // (job.tp * job.pp)
    if len(weights) != ranks:
        wanted, got = f"--shares with one weight for each of {ranks} ranks", len(weights)
        raise ConfigError(wanted, got, hint=f"--ranks {got}, or {ranks} weights")


def offload_for(job: Job) -> Offload:
    """Return the tiers of the job."""
    chosen = offload_of(job.offload)
    check_offload(chosen, stage_of(3 if job.stage == "auto" else job.stage))
    if job.offload is not None:
        return replace(chosen, fraction=job.fraction, step_in_backward=job.steps_in_backward)
    if job.fraction != 1:
        got = f"--fraction {job.fraction} alone"
        hint = "--offload optimizer --fraction 0.5 steps half of the state on the CPU"
        raise ConfigError("--offload with --fraction", got, hint=hint)
    return chosen


def train(
    job: Job, world: World, observer: TrainObserver, corpus: Corpus | None = None
) -> TrainResult:
    """Run the job on this rank. A collective: every rank calls it. `corpus`: of `preflight`."""
    corpus = corpus or preflight(job, world.world_size)
    trainer = Trainer(job, world, corpus)
    module = trainer.module
    observer.started(job, corpus, trainer.num_parameters, world.world_size)
    for note in trainer.left_out:
        observer.noted(note)
    resumed = trainer.checkpoints.resume()
    if resumed is not None:
        observer.resumed(resumed)
    first = resumed.step if resumed else 0
    Meter.on_engine(engine_of(module))
    meter = StepMeter(job, world, observer, first, partial(known_rates, module))
    profile = StepProfile(
        job.profile, rank=world.rank, device=world.device, first=first, steps=job.steps
    )
    if profile.note:
        observer.noted(profile.note)
    recorder = RunRecorder(job, module, first, world.device)
    with StopRequests(is_active=job.checkpoint is not None) as requests:
        for step in range(first, job.steps):
            profile.begin(step)
            with recorder.around_step(step):
                loss = trainer.step(step)
            profile.end(step)
            meter.note(loss)
            trainer.checkpoints.after(step + 1, requests)
    observer.trained()
    module.eval()
    with torch.compiler.set_stance("force_eager") if job.compile else nullcontext():  # new shapes
        held_out = held_out_loss(job, world, trainer, corpus)
        writes = job.sample and job.pp == 1 and job.cp == 1  # it is one forward a byte
        text = _sample(job, module, corpus.prompt, world.device) if writes else ""
    report = onefold.report(module)
    memory = world.group.gather(trainer.memory or measure(trainer.recipe, report))
    result = TrainResult(
        first_step=first,
        losses=meter.losses,
        held_out=held_out,
        seconds=meter.seconds,
        tokens_per_s=meter.tokens_per_s,
        text=text,
        num_parameters=trainer.num_parameters,
        offload=report.offload,
        memory=[replace(measured, rank=rank) for rank, measured in enumerate(memory)],
        stage0=stage0_nbytes(trainer.recipe),
        predicted=predict(job, trainer.recipe, trainer.trace, report),
        report="",
    )
    return replace(result, report=write_report(recorder, world, result, meter.step_seconds))


def _sample(job: Job, module: nn.Module, prompt: bytes, device: torch.device) -> str:
    """Return the prompt and the bytes that the module writes, on one line."""
    written = sampled_bytes(
        module, prompt, most=job.sample, longest=job.seq, seed=job.seed, device=device
    )
    return one_line(prompt + bytes(written))


class Trainer:
    """The module, its optimizer and this rank's rows of the corpus."""

    def __init__(self, job: Job, world: World, corpus: Corpus) -> None:
        self.job = job
        self.world = world
        self.peak_lr = default_lr(job.model) if job.lr is None else job.lr
        self.axes = RunAxes(job, world)
        torch.manual_seed(job.seed)
        is_cut = job.tp * job.pp > 1
        whole = build_trained(job.model, job.seq, is_cut=is_cut, dtype=job.dtype)
        self.left_out = parts_left_out(job.model, whole) if world.rank == 0 else ()
        if job.recompute:
            recompute(whole, job.model)
        if not any(parameter.is_meta for parameter in whole.parameters()):
            whole.to(world.device)
        is_traced = world.rank == 0 and job.model_ranks == 1 and job.row_shares is None
        self.trace = trace_of(job, whole, world) if is_traced else None
        check_room(job, offload_for(job), whole, self.trace, world)
        self.num_parameters = sum(parameter.numel() for parameter in whole.parameters())
        self.module = self.axes.part_of(whole)
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=self.peak_lr, betas=(0.9, 0.95), weight_decay=0.1
        )
        onefold.shard(
            self.module, self.optimizer, stage=job.stage, precision=job.precision,
            offload=offload_for(job), wire=job.wire, shares=job.shares, mesh=self.axes.data,
        )  # fmt: skip
        self.axes.join(self.module)
        if job.compile:
            compile_blocks(self.module)
        self.recipe = engine_of(self.module).recipe
        self.scaler = onefold.GradScaler(world.device.type, enabled=job.precision == "fp16")
        self.deal = RowDeal(job, self.module, self.axes.data_rank, self.axes.num_data)
        self.windows = Windows(
            corpus.train, rows=job.rows, seq=job.seq, seed=job.seed, own=self.deal.own
        )
        stateful = {"windows": self.windows, "scaler": self.scaler, **self.deal.stateful}
        self.checkpoints = Checkpoints(job, world, self.module, self.optimizer, stateful)
        self.memory: MeasuredMemory | None = None  # at the end of the last step

    def step(self, step: int) -> Tensor:
        """Take one optimizer step; return a loss whose mean over ranks is the batch's."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak_lr * schedule(step, self.job.steps)
        self.windows.deal(self.deal.own)
        total = self._backward(next(self.windows).to(self.world.device))
        if self.job.clip > 0:
            self.scaler.unscale_(self.optimizer)
            if self.axes.mesh is None:
                nn.utils.clip_grad_norm_(self.module.parameters(), self.job.clip)
            else:
                onefold.clip_grad_norm_(self.module, self.job.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if step + 1 == self.job.steps:  # all resting state is allocated at the end of a step
            self.memory = measure(self.recipe, onefold.report(self.module))
        self.optimizer.zero_grad()
        return total

    def _backward(self, rows: Tensor) -> Tensor:
        """Compute gradients of the mean loss over the global batch, from own rows [R, T + 1]."""
        if self.axes.is_pipeline:
            return self.axes.run_pipeline(rows, trains=True)
        parts = self.job.accumulate
        # ranks are averaged; the weight makes that the mean over tokens for uneven rows too
        weight = self.axes.weight
        total = torch.zeros((), device=rows.device)
        for part in range(parts):
            own = own_rows(len(rows), part, parts)
            is_last = part + 1 == parts
            with nullcontext() if is_last else onefold.accumulate(self.module):
                loss = self.axes.summed_loss(self.module, rows[own.start : own.stop]) * weight
                self.scaler.scale(loss).backward()
            total += loss.detach()
        return total


class StepMeter:
    """Reports losses of all ranks, and the speed, to an observer every LOG_STEPS."""

    def __init__(
        self, job: Job, world: World, observer: TrainObserver, first: int,
        rates: Callable[[], dict[str, float]],
    ) -> None:  # fmt: skip
        self._rates = rates
        self.losses: list[float] = []  # per step, mean over ranks
        self.step_seconds: list[float] = []  # per step, on this rank
        self._first = first
        self._job = job
        self._world = world
        self._observer = observer
        self._waiting: list[Tensor] = []
        self._begun = self._noted = self._reported = time.perf_counter()
        self.seconds = 0.0  # up to the last exchange of losses

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks per second, over all steps so far."""
        return len(self.losses) * self._job.tokens_per_step / max(self.seconds, 1e-9)

    def note(self, loss: Tensor) -> None:
        """Record a finished step."""
        now = time.perf_counter()
        self._waiting.append(loss)
        self.step_seconds.append(now - self._noted)
        self._noted = now
        taken = len(self.step_seconds)
        step, steps = self._first + taken, self._job.steps
        every = LOG_STEPS if steps > LOG_STEPS else 1
        if step % every and step != steps:
            return
        latest = self._world.mean(torch.stack(self._waiting).tolist())
        self._waiting.clear()
        self.losses += latest
        now = time.perf_counter()
        self.seconds = now - self._begun
        speed = len(latest) * self._job.tokens_per_step / max(now - self._reported, 1e-9)
        self._reported = now
        left = self.seconds / taken * (steps - step)
        flops, mfu = map(self._rates().get, ("model_flops_per_s", "mfu"))
        mean = sum(latest) / len(latest)
        self._observer.stepped(Progress(step, mean, speed, left, flops or 0.0, mfu or 0.0))


@torch.no_grad()
def held_out_loss(job: Job, world: World, trainer: Trainer, corpus: Corpus) -> float:
    """Return nats per byte over fixed windows of the held-out files; a collective."""
    batches, axes = min(max(1, job.steps // HELD_OUT_SHARE), MAX_HELD_OUT_BATCHES), trainer.axes
    own = trainer.deal.own
    windows = Windows(corpus.held_out, rows=job.rows, seq=job.seq, seed=0, own=own)
    total = 0.0
    for _ in range(batches):
        rows = next(windows).to(world.device)
        if axes.is_pipeline:
            total += axes.run_pipeline(rows, trains=False).item()
        else:
            total += axes.summed_loss(trainer.module, rows).item() * axes.weight
    return world.mean([total])[0] / batches


def schedule(step: int, steps: int) -> float:
    """Return the share of the peak learning rate: a linear rise, then a cosine."""
    warmup = min(1.0, (step + 1) / min(WARMUP_STEPS, steps))
    return warmup * (FINAL_LR + (1 - FINAL_LR) * (1 + cos(pi * step / steps)) / 2)
