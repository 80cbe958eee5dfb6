"""GPUs: which, how they reach each other, and by what."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator

from thinwire.tools.doctor.finding import Finding, gib, judged

_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


def devices() -> Iterator[Finding]:
    """Each GPU, or why there is none."""
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = f"torch is built for {built}, and finds no driver or no device" if built else "torch is a CPU build"
        advice = "if there should be one, see nvidia-smi, CUDA_VISIBLE_DEVICES and the container's --gpus"
        text = f"no GPU: torch.cuda.is_available() is False; {why}"
        yield Finding("note", "GPUs", text, advice) if built else Finding("info", "GPUs", text)
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        old = torch.version.cuda is not None and (found.major, found.minor) < (8, 0)
        text = (
            f"{found.name}, compute capability {found.major}.{found.minor}, {found.multi_processor_count} "
            f"multiprocessors, {gib(free)} of {gib(total)} free"
        )
        yield judged(not old, f"cuda:{index}", text, "kernels are written for compute capability 8.0 and newer")


def peers() -> Iterator[Finding]:
    """Which GPUs may store into which other's memory, and whether atomics cross."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    if not pairs:
        return
    lacking = [f"{a} to {b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if lacking:
        yield Finding(
            "note", "peer access", f"not from cuda:{', '.join(lacking)}",
            "`auto` takes the staged transport there; GPUs of one NVLink or PCIe switch have it, unless a driver, an "
            "IOMMU or a virtual machine forbids it",
        )  # fmt: skip
    else:
        yield Finding("ok", "peer access", f"all {len(pairs)} directions")
    atomics = _native_atomics(pairs)
    if isinstance(atomics, str):
        yield Finding("ok", "peer atomics", f"unknown: {atomics}")
    else:
        yield Finding("ok", "peer atomics", f"native in {sum(atomics)} of {len(pairs)} directions; kernels need none")


def _native_atomics(pairs: list[tuple[int, int]]) -> list[bool] | str:
    """For each pair, by the driver; or why that is not known."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    if status := driver.cuInit(0):
        return f"cuInit gave {status}"
    found = []
    for pair in pairs:
        handles = [ctypes.c_int() for _ in pair]
        value = ctypes.c_int()
        for handle, index in zip(handles, pair, strict=True):
            if status := driver.cuDeviceGet(ctypes.byref(handle), index):
                return f"cuDeviceGet gave {status}"
        if status := driver.cuDeviceGetP2PAttribute(ctypes.byref(value), _NATIVE_ATOMICS, *handles):
            return f"cuDeviceGetP2PAttribute gave {status}"
        found.append(bool(value.value))
    return found


def topology() -> Iterator[Finding]:
    """What lies between the GPUs, as nvidia-smi tells it."""
    import torch

    if not torch.cuda.is_available():
        return
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        yield Finding("ok", "links", "unknown: nvidia-smi not found")
        return
    if done.returncode:
        yield Finding(
            "note", "links", f"unknown: nvidia-smi topo -m ended with {done.returncode}", done.stderr.strip()[:200]
        )
        return
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("GPU")]
    for row in rows:
        yield Finding("ok", f"links of {row[0]}", " ".join(row[1 : 1 + len(rows)]))
