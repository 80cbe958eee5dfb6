"""What the host grants a process: limits, memory, processors, and what shared memory needs of /proc. Needs no torch."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from thinwire.errors import ThinwireError
from thinwire.tools.doctor.finding import Finding, gib, judged, read_text


def processors() -> Iterator[Finding]:
    """Cores, those that this process may use, and the threads that a rank would use if it were alone here."""
    from thinwire.comm.resources.cpu_share import VARIABLE, cpu_share, usable_cores

    allowed, bound = usable_cores(), len(os.sched_getaffinity(0))
    text = f"{os.cpu_count()} in all, {bound} that this process may run on"
    if allowed < bound:
        text += f", {allowed} by the control group's quota"
    yield judged(allowed > 1, "cores", text, "each CPU rank keeps a core busy: more ranks than cores take turns")
    load = os.getloadavg()[0]
    busy = "others keep the cores busy: times will be worse than they could be"
    try:
        threads, reason = cpu_share(None)
        yield Finding("ok", "threads", f"{threads} for the rows of a large call, were this process a rank: {reason}")
    except ThinwireError as error:
        yield Finding("problem", "threads", str(error), f"unset {VARIABLE}, or correct it")
    yield judged(load <= allowed, "load", f"{load:.2f} processes in the last minute", busy)


def memory() -> Iterator[Finding]:
    """Available memory, as the library itself sees it, and huge pages."""
    from thinwire.comm.resources.available import available_bytes

    left = available_bytes()
    advice = "symmetric memory is taken from this; end what else holds some, or raise the control group's limit"
    yield judged(left >= 1 << 30, "memory", f"{gib(left)} can still be had", advice)
    limit = _first_line("/sys/fs/cgroup/memory.max") or _first_line("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    if limit is not None and limit.isdigit() and int(limit) < 1 << 60:
        yield Finding("ok", "control group", f"its memory ends at {gib(int(limit))}")
    folder = Path("/sys/kernel/mm/transparent_hugepage")
    chosen = {name: re.search(r"\[(\w+)\]", _first_line(folder / name) or "") for name in ("enabled", "shmem_enabled")}
    shown = ", ".join(f"{name} {found[1]}" for name, found in chosen.items() if found)
    reserved = re.search(r"HugePages_Total:\s*(\d+)", read_text("/proc/meminfo"))
    text = f"transparent: {shown or f'unknown, no {folder}'}; reserved: {reserved[1] if reserved else 'unknown'}"
    yield Finding("ok", "huge pages", text)


def limits() -> Iterator[Finding]:
    """The resource limits that get in the way."""
    unlimited = resource.RLIM_INFINITY
    for name, kind, enough, unit, advice in (
        ("file size", resource.RLIMIT_FSIZE, unlimited, " bytes", "a file in memory counts: ulimit -f unlimited"),
        ("address space", resource.RLIMIT_AS, unlimited, " bytes", "peers' memory is mapped: ulimit -v unlimited"),
        ("open files", resource.RLIMIT_NOFILE, 1024, "", "ranks keep some for each peer: ulimit -n 65536"),
        ("locked memory", resource.RLIMIT_MEMLOCK, unlimited, " bytes", "NCCL over InfiniBand wants more: ulimit -l"),
        ("processes", resource.RLIMIT_NPROC, 4096, "", "ranks are processes with threads: ulimit -u 65536"),
    ):  # fmt: skip
        soft = resource.getrlimit(kind)[0]
        fine = soft == unlimited or (enough != unlimited and soft >= enough)
        yield judged(fine, f"limit: {name}", "unlimited" if soft == unlimited else f"{soft}{unit}", advice)


def shared_memory() -> Iterator[Finding]:
    """/dev/shm, files in memory, and whether processes find each other's under /proc."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError as error:
        yield Finding("note", "/dev/shm", f"unknown: {error.strerror}", "NCCL needs it, and thinwire does not")
    else:
        size, free = found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
        advice = "NCCL needs more, and thinwire's own memory is not there; containers: --shm-size=1g"
        yield judged(free >= 256 << 20, "/dev/shm", f"{gib(size)}, of which {gib(free)} are free", advice)
    try:
        os.close(os.memfd_create("thinwire", os.MFD_CLOEXEC))
        yield Finding("ok", "memfd_create", "works")
    except (OSError, AttributeError) as error:
        yield Finding("note", "memfd_create", f"refused: {error}", "see shared memory between processes, below")
    mounted = r"^\S+ \S+ \S+ \S+ /proc (\S+) .*- proc \S+ (\S+)$"
    options = re.search(mounted, read_text("/proc/self/mountinfo"), re.MULTILINE)
    if options is None:
        yield Finding("note", "/proc", "not mounted", "CPU ranks find each other's memory there")
    else:
        hidden = re.search(r"hidepid=(?!0|off)\w+", " ".join(options.groups()))
        text = "other users' processes are hidden" if hidden else "shows processes"
        yield judged(hidden is None, "/proc", text, "ranks must run as one user")
    scope = _first_line("/proc/sys/kernel/yama/ptrace_scope")
    shown = "no yama" if scope is None else f"yama's ptrace_scope is {scope}"
    yield Finding("ok", "tracing", f"{shown}; it restricts attaching, and peers' files are opened without that")
    seccomp = re.search(r"^Seccomp:\s*(\d)", read_text("/proc/self/status"), re.MULTILINE)
    kinds = {"0": "none", "1": "strict", "2": "a filter"}
    yield Finding("ok", "seccomp", kinds.get(seccomp[1], "unknown") if seccomp else "unknown")


def _first_line(path: str | Path) -> str | None:
    return next(iter(read_text(path).splitlines()), None)
