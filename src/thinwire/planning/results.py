"""What `thinwire bench --json` wrote, checked: the file may come from anywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import ArgumentError

FORMAT, VERSION = "thinwire bench", 1
_MOST_BYTES, _MOST_FIGURES, _LONGEST_TEXT = 64 << 20, 100_000, 200


@dataclass(frozen=True)
class Figure:
    """One measured point.

    Attributes:
        wire_bytes: that leave a rank, on average.
        seconds: the median over iterations, each that of the slowest rank.
    """

    operation: str
    implementation: str
    wire: str
    transport: str | None
    routing: str | None
    wire_bytes: float
    seconds: float


@dataclass(frozen=True)
class Results:
    """A file's content, as far as plans need it."""

    source: str
    ranks: int
    hosts: int
    figures: tuple[Figure, ...]


def read_results(path: str | Path) -> Results:
    """What a file holds.

    Raises:
        ArgumentError: naming the file, the field that cannot be, and what is expected.
        OSError: it cannot be read.
    """
    source = ascii(str(path))[1:-1]
    with open(path, "rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ArgumentError(f"{source}: longer than {_MOST_BYTES} bytes, the most that is read")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{source}: not JSON: {ascii(str(error))[:80]}") from None
    _field(value, source, "format", lambda held: held == FORMAT, repr(FORMAT))
    _field(value, source, "version", lambda held: type(held) is int and held == VERSION, str(VERSION))
    figures = _field(
        value, source, "figures", lambda held: isinstance(held, list) and len(held) <= _MOST_FIGURES,
        f"a list of at most {_MOST_FIGURES}",
    )  # fmt: skip
    return Results(
        source,
        _field(value, source, "ranks", _is_count, "an int from 1 to 65536"),
        _field(value, source, "hosts", _is_count, "an int from 1 to 65536"),
        tuple(_figure(figure, f"{source}: figures[{place}]") for place, figure in enumerate(figures)),
    )


def _figure(value: object, where: str) -> Figure:
    def text(name: str) -> Any:
        return _field(value, where, name, _is_text, "printable text")

    def text_or_none(name: str) -> Any:
        return _field(value, where, name, lambda held: held is None or _is_text(held), "printable text or null")

    return Figure(
        text("operation"),
        text("implementation"),
        text("wire"),
        text_or_none("transport"),
        text_or_none("routing"),
        float(_field(value, where, "wire_bytes", lambda held: _is_number(held, 0), "a number from 0 to 1e18")),
        float(
            _field(
                _field(value, where, "seconds", lambda held: isinstance(held, dict), "an object"),
                f"{where}: seconds",
                "median",
                lambda held: _is_number(held, 1e-12),
                "a number from 1e-12 to 1e18",
            )  # fmt: skip
        ),
    )


def _field(value: object, where: str, name: str, accepts: Callable[[Any], bool], expected: str) -> Any:
    if not isinstance(value, dict):
        raise ArgumentError(f"{where} is {_shown(value)}, expected an object")
    if name not in value:
        raise ArgumentError(f"{where}: no field {name!r}, expected {expected}")
    if not accepts(value[name]):
        raise ArgumentError(f"{where}: {name} is {_shown(value[name])}, expected {expected}")
    return value[name]


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= 1 << 16


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_TEXT and value.isprintable()


def _is_number(value: Any, least: float) -> bool:
    return type(value) in (int, float) and least <= value <= 1e18


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
