"""The file in which a rank's flight recorder leaves its last operations: what `thinwire inspect` reads of it.

`thinwire.comm.recorder` writes it. Reading needs no torch. A file may come from anywhere, so its fields are checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from thinwire import fields as checks
from thinwire.errors import ThinwireError
from thinwire.fields import list_of, or_none, text, whole, within

#: What the first two fields of a file say, and how many operations a recorder keeps.
FORMAT, VERSION, RING = "thinwire flight recorder", 1, 256
#: States. Posted: an asynchronous call has returned, and nobody has waited for it yet. Interrupted: by what is no
#: `Exception`, such as KeyboardInterrupt.
UNDER_WAY, POSTED, DONE, FAILED, INTERRUPTED = STATES = ("under way", "posted", "done", "failed", "interrupted")

_T = TypeVar("_T")
_MOST_RANKS = 1 << 16
_rank, _counts = within(0, _MOST_RANKS - 1), list_of(whole, _MOST_RANKS)


def _details(value: object) -> dict[str, int | str | tuple[int, ...]]:
    if not isinstance(value, dict):
        raise checks.Refused("an object")
    kinds: dict[type, checks.Check[int | str | tuple[int, ...]]] = {str: text, list: _counts}
    return {text(name): kinds.get(type(held), checks.signed)(held) for name, held in value.items()}


def _of(check: checks.Check[_T]) -> _T:
    found: _T = field(metadata={"check": check})
    return found


def _read(kind: Any, value: object, where: str, **known: Any) -> Any:
    found = checks.Fields(value, where)
    read = {each.name: found.get(each.name, each.metadata["check"]) for each in fields(kind) if each.metadata}
    return kind(**known, **read)


@dataclass(frozen=True)
class Operation:
    """One call on a communicator; times are those of its host's monotonic clock."""

    number: int | None = _of(or_none(within(1, 2**63 - 1)))  # among collective calls: the same on every rank
    name: str = _of(text)
    shape: tuple[int, ...] | None = _of(or_none(list_of(whole, 64)))
    dtype: str | None = _of(or_none(text))
    wires: tuple[str, ...] = _of(list_of(text, 2))
    transport: str | None = _of(or_none(text))
    details: dict[str, int | str | tuple[int, ...]] = _of(_details)  # a reduction, a root, a lane, counts
    start_ns: int = _of(whole)
    end_ns: int = _of(whole)  # 0: it has not ended
    state: str = _of(checks.one_of(STATES))
    failure: str | None = _of(or_none(text))  # the error's class, and what a PeerTimeout said:
    phase: str | None = _of(or_none(text))
    blamed: tuple[int, ...] = _of(list_of(_rank, _MOST_RANKS))
    inside: str | None = _of(or_none(text))  # the last call made within it, if it did not end well


@dataclass(frozen=True)
class Flight:
    """One rank's file. `communicator` is the same on all of its ranks; it is empty if they never met."""

    source: str
    communicator: str = _of(text)
    origin: str = _of(text)
    backend: str = _of(text)
    rank: int = _of(_rank)
    size: int = _of(within(1, _MOST_RANKS))
    host: str = _of(text)
    written: float = _of(checks.seconds)  # since 1970
    reason: str = _of(text)
    operations: tuple[Operation, ...] = _of(list_of(lambda value: _read(Operation, value, ""), RING))  # in their order


def read_flight(path: str | Path) -> Flight:
    """A file's content; ThinwireError says why it is not accepted."""
    return parse_flight(*checks.read_bytes(path))


def parse_flight(content: bytes, source: str) -> Flight:
    """As `read_flight`, of what a file holds."""
    value = checks.parse_json(content, source)
    for name, wanted in (("format", FORMAT), ("version", VERSION)):
        checks.Fields(value, source).get(name, checks.just(wanted))
    found: Flight = _read(Flight, value, source, source=source)
    if found.rank >= found.size:
        raise ThinwireError(f"{source}: rank is {found.rank}, expected one of {found.size}")
    return found
