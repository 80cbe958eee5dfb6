"""Samples of several ranks: in turn, the slowest rank's, chains without barriers, and ratios within a round."""

from __future__ import annotations

import torch

from thinwire.comm import Communicator
from thinwire.testing import run_ranks
from thinwire.tools.bench import timing
from thinwire.tools.bench.checks import Verdict
from thinwire.tools.bench.contender import Candidate, Contender
from thinwire.tools.bench.measure import measure
from thinwire.tools.bench.options import Settings


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
    everyone = timing.samples_of_ranks(comm, functions, 3, sample_seconds=8.0)
    assert timing.over_ranks(everyone, min) == {"a": [1.0] * 3, "b": [4.0] * 3}
    times = timing.over_ranks(everyone, max)
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


def _chained(comm: Communicator) -> tuple[list[str], timing.Times, list[dict[str, float]]]:
    clock, happened = _Clock(), []
    timing.time = clock  # type: ignore[assignment]
    barrier, laps = comm.barrier, timing.Laps(comm.device)

    def met() -> None:
        happened.append("barrier")
        barrier()

    comm.barrier = met  # type: ignore[method-assign]

    def call() -> None:
        happened.append("call")
        laps.start()
        # The first ones of a chain wait for a rank that comes late.
        clock.now += (2.0, 4.0, 9.0)[comm.rank] + 50.0 * (happened[-2:-1] == ["barrier"])
        laps.end("part")

    with laps.silent():
        times = timing.chained_over_ranks(comm, {"a": call}, sample_seconds=0)
    silent = laps.take()
    call()
    return happened[:-1], times, [silent, laps.take()]


def test_a_chain_is_calls_without_a_barrier_and_its_time_the_median_of_the_ranks() -> None:
    for happened, times, laps in run_ranks(_chained, 3, mode="process"):
        chain = ["barrier"] + ["call"] * (timing._FILLING + timing._LEAST_CHAIN)
        assert happened == ["call"] + chain * timing._CHAINS
        assert times == {"a": [4.0] * timing._CHAINS}
        assert [list(parts) for parts in laps] == [[], ["part"]]  # of the one call that was not silent


def _round_of_three(comm: Communicator) -> tuple[timing.Times, ...]:
    clock = _Clock()
    timing.time = clock  # type: ignore[assignment]
    laps = timing.Laps(comm.device)

    def call() -> dict[str, torch.Tensor]:
        laps.start()
        clock.now += (1.0, 3.0, 4.0)[comm.rank]
        laps.end("a/none dispatch", "a/none moe")
        return {}

    sent = {"dispatch": 1.0, "moe": 1.0}
    contender = Contender("a", "none", None, call, lambda *_: Verdict(0, 0.0, 0.0), sent)
    settings = Settings(iterations=2, sample_seconds=0, check=False)
    found = measure(comm, [Candidate("a", "none", None, lambda: contender)], settings, laps)
    return found.samples, found.fastest, found.periods


def test_a_contender_has_the_times_of_the_slowest_rank_of_the_fastest_and_in_a_chain() -> None:
    for samples, fastest, periods in run_ranks(_round_of_three, 3, mode="process"):
        assert samples == {"a/none dispatch": [4.0] * 2, "a/none moe": [4.0] * 2}
        assert fastest == {"a/none dispatch": [1.0] * 2, "a/none moe": [1.0] * 2}
        assert periods == {"a/none": [3.0] * timing._CHAINS}


def test_ratios_are_medians_of_the_ratios_within_rounds() -> None:
    # Of the medians it would be 2 / 4; the last round has one time only.
    assert timing.median_ratio([1.0, 2.0, 9.0, 7.0], [4.0, 8.0, 3.0]) == 0.25
