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


def _mark(on_gpu: bool) -> Any:
    """A moment; on a GPU that at which the work so far is done."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(before: Any, after: Any) -> float:
    if isinstance(before, float):
        return float(after - before)
    after.synchronize()
    return float(before.elapsed_time(after)) / 1e3


def sampler(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """Returns a function that gives the seconds of a call; on a GPU those between two events."""
    on_gpu = device.type == "cuda"

    def sample(function: Callable[[], object]) -> float:
        before = _mark(on_gpu)
        function()
        return _seconds(before, _mark(on_gpu))

    return sample


class Laps:
    """Times of the parts of a function, which marks where each ends; see `interleaved_over_ranks`."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._started: Any = None
        self._last: Any = None
        self._parts: list[tuple[str, Any, Any]] = []

    def start(self) -> None:
        """What comes now belongs to the next part that is marked."""
        self._started = self._last = _mark(self._on_gpu)

    def skip(self) -> None:
        """What was done since the last mark belongs to no part but the whole."""
        self._last = _mark(self._on_gpu)

    def end(self, part: str, whole: str | None = None) -> None:
        """The part ends here, and the next one begins; so does `whole`, which began with the last `start`."""
        now = _mark(self._on_gpu)
        self._parts.append((part, self._last, now))
        if whole is not None:
            self._parts.append((whole, self._started, now))
        self._last = now

    def take(self) -> dict[str, float]:
        """Seconds of each part, added up since this was called last."""
        seconds: dict[str, float] = {}
        for part, before, after in self._parts:
            seconds[part] = seconds.get(part, 0.0) + _seconds(before, after)
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
class Outcome:
    """What came of a candidate; the same on all ranks.

    Attributes:
        sent: bytes that leave a rank, by operation, mean over ranks.
        verdicts: by operation, over all ranks; empty where nothing was checked.
        samples: by operation, seconds on the slowest rank; empty for a wrong result.
    """

    candidate: Candidate
    sent: dict[str, float]
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def wrong(self) -> bool:
        """Tells whether an element of any operation is outside its bound."""
        return any(verdict.wrong for verdict in self.verdicts.values())


def measure(
    comm: Communicator, candidates: Sequence[Candidate], settings: Settings, laps: Laps, report: Report = SILENT
) -> tuple[list[Outcome], list[tuple[Candidate, str]]]:
    """Makes, checks and times all candidates, the same ones on all ranks, and gives their memory back. Collective.

    Of settings it looks at iterations, warmup, sample_seconds and check; in `laps` contenders mark a round's parts.
    Returns what came of each, and the candidates that could not take part, and why.
    """
    running, missing = list[tuple[Outcome, Contender]](), list[tuple[Candidate, str]]()
    with contextlib.ExitStack() as opened:
        for candidate in candidates:
            report.now(f"first calls of {name_text(*candidate[:3])}, which may compile kernels")
            try:
                contender = candidate.make()
                opened.callback(contender.close)
                for _ in range(max(1, settings.warmup)):  # what cannot take part may say so in its first call
                    contender.call()
            except (NotHere, TransportUnavailable) as reason:
                missing.append((candidate, str(reason)))
            else:
                everyone = comm.all_gather_object(dict(contender.wire_bytes))
                sent = {each: sum(own[each] for own in everyone) / comm.size for each in contender.wire_bytes}
                running.append((Outcome(candidate, sent), contender))
            report.step()
        report.now("checking and timing them in turn")
        if settings.check:
            _check(comm, running)
        right = [pair for pair in running if not pair[0].wrong]
        calls = {outcome.candidate.label: contender.call for outcome, contender in right}
        times = interleaved_over_ranks(
            comm, calls, settings.iterations, sample_seconds=settings.sample_seconds, laps=laps
        )
        if settings.check:
            _check(comm, right, calls=_CHAIN)
    for outcome, _ in right:
        if not outcome.wrong:
            label = outcome.candidate.label
            outcome.samples = {each: times.get(f"{label} {each}") or times[label] for each in outcome.sent}
    return [outcome for outcome, _ in running], missing


def _check(comm: Communicator, running: Sequence[tuple[Outcome, Contender]], calls: int = 1) -> None:
    """Compares the results of the last of several calls on all ranks, and adds what is found to earlier verdicts."""
    for outcome, contender in running:
        for _ in range(calls):
            contender.poison()
            outputs = contender.call()
        own = {operation: tuple(contender.judge(operation, got)) for operation, got in outputs.items()}
        del outputs
        for everyone in comm.all_gather_object(own):
            for operation, verdict in everyone.items():
                earlier = outcome.verdicts.get(operation, Verdict(0, 0.0, 0.0))
                outcome.verdicts[operation] = Verdict(*map(sum, zip(earlier, verdict, strict=True)))
