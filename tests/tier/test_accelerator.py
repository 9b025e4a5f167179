"""What the library asks of an accelerator, on one that these tests make up."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from onefold.engine.forward_threads import thread_of
from onefold.layout.ledger import Ledger
from onefold.tier import accelerator
from onefold.tier.cpu import HostStore, page_locked
from onefold.tier.slots import HUGE_NBYTES, host_room
from onefold.tier.workers import Workers

THIRD = torch.device("cuda", 3)
OUT_OF_MEMORY = 2


@pytest.fixture
def chosen(monkeypatch):
    """The threads that chose a device of a made-up kind, and the device."""
    chosen = []
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    )
    monkeypatch.setattr(
        torch.accelerator,
        "set_device_index",
        lambda index: chosen.append((threading.current_thread().name, index)),
    )
    return chosen


@pytest.fixture
def runtime(monkeypatch, chosen):
    """CUDA's calls for pages and launches, in order; `code` is what the next lock returns."""
    calls = SimpleNamespace(code=0, made=[])

    def register(address, nbytes, flags):
        calls.made.append(("lock", nbytes))
        return calls.code

    cudart = SimpleNamespace(
        cudaHostRegister=register,
        cudaHostUnregister=lambda address: calls.made.append(("unlock", address)),
    )

    def ones(*_, device):
        calls.made.append(("launch", device))
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch, "ones", ones)
    return calls


def test_every_worker_uses_the_device_of_its_rank(chosen):
    Workers(3, "worker", device=THIRD).give(lambda: None).wait()
    assert sorted(chosen) == [("worker_0", 3), ("worker_1", 3), ("worker_2", 3)]


@pytest.mark.parametrize("device", [None, torch.device("cpu"), torch.device("meta")])
def test_workers_of_the_cpu_choose_no_device(chosen, device):
    Workers(2, "worker", device=device).give(lambda: None).wait()
    assert chosen == []


def test_a_forward_in_a_thread_runs_on_the_device_and_stream_of_its_maker(chosen, monkeypatch):
    stream, streams = SimpleNamespace(device=THIRD), []
    monkeypatch.setattr(
        torch, "get_device_module", lambda kind: SimpleNamespace(is_initialized=lambda: True)
    )
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.accelerator, "set_stream", streams.append)
    with thread_of(lambda: None) as thread:
        thread.resume()
    assert (chosen, streams) == ([("onefold forward", 3)], [stream])


def test_pages_that_cannot_be_locked_leave_no_error_for_the_next_launch(runtime):
    """CUDA keeps the error until a launch reports it: one is made for that, and dropped."""
    runtime.code = OUT_OF_MEMORY
    with pytest.warns(UserWarning, match="could not be page-locked .CUDA error 2."):
        HostStore(10_000)
    assert runtime.made == [("lock", 12288), ("launch", "cuda")]
    runtime.made.clear()
    host_room(5000, Ledger())
    assert runtime.made == [("lock", 8192), ("launch", "cuda")]


def test_locked_pages_are_unlocked_before_they_go(runtime):
    pages, code = page_locked(5000, HUGE_NBYTES)
    address = pages.data_ptr()
    assert (code, len(pages), address % HUGE_NBYTES) == (0, 8192, 0)
    del pages
    assert runtime.made == [("lock", 8192), ("unlock", address)]


def test_another_accelerator_has_memory_that_torch_locks(chosen, monkeypatch):
    """Only CUDA locks pages that torch did not allocate."""
    monkeypatch.setattr(accelerator, "kind", lambda: "xpu")
    locked = []

    def empty(numel, *, dtype, pin_memory):
        locked.append(pin_memory)
        return torch.zeros(numel, dtype=dtype)

    monkeypatch.setattr(torch, "empty", empty)
    pages, code = page_locked(5000)
    assert (code, len(pages), pages.data_ptr() % 4096, locked) == (0, 8192, 0, [True])


def test_memory_that_the_allocator_keeps_for_later_is_free(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (10, 100))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: 20)
    assert accelerator.memory(THIRD) == (40, 100)
