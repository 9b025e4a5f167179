"""Find sentences of more than 30 words in the README, Start and Guides.

    python docs/tools/reading_level.py [PAGE ...]

Code, comments, tables' rules and links' addresses are no words. A table cell, a list item and a
heading end a sentence, as `.`, `!` and `?` do. A colon or semicolon does not.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = ("README.md", "docs/index.md", "docs/start/*.md", "docs/guides/*.md")
MOST_WORDS = 30

FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2", re.S | re.M)
COMMENT = re.compile(r"<!--.*?-->", re.S)
TAG = re.compile(r"</?[a-z][^>]*>")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)(\{[^}]*\})?")
CODE = re.compile(r"`[^`]+`")
ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+|^#+\s+|^\s*(?:!!!|\?\?\?).*$|^\s*===.*$", re.M)
END = re.compile(r"[.!?](?=\s|$)|:\s*(?=\x00|\n\s*\n|$)|\n\s*\n|\||\x00")
WORD = re.compile(r"\w[\w'.,/-]*")


def sentences(text: str) -> list[str]:
    """The sentences of a page of Markdown, without its code."""
    for pattern, by in ((COMMENT, ""), (FENCE, "\n\n"), (LINK, r"\1"), (CODE, "code"), (TAG, " ")):
        text = pattern.sub(by, text)
    text = ITEM.sub("\x00", text)
    found = (" ".join(part.split()) for part in END.split(text))
    return [part for part in found if part]


def long_sentences(text: str, most: int = MOST_WORDS) -> list[tuple[int, str]]:
    """Each sentence of more than `most` words, with its number of words."""
    counted = ((len(WORD.findall(sentence)), sentence) for sentence in sentences(text))
    return [(number, sentence) for number, sentence in counted if number > most]


def main(arguments: list[str]) -> int:
    """Print what is too long; the exit code is 1 if anything is."""
    found = [Path(each) for each in arguments]
    paths = found or [path for each in PAGES for path in sorted(ROOT.glob(each))]
    wrong = 0
    for path in paths:
        for number, sentence in long_sentences(path.read_text(encoding="utf-8")):
            wrong += 1
            print(f"{path}: a sentence of {number} words, at most {MOST_WORDS}: {sentence}")
    print(f"{len(paths)} pages, {wrong} sentences above {MOST_WORDS} words")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
