"""The versions of other libraries that Onefold is tested with; one warning outside of them.

A range is a floor and the first release that is untested. tests/adapters/test_versions.py asserts
every private name of these releases that Onefold relies on.
"""

import re
import warnings
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from onefold.errors import ConfigError

TESTED: dict[str, tuple[str, str]] = {
    "torch": ("2.11", "2.16"),
    "transformers": ("5.23", "5.24"),
    "accelerate": ("1.15", "1.16"),
    "peft": ("0.21", "0.22"),
    "trl": ("1.16", "1.17"),
    "lightning": ("2.6", "2.7"),
    "bitsandbytes": ("0.50", "0.51"),
}
"""By package: the lowest tested version, and the lowest one above the tested range."""


def warn_if_untested(*packages: str) -> None:
    """Warn, once in a process, about each installed package outside its range in `TESTED`."""
    for package in packages:
        _warn_once(package)


@cache
def _warn_once(package: str) -> None:
    try:
        installed = version(package)
    except PackageNotFoundError:
        return
    warning = outside(package, installed)
    if warning:
        warnings.warn(warning, UserWarning, stacklevel=4)  # of the line that calls our caller


@cache
def check_torch() -> None:
    """Refuse a torch that is older than the tested ones; warn once of a newer one.

    Raises `ConfigError`.
    """
    try:
        installed = version("torch")
    except PackageNotFoundError:  # built by hand, under another name
        return
    floor, above = TESTED["torch"]
    if () < _release(installed) < _release(floor):
        hint = f"pip install 'torch>={floor},<{above}'"
        raise ConfigError(f"torch {floor} or newer", f"torch {installed}", hint=hint)
    warn_if_untested("torch")


def install_command(*packages: str) -> str:
    """Return the command that installs packages, in the lowest tested version or a newer one."""
    return "pip install " + " ".join(
        f"'{package}>={TESTED[package][0]}'" if package in TESTED else package
        for package in packages
    )


def outside(package: str, installed: str) -> str:
    """Return the warning for version `installed` of a package, or "" if that version is tested."""
    floor, above = TESTED[package]
    if _release(floor) <= _release(installed) < _release(above):
        return ""
    return (
        f"Onefold is tested with {package} from {floor} up to, not including, {above}; "
        f"{installed} is installed. Names that Onefold relies on may have changed. To be safe: "
        f"pip install '{package}>={floor},<{above}'"
    )


def _release(text: str) -> tuple[int, ...]:
    """The numbers at the start of a version: (1, 15, 0) of "1.15.0.dev0"."""
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()
