"""Check a built site: nothing is loaded from the network, and every link of a page leads somewhere.

    python docs/tools/check_site.py build/site

mkdocs checks links in Markdown; this checks the HTML, with the reference and the theme in it.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "srcset"}


class Page(HTMLParser):
    """Anchors of a page, links on it, and addresses that a browser loads with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note one element."""
        found = {name: value for name, value in attrs if value}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in LOADS and LOADS[tag] in found:
            self.loads.append(found[LOADS[tag]])


def problems(site: Path) -> list[str]:
    """What is wrong, one line each."""
    pages = {path.resolve(): Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    wrong = []
    for path, page in pages.items():
        where = path.relative_to(site.resolve())
        if where.name == "404.html":  # its links begin at the root of a server
            continue
        for address in (*page.loads, *page.links):
            target = urlsplit(address)
            if target.scheme or target.netloc:
                if address in page.loads:
                    wrong.append(f"{where}: loads {address} from the network")
                continue
            file = (path.parent / unquote(target.path)).resolve() if target.path else path
            if file.is_dir():
                file /= "index.html"
            if not file.exists():
                wrong.append(f"{where}: no file {address}")
            known = (
                pages[file].ids if target.fragment and file in pages else {unquote(target.fragment)}
            )
            if unquote(target.fragment) not in known:
                wrong.append(f"{where}: no anchor {address}")
    return wrong


def main(arguments: list[str]) -> int:
    """Print the problems; the exit code is 1 if there are any."""
    wrong = problems(Path(arguments[0]))
    print("\n".join(wrong or ["every link leads somewhere, nothing comes from the network"]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
