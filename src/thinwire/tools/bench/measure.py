"""Contenders on all ranks: made, checked, timed in turn, and checked again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from thinwire.comm import Communicator
from thinwire.errors import TransportUnavailable
from thinwire.tools.bench.checks import Verdict
from thinwire.tools.bench.contender import Candidate, Contender, NotHere
from thinwire.tools.bench.graphs import how_called
from thinwire.tools.bench.options import Settings
from thinwire.tools.bench.timing import Laps, Times, chained_over_ranks, over_ranks, samples_of_ranks
from thinwire.tools.bench.units import name_text
from thinwire.tools.progress import SILENT, Report

#: Calls in a row, the last of which is checked after the samples.
_CHAIN = 4


@dataclass
class Measured:
    """What came out; the same on all ranks.

    Attributes:
        contenders: this rank's, in the order in which they ran.
        wire_bytes: that leave a rank, mean over ranks, by label and operation.
        verdicts: over all ranks, by label and operation; empty where nothing was checked.
        samples: seconds on the slowest rank, by "label operation"; those with a wrong result have none. `fastest` has
            those on the fastest.
        periods: seconds of a round among rounds that follow each other, by label.
        called: on a GPU, how those that were timed are called, by label; see `graphs`.
        missing: candidates that could not take part, and why.
    """

    contenders: list[Contender] = field(default_factory=list)
    wire_bytes: dict[tuple[str, str], float] = field(default_factory=dict)
    verdicts: dict[tuple[str, str], Verdict] = field(default_factory=dict)
    samples: Times = field(default_factory=dict)
    fastest: Times = field(default_factory=dict)
    periods: Times = field(default_factory=dict)
    called: dict[str, str] = field(default_factory=dict)
    missing: list[tuple[Candidate, str]] = field(default_factory=list)


def measure(
    comm: Communicator,
    candidates: Sequence[Candidate],
    settings: Settings,
    laps: Laps | None,
    report: Report = SILENT,
) -> Measured:
    """Makes, checks and times all candidates, and gives their memory back. Collective.

    Args:
        comm: the ranks.
        candidates: the same ones on all ranks.
        settings: iterations, warmup, sample_seconds, check and eager are looked at.
        laps: where contenders mark the parts of a round.
        report: is told which candidate makes its first calls, and of each that has.
    """
    found = Measured()
    with contextlib.ExitStack() as opened:
        for candidate in candidates:
            name = name_text(candidate.implementation, candidate.wire, candidate.transport)
            report.now(f"first calls of {name}, which may compile kernels")
            try:
                contender = candidate.make()
                opened.callback(contender.close)
                for _ in range(max(1, settings.warmup)):  # what cannot take part may say so in its first call
                    outputs = contender.call()
            except (NotHere, TransportUnavailable) as reason:
                found.missing.append((candidate, str(reason)))
                report.step()
                continue
            found.contenders.append(contender)
            own = {operation: float(sent) for operation, sent in contender.wire_bytes.items()}
            for sent in comm.all_gather_object(own):
                for operation, count in sent.items():
                    key = contender.label, operation
                    found.wire_bytes[key] = found.wire_bytes.get(key, 0.0) + count / comm.size
            del outputs
            report.step()
        report.now("checking and timing them in turn")
        if settings.check:
            _check(comm, found.contenders, found)
        timed = {contender.label: contender for contender in found.contenders if not _is_wrong(found, contender)}
        found.called = how_called(comm, list(timed.values()), settings.eager)
        if laps is not None:
            laps.take()
        everyone = samples_of_ranks(
            comm,
            {label: contender.call for label, contender in timed.items()},
            settings.iterations,
            sample_seconds=settings.sample_seconds,
            laps=laps,
        )
        rounds = {label: contender.call for label, contender in timed.items() if "moe" in contender.wire_bytes}
        if laps is not None and rounds:
            with laps.silent():
                found.periods = chained_over_ranks(comm, rounds, settings.sample_seconds)
        if settings.check:
            _check(comm, list(timed.values()), found, calls=_CHAIN)
        slowest, fastest = over_ranks(everyone, max), over_ranks(everyone, min)
        for contender in timed.values():
            if not _is_wrong(found, contender):
                for operation in contender.wire_bytes:
                    marked = f"{contender.label} {operation}"
                    name = marked if marked in slowest else contender.label
                    found.samples[marked], found.fastest[marked] = slowest[name], fastest[name]
    return found


def _is_wrong(found: Measured, contender: Contender) -> bool:
    return any(
        found.verdicts[contender.label, operation].wrong
        for operation in contender.wire_bytes
        if (contender.label, operation) in found.verdicts
    )


def _check(comm: Communicator, contenders: Sequence[Contender], found: Measured, calls: int = 1) -> None:
    """Compares each one's results on all ranks, and adds what is found to earlier verdicts.

    Of several `calls`, which follow each other without a barrier, those of the last.
    """
    for contender in contenders:
        for _ in range(calls):
            contender.poison()
            outputs = contender.call()
        own = {operation: tuple(contender.judge(operation, got)) for operation, got in outputs.items()}
        del outputs
        everyone = comm.all_gather_object(own)
        for operation in own:
            earlier = found.verdicts.get((contender.label, operation), Verdict(0, 0.0, 0.0))
            verdicts = [earlier, *(Verdict(*verdicts[operation]) for verdicts in everyone)]
            found.verdicts[contender.label, operation] = Verdict(*map(sum, zip(*verdicts, strict=True)))


def by_operation(found: Measured, operations: Sequence[str]) -> Iterator[tuple[str, Contender]]:
    """Each operation with each contender that was measured as it."""
    for operation in operations:
        for contender in found.contenders:
            if operation in contender.wire_bytes:
                yield operation, contender
