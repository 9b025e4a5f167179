"""Drive the units of one stage module through the steps of a pipeline schedule.

    begin     the schedule's step starts: micro-batches follow one another
    gather    the schedule will use the stage soon: gather the units of its window
    backward  a whole backward of one micro-batch: gradients of the window's units rest
    split     a backward of inputs or of weights alone, which autograd's hooks do not see
    end       the stage's last backward is over: free its weights, begin to reduce what rests
    finish    the rank's last backward is over: wait for the reductions

A window is a set of units. They stay unsharded from their first use to `end`. At stage 3 their
gradients rest on each rank until `end`; other units are gathered for every forward and every
backward, and reduced in every backward. At stages 0 and 1 all gradients rest, as inside
`onefold.accumulate`, and at stage 2 every backward reduces all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from onefold.engine.driving import Drive, StageDrives
from onefold.engine.engine import Engine


class StageDriver:
    """Tells one engine when a schedule's step begins and ends, and what rests in between."""

    def __init__(self, engine: Engine, window: frozenset[int], *, splits: bool) -> None:
        """`splits`: the schedule runs backwards of inputs and of weights apart."""
        self.engine = engine
        self.window = window
        self._choices = {
            "splits": splits,
            "reduces_all": engine.recipe.keeps_gathered and not engine.recipe.sums_rest,
        }
        self._drives = StageDrives.of(Drive(), len(engine.units), window)

    def begin(self, *, trains: bool) -> None:
        """The schedule's step starts; `trains`: backwards follow."""
        engine = self.engine
        # the other choices may be those of a step that failed, and has not ended
        caller = Drive(accumulates=engine.schedule.driven.accumulates)
        self._drives = StageDrives.of(
            caller, len(engine.units), self.window, trains=trains, **self._choices
        )
        engine.drive(self._drives.step)
        engine.prepare()

    def gather(self) -> None:
        """Begin to gather the window, in the order of use."""
        engine = self.engine
        engine.hands.do(engine.schedule.gather(sorted(self.window)))

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run the whole backward of one micro-batch."""
        self.engine.drive(self._drives.backward)
        try:
            yield
        finally:
            self.engine.drive(self._drives.step)

    @contextmanager
    def split(self) -> Iterator[None]:
        """Run a backward of inputs or weights: modules show the weights of the graph meanwhile.

        torch reads the graph's leaves from `module.parameters()` and adds to their gradients by
        hand, so no hook of autograd reports these.
        """
        engine, schedule = self.engine, self.engine.schedule
        engine.drive(self._drives.split)
        for index in range(len(engine.units)):
            engine.hands.do(schedule.show(index, is_recorded=False))
        try:
            yield
        finally:
            with torch._C.DisableTorchFunctionSubclass():
                for unit in engine.units:
                    for parameter in unit.parameters:
                        if parameter.unsharded.grad is not None:
                            unit.gradient.note_fired(parameter)
                    unit.gradient.rest_partial()
            engine.hands.do(schedule.hide())
            engine.drive(self._drives.step)

    def end(self, *, reduces: bool) -> bool:
        """The stage's part of the step is over: nothing uses its weights.

        Returns False if nothing is reduced, as the caller accumulates over more steps.
        """
        engine, drives = self.engine, self._drives
        engine.drive(drives.end)
        reduces = reduces and not drives.before.accumulates
        if reduces:
            engine.start_reductions()
        engine.drive(drives.before)
        return reduces

    def finish(self) -> None:
        """Wait for the reductions."""
        self.engine.hands.do(self.engine.schedule.finish())
