"""How many threads a CPU rank uses for the rows of one large call.

By default its share of the cores: those that its affinity mask and its control groups allow, dealt to the ranks of this
host. torch's own number of threads is not asked: torchrun sets it to one on every rank, whatever cores there are.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple

from thinwire.comm.control_groups import control_groups
from thinwire.errors import ThinwireError

#: Environment variable that overrides the share: a number of threads, 1 to MOST_THREADS.
VARIABLE = "THINWIRE_CPU_THREADS"
MOST_THREADS = 1024
# How many ranks launchers say that they have started on this host: torchrun, Open MPI.
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


class CpuShare(NamedTuple):
    """How many threads, at least 1, and where the number comes from, for people."""

    threads: int
    reason: str

    def __str__(self) -> str:
        return f"{self.threads} ({self.reason})"


def cpu_share(ranks: int | None, in_process: bool = False) -> CpuShare:
    """What a rank may use.

    Args:
        ranks: how many there are in all, None if that is not known. Where a launcher says how many of them are on this
            host, that counts. Else all of them are taken to be, as too few threads cost less than too many; and where
            nobody knows of any, one.
        in_process: whether they are threads of this process, of which no launcher knows.

    Raises:
        ThinwireError: THINWIRE_CPU_THREADS is not a number from 1 to 1024.
    """
    texts = () if in_process else tuple(os.environ.get(name, "") for name in _LOCAL_SIZES)
    return _share(ranks, texts, os.environ.get(VARIABLE) or "")


@lru_cache(maxsize=64)
def _share(ranks: int | None, local_sizes: tuple[str, ...], wanted: str) -> CpuShare:
    if wanted:
        if not wanted[:5].isdecimal() or len(wanted) > 5 or not 1 <= int(wanted) <= MOST_THREADS:
            raise ThinwireError(f"{VARIABLE} is {wanted[:40]!r} in the environment, expected 1 to {MOST_THREADS}")
        return CpuShare(int(wanted), f"by {VARIABLE}")
    told = [int(text) for text in local_sizes if text[:8].isdecimal()]
    local = next((size for size in told if size >= 1 and (ranks is None or size <= ranks)), None)
    cores, sharing = usable_cores(), local or ranks or 1
    dealt = f", {sharing} ranks{' on this host' if local else ''}" if sharing > 1 else ""
    return CpuShare(max(1, cores // sharing), f"{cores} core{'s' if cores > 1 else ''}{dealt}")


def usable_cores() -> int:
    """The cores that the affinity mask allows, or fewer if a control group's quota is that of fewer; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(int(quota) for quota in _quotas())]))


def _quotas() -> list[float]:
    """What each control group allows, in cores."""
    found = []
    for group, is_version_2 in control_groups("cpu"):
        names = ["cpu.max"] if is_version_2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        try:
            quota, period = " ".join((group / name).read_text() for name in names).split()
        except OSError:  # no such group here, or the root, which has no quota
            continue
        if quota.isdecimal():  # version 1 says -1 for none, version 2 "max"
            found.append(int(quota) / int(period))
    return found
