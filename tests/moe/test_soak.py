"""Some of the rounds of `make soak`, and that what it looks for shows."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

from thinwire.testing import run_ranks
from verification.soak.rounds import WORLD, Sample, growth, is_level, run_rank


@pytest.mark.exhaustive
def test_many_rounds_are_right_and_leave_nothing_behind() -> None:
    by_rank = run_ranks(run_rank, WORLD, 3, 3000, timeout=240)
    assert [samples[-1].rounds for samples in by_rank] == [3000] * WORLD
    assert is_level(growth(by_rank) | {"resident_mib": 0.0}, by_rank), by_rank  # memory levels off later


@pytest.mark.parametrize(
    ("change", "level"),
    [
        ({}, True),
        ({"resident_mib": 120.0}, False),
        ({"descriptors": 31}, False),
        ({"segments": 1}, False),
        ({"segments_open": 5}, False),
    ],
)
def test_what_grows_is_not_level(change: dict[str, float], level: bool) -> None:
    right = [Sample(rounds, 100.0, 30, WORLD, 0) for rounds in range(20)]
    changed = [*right[:-2], *(replace(sample, **change) for sample in right[-2:])]  # type: ignore[arg-type]
    by_rank = [right, changed]
    assert is_level(growth(by_rank), by_rank) is level
