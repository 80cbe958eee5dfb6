"""Measures what an entry of the flight recorder costs.

    python -m benchmarks.bench_flight_recorder --json benchmarks/results/cpu/flight_recorder.json

The cost is the time of the fastest loop that only records, minus that of an empty loop: other work on the machine makes
loops slower, and none faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from benchmarks import timing
from thinwire.comm.call import Recorder
from thinwire.wire import WireFormat

#: Nanoseconds that an entry may cost.
GOAL = 1000
_LOOP, _LOOPS = 1000, 40  # calls of a loop, and loops for each repeat


def entry_cost(recorder: Recorder, repeats: int) -> float:
    """Nanoseconds of an entry."""
    x, wire, counts = torch.ones(2, 64), WireFormat.parse("int8"), [1, 1]
    shape, dtype = x.shape, x.dtype  # a call looks at them anyway

    def empty() -> None:
        for _ in range(_LOOP):
            pass

    def record() -> None:
        for _ in range(_LOOP):
            details = ("send_counts", counts[:], "recv_counts", counts[:])
            with recorder.begin("all_to_all_v", shape, dtype, wire, "direct", details):
                pass

    times: dict[Callable[[], None], list[float]] = {empty: [], record: []}
    for _ in range(repeats * _LOOPS):
        for loop, taken in times.items():
            start = time.perf_counter_ns()
            loop()
            taken.append((time.perf_counter_ns() - start) / _LOOP)
    return min(times[record]) - min(times[empty])


def main(arguments: Sequence[str] | None = None) -> None:
    options = timing.parser(__doc__, repeats=25).parse_args(arguments)
    described = timing.machine(timing.check_device("cpu"))
    timing.print_machine(described)
    cost = entry_cost(Recorder(0, 1, "a benchmark", "none", 1.0), options.repeats)
    figures = [{"ns": cost, "goal": GOAL}]
    table = figures, {"ns": ".0f", "goal": "d"}
    settings = {"repeats": options.repeats, "entry_ns": {"on": cost}}
    timing.finish(options, "flight_recorder", described, table, figures, **settings)


if __name__ == "__main__":
    main()
