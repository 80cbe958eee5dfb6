"""On what something was measured: the machine, the versions, the commit; and whether its memory suffices for that."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from thinwire.comm.resources.available import available_bytes
from thinwire.version import VERSION

#: Of what is free, for all ranks that share it.
_SHARE = 0.5
#: A check has sums of all elements in float64 and three times in float32, next to the tensors that contenders keep.
_OF_A_COLLECTIVE = 16
#: Copies of the rows of experts that contenders hold at once, and bytes of a check for each element of all tokens.
_ROW_COPIES, _CHECKED_BYTES = 6, 20


def machine(device: torch.device) -> dict[str, Any]:
    """What was measured on: processor, GPU and versions."""
    described: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),  # of what ran before: a busy machine gives other figures
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
    described["thinwire"], described["torch"] = VERSION, str(torch.__version__)
    for package in ("numpy", "numba", "triton"):
        try:
            described[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            described[package] = None
    if device.type == "cpu":
        described["threads"] = torch.get_num_threads()
    else:
        properties = torch.cuda.get_device_properties(device)
        described["gpu"] = properties.name
        described["gpus"] = torch.cuda.device_count()
        described["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        described["multiprocessors"] = properties.multi_processor_count
        described["cuda"] = torch.version.cuda
    return described


def in_words(described: dict[str, Any]) -> str:
    """What `machine` says, in one line."""
    return ", ".join(f"{name} {value}" for name, value in described.items() if value is not None)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def commit() -> str | None:
    """The checkout's commit, marked when tracked files differ from it, but for results, which runs themselves write.

    None outside of a checkout of this project, as where it is installed, or without git.
    """
    here = Path(__file__).resolve()
    commands = (
        ["git", "rev-parse", "--show-toplevel"],
        ["git", "describe", "--always", "--abbrev=12", "--exclude=*"],
        ["git", "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)benchmarks/results"],
    )
    try:
        root, name, changes = (
            subprocess.run(command, cwd=here.parent, capture_output=True, text=True, check=True).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    # An environment may lie in the checkout of another project.
    if (Path(root) / "src" / "thinwire" / "tools" / "bench" / here.name).resolve() != here:
        return None
    return name + ("-dirty" if changes else "")


def memory_of_collective(size_bytes: int) -> int:
    """Bytes that a rank needs for a buffer of so many."""
    return _OF_A_COLLECTIVE * size_bytes


def memory_of_round(tokens: int, hidden: int, top_k: int, ranks: int, itemsize: int) -> int:
    """Bytes that a rank needs for a round, where experts get equally many rows."""
    return tokens * hidden * (_ROW_COPIES * top_k * itemsize + _CHECKED_BYTES * ranks)


def why_too_large(needed: int, ranks: int, device: torch.device) -> str | None:
    """Why so many bytes on each of so many ranks are too many for the memory that they share; None if they fit."""
    free = _free(device)
    if needed * ranks <= _SHARE * free:
        return None
    return f"needs about {needed * ranks / 2**20:.0f} MiB, and {free / 2**20:.0f} MiB are free"


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()
