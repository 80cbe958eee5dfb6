"""Times large direct calls of CPU ranks, with one thread a rank and with several, in turn.

    python -m benchmarks.bench_threads --threads 2 --json benchmarks/results/cpu/threads.json

A rank's threads help if it has cores for them. On a host with `--threads` cores this holds for one rank, which has only
rows for itself, and for two if one sends and the other waits, as when exact rows go straight into its output. In the
third way both work all the time: that needs cores for the threads of both, and with fewer shows the cost of too many
threads. Rows are 4096 elements of bfloat16. Columns:

    way        own: one rank's rows to itself; straight: rank 0's to rank 1, into `thinwire.empty`; both: half of two
               ranks' rows each way
    MiB        of rows, on each rank that has any
    ms         median time of a call of the slowest rank, with one thread a rank
    threads    how many a rank may use
    x          one thread's time divided by theirs, median within the rounds
    quartiles  of the same
    copy       time of a plain copy of the rows by one thread, divided by theirs
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

import torch

from benchmarks import timing
from thinwire.comm import Communicator
from thinwire.comm.resources.cpu_share import VARIABLE
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.fused.empty import empty
from thinwire.testing import run_ranks

COLUMNS = {
    "way": "s", "wire": "s", "MiB": "d", "ms": ".2f", "threads": "d", "x": ".2f", "quartiles": "s", "copy": ".2f",
}  # fmt: skip
HIDDEN = 4096
WAYS = {"own": (1, "none", "int8"), "straight": (2, "none"), "both": (2, "none", "int8")}
_COPY = "copy"


def with_threads(comm: Communicator, threads: int) -> Communicator:
    """A communicator of the same ranks, which may use so many threads each."""
    os.environ[VARIABLE] = str(threads)
    return comm.split(groups=[list(range(comm.size))])


def call_of(comm: Communicator, way: str, wire: str, mebibytes: int) -> Callable[[], object]:
    """What is timed."""
    rows, rank = (mebibytes << 20) // (2 * HIDDEN), comm.rank
    sends, receives = {
        "own": ([rows], [rows]),
        "straight": ([0, rows - rank * rows], [rank * rows, 0]),
        "both": ([rows // 2] * 2, [rows // 2] * 2),
    }[way]
    x = torch.ones(sum(sends), HIDDEN, dtype=torch.bfloat16)
    new = partial(empty, comm=comm) if way == "straight" else torch.empty
    out = new(rows if way == "straight" else sum(receives), HIDDEN, dtype=torch.bfloat16)[: sum(receives)]
    return partial(all_to_all_v, x, sends, receives, out=out, wire=wire, comm=comm, transport="direct")


def measure(
    comm: Communicator, way: str, wires: tuple[str, ...], sizes: list[int], threads: list[int], repeats: int,
    sample_seconds: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """The lines of one way, on every rank."""
    torch.set_num_threads(1)
    comms = {count: with_threads(comm, count) for count in [1, *threads]}
    lines = []
    for wire in wires:
        for size in sizes:
            calls = {str(count): call_of(made, way, wire, size) for count, made in comms.items()}
            x = torch.ones(size << 19, dtype=torch.bfloat16)
            calls[_COPY] = partial(torch.empty_like(x).copy_, x)
            times = timing.interleaved_over_ranks(comm, calls, repeats, sample_seconds=sample_seconds)
            lines += figures(way, wire, size, times)
    return lines


def figures(way: str, wire: str, size: int, times: timing.Times) -> list[dict[str, Any]]:
    """A line for each number of threads but one, out of samples by number and of the copy."""
    one, copy = times["1"], times[_COPY]
    lines = []
    for count in times.keys() - {"1", _COPY}:
        low, middle, high = statistics.quantiles(
            [a / b for a, b in zip(one, times[count], strict=True)], n=4, method="inclusive"
        )
        lines.append({
            "way": way,
            "wire": wire,
            "MiB": size,
            "ms": statistics.median(one) * 1e3,
            "threads": int(count),
            "x": middle,
            "quartiles": f"{low:.2f}-{high:.2f}",
            "copy": timing.median_ratio(copy, times[count]),
        })  # fmt: skip
    return sorted(lines, key=lambda line: line["threads"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = timing.parser(__doc__, repeats=15, timeout_of="run")
    parser.add_argument("--threads", type=int, nargs="+", default=[2], help="of a rank (2)")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[1, 8, 64, 256])
    options = parser.parse_args(arguments)
    described = timing.machine(timing.check_device("cpu"))
    timing.print_machine(described)
    lines: list[dict[str, Any]] = []
    for way in options.ways:
        ranks, *wires = WAYS[way]
        passed = way, tuple(wires), options.mebibytes, options.threads, options.repeats, options.sample_seconds
        lines += run_ranks(measure, ranks, *passed, mode="process", device="cpu", timeout=options.timeout)[0]
    timing.finish(options, "threads", described, (lines, COLUMNS), lines, repeats=options.repeats)


if __name__ == "__main__":
    main()
