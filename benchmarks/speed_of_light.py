"""The least time that a round on the direct transport can take on a machine: a ceiling of speed, never a measurement.

Each kernel of a round waits for the one before it, and takes a launch, and then as long as the slowest of what it keeps
busy: the link, the GPU's memory, and, where it is known, the pipe of its multiprocessors that it uses most. All of them
are taken at their nominal rates and to overlap completely. A leg's signal crosses the link three times more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.published import Published
from thinwire.errors import ArgumentError
from thinwire.tools.planning.model import find_link
from thinwire.tools.planning.plan import Request

#: Of a signal, once the last row is stored: the fence before the flag waits until the peer has answered for the rows,
#: which is one way there and one back, and the flag goes there.
CROSSINGS = 3
_LANES = 128  # of a multiprocessor: elements that a pipe at full rate takes in each clock


@dataclass(frozen=True)
class Machine:
    """Eight GPUs of a host, as their makers describe them, and two guesses.

    Attributes:
        link: name of a link of `thinwire plan`, of which the nominal rate counts.
        memory: bytes a second of the GPU's memory.
        multiprocessors, clock: of the GPU; the clock in Hz.
        source: where these are from.
        launch: seconds from the end of a kernel to the first instruction of the next in a stream or graph: a guess.
        crossing: seconds that a word takes over the link, one way: a guess.
    """

    gpu: str
    link: str
    memory: float
    multiprocessors: int
    clock: float
    source: str
    launch: float
    crossing: float


# Clocks follow from the float32 rates of the data sheets: 2 operations a lane and clock.
MACHINES = (
    Machine("H100 SXM", "nvlink4", 3.35e12, 132, 1.98e9, "data sheet: 3.35 TB/s, 67 TFLOPS of float32", 1e-6, 0.5e-6),
    Machine("H100 PCIe", "pcie5", 2.0e12, 114, 1.755e9, "data sheet: 2 TB/s, 51 TFLOPS of float32", 1e-6, 1e-6),
    Machine("L40S", "pcie4", 0.864e12, 142, 2.52e9, "data sheet: 864 GB/s, 91.6 TFLOPS of float32", 1e-6, 1e-6),
)


@dataclass(frozen=True)
class Work:
    """What one kernel keeps busy at the busiest rank.

    Attributes:
        link_bytes: that leave the rank, and as many come to it.
        memory_bytes: read from and written to the GPU's own memory, once each, what peers store there included.
        elements: of the rows that its programs take one after the other.
        repeats: what a row takes of further experts' rows, peers or sums, on average, beyond the first.
    """

    link_bytes: float = 0.0
    memory_bytes: float = 0.0
    elements: float = 0.0
    repeats: float = 0.0


@dataclass(frozen=True)
class Cycles:
    """Of the busiest pipe of a multiprocessor, in clocks of one of its 128 lanes.

    Attributes:
        first: for each element of a row, with one of what is repeated.
        each: for each element of every further one.
    """

    first: float
    each: float


def round_work(request: Request) -> dict[str, Work]:
    """By kernel of a round on the direct transport, with uniform routing and `max_tokens` tokens on each rank.

    What is counted is compulsory: each byte once, whatever caches are for. Rows of experts count as many as there are,
    without padding.
    """
    dispatch, combine = request.legs("direct")
    tokens, hidden, top_k = request.max_tokens, request.hidden, request.top_k
    row, slots = hidden * request.dtype.itemsize, request.ranks * tokens
    records = dispatch.rows + dispatch.own_rows  # that a rank gets, and sums that it gets back
    rows = tokens * top_k * math.ceil(request.experts / request.ranks) * request.ranks / request.experts
    ids, weights, positions = slots * top_k * 4, slots * top_k * 4, slots * top_k * 8  # as routing has them
    given = tokens * top_k * (8 + 4)  # int64 ids and float32 weights, as the caller has them
    index = rows * 8  # and as many positions, of which gather reads those, and the first of each slot
    stays, sums_stay = dispatch.own_rows * dispatch.record_bytes, combine.own_rows * combine.record_bytes
    return {
        "send_tokens_kernel": Work(
            dispatch.wire_bytes,
            tokens * row + given + stays + dispatch.wire_bytes,
            tokens * hidden,
            records / tokens - 1,
        ),
        "wait_kernel": Work(),
        "count_kernel": Work(memory_bytes=ids + positions + index),
        "place_kernel": Work(memory_bytes=ids + weights + index + rows * (8 + 4)),
        "gather_kernel": Work(
            memory_bytes=slots * 8 + index + records * dispatch.record_bytes + rows * row,
            elements=records * hidden,
            repeats=rows / records - 1,
        ),
        "send_sums_kernel": Work(
            combine.wire_bytes,
            rows * row + positions + weights + sums_stay + combine.wire_bytes,
            records * hidden,
            rows / records - 1,
        ),
        "sum_home_kernel": Work(
            memory_bytes=tokens * top_k * 4 + records * combine.record_bytes + tokens * row,
            elements=tokens * hidden,
            repeats=records / tokens - 1,
        ),
    }


@dataclass(frozen=True)
class Least:
    """Seconds of one launch, by what it needs.

    Attributes:
        launch: before it begins.
        link, memory: of its bytes.
        pipe: of its instructions; None where they are not known.
    """

    kernel: str
    launch: float
    link: float
    memory: float
    pipe: float | None

    @property
    def bound(self) -> str:
        """What it takes longest for: "link", "memory" or "pipe"; "launch" where it has nothing to do."""
        busy = {"link": self.link, "memory": self.memory, "pipe": self.pipe or 0.0}
        slowest = max(busy, key=lambda name: busy[name])
        return slowest if busy[slowest] > self.launch else "launch"

    @property
    def seconds(self) -> float:
        """With the launch."""
        return self.launch + max(self.link, self.memory, self.pipe or 0.0)


@dataclass(frozen=True)
class LeastLeg:
    """A leg: its launches, one after the other, and its signal."""

    launches: tuple[Least, ...]
    signal: float

    @property
    def seconds(self) -> float:
        """Of all of it."""
        return self.signal + sum(launch.seconds for launch in self.launches)


def least_leg(
    request: Request, machine: Machine, kernels: Sequence[str], cycles: Mapping[str, Cycles] | None = None
) -> LeastLeg:
    """The least time of a leg.

    Args:
        kernels: names of what the leg launches, in that order.
        cycles: by kernel; those that are missing are not known, and count as none.

    Raises:
        ArgumentError: a kernel of which it is not known what it moves.
    """
    work, found = round_work(request), []
    rate, lanes = find_link(machine.link).beta, machine.multiprocessors * _LANES * machine.clock
    for kernel in kernels:
        if kernel not in work:
            raise ArgumentError(f"kernel {kernel!r} is none of a round's; those are: {', '.join(work)}")
        moved, pipe = work[kernel], (cycles or {}).get(kernel)
        found.append(
            Least(
                kernel,
                machine.launch,
                moved.link_bytes / rate,
                moved.memory_bytes / machine.memory,
                None if pipe is None else moved.elements * (pipe.first + moved.repeats * pipe.each) / lanes,
            )
        )
    return LeastLeg(tuple(found), CROSSINGS * machine.crossing)


def least_published(row: Published, launch: float = 1e-6, crossing: float = 0.5e-6) -> float:
    """The same kind of least time for a leg of another library, of which nothing but its bytes is known.

    One launch, its signal, and its bytes at the link's nominal rate.
    """
    return launch + CROSSINGS * crossing + row.link_bytes / find_link(row.link).beta
