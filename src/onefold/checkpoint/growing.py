"""Buffers that get their size in the first forward: of observers, queues and caches.

A new module has them empty, or None. Torch's `load_state_dict` loads them if their class overrides
`_load_from_state_dict` and gives them the size of the entry. So that override is asked for room,
with entries of the saved sizes, and values are read into it as into any buffer.
"""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import nn

from onefold.checkpoint.agreement import shape_mismatches
from onefold.engine.guards import sizes_buffers

Saved = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes of saved tensors, by name."""

HINT_SIZED = "give the buffer its size in the _load_from_state_dict of its class"


def sized_by_modules(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return persistent buffers that their own modules may size: by name, the module and prefix."""
    return {
        f"{path}.{name}".lstrip("."): (part, f"{path}." if path else "")
        for path, part in module.named_modules()
        for name in part._buffers
        if sizes_buffers(part) and name not in part._non_persistent_buffers_set
    }


@torch.no_grad()
def make_room(module: nn.Module, saved: Saved, where: str) -> list[str]:
    """Have modules size their buffers as they were saved; return a line for each that did not.

    Buffers of the saved size are left alone.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    entries: defaultdict[tuple[nn.Module, str], dict[str, torch.Tensor]] = defaultdict(dict)
    for name, (part, prefix) in sized_by_modules(module).items():
        buffer = part._buffers[name.removeprefix(prefix)]
        if name not in saved or (buffer is not None and tuple(buffer.shape) == saved[name][0]):
            continue
        shapes[name], dtype = saved[name]
        others = (t for t in (*part.buffers(), *part.parameters()) if t is not None)
        device = buffer.device if buffer is not None else next((t.device for t in others), None)
        entries[part, prefix][name] = torch.zeros(shapes[name], dtype=dtype, device=device)
    for (part, prefix), state in entries.items():
        part._load_from_state_dict(dict(state), prefix, {}, False, [], [], [])
    now = {
        name: tuple(buffer.shape)
        for (part, prefix), state in entries.items()
        for name in state
        if (buffer := part._buffers[name.removeprefix(prefix)]) is not None
    }
    return shape_mismatches(now, shapes, where) + [
        f"{name}: not in the module" for name in shapes if name not in now
    ]
