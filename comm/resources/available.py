"""How much main memory a process can still get, and where Linux says what its control groups may use.

It has to be known before memory is taken: where there is none left, Linux does not refuse, but ends some process.
"""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from thinwire.errors import CapacityError

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
