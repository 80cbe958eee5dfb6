"""Refused calls as rows of tables: all rows of a table run in one world of ranks, and each has a report of its own.

A row is a call, the type of its error, words of its message, in which " ... " stands for any text, and what stands in
turn for "_" in the call and the words, if there is any. It makes a report for each. The call is text, of one or several
statements, and has the names that the table's `Ground` gives:

    ("all_gather(x, wire=_)", WireFormatError, "unknown wire format _", "'int7'", "7"),
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from thinwire.comm import Communicator
from thinwire.errors import ThinwireError
from thinwire.testing import run_ranks

Row = tuple[str, type[Exception], str]
Answer = tuple[type[Exception] | None, str]


class Ground(NamedTuple):
    """What the calls of a table start from: names, and an ordinary call, which gives what it should."""

    names: dict[str, Any]
    go_on: Callable[[], object]
    alone: bool  # whether a call must be refused before anything is sent to peers


def expand(*rows: tuple[Any, ...]) -> list[Row]:
    """The rows of a table, each with one call."""
    return [
        (re.sub(r"\b_\b", lambda _: odd, call), kind, re.sub(r"\b_\b", lambda _: odd, words))  # noqa: B023
        for call, kind, words, *several in rows
        for odd in several or ["_"]
    ]


def answers(make: Callable[..., Ground], size: int, rows: Iterable[Row], *of_world: object, mode: str) -> list[Any]:
    """What each call raised: a dict of answers by call for each rank, and one of calls by one rank alone."""
    calls = list(dict.fromkeys(call for call, *_ in rows))
    return run_ranks(_answers, size, make, calls, *of_world, mode=mode, timeout=240)


def _answers(comm: Communicator, make: Callable[..., Ground], calls: list[str], *of_world: object) -> dict[str, Any]:
    ground = make(comm, *of_world)
    found: dict[str, list[Answer]] = {call: [] for call in calls}
    for number, call in enumerate(calls):
        for rank in (number % comm.size, None) if ground.alone else (None,):
            if rank in (None, comm.rank):  # what one rank alone refuses must not have reached its peers
                found[call].append(_answer(call, dict(ground.names)))
            try:
                ground.go_on()
            except Exception as error:
                raise AssertionError(f"the ranks did not go on after {call}") from error
    return found


def _answer(call: str, names: dict[str, Any]) -> Answer:
    try:
        exec(call, names)
    except Exception as error:
        return type(error), str(error)
    return None, "it was accepted"


def check(row: Row, found: list[dict[str, list[Answer]]]) -> None:
    """All ranks were refused this row's call, as it says."""
    call, kind, words = row
    pattern = ".*".join(map(re.escape, words.split(" ... ")))
    told = [answer for of_rank in found for answer in of_rank[call]]
    assert len(told) >= len(found)
    for raised, text in told:
        assert raised is not None and issubclass(raised, kind) and re.search(pattern, text, re.DOTALL), (raised, text)
        assert not issubclass(raised, ThinwireError) or text.replace("\n", "").isprintable(), text
