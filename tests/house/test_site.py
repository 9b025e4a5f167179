"""The site as it is built: what its search finds first, what it leaves out, what a copy takes."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import onefold

pytest.importorskip("mkdocs")

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "docs" / "tools"
HOOK = runpy.run_path(str(TOOLS / "search_hook.py"))
FIRST = {
    "OOM": "guides/out-of-memory.html",
    "CUDA out of memory": "guides/out-of-memory.html",
    "activation checkpointing": "guides/out-of-memory.html",
    "8 GPUs": "start/first-8-gpus.html",
    "multi-GPU": "start/first-8-gpus.html",
    "resume": "guides/checkpoints.html",
    "checkpoint": "guides/checkpoints.html",
    "FSDP": "coming-from/fsdp2.html",
    "DDP": "coming-from/ddp.html",
    "no_sync": "guides/accumulation.html",
    "wandb": "guides/trainer.html",
    "lora": "guides/adapters.html",
    "muon": "guides/muon.html",
    "hang": "guides/troubleshooting.html",
    "slurm": "guides/clusters.html",
    "diloco": "guides/islands.html",
    "zero++": "guides/slow-links.html",
    "shard": "start/your-script.html",
    "zero3": "guides/choose-a-stage.html",
    "will it fit": "guides/choose-a-stage.html",
    "llama 70b": "guides/choose-a-stage.html",
    "memory estimate": "guides/choose-a-stage.html",
    "docker": "start/install.html",
    "fp8": "guides/precision.html",
    "bf16": "guides/precision.html",
    "deepspeed checkpoint": "coming-from/deepspeed.html",
    "tokens per second": "start/your-script.html",
    "learning rate scheduler": "start/your-script.html",
    "gradient clipping": "start/your-script.html",
    "multi-node": "start/several-machines.html",
    "offload": "guides/larger-than-memory.html",
    "nvme": "guides/larger-than-memory.html",
    "qlora": "guides/qlora.html",
    "tensorboard": "guides/trainer.html",
    "fine-tune": "guides/finetune.html",
    "sft": "guides/trl.html",
    "lightning": "guides/lightning.html",
    "accelerate": "guides/accelerate.html",
    "tensor parallel": "guides/tensor-parallel.html",
    "pipeline parallel": "guides/pipeline.html",
    "context parallel": "guides/sequence-parallel.html",
    "moe": "guides/experts.html",
    "inference": "guides/inference.html",
    "kv cache": "guides/kv-cache.html",
    "ema": "guides/ema.html",
    "evaluation": "guides/evaluation.html",
    "profiler": "guides/report-page.html",
    "nccl timeout": "guides/troubleshooting.html",
    "dataloader": "guides/data-position.html",
    "torch.compile": "guides/compile.html",
    "onefold.shard": "reference/training.html",
    "onefold.save": "reference/checkpoints.html",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built once: three seconds."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    return folder


def test_a_search_finds_the_guide_that_answers_first(site):
    if shutil.which("node") is None:
        pytest.skip("the theme's own search runs in node")
    command = ["node", str(TOOLS / "search_site.js"), str(site), *FIRST]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout)
    assert {query: found[query][:1] for query in FIRST} == {q: [page] for q, page in FIRST.items()}


def test_the_search_index_has_every_page_but_decisions_and_logs(site):
    index = json.loads((site / "search" / "search_index.json").read_text())
    pages = {entry["location"].split("#")[0] for entry in index["docs"]}
    left_out = {f"{path.removesuffix('.md')}" for path in HOOK["EXCLUDED"]}
    assert not [page for page in pages if page.startswith(tuple(left_out))]
    written = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    wanted = {p.replace(".md", ".html") for p in written if not p.startswith(HOOK["EXCLUDED"])}
    assert wanted - pages == set(), "pages that no search finds"


def test_every_synonym_leads_to_a_page_and_to_one_alone():
    pages = HOOK["SYNONYMS"]
    assert [path for path in pages if not (ROOT / "docs" / path).exists()] == []
    words = [word.lower() for line in pages.values() for word in line.split(", ")]
    assert sorted(words) == sorted(set(words))


def test_signatures_are_formatted_in_the_reference(site):
    page = (site / "reference" / "training.html").read_text()
    signature = re.search(r'<div class="doc-signature[^>]*>(.*?)</div>', page, re.S)[1]
    text = re.sub(r"<[^>]+>", "", signature)
    assert text.count("\n") > 10, "one argument a line: the docs extra lacks a formatter"


def test_a_copied_console_block_is_what_one_types(site):
    """The theme's script copies what is visible, and marks the block meanwhile."""
    (script,) = site.glob("assets/javascripts/bundle.*.js")
    assert "data-md-copying" in script.read_text()
    (rule,) = re.findall(r"\[data-md-copying\]([^}]*)\}", (site / "assets/site.css").read_text())
    assert ".gp" in rule
    assert "display: none" in rule
    page = (site / "start" / "first-run.html").read_text()
    assert '<span class="gp">' in page


def test_no_page_shows_an_escaped_pipe(site):
    wrong = [
        path.name
        for path in site.rglob("*.html")
        if "\\|" in re.sub(r"<(script|style)\b.*?</\1>", "", path.read_text(), flags=re.S)
    ]
    assert wrong == []


def test_each_page_leads_on_and_says_its_version(site):
    version = onefold.__version__
    pages = [path for path in site.rglob("*.html") if "adr" not in path.parts]
    assert [p.name for p in pages if f"Onefold {version}" not in p.read_text()] == []
    followed = (site / "start" / "first-run.html").read_text()
    assert 'rel="prev"' in followed or "md-footer__link--prev" in followed
    assert "md-footer__link--next" in followed


def test_the_home_page_has_a_claim_a_line_a_figure_and_three_doors(site):
    page = (site / "index.html").read_text()
    doors = re.search(r'<div class="grid cards">(.*?)</div>', page, re.S)
    assert doors is not None
    leads = re.findall(r'<strong><a href="([^"]+)">', doors[1])
    assert leads == ["guides/finetune.html", "start/your-script.html", "guides/choose-a-stage.html"]
    line = page.index("then train as before")
    assert line < page.index("memory-light.svg") < page.index("grid cards")
