"""Find words that the project does not use, and say what to write instead.

    python docs/tools/words.py [PAGE ...]

Readers know the terms of PyTorch and DeepSpeed: a private word costs them time. The test reads the
pages, the help of every command and the messages of errors. Code, comments and links' addresses are
no words.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from reading_level import CODE, COMMENT, FENCE, LINK

ROOT = Path(__file__).parent.parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/**/*.md")
LOGS = ("docs/adr/", "docs/development/performance.md", "docs/measurements/")
"""Records of what was decided and measured, in the words of their day."""

WORDS = {
    r"beside": "compared with, against; with; next to",
    r"told": "predicted, reported",
    r"coded|coding|second shards?": "quantized, quantizing; secondary shards",
    r"(is|are|as) no chains?|a chain of": "a sequence of blocks",
    r"(has|have|had|gives?) the bits of|ha(s|ve) the same bits|to the bit": "bitwise identical to",
    r"rests|resting|(?<!the )rest (in|on|whole)": "is stored, is kept, is offloaded",
    r"a stage is data": "a stage is one combination of choices",
    r"one verdict": "all ranks skip the step together",
    r"anew": "again, from the start",
    r"likewise|as ever": "the noun again",
    r"the peers?": "DDP, FSDP2 and DeepSpeed; other libraries",
    r"(?:quant|initial|recogn|optim|serial|normal)is(?:e\w*|ing|ation)": "the American spelling",
    r"neighbours?|centres?|modelled": "the American spelling",
    r"a whole script": "a complete script",
    r"cuts? (?:it|them|parameters|weights) over|(?:is|are) cut over": "shards, splits",
    r"(?:rests?|resting) and travels?": "is stored and sent",
    r"pip install \"?onefold": "pip install '.[hf]' in a checkout: no index has the package yet",
}
"""Patterns of whole words, in any case, and what to write instead."""


def found_words(text: str) -> list[str]:
    """Each word in a text that the project does not use, with what to write instead."""
    return [
        f"{match[0]!r} in {' '.join(text[max(0, match.start() - 40) : match.end() + 40].split())!r}"
        f": write {instead}"
        for pattern, instead in WORDS.items()
        for match in re.finditer(rf"(?<![\w.-])(?:{pattern})(?![\w-])", text, re.I)
    ]


def prose(text: str) -> str:
    """A page without code blocks, comments and addresses. Commands that users copy stay."""
    installs = "\n".join(re.findall(r"^\$ pip install.*$", text, re.M))
    for pattern, by in ((COMMENT, ""), (FENCE, "\n\n"), (LINK, r"\1"), (CODE, "code")):
        text = pattern.sub(by, text)
    return text + installs


def pages() -> list[Path]:
    """The pages that are read."""
    every = (path for pattern in PAGES for path in sorted(ROOT.glob(pattern)))
    return [p for p in every if not p.relative_to(ROOT).as_posix().startswith(LOGS)]


def main(arguments: list[str]) -> int:
    """Print the words; the exit code is 1 if there are any."""
    paths = [Path(argument) for argument in arguments] or pages()
    wrong = [f"{path}: {word}" for path in paths for word in found_words(prose(path.read_text()))]
    print("\n".join([*wrong, f"{len(paths)} pages, {len(wrong)} words"]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
