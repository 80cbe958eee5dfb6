"""What `make test` leaves to `make test-all` is left on purpose."""

from __future__ import annotations

import pytest

from tests.helpers.speeds import exhaustive_but


def test_all_values_stay_and_those_that_are_not_kept_are_marked() -> None:
    one, two, three = exhaustive_but([2], (1, 2, 3))
    assert two == 2
    assert (one.values, three.values) == ((1,), (3,))
    assert {mark.name for param in (one, three) for mark in param.marks} == {"exhaustive"}


@pytest.mark.parametrize("kept", [[], [4], [1, 4]], ids=str)
def test_what_is_kept_must_be_there(kept: list[int]) -> None:
    with pytest.raises(ValueError, match="expected values to keep that are among"):
        exhaustive_but(kept, (1, 2, 3))
