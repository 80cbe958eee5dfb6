"""How every benchmark here takes its times, and says on what machine.

Functions that are compared run in turn, round after round, in one process (or in the same processes, where several
ranks are needed): what else the machine does then hits all of them alike. A share is the median over rounds of the
ratio within the round.
"""

from __future__ import annotations

import argparse
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

from thinwire.comm import Communicator
from thinwire.testing import run_ranks
from thinwire.version import VERSION

Times = dict[str, list[float]]

_MOST_CALLS = 2000
_CALIBRATION_CALLS = 3


def parser(description: str | None, repeats: int | None, timeout_of: str | None = None) -> argparse.ArgumentParser:
    """A command line with what those of benchmarks have in common; of `run_over_ranks` too, if there is a timeout."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", metavar="FILE", help="write all figures there")
    if repeats is not None:
        made.add_argument("--repeats", type=int, default=repeats)
    if timeout_of is not None:
        made.add_argument("--sample-seconds", type=float, default=0.02, help="how long a sample is to take, about")
        made.add_argument("--timeout", type=float, default=900.0, help=f"seconds for each {timeout_of}")
    return made


def share_a_gpu(device: str, size: int) -> bool:
    """Whether there are fewer GPUs than ranks: they are threads then, on the first one."""
    return device == "cuda" and torch.cuda.device_count() < size


def run_over_ranks(options: argparse.Namespace, measure: Callable[..., Any], size: int, *passed: object) -> list[Any]:
    """What `measure` gives on each rank, which gets what is passed, and is a process unless ranks share a GPU."""
    mode = "thread" if share_a_gpu(options.device, size) else "process"
    return run_ranks(measure, size, *passed, mode=mode, device=options.device, timeout=options.timeout)


def finish(
    options: argparse.Namespace,
    benchmark: str,
    described: Mapping[str, Any],
    table: tuple[Sequence[Mapping[str, Any]], Mapping[str, str]],
    figures: Sequence[Mapping[str, Any]],
    **settings: Any,
) -> None:
    """Prints the table, rows and columns, and what was skipped; writes all figures where `--json` says."""
    print_table(*table)
    for name, reason in settings.get("skipped", {}).items():
        print(f"{name} skipped: {reason}")
    if options.json:
        write_json(options.json, benchmark=benchmark, machine=described, **settings, figures=figures)


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


class Laps:
    """Times of the parts of a function, which marks where each ends; see `interleaved_over_ranks`."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str | None, Any]] = []

    def start(self) -> None:
        """What comes now belongs to the next part that is marked."""
        self._mark(None)

    def end(self, part: str) -> None:
        """The part ends here, and the next one begins."""
        self._mark(part)

    def _mark(self, part: str | None) -> None:
        if self._on_gpu:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        else:
            mark = time.perf_counter()
        self._marks.append((part, mark))

    def take(self) -> dict[str, float]:
        """Seconds of each part, added up since this was called last."""
        if self._on_gpu:
            torch.cuda.synchronize()
        seconds: dict[str, float] = {}
        for (_, before), (part, after) in zip(self._marks, self._marks[1:], strict=False):
            if part is not None:
                taken = before.elapsed_time(after) / 1e3 if self._on_gpu else after - before
                seconds[part] = seconds.get(part, 0.0) + taken
        self._marks.clear()
        return seconds


def interleaved_over_ranks(
    comm: Communicator,
    functions: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    sample_seconds: float = 0.02,
    laps: Laps | None = None,
) -> Times:
    """Seconds of a call on the slowest rank, in `repeats` rounds of all functions in turn. Collective.

    All ranks run the same functions in the same order. Before a sample they meet at a barrier; a sample is so many
    calls, the same number on every rank, that they take about `sample_seconds`, and its time is that of the rank that
    took longest. What each call does for the first time, such as compiling, is over before the first sample.

    Args:
        comm: the ranks.
        functions: the same names on every rank.
        repeats: samples of each function.
        sample_seconds: 0 makes a sample of one call.
        laps: where a function marks its parts. Its times are then those of the parts, named by them.
    """
    sample = _sample_cuda if comm.device.type == "cuda" else _sample_cpu
    calls = {name: _agree_on_calls(comm, function, sample_seconds) for name, function in functions.items()}
    if laps is not None:
        laps.take()
    own: Times = {}
    for _ in range(repeats):
        for name, function in functions.items():
            comm.barrier()
            seconds = sample(_repeated(function, calls[name]))
            parts = {} if laps is None else laps.take()
            for part, taken in (parts or {name: seconds}).items():
                own.setdefault(part, []).append(taken / calls[name])
    everyone = comm.all_gather_object(own)
    return {name: [max(taken) for taken in zip(*(times[name] for times in everyone), strict=True)] for name in own}


def _agree_on_calls(comm: Communicator, function: Callable[[], object], sample_seconds: float) -> int:
    function()
    if sample_seconds == 0:
        return 1
    comm.barrier()
    sample = _sample_cuda if comm.device.type == "cuda" else _sample_cpu
    taken = sample(_repeated(function, _CALIBRATION_CALLS)) / _CALIBRATION_CALLS
    slowest = max(comm.all_gather_object(taken))
    return max(1, min(_MOST_CALLS, round(sample_seconds / slowest)))


def _repeated(function: Callable[[], object], calls: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(calls):
            function()

    return run


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


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median and extremes of what was sampled."""
    return {"seconds": statistics.median(seconds), "fastest": min(seconds), "slowest": max(seconds)}


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """L2 of the difference by L2 of what is wanted, in float32."""
    return float(torch.linalg.norm(got.float() - wanted.float()) / torch.linalg.norm(wanted.float()))


def verdict(goal: float | None, ratio: float) -> str:
    """A goal and whether it is reached, for people."""
    return "" if goal is None else f"{goal:g} {'reached' if ratio >= goal else 'not reached'}"


def machine(device: torch.device) -> dict[str, Any]:
    """What was measured on: processor, GPU and versions."""
    described: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),  # of what ran before: a busy machine gives other figures
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
        "commit": commit(),
    }
    target.write_text(json.dumps(origin | content, indent=1) + "\n")


def read_json(path: str | Path | None, **same: Any) -> dict[str, Any]:
    """What `write_json` wrote there, for a run that goes on where it ended; empty if there is nothing of that kind.

    Args:
        path: the file; None where nothing is kept.
        same: entries that it must have. It must be of this commit as well, of whose code a file tells; whether files
            differ from that is not looked at, as this one does.
    """
    if path is None or not Path(path).exists():
        return {}
    found: dict[str, Any] = json.loads(Path(path).read_text())
    commits = {str(commit).removesuffix("-dirty") for commit in (found.get("commit"), commit())}
    return found if len(commits) == 1 and all(found.get(key) == value for key, value in same.items()) else {}


def commit() -> str | None:
    """The checkout's commit, marked when tracked files differ from it, but for results, which runs themselves write.

    None outside of a checkout or without git.
    """
    describe = ["git", "describe", "--always", "--abbrev=12", "--exclude=*"]
    status = ["git", "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)benchmarks/results"]
    try:
        name, changes = (
            subprocess.run(
                command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
            ).stdout.strip()
            for command in (describe, status)
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return name + ("-dirty" if changes else "")
