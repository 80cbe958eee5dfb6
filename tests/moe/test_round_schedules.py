"""Random rounds of the direct transport on real ranks give what plain torch gives, whatever the ranks' pace."""

from __future__ import annotations

import ctypes
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.helpers.speeds import exhaustive_but
from thinwire.fused.backend import RoundKernels
from thinwire.testing import RankError, run_ranks
from thinwire.triton_kernels.compat import HAS_TRITON
from thinwire.triton_kernels.cpu import HAS_NUMBA
from thinwire.triton_kernels.round_layout import (
    ABANDONED,
    COMBINE,
    DISPATCH,
    DTYPE_CODES,
    SIGNAL_DTYPE,
    SIGNAL_END,
    SIGNAL_TOKENS,
    Lane,
)
from thinwire.triton_kernels.signal import CONTROL_EPOCH, SIGNAL_FLAG, SIGNAL_LINE_BYTES
from verification.soak.schedules import SCHEDULES, Schedule, run, run_rank

pytestmark = pytest.mark.skipif(not HAS_NUMBA, reason="needs numba")
ROUNDS = 20
PROCESSES_AND_THREADS = [schedule for schedule in SCHEDULES if schedule.name.startswith(("3 processes", "2 threads"))]


@pytest.mark.parametrize(
    "schedule", exhaustive_but(PROCESSES_AND_THREADS, SCHEDULES), ids=lambda schedule: schedule.name.replace(" ", "-")
)
def test_random_rounds_give_the_oracle(schedule: Schedule) -> None:
    if schedule.interpreted and not HAS_TRITON:
        pytest.skip("needs Triton")
    seed = secrets.randbits(31)
    print(f"python -m verification.soak.schedules --only {schedule.name!r} --seed {seed} --rounds {ROUNDS}")
    seen = run(schedule, ROUNDS, seed, timeout=240)
    print(dict(seen))
    assert seen["rounds"] == schedule.rounds_of(ROUNDS) and seen["results"] > 0


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong shows: in each of these, one thing is not as the protocol wants it.


def _without_wait(phase: int, kernels: RoundKernels) -> RoundKernels:
    def wait(lane: Lane, which: int, timeout: float, grace: float) -> None:
        if which != phase:
            kernels.wait(lane, which, timeout, grace)

    return replace(kernels, wait=wait)


def _early_dispatch(kernels: RoundKernels) -> RoundKernels:
    """Signals before the tokens are there."""

    def send_tokens(lane: Lane, x: torch.Tensor, *others: object) -> None:
        epoch = int(lane.control[CONTROL_EPOCH]) + 1
        _signal(lane, DISPATCH, {SIGNAL_TOKENS: x.shape[0], SIGNAL_DTYPE: DTYPE_CODES[x.dtype], SIGNAL_FLAG: epoch})
        kernels.send_tokens(lane, x, *others)

    return replace(kernels, send_tokens=send_tokens)


def _early_combine(kernels: RoundKernels) -> RoundKernels:
    """Signals before the sums are there."""

    def send_sums(lane: Lane, *others: object) -> None:
        _signal(lane, COMBINE, {SIGNAL_END: 1, SIGNAL_FLAG: int(lane.control[CONTROL_EPOCH])})
        kernels.send_sums(lane, *others)

    return replace(kernels, send_sums=send_sums)


def _sums_that_are_none(kernels: RoundKernels) -> RoundKernels:
    """Announces sums in a round that it abandons."""

    def close_round(lane: Lane, end: int = ABANDONED) -> None:
        _signal(lane, COMBINE, {SIGNAL_END: 1, SIGNAL_FLAG: int(lane.control[CONTROL_EPOCH])})

    return replace(kernels, close_round=close_round)


def _signal(lane: Lane, phase: int, words: dict[int, int]) -> None:
    """Writes words of this rank's lines by hand, in this order, and leaves the peers some time to read them."""
    for base in lane.buffer_ptrs.tolist():
        line = base + lane.layout.SIGNALS + (phase * lane.layout.WORLD + lane.rank) * SIGNAL_LINE_BYTES
        for word, value in words.items():
            ctypes.c_int32.from_address(line + 4 * word).value = value
    time.sleep(0.005)


@pytest.mark.parametrize(
    "change",
    [
        partial(_without_wait, DISPATCH),
        partial(_without_wait, COMBINE),
        _early_dispatch,
        _early_combine,
        _sums_that_are_none,
    ],
    ids=["no-wait-for-tokens", "no-wait-for-sums", "early-tokens", "early-sums", "sums-that-are-none"],
)
@pytest.mark.parametrize("poison", exhaustive_but(["own"], ["barriers", "own"]))
def test_what_is_out_of_order_shows(change: Callable[[RoundKernels], RoundKernels], poison: str) -> None:
    schedule = Schedule("broken on purpose", 3, "thread", poison)
    with pytest.raises(RankError) as caught:
        # The others give up soon on the one that found something.
        run_ranks(run_rank, 3, schedule, secrets.randbits(31), 200, change, 0.5, mode="thread", timeout=60)
    first = next(iter(caught.value.failures.values()))
    print(first)
    # A result that differs, or lines of another round: those of one that was to be refused among them.
    shows = ("AssertionError", "all ranks of a round need the same dtype", "refused what dispatch was given there")
    assert any(words in first for words in shows), first
