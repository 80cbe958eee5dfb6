"""The scripts' command line, tables and files.

How times of ranks are taken is `thinwire.tools.bench.timing`'s, and on what machine `thinwire.tools.bench.results`'s.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from thinwire.testing import run_ranks
from thinwire.tools.bench.results import commit, machine, median_ratio
from thinwire.tools.bench.timing import Laps, Times, interleaved_over_ranks, sampler

__all__ = [
    "Laps",
    "Times",
    "captured",
    "check_device",
    "commit",
    "finish",
    "interleaved",
    "interleaved_over_ranks",
    "machine",
    "median_ratio",
    "parser",
    "print_machine",
    "print_table",
    "read_json",
    "relative_error",
    "run_over_ranks",
    "spread",
    "verdict",
    "write_json",
]


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
    sample = sampler(device)
    times: Times = {name: [] for name in functions}
    for function in functions.values():
        sample(function)
    for number in range(repeats):
        for name, function in functions.items():
            if number < (limits or {}).get(name, repeats):
                times[name].append(sample(function))
    return times


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


def run_over_ranks(options: argparse.Namespace, measure: Callable[..., Any], size: int, *passed: object) -> list[Any]:
    """Runs `measure` on each rank, which gets what is passed, and is a process unless ranks share a GPU."""
    shared = options.device == "cuda" and torch.cuda.device_count() < size
    mode = "thread" if shared else "process"
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


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median and extremes of what was sampled."""
    return {"seconds": statistics.median(seconds), "fastest": min(seconds), "slowest": max(seconds)}


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """L2 of the difference by L2 of what is wanted, in float32."""
    return float(torch.linalg.norm(got.float() - wanted.float()) / torch.linalg.norm(wanted.float()))


def verdict(goal: float | None, ratio: float) -> str:
    """A goal and whether it is reached, for people."""
    return "" if goal is None else f"{goal:g} {'reached' if ratio >= goal else 'not reached'}"


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
    """Reads what `write_json` wrote there, for a run that goes on; empty if there is nothing of that kind.

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
