"""Find the network interface that leads to the other hosts.

gloo listens on the address to which the host's own name resolves. On many systems that is a
loopback address, and ranks wait for peers that dial themselves. The launcher has given every rank
an address that all hosts reach, MASTER_ADDR. gloo should listen on the interface towards it.
"""

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from onefold.errors import ConfigError

GLOO = "GLOO_SOCKET_IFNAME"
"""Environment variable that names the interface on which gloo listens."""

_SIOCGIFADDR = 0x8915  # "the address of an interface", in Linux's <linux/sockios.h>


def use_link_to_hosts() -> None:
    """Set GLOO_SOCKET_IFNAME to the interface on which other hosts reach this one.

    Does nothing if it is set, or if all ranks are on one host. Raises `ConfigError` if some are on
    others, MASTER_ADDR is a loopback address here and several or no interfaces could be meant.
    """
    spans, master = _spans_hosts(), os.environ.get("MASTER_ADDR", "")
    if os.environ.get(GLOO) or spans is False:
        return
    own = own_address_towards(master)
    if own is None or (spans is None and ipaddress.ip_address(own).is_loopback):
        return
    chosen = choose(own, addresses(), master)
    if chosen is not None:
        os.environ[GLOO] = chosen


def _spans_hosts() -> bool | None:
    """Return True if the launcher has put some ranks on other hosts, None if it does not say."""
    counts = os.environ.get("WORLD_SIZE", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if not all(count.isdecimal() for count in counts):
        return None
    return int(counts[0]) > int(counts[1])


def own_address_towards(host: str) -> str | None:
    """Return the address of this host on the route to another; None without a route."""
    with suppress(OSError):
        routes = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        for family, kind, protocol, _, address in routes:
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # sends nothing: the kernel finds the route
                return probe.getsockname()[0]
    return None


def choose(own: str, by_address: Mapping[str, str], master: str = "") -> str | None:
    """Return the interface with the address `own`, or the only one that is no loopback.

    `by_address` maps each address of this host to its interface. None lets gloo choose.
    """
    if not ipaddress.ip_address(own).is_loopback:
        return by_address.get(own)
    others = sorted({name for address, name in by_address.items() if _leads_away(address)})
    if len(others) == 1:
        return others[0]
    names = ", ".join(others) or "with no address"
    hint = f"give torchrun the address itself as --master-addr, or set {GLOO} on this host"
    got = f"{master!r}, which is {own} here, and interfaces {names}"
    raise ConfigError("a master address by which other hosts reach this one", got, hint=hint)


def loopback() -> dict[str, str]:
    """Return the environment that has gloo use the loopback interface, for ranks of one host."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {GLOO: names[0]} if names else {}


def addresses() -> dict[str, str]:
    """Return the interface of each address of this host; nothing on other systems than Linux."""
    if not sys.platform.startswith("linux"):
        return {}
    return _ipv4_addresses() | _ipv6_addresses()


def _ipv4_addresses() -> dict[str, str]:
    from fcntl import ioctl

    interfaces: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                interfaces[socket.inet_ntoa(answer[20:24])] = name
    return interfaces


def _ipv6_addresses() -> dict[str, str]:
    interfaces: dict[str, str] = {}
    with suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            interfaces[str(ipaddress.IPv6Address(int(digits, 16)))] = name
    return interfaces


def _leads_away(address: str) -> bool:
    """Return False for loopback and for link-local addresses, which every interface has."""
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local)
