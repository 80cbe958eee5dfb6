"""Changes of inputs that keep their form, so that what is behind a parser's first look is reached as well."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

__all__ = ["Change", "json_behind", "json_in_lines", "words_in_lines"]

#: Another input out of one.
Change = Callable[[random.Random, bytes], bytes]

#: What a field may hold that it should not, or just so.
ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 255, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**45, 0.5, -0.0, 1e308,
    float("nan"), float("inf"), "", "0", "1", "-1", " 1", "\u00b2", "\u0661", "x" * 500, "\x00", "\x1b[2J", "\ud800",
    "\u2028", "127.0.0.1", "::1", "fe80::1%lo", [], {}, [0], [[]], {"": None},
)  # fmt: skip
_WORDS = (
    *(str(each) for each in ODD if isinstance(each, str | int)),
    *("node[001-003,7]-ib,other", "node7", "[", "1" * 30, "9" * 5000, "65535", "65536", "1_000", "+1", "0x1", "١"),
)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container within, with each of its keys or positions."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, dict | list):
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            found += [(inner, key) for key in keys]
            waiting += [inner[key] for key in keys]
    return found


def changed_json(rng: random.Random, text: bytes) -> bytes:
    """JSON of other values; bytes that are none, and sometimes others, have some of them changed instead."""
    try:
        if rng.random() < 0.1:
            raise ValueError
        value = json.loads(text)
        for _ in range(rng.choice((1, 1, 2, 4))):
            value = _changed_value(rng, value)
        return json.dumps(value, ensure_ascii=rng.random() < 0.8).encode(errors="surrogatepass")
    except (ValueError, RecursionError):
        return changed_bytes(rng, text)


def _changed_value(rng: random.Random, value: Any) -> Any:
    places = _places(value)
    if not places or rng.random() < 0.05:
        return rng.choice((*ODD, [value, value], {"x": value}))
    inner, key = rng.choice(places)
    other, other_key = rng.choice(places)
    kind = rng.choice(("odd", "odd", "near", "copy", "remove", "add", "rename", "nest"))
    if kind == "odd":
        inner[key] = copy.deepcopy(rng.choice(ODD))
    elif kind == "near" and type(inner[key]) is int:
        inner[key] += rng.choice((-1, 1, 2, 2**31))
    elif kind == "near" and type(inner[key]) is str:
        inner[key] = changed_bytes(rng, inner[key].encode(errors="surrogatepass")).decode(errors="surrogateescape")
    elif kind == "copy":
        inner[key] = copy.deepcopy(other[other_key])
    elif kind == "remove":
        del inner[key]
    elif kind == "add" and isinstance(inner, list):
        inner.insert(rng.randint(0, len(inner)), copy.deepcopy(other[other_key]))
    elif isinstance(inner, dict) and kind in ("add", "rename"):
        inner[rng.choice((str(other_key), str(key) + "x", "\ud800"))] = copy.deepcopy(inner[key])
        if kind == "rename":
            inner.pop(key)
    elif kind == "nest":
        for _ in range(rng.choice((1, 1, 1, 2, 2, 2, 3, 900))):
            inner[key] = [inner[key]]
    return value


def changed_bytes(rng: random.Random, octets: bytes) -> bytes:
    """Some bytes are others, or gone, or there twice."""
    found = bytearray(octets)
    for _ in range(rng.choice((1, 1, 2, 8))):
        place, length = rng.randint(0, len(found)), rng.choice((0, 1, 1, 2, 9))
        piece = rng.choice((rng.randbytes(length), found[place : place + length] * 2, b"0", b"9", b'"', b"\0", b""))
        found[place : place + length] = piece
    return bytes(found)


def json_behind(length: int) -> Change:
    """Of JSON that so many bytes precede."""

    def change(rng: random.Random, data: bytes) -> bytes:
        first = data[:length] if rng.random() < 0.8 else rng.randbytes(length)
        return first + changed_json(rng, data[length:])

    return change


def json_in_lines(rng: random.Random, data: bytes) -> bytes:
    """Of lines that are JSON."""
    lines = data.split(b"\n")
    place = rng.randrange(len(lines))
    if rng.random() < 0.1:
        lines.insert(place, rng.choice(lines))
    elif rng.random() < 0.1:
        del lines[place]
    else:
        lines[place] = changed_json(rng, lines[place])
    return b"\n".join(lines)


def words_in_lines(rng: random.Random, data: bytes) -> bytes:
    """Of lines that are NAME=VALUE."""
    lines = data.split(b"\n")
    place = rng.randrange(len(lines))
    name, _, value = lines[place].partition(b"=")
    if rng.random() < 0.2:
        del lines[place]
    elif rng.random() < 0.7:
        lines[place] = name + b"=" + rng.choice(_WORDS).encode(errors="surrogatepass")
    else:
        lines[place] = name + b"=" + changed_bytes(rng, value)
    return b"\n".join(lines)
