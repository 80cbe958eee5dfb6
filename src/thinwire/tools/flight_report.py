"""Compares all ranks' flight recorders: which rank stopped at which operation, and where ranks differ.

Numbers of operations are the same on all ranks of a communicator, so operations with the same number are compared:
settings that must agree, counts between each two ranks, and how far each rank came. Clocks are compared on one host
only.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from thinwire.errors import ThinwireError
from thinwire.flight import COUNTS, DONE, FAILED, INTERRUPTED, UNDER_WAY, Flight, Operation

#: Operations in the table.
SHOWN = 8

_PEER_TIMEOUT = "PeerTimeout"
# Ranks may pass other sizes: in the first dimension, or altogether.
_UNEVEN = {"all_to_all_v", "dispatch"}
_OF_ANY_SIZE = {"all_to_all", "all_gather_v", "combine"}
_SAME_AS = {"abandon": "combine"}  # peers may combine what this rank abandons


def report(flights: Sequence[Flight]) -> str:
    """The text of `thinwire inspect`: for every communicator a line that names the rank and the operation, and a table.

    Raises:
        ThinwireError: there are two files of one rank, or no files.

    >>> report([])
    Traceback (most recent call last):
    thinwire.errors.ThinwireError: no files; expected those of a communicator's ranks
    """
    groups: dict[tuple[str, int], list[Flight]] = {}
    for flight in flights:
        groups.setdefault((flight.communicator, flight.size), []).append(flight)
    if not groups:
        raise ThinwireError("no files; expected those of a communicator's ranks")
    # What was written last is most often what it is about.
    newest = sorted(groups.values(), key=lambda group: max(flight.written for flight in group), reverse=True)
    reports = [_Group(group) for group in newest]
    reports.sort(key=lambda group: group.trouble is None)
    return "\n\n".join(group.text() for group in reports)


class _Group:
    """The files of one communicator's ranks."""

    def __init__(self, flights: Sequence[Flight]) -> None:
        self.flights = {flight.rank: flight for flight in sorted(flights, key=lambda flight: flight.rank)}
        if len(self.flights) < len(flights):
            rank, times = Counter(flight.rank for flight in flights).most_common(1)[0]
            sources = " and ".join(flight.source for flight in flights if flight.rank == rank)
            raise ThinwireError(f"rank {rank} has {times} files, {sources}; expected one file for each rank")
        self.size = next(iter(self.flights.values())).size
        self.absent = sorted({*range(self.size)} - {*self.flights})
        self.operations = {
            rank: {operation.number: operation for operation in flight.operations if operation.number is not None}
            for rank, flight in self.flights.items()
        }
        self.last = {rank: max(held, default=0) for rank, held in self.operations.items()}
        self.trouble = self._trouble()

    def _trouble(self) -> int | None:
        """The first number at which some rank did not get through; None: all came equally far."""
        numbers = [
            number
            for rank, held in self.operations.items()
            for number, operation in held.items()
            if operation.state == UNDER_WAY
            or (
                operation.state in (FAILED, INTERRUPTED)
                # After other errors ranks may have gone on.
                and (operation.failure == _PEER_TIMEOUT or number == self.last[rank])
            )
        ]
        if len({*self.last.values()}) > 1:
            numbers.append(min(self.last.values()) + 1)
        return min(numbers, default=None)

    def at(self, number: int) -> dict[int, Operation]:
        """The ranks' operations of a number, of those that have it."""
        return {rank: held[number] for rank, held in self.operations.items() if number in held}

    # -----------------------------------------------------------------------------------------------------------------
    # The first line

    def verdict(self) -> str:
        """Which rank stopped, and at which operation."""
        number = self.trouble
        if number is None:
            return self._without_trouble()
        first = number
        while (first - 1) in {n for held in self.operations.values() for n in held} and _parts(self.at(first - 1)):
            first -= 1
        operations = self.at(first)
        if parts := _parts(operations):
            return self._disagreement(first, parts)
        if told := _counts_that_differ(operations):
            return f"operation {first}, {operations[min(operations)].name}: {told}"
        return self._stop(number, self.at(number))

    def _stop(self, number: int, here: Mapping[int, Operation]) -> str:
        what = f"operation {number}" + (f", {_describe(next(iter(here.values())))}" if here else "")
        behind = [rank for rank, last in self.last.items() if last < number]
        stuck = _by(here, lambda operation: operation.state != DONE)
        others = f", in which {_names(stuck)} waited" if stuck else ""
        if behind:
            before = "; ".join(f"the last of rank {rank} is {self._last_of(rank)}" for rank in behind[:3])
            return f"{_names(behind)} stopped before {what}{others}: {before}"
        raised = _by(here, lambda o: o.state in (FAILED, INTERRUPTED) and o.failure != _PEER_TIMEOUT)
        waited = [rank for rank in stuck if rank not in raised]
        others = f", in which {_names(waited)} waited" if waited else ""
        if raised:
            errors = ", ".join(dict.fromkeys(str(here[rank].failure) for rank in raised))
            return f"{_names(raised)} stopped in {what}, by {errors}{others}"
        late, blamed = self._late_and_blamed(here)
        if self.absent:
            gone = sorted(blamed & {*self.absent}) or self.absent
            return f"{_names(gone)} stopped in or before {what}{others}: no file of {_names(gone)}"
        inside = _by(here, lambda operation: operation.state == UNDER_WAY)
        waited = [rank for rank in stuck if rank not in inside]
        if inside and waited:
            return f"{_names(inside)} stopped in {what}, in which {_names(waited)} gave up"
        if late:
            waited = [rank for rank in stuck if rank not in late]
            return f"{_names(late)} stopped before {what}, and called it when {_names(waited)} had given up"
        if blamed and len(blamed) < self.size:
            by = _names(rank for rank in stuck if blamed & {*here[rank].blamed})
            return f"{_names(blamed)} stopped in or before {what}: blamed by {by}"
        return f"all ranks stopped in {what}{self._latecomer(here)}"

    def _late_and_blamed(self, here: Mapping[int, Operation]) -> tuple[list[int], set[int]]:
        """Who called when another rank had given up already, and whom the first one to give up blames.

        Who gives up later may blame those that gave up before. Without a common clock: whom most blame.
        """
        gave_up = _by(here, lambda operation: operation.failure == _PEER_TIMEOUT)
        if gave_up and self._one_clock(here):
            first = min((here[rank] for rank in gave_up), key=lambda operation: operation.end_ns)
            return _by(here, lambda operation: operation.start_ns > first.end_ns), {*first.blamed}
        blame = Counter(peer for rank in gave_up for peer in here[rank].blamed)
        return [], {peer for peer, times in blame.items() if times == max(blame.values())}

    def _one_clock(self, ranks: Iterable[int]) -> bool:
        return len({self.flights[rank].host for rank in ranks}) == 1

    def _last_of(self, rank: int) -> str:
        operations = self.flights[rank].operations
        if not operations:
            return "none"
        last = operations[-1]
        return f"{last.name if last.number is None else f'operation {last.number}, {last.name}'}, {_how(last)}"

    def _latecomer(self, here: Mapping[int, Operation]) -> str:
        if len(here) < 2 or not self._one_clock(here):
            return ""
        starts = {rank: operation.start_ns for rank, operation in here.items()}
        rank = max(starts, key=lambda rank: starts[rank])
        return f"; rank {rank} came last, {(starts[rank] - min(starts.values())) / 1e9:.3f} s after the first"

    def _disagreement(self, number: int, parts: Mapping[str, list[int]]) -> str:
        """The ranks that are fewest are named first: the others are more likely to be right."""
        ordered = sorted(parts, key=lambda described: (len(parts[described]), parts[described]))
        said = [f"{_names(parts[described])} called {described}" for described in ordered[:3]]
        return f"{said[0]} as operation {number}, where {', and '.join(said[1:])}"

    def _without_trouble(self) -> str:
        for rank, flight in self.flights.items():
            for operation in flight.operations:
                if operation.number is None and operation.state in (UNDER_WAY, FAILED, INTERRUPTED):
                    after = f", after operation {self.last[rank]}"
                    return f"rank {rank} stopped in {_describe(operation)}, {_how(operation)}{after}"
        told = f"no rank stopped: all came to the end of operation {max(self.last.values())}"
        return told + (f"; no file of {_names(self.absent)}" if self.absent else "")

    # -----------------------------------------------------------------------------------------------------------------
    # The rest

    def text(self) -> str:
        """The line, what the files are, and the last operations."""
        some = next(iter(self.flights.values()))
        lines = [self.verdict(), ""]
        found = f"{len(self.flights)} of {self.size} ranks' files"
        lines.append(f"{found}; {some.backend}, {some.origin}; communicator {some.communicator or 'that never met'}")
        if self.absent:
            lines.append(f"no file: {_names(self.absent)}")
        reasons: dict[str, list[int]] = {}
        for rank, flight in self.flights.items():
            reasons.setdefault(flight.reason, []).append(rank)
        lines += [f"written by {_names(ranks)}: {reason}" for reason, ranks in list(reasons.items())[:SHOWN]]
        last = max(self.last.values())
        stop = min(last, (self.trouble or last) + 2)
        rows = list(self._rows(range(max(1, stop - SHOWN + 1), stop + 1)))
        if rows:
            width = max(len(row[1]) for row in rows)
            lines += ["", f"{'number':>8}  {'operation':{width}}  ranks"]
            lines += [f"{number:>8}  {what:{width}}  {ranks}".rstrip() for number, what, ranks in rows]
        for rank, flight in self.flights.items():
            lines += [
                f"{'between two':>8}  rank {rank}: {_describe(operation)}, {_how(operation)}"
                for operation in flight.operations
                if operation.number is None and operation.state != DONE
            ][-1:]
        return "\n".join(lines)

    def _rows(self, numbers: Iterable[int]) -> Iterator[tuple[str, str, str]]:
        """Number, operation, and how it went on which ranks: a row for each group of ranks that called the same."""
        for number in numbers:
            here = self.at(number)
            parts = _parts(here) or ({_describe(next(iter(here.values()))): [*here]} if here else {})
            for described, ranks in parts.items():
                hows: dict[str, list[int]] = {}
                for rank in ranks:
                    hows.setdefault(_how(here[rank]), []).append(rank)
                states = [f"{how} on {_names(those)}" for how, those in _with_durations(hows, here)]
                yield str(number), described, "; ".join(states) + (" (differs)" if len(parts) > 1 else "")
            missing = [rank for rank, last in self.last.items() if last < number]
            if missing and here:
                yield "", "", f"not called on {_names(missing)}"


def _parts(operations: Mapping[int, Operation]) -> dict[str, list[int]]:
    """The ranks by what they called, where that differs; empty where it is the same."""
    parts: dict[tuple[object, ...], list[int]] = {}
    for rank, operation in operations.items():
        parts.setdefault(_agreed(operation), []).append(rank)
    if len(parts) < 2:
        return {}
    described: dict[str, list[int]] = {}
    for ranks in parts.values():
        text = _describe(operations[ranks[0]])
        while text in described:  # a long detail is cut
            text += ", otherwise further on"
        described[text] = ranks
    return described


def _agreed(operation: Operation) -> tuple[object, ...]:
    """What must be the same on all ranks."""
    name, shape = _SAME_AS.get(operation.name, operation.name), operation.shape
    if name in _OF_ANY_SIZE:
        shape = None
    elif name in _UNEVEN and shape:
        shape = (-1, *shape[1:])
    details = tuple(sorted((key, value) for key, value in operation.details.items() if not _is_pairwise(key)))
    return name, shape, operation.dtype, operation.wires, operation.transport, details


def _is_pairwise(key: str) -> bool:
    return key in COUNTS and key != "counts"


def _counts_that_differ(operations: Mapping[int, Operation]) -> str:
    """The first two ranks of which one sends what the other does not expect."""
    for source, operation in operations.items():
        sent = operation.details.get("send_counts")
        for target, other in operations.items():
            expected = other.details.get("recv_counts")
            if isinstance(sent, tuple) and isinstance(expected, tuple) and sent[target] != expected[source]:
                return (
                    f"rank {source} sends rank {target} {sent[target]} rows, but rank {target} expects "
                    f"{expected[source]} from rank {source}"
                )
    return ""


def _describe(operation: Operation) -> str:
    """A call in words, with all that ranks must agree on."""
    text = operation.name
    if operation.dtype is not None:
        text += f" of {operation.dtype} {'' if operation.shape is None else list(operation.shape)}".rstrip()
    elif operation.shape is not None:
        text += f" of {list(operation.shape)}"
    if operation.wires:
        text += f" as {', '.join(operation.wires)}"
    passed = [f"{key} {_short(value)}" for key, value in sorted(operation.details.items()) if not _is_pairwise(key)]
    if operation.transport:
        passed.insert(0, operation.transport)
    return f"{text} ({', '.join(passed)})" if passed else text


def _short(value: object) -> str:
    text = str(list(value)) if isinstance(value, tuple) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _how(operation: Operation) -> str:
    """How a call went, but for how long it took."""
    text = operation.failure if operation.state == FAILED and operation.failure else operation.state
    if operation.state == INTERRUPTED:
        text = f"interrupted by {operation.failure}"
    if operation.phase is not None:
        text += f" in {operation.phase}"
    if operation.state != DONE and operation.inside is not None:
        text += f", within {operation.inside}"
    return text or "failed"


def _with_durations(
    hows: Mapping[str, list[int]], operations: Mapping[int, Operation]
) -> Iterator[tuple[str, list[int]]]:
    for how, ranks in hows.items():
        taken = [operations[r].end_ns - operations[r].start_ns for r in ranks if operations[r].end_ns]
        yield how + (f" after {_seconds(statistics.median(taken))}" if taken else ""), ranks


def _seconds(nanoseconds: float) -> str:
    if nanoseconds < 1e6:
        return f"{nanoseconds / 1e3:.0f} us"
    return f"{nanoseconds / 1e6:.1f} ms" if nanoseconds < 1e9 else f"{nanoseconds / 1e9:.2f} s"


def _by(operations: Mapping[int, Operation], chosen: Callable[[Operation], bool]) -> list[int]:
    return [rank for rank, operation in operations.items() if chosen(operation)]


def _names(ranks: Iterable[int]) -> str:
    """Ranks in words, runs of them in short.

    >>> _names([3]), _names([0, 1, 2, 5])
    ('rank 3', 'ranks 0-2, 5')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if sum(map(len, runs)) > 1 else ''} {', '.join(parts)}"
