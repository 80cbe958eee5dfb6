"""The file in which a rank's flight recorder leaves its last operations: what it holds, and how it is read.

A file may come from anywhere, and is trusted in nothing: `thinwire.fields` checks it. Reading needs no torch. Files are
written by `thinwire.comm.recorder.flight_recorder`, and compared by `thinwire.tools.flight_report`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from thinwire.fields import (
    Fields,
    Refused,
    just,
    list_of,
    one_of,
    or_none,
    parse_json,
    read_bytes,
    seconds,
    signed,
    text,
    whole,
    within,
)

#: What the first two fields of a file say.
FORMAT, VERSION = "thinwire flight recorder", 1
#: Operations that a recorder keeps.
RING = 256
#: States. Posted: an asynchronous call has returned, and nobody has waited for it yet. Interrupted: by what is no
#: `Exception`, such as KeyboardInterrupt.
UNDER_WAY, POSTED, DONE, FAILED, INTERRUPTED = STATES = ("under way", "posted", "done", "failed", "interrupted")
#: Details with an entry for each rank: what this rank sends there, expects from there, or what every rank has.
COUNTS = ("send_counts", "recv_counts", "counts")

_MOST_RANKS, _MOST_DIMENSIONS, _MOST_DETAILS = 1 << 16, 64, 16


@dataclass(frozen=True)
class Operation:
    """One call on a communicator.

    Attributes:
        number: its place among the communicator's collective calls, from 1, the same on every rank; None for `send` and
            `recv`, which only two ranks do.
        shape: of the tensor that was passed; None without a tensor.
        wires: of its legs; empty where values travel as they are.
        transport: "direct", "staged", a backend's name; or as asked for, where it ended before one was chosen.
        details: other arguments, such as the reduction, a root, a lane, counts.
        start_ns, end_ns: of the writing host's monotonic clock; 0 for an end that has not come.
        state: one of STATES.
        failure: the class of the error that ended it; what a PeerTimeout said is in `lane`, `epoch`, `phase` and
            `blamed`.
        inside: the last call made within it, if it did not end well.
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
        ThinwireError: the file is not accepted; the message says why.
    """
    return parse_flight(*read_bytes(path))


def parse_flight(content: bytes, source: str) -> Flight:
    """As `read_flight`, of what a file holds."""
    fields = Fields(parse_json(content, source), source)
    for name, wanted in (("format", FORMAT), ("version", VERSION)):
        fields.get(name, just(wanted))
    size = fields.get("size", within(1, _MOST_RANKS))
    return Flight(
        source=source,
        communicator=fields.get("communicator", text),
        origin=fields.get("origin", text),
        backend=fields.get("backend", text),
        rank=fields.get("rank", within(0, size - 1)),
        size=size,
        timeout=fields.get("timeout", seconds),
        host=fields.get("host", text),
        pid=fields.get("pid", whole),
        written=fields.get("written", seconds),
        written_ns=fields.get("written_ns", whole),
        reason=fields.get("reason", text),
        operations=fields.get("operations", _operations(size)),
    )


def _operations(size: int) -> Callable[[object], tuple[Operation, ...]]:
    rank = within(0, size - 1)
    counts = list_of(whole, size)

    def detail(value: object) -> int | str | tuple[int, ...]:
        return text(value) if isinstance(value, str) else counts(value) if isinstance(value, list) else signed(value)

    def details(value: object) -> dict[str, int | str | tuple[int, ...]]:
        if not isinstance(value, dict) or len(value) > _MOST_DETAILS:
            raise Refused(f"an object of at most {_MOST_DETAILS} fields")
        found = {text(name): detail(held) for name, held in value.items()}
        for name in COUNTS:
            counted = found.get(name, ())
            if name in found and not (isinstance(counted, tuple) and len(counted) == size):
                raise Refused(f"{name} with an entry for each of {size} ranks")
        return found

    def operation(value: object) -> Operation:
        fields = Fields(value, "")
        return Operation(
            number=fields.get("number", or_none(within(1, 2**63 - 1))),
            name=fields.get("name", text),
            shape=fields.get("shape", or_none(list_of(whole, _MOST_DIMENSIONS))),
            dtype=fields.get("dtype", or_none(text)),
            wires=fields.get("wires", list_of(text, 2)),
            transport=fields.get("transport", or_none(text)),
            details=fields.get("details", details),
            start_ns=fields.get("start_ns", whole),
            end_ns=fields.get("end_ns", whole),
            state=fields.get("state", one_of(STATES)),
            failure=fields.get("failure", or_none(text)),
            lane=fields.get("lane", or_none(signed)),
            epoch=fields.get("epoch", or_none(signed)),
            phase=fields.get("phase", or_none(text)),
            blamed=fields.get("blamed", list_of(rank, size)),
            inside=fields.get("inside", or_none(text)),
        )

    def check(value: object) -> tuple[Operation, ...]:
        found = list_of(operation, RING)(value)
        numbers = [each.number for each in found if each.number is not None]
        if any(after != before + 1 for before, after in zip(numbers, numbers[1:], strict=False)):
            raise Refused("operations whose numbers follow one another")
        return found

    return check
