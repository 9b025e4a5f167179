"""How a drawn program ended: the kinds are those of judging.py."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from onefold.errors import OnefoldError, WireError

NAMES = {kind.__name__ for kind in (OnefoldError, *OnefoldError.__subclasses__())}
DEFECTS = ("wrong", "raw", "hang", "abort")


@dataclass(frozen=True)
class Verdict:
    """How a program ended, and the sentences that say why."""

    kind: str
    text: str = ""

    @property
    def key(self) -> str:
        """The same for programs that end alike: the kind and the first line, names left out."""
        line = re.sub(r"'[^']*'|[0-9][0-9.e+-]*", "_", self.text.partition("\n")[0])
        is_numbers = self.kind == "wrong" and "differs by" in line
        return f"{self.kind} {'numbers' if is_numbers else line[:160]}"

    @property
    def is_defect(self) -> bool:
        return self.kind in DEFECTS

    @property
    def is_named(self) -> bool:
        """True for an `OnefoldError` that says what was expected, what came and what to do."""
        name, _, rest = self.text.partition(": ")
        return name in NAMES and rest.startswith("expected ") and "\nhint: " in rest

    @property
    def is_of_wire(self) -> bool:
        return self.is_named and self.text.startswith("WireError")


class Ended(Exception):
    """The verdict of the first rank that failed, of ranks that are processes; None: it did not."""

    def __init__(self, verdict: Verdict, of_ranks: Sequence[Verdict | None] = ()) -> None:
        super().__init__(verdict.text)
        self.verdict, self.of_ranks = verdict, of_ranks


def of_exception(error: BaseException) -> Verdict:
    """A refusal says what was expected and gives a hint; an error of the wire is none."""
    if isinstance(error, Ended):
        return error.verdict
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, TimeoutError) and not isinstance(error, OnefoldError):
        return Verdict("hang", text)
    if isinstance(error, AssertionError):
        return Verdict("wrong", text)
    is_named = isinstance(error, OnefoldError) and "expected" in text and "hint:" in text
    if is_named and not isinstance(error, WireError):
        return Verdict("refused", text)
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    return Verdict("raw", text + "\n" + "".join(traceback.format_list(frames)))
