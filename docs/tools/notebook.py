"""Run examples/first_steps.ipynb in this process, and keep what its cells print.

python docs/tools/notebook.py            run it and write the outputs
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parent.parent.parent / "examples" / "first_steps.ipynb"


def run(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells with the outputs of one run, in order."""
    names: dict[str, Any] = {"__name__": "__main__"}
    ran: list[dict[str, Any]] = []
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    for cell in cells:
        if cell["cell_type"] == "code":
            number = code.index(cell) + 1
            cell = {**cell, "execution_count": number, "outputs": outputs(cell, names, number)}
        ran.append(cell)
    return ran


def outputs(cell: dict[str, Any], names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Run a cell: what it prints, and the value of its last line."""
    tree, printed = ast.parse("".join(cell["source"])), io.StringIO()
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last else None
    found: list[dict[str, Any]] = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        found.append({"name": "stdout", "output_type": "stream", "text": lines})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        found.append({"data": data, "execution_count": number, "metadata": {},
                      "output_type": "execute_result"})  # fmt: skip
    return found


def main() -> int:
    """Write the outputs."""
    notebook = json.loads(NOTEBOOK.read_text())
    notebook["cells"] = run(notebook["cells"])
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
