"""Measures waiting on CPU ranks of the direct transport: its share of a core, and how late it notices a peer.

    python -m benchmarks.bench_wait --json benchmarks/results/cpu/wait.json

One of two ranks comes late to each call by a known time, and the other waits for it. Columns:

    late ms         how late
    cpu ms          processor time of the waiting rank, median over the repeats
    after 1 ms      the same beyond the first millisecond, divided by the wait beyond that
    behind us       from the late rank's arrival to the end of the waiting rank's call, minus the time of the call when
                    both come at once: medians
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

import torch

from benchmarks import timing
from thinwire.comm import Communicator
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.fused.ops import all_reduce

COLUMNS = {"call": "s", "late ms": ".1f", "cpu ms": ".2f", "after 1 ms": ".3f", "behind us": ".0f"}
#: Share of a core that a wait may take after its first millisecond.
GOAL = 0.05
RANKS = 2
LATE = (0.0, 0.0003, 0.001, 0.003, 0.01, 0.1, 1.0)  # seconds


def measure(comm: Communicator, repeats: int) -> list[dict[str, Any]]:
    """One rank's part: for each call and lateness, when it came and went, and the processor's time, per repeat."""
    x, counts = torch.ones(64, 1024), [32, 32]
    out = torch.empty_like(x)
    calls: dict[str, Callable[[], object]] = {
        "all_to_all_v": lambda: all_to_all_v(x, counts, counts, out=out, comm=comm, transport="direct"),
        "all_reduce": lambda: all_reduce(x, out=out, comm=comm, transport="direct"),
    }
    found = []
    for name, call in calls.items():
        for _ in range(10):
            call()
        for late in LATE:
            samples = []
            for _ in range(max(3, repeats // 10) if late >= 0.1 else repeats):
                comm.barrier()
                if comm.rank == 1 and late:
                    time.sleep(late)
                came, used = time.monotonic(), time.process_time()
                call()
                samples.append((came, time.monotonic(), time.process_time() - used))
            found.append({"call": name, "late": late, "samples": samples})
    return found


def figures(ranks: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A line for each call and lateness."""
    lines: list[dict[str, Any]] = []
    both = 0.0
    for waiting, late in zip(*ranks, strict=True):
        pairs = list(zip(waiting["samples"], late["samples"], strict=True))
        after = statistics.median(own[1] - max(own[0], other[0]) for own, other in pairs)
        both = after if waiting["late"] == 0 else both
        used = statistics.median(own[2] for own, _ in pairs)
        waited = statistics.median(own[1] - own[0] for own, _ in pairs)
        lines.append(
            {
                "call": waiting["call"],
                "late ms": waiting["late"] * 1e3,
                "cpu ms": used * 1e3,
                "after 1 ms": max(0.0, used - 0.001) / (waited - 0.001) if waited > 0.002 else float("nan"),
                "behind us": (after - both) * 1e6,
            }
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = timing.parser(__doc__, repeats=100, timeout_of="run")
    options = parser.parse_args(arguments)
    options.device = "cpu"
    described = timing.machine(timing.check_device("cpu"))
    timing.print_machine(described)
    lines = figures(timing.run_over_ranks(options, measure, RANKS, options.repeats))
    timing.finish(options, "wait", described, (lines, COLUMNS), lines, repeats=options.repeats, goal=GOAL)
    most = max(line["after 1 ms"] for line in lines if line["late ms"] >= 3)
    print(f"share of a core after 1 ms: {most:.3f}, goal {GOAL} {'reached' if most < GOAL else 'not reached'}")


if __name__ == "__main__":
    main()
