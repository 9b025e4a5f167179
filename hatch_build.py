"""Compiles the C kernels into the package where there is a C compiler, and leaves it out elsewhere.
Writes the page of the package index, and the project's addresses: those of the repository that
ONEFOLD_REPOSITORY names, as in a release.

`CC` names the compiler (default `cc`), as for other builds. HATCH_BUILD_NO_HOOKS=true is hatch's
own switch for a pure Python wheel.
"""

from __future__ import annotations

import os
import runpy
import shlex
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

COMPILING = Path("src", "onefold", "wire", "kernels", "compiling.py")


class KernelsHook(BuildHookInterface):
    """Before a wheel is packed, editable or not."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; the wheel is then one for this platform, else one for any."""
        compiling = runpy.run_path(str(Path(self.root, COMPILING)))
        path = compiling["library_path"]()
        for old in path.parent.glob("libonefold-*.so"):
            old.unlink()
        compiler = shlex.split(os.environ.get("CC", "cc"))
        is_posix = sys.platform in ("linux", "darwin")
        problem = (
            compiling["compile_library"](compiler, path) if is_posix else "it needs POSIX threads"
        )
        if problem:
            self.app.display_warning(f"without the C kernels, torch does their work: {problem}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append(f"/{path.relative_to(self.root)}")


class PageHook(MetadataHookInterface):
    """Fills the fields of the metadata that depend on where the repository is."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the page of the index, and addresses where they are known."""
        home = os.environ.get("ONEFOLD_REPOSITORY", "").rstrip("/")
        tag = f"v{metadata['version']}"
        page = runpy.run_path(str(Path(self.root, "docs", "tools", "index_page.py")))["index_page"]
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = page(readme, f"{home}/{{}}/{tag}" if home else "")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        paths = {"Homepage": "", "Documentation": f"/blob/{tag}/docs/index.md",
                 "Changelog": f"/blob/{tag}/CHANGELOG.md", "Issues": "/issues"}  # fmt: skip
        metadata["urls"] = {name: home + path for name, path in paths.items() if home}
