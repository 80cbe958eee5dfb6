"""How many threads a CPU rank uses for the rows of one large call.

By default its share of the cores: those that its affinity mask and its control groups allow, dealt to the ranks of this
host. torch's own number of threads is not asked: torchrun sets it to one on every rank, whatever cores there are.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from typing import NamedTuple

from thinwire.comm.resources.available import control_groups
from thinwire.errors import ThinwireError

#: Environment variable that overrides the share: a number of threads, 1 to MOST_THREADS.
VARIABLE = "THINWIRE_CPU_THREADS"
MOST_THREADS = 1024
# How many ranks launchers say that they have started, on this host and in all: torchrun, Open MPI, MPICH.
_SIZES = (
    ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("MPI_LOCALNRANKS", "PMI_SIZE"),
)


class CpuShare(NamedTuple):
    """How many threads, at least 1, and where the number comes from, for people."""

    threads: int
    reason: str

    def __str__(self) -> str:
        return f"{self.threads} ({self.reason})"


def cpu_share(ranks: int | None, in_process: bool = False) -> CpuShare:
    """What a rank may use.

    Args:
        ranks: how many there are in all, None if that is not known. Where the launcher of so many says how many of them
            are on this host, that counts; what another has left in the environment does not. Else all of them are taken
            to be, as too few threads cost less than too many; and where nobody knows of any, one.
        in_process: whether they are threads of this process, of which no launcher knows.

    Raises:
        ThinwireError: THINWIRE_CPU_THREADS is not a number from 1 to 1024.
    """
    wanted = os.environ.get(VARIABLE) or ""
    if wanted:
        threads = _number(wanted)
        if not 1 <= threads <= MOST_THREADS:
            raise ThinwireError(f"{VARIABLE} is {wanted[:40]!r} in the environment, expected 1 to {MOST_THREADS}")
        return CpuShare(threads, f"by {VARIABLE}")
    local = None if in_process else _ranks_of_host(ranks)
    cores, sharing = usable_cores(), local or ranks or 1
    dealt = f", {sharing} rank{'s' if sharing > 1 else ''}" if local or sharing > 1 else ""
    where = " on this host" if local else ""
    return CpuShare(max(1, cores // sharing), f"{cores} core{'s' if cores > 1 else ''}{dealt}{where}")


def _ranks_of_host(ranks: int | None) -> int | None:
    """How many the launcher of so many ranks has started on this host; None if none says."""
    for names in _SIZES:
        local, world = (_number(os.environ.get(name, "")) for name in names)
        if local >= 1 and (ranks is None or local <= ranks == world):
            return local
    return None


def _number(text: str) -> int:
    """What a variable says, -1 if that is no number."""
    return int(text) if re.fullmatch("[0-9]{1,8}", text) else -1


def usable_cores() -> int:
    """The cores that the affinity mask allows, or fewer if a control group's quota is that of fewer; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *_quotas()]))


@lru_cache(maxsize=1)
def _quotas() -> tuple[int, ...]:
    """What each control group allows, in whole cores; they are many files, read once."""
    found = []
    for group, is_version_2 in control_groups("cpu"):
        names = ["cpu.max"] if is_version_2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        try:
            quota, period = " ".join((group / name).read_text() for name in names).split()
            if quota.isdecimal():  # version 1 says -1 for none, version 2 "max"
                found.append(int(quota) // int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue  # no such group here, the root, which has no quota, or nothing that says how much
    return tuple(found)
