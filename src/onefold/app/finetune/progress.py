"""Follow a Trainer of `onefold finetune`: losses and rates, a profile, and a signal to stop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from onefold.errors import ConfigError

if TYPE_CHECKING:
    from onefold.app.finetune.choices import FinetuneJob
    from onefold.wire.world import World


class FinetuneObserver:
    """Receives the events of a run on one rank. This one ignores them."""

    def __enter__(self) -> FinetuneObserver:
        return self

    def __exit__(self, *_: object) -> None: ...

    def begin(self, steps: int) -> None: ...

    def noted(self, note: str) -> None: ...

    def advanced(self, step: int, loss: float, numbers: Mapping[str, float]) -> None: ...


class TuningProgress:
    """Follows a Trainer: losses and rates to the observer, and a signal into a save."""

    def __init__(
        self, observer: FinetuneObserver, requests: Any, job: FinetuneJob, world: World
    ) -> None:
        self._job, self._world = job, world
        self.losses: list[float] = []
        self.stopped_by = 0
        self._observer, self._requests = observer, requests

    def callback(self) -> Any:
        """Return a callback of transformers that reports here."""
        from transformers import TrainerCallback

        progress = self

        class FinetuneProgress(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step >= state.max_steps:  # Trainer would take one more
                    wanted = f"--steps above {state.global_step:,d}, those of the checkpoint"
                    raise ConfigError(wanted, state.max_steps, hint="the run is complete")
                progress._begin(state)

            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                progress.profile.begin(state.global_step)

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                progress.profile.end(state.global_step - 1)
                progress._stop(args, state, control)

            def on_log(self, args: Any, state: Any, control: Any, **options: Any) -> None:
                progress._log(state.global_step, options["logs"])

        return FinetuneProgress()

    def join_stops(self) -> int:
        """Return the signal that stopped a rank, on all of them; 0 if none did. A collective."""
        self.stopped_by = max(self._world.group.gather(self.stopped_by))
        return self.stopped_by

    def _begin(self, state: Any) -> None:
        from onefold.app.tools.step_profile import StepProfile

        self.profile = StepProfile(
            self._job.profile, rank=self._world.rank, device=self._world.device,
            first=state.global_step, steps=state.max_steps,
        )  # fmt: skip
        if self.profile.note:
            self._observer.noted(self.profile.note)
        self._observer.begin(state.max_steps)

    def _stop(self, args: Any, state: Any, control: Any) -> None:
        is_last = state.global_step >= state.max_steps
        if args.save_strategy != "no" and is_last:
            control.should_save = True
        if self._requests.received and not is_last:
            self.stopped_by = self._requests.received
            for flag in ("should_save", "should_training_stop"):
                setattr(control, flag, True)

    def _log(self, step: int, logs: dict[str, Any]) -> None:
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))
            self._observer.advanced(step, self.losses[-1], logs)
