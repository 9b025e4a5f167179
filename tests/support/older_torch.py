"""What ranks as threads need in torch 2.11 and 2.12, whose own tests for them lack it."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.testing._internal.distributed import multi_threaded_pg as threaded


def _makes_state_in_step() -> bool:
    """True if Adagrad makes the state of a parameter that has none, as others do."""
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adagrad([parameter])
    optimizer.state.clear()
    parameter.grad = torch.ones(1)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


offloads_adagrad = pytest.mark.skipif(
    not _makes_state_in_step(), reason="in torch 2.11 Adagrad makes its state when it is built"
)


def prepare_threads() -> None:
    """Make torch ready for ranks that are threads; the main thread calls this."""
    # FakeTensorMode calls it first in two threads at once: without a GPU a CUDA build then crashes
    torch._C._ensureCUDADeviceGuardSet()
    if "comms" in vars(threaded.ThreadLocalWorld):
        return
    own = threading.local()
    threaded.ThreadLocalWorld.comms = property(lambda _: vars(own).setdefault("comms", []))


def leave_thread() -> None:
    """Free what DTensor has kept for this thread, while the thread holds Python's lock.

    torch frees it when the thread ends, under a lock of its own. Two threads that end at once each
    waited for the lock of the other in torch 2.11.
    """
    torch._C._clear_DTensor_sharding_propagator_cache()
