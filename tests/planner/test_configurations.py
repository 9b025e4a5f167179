"""Published configurations: plans count the parameters and bytes of transformers, or say why not.

Each has its published widths, and two of its layers. `benchmarks/configurations.py` plans all.
"""

from __future__ import annotations

import json
from typing import Any

import configurations
import pytest

LAYERS = 2


def shallow(part: dict[str, Any]) -> dict[str, Any]:
    """The configuration with two layers: those of its first and its last kind."""
    few = {key: shallow(value) if isinstance(value, dict) else value for key, value in part.items()}
    for key in {"num_hidden_layers", "num_layers", "num_decoder_layers", "depth"} & {*few}:
        few[key] = LAYERS
    return few | {key: [few[key][0], few[key][-1]] for key in {"layer_types"} & {*few}}


@pytest.mark.parametrize(
    ("name", "training", "inference", "said"),
    [
        ("gpt-oss-20b", "equal", "equal", "in float32: quantization_config (mxfp4)"),
        ("DeepSeek-V3", "equal", "equal", "in bfloat16: quantization_config (fp8)"),
        ("Olmo-3.1-32B", "equal", "equal", None),
        ("Qwen3.5-27B", "part", "part", "parameters of Qwen3_5ForConditionalGeneration are left"),
        ("flan-t5-xl", "refused", "equal", "t5 has an encoder too"),
        ("Kimi-K2", "refused", "refused", "custom code"),
    ],
)
def test_a_plan_counts_what_transformers_builds_or_says_what_it_leaves_out(
    name, training, inference, said, tmp_path
):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(shallow(configurations.published()[name]["config"])))
    found = configurations.compared(path)
    plans = found["training"], found["inference"]
    assert tuple(plan["verdict"] for plan in plans) == (training, inference)
    lines = [
        line for plan in plans for line in (plan.get("refused"), *plan.get("says", ())) if line
    ]
    assert any(said in line for line in lines) if said else not lines
    assert not any("cannot be traced" in line for line in lines)


def test_the_page_shows_the_newest_result_and_no_plan_differs():
    newest = max(configurations.RESULTS.glob("*-configurations.json"))
    result = json.loads(newest.read_text())
    assert [row["model"] for row in result["models"]] == [*configurations.published()]
    assert {*result["counts"]} == {"equal", "part", "refused"}
    assert "\n".join(configurations.table(result)) in configurations.PAGE.read_text()
