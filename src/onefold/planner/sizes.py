"""Parse and print bytes as people write them: "80GiB", "0.5 TB". No torch here."""

from __future__ import annotations

import re

from onefold.errors import ConfigError, expected

UNITS = {"B": 1} | {
    f"{prefix}{middle}B": base**power
    for power, prefix in enumerate("KMGTP", 1)
    for middle, base in (("", 1000), ("i", 1024))
}
_SHORT = {prefix.lower(): 1024**power for power, prefix in enumerate("KMGTP", 1)}
"""A bare "G" is a GiB, as for SLURM, Docker and `dd`."""
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_nbytes(flag: str, text: str) -> int:
    """Return the bytes of a text with a unit; `ConfigError` names the flag."""
    found = _PATTERN.fullmatch(text)
    units = {unit.lower(): factor for unit, factor in UNITS.items()} | _SHORT
    factor = units.get(found[2].lower()) if found else None
    nbytes = int(float(found[1]) * factor) if found and factor else 0
    if nbytes < 1:
        wanted = f"{flag} to be a number above 0 with a unit: {', '.join(UNITS)}"
        raise ConfigError(expected(wanted, repr(text), hint=f"{flag} 80GiB"))
    return nbytes


def format_bytes(nbytes: float) -> str:
    """Write bytes with three digits or so, in binary units."""
    sign, rest = ("-", -nbytes) if nbytes < 0 else ("", nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if rest < 1024 or unit == "TiB":
            digits = 0 if unit == "B" or rest >= 100 else 1 if rest >= 10 else 2
            return f"{sign}{rest:.{digits}f} {unit}"
        rest /= 1024
    raise AssertionError("every number has a unit")
