"""How times are taken: what is compared runs in turn, round after round, in one process or the same processes.

What else the machine does then hits all of them alike. A ratio is the median over rounds of the ratio within the round.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from thinwire.comm import Communicator

Times = dict[str, list[float]]

_MOST_CALLS = 2000
_CALIBRATION_CALLS = 3
#: Chains of each function, the fewest calls of one that count, and those before them that do not.
_CHAINS, _LEAST_CHAIN, _FILLING = 3, 8, 2


def sampler(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """What gives the seconds of a call; on a GPU those between two events."""
    return _sample_cuda if device.type == "cuda" else _sample_cpu


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
        self._marking = True
        self._started: Any = None
        self._last: Any = None
        self._parts: list[tuple[str, Any, Any]] = []

    def start(self) -> None:
        """What comes now belongs to the next part that is marked."""
        self._started = self._last = self._mark()

    def skip(self) -> None:
        """What was done since the last mark belongs to no part but the whole."""
        self._last = self._mark()

    def end(self, part: str, whole: str | None = None) -> None:
        """The part ends here, and the next one begins; so does `whole`, which began with the last `start`."""
        now = self._mark()
        if self._marking:
            self._parts.append((part, self._last, now))
            if whole is not None:
                self._parts.append((whole, self._started, now))
        self._last = now

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Meanwhile nothing is marked: on a GPU marks take as long as the calls of a small round."""
        self._marking = False
        try:
            yield
        finally:
            self._marking = True

    def _mark(self) -> Any:
        if not (self._on_gpu and self._marking):
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> dict[str, float]:
        """Seconds of each part, added up since this was called last."""
        if self._on_gpu:
            torch.cuda.synchronize()
        seconds: dict[str, float] = {}
        for part, before, after in self._parts:
            taken = before.elapsed_time(after) / 1e3 if self._on_gpu else after - before
            seconds[part] = seconds.get(part, 0.0) + taken
        self._parts.clear()
        return seconds


def samples_of_ranks(
    comm: Communicator,
    functions: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    sample_seconds: float = 0.02,
    laps: Laps | None = None,
) -> list[Times]:
    """Seconds of a call on each rank, in `repeats` rounds of all functions in turn. Collective.

    All ranks run the same functions in the same order. Before a sample they meet at a barrier; a sample is so many
    calls, the same number on every rank, that they take about `sample_seconds`. What each call does for the first time,
    such as compiling, is over before the first sample.

    Args:
        comm: the ranks.
        functions: the same names on every rank.
        repeats: samples of each function.
        sample_seconds: 0 makes a sample of one call.
        laps: where a function marks its parts. Its times are then those of the parts, named by them.
    """
    sample = sampler(comm.device)
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
    return comm.all_gather_object(own)


def over_ranks(everyone: Sequence[Times], choose: Callable[[Sequence[float]], float]) -> Times:
    """What is chosen of the ranks' times of each sample, such as `max`, which is that of the slowest.

    >>> over_ranks([{"a": [1.0, 4.0]}, {"a": [2.0, 3.0]}], max)
    {'a': [2.0, 4.0]}
    """
    own = everyone[0]
    return {name: [choose(taken) for taken in zip(*(times[name] for times in everyone), strict=True)] for name in own}


def interleaved_over_ranks(
    comm: Communicator,
    functions: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    sample_seconds: float = 0.02,
    laps: Laps | None = None,
) -> Times:
    """`samples_of_ranks` of the slowest rank in each sample. Collective."""
    return over_ranks(samples_of_ranks(comm, functions, repeats, sample_seconds=sample_seconds, laps=laps), max)


def chained_over_ranks(
    comm: Communicator, functions: Mapping[str, Callable[[], object]], sample_seconds: float = 0.02
) -> Times:
    """Seconds of a call among calls that follow each other on all ranks, without a barrier, in a few chains.

    The time of a chain is the median over ranks: in the long run all take as long. Its first calls, while those that
    left the barrier first wait for the last, do not count. Collective.
    """
    sample = sampler(comm.device)
    calls = {name: max(_LEAST_CHAIN, _agree_on_calls(comm, call, sample_seconds)) for name, call in functions.items()}
    own: Times = {name: [] for name in functions}
    for _ in range(_CHAINS):
        for name, function in functions.items():
            comm.barrier()
            _repeated(function, _FILLING)()
            own[name].append(sample(_repeated(function, calls[name])) / calls[name])
    return over_ranks(comm.all_gather_object(own), statistics.median)


def _agree_on_calls(comm: Communicator, function: Callable[[], object], sample_seconds: float) -> int:
    function()
    if sample_seconds == 0:
        return 1
    comm.barrier()
    sample = sampler(comm.device)
    taken = sample(_repeated(function, _CALIBRATION_CALLS)) / _CALIBRATION_CALLS
    slowest = max(comm.all_gather_object(taken))
    return max(1, min(_MOST_CALLS, round(sample_seconds / slowest)))


def _repeated(function: Callable[[], object], calls: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(calls):
            function()

    return run


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Median over rounds of one function's time by another's; rounds that only one of them took do not count."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=False))
