"""The version of the package in the footer of each page. mkdocs calls it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src" / "onefold" / "__init__.py"


def on_config(config: Any, **_: Any) -> Any:
    """Set the line that the theme shows below each page."""
    version = re.search(r'^__version__ = "(.*)"$', SOURCE.read_text(), re.M)
    assert version is not None, f"no version in {SOURCE}"
    config["copyright"] = f"Onefold {version[1]}, Apache-2.0"
    return config
