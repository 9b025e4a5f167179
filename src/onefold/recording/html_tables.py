"""Tables of a page: the first column names the row, the others are numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from onefold.recording.markup import Markup, el, together

Cells = Sequence[str]


def table(
    head: Sequence[str], rows: Sequence[Cells], *, has_sum: bool = False, is_legend: bool = False,
    minor: Collection[int] = (),
) -> Markup:  # fmt: skip
    """A table; with `has_sum` its last row is one. Columns in `minor` are left out on a phone."""

    def style(column: int, cell: str) -> str:
        is_chart = cell.startswith("<svg") if column else False
        words = ["meters" if is_chart else "num", *(["minor"] if column in minor else [])]
        return " ".join(words)

    titles = [
        el("th", {"scope": "col", "class": style(n, word) if n else None}, word)
        for n, word in enumerate(head)
    ]
    if head[-1] == "":
        titles[-1] = el("th", {"class": "meters"})
    body = [
        el(
            "tr", {"class": "sum" if has_sum and number + 1 == len(rows) else None},
            el("th", {"scope": "row"}, row[0]),
            *(el("td", {"class": style(n, cell)}, cell) for n, cell in enumerate(row[1:], start=1)),
        )
        for number, row in enumerate(rows)
    ]  # fmt: skip
    drawn = el(
        "table", {"class": "legend" if is_legend else None},
        el("thead", {}, el("tr", {}, *titles)), el("tbody", {}, *body),
    )  # fmt: skip
    return el("div", {"class": "wide"}, drawn)


def keyed(colour: str, words: str) -> Markup:
    """Words behind the colour that stands for them."""
    return together(el("span", {"class": f"key {colour}"}), words)


def meter(share: float) -> Markup:
    """A bar that shows a share of the longest."""
    width = f"{100 * share:.2f}%"
    bar = el("rect", {"x": 0, "y": 0, "height": 8, "width": width, "class": "meter"})
    return el(
        "svg", {"class": "meterbox", "width": "100%", "height": 8, "aria-hidden": "true"}, bar
    )
