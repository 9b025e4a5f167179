"""Ranks meet: they connect lanes and begin to answer roll calls."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from onefold.errors import ConfigError
from onefold.wire.collectives import Group
from onefold.wire.lanes import Lanes, PhaseNow
from onefold.wire.peers import Peers
from onefold.wire.ranks import Ranks, with_hosts
from onefold.wire.roll_call import RollCall, connect_store


def meet(ranks: Ranks, timeout: timedelta | None = None) -> Ranks:
    """Connect the ranks of every group that have not met, and learn their hosts. A collective.

    Raises `WireError` if a rank does not come in time. Groups without gloo stay as they are: a
    world of one, and test doubles.
    """
    everyone = with_hosts(_connected(ranks.everyone, ranks.phase, None, timeout))
    if everyone.peers is None:
        return replace(ranks, everyone=everyone)
    roll_call, timeout = everyone.peers.roll_call, everyone.peers.timeout
    return replace(
        ranks,
        everyone=everyone,
        inside=ranks.inside and _connected(ranks.inside, ranks.phase, roll_call, timeout),
        between=ranks.between and _connected(ranks.between, ranks.phase, roll_call, timeout),
    )


def meet_part(group: Group, ranks: Ranks) -> Group:
    """Connect a part of ranks that have met. A collective of that part."""
    peers = ranks.everyone.peers
    if peers is None:
        return group
    return _connected(group, ranks.phase, peers.roll_call, peers.timeout)


def _connected(
    group: Group, phase: PhaseNow, roll_call: RollCall | None, timeout: timedelta | None
) -> Group:
    handle = group.handle
    if group.world_size == 1 or group.peers is not None or handle is None or not _has_gloo(handle):
        return group
    store, members = handle.get_group_store(), (group.rank, group.world_size)
    # every rank shards in the same order: its n-th meeting is the n-th of all
    name = f"onefold/{store.add(f'onefold/meetings/{group.rank}', 1)}"
    if roll_call is not None:  # lanes of parts have names of their own: answers compare them
        name += f" {handle.group_name}"
    lanes = Lanes.connect(store, name, members, phase, timeout or _timeout_of(handle))
    if roll_call is None:
        is_whole_job = group.world_size == dist.get_world_size()
        roll_call = RollCall(connect_store(store, name), *members, is_whole_job=is_whole_job)
    roll_call.lanes.extend(lanes.all.values())

    def time_limit() -> float:
        return (timeout or _timeout_of(handle)).total_seconds()

    return replace(group, peers=Peers(lanes, roll_call, timeout, time_limit))


def _has_gloo(handle: dist.ProcessGroup) -> bool:
    return "gloo" in dist.get_backend_config(handle)


def _timeout_of(handle: dist.ProcessGroup) -> timedelta:
    """The timeout of the group that the user, or a launcher, started; it may change."""
    return handle._get_backend(torch.device("cpu")).options._timeout


def as_timeout(given: object) -> timedelta | None:
    """`shard(timeout=)` as a timedelta; `ConfigError` unless it is positive."""
    if given is None:
        return None
    if isinstance(given, int | float) and not isinstance(given, bool):
        given = timedelta(seconds=given)
    if not isinstance(given, timedelta) or given <= timedelta():
        raise ConfigError(
            "timeout to be a positive number of seconds, a timedelta or None",
            repr(given),
            hint="onefold.shard(module, optimizer, timeout=600)",
        )
    return given
