"""Which ranks share a host, and who of another host carries a rank's rows there."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import platform
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

#: Names this rank's host, in place of what the system says.
VARIABLE = "THINWIRE_HOST"
_MOST_TEXT = 100
LOOPBACK = "127.0.0.1"
_GET_ADDRESS = 0x8915  # Linux's SIOCGIFADDR

#: The ranks of each host, ascending; hosts by their first ranks.
Hosts = tuple[tuple[int, ...], ...]


def host_name() -> str:
    """Names this rank's host: equal on ranks that may map each other's memory, and on no others. See THINWIRE_HOST.

    Processes that do not see each other's numbers are on different hosts, as they cannot map each other's memory.
    """
    return os.environ.get(VARIABLE, "").strip() or system_name()


def system_name() -> str:
    """Names this system: equal for processes that see each other's numbers, since it was started."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{platform.node()[:_MOST_TEXT]} {boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # not Linux, where each rank's memory is its own
        return f"{platform.node()[:_MOST_TEXT]} {os.getpid()}"


def name_problem() -> str | None:
    """What is wrong with THINWIRE_HOST, and what is accepted; None: nothing."""
    name = os.environ.get(VARIABLE, "").strip()
    if len(name) > _MOST_TEXT or not name.isprintable():
        return f"{VARIABLE} is {name[:40]!r}, expected a name of at most {_MOST_TEXT} printable characters"
    return None


def hosts_of(names: Sequence[str]) -> Hosts:
    """The hosts of ranks whose hosts have these names.

    >>> hosts_of(["b", "a", "b"])
    ((0, 2), (1,))
    """
    members: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        members.setdefault(name, []).append(rank)
    return tuple(map(tuple, members.values()))


def forwarder(hosts: Hosts, rank: int, host: int) -> int:
    """The rank of a host that takes a rank's rows there: itself if that is its own host, else the one at its place.

    A host of fewer ranks serves several of a larger one with each of its own.

    >>> forwarder(((0, 1), (2, 3)), 3, 0), forwarder(((0, 1, 2), (3,)), 2, 1)
    (1, 3)
    """
    if rank in hosts[host]:
        return rank
    place = next(members.index(rank) for members in hosts if rank in members)
    return hosts[host][place % len(hosts[host])]


def served_by(hosts: Hosts, rank: int) -> list[int]:
    """The ranks whose forwarder on its own host a rank is: itself first, the others ascending.

    >>> served_by(((0, 1), (2, 3)), 3), served_by(((0, 1, 2), (3,)), 3)
    ([3, 1], [3, 0, 1, 2])
    """
    here = next(number for number, members in enumerate(hosts) if rank in members)
    others = sorted(peer for members in hosts for peer in members if peer not in hosts[here])
    return [rank, *(peer for peer in others if forwarder(hosts, peer, here) == rank)]


def is_loopback(host: str) -> bool:
    """Whether a host leads no further than where it is read: a loopback address, or "localhost".

    Other names are not looked up. A host's own name may lead to 127.0.1.1 on that host, and to it from all others.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "10.0.0.1", "node7")]
    [True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def facing_address(host: str) -> str:
    """The address of this host from which it reaches another one, or OSError. Nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]  # the port is of no account
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram's socket: it is only routed
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The name of this host's network interface that has an address; None where none is known by it."""
    names = [name for _, name in socket.if_nameindex()]
    if is_loopback(address):
        return next((name for name in ("lo", "lo0") if name in names), None)
    if ":" in address:
        wanted, table = ipaddress.ip_address(address.partition("%")[0]).packed.hex(), Path("/proc/net/if_inet6")
        lines = map(str.split, table.read_text().splitlines() if table.exists() else ())
        return next((fields[-1] for fields in lines if fields[0] == wanted), None)
    with contextlib.suppress(ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        import fcntl  # not on Windows

        for name in names:
            with contextlib.suppress(OSError):  # it has none
                found = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def describe(hosts: Hosts) -> str:
    """For people, such as "2, of ranks 0-1 and 2-3"."""

    def of_one(members: tuple[int, ...]) -> str:
        first, last = members[0], members[-1]
        in_turn = len(members) > 1 and last - first == len(members) - 1
        return f"{first}-{last}" if in_turn else ", ".join(map(str, members))

    return f"{len(hosts)}, of ranks {' and '.join(map(of_one, hosts))}"
