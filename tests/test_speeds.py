"""What `make test` leaves to `make test-all` is left on purpose, and parts are the whole."""

from __future__ import annotations

import pytest

from tests.helpers.speeds import exhaustive_but, part_of


def test_all_values_stay_and_those_that_are_not_kept_are_marked() -> None:
    one, two, three = exhaustive_but([2], (1, 2, 3))
    assert two == 2
    assert (one.values, three.values) == ((1,), (3,))
    assert {mark.name for param in (one, three) for mark in param.marks} == {"exhaustive"}


@pytest.mark.parametrize("count", [0, 1, 3, 4, 10])
def test_each_test_is_in_one_part(count: int) -> None:
    assert sorted(number for part in range(1, 5) for number in part_of(count, f"{part}/4")) == list(range(count))
