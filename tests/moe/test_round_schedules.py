"""Random rounds of the direct transport on real ranks give what plain torch gives, whatever the ranks' pace."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.pulled import on_board
from tests.helpers.speeds import exhaustive_but
from thinwire.testing import RankError, run_ranks
from thinwire.triton_kernels.compat import HAS_TRITON
from thinwire.triton_kernels.cpu import HAS_NUMBA
from thinwire.triton_kernels.cpu.lane import PulledLane
from thinwire.triton_kernels.cpu.lines import board_bytes, board_words
from thinwire.triton_kernels.round_layout import ABANDONED, COMBINE, DISPATCH, WITH_SUMS
from verification.soak.schedules import PULLED_KERNELS, SCHEDULES, Schedule, run, run_rank

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


def _without_wait(phase: int, rounds: Any) -> None:
    wait = rounds.await_peers
    rounds.await_peers = lambda channel, wanted, number, which, *others: (
        None if which == phase else wait(channel, wanted, number, which, *others)
    )


def _early(name: str, rounds: Any) -> None:
    """Puts lines before what they name is there."""
    kernels, apart = rounds.kernels, _BoardApart(rounds)
    kernel = getattr(kernels, name)

    def early(lane: PulledLane, *others: Any) -> None:
        kernels.tell(lane, others[-1] if name == "send_tokens" else WITH_SUMS)
        time.sleep(0.005)
        kernel(on_board(lane, apart.address), *others)

    rounds.kernels = SimpleNamespace(**{**{each: getattr(kernels, each) for each in PULLED_KERNELS}, name: early})


class _BoardApart:
    """A board like that of some rounds, on which nobody reads lines."""

    def __init__(self, rounds: Any) -> None:
        num_bytes = board_bytes(rounds.world, len(rounds.lanes))
        self.memory = torch.zeros(rounds.world, num_bytes, dtype=torch.uint8)
        self.heaps = torch.tensor([memory.data_ptr() for memory in self.memory])
        self.words = board_words(self.heaps.data_ptr(), rounds.world, rounds.rank, len(rounds.lanes))
        self.address = self.words.ctypes.data


def _sums_that_are_none(rounds: Any) -> None:
    """Announces sums in a round that it abandons."""
    kernels = rounds.kernels
    others = {name: getattr(kernels, name) for name in PULLED_KERNELS}
    others["tell"] = lambda lane, word: kernels.tell(lane, WITH_SUMS if word == ABANDONED else word)
    rounds.kernels = SimpleNamespace(**others)


@pytest.mark.parametrize(
    "change",
    [
        partial(_without_wait, DISPATCH),
        partial(_without_wait, COMBINE),
        partial(_early, "send_tokens"),
        partial(_early, "send_sums"),
        _sums_that_are_none,
    ],
    ids=["no-wait-for-tokens", "no-wait-for-sums", "early-tokens", "early-sums", "sums-that-are-none"],
)
@pytest.mark.parametrize("poison", exhaustive_but(["own"], ["barriers", "own"]))
def test_what_is_out_of_order_shows(change: Callable[[Any], None], poison: str) -> None:
    schedule = Schedule("broken on purpose", 3, "thread", poison)
    with pytest.raises(RankError) as caught:
        # The others give up soon on the one that found something.
        run_ranks(run_rank, 3, schedule, secrets.randbits(31), 200, change, 0.5, mode="thread", timeout=60)
    first = next(iter(caught.value.failures.values()))
    print(first)
    # A result that differs, or lines of another round: those of one that was to be refused among them.
    shows = ("AssertionError", "all ranks of a round need the same dtype", "refused what dispatch was given there")
    assert any(words in first for words in shows), first
