"""Versions, settings in the environment, and the caches of compiled kernels."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from thinwire.tools.doctor.finding import Finding, gib
from thinwire.version import VERSION


def versions() -> Iterator[Finding]:
    """Of thinwire, and of what it runs on."""
    yield Finding("ok", "thinwire", f"{VERSION}, Python {platform.python_version()}, {platform.platform()}")
    import torch

    build = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else "CPU"
    )
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
    """Where compiled kernels are kept, and whether there are any."""
    from thinwire.triton_kernels.compat import HAS_TRITON
    from thinwire.triton_kernels.cpu import HAS_NUMBA

    if HAS_NUMBA:
        from thinwire.triton_kernels.cpu.combine import sum_home_kernel

        folder = sum_home_kernel.stats.cache_path
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
