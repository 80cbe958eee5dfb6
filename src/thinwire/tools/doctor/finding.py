"""What a look at one thing found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import ThinwireError

MARKS = ("ok", "info", "note", "problem")


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        mark: "ok"; "info": not there, or told already; "note": worth knowing; "problem": broken, and it should work.
        name: what was looked at.
        text: what was found.
        advice: what to do about it; every problem has some.
    """

    mark: str
    name: str
    text: str
    advice: str = ""

    def __post_init__(self) -> None:
        if self.mark not in MARKS:
            raise ThinwireError(f"mark is {self.mark!r}, expected one of {', '.join(MARKS)}")
        if self.mark == "problem" and not self.advice:
            raise ThinwireError(f"the problem {self.name!r} has no advice")


def judged(fine: bool, name: str, text: str, advice: str) -> Finding:
    """What is ok, or else a note with advice."""
    return Finding("ok", name, text) if fine else Finding("note", name, text, advice)


def gib(num_bytes: int) -> str:
    """Bytes for people.

    >>> gib(3 << 29), gib(5 << 20), gib(8192)
    ('1.5 GiB', '5.0 MiB', '8.0 KiB')
    """
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"


def read_text(path: str | Path) -> str:
    """What the file holds; empty where it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
