"""Ranks of one machine as if they were on several hosts."""

from __future__ import annotations

from thinwire.comm import Communicator
from thinwire.comm.hosts import Hosts


def on_hosts(comm: Communicator, hosts: Hosts | None = None) -> Communicator:
    """Another communicator of the same ranks, on these hosts; without any, the lower half of the ranks is on one."""
    made = comm.split(groups=[range(comm.size)])
    half = (comm.size + 1) // 2
    made.hosts = hosts or (tuple(range(half)), tuple(range(half, comm.size)))
    return made


def for_transport(comm: Communicator, transport: str) -> Communicator:
    """What a transport needs: `on_hosts`, where it is two levels; else the communicator itself."""
    return on_hosts(comm) if transport == "two_level" else comm
