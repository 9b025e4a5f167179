"""Every way to train: stage and offload."""

from __future__ import annotations

from onefold.config import Offload

WAYS: tuple[tuple[int, str], ...] = (
    (0, "none"), (1, "none"), (2, "none"), (3, "none"),
    (1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "cpu"), (3, "disk"),
)  # fmt: skip
"""Stage and offload, from what costs least time to what costs least memory."""

OFFLOADS = {
    "none": Offload(),
    "optimizer": Offload(optimizer="cpu"),
    "cpu": Offload(optimizer="cpu", parameters="cpu"),
    "disk": Offload(optimizer="disk", parameters="disk", disk="."),
}
"""What the words of `--offload` mean to a plan; which folder it is does not count."""
