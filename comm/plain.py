"""What ranks tell each other of settings: JSON of an expected shape. Nothing that arrives is ever run.

A shape is one of:

| shape | fits |
|---|---|
| `str`, `int`, `float`, `bool`, `None` | that type, exactly; `float` takes an int too |
| `A | B` | what fits one of them; of the types above |
| `[shape]` | a list of any length of what fits |
| `(shape, shape)` | a list of that length |
| `{str: shape}` | an object whose values fit |
"""

from __future__ import annotations

import json
from types import UnionType
from typing import Any

from thinwire.errors import ThinwireError

__all__ = ["MOST_BYTES", "decode", "encode", "unique_keys"]

#: Of one rank's message.
MOST_BYTES = 1 << 20


def encode(value: object) -> bytes:
    """JSON of a value made of what shapes have; tuples become lists.

    Raises:
        TypeError, ValueError: something else.
    """
    return json.dumps(value, separators=(",", ":")).encode()


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict, for `object_pairs_hook`; ValueError for a key that is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is there twice in an object")
    return found


def decode(message: bytes, shape: Any, source: str) -> Any:
    """What `encode` was given.

    Args:
        shape: that it must have.
        source: who sent it, for people.

    Raises:
        ThinwireError: it is something else.
    """
    try:
        value = json.loads(message, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:  # of text that is not JSON, not UTF-8, or nested without end
        raise ThinwireError(f"{source} sent {len(message)} bytes that are not JSON: {error}") from None
    if not _fits(value, shape):
        text = message[:80].decode(errors="replace")
        raise ThinwireError(f"{source} sent {text!r}{'...' * (len(message) > 80)}, expected {_describe(shape)}")
    return value


def _fits(value: object, shape: Any) -> bool:
    if isinstance(shape, UnionType):
        return any(_fits(value, None if kind is type(None) else kind) for kind in shape.__args__)
    if shape is None or isinstance(shape, type):
        return value is None if shape is None else type(value) is shape or (shape is float and type(value) is int)
    if isinstance(shape, dict):
        (inner,) = shape.values()
        return isinstance(value, dict) and all(_fits(item, inner) for item in value.values())
    if not isinstance(value, list):
        return False
    if isinstance(shape, list):
        return all(_fits(item, shape[0]) for item in value)
    return len(value) == len(shape) and all(map(_fits, value, shape))


def _describe(shape: Any) -> str:
    if isinstance(shape, dict):
        return f"{{str: {_describe(*shape.values())}}}"
    if isinstance(shape, list | tuple):
        inner = ", ".join(map(_describe, shape))
        return f"[{inner}, ...]" if isinstance(shape, list) else f"[{inner}]"
    return shape.__name__ if isinstance(shape, type) else str(shape)
