"""Read text as bytes: any folder, or the source of the running Python's standard library.

A split is a list of spans of files. Each window is read when it is drawn, so a corpus may be larger
than memory. File names alone decide which files are held out.
"""

import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from onefold.errors import ConfigError

HELD_OUT_SHARE = 0.05
"""Share of the files that are held out (of the bytes, if there is only one file)."""

_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_SNIFF_NBYTES = 8192


@dataclass(frozen=True, slots=True)
class CorpusSpan:
    """Bytes [start, stop) of one file."""

    path: Path
    start: int
    stop: int


@dataclass(frozen=True)
class Split:
    """Spans read as one long row of bytes."""

    spans: tuple[CorpusSpan, ...]
    ends: tuple[int, ...] = field(init=False)  # where each span ends in the row

    def __post_init__(self) -> None:
        numbers = accumulate(span.stop - span.start for span in self.spans)
        object.__setattr__(self, "ends", tuple(numbers))

    @property
    def nbytes(self) -> int:
        return self.ends[-1] if self.ends else 0

    def read_bytes(self, offset: int, count: int) -> bytes:
        """Return bytes [offset, offset + count) of the row."""
        parts: list[bytes] = []
        index = bisect_right(self.ends, offset)
        while count > 0:
            span = self.spans[index]
            begins = self.ends[index] - (span.stop - span.start)
            wanted = min(count, self.ends[index] - offset)
            parts.append(_read_span(span, offset - begins, wanted))
            offset, count, index = offset + wanted, count - wanted, index + 1
        return b"".join(parts)


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text, disjoint by file."""

    name: str
    train: Split
    held_out: Split
    prompt: bytes  # the beginning of generated text


def open_corpus(folder: str | None, seq: int) -> Corpus:
    """Index a folder of text files, or the standard library; both splits hold a row of `seq`.

    Raises:
        ConfigError: no such folder, no text in it, or too little.
    """
    if folder is None:
        name, root = "Python standard library", Path(sysconfig.get_paths()["stdlib"])
        files = [path for path in _files(root, _NOT_SOURCE) if path.suffix == ".py"]
    else:
        name, root = folder, Path(folder)
        files = _files(root, set()) if root.is_dir() else []
    spans = [span for path in files if (span := _text_span(path)) is not None]
    if not spans:
        got = f"no text in {str(root)!r}" if root.is_dir() else f"no folder {str(root)!r}"
        hint = "pass a folder of text or source files with --data"
        raise ConfigError("a data folder with text files", got, hint=hint)
    train, held_out = _split_spans(root, spans)
    smallest = min(train.nbytes, held_out.nbytes)
    if smallest <= seq:
        wanted = f"more than {seq} bytes of text to train on and to hold out, for one row each"
        got = f"{train.nbytes} and {held_out.nbytes} bytes in {str(root)!r}"
        hint = "lower --seq, or pass a folder with more text"
        raise ConfigError(wanted, got, hint=hint)
    prompt = b"def " if folder is None else held_out.read_bytes(0, min(smallest, 16))
    return Corpus(name, train, held_out, prompt)


class Windows:
    """Endless global batches of random windows; yields this rank's rows of each.

    Every rank draws the offsets of the global batch, so the rows do not depend on the number of
    ranks.
    """

    def __init__(self, split: Split, *, rows: int, seq: int, seed: int, own: range) -> None:
        self._split = split
        self._rows = rows
        self._seq = seq
        self.own = own  # rows of each global batch
        self._generator = torch.Generator().manual_seed(seed)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the position in the data, equal on every rank and for any world size."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a position."""
        self._generator.set_state(state["generator"])

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def deal(self, own: range) -> None:
        """Yield these rows of the global batches that follow."""
        self.own = own

    def __next__(self) -> Tensor:
        """Return own rows [len(own), seq + 1] of the next batch, as int64 tokens."""
        last = self._split.nbytes - self._seq
        offsets = torch.randint(0, last, (self._rows,), generator=self._generator).tolist()
        rows = [self._split.read_bytes(offsets[row], self._seq + 1) for row in self.own]
        if not rows:
            return torch.empty(0, self._seq + 1, dtype=torch.int64)
        flat = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
        return flat.view(len(rows), self._seq + 1).long()


def own_rows(rows: int, rank: int, world_size: int) -> range:
    """Return the rows of a global batch for `rank`: contiguous, and as even as possible."""
    return range(rank * rows // world_size, (rank + 1) * rows // world_size)


def _files(root: Path, without: set[str]) -> list[Path]:
    """List every file below `root` except hidden ones, sorted."""
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in without and name[0] != "."]
        files += [Path(folder, name) for name in names if name[0] != "."]
    return sorted(files)


def _text_span(path: Path) -> CorpusSpan | None:
    """Return the span of a file, or None if it is empty, unreadable or has a zero byte."""
    try:
        with path.open("rb") as file:
            head = file.read(_SNIFF_NBYTES)
            nbytes = os.fstat(file.fileno()).st_size
    except OSError:
        return None
    return CorpusSpan(path, 0, nbytes) if head and b"\0" not in head else None


def _split_spans(root: Path, spans: list[CorpusSpan]) -> tuple[Split, Split]:
    """Split spans into training and held out, by the hash of each name relative to `root`."""
    if len(spans) == 1:
        path, nbytes = spans[0].path, spans[0].stop
        cut = nbytes - max(1, int(nbytes * HELD_OUT_SHARE))
        return Split((CorpusSpan(path, 0, cut),)), Split((CorpusSpan(path, cut, nbytes),))
    draws = {span: _draw(span.path.relative_to(root)) for span in spans}
    held_out = {span for span in spans if draws[span] < HELD_OUT_SHARE}
    if not held_out:
        held_out = {min(spans, key=draws.__getitem__)}
    if len(held_out) == len(spans):
        held_out.remove(max(spans, key=draws.__getitem__))
    train = tuple(span for span in spans if span not in held_out)
    return Split(train), Split(tuple(span for span in spans if span in held_out))


def _draw(name: Path) -> float:
    """Return a number in [0, 1) that depends on the name alone."""
    return int.from_bytes(sha256(name.as_posix().encode()).digest()[:8], "big") / 2**64


def _read_span(span: CorpusSpan, offset: int, count: int) -> bytes:
    with span.path.open("rb") as file:
        file.seek(span.start + offset)
        got = file.read(count)
    if len(got) != count:
        wanted = f"{str(span.path)!r} to keep its {span.stop} bytes while it is read"
        hint = "train on a folder that nobody writes to"
        raise ConfigError(wanted, "a shorter file", hint=hint)
    return got
