"""Settings between ranks: JSON of an expected shape. Nothing that arrives is ever run.

A shape is one of:

| shape | fits |
|---|---|
| `str`, `bool`, `None` | that type, exactly |
| `int` | an int of 64 bits, with its sign |
| `float` | a finite number, of either type |
| `A | B` | what fits one of them; of the types above |
| `OneOf(shape, ...)` | what fits one of them |
| `[shape]` | a list of any length of what fits |
| `(shape, shape)` | a list of that length |
| `{str: shape}` | an object whose values fit |
"""

from __future__ import annotations

import json
import math
import reprlib
from types import NoneType, UnionType
from typing import Any

from thinwire.errors import ThinwireError

__all__ = ["MOST_BYTES", "MOST_TEXT", "OneOf", "decode", "encode", "parse", "unique_keys"]

#: Of one rank's message.
MOST_BYTES = 1 << 20
#: Characters of an error that peers are told; the rest is cut, as a message that cannot be sent would tell nothing.
MOST_TEXT = 10_000

_MOST_DIGITS = 40  # of a number; the longest float64 has 24 characters, and long ones take long to read


class OneOf:
    """The shape of what fits one of these."""

    def __init__(self, *shapes: Any) -> None:
        self.shapes = shapes


def encode(value: object, shape: Any) -> bytes:
    """JSON of a value that has the shape; tuples become lists.

    Raises:
        TypeError: the value has another shape.
        ThinwireError: the message would be longer than MOST_BYTES.

    >>> encode((1, None), (int, str | None))
    b'[1,null]'
    """
    if not _fits(value, shape):
        raise TypeError(f"{repr(value)[:80]} cannot be sent to peers as {_describe(shape)}")
    message = json.dumps(value, separators=(",", ":")).encode()
    if len(message) > MOST_BYTES:
        raise ThinwireError(f"data of {len(message)} bytes; at most {MOST_BYTES} can be sent to peers")
    return message


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict, for `object_pairs_hook`; ValueError for a key that appears twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {reprlib.repr(key)} appears twice in an object")
        found[key] = value
    return found


def parse(octets: bytes) -> Any:
    """JSON of any shape; ValueError where it is none, not UTF-8, nested too deep, or has keys twice or long numbers."""
    try:
        return json.loads(
            octets.decode(),  # json would guess at UTF-16 and UTF-32
            object_pairs_hook=unique_keys,
            parse_int=lambda digits: int(_bounded(digits)),
            parse_float=lambda digits: float(_bounded(digits)),
        )
    except RecursionError as error:
        raise ValueError(str(error)) from None


def decode(message: bytes, shape: Any, source: str) -> Any:
    """The value that `encode` was given.

    Args:
        shape: the shape that it must have.
        source: who sent it, for messages.

    Raises:
        ThinwireError: it is not accepted: no JSON, not UTF-8, duplicate keys, numbers that are not finite or too long,
            nested too deep, or of another shape.

    >>> decode(b"[1,null]", (int, str | None), "rank 3")
    [1, None]
    >>> decode(b"[1]", [str], "rank 3")
    Traceback (most recent call last):
    thinwire.errors.ThinwireError: rank 3 sent '[1]', expected [str, ...]
    """
    try:
        value = parse(message)
    except ValueError as error:
        raise ThinwireError(f"{source} sent {len(message)} bytes that are not JSON: {error}") from None
    if not _fits(value, shape):
        text = message[:80].decode(errors="replace")
        raise ThinwireError(f"{source} sent {text!r}{'...' * (len(message) > 80)}, expected {_describe(shape)}")
    return value


def _bounded(digits: str) -> str:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return digits


def _fits(value: object, shape: Any) -> bool:
    if isinstance(shape, OneOf | UnionType):
        return any(_fits(value, one) for one in (shape.shapes if isinstance(shape, OneOf) else shape.__args__))
    if isinstance(shape, dict):
        (inner,) = shape.values()
        return isinstance(value, dict) and all(type(key) is str and _fits(item, inner) for key, item in value.items())
    if isinstance(shape, list | tuple):
        if not isinstance(value, list | tuple) or (isinstance(shape, tuple) and len(value) != len(shape)):
            return False
        return all(map(_fits, value, shape if isinstance(shape, tuple) else shape * len(value)))
    if shape is float and type(value) is float:
        return math.isfinite(value)
    if shape in (int, float):
        return type(value) is int and -(2**63) <= value < 2**63
    return type(value) is (NoneType if shape is None else shape)


def _describe(shape: Any) -> str:
    if isinstance(shape, OneOf):
        return " or ".join(map(_describe, shape.shapes))
    if isinstance(shape, dict):
        return f"{{str: {_describe(*shape.values())}}}"
    if isinstance(shape, list | tuple):
        inner = ", ".join(map(_describe, shape))
        return f"[{inner}, ...]" if isinstance(shape, list) else f"[{inner}]"
    return shape.__name__ if isinstance(shape, type) else str(shape)
