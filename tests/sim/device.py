"""Torch's device "sim" in this process: loading it, and what it has counted and found."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

KIND, BACKEND = "sim", "simccl"
BACKENDS = f"cpu:gloo,{KIND}:{BACKEND}"

_OTHERS = (str(Path(torch.__file__).parent), str(Path(types.__file__).parent), "<")
"""Files whose lines say nothing: torch's, and those of Python."""

native: Any = None


class Race(AssertionError):
    """Two accesses to the same bytes that nothing orders."""


def load(library: Path, **options: Any) -> Any:
    """Make the device known to torch, once in a process; `options` as `configure` takes them."""
    global native
    if native is None:
        torch.utils.rename_privateuse1_backend(KIND)
        spec = importlib.util.spec_from_file_location("device", library)
        assert spec is not None
        assert spec.loader is not None
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        _register()
    native.configure(**options)
    return native


def _register() -> None:
    module: Any = types.ModuleType(f"torch.{KIND}")

    class device:
        """The current device within a block."""

        def __init__(self, which: Any) -> None:
            self._index = _index(which)

        def __enter__(self) -> None:
            self._before = native.current()
            native.use(self._index)

        def __exit__(self, *error: object) -> None:
            native.use(self._before)

    def generator(which: Any = None) -> torch.Generator:
        return native.default_generator(_index(which))

    module.device = device
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = native.count
    module.current_device = native.current
    module.set_device = lambda which: native.use(_index(which))
    module.manual_seed = lambda seed: generator().manual_seed(seed)
    module.manual_seed_all = lambda seed: [
        native.default_generator(index).manual_seed(seed) for index in range(native.count())
    ]
    module.initial_seed = lambda: generator().initial_seed()
    module.get_rng_state = lambda which=None: generator(which).get_state()
    module.set_rng_state = lambda state, which=None: generator(which).set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.Stream, module.Event = torch.Stream, torch.Event
    module.stream = lambda stream: stream  # torch's streams are contexts
    module.current_stream = torch.accelerator.current_stream
    module.synchronize = torch.accelerator.synchronize
    module.default_generators = tuple(native.default_generator(i) for i in range(8))
    torch._register_device_module(KIND, module)
    sys.modules[module.__name__] = module
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend(BACKEND, _communicator, devices=[KIND])


def _index(which: Any) -> int:
    if which is None:
        return native.current()
    index = which if isinstance(which, int) else torch.device(which).index
    return native.current() if index is None else index


def _communicator(store: Any, rank: int, size: int, timeout: Any) -> Any:
    gloo = ProcessGroupGloo(store, rank, size, timeout=timeout)
    return native.wrap(gloo, rank, size)


# what it has counted and found


def check() -> None:
    """Raise the races that were found since `native.reset`."""
    found = [_race(*race) for race in native.races()]
    if found:
        more = f"\nand {len(found) - 3} more" if len(found) > 3 else ""
        raise Race("\n".join(found[:3]) + more)


def _race(first: Any, first_writes: bool, second: Any, second_writes: bool, nbytes: int) -> str:
    return (
        f"{nbytes} bytes are in a race: nothing orders\n"
        f"  {_launch(first, first_writes)}\n"
        f"and, launched later,\n  {_launch(second, second_writes)}"
    )


def _launch(launch: Any, is_write: bool) -> str:
    about = f" [{launch['label']}]" if launch["label"] else ""
    node = f" of {launch['node']}" if launch["node"] else ""
    verb = "writes" if is_write else "reads"
    lines = where(launch["lines"])
    place = f"stream {launch['stream']}" if launch["stream"] >= 0 else "the host"
    return f"{launch['name']}{node}{about}, which {verb} on {place}, at {lines}"


def where(lines: list[str], most: int = 4) -> str:
    """The innermost lines outside of torch."""
    own = [line.rsplit(":", 2)[:2] for line in lines if not line.startswith(_OTHERS)]
    short = [f"{'/'.join(file.split('/')[-2:])}:{number}" for file, number in own]
    return " <- ".join(short[:most]) or "no line of Python"


def host_waits() -> Counter[str]:
    """Waits of the host since `native.reset`, by kind and line; those of this package left out."""
    found: Counter[str] = Counter()
    for what, lines, times in native.host_waits():
        found[f"{what} at {where(lines)}"] += times
    return found


@contextmanager
def labelled(text: str) -> Iterator[None]:
    """Say what this thread does, for races."""
    before = native.label(text)
    try:
        yield
    finally:
        native.label(before)
