"""`thinwire inspect`: compares all ranks' flight recorders, and says which rank stopped at which operation.

Operations with the same number are compared: settings that must agree, counts between each two ranks, and how far each
rank came. Clocks are compared on one host only.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby, product
from typing import Any, TypeVar

from thinwire.errors import ThinwireError
from thinwire.flight import DONE, FAILED, INTERRUPTED, UNDER_WAY, Flight, Operation, read_flight

SUMMARY = "say which rank stopped where, from the flight recorders' files"
DESCRIPTION = """\
Compares the files that the ranks' flight recorders wrote when peers did not answer. The first line
says which rank stopped at which operation; a table of the last operations follows. A file that
cannot be used is named and left out.

  thinwire inspect rank0.json rank1.json"""

_SHOWN = 8  # operations in the table
_PEER_TIMEOUT = "PeerTimeout"
_PAIRWISE = {"send_counts", "recv_counts"}  # what a rank sends to each peer, and expects from it
# Ranks may pass other sizes: in the first dimension, or altogether.
_UNEVEN, _OF_ANY_SIZE = {"all_to_all_v", "dispatch"}, {"all_to_all", "all_gather_v", "combine"}
_SAME_AS = {"abandon": "combine"}  # peers may combine what this rank abandons
_T = TypeVar("_T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("files", metavar="FILE", nargs="+", help="This is the file of one rank's flight recorder.")


def run(options: argparse.Namespace) -> int:
    """Prints the report of all files that can be used; 2 if one cannot."""
    flights, status = [], 0
    for file in dict.fromkeys(options.files):
        try:
            flights.append(read_flight(file))
        except ThinwireError as error:
            print(f"thinwire: error: {error}", file=sys.stderr)
            status = 2
    if flights:
        print(report(flights))
    return status


def report(flights: Sequence[Flight]) -> str:
    """A line that names the rank and the operation, and a table, of every communicator, those with trouble first."""
    groups = defaultdict(list)
    for flight in sorted(flights, key=lambda flight: -flight.written):  # the last one is most often what it is about
        groups[flight.communicator, flight.size].append(flight)
    reports = sorted((_Group(group) for group in groups.values()), key=lambda group: group.trouble is None)
    return "\n\n".join(group.text() for group in reports)


class _Group:
    """The files of one communicator's ranks."""

    def __init__(self, flights: Sequence[Flight]) -> None:
        # Of a rank with several files, the newest is taken.
        self.flights = {flight.rank: flight for flight in sorted(flights, key=lambda each: (each.rank, each.written))}
        self.size = flights[0].size
        self.absent = {*range(self.size)} - {*self.flights}
        self.operations = {
            rank: {operation.number: operation for operation in flight.operations if operation.number is not None}
            for rank, flight in self.flights.items()
        }
        self.last = {rank: max(held, default=0) for rank, held in self.operations.items()}
        # The first number at which some rank did not get through; None: all came equally far.
        numbers = [
            number
            for rank, held in self.operations.items()
            for number, operation in held.items()  # after other errors than a PeerTimeout ranks may have gone on
            if _stuck(operation) and (operation.failure in (None, _PEER_TIMEOUT) or number == self.last[rank])
        ]
        behind = [min(self.last.values()) + 1] if len({*self.last.values()}) > 1 else []
        self.trouble = min(numbers + behind, default=None)

    def at(self, number: int) -> dict[int, Operation]:
        """The ranks' operations of a number, of those that have it."""
        return {rank: held[number] for rank, held in self.operations.items() if number in held}

    def verdict(self) -> str:
        """The first line: which rank stopped, and at which operation."""
        if self.trouble is None:
            return self._without_trouble()
        first = self.trouble
        while len(_grouped(self.at(first - 1), _agreed)) > 1:
            first -= 1
        operations = self.at(first)
        parts = sorted(_grouped(operations, _agreed).values(), key=lambda ranks: (len(ranks), ranks))
        if len(parts) > 1:  # the ranks that are fewest first: the others are more likely to be right
            said = [f"{_names(ranks)} called {_describe(operations[ranks[0]])}" for ranks in parts[:3]]
            return f"{said[0]} as operation {first}, where {', and '.join(said[1:])}"
        if told := _counts_that_differ(operations):
            return f"operation {first}, {operations[min(operations)].name}: {told}"
        return self._stop(self.trouble, self.at(self.trouble))

    def _stop(self, number: int, here: Mapping[int, Operation]) -> str:
        def by(chosen: Callable[[Operation], bool]) -> list[int]:
            return [rank for rank, operation in here.items() if chosen(operation)]

        def others(ranks: Collection[int], did: str) -> str:
            rest = [rank for rank in stuck if rank not in ranks]
            return f", in which {_names(rest)} {did}" if rest else ""

        what = f"operation {number}" + (f", {_describe(next(iter(here.values())))}" if here else "")
        stuck, inside = by(lambda o: o.state != DONE), by(lambda o: o.state == UNDER_WAY)
        raised = by(lambda o: _stuck(o) and o.failure not in (None, _PEER_TIMEOUT))
        late, blamed = self._late_and_blamed(here)
        behind = [rank for rank, last in self.last.items() if last < number]
        before = "; ".join(map(self._last_of, behind[:3]))
        errors = ", ".join(dict.fromkeys(str(here[rank].failure) for rank in raised))
        gone = (blamed & self.absent) or self.absent
        gave_up = _names(rank for rank in stuck if rank not in late)
        blaming = _names(by(lambda o: bool(blamed & {*o.blamed})))
        cases: list[tuple[Collection[int], str]] = [
            (behind, f"before {what}{others(behind, 'waited')}: {before}"),
            (raised, f"in {what}, by {errors}{others(raised, 'waited')}"),
            (gone, f"in or before {what}{others(gone, 'waited')}: no file of {_names(gone)}"),
            (inside if len(inside) < len(stuck) else [], f"in {what}{others(inside, 'gave up')}"),
            (late, f"before {what}, and called it when {gave_up} had given up"),
            (blamed if len(blamed) < self.size else [], f"in or before {what}: blamed by {blaming}"),
        ]
        told = (f"{_names(ranks)} stopped {where}" for ranks, where in cases if ranks)
        return next(told, f"all ranks stopped in {what}")

    def _late_and_blamed(self, here: Mapping[int, Operation]) -> tuple[list[int], set[int]]:
        """Finds who called when another had given up, and whom the first to give up blames; without one clock, most."""
        gave_up = [operation for operation in here.values() if operation.failure == _PEER_TIMEOUT]
        if gave_up and len({self.flights[rank].host for rank in here}) == 1:
            first = min(gave_up, key=lambda operation: operation.end_ns)
            return [rank for rank, o in here.items() if o.start_ns > first.end_ns], {*first.blamed}
        blame = Counter(peer for operation in gave_up for peer in operation.blamed)
        return [], {peer for peer, times in blame.items() if times == max(blame.values())}

    def _last_of(self, rank: int) -> str:
        last = self.flights[rank].operations[-1:]
        told = [f"{o.name if o.number is None else f'operation {o.number}, {o.name}'}, {_how(o)}" for o in last]
        return f"the last of rank {rank} is {''.join(told) or 'none'}"

    def _without_trouble(self) -> str:
        for rank, flight in self.flights.items():
            for operation in flight.operations:
                if operation.number is None and _stuck(operation):
                    what = f"{_describe(operation)}, {_how(operation)}"
                    return f"rank {rank} stopped in {what}, after operation {self.last[rank]}"
        told = f"no rank stopped: all came to the end of operation {max(self.last.values())}"
        return told + (f"; no file of {_names(self.absent)}" if self.absent else "")

    def text(self) -> str:
        """The line, what the files are, and the last operations."""
        some = next(iter(self.flights.values()))
        known = f"{some.backend}, {some.origin}; communicator {some.communicator or 'that never met'}"
        lines = [self.verdict(), "", f"{len(self.flights)} of {self.size} ranks' files; {known}"]
        if self.absent:
            lines.append(f"no file: {_names(self.absent)}")
        reasons = _grouped(self.flights, lambda flight: flight.reason)
        lines += [f"written by {_names(ranks)}: {reason}" for reason, ranks in list(reasons.items())[:_SHOWN]]
        last = max(self.last.values())
        stop, rows = min(last, (self.trouble or last) + 2), [("number", "operation", "ranks")]
        for number in range(max(1, stop - _SHOWN + 1), stop + 1):
            here = self.at(number)
            for (what, how), ranks in _grouped(here, lambda each: (_describe(each), _how(each))).items():
                taken = sorted(here[rank].end_ns - here[rank].start_ns for rank in ranks if here[rank].end_ns)
                after = f" after {taken[len(taken) // 2] / 1e6:,.1f} ms" if taken else ""
                rows.append((str(number), what, f"{how}{after} on {_names(ranks)}"))
            missing = [rank for rank, last in self.last.items() if last < number]
            rows += [("", "", f"not called on {_names(missing)}")] if here and missing else []
        width = max(len(what) for _, what, _ in rows)
        lines += ["", *(f"{number:>8}  {what:{width}}  {ranks}".rstrip() for number, what, ranks in rows)]
        return "\n".join(lines)


def _stuck(operation: Operation) -> bool:
    return operation.state in (UNDER_WAY, FAILED, INTERRUPTED)


def _grouped(of_ranks: Mapping[int, _T], key: Callable[[_T], Any]) -> dict[Any, list[int]]:
    """The ranks with the same key."""
    groups = defaultdict(list)
    for rank, value in of_ranks.items():
        groups[key(value)].append(rank)
    return groups


def _agreed(operation: Operation) -> tuple[object, ...]:
    """Returns what must be the same on all ranks."""
    name, shape = _SAME_AS.get(operation.name, operation.name), operation.shape or ()
    shape = () if name in _OF_ANY_SIZE else shape[1:] if name in _UNEVEN else shape
    details = frozenset((key, value) for key, value in operation.details.items() if key not in _PAIRWISE)
    return name, shape, operation.dtype, operation.wires, operation.transport, details


def _counts_that_differ(operations: Mapping[int, Operation]) -> str:
    """The first two ranks of which one sends what the other does not expect."""
    for (source, one), (target, other) in product(operations.items(), repeat=2):
        sends, expects = one.details.get("send_counts"), other.details.get("recv_counts")
        if isinstance(sends, tuple) and isinstance(expects, tuple):
            sent, expected = sends[target : target + 1], expects[source : source + 1]
            if sent != expected:
                told = f"rank {source} sends rank {target} {sum(sent)} rows"
                return f"{told}, but rank {target} expects {sum(expected)} from rank {source}"
    return ""


def _describe(operation: Operation) -> str:
    """A call in words, with all that ranks must agree on."""
    sizes = "" if operation.shape is None else str(list(operation.shape))
    of = " ".join(part for part in (operation.dtype, sizes) if part)
    wires = f" as {', '.join(operation.wires)}" if operation.wires else ""
    passed = [operation.transport] if operation.transport else []
    for key, value in sorted(operation.details.items()):
        shown = str(list(value)) if isinstance(value, tuple) else str(value)
        passed += [f"{key} {shown[:57]}..." if len(shown) > 60 else f"{key} {shown}"] if key not in _PAIRWISE else []
    return operation.name + (f" of {of}" if of else "") + wires + (f" ({', '.join(passed)})" if passed else "")


def _how(operation: Operation) -> str:
    """Describes how a call went, but for how long it took."""
    text = operation.failure if operation.state == FAILED and operation.failure else operation.state
    if operation.state == INTERRUPTED:
        text = f"interrupted by {operation.failure}"
    if operation.phase is not None:
        text += f" in {operation.phase}"
    return text + (f", within {operation.inside}" if operation.state != DONE and operation.inside else "")


def _names(ranks: Iterable[int]) -> str:
    """Ranks in words, runs of them in short.

    >>> _names([3]), _names([0, 1, 2, 5])
    ('rank 3', 'ranks 0-2, 5')
    """
    ordered = sorted(ranks)
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ordered), lambda each: each[1] - each[0])]
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ordered) > 1 else ''} {', '.join(parts)}"
