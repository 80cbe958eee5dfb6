"""Which tests `make test` leaves to `make test-all`: those that are marked `exhaustive`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

__all__ = ["exhaustive_but"]


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
