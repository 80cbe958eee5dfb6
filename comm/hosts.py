"""Which ranks share a host, and who of another host carries a rank's rows there."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

#: Names this rank's host, in place of what the system says.
VARIABLE = "THINWIRE_HOST"
_MOST_TEXT = 100

#: The ranks of each host, ascending; hosts by their first ranks.
Hosts = tuple[tuple[int, ...], ...]


def host_name() -> str:
    """The same on ranks that may map each other's memory, and on no others: THINWIRE_HOST, or this system's.

    Processes that do not see each other's numbers are on different hosts, as they cannot map each other's memory.
    """
    return os.environ.get(VARIABLE) or system_name()


def system_name() -> str:
    """The same for processes that see each other's numbers, since this system was started."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{platform.node()[:_MOST_TEXT]} {boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # not Linux, where each rank's memory is its own
        return f"{platform.node()[:_MOST_TEXT]} {os.getpid()}"


def name_problem() -> str | None:
    """What is wrong with THINWIRE_HOST, and what is accepted; None: nothing."""
    name = os.environ.get(VARIABLE) or ""
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


def describe(hosts: Hosts) -> str:
    """For people, such as "2, of ranks 0-1 and 2-3"."""

    def of_one(members: tuple[int, ...]) -> str:
        first, last = members[0], members[-1]
        in_turn = len(members) > 1 and last - first == len(members) - 1
        return f"{first}-{last}" if in_turn else ", ".join(map(str, members))

    return f"{len(hosts)}, of ranks {' and '.join(map(of_one, hosts))}"
