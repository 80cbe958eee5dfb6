"""Samples of several ranks: in turn, the slowest rank's, and ratios within a round."""

from __future__ import annotations

from thinwire.comm import Communicator
from thinwire.testing import run_ranks
from thinwire.tools.bench import timing


class _Clock:
    """Time that passes only where a function says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def _sample(comm: Communicator) -> tuple[list[str], timing.Times, timing.Times]:
    clock, called = _Clock(), []
    timing.time = clock  # type: ignore[assignment]

    def spend(name: str, *seconds: float) -> None:
        called.append(name)
        clock.now += seconds[comm.rank]

    functions = {"a": lambda: spend("a", 1.0, 3.0), "b": lambda: spend("b", 5.0, 4.0)}
    times = timing.interleaved_over_ranks(comm, functions, 3, sample_seconds=8.0)
    laps = timing.Laps(comm.device)

    def parts() -> None:
        laps.start()
        clock.now += 2.0
        laps.end("first")
        clock.now += 1.0 + comm.rank
        laps.end("second")
        clock.now += 100.0  # belongs to no part

    both = {"a": functions["a"], "parts": parts}
    return called, times, timing.interleaved_over_ranks(comm, both, 2, sample_seconds=0, laps=laps)


def test_functions_run_in_turn_and_every_sample_is_the_slowest_ranks() -> None:
    first, second = run_ranks(_sample, 2)
    assert first[1:] == second[1:]
    called, times, parts = first
    assert times == {"a": [3.0] * 3, "b": [5.0] * 3}
    # One call to compile and three to learn how long it takes; then samples of 8 seconds, in turn.
    assert called == ["a"] * 4 + ["b"] * 4 + (["a"] * 3 + ["b"] * 2) * 3 + ["a"] * 3
    assert parts == {"a": [3.0] * 2, "first": [2.0] * 2, "second": [2.0] * 2}


def test_ratios_are_medians_of_the_ratios_within_rounds() -> None:
    # Of the medians it would be 2 / 4; the last round has one time only.
    assert timing.median_ratio([1.0, 2.0, 9.0, 7.0], [4.0, 8.0, 3.0]) == 0.25
