"""Which tests `make test` leaves to `make test-all`: those that are marked `exhaustive`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

__all__ = ["exhaustive_but"]


def exhaustive_but(kept: Collection[object], values: Iterable[object]) -> list[Any]:
    """Values of one parameter, or tuples for several, of which `make test` takes only those in `kept`.

    Raises:
        ValueError: what is kept is nothing, or not among them, as after a change of name.
    """
    values = list(values)
    unknown = [value for value in kept if value not in values]
    if unknown or not kept:
        raise ValueError(f"expected values to keep that are among {values}, got {kept}")
    return [value if value in kept else _marked(value) for value in values]


def _marked(value: object) -> Any:
    return pytest.param(*(value if type(value) is tuple else (value,)), marks=pytest.mark.exhaustive)
