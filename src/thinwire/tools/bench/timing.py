"""How times are taken: what is compared runs in turn, round after round, in one process or the same processes.

What else the machine does then hits all of them alike. A ratio is the median over rounds of the ratio within the round.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from thinwire.comm import Communicator
from thinwire.errors import TransportUnavailable
from thinwire.tools.bench.options import Settings
from thinwire.tools.bench.problems import Verdict
from thinwire.tools.bench.results import name_text
from thinwire.tools.progress import SILENT, Report

Times = dict[str, list[float]]

_MOST_CALLS = 2000
_CALIBRATION_CALLS = 3
#: Calls in a row, the last of which is checked after the samples.
_CHAIN = 4


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
        self._parts.append((part, self._last, now))
        if whole is not None:
            self._parts.append((whole, self._started, now))
        self._last = now

    def _mark(self) -> Any:
        if not self._on_gpu:
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
    everyone = comm.all_gather_object(own)
    return {name: [max(taken) for taken in zip(*(times[name] for times in everyone), strict=True)] for name in own}


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


# ---------------------------------------------------------------------------------------------------------------------
# Contenders at one size: made, checked, timed in turn, and checked again


class NotHere(Exception):
    """An implementation cannot take part; the message says why."""


@dataclass
class Contender:
    """One implementation of an operation at one size, on one rank, ready to be called.

    Attributes:
        call: does it all once; gives the output of each operation that it is measured as.
        judge: compares the output of an operation with the exact one.
        wire_bytes: bytes that it sends from this rank, by operation.
        poisoned: memory that `call` fills in place; set to NaN before a check.
        inputs: what `call` reads; negated in the call before a checked one, so that rows left from it are found out.
        close: gives its memory back.
    """

    call: Callable[[], Mapping[str, torch.Tensor]]
    judge: Callable[[str, torch.Tensor], Verdict]
    wire_bytes: Mapping[str, float]
    poisoned: tuple[torch.Tensor, ...] = ()
    inputs: tuple[torch.Tensor, ...] = ()
    close: Callable[[], None] = field(default=lambda: None)

    def poison(self) -> None:
        """So that a call which leaves memory untouched, wherever its own is, is found out. Collective."""
        for tensor in self.inputs:
            tensor.neg_()
        if self.inputs:
            self.call()
        for tensor in self.inputs:
            tensor.neg_()
        for tensor in self.poisoned:
            tensor.fill_(float("nan"))


class Candidate(NamedTuple):
    """A contender that is not made yet: its name, its wire, thinwire's transport or None, and how it is made.

    `make` may allocate, meet peers, or raise NotHere or TransportUnavailable, alike on all ranks.
    """

    implementation: str
    wire: str
    transport: str | None
    make: Callable[[], Contender]

    @property
    def label(self) -> str:
        """A name that no two candidates share."""
        return "/".join(part for part in self[:3] if part)


@dataclass
class Measured:
    """What came out; the same on all ranks. Keys are a candidate's label and an operation.

    Attributes:
        sent: bytes that leave a rank, mean over ranks, in the order in which contenders ran.
        verdicts: over all ranks; empty where nothing was checked.
        samples: seconds on the slowest rank; those with a wrong result have none.
        missing: candidates that could not take part, and why.
    """

    sent: dict[tuple[str, str], float] = field(default_factory=dict)
    verdicts: dict[tuple[str, str], Verdict] = field(default_factory=dict)
    samples: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    missing: list[tuple[Candidate, str]] = field(default_factory=list)

    def wrong(self, label: str, besides: Sequence[str] = ()) -> int:
        """Elements of a contender that are outside their bounds, of what it is measured as besides some operations."""
        return sum(each.wrong for (of, what), each in self.verdicts.items() if of == label and what not in besides)


def measure(
    comm: Communicator,
    candidates: Sequence[Candidate],
    settings: Settings,
    laps: Laps | None = None,
    report: Report = SILENT,
) -> Measured:
    """Makes, checks and times all candidates, the same ones on all ranks, and gives their memory back. Collective.

    Of settings it looks at iterations, warmup, sample_seconds and check; in `laps` contenders mark a round's parts.
    """
    found, running = Measured(), dict[str, Contender]()
    with contextlib.ExitStack() as opened:
        for candidate in candidates:
            report.now(f"first calls of {name_text(*candidate[:3])}, which may compile kernels")
            try:
                contender = candidate.make()
                opened.callback(contender.close)
                for _ in range(max(1, settings.warmup)):  # what cannot take part may say so in its first call
                    contender.call()
            except (NotHere, TransportUnavailable) as reason:
                found.missing.append((candidate, str(reason)))
            else:
                running[candidate.label] = contender
                everyone = comm.all_gather_object(dict(contender.wire_bytes))
                for operation in contender.wire_bytes:
                    found.sent[candidate.label, operation] = sum(own[operation] for own in everyone) / comm.size
            report.step()
        report.now("checking and timing them in turn")
        if settings.check:
            _check(comm, running, found)
        running = {label: contender for label, contender in running.items() if not found.wrong(label)}
        calls = {label: contender.call for label, contender in running.items()}
        times: Times = interleaved_over_ranks(
            comm, calls, settings.iterations, sample_seconds=settings.sample_seconds, laps=laps
        )
        if settings.check:
            _check(comm, running, found, calls=_CHAIN)
    for label, operation in found.sent:
        if label in running and not found.wrong(label):
            found.samples[label, operation] = times.get(f"{label} {operation}") or times[label]
    return found


def _check(comm: Communicator, running: dict[str, Contender], found: Measured, calls: int = 1) -> None:
    """Compares the results of the last of several calls on all ranks, and adds what is found to earlier verdicts."""
    for label, contender in running.items():
        for _ in range(calls):
            contender.poison()
            outputs = contender.call()
        own = {operation: tuple(contender.judge(operation, got)) for operation, got in outputs.items()}
        del outputs
        for everyone in comm.all_gather_object(own):
            for operation, verdict in everyone.items():
                earlier = found.verdicts.get((label, operation), Verdict(0, 0.0, 0.0))
                found.verdicts[label, operation] = Verdict(*map(sum, zip(earlier, verdict, strict=True)))
