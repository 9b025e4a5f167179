"""Settings of every test: one compute thread a rank, as ranks are threads themselves."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path

# MKL picks its kernels by the alignment of data on CPUs with AVX512, so that equal products of
# equal matrices may differ in their last bits. Read at MKL's first call; children inherit it.
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")

import pytest
import torch
from hypothesis import settings

from onefold.layout import message_plan
from onefold.planner import message_counts as messages
from tests.support.budgets import BUDGETS, Budgets, quick_files
from tests.support.forking import spare_collector

ROOT = Path(__file__).parents[1]

torch.set_num_threads(1)

# autograd counts devices at its first backward. After torch.compile a build with CUDA counts one on
# a machine without any, starts a thread for it, and refuses each later backward in a forked process
# (torch 2.12 and 2.15; not in builds for CPUs)
torch.ones(1, requires_grad=True).sum().backward()

# an example takes longer than the default of 200 ms on a busy machine: that is no error
settings.register_profile("onefold", deadline=None)
settings.load_profile("onefold")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-file", help="write the CPU seconds of each test file to it")
    parser.addoption("--quick", action="store_true", help="the cheapest files alone")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--durations-file")
    if path:
        config.pluginmanager.register(Budgets(Path(path).absolute()))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of `--quick`: files that cost more than others, and those that nobody has measured."""
    if not config.getoption("--quick") or not collection_path.name.startswith("test_"):
        return None
    quick = quick_files(json.loads(BUDGETS.read_text()))
    return collection_path.relative_to(ROOT).as_posix() not in quick or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, found none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    gc.collect()
    spare_collector()


@pytest.fixture
def wide(sharing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks are many; regions of 64 bytes travel apart as those of 64 KiB do."""
    monkeypatch.setattr(message_plan, "FEW_RANKS", 1)


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Regions of 64 bytes share messages as those of 64 KiB do."""
    monkeypatch.setattr(message_plan, "PACK_NBYTES", 64)
    messages._messages_of.cache_clear()
    yield
    messages._messages_of.cache_clear()
