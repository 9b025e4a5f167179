"""Write and read the files of a report: `report.json`, `index.html` made from it, `trace.json`.

The page is one static template, `page.html`, with the report's data in it. The template loads
nothing; its own content policy forbids it. Its script draws the charts and tables.
"""

import json
import os
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from onefold.errors import ConfigError, OnefoldError
from onefold.recording.page_data import contents, rows
from onefold.recording.run_report import FORMAT, RunReport
from onefold.recording.step_record import StepRecord

DATA, TRACE, PAGE, COMPARISON = "report.json", "trace.json", "index.html", "compare.html"

PROFILES = ("profile-rank*.json.gz", "memory-rank*.pickle")
"""Files of `--profile`, to which the page of the same folder links."""


def page(report: RunReport, against: RunReport | None = None, profiles: Sequence[str] = ()) -> str:
    """Return the whole document; with `against`, it begins with a comparison.

    `profiles` are names of files in its folder.
    """
    drawn = contents(report, against, profiles)
    data = json.dumps(drawn, separators=(",", ":"), allow_nan=False)
    data = data.replace("<", "\\u003c")  # no `<` ends the script element
    filled = {"title": escape(report.title), "data": data}
    template = (files("onefold.recording") / "page.html").read_text("utf-8")
    return re.sub(r"\{\{(title|data)\}\}", lambda name: filled[name[1]], template)


# the trace


def chrome_trace(records: Sequence[StepRecord]) -> dict[str, Any]:
    """Return the JSON object of a trace file, for Perfetto (ui.perfetto.dev) and chrome://tracing.

    Each rank is a process and each row a thread. Spans of a stream that overlap without nesting get
    rows of their own, as the format requires. Bytes are counters. Times are microseconds since the
    first rank began. Source: "Trace Event Format", Google.
    """
    events: list[dict[str, Any]] = []
    first = min((record.began_at for record in records), default=0.0)
    for record in records:
        shift = record.began_at - first
        events.append(_name_event("process_name", record.rank, 0, f"rank {record.rank}"))
        for tid, (name, spans) in enumerate(rows(record.spans), start=1):
            events.append(_name_event("thread_name", record.rank, tid, name))
            events += [
                {
                    "ph": "X", "pid": record.rank, "tid": tid, "cat": span.stream,
                    "name": f"{span.verb} {span.unit}".strip(),
                    "ts": _microseconds(shift + span.start),
                    "dur": _microseconds(span.stop - span.start),
                    "args": {"unit": span.unit, "nbytes": span.nbytes},
                }
                for span in spans
            ]  # fmt: skip
        events += _counters(record, shift)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _counters(record: StepRecord, shift: float) -> list[dict[str, Any]]:
    memory = record.memory
    names = [f"{series.kind} ({series.tier})" for series in record.series]
    return [
        {
            "ph": "C", "pid": record.rank, "tid": 0, "name": "bytes held",
            "ts": _microseconds(shift + time), "args": dict(zip(names, nbytes, strict=True)),
        }
        for time, nbytes in zip(memory.times, zip(*memory.nbytes, strict=True), strict=True)
    ]  # fmt: skip


def _name_event(event: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": event, "args": {"name": name}}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


# files


def prepare(directory: str | os.PathLike[str], purpose: str = "a report") -> Path:
    """Make the directory, and write to it. Raises `ConfigError` if that cannot be done."""
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        got = f"{str(path)!r}: {error.strerror or error}"
        hint = "name a folder that exists or can be created"
        raise ConfigError(f"a directory to write {purpose} to", got, hint=hint) from error
    return path


def write_report(
    directory: str | os.PathLike[str], report: RunReport, records: Sequence[StepRecord]
) -> Path:
    """Write all three files; return the page's path. The trace has the `records` of all ranks."""
    path = prepare(directory)
    data = report.as_json()
    _write_text(path / DATA, json.dumps(data, allow_nan=False))
    _write_text(path / TRACE, json.dumps(chrome_trace(records)))
    return draw(path, RunReport.parse(data))  # as `onefold report` will draw it


def draw(directory: Path, report: RunReport, against: RunReport | None = None) -> Path:
    """Write the page alone and return its path."""
    target = directory / (PAGE if against is None else COMPARISON)
    profiles = sorted(path.name for pattern in PROFILES for path in directory.glob(pattern))
    _write_text(target, page(report, against, profiles))
    return target


def redraw(directory: str | os.PathLike[str]) -> None:
    """Draw the page again, with links to profiles that came later; nothing without a report."""
    if (Path(directory) / DATA).exists():
        draw(Path(directory), read_report(directory))


def read_report(directory: str | os.PathLike[str]) -> RunReport:
    """Read the report of a directory. Raises `ConfigError` if it is absent or damaged."""
    path = Path(directory) / DATA
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        number = int(data["format"])
        if number <= FORMAT:
            report = RunReport.parse(data)
            contents(report)  # so that damage of what the page draws is found here, too
            return report
    except OSError as error:
        raise _refused_page(
            f"{DATA} in {str(directory)!r}", error.strerror or str(error)
        ) from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise _refused_page(f"an undamaged {str(path)!r}", reason) from error
    wanted = f"a report of format {FORMAT} or older in {str(path)!r}"
    hint = "read it with the version of onefold that wrote it, or a newer one"
    raise ConfigError(wanted, f"format {number}", hint=hint)


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        got, hint = str(error.strerror or error), "free space there, or name another directory"
        raise OnefoldError(f"to write {str(path)!r}", got, hint=hint) from error


def _refused_page(wanted: str, got: str) -> ConfigError:
    hint = "`onefold train --report DIR` writes one"
    return ConfigError(wanted, got, hint=hint)
