"""Write and read the files of a report: `report.json`, `index.html` made from it, `trace.json`."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path

from onefold.errors import ConfigError, OnefoldError
from onefold.recording.page import page
from onefold.recording.perfetto import chrome_trace
from onefold.recording.run_report import FORMAT, RunReport
from onefold.recording.step_record import StepRecord

DATA, TRACE, PAGE = "report.json", "trace.json", "index.html"


def prepare(directory: str | os.PathLike[str]) -> Path:
    """Make the directory. Raises `ConfigError` if it cannot be written to."""
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        got = f"{str(path)!r}: {error.strerror or error}"
        hint = "name a folder that exists or can be made"
        raise ConfigError("a directory to write a report to", got, hint=hint) from error
    return path


def write(
    directory: str | os.PathLike[str], report: RunReport, records: Sequence[StepRecord]
) -> Path:
    """Write all three files; return the page's path. The trace has the `records` of all ranks."""
    path = prepare(directory)
    data = report.as_json()
    _write_text(path / DATA, json.dumps(data, allow_nan=False))
    _write_text(path / TRACE, json.dumps(chrome_trace(records)))
    return draw(path, RunReport.parse(data))  # as `onefold report` will draw it


def draw(directory: Path, report: RunReport) -> Path:
    """Write the page alone and return its path."""
    target = directory / PAGE
    _write_text(target, page(report))
    return target


def read(directory: str | os.PathLike[str]) -> RunReport:
    """Read the report of a directory. Raises `ConfigError` if it is absent or damaged."""
    path = Path(directory) / DATA
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        number = int(data["format"])
        if number <= FORMAT:
            return RunReport.parse(data)
    except OSError as error:
        raise _refused(f"{DATA} in {str(directory)!r}", error.strerror or str(error)) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise _refused(f"an undamaged {str(path)!r}", reason) from error
    wanted = f"a report of format {FORMAT} or older in {str(path)!r}"
    hint = "read it with the version of onefold that wrote it, or a newer one"
    raise ConfigError(wanted, f"format {number}", hint=hint)


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        got, hint = str(error.strerror or error), "free space there, or name another directory"
        raise OnefoldError(f"to write {str(path)!r}", got, hint=hint) from error


def _refused(wanted: str, got: str) -> ConfigError:
    hint = "`onefold train --report DIR` writes one"
    return ConfigError(wanted, got, hint=hint)
