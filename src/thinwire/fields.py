"""JSON that somebody else wrote, files and messages between ranks: checked before it is used, and never run.

A check is a function that gives a value, or raises `Refused` with what it expected. `Fields` asks the fields of an
object with one each, and names the place of what is refused. A message has a shape, see `decode`. Nothing needs torch.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar

from thinwire.errors import ThinwireError

#: Characters of a text in a file; bytes of one rank's message; characters of an error that peers are told.
LONGEST_TEXT, MOST_BYTES, MOST_TEXT = 400, 1 << 20, 10_000
LONGEST_FILE = 64 << 20  # bytes of a file that is read whole

_T = TypeVar("_T")
Check = Callable[[Any], _T]
_NEEDED: Any = object()


def read_bytes(path: str | Path, error: type[ThinwireError] = ThinwireError) -> tuple[bytes, str]:
    """What a regular file holds, of no more than LONGEST_FILE, and its name in ASCII, which errors begin with."""
    source = ascii(str(path))[1:-1]
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # such as a pipe
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        if os.path.getsize(path) > LONGEST_FILE:
            raise OSError(errno.EFBIG, f"longer than {LONGEST_FILE} bytes, the most that is read", os.fspath(path))
        return Path(path).read_bytes(), source
    except (OSError, ValueError) as why:
        raise error(f"{source}: cannot be read: {why}") from None


def parse_json(content: bytes, source: str, error: type[ThinwireError] = ThinwireError) -> Any:
    """What bytes say; an error that begins with the source where they are not JSON in UTF-8."""
    try:
        return json.loads(content.decode())  # of bytes, json would guess at UTF-16 and UTF-32
    except (ValueError, RecursionError) as why:
        raise error(f"{source}: not JSON: {shown(str(why))}") from None


class Refused(Exception):
    """What a value was expected to be."""


class Fields:
    """The fields of an object; `error` is the class of errors, which begin with `where`."""

    def __init__(self, value: object, where: str, error: type[ThinwireError] = ThinwireError) -> None:
        if not isinstance(value, Mapping):
            raise error(f"{where}: {shown(value)}, expected an object")
        self._value, self._where, self._error = value, where, error

    def get(self, names: str | tuple[str, ...], check: Check[_T], default: Any = _NEEDED) -> _T:
        """The value of the first of these names that is there, as its check gives it; else the default, if any."""
        names = (names,) if isinstance(names, str) else names
        name = next((name for name in names if name in self._value), None)
        if name is None and default is _NEEDED:
            held = ", ".join(map(str, self._value)) or "nothing"
            raise self._error(f"{self._where}: no field {' or '.join(map(repr, names))}; it has {held[:400]}")
        if name is None:
            return default
        try:
            return check(self._value[name])
        except Refused as expected:
            raise self._error(f"{self._where}: {name} is {shown(self._value[name])}, expected {expected}") from None
        except ThinwireError as error:  # of an object in it
            raise self._error(f"{self._where}: {name}{error}") from None


def that(fits: Callable[[Any], bool], expected: str) -> Check[Any]:
    """The value, if it fits."""

    def check(value: Any) -> Any:
        if not fits(value):
            raise Refused(expected)
        return value

    return check


def text_of(most: int) -> Check[str]:
    """Text of so many characters at most that can be printed on anybody's terminal."""
    told = f"printable text of at most {most} characters"
    return that(lambda value: isinstance(value, str) and len(value) <= most and value.isprintable(), told)


def just(wanted: object) -> Check[Any]:
    """The value itself."""
    return that(lambda value: type(value) is type(wanted) and value == wanted, f"{wanted!r}, the one that can be read")


def one_of(accepted: tuple[str, ...]) -> Check[str]:
    """One of some words."""
    return that(lambda value: value in accepted, f"one of {', '.join(accepted)}")


def number(what: str, most: float) -> Check[float]:
    """An int or float from 0 to below `most`; `what` says of what, in errors."""
    inside: Check[float] = that(lambda value: type(value) in (int, float) and 0 <= value < most, what)
    return lambda value: float(inside(value))


def within(least: int, most: int) -> Check[int]:
    """An int of a range."""
    return that(lambda value: type(value) is int and least <= value <= most, f"an int from {least} to {most}")


text, seconds = text_of(LONGEST_TEXT), number("a number of seconds", 1e12)
whole, signed = within(0, 2**63 - 1), within(1 - 2**63, 2**63 - 1)


def or_none(check: Check[_T]) -> Check[_T | None]:
    """The same, or nothing."""
    return lambda value: None if value is None else check(value)


def list_of(check: Check[_T], most: int, least: int = 0) -> Check[tuple[_T, ...]]:
    """A list of so many."""
    told = f"a list of {f'{least} to' if least else 'at most'} {most}"
    listed = that(lambda value: isinstance(value, list | tuple) and least <= len(value) <= most, told)

    def checked(value: Any) -> tuple[_T, ...]:
        found = []
        for place, item in enumerate(listed(value)):
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


class OneOf:
    """The shape of what fits one of some shapes."""

    def __init__(self, *shapes: Any) -> None:
        self.shapes = shapes

    def __repr__(self) -> str:
        return " or ".join(map(repr, self.shapes))


def encode(value: object, shape: Any) -> bytes:
    """The JSON of a value, for peers; tuples become lists.

    Raises:
        TypeError: the value has another shape.
        ThinwireError: the message would be longer than MOST_BYTES.
    """
    if not _fits(value, shape):
        raise TypeError(f"{shown(value)} cannot be sent to peers as {_told(shape)}")
    message = json.dumps(value, separators=(",", ":")).encode()
    if len(message) > MOST_BYTES:
        raise ThinwireError(f"data of {len(message)} bytes; at most {MOST_BYTES} can be sent to peers")
    return message


def decode(message: bytes, shape: Any, source: str) -> Any:
    """The value that `encode` was given by `source`.

    A shape is `str`, `bool`, `int` of 64 bits, finite `float`; None; `A | B` of these; `OneOf(shape, ...)`; `[shape]`,
    a list of any length; `(shape, shape)`, a list of that length; `{str: shape}`, an object of such values.

    Raises:
        ThinwireError: naming the source: it is not JSON, or has another shape.

    >>> decode(encode((1, None), (int, str | None)), (int, str | None), "rank 3")
    [1, None]
    >>> decode(b"[1]", [str], "rank 3")
    Traceback (most recent call last):
    thinwire.errors.ThinwireError: rank 3 sent [1], expected [str]
    """
    value = parse_json(message, f"{source} sent {len(message)} bytes")
    if not _fits(value, shape):
        raise ThinwireError(f"{source} sent {shown(value)}, expected {_told(shape)}")
    return value


def _fits(value: Any, shape: Any) -> bool:
    if isinstance(shape, OneOf | UnionType):
        return any(_fits(value, one) for one in (shape.shapes if isinstance(shape, OneOf) else shape.__args__))
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(type(key) is str and _fits(value[key], shape[str]) for key in value)
    if isinstance(shape, list | tuple):
        shapes = shape * len(value) if isinstance(shape, list) and isinstance(value, list | tuple) else shape
        return isinstance(value, list | tuple) and len(value) == len(shapes) and all(map(_fits, value, shapes))
    if shape in (int, float) and type(value) is int:
        return -(2**63) <= value < 2**63
    if type(value) is float:
        return shape is float and math.isfinite(value)
    return type(value) is (NoneType if shape is None else shape)


def _told(shape: Any) -> str:
    return re.sub(r"<class '(\w+)'>", r"\1", repr(shape))
