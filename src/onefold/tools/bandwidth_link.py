"""Measure gathers and reductions between ranks, and copies to a GPU and back.

The ceiling is a bare exchange of as many bytes, without sums and without placing them; the
backend's own collectives stand beside it. A rate counts the bytes that one rank receives in a
second: (N-1)/N of the gathered buffer each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

import onefold
from onefold.engine.registry import engine_of
from onefold.host import MIB
from onefold.layout.rows import Layout
from onefold.mesh.world import World
from onefold.tier.cpu import HostStore
from onefold.tools.bandwidth import ROW, Ask, BandwidthRow, Bandwidths, Rate, in_rounds, require
from onefold.wire.cut import MessageLayout

LINK_NBYTES = 32 * MIB
NUM_REGIONS = 4
"""Large weights of a transformer block."""


def measure_wire(world: World, ask: Ask) -> Bandwidths:
    """Measure gathers and reductions as units do them, and the backend's own; a collective."""
    hint = "run it without torchrun, which starts two, or with more processes"
    require(world.world_size > 1, "at least 2 ranks with a link between them", "1", hint)
    threads = ask.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    rows = max(1, (ask.nbytes or LINK_NBYTES) // 4 // ROW // NUM_REGIONS // world.world_size)
    shape = (rows * world.world_size, ROW)

    def agree(counts: list[int]) -> list[int]:
        return [max(column) for column in zip(*world.gather(counts), strict=True)]

    rates, rounds, seconds = in_rounds(list(_wire_rows(world, shape)), ask.seconds, agree)
    nbytes = NUM_REGIONS * shape[0] * ROW * 4
    backend = "nccl" if world.group.is_nccl else "gloo"
    return Bandwidths(
        "link", nbytes, None, threads, None, rounds, seconds, rates,
        ranks=world.world_size, backend=backend,
    )  # fmt: skip


def _wire_rows(world: World, shape: tuple[int, int]) -> Iterator[BandwidthRow]:
    group, rank, world_size = world.group, world.rank, world.world_size
    zeros = partial(torch.zeros, device=world.device)
    probe = onefold.shard(nn.Linear(1, 1, device=world.device), mesh=group.handle)
    transport = engine_of(probe).context.transport
    layout = Layout.build([(str(index), shape) for index in range(NUM_REGIONS)], world_size)
    full = zeros(layout.full_numel)
    shard = zeros(len(full) // world_size)
    received = len(full) // world_size * (world_size - 1)
    others = [0 if each == rank else len(shard) for each in range(world_size)]
    arriving = zeros(received)
    cut = MessageLayout(layout.slots, [slot.full_offset for slot in layout.slots], group, 4)
    spread = MessageLayout(layout.slots, None, group, 4)
    partials = [full[slot.full_offset :][: slot.numel] for slot in layout.slots]
    out = [zeros(slot.piece_numel(rank)) for slot in layout.slots]
    fresh = [True] * len(out)
    finish = torch.cuda.synchronize if world.device.type == "cuda" else _nothing
    ways: list[tuple[str, str, str, Callable[[], object]]] = [
        ("exchange", "exchange", "all-to-all",
         lambda: group.all_to_all(arriving, full[:received], others, others).wait()),
        ("own_gather", "gather", "backend's own", lambda: group.all_gather(full, shard).wait()),
        ("gather", "gather", "engine", lambda: transport.gather(full, cut, "gather").wait()),
        ("own_reduce_scatter", "reduce", "backend's own",
         lambda: group.reduce_scatter(shard, full).wait()),
        ("reduce_scatter", "reduce", "engine",
         lambda: transport.reduce_scatter(partials, spread, out, fresh, "reduce").wait()),
    ]  # fmt: skip
    for name, rows, way, action in ways:
        of = "" if name == "exchange" else "exchange"
        yield BandwidthRow(name, rows, way, 4 * received, action, of, finish=finish)


def measure_copies(ask: Ask) -> tuple[dict[str, Rate], list[str]]:
    """Measure copies between host and GPU, from page-locked memory of the CPU tier and pageable.

    Returns rates, and a note where there is no GPU.
    """
    if not torch.cuda.is_available():
        return {}, ["no GPU here: copies between host and device are not measured"]
    numel = (ask.nbytes or LINK_NBYTES) // 4
    gpu = torch.zeros(numel, device="cuda")
    pinned = HostStore(4 * numel).allocate(numel, torch.float32).tensor.zero_()
    hosts = {"pinned": pinned, "pageable": torch.zeros(numel)}
    rows: list[BandwidthRow] = []
    for way, group in (("h2d", "to GPU"), ("d2h", "from GPU")):
        for name, host in hosts.items():
            target, source = (gpu, host) if way == "h2d" else (host, gpu)
            copy = partial(target.copy_, source, non_blocking=True)
            of = "" if name == "pinned" else f"{way}_pinned"
            finish = torch.cuda.synchronize
            rows.append(
                BandwidthRow(f"{way}_{name}", group, name, gpu.nbytes, copy, of, finish=finish)
            )
    return in_rounds(rows, ask.seconds)[0], []


def _nothing() -> None: ...
