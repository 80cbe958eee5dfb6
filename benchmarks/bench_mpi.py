"""Times thinwire and Open MPI on CPU ranks: the same bytes, in turn, on ranks that mpirun started.

    mpirun -np 2 -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=29500 python -m benchmarks.bench_mpi --json FILE

If there are more ranks than cores, pass `--oversubscribe --bind-to none --mca mpi_yield_when_idle 1` to mpirun: else
Open MPI's ranks keep the cores while they wait, and every figure is one of the scheduler's.

All-to-all-v moves bfloat16 rows of 4096, with counts and `out`; `rows` go from each rank to each rank, its own
included. So of two ranks each reads and writes 2 * rows rows, which is 16 KiB with rows = 1, and its copy does too. The
others move float32, over a flat tensor of `size` bytes. A call, followed by Open MPI's barrier, is repeated for about
`--sample-seconds`; a sample is the time per call, on the slowest rank. Each round takes one sample of everything.
Results are checked up to 16 MiB. Columns:

    size             bytes of a rank's buffer: its rows, or the tensor that holds all ranks' parts
    us, least, most  median over the rounds, and extremes
    of Open MPI      Open MPI's time divided by this one, within the rounds: median
    low, high        its extremes
    barrier          microseconds of Open MPI's barrier just before: shows whether the ranks' cores share a cache, which
                     virtual machines may change from one second to the next
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks import timing
from thinwire.comm import Communicator
from thinwire.comm.launch.bootstrap import init
from thinwire.tools.bench import contenders
from thinwire.tools.bench.contenders import OPEN_MPI, OpenMPI
from thinwire.tools.bench.options import Settings, parse_bytes
from thinwire.tools.bench.problems import Collective
from thinwire.tools.bench.timing import Candidate, Contender, NotHere, measure

COLUMNS = {
    "operation": "s", "size": "d", "rows": "d", "what": "s", "us": ".1f", "least": ".1f", "most": ".1f",
    "of Open MPI": ".2f", "low": ".2f", "high": ".2f", "barrier": ".2f", "verdict": "s",
}  # fmt: skip
HIDDEN, ROWS, SIZES = 4096, (1, 8, 64, 1024, 4096, 8192), ("1M", "4M", "16M", "64M")
WIRES = ("none", "int8")
_MOST_CHECKED = 16 << 20  # bytes of a rank: beyond, a check takes longer than the samples


def goal_of(operation: str, what: str, rows: int, ranks: int) -> float | None:
    """Returns the share of Open MPI's speed that thinwire is to reach; None without a goal."""
    if operation == "all_to_all_v" and what == "thinwire/none/direct":
        return 1.0 if ranks == 2 else 0.9
    if operation == "all_to_all_v" and what == "thinwire/int8/direct" and rows >= 1024:
        return 0.9
    return 1.0 if operation == "all_reduce" and what == "thinwire/int8/direct" else None


def problems(comm: Communicator, rows: Sequence[int], sizes: Sequence[int]) -> Iterator[Collective]:
    """What is to be solved, one after the other, so that their memory need not be there at once."""
    for count in rows:
        counts = np.full((comm.size, comm.size), count)
        yield Collective(comm, torch.bfloat16, "all_to_all_v", counts=counts, width=HIDDEN)
    for operation in ("all_reduce", "reduce_scatter", "all_gather"):
        for size in sizes:
            yield Collective(comm, torch.float32, operation, size)


def candidates(problem: Collective, world: OpenMPI) -> Iterator[Candidate]:
    """What is compared; the label of each stands in the column `what`."""
    laps = timing.Laps(problem.comm.device)
    yield world.candidate(problem, laps)
    for wire in WIRES:
        yield contenders.thinwire(problem, wire, "direct", laps)
    yield contenders.process_group(problem, "gloo", laps)
    yield contenders.copy(problem)


def behind(candidate: Candidate, barrier: Callable[[], object]) -> Candidate:
    """Adds a barrier at the end of each call."""

    def make() -> Contender:
        made = candidate.make()
        call = made.call

        def run() -> Mapping[str, torch.Tensor]:
            outputs = call()
            barrier()
            return outputs

        made.call = run
        return made

    return candidate._replace(make=make)


def least_time(barrier: Callable[[], object]) -> float:
    """Microseconds of a barrier, where nothing else has the cores for a moment."""
    taken = []
    for _ in range(20):
        begun = time.perf_counter()
        for _ in range(50):
            barrier()
        taken.append((time.perf_counter() - begun) / 50)
    return min(taken) * 1e6


def figures(problem: Collective, samples: timing.Times, barrier: float) -> list[dict[str, Any]]:
    """A line for each that was measured; `samples` are seconds by label, and `barrier` microseconds."""
    lines, reference = [], samples[f"{OPEN_MPI}/none"]
    rows = 0 if problem.counts is None else problem.rows // problem.comm.size
    for what, taken in samples.items():
        ratios = [theirs / own for theirs, own in zip(reference, taken, strict=True)]
        line = {
            "operation": problem.operation,
            "size": problem.size_bytes,
            "rows": rows,
            "what": what,
            "us": statistics.median(taken) * 1e6,
            "least": min(taken) * 1e6,
            "most": max(taken) * 1e6,
            "of Open MPI": statistics.median(ratios),
            "low": min(ratios),
            "high": max(ratios),
            "barrier": barrier,
            "goal": goal_of(problem.operation, what, rows, problem.comm.size),
        }
        lines.append(line | {"verdict": timing.verdict(line["goal"], line["of Open MPI"])})
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = timing.parser(__doc__, repeats=5, timeout_of="wait")
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS, help="to each rank, of all-to-all-v")
    parser.add_argument("--sizes", nargs="*", default=SIZES, help="bytes of the others")
    options = parser.parse_args(arguments)
    sizes = [parse_bytes("--sizes", size) for size in options.sizes]
    described = timing.machine(timing.check_device("cpu"))
    settings = Settings(iterations=options.repeats, sample_seconds=options.sample_seconds)
    lines: list[dict[str, Any]] = []
    with init(device="cpu", timeout=options.timeout) as comm:
        try:
            world = OpenMPI(comm)
        except NotHere as reason:
            raise SystemExit(f"{OPEN_MPI}: {reason}; see python -m benchmarks.bench_mpi --help") from None
        for problem in problems(comm, options.rows, sizes):
            compared = [behind(each, world.barrier) for each in candidates(problem, world)]
            checked = replace(settings, check=problem.size_bytes <= _MOST_CHECKED)
            barrier = least_time(world.barrier)
            found, _ = measure(comm, compared, checked, timing.Laps(comm.device))
            samples = {outcome.candidate.label: outcome.samples.get(problem.operation, []) for outcome in found}
            if missing := [label for label, taken in samples.items() if not taken]:
                raise SystemExit(f"{problem.operation} of {problem.size_bytes} bytes: wrong results of {missing}")
            lines += figures(problem, samples, barrier)
        if comm.rank == 0:
            timing.print_machine(described)
            launched = f"mpirun -np {comm.size}"
            timing.finish(options, "mpi", described, (lines, COLUMNS), lines, ranks=comm.size, launched=launched)


if __name__ == "__main__":
    main()
