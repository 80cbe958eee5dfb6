"""Measures the flight recorder: an entry by itself, and small calls of the direct transport with and without it.

    python -m benchmarks.bench_flight_recorder --json benchmarks/results/cpu/flight_recorder.json

An entry's cost is the time of the fastest loop that only records, minus that of an empty loop; `off` is the cost of an
entry that keeps nothing. Calls run with and without the recorder in turn, round after round, in the same processes. A
time is that of the slower rank. Columns:

    us off, us on   median time of a call
    ratio           with divided by without, within the rounds
    ns              time that the recorder adds to a call: median of the difference within the rounds
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

import torch

from benchmarks import timing
from thinwire.comm import Communicator
from thinwire.comm.call import Recorder
from thinwire.comm.recorder import INSIDE, Entry
from thinwire.errors import TransportUnavailable
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.fused.ops import all_reduce
from thinwire.wire import WireFormat

COLUMNS = {"call": "s", "bytes": "d", "us off": ".2f", "us on": ".2f", "ratio": ".3f", "ns": ".0f"}
#: Nanoseconds that an entry may cost.
GOAL = 1000
RANKS = 2
_LOOP, _LOOPS = 1000, 40  # calls of a loop, and loops for each repeat
_ELEMENTS = 64  # of a row


class RecorderOff(Recorder):
    """One that keeps nothing: every call is made within another, which nobody reads."""

    def __init__(self) -> None:
        self.current = [None] * (INSIDE + 1)
        self._ranges = []

    def take_turn(self) -> None:
        return

    def end_turn(self) -> None:
        return

    def failed(self, entry: Entry, error: BaseException) -> None:
        return

    def describe(self) -> str:
        return "flight recorder: off"


def entry_cost(recorder: Recorder, repeats: int) -> float:
    """Nanoseconds of an entry, in the fastest of many short loops: what else the machine does makes others slower."""
    x, wire, counts = torch.ones(2, _ELEMENTS), WireFormat.parse("int8"), [1, 1]
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


def measure(comm: Communicator, repeats: int, sample_seconds: float) -> dict[str, Any]:
    """One rank's part: the samples of every call with and without, and the bytes of its tensor."""
    recorders = {"off": RecorderOff(), "on": Recorder(comm.rank, comm.size, "a benchmark", "gloo", comm.timeout)}
    calls: dict[str, Callable[[], object]] = {}
    num_bytes = {}
    for rows in (2, 128):
        x = torch.ones(rows, _ELEMENTS)
        out, counts = torch.empty_like(x), [rows // RANKS] * RANKS
        for wire in ("none", "int8"):
            calls[f"all_to_all_v {wire} {rows}"] = _all_to_all(comm, x, counts, out, wire)
            calls[f"all_reduce {wire} {rows}"] = _all_reduce(comm, x, out, wire)
            for name in list(calls)[-2:]:
                num_bytes[name] = x.nbytes
    functions = {
        f"{name} {state}": _with(comm, r, call) for name, call in calls.items() for state, r in recorders.items()
    }
    try:
        samples = timing.interleaved_over_ranks(comm, functions, repeats, sample_seconds=sample_seconds)
    except TransportUnavailable as reason:
        return {"missing": str(reason)}
    return {"samples": samples, "num_bytes": num_bytes}


def _all_to_all(
    comm: Communicator, x: torch.Tensor, counts: list[int], out: torch.Tensor, wire: str
) -> Callable[[], object]:
    return lambda: all_to_all_v(x, counts, counts, out=out, wire=wire, comm=comm, transport="direct")


def _all_reduce(comm: Communicator, x: torch.Tensor, out: torch.Tensor, wire: str) -> Callable[[], object]:
    return lambda: all_reduce(x, out=out, wire=wire, comm=comm, transport="direct")


def _with(comm: Communicator, recorder: Recorder, call: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        comm.recorder = recorder
        call()

    return run


def figures(samples: Mapping[str, Sequence[float]], num_bytes: Mapping[str, int]) -> list[dict[str, Any]]:
    """A line for each call."""
    lines = []
    for name, size in num_bytes.items():
        off, on = samples[f"{name} off"], samples[f"{name} on"]
        lines.append(
            {
                "call": name,
                "bytes": size,
                "us off": statistics.median(off) * 1e6,
                "us on": statistics.median(on) * 1e6,
                "ratio": timing.median_ratio(on, off),
                "ns": statistics.median(a - b for a, b in zip(on, off, strict=True)) * 1e9,
            }
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = timing.parser(__doc__, repeats=25, timeout_of="run")
    options = parser.parse_args(arguments)
    options.device = "cpu"
    described = timing.machine(timing.check_device("cpu"))
    timing.print_machine(described)
    entries = {
        "on": entry_cost(Recorder(0, 1, "a benchmark", "none", 1.0), options.repeats),
        "off": entry_cost(RecorderOff(), options.repeats),
    }
    verdict = "reached" if entries["on"] <= GOAL else "not reached"
    print(f"an entry: {entries['on']:.0f} ns (at most {GOAL}: {verdict}), off {entries['off']:.0f} ns")
    found = timing.run_over_ranks(options, measure, RANKS, options.repeats, options.sample_seconds)[0]
    skipped = {"direct": found["missing"]} if "missing" in found else {}
    lines = [] if skipped else figures(found["samples"], found["num_bytes"])
    table = (lines, COLUMNS)
    timing.finish(
        options, "flight_recorder", described, table, lines, repeats=options.repeats, skipped=skipped, entry_ns=entries
    )


if __name__ == "__main__":
    main()
