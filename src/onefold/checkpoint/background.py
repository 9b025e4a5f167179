"""A save that finishes in the background: its thread, and the notes by which ranks agree.

Collectives belong to the training loop. So ranks that finish a save in threads leave each other
small JSON files in its folder.
"""

import json
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onefold.errors import CheckpointError

NOTES_TIMEOUT_S = 600.0
ENDING_TIMEOUT_S = 30.0
"""A rank waits so long for the notes of the others; the second holds once the script is over."""


class BackgroundThread(threading.Thread):
    """Run `act` in a thread that the interpreter waits for. `wait` raises its error."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__(name="onefold-save")
        self._act = act
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._act()
        except BaseException as error:
            self._error = error
            if not _script_runs():  # nobody will call `wait`
                traceback.print_exception(error)

    def wait(self) -> None:
        """Block until the work is done, and raise its error."""
        self.join()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return not self.is_alive()


class Notes:
    """The notes of one save, in its folder. Notes of an earlier save are ignored."""

    def __init__(self, folder: Path, rank: int, save_id: str) -> None:
        self._folder = folder
        self._rank = rank
        self._save_id = save_id

    def write_note(self, name: str, note: dict[str, Any]) -> None:
        """Write a note under a temporary name first: readers find all of it or nothing."""
        new = self.path(f"{name}-{self._rank}-new")
        new.write_text(json.dumps({"save_id": self._save_id, **note}))
        new.rename(self.path(name))

    def read_note(self, name: str) -> dict[str, Any] | None:
        """Return a note, or None if there is none."""
        try:
            note = json.loads(self.path(name).read_text())
        except FileNotFoundError:
            return None
        return note if note["save_id"] == self._save_id else None

    def path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def poll(find: Callable[[], dict[str, Any] | None], what: str) -> dict[str, Any]:
    """Call `find` ever more slowly until it returns a note. Raises `CheckpointError` in the end."""
    start, pause, waited = time.monotonic(), 0.001, 0.0
    while waited < (NOTES_TIMEOUT_S if _script_runs() else ENDING_TIMEOUT_S):
        note = find()
        if note is not None:
            return note
        waited = time.monotonic() - start
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    hint = "a rank died or its disk hangs; look for the first error among the other ranks"
    raise CheckpointError(f"{what} within {waited:.0f} s", "nothing", hint=hint)


def _script_runs() -> bool:
    """Return False once the script is over and the interpreter only waits for threads."""
    return threading.main_thread().is_alive()
