"""Settings of every test: one compute thread a rank, as ranks are threads themselves."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Set
from pathlib import Path

# MKL picks its kernels by the alignment of data on CPUs with AVX512, so that equal products of
# equal matrices may differ in their last bits. Read at MKL's first call; children inherit it.
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")

import pytest
import torch
from hypothesis import settings

from onefold.layout import messages as layout_messages
from onefold.planner import message_counts as messages
from tests.support import grids
from tests.support.budgets import Budgets, slow_tests, test_of
from tests.support.forking import spare_collector

torch.set_num_threads(1)

# an example takes longer than the default of 200 ms on a busy machine: that is no error
settings.register_profile("onefold", deadline=None)
settings.load_profile("onefold")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-file", help="write the CPU seconds of each test file to it")
    parser.addoption("--quick", action="store_true", help="leave out tests that were slow before")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--durations-file")
    if path:
        config.pluginmanager.register(Budgets(Path(path).absolute()))


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what grids.py says, and slow tests; skip GPU tests where there is no GPU."""
    slow = slow_tests()
    _leave_out(config, items, grids.left_out(items))
    grids.leave_to_again(items, slow)
    if config.getoption("--quick"):
        _leave_out(config, items, {item for item in items if test_of(item.nodeid) in slow})
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, found none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def _leave_out(config: pytest.Config, items: list[pytest.Item], left_out: Set[pytest.Item]) -> None:
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def pytest_collection_finish() -> None:
    gc.collect()
    spare_collector()


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Regions of 64 bytes share messages as those of 64 KiB do."""
    monkeypatch.setattr(layout_messages, "PACK_NBYTES", 64)
    messages._messages_of.cache_clear()
    yield
    messages._messages_of.cache_clear()
