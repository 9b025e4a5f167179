"""Fine-tune a model of a folder: TRL's `SFTTrainer` around a sharded model.

preflight    what can be refused before any rank starts: rows, folders, flags
finetune     plan, read each rank's rows, train, measure held-out rows, save
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from onefold.app.finetune.choices import AUTO, FinetuneJob
from onefold.app.finetune.progress import FinetuneObserver, TuningProgress
from onefold.app.finetune.row_file import Row, RowFile, open_rows
from onefold.config import offload_of, stage_of
from onefold.errors import ConfigError
from onefold.recording.page import prepare, redraw
from onefold.versions import install_command

if TYPE_CHECKING:
    from torch import nn

    from onefold.app.finetune.model import Way
    from onefold.app.train.memory_table import MeasuredMemory
    from onefold.wire.world import World

NEEDED = ("transformers", "accelerate", "trl", "peft", "datasets")
"""Packages of the extra `finetune`."""

SCHEDULE = {
    "lr_scheduler_type": "cosine_warmup_with_min_lr", "warmup_steps": 0.03,
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
}  # fmt: skip
"""Of the learning rate, as Trainer's arguments. Its "cosine" begins a warm-up at 0, so a smoke run
of one step would train nothing."""


def preflight(job: FinetuneJob) -> RowFile:
    """Refuse a job that cannot work, without building a model; return the rows of its file."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        hint = install_command(*missing)
        raise ConfigError(f"{missing[0]} to be installed", "no such package", hint=hint)
    for flag, is_set in (("--merge", job.merge), ("--rest", job.rest is not None)):
        if is_set and not job.lora:
            raise ConfigError(f"--lora R with {flag}", "none", hint="--lora 16")
    if job.checkpoint is None and (job.every or job.resume):
        flag = "--every" if job.every else "--resume"
        raise ConfigError(f"--checkpoint with {flag}", "none", hint="pass --checkpoint DIR")
    _check_words(job)
    for out in (job.out, f"{job.out}-merged") if job.merge else (job.out,):
        _check_out(Path(out))
    _check_folder(job.model)
    rows = open_rows(Path(job.data))
    _prepare_folders(job)
    return rows


def _prepare_folders(job: FinetuneJob) -> None:
    """Make the folders that the run writes to before its end."""
    saved = sorted(path.name for path in Path(job.checkpoint or "").glob("checkpoint-*"))
    if job.checkpoint is not None and saved and not job.resume:
        hint = "go on from there with --resume, or save to another directory"
        raise ConfigError(f"--checkpoint {job.checkpoint!r} to be empty", saved[-1], hint=hint)
    for folder in (job.report, job.profile):
        if folder is not None:
            prepare(folder, "a report or a profile")
    if job.checkpoint is not None:
        prepare(job.checkpoint, "checkpoints")


def _check_words(job: FinetuneJob) -> None:
    if job.stage != AUTO:
        stage_of(job.stage)
    if job.offload != AUTO:
        offload_of(job.offload)
    if job.report_to in ("none", "all"):
        return
    from transformers.integrations import get_available_reporting_integrations, integration_utils

    usable = get_available_reporting_integrations()
    known = integration_utils.INTEGRATION_TO_CALLBACK
    if job.report_to not in usable:
        wanted = f"--report-to to be none, all or an installed tracker ({', '.join(usable)})"
        hint = f"transformers knows {', '.join(known)}"
        if job.report_to in known:
            hint = f"install the package of {job.report_to}"
        raise ConfigError(wanted, repr(job.report_to), hint=hint)


def _check_folder(model: str) -> None:
    folder = Path(model)
    if (folder / "config.json").exists() and any(folder.glob("*.safetensors")):
        return
    is_saved = folder.is_dir() and any(folder.rglob("manifest.json"))
    got = "a checkpoint" if is_saved else "neither there"
    hint = f"`onefold export {model} OUT` writes weights: --model OUT"
    if not is_saved:
        hint = "name the folder that the model was saved to"
        if not folder.exists() and model.count("/") == 1:
            hint = f"nothing is downloaded: `hf download {model} --local-dir DIR`, then --model DIR"
    raise ConfigError(f"config.json and safetensors files in --model {model!r}", got, hint=hint)


def _check_out(out: Path) -> None:
    if out.exists():
        raise ConfigError(f"no folder at --out {str(out)!r}", "one", hint="name a new folder")
    above = out.absolute().parent
    while not above.exists():
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK):
        hint = "name a folder that you may write to"
        raise ConfigError(f"--out {str(out)!r} to be writable", f"{above} is not", hint=hint)


@dataclass(frozen=True, slots=True)
class TunedAnswer:
    """The text that the model writes after a held-out prompt, before and after training."""

    prompt: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class FinetuneResult:
    """The result of a run; the same on every rank."""

    way: Way
    steps: int
    losses: list[float]  # of each step of this run: the mean over the tokens that count
    held_out: tuple[float, float] | None  # before and after; None without held-out rows
    answer: TunedAnswer | None
    seconds: float
    num_parameters: int
    num_trained: int
    memory: list[MeasuredMemory]  # per rank
    saved: list[str]  # folders
    stopped_by: int = 0  # the number of a signal


def finetune(
    job: FinetuneJob, rows: RowFile, world: World, observer: FinetuneObserver
) -> FinetuneResult:
    """Run the job on this rank. A collective: every rank calls it.

    Raises: ConfigError: on every rank, before weights are read: a model, rows or a plan that cannot
        work.
    """
    from onefold.app.finetune.model import build, check_model, choose, load_tokenizer, token_count

    config = check_model(job)
    tokenizer = load_tokenizer(job, rows)
    module = build(job, config, world.device)
    way = choose(job, module, world)
    _heading(job, rows, way, module, world, observer)
    longer, line = rows.longer_than(job.seq, lambda row: token_count(tokenizer, row))
    if longer:
        count = f"{longer:,d} of {len(rows.places):,d} rows"
        observer.noted(f"{count} have more than {job.seq} tokens and are cut, line {line:,d} first")
    with TemporaryDirectory(prefix="onefold_") as folder:
        run = _Run(job, rows, tokenizer, module, way, world, observer, folder)
        return run.train()


def _heading(
    job: FinetuneJob, rows: RowFile, way: Way, module: nn.Module, world: World,
    observer: FinetuneObserver,
) -> None:  # fmt: skip
    numel, trained = _numels(module)
    share = f", {trained:,d} of them trained" if trained < numel else ""
    ranks = f"{world.world_size} rank{'s' * (world.world_size > 1)}"
    observer.noted(
        f"{job.model}: {numel:,d} parameters{share}, over {ranks}; {way.line}; "
        f"{len(rows.places):,d} rows of {job.data}"
    )


def _numels(module: nn.Module) -> tuple[int, int]:
    """Count the parameters of a model before a frozen base is packed, and the trained ones."""
    parameters = list(module.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


@dataclass(slots=True)
class _Run:
    """One rank's part of a run."""

    job: FinetuneJob
    rows: RowFile
    tokenizer: Any
    module: nn.Module
    way: Way
    world: World
    observer: FinetuneObserver
    folder: str  # for files of this rank
    answers: list[str] = field(default_factory=list)
    numels: tuple[int, int] = (0, 0)  # of all parameters, and of the trained ones

    def train(self) -> FinetuneResult:
        from onefold.app.train.checkpoints import StopRequests

        job, world = self.job, self.world
        self.numels = _numels(self.module)
        train, held_out = self.rows.split(job.held_out, job.seed)
        self._shard()
        with StopRequests(is_active=job.checkpoint is not None) as requests:
            trainer, progress = self._trainer(train, held_out, requests)
            measured = [self._held_out(trainer)] if held_out else []
            prompt = self._prompt(held_out)
            self._write_answer(prompt)
            begun = time.monotonic()
            trainer.train(resume_from_checkpoint=_newest(job) if job.resume else None)
            seconds = time.monotonic() - begun
        stopped_by = progress.join_stops()  # by now all ranks have written their profiles
        if job.report is not None and world.rank == 0:
            redraw(job.report)
        if stopped_by:
            return self._result(trainer, progress, seconds, None, None, [])
        measured += [self._held_out(trainer)] if held_out else []
        self._write_answer(prompt)
        saved = self._save(trainer)
        answer = TunedAnswer(self._shown(prompt), *self.answers) if prompt is not None else None
        both = (measured[0], measured[1]) if measured else None
        world.group.gather(None)  # no rank ends while another still reads
        return self._result(trainer, progress, seconds, both, answer, saved)

    def _shard(self) -> None:
        import torch

        import onefold
        from onefold.app.finetune.model import give_blocks_back

        job, way = self.job, self.way
        give_blocks_back(self.world)
        torch.manual_seed(job.seed)  # of adapters
        precision: Any = way.precision
        if job.rest is not None:
            precision = replace(_precision_of(way.precision), frozen=job.rest)
        onefold.shard(
            self.module, None, stage=way.stage, precision=precision, offload=way.offload  # type: ignore[arg-type]
        )  # fmt: skip

    def _trainer(
        self, train: list[int], held_out: list[int], requests: Any
    ) -> tuple[Any, TuningProgress]:
        import datasets
        import trl
        from transformers import PrinterCallback

        from onefold.hf import Callback, TrainerMixin

        class FinetuneTrainer(TrainerMixin, trl.SFTTrainer): ...

        datasets.disable_progress_bars()

        def part(name: str, numbers: list[int]) -> Any:
            return datasets.Dataset.from_generator(
                self.rows.read_rows, gen_kwargs={"numbers": numbers},
                cache_dir=f"{self.folder}/{name}", split=datasets.NamedSplit(name),
            )  # fmt: skip

        progress = TuningProgress(self.observer, requests, self.job, self.world)
        callbacks = [progress.callback()]
        if self.job.report is not None:
            callbacks.append(Callback(record=self.job.report))
        trainer = FinetuneTrainer(
            self.module, args=self._arguments(trl.SFTConfig), callbacks=callbacks,
            train_dataset=part("train", train), processing_class=self.tokenizer,
            eval_dataset=part("held_out", held_out) if held_out else None,
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        return trainer, progress

    def _arguments(self, kind: Any) -> Any:
        job = self.job
        saves: dict[str, Any] = {"save_strategy": "no"}
        if job.checkpoint is not None:
            saves = {"save_strategy": "steps", "save_steps": job.every or 1 << 30,
                     "save_total_limit": job.keep}  # fmt: skip
        count = {"max_steps": job.steps} if job.steps else {"num_train_epochs": job.epochs}
        template = str(self.tokenizer.chat_template or "")
        options = {
            "output_dir": job.checkpoint or str(_work_folder(job)),
            "per_device_train_batch_size": job.batch,
            "per_device_eval_batch_size": job.batch, "gradient_accumulation_steps": job.accumulate,
            "learning_rate": job.peak_lr, **SCHEDULE,
            "max_grad_norm": job.clip, "max_length": job.seq, "packing": job.packing,
            "completion_only_loss": self.rows.kind == "prompt",
            "assistant_only_loss": self.rows.kind == "messages" and "{% generation" in template,
            "logging_steps": 1, "report_to": job.report_to, "disable_tqdm": True, "bf16": False,
            "seed": job.seed, "use_cpu": self.world.device.type == "cpu",
            "gradient_checkpointing": self.way.recompute, "dataloader_pin_memory": False,
            "logging_strategy": "steps",
        }  # fmt: skip
        if self.way.recompute:
            options["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
        return kind(**options, **saves, **count)

    def _held_out(self, trainer: Any) -> float:
        return float(trainer.evaluate()["eval_loss"])

    def _prompt(self, held_out: list[int]) -> Row | None:
        if not held_out or not self.job.sample:
            return None
        return next(self.rows.read_rows(held_out[:1]))

    def _shown(self, row: Row | None) -> str:
        assert row is not None, "there is a held-out row"
        if self.rows.kind == "text":
            text = row["text"]
            return text[: max(1, min(len(text) // 2, 200))]
        if not self.rows.is_chat:
            return row["prompt"]
        messages = row.get("messages") or [*row["prompt"], *row["completion"]]
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=1)
        return self.tokenizer.apply_chat_template(
            messages[: max(1, last)], tokenize=False, add_generation_prompt=True
        )

    def _write_answer(self, row: Row | None) -> None:
        """Let the model continue the prompt; every rank writes the same text.

        Weights are kept between tokens as far as the planned peak has room for them.
        """
        if row is None:
            return
        import torch

        from onefold import report
        from onefold.inference.stream import generating
        from onefold.tier.device import return_free_memory

        inputs = self.tokenizer(self._shown(row), return_tensors="pt", add_special_tokens=False)
        inputs = {name: value[:, -self.job.seq :].to(self.world.device)
                  for name, value in inputs.items() if name != "token_type_ids"}  # fmt: skip
        module: Any = self.module
        was_training = module.training
        module.eval()
        return_free_memory()
        held = report(module).total.now
        budget = max(0, self.way.peak_nbytes - held) if self.way.peak_nbytes else None
        with torch.no_grad(), generating(module, budget):
            tokens = module.generate(
                **inputs, max_new_tokens=self.job.sample, do_sample=False, use_cache=True,
                pad_token_id=self.tokenizer.pad_token_id,
            )  # fmt: skip
        module.train(was_training)
        new = tokens[0, inputs["input_ids"].shape[1] :]
        self.answers.append(self.tokenizer.decode(new, skip_special_tokens=True))

    def _save(self, trainer: Any) -> list[str]:
        """Write the model, or the adapter, and the tokenizer, for `from_pretrained`."""
        from onefold.app.finetune.merge import merge_adapter
        from onefold.app.finetune.model import save_weights

        job, saved = self.job, [self.job.out]
        if job.lora:
            trainer.save_model(job.out)
        else:
            save_weights(self.module, self.tokenizer, job.out, self.world)
        if job.merge:
            self.world.group.gather(None)  # the adapter is there
            target = Path(f"{job.out}-merged")
            if self.world.rank == 0:
                merge_adapter(Path(job.model), Path(job.out), target)
                self.tokenizer.save_pretrained(target)
            saved.append(str(target))
        if self.world.rank == 0:
            shutil.rmtree(_work_folder(job), ignore_errors=True)
        return saved

    def _result(
        self, trainer: Any, progress: TuningProgress, seconds: float,
        held_out: tuple[float, float] | None, answer: TunedAnswer | None, saved: list[str],
    ) -> FinetuneResult:  # fmt: skip
        import onefold
        from onefold.app.train.memory_table import measure
        from onefold.engine.registry import engine_of

        report = onefold.report(self.module)
        own = measure(engine_of(self.module).recipe, report)
        memory = [
            replace(measured, rank=rank)
            for rank, measured in enumerate(self.world.group.gather(own))
        ]
        return FinetuneResult(
            way=self.way, steps=trainer.state.global_step, losses=progress.losses,
            held_out=held_out, answer=answer, seconds=seconds,
            num_parameters=self.numels[0], num_trained=self.numels[1], memory=memory,
            saved=saved, stopped_by=progress.stopped_by,
        )  # fmt: skip


def _precision_of(word: Any) -> Any:
    from onefold.config import precision_of

    return precision_of(word)


def _work_folder(job: FinetuneJob) -> Path:
    """Return where all ranks put what is on its way into `out`; it does not stay."""
    out = Path(job.out).absolute()
    return out.with_name(f".{out.name}.draft")


def _newest(job: FinetuneJob) -> bool | None:
    """True where the folder of checkpoints has one to go on from."""
    return any(Path(job.checkpoint or "").glob("checkpoint-*")) or None
