"""The file in which a rank's flight recorder leaves its last operations: what it holds, and how it is read.

A file may come from anywhere, and is trusted in nothing: its length, every field's type, length and range are checked,
and text must be printable, as it ends on somebody's terminal. Reading needs no torch. Files are written by
`thinwire.comm.flight_recorder`, and compared by `thinwire.flight_report`.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from thinwire.errors import ThinwireError

#: What the first two fields of a file say.
FORMAT, VERSION = "thinwire flight recorder", 1
#: Operations that a recorder keeps.
RING = 256
#: Characters of a text, and bytes of a file.
LONGEST_TEXT, MOST_BYTES = 400, 64 << 20
#: States. Posted: an asynchronous call has returned, and nobody has waited for it yet. Interrupted: by what is no
#: `Exception`, such as KeyboardInterrupt.
UNDER_WAY, POSTED, DONE, FAILED, INTERRUPTED = STATES = ("under way", "posted", "done", "failed", "interrupted")
#: Details with an entry for each rank: what this rank sends there, expects from there, or what every rank has.
COUNTS = ("send_counts", "recv_counts", "counts")

_LARGEST = 2**63 - 1
_MOST_RANKS, _MOST_DIMENSIONS, _MOST_DETAILS = 1 << 16, 64, 16
_T = TypeVar("_T")


@dataclass(frozen=True)
class Operation:
    """One call on a communicator.

    Attributes:
        number: its place among the communicator's collective calls, from 1 on, the same on every rank; None for what
            only two ranks do, `send` and `recv`.
        shape: of the tensor that was passed; None where there is none.
        wires: of its legs; empty where values travel as they are.
        transport: "direct", "staged", a backend's name; or as asked for, where it ended before one was chosen.
        details: what else was passed, such as the reduction, a root, a lane, counts.
        start_ns, end_ns: of the writing host's monotonic clock; 0 for an end that has not come.
        state: one of STATES.
        failure: the class of the error that ended it; what a PeerTimeout said is in `lane`, `epoch`, `phase` and
            `blamed`.
        inside: of what did not end well, the call that was made last within it.
    """

    number: int | None
    name: str
    shape: tuple[int, ...] | None
    dtype: str | None
    wires: tuple[str, ...]
    transport: str | None
    details: dict[str, int | str | tuple[int, ...]]
    start_ns: int
    end_ns: int
    state: str
    failure: str | None
    lane: int | None
    epoch: int | None
    phase: str | None
    blamed: tuple[int, ...]
    inside: str | None


@dataclass(frozen=True)
class Flight:
    """One rank's file.

    Attributes:
        source: where it was read.
        communicator: the same on all ranks of one communicator, and on no others; empty if its ranks never met.
        origin: where the communicator came from, in words.
        written: when, in seconds since 1970; `written_ns` is that on the monotonic clock of `start_ns`.
        reason: why it was written.
        operations: the last ones, in the order in which they began.
    """

    source: str
    communicator: str
    origin: str
    backend: str
    rank: int
    size: int
    timeout: float
    host: str
    pid: int
    written: float
    written_ns: int
    reason: str
    operations: tuple[Operation, ...]


def read_flight(path: str | Path) -> Flight:
    """A file's content, checked.

    Raises:
        ThinwireError: naming the file and what is wrong with it.
    """
    source = ascii(str(path))[1:-1]
    try:
        # Not to wait for a writer, where it is a pipe.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ThinwireError(f"{source}: not a regular file")
            content = file.read(min(found.st_size, MOST_BYTES) + 1)  # room is made for all of it before
    except (OSError, ValueError) as error:
        raise ThinwireError(f"{source}: cannot be read: {error}") from None
    return parse_flight(content, source)


def parse_flight(content: bytes, source: str) -> Flight:
    """As `read_flight`, of what a file holds."""
    if len(content) > MOST_BYTES:
        raise ThinwireError(f"{source}: longer than {MOST_BYTES} bytes, the most that is read")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ThinwireError(f"{source}: not JSON: {_shown(str(error))}") from None
    fields = _Fields(value, source)
    for name, wanted in (("format", FORMAT), ("version", VERSION)):
        fields.get(name, _just(wanted))
    size = fields.get("size", _within(1, _MOST_RANKS))
    return Flight(
        source=source,
        communicator=fields.get("communicator", _text),
        origin=fields.get("origin", _text),
        backend=fields.get("backend", _text),
        rank=fields.get("rank", _within(0, size - 1)),
        size=size,
        timeout=fields.get("timeout", _seconds),
        host=fields.get("host", _text),
        pid=fields.get("pid", _whole),
        written=fields.get("written", _seconds),
        written_ns=fields.get("written_ns", _whole),
        reason=fields.get("reason", _text),
        operations=fields.get("operations", _operations(size)),
    )


class _Refused(Exception):
    """What a field was expected to be."""


class _Fields:
    """The fields of an object, each of which is asked for with a check that gives its value or raises _Refused."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise ThinwireError(f"{where}: {_shown(value)}, expected an object")
        self._value, self._where = value, where

    def get(self, name: str, check: Callable[[object], _T]) -> _T:
        if name not in self._value:
            raise ThinwireError(f"{self._where}: no field {name!r}")
        try:
            return check(self._value[name])
        except _Refused as expected:
            raise ThinwireError(f"{self._where}: {name} is {_shown(self._value[name])}, expected {expected}") from None
        except ThinwireError as error:  # of an object in it
            raise ThinwireError(f"{self._where}: {name}{error}") from None


def _operations(size: int) -> Callable[[object], tuple[Operation, ...]]:
    rank = _within(0, size - 1)
    counts = _list_of(_whole, size)

    def detail(value: object) -> int | str | tuple[int, ...]:
        return _text(value) if isinstance(value, str) else counts(value) if isinstance(value, list) else _signed(value)

    def details(value: object) -> dict[str, int | str | tuple[int, ...]]:
        if not isinstance(value, dict) or len(value) > _MOST_DETAILS:
            raise _Refused(f"an object of at most {_MOST_DETAILS} fields")
        found = {_text(name): detail(held) for name, held in value.items()}
        for name in COUNTS:
            counted = found.get(name, ())
            if name in found and not (isinstance(counted, tuple) and len(counted) == size):
                raise _Refused(f"{name} with an entry for each of {size} ranks")
        return found

    def operation(value: object) -> Operation:
        fields = _Fields(value, "")
        return Operation(
            number=fields.get("number", _or_none(_within(1, _LARGEST))),
            name=fields.get("name", _text),
            shape=fields.get("shape", _or_none(_list_of(_whole, _MOST_DIMENSIONS))),
            dtype=fields.get("dtype", _or_none(_text)),
            wires=fields.get("wires", _list_of(_text, 2)),
            transport=fields.get("transport", _or_none(_text)),
            details=fields.get("details", details),
            start_ns=fields.get("start_ns", _whole),
            end_ns=fields.get("end_ns", _whole),
            state=fields.get("state", _state),
            failure=fields.get("failure", _or_none(_text)),
            lane=fields.get("lane", _or_none(_signed)),
            epoch=fields.get("epoch", _or_none(_signed)),
            phase=fields.get("phase", _or_none(_text)),
            blamed=fields.get("blamed", _list_of(rank, size)),
            inside=fields.get("inside", _or_none(_text)),
        )

    def check(value: object) -> tuple[Operation, ...]:
        found = _list_of(operation, RING)(value)
        numbers = [each.number for each in found if each.number is not None]
        if any(after != before + 1 for before, after in zip(numbers, numbers[1:], strict=False)):
            raise _Refused("operations whose numbers follow one another")
        return found

    return check


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > LONGEST_TEXT or not value.isprintable():
        raise _Refused(f"printable text of at most {LONGEST_TEXT} characters")
    return value


def _just(wanted: object) -> Callable[[object], object]:
    def check(value: object) -> object:
        if type(value) is not type(wanted) or value != wanted:
            raise _Refused(f"{wanted!r}, the one that can be read")
        return value

    return check


def _state(value: object) -> str:
    if value not in STATES:
        raise _Refused(f"one of {', '.join(STATES)}")
    return str(value)


def _seconds(value: object) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e12:  # type: ignore[operator]
        raise _Refused("a number of seconds")
    return float(value)  # type: ignore[arg-type]


def _within(least: int, most: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        if type(value) is not int or not least <= value <= most:
            raise _Refused(f"an int from {least} to {most}")
        return value

    return check


_whole, _signed = _within(0, _LARGEST), _within(-_LARGEST, _LARGEST)


def _or_none(check: Callable[[object], _T]) -> Callable[[object], _T | None]:
    return lambda value: None if value is None else check(value)


def _list_of(check: Callable[[Any], _T], most: int) -> Callable[[object], tuple[_T, ...]]:
    def checked(value: object) -> tuple[_T, ...]:
        if not isinstance(value, list) or len(value) > most:
            raise _Refused(f"a list of at most {most}")
        found = []
        for place, item in enumerate(value):
            try:
                found.append(check(item))
            except ThinwireError as error:
                raise ThinwireError(f"[{place}]{error}") from None
        return tuple(found)

    return checked


def _shown(value: object) -> str:
    """The beginning of what was found, in ASCII."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
