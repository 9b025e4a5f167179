"""Settings of every test: one compute thread a rank, as ranks are threads themselves."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from onefold.layout import messages as layout_messages
from onefold.planner import message_counts as messages

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests, with the reason, where there is no GPU."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, found none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Spare the collector what imports made: it would look through all of it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Regions of 64 bytes share messages as those of 64 KiB do."""
    monkeypatch.setattr(layout_messages, "PACK_NBYTES", 64)
    messages._messages_of.cache_clear()
    yield
    messages._messages_of.cache_clear()
