"""The files of a report: `report.json`, `index.html`, which is drawn from it, and `trace.json`."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onefold.errors import ConfigError, OnefoldError, expected
from onefold.recording.page import page
from onefold.recording.perfetto import as_chrome
from onefold.recording.run_report import FORMAT, RunReport
from onefold.recording.step_record import StepRecord

DATA, TRACE, PAGE = "report.json", "trace.json", "index.html"


def prepare(directory: str | Path) -> Path:
    """Make the directory. Raises `ConfigError` if nothing can be written there."""
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(
            expected(
                "a directory to write a report to",
                f"{str(path)!r}: {error.strerror or error}",
                hint="name a folder that exists or can be made",
            )
        ) from error
    return path


def write(directory: str | Path, report: RunReport, records: Sequence[StepRecord]) -> Path:
    """Write all three; the page. `records` of all ranks go into the trace."""
    path = prepare(directory)
    told = report.as_json()
    _put(path / DATA, json.dumps(told, allow_nan=False))
    _put(path / TRACE, json.dumps(as_chrome(records)))
    return draw(path, RunReport.parse(told))  # as `onefold report` will draw it


def draw(directory: Path, report: RunReport) -> Path:
    """Write the page alone, and return where it is."""
    target = directory / PAGE
    _put(target, page(report))
    return target


def _put(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OnefoldError(
            expected(
                f"to write {str(path)!r}",
                str(error.strerror or error),
                hint="free space there, or name another directory",
            )
        ) from error


def read(directory: str | Path) -> RunReport:
    """The report of a directory. Raises `ConfigError` if there is none that can be read."""
    path = Path(directory) / DATA
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise _refused(f"{DATA} in {str(directory)!r}", str(why)) from error
    try:
        told: Any = json.loads(text)
        if not isinstance(told, dict):
            raise TypeError("no object")
        number = int(told["format"])  # type: ignore[call-overload]
        if number > FORMAT:
            raise ConfigError(
                expected(
                    f"a report of format {FORMAT} or older in {str(path)!r}",
                    f"format {number}",
                    hint="read it with the version of onefold that wrote it, or a newer one",
                )
            )
        return RunReport.parse(told)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise _refused(f"an undamaged {str(path)!r}", what) from error


def _refused(wanted: str, got: str) -> ConfigError:
    hint = "`onefold train --report DIR` writes one"
    return ConfigError(expected(wanted, got, hint=hint))
