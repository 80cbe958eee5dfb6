"""How every benchmark here takes its times, and says on what machine.

Functions that are compared run in turn, round after round, in one process: what else the machine does then hits all of
them alike. A share is the median over rounds of the ratio within the round.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from thinwire.version import VERSION

__all__ = [
    "captured",
    "check_device",
    "interleaved",
    "machine",
    "median_ratio",
    "print_machine",
    "print_table",
    "write_json",
]

Times = dict[str, list[float]]


def check_device(name: str) -> torch.device:
    """The device of that name, set up for timing: one thread on a CPU.

    Raises:
        SystemExit: there is no such GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda needs a GPU, and torch.cuda.is_available() is False; try --device cpu")
    if name == "cpu":
        torch.set_num_threads(1)
    return torch.device(name)


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    device: torch.device,
    repeats: int,
    limits: Mapping[str, int] | None = None,
) -> Times:
    """Seconds of each call, `repeats` rounds of all functions in turn after one that does not count.

    `limits` gives slow functions fewer rounds, the first ones. On a GPU the times are those between two events, so a
    function should hold enough work to hide its launches, or be `captured`.
    """
    sample = _sample_cuda if device.type == "cuda" else _sample_cpu
    times: Times = {name: [] for name in functions}
    for function in functions.values():
        sample(function)
    for number in range(repeats):
        for name, function in functions.items():
            if number < (limits or {}).get(name, repeats):
                times[name].append(sample(function))
    return times


def _sample_cpu(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _sample_cuda(function: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def captured(function: Callable[[], object]) -> Callable[[], object]:
    """The function as a CUDA graph: its kernels without the time that Python takes to launch them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()  # compiles what is not compiled yet
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Median over rounds of one function's time by another's; rounds that only one of them took do not count."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=False))


def machine(device: torch.device) -> dict[str, Any]:
    """What was measured on: processor, GPU and versions."""
    described: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
    described["thinwire"], described["torch"] = VERSION, torch.__version__
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


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def print_machine(described: Mapping[str, Any]) -> None:
    """One line that says what was measured on."""
    print(", ".join(f"{name} {value}" for name, value in described.items() if value is not None))


def print_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """Rows as text: `columns` maps a column's head to how its value is formatted, `str` formats included."""
    cells = [list(columns)] + [[format(row[name], columns[name]) for name in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def write_json(path: str | Path, **content: Any) -> None:
    """Writes what was measured, by which command on which commit, for tables and figures to read."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    origin = {
        "command": shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "commit": _commit(),
    }
    target.write_text(json.dumps(origin | content, indent=1) + "\n")


def _commit() -> str | None:
    """The checkout's commit, marked when files differ from it; None outside of a checkout or without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
