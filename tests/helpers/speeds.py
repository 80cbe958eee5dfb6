"""Which tests `make test` leaves to `make test-all`, those that are marked `exhaustive`; and parts of the tests."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

import pytest

__all__ = ["exhaustive_but", "part_of"]


def exhaustive_but(kept: Collection[object], values: Iterable[Any], several: bool = False) -> list[Any]:
    """Values of one parameter, of which `make test` takes only those in `kept`; or tuples, each for `several`.

    Raises:
        ValueError: what is kept is nothing, or not among them, as after a change of name.
    """
    values = list(values)
    unknown = [value for value in kept if value not in values]
    if unknown or not kept:
        raise ValueError(f"expected values to keep that are among {values}, got {kept}")
    marks = pytest.mark.exhaustive
    return [
        value if value in kept else pytest.param(*(value if several else (value,)), marks=marks) for value in values
    ]


def part_of(count: int, part: str) -> range:
    """Which of `count` things are in part "K/N": every Nth, from the Kth on.

    Raises:
        pytest.UsageError: the part is none.
    """
    numbers = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part)
    if numbers is None or int(numbers[1]) > int(numbers[2]):
        raise pytest.UsageError(f"--part is {part!r}; K/N with 1 <= K <= N is needed")
    return range(int(numbers[1]) - 1, count, int(numbers[2]))
