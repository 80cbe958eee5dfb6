"""What the matrix of faults holds, and what must come of each cell. The rules are here, and nowhere else.

A cell is an operation over a transport, a fault, and the rank that it happens to. What must come of it follows from
docs/reliability.md and the docstrings: nothing here was taken from a run.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import Enum

__all__ = ["Cell", "Outcome", "cells", "expected", "known_defect", "left_out"]

WORLD = 3
VICTIMS = (0, 2)
STAGED, DIRECT, STAGED_THREADS, DIRECT_THREADS = "staged", "direct", "threads, staged", "threads, direct"
TRANSPORTS = (STAGED, DIRECT, STAGED_THREADS, DIRECT_THREADS)
ROUND, ALL_TO_ALL, ALL_REDUCE, ALL_GATHER, BARRIER = OPERATIONS = (
    "dispatch and combine",
    "all_to_all_v",
    "all_reduce",
    "all_gather",
    "barrier",
)
KILLED_BEFORE, KILLED_DURING, KILLED_AFTER = "killed before the call", "killed during it", "killed after it"
STOPPED_SHORTLY, STOPPED = "stopped for less than the timeout", "stopped for longer"
RAISES, EXITS, SIGINT, SIGTERM = "raises", "exits", "SIGINT", "SIGTERM"
OTHER_SETTINGS, OTHER_SIZES, OTHER_OPERATION = "other settings", "other sizes", "another operation"
OUT_OF_MEMORY = "no memory left"
FAULTS = (
    KILLED_BEFORE, KILLED_DURING, KILLED_AFTER, STOPPED_SHORTLY, STOPPED, RAISES, EXITS, SIGINT, SIGTERM,
    OTHER_SETTINGS, OTHER_SIZES, OTHER_OPERATION, OUT_OF_MEMORY,
)  # fmt: skip
DEVIATIONS = (OTHER_SETTINGS, OTHER_SIZES, OTHER_OPERATION)
_OF_A_PROCESS = (KILLED_BEFORE, KILLED_DURING, KILLED_AFTER, SIGINT, SIGTERM, OUT_OF_MEMORY)


class Outcome(Enum):
    """What must come of a cell, in words for the table.

    In all but RIGHT and those that say so, the ranks that are left go on by `shrink` or `rebuild`.
    """

    RIGHT = "all results are right"
    LOST = "the others name it"
    RIGHT_OR_LOST = "the others name it, once they miss it"
    CONFIG = "ConfigMismatch everywhere, and all may go on"
    COUNTS = "CountsError everywhere, and all may go on"
    OTHERS = "CountsError everywhere, ConfigMismatch at it, and all may go on"
    ROUTING = "RoutingError everywhere, and all may go on"
    NOBODY_LOST = "PeerTimeout everywhere, which names nobody"

    @property
    def loses(self) -> bool:
        """Whether the others go on without the rank."""
        return self in (Outcome.LOST, Outcome.RIGHT_OR_LOST)

    @property
    def error(self) -> str:
        """What is raised, "" for nothing."""
        names = {
            Outcome.RIGHT: "", Outcome.CONFIG: "ConfigMismatch", Outcome.COUNTS: "CountsError",
            Outcome.OTHERS: "CountsError", Outcome.ROUTING: "RoutingError",
        }  # fmt: skip
        return names.get(self, "PeerTimeout")


@dataclass(frozen=True)
class Cell:
    """One fault, and where it happens."""

    transport: str
    operation: str
    fault: str
    victim: int

    @property
    def threads(self) -> bool:
        """Whether ranks are threads of one process."""
        return self.transport in (STAGED_THREADS, DIRECT_THREADS)

    @property
    def direct(self) -> bool:
        """Whether kernels store into the memory of others."""
        return self.transport in (DIRECT, DIRECT_THREADS)

    @property
    def survived(self) -> bool:
        """Whether all three ranks are there afterwards."""
        return not expected(self).loses

    def __str__(self) -> str:
        return f"{self.transport}: {self.operation}, rank {self.victim}: {self.fault}"


_KNOWN: dict[Cell, str] = {}


def expected(cell: Cell) -> Outcome:
    """What must come of a cell.

    - A rank that is gone before its call, or stands still in the others' way, is missed in that very call.
    - One that is gone later may have done its part, so the others may miss it one call later.
    - Where all ranks are there and disagree, nobody is lost. Constructors compare settings, a dispatch that one rank
      refuses is refused everywhere, and the direct transport compares what calls of one kind say of themselves.
    """
    match cell.fault:
        case "stopped for less than the timeout":
            return Outcome.RIGHT
        case "killed before the call" | "raises" | "exits":
            return Outcome.LOST
        case "other settings" if cell.operation == ROUND:
            return Outcome.CONFIG
        case "other sizes" if cell.operation == ROUND:
            return Outcome.ROUTING
        case "other settings" | "other sizes" if cell.direct:
            return Outcome.COUNTS if cell.operation == ALL_TO_ALL else Outcome.CONFIG
        case "another operation" if cell.direct and cell.operation in (ALL_REDUCE, ALL_GATHER):
            return Outcome.CONFIG
        case "another operation" if cell.direct and cell.operation == ALL_TO_ALL:
            return Outcome.OTHERS
        case "other settings" | "other sizes" | "another operation":
            return Outcome.NOBODY_LOST
    return Outcome.RIGHT_OR_LOST


def reason_left_out(cell: Cell) -> str | None:
    """Why there is no such cell, if there is none."""
    if cell.operation == BARRIER and cell.direct:
        return "a barrier goes through the process group, or between threads, whatever the transport"
    if cell.operation == BARRIER and cell.fault in (OTHER_SETTINGS, OTHER_SIZES):
        return "a barrier has no settings and no sizes"
    if cell.operation == BARRIER and cell.fault == OUT_OF_MEMORY:
        return "a barrier needs no memory that could be short"
    if cell.threads and cell.fault in _OF_A_PROCESS:
        return "a thread cannot be killed, and signals and limits of memory are for the whole process"
    return None


def _all() -> list[Cell]:
    return [Cell(*entry) for entry in itertools.product(TRANSPORTS, OPERATIONS, FAULTS, VICTIMS)]


def cells() -> list[Cell]:
    """All that can be, in order."""
    return [cell for cell in _all() if reason_left_out(cell) is None]


def known_defect(cell: Cell) -> str | None:
    """What keeps a cell from holding, if that is known."""
    return _KNOWN.get(cell)


def left_out() -> dict[str, int]:
    """How many cells there are not, by reason."""
    found: dict[str, int] = {}
    for cell in _all():
        reason = reason_left_out(cell)
        if reason is not None:
            found[reason] = found.get(reason, 0) + 1
    return found
