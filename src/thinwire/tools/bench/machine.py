"""On what something was measured: the machine, the versions, the commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from thinwire.version import VERSION


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
