"""Where a reader of a message finds a page: in the checkout, or at the repository's address."""

from functools import cache
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The checkout, if this file is in one."""

_INDEX = "docs/index.md"


@cache
def page(path: str) -> str:
    """Return where to read a file of the repository, such as "docs/guides/ema.md#usage".

    Returns:
        The path itself in a checkout; of an installed wheel, its address in the release that the
        wheel was built from; "PATH in Onefold's repository" if the build named no address.
    """
    if ROOT.joinpath(path.partition("#")[0]).is_file():
        return path
    base = _address().removesuffix(_INDEX)
    return f"{base}{path}" if base else f"{path} in Onefold's repository"


def _address() -> str:
    """Return the address of the documentation, as the wheel's metadata names it."""
    try:
        urls = metadata("onefold").get_all("Project-URL") or []
    except PackageNotFoundError:
        return ""
    named = (url.partition(", ")[::2] for url in urls)
    return next((url for name, url in named if name == "Documentation" and _INDEX in url), "")
