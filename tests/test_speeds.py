"""What `make test` leaves to `make test-all` is left on purpose, and parts are the whole."""

from __future__ import annotations

import pytest

from tests.helpers.speeds import exhaustive_but, part_of


def test_all_values_stay_and_those_that_are_not_kept_are_marked() -> None:
    one, two, three = exhaustive_but([2], (1, 2, 3))
    assert two == 2
    assert (one.values, three.values) == ((1,), (3,))
    assert {mark.name for param in (one, three) for mark in param.marks} == {"exhaustive"}


@pytest.mark.parametrize("kept", [[], [4], [1, 4]], ids=str)
def test_what_is_kept_must_be_there(kept: list[int]) -> None:
    with pytest.raises(ValueError, match="expected values to keep that are among"):
        exhaustive_but(kept, (1, 2, 3))


@pytest.mark.parametrize("count", [0, 1, 3, 4, 10])
def test_each_test_is_in_one_part(count: int) -> None:
    assert sorted(number for part in range(1, 5) for number in part_of(count, f"{part}/4")) == list(range(count))


@pytest.mark.parametrize("part", ["", "1", "0/4", "5/4", "1/0", "-1/4", "a/b", "1/4/2"])
def test_a_part_that_is_none_is_named(part: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"--part is '{part}'; K/N with 1 <= K <= N is needed"):
        part_of(4, part)
