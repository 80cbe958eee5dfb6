"""The looks that need no ranks: software, what the host grants a process, and GPUs.

    python -m thinwire.tools.doctor.looks NAME

prints a line of JSON for each finding, as a process of its own: that it ends, or never returns, is a finding too.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from thinwire.errors import ThinwireError
from thinwire.tools.doctor.finding import Finding, gib, judged, read_text, run_programs
from thinwire.version import VERSION

# ---------------------------------------------------------------------------------------------------------------------
# Software


def versions() -> Iterator[Finding]:
    """Names the versions of thinwire and of what it runs on."""
    yield Finding("ok", "thinwire", f"{VERSION}, Python {platform.python_version()}, {platform.platform()}")
    import torch

    builds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    build = next((f"{kind} {number}" for kind, number in builds.items() if number), "CPU")
    yield Finding("ok", "torch", f"{torch.__version__}, a {build} build")
    for package, what in (("numpy", "arrays"), ("numba", "kernels for CPU ranks"), ("triton", "kernels for GPUs")):
        try:
            yield Finding("ok", package, metadata.version(package))
        except metadata.PackageNotFoundError:
            yield Finding("note", package, f"not installed: no {what}", f"pip install {package}")
    if torch.distributed.is_nccl_available():
        yield Finding("ok", "NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    else:
        yield Finding("info", "NCCL", "not in this build of torch")
    yield _driver()


def _driver() -> Finding:
    for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        if os.path.exists(path):
            return Finding("ok", "driver", Path(path).read_text().splitlines()[0])
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except FileNotFoundError:
        return Finding("info", "driver", "none found: no /proc/driver/nvidia, no amdgpu, no nvidia-smi")
    if done.stdout.strip():
        return Finding("ok", "driver", done.stdout.strip())
    return Finding("info", "driver", f"unknown: nvidia-smi ended with {done.returncode}: {done.stderr.strip()[:100]}")


def settings() -> Iterator[Finding]:
    """Variables that change what thinwire does."""
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith("THINWIRE_")}
    for name in ("TRITON_INTERPRET", "NUMBA_DISABLE_JIT", "CUDA_VISIBLE_DEVICES", "NCCL_P2P_DISABLE"):
        if name in os.environ:
            found[name] = os.environ[name]
    text = ", ".join(f"{name}={value}" for name, value in found.items())
    yield Finding("note" if found else "ok", "environment", text or "nothing that changes what thinwire does")


def caches() -> Iterator[Finding]:
    """Says where compiled kernels are kept, and whether there are any."""
    from thinwire.triton_kernels.compat import HAS_TRITON
    from thinwire.triton_kernels.cpu import HAS_NUMBA

    if HAS_NUMBA:
        from thinwire.triton_kernels.cpu.pack import pack_kernel

        folder = pack_kernel.stats.cache_path
        if folder is None:
            text = "none: neither the sources' folder nor the user's cache can be written, so every process compiles"
            yield Finding("note", "numba's cache", text, "set NUMBA_CACHE_DIR to a folder that can be written")
        else:
            yield _cache("numba's cache", Path(folder), "*.nbi", "NUMBA_CACHE_DIR")
    if HAS_TRITON:
        chosen = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
        yield _cache("Triton's cache", Path(chosen), "*", "TRITON_CACHE_DIR")


def _shown(folder: Path) -> str:
    return f"~/{folder.relative_to(Path.home())}" if folder.is_relative_to(Path.home()) else str(folder)


def _cache(name: str, folder: Path, entries: str, variable: str) -> Finding:
    if not folder.exists():
        return Finding("ok", name, f"{_shown(folder)}: cold, not there yet; the first run compiles")
    if not os.access(folder, os.W_OK):
        return Finding("note", name, f"{_shown(folder)}: cannot be written", f"set {variable} to a folder that can be")
    number = sum(1 for _ in folder.glob(entries))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Finding("ok", name, f"{_shown(folder)}: {f'warm, {number} entries' if number else 'cold'}, {gib(size)}")


# ---------------------------------------------------------------------------------------------------------------------
# The host


def processors() -> Iterator[Finding]:
    """Cores, those that this process may use, and the threads that a rank would use if it were alone here."""
    from thinwire.comm.resources import THREADS_VARIABLE, cpu_share, usable_cores

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
        yield Finding("problem", "threads", str(error), f"unset {THREADS_VARIABLE}, or correct it")
    yield judged(load <= allowed, "load", f"{load:.2f} processes in the last minute", busy)


def memory() -> Iterator[Finding]:
    """Available memory, as the library itself sees it, and huge pages."""
    from thinwire.comm.resources import available_bytes

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
    """/dev/shm, and whether processes find each other's files in memory under /proc."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError as error:
        yield Finding("note", "/dev/shm", f"unknown: {error.strerror}", "NCCL needs it, and thinwire does not")
    else:
        size, free = found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
        advice = "NCCL needs more, and thinwire's own memory is not there; containers: --shm-size=1g"
        yield judged(free >= 256 << 20, "/dev/shm", f"{gib(size)}, of which {gib(free)} are free", advice)
    mounted = r"^\S+ \S+ \S+ \S+ /proc (\S+) .*- proc \S+ (\S+)$"
    options = re.search(mounted, read_text("/proc/self/mountinfo"), re.MULTILINE)
    if options is None:
        yield Finding("note", "/proc", "not mounted", "CPU ranks find each other's memory there")
    else:
        hidden = re.search(r"hidepid=(?!0|off)\w+", " ".join(options.groups()))
        text = "other users' processes are hidden" if hidden else "shows processes"
        yield judged(hidden is None, "/proc", text, "ranks must run as one user")


def _first_line(path: str | Path) -> str | None:
    return next(iter(read_text(path).splitlines()), None)


# ---------------------------------------------------------------------------------------------------------------------
# GPUs


def gpus() -> Iterator[Finding]:
    """Each GPU, or why there is none; which may store into which other's memory, and what lies between them."""
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = f"torch is built for {built}, and finds no driver or no device" if built else "torch is a CPU build"
        advice = "if there should be one, see nvidia-smi, CUDA_VISIBLE_DEVICES and the container's --gpus"
        text = f"no GPU: torch.cuda.is_available() is False; {why}"
        yield Finding("note", "GPUs", text, advice) if built else Finding("info", "GPUs", text)
        return
    count = torch.cuda.device_count()
    for index in range(count):
        found = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        old = torch.version.cuda is not None and (found.major, found.minor) < (8, 0)
        text = (
            f"{found.name}, compute capability {found.major}.{found.minor}, {found.multi_processor_count} "
            f"multiprocessors, {gib(free)} of {gib(total)} free"
        )
        yield judged(not old, f"cuda:{index}", text, "kernels are written for compute capability 8.0 and newer")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    lacking = [f"{a} to {b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if pairs:
        text = f"not from cuda:{', '.join(lacking)}" if lacking else f"all {len(pairs)} directions"
        advice = (
            "`auto` takes the staged transport there; GPUs of one NVLink or PCIe switch have it, unless a driver, an "
            "IOMMU or a virtual machine forbids it"
        )
        yield judged(not lacking, "peer access", text, advice)
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        yield Finding("ok", "links", "unknown: nvidia-smi not found")
        return
    if done.returncode:
        text = f"unknown: nvidia-smi topo -m ended with {done.returncode}"
        yield Finding("note", "links", text, done.stderr.strip()[:200])
        return
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("GPU")]
    for row in rows:
        yield Finding("ok", f"links of {row[0]}", " ".join(row[1 : 1 + len(rows)]))


# ---------------------------------------------------------------------------------------------------------------------
# The program

#: What the program is asked for by name. Those of the host need no torch.
LOOKS: dict[str, tuple[Callable[[], Iterator[Finding]], ...]] = {
    "software": (versions, settings, caches),
    "host": (processors, memory, limits, shared_memory),
    "gpus": (gpus,),
}


def look(name: str, seconds: float) -> list[Finding]:
    """Runs the looks of that name, as a process with a time limit."""
    command = [sys.executable, "-m", "thinwire.tools.doctor.looks", name]
    ((lines, ending),) = run_programs([command], seconds)
    findings = [Finding(**line) for line in lines]
    if ending:
        last = f"; the last thing it told: {findings[-1].name}" if findings else ""
        advice = f"please report this, with the output of: {' '.join(['python', *command[1:]])}"
        findings.append(Finding("problem", name, f"the look at it {ending}{last}", advice))
    return findings


def tell(look: Callable[[], Iterator[Finding]]) -> None:
    """Prints what a look finds; what it raises is a finding as well."""
    try:
        for finding in look():
            print(json.dumps(asdict(finding)), flush=True)
    except Exception as error:
        text = f"could not be looked at: {type(error).__name__}: {error}"
        advice = "see whether the command that looks works by itself; if so, please report this"
        print(json.dumps(asdict(Finding("problem", look.__name__, text, advice))), flush=True)


if __name__ == "__main__":
    for each in LOOKS[sys.argv[1]]:
        tell(each)
