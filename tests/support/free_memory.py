"""Free memory that is made up, for choices that depend on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onefold.fit import bounds


def has_free(patch: pytest.MonkeyPatch, nbytes: int | Callable[[], int]) -> None:
    """Let a host have so many free bytes, for all its ranks."""
    free = nbytes if callable(nbytes) else lambda: nbytes
    patch.setattr(bounds, "free_host_bounds", lambda: [("host", free())])
