"""What this host has for a rank: main memory, and cores; and what Linux's control groups allow of either.

Memory has to be known before it is taken: where there is none left, Linux does not refuse, but ends some process.

A rank uses as many threads for the rows of a large call as its share of the cores: those that its affinity mask and its
control groups allow, dealt to the ranks of this host. torch's own number of threads is not asked: torchrun sets it to
one on every rank, whatever cores there are.
"""

from __future__ import annotations

import mmap
import os
import re
import resource
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from thinwire.errors import CapacityError, ThinwireError

#: Environment variable that overrides the share of cores: a number of threads, 1 to 1024.
THREADS_VARIABLE = "THINWIRE_CPU_THREADS"
_MOST_THREADS = 1024
# How many ranks launchers say that they have started, on this host and in all: torchrun, Open MPI, MPICH.
_SIZES = (
    ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("MPI_LOCALNRANKS", "PMI_SIZE"),
)
_ROOT = Path("/sys/fs/cgroup")
# What a control group's processes may hold: the limit, the use, and the part of it that can be dropped.
_VERSION_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
_VERSION_2 = "memory.max", "memory.current", ("inactive_file", "active_file")


def available_bytes() -> int:
    """The least of what the host has free, what control groups leave, and what the limit on address space leaves."""
    figures = [_host_bytes(), *_control_group_bytes()]
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        figures.append(address_space - _address_space_in_use())
    available = max(0, min(figures))
    return available - available // 32  # page tables, and what others take meanwhile


def _host_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except FileNotFoundError:  # not Linux: what there is at all
        return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    fields = dict(line.split(":") for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _address_space_in_use() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    except FileNotFoundError:
        return 0


def _control_group_bytes() -> Iterator[int]:
    """What each control group that this process is in leaves, where it has a limit."""
    for group, is_version_2 in control_groups("memory"):
        limit_name, use_name, droppable = _VERSION_2 if is_version_2 else _VERSION_1
        try:
            limit = (group / limit_name).read_text().strip()
            use = int((group / use_name).read_text())
            statistics = (line.split() for line in (group / "memory.stat").read_text().splitlines())
            can_be_dropped = sum(int(value) for name, value in statistics if name in droppable)
            left = int(limit) - use + can_be_dropped if limit.isdigit() else None
        except (OSError, ValueError):  # no such group here, the root, which has no limit, or not for us to read
            continue
        if left is not None:
            yield left


def control_groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """The folders of this process's group and of all above it, whose limits hold too, and whether they are version 2's.

    A container may see its own group as the root, under another path: a folder need not be there.
    """
    try:
        memberships = Path("/proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux, or not for us to read
        return
    for membership in memberships:
        if membership.count(":") < 2:
            continue
        _, controllers, path = membership.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _ROOT / controller if controllers else _ROOT
        folder = Path(f"{root}{path}")
        for group in (folder, *folder.parents):
            if not group.is_relative_to(root):
                break
            yield group, not controllers


def require_available(ranks: int, num_bytes: int, available: int, where: str) -> None:
    """Refuses `num_bytes` for each of `ranks` where there is less, with CapacityError."""
    if ranks * num_bytes > available:
        raise CapacityError(
            f"{ranks} rank{'s' if ranks > 1 else ''} asked for {num_bytes} bytes of symmetric memory each, "
            f"{ranks * num_bytes} bytes in all; {available} bytes are available on {where}"
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
    wanted = os.environ.get(THREADS_VARIABLE) or ""
    if wanted:
        threads = _number(wanted)
        if not 1 <= threads <= _MOST_THREADS:
            raise ThinwireError(
                f"{THREADS_VARIABLE} is {wanted[:40]!r} in the environment, expected 1 to {_MOST_THREADS}"
            )
        return CpuShare(threads, f"by {THREADS_VARIABLE}")
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
