"""JSON files that may come from anywhere, read and checked field by field.

A file is trusted in nothing: its length, every field's type, length and range are checked, and text must be printable,
as it ends on somebody's terminal or page. A check is a function that gives its value, or raises `Refused` with what it
expected; `Fields` names the place. Nothing here needs torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from thinwire.errors import ThinwireError
from thinwire.files import read_regular

#: Characters of a text.
LONGEST_TEXT = 400

_LARGEST = 2**63 - 1
_T = TypeVar("_T")
Check = Callable[[object], _T]


def read_bytes(path: str | Path) -> tuple[bytes, str]:
    """What a regular file holds, of no more than `files.MOST_BYTES`, and the file's name in ASCII.

    Raises:
        ThinwireError: naming the file and what is wrong with it.
    """
    source = ascii(str(path))[1:-1]
    try:
        return read_regular(path), source
    except (OSError, ValueError) as error:
        raise ThinwireError(f"{source}: cannot be read: {error}") from None


def parse_json(content: bytes, source: str) -> object:
    """What the bytes of a file say.

    Raises:
        ThinwireError: naming the source: it is not JSON.
    """
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ThinwireError(f"{source}: not JSON: {shown(str(error))}") from None


class Refused(Exception):
    """What a field was expected to be."""


class Fields:
    """The fields of an object, each of which is asked for with a check that gives its value or raises Refused."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise ThinwireError(f"{where}: {shown(value)}, expected an object")
        self._value, self._where = value, where

    def get(self, name: str, check: Check[_T]) -> _T:
        """The field's value.

        Raises:
            ThinwireError: naming the field, which is missing or not what the check expects.
        """
        if name not in self._value:
            raise ThinwireError(f"{self._where}: no field {name!r}")
        try:
            return check(self._value[name])
        except Refused as expected:
            raise ThinwireError(f"{self._where}: {name} is {shown(self._value[name])}, expected {expected}") from None
        except ThinwireError as error:  # of an object in it
            raise ThinwireError(f"{self._where}: {name}{error}") from None


def text_of(most: int) -> Check[str]:
    """Printable text of so many characters at most."""

    def check(value: object) -> str:
        if not isinstance(value, str) or len(value) > most or not value.isprintable():
            raise Refused(f"printable text of at most {most} characters")
        return value

    return check


def just(wanted: object) -> Check[object]:
    """The value itself."""

    def check(value: object) -> object:
        if type(value) is not type(wanted) or value != wanted:
            raise Refused(f"{wanted!r}, the one that can be read")
        return value

    return check


def one_of(accepted: tuple[str, ...]) -> Check[str]:
    """One of some words."""

    def check(value: object) -> str:
        if value not in accepted:
            raise Refused(f"one of {', '.join(accepted)}")
        return str(value)

    return check


def number(what: str, most: float) -> Check[float]:
    """An int or float from 0 to below `most`; `what` says of what, in errors."""

    def check(value: object) -> float:
        if type(value) not in (int, float) or not 0 <= value < most:  # type: ignore[operator]
            raise Refused(what)
        return float(value)  # type: ignore[arg-type]

    return check


def within(least: int, most: int) -> Check[int]:
    """An int of a range."""

    def check(value: object) -> int:
        if type(value) is not int or not least <= value <= most:
            raise Refused(f"an int from {least} to {most}")
        return value

    return check


text = text_of(LONGEST_TEXT)
seconds = number("a number of seconds", 1e12)
whole, signed = within(0, _LARGEST), within(-_LARGEST, _LARGEST)


def or_none(check: Check[_T]) -> Check[_T | None]:
    """The same, or nothing."""
    return lambda value: None if value is None else check(value)


def list_of(check: Callable[[Any], _T], most: int) -> Check[tuple[_T, ...]]:
    """A list of so many at most."""

    def checked(value: object) -> tuple[_T, ...]:
        if not isinstance(value, list) or len(value) > most:
            raise Refused(f"a list of at most {most}")
        found = []
        for place, item in enumerate(value):
            try:
                found.append(check(item))
            except ThinwireError as error:
                raise ThinwireError(f"[{place}]{error}") from None
        return tuple(found)

    return checked


def shown(value: object) -> str:
    """The beginning of what was found, in ASCII."""
    found = ascii(value)
    return found if len(found) <= 80 else f"{found[:77]}..."
