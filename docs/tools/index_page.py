"""The README as a package index shows it: an index resolves no relative link.

Links lead to a release of the repository, whose address ONEFOLD_REPOSITORY names when a package is
built. Without one a link keeps its text alone, and an image is left out.
"""

from __future__ import annotations

import re
from functools import partial

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def index_page(readme: str, base: str) -> str:
    """Return the README with absolute links; "{}" in `base` is "blob", or "raw" for an image."""
    page, end = "", 0
    absolute = partial(_absolute, base=base)
    for fence in _FENCE.finditer(readme):  # code has brackets and parentheses of its own
        page += _LINK.sub(absolute, readme[end : fence.start()]) + fence[0]
        end = fence.end()
    return page + _LINK.sub(absolute, readme[end:])


def relative_links(page: str) -> list[str]:
    """Return the targets that an index cannot resolve."""
    links = _LINK.findall(_FENCE.sub("", page))
    return [target for _, _, target in links if not target.startswith(("https://", "#"))]


def _absolute(link: re.Match[str], base: str) -> str:
    mark, text, target = link.groups()
    text = _LINK.sub(lambda inner: _absolute(inner, base), text)
    if target.startswith(("https://", "http://", "#")):
        return f"{mark}[{text}]({target})"
    if not base:
        return "" if mark else text
    return f"{mark}[{text}]({base.format('raw' if mark else 'blob')}/{target})"
