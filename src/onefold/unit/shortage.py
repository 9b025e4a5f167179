"""Memory was refused: what ran, what is held, and which line of a script would need less.

An error is explained once, by the first of these that it passes: a buffer, an action of the
schedule, a hook of a module, a step, a call such as `onefold.save`. Some errors pass none of them:
those of torch's own code in a backward or in an optimizer's step, and of a script's loss. They are
explained where the interpreter ends by them.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import ENOMEM
from typing import Any
from weakref import finalize, ref

import torch

from onefold.errors import TierError
from onefold.layout.ledger import Ledger
from onefold.pages import page
from onefold.wire.roll_call import last_error

PAGE = "docs/guides/out-of-memory.md"
"""The page that lists what to do, by what it costs."""

_BEGIN = "onefold: out of memory on "
_ANY_CHANGE = "more ranks, a higher stage, or offload"
_REQUEST = re.compile(r"allocate ([0-9.]+) (bytes|[KMGT]iB)")


def is_shortage(error: BaseException | None) -> bool:
    """True if torch, Python or the system refused memory, or a tier for one of them."""
    if isinstance(error, OSError):
        return error.errno == ENOMEM or is_shortage(error.__cause__)
    if type(error) is RuntimeError:  # torch's on the CPU has no class
        return "allocate memory" in str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError)


def explain(error: BaseException, ledger: Ledger | None, action: str = "") -> None:
    """Add a note to an error for want of memory, unless it has one; leave all others alone.

    The note says what ran, what is held by kind and tier, and the next cheaper choice with its
    bytes. Errors of a tier give a hint of their own.
    """
    if ledger is None or not is_shortage(error) or _note_of(error):
        return
    running, _, held = ledger.status().partition("\n")
    lines = [f"{_BEGIN}{ledger.rank}, {running}" + f" ({action})" * bool(action)]
    if "on top of what is held: " not in str(error):  # as `explaining` says it
        lines.append(held)
    hint = "" if isinstance(error, TierError) else f"hint: {_advice(ledger, str(error))}; "
    error.add_note("\n".join([*lines, f"{hint}see {page(PAGE)}"]))


@contextmanager
def explained(ledger: Ledger, call: str = "") -> Iterator[None]:
    """Explain an error of the block, which is a call of the user's such as "onefold.save"."""
    if call:
        ledger.running[:] = f"in {call}", ""
    try:
        yield
    except BaseException as error:
        explain(error, ledger)
        raise
    if call:
        ledger.running[:] = f"after {call}", ""


@contextmanager
def explaining(
    ledger: Ledger, nbytes: int, kind: str = "weight", tier: str = "device"
) -> Iterator[None]:
    """Turn an allocation error into one that names the request, the bytes held and a remedy."""
    try:
        yield
    except (RuntimeError, MemoryError, TierError) as error:
        if type(error) is RuntimeError and "alloc" not in str(error):  # torch's on the CPU is one
            raise
        wanted = f"room for {nbytes:,} bytes of {kind} in {tier} memory, "
        wanted += f"on top of what is held: {ledger.describe()}"
        got, hint = str(error).splitlines()[0], _advice(ledger, nbytes)
        raise TierError(wanted, got, hint=hint) from error


def explain_at_exit(engine: Any) -> None:
    """Explain the error by which the interpreter ends, if nobody has and the engine is alive."""
    finalize(engine, _explain_last, ref(engine))


def _explain_last(find_engine: Callable[[], Any]) -> None:
    engine, error = find_engine(), last_error()
    if engine is not None and error is not None and not _note_of(error):
        explain(error, engine.ledger)
        os.write(2, f"{_note_of(error)}\n".lstrip().encode())  # its traceback is printed


def _note_of(error: BaseException) -> str:
    notes = getattr(error, "__notes__", ())
    return next((note for note in notes if note.startswith(_BEGIN)), "")


def _advice(ledger: Ledger, request: int | str) -> str:
    """What would hold as many bytes less as were requested, by number or by torch's message."""
    if isinstance(request, str):
        said = _REQUEST.search(request)
        request = int(float(said[1]) * 1024 ** "bKMGT".find(said[2][0])) if said else 1
    try:
        return ledger.advise(request) if ledger.advise else _ANY_CHANGE
    except Exception:  # a prediction wants memory itself; the first error is what counts
        return _ANY_CHANGE
