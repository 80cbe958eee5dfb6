"""An exception from outside in a round ends the communicator at that rank, and its peers name it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

import torch

import thinwire as tw
from thinwire.comm.call import Call
from thinwire.comm.communicator import Communicator
from thinwire.errors import LaneError, PeerTimeout, ThinwireError
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks
from thinwire.triton_kernels.signal import CONTROL_STATUS, TIMED_OUT

TOKENS, HIDDEN = 40, 32


class Interrupted(Exception):
    """What a signal handler might raise."""


def _both(comm: Communicator, timeout: float = 20.0, transport: str = "direct") -> ExpertParallel:
    return ExpertParallel(comm, 2, 1, HIDDEN, TOKENS, wire="none", transport=transport, timeout=timeout)


def _tokens(comm: Communicator, value: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All of them for the other rank's expert."""
    return torch.full((TOKENS, HIDDEN), float(value)), torch.full((TOKENS, 1), 1 - comm.rank), torch.ones(TOKENS, 1)


def _ctrl_c(comm: Communicator, transport: str) -> Any:
    """Rank 0 is interrupted while it waits for rank 1's sums, which come late."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    signal.signal(signal.SIGALRM, handler)
    short = comm.split(groups=[[0, 1]])
    short._exchange.timeout = 1.5
    with _both(short, 1.5, transport) as ep:
        d = ep.dispatch(*_tokens(comm, 1))
        assert ep.combine(d.tokens, d).unique().tolist() == [1.0]
        d = ep.dispatch(*_tokens(comm, 2))
        if comm.rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            start = time.monotonic()
            with pytest.raises(Interrupted):
                ep.combine(d.tokens, d)
            assert time.monotonic() - start < 1.2  # the timeout is 1.5
            for call in (lambda: ep.dispatch(*_tokens(comm, 3)), short.barrier):
                with pytest.raises(ThinwireError, match="has ended at this rank, as Interrupted came in the middle"):
                    call()
            return comm.all_gather_data(0, int)  # another communicator is not touched
        time.sleep(0.6)
        ep.combine(d.tokens * 2, d) if transport == "direct" else None  # its rows are here, and rank 0's sums
        with pytest.raises(PeerTimeout) as caught:
            ep.dispatch(*_tokens(comm, 3))
        assert caught.value.ranks == (0,)
        assert short.shrink().size == 1
        return comm.all_gather_data(1, int)


@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_a_signal_in_a_wait_for_sums_ends_the_communicator_and_names_the_rank(transport: str) -> None:
    assert run_ranks(_ctrl_c, 2, transport) == [[0, 1]] * 2


def _closed_in_its_wait(comm: Communicator, by: str) -> None:
    ep = _both(comm)
    ep.dispatch(*_tokens(comm, 1)).abandon()
    comm.barrier()
    if comm.rank == 1:
        comm.exchange_counts([0, 0])  # and never dispatches
        return

    def close(*_: object) -> None:
        ep.close()

    if by == "a signal handler":
        signal.signal(signal.SIGALRM, close)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
    else:
        threading.Timer(0.1, close).start()
    with pytest.raises(LaneError, match="was closed while this call was under way"):
        ep.dispatch(*_tokens(comm, 2))
    comm.exchange_counts([0, 0])


@pytest.mark.parametrize("by", ["a signal handler", "another thread"])
def test_who_closes_it_while_a_dispatch_waits_ends_that(by: str) -> None:
    run_ranks(_closed_in_its_wait, 2, by, timeout=15)


def _closed_before_its_wait_ends(comm: Communicator) -> None:
    ep = _both(comm)
    rounds: Any = ep._assembly.rounds
    seen: list[bool] = []

    class Noted(list[Any]):
        def __iter__(self) -> Any:
            seen.append(rounds.closed)  # where the waits are ended
            return super().__iter__()

    rounds.lanes, rounds._waits = Noted(rounds.lanes), True  # as if another thread were waiting
    controls = [lane.control for lane in rounds.lanes]
    seen.clear()
    ep.close()
    assert seen == [True] and all(int(control[CONTROL_STATUS]) == TIMED_OUT for control in controls)


def test_a_wait_that_a_close_ends_sees_that_it_was_closed() -> None:
    run_ranks(_closed_before_its_wait_ends, 1)


def _finish_that_has_not_begun(comm: Communicator, transport: str) -> None:
    with _both(comm, transport=transport) as ep:
        d = ep.dispatch(*_tokens(comm, 1 + comm.rank))
        started = ep.combine_start(d.tokens * 2, d)
        if comm.rank == 0:
            rounds: Any = ep._assembly.rounds
            place, rounds.place = rounds.place, _interrupts
            with pytest.raises(Interrupted):
                ep.combine_finish(started)
            rounds.place = place
        assert ep.combine_finish(started).unique().tolist() == [2.0 + 2 * comm.rank]
        again = ep.dispatch_start(*_tokens(comm, 3))
        if comm.rank == 0:
            rounds.place = _interrupts
            with pytest.raises(Interrupted):
                ep.dispatch_finish(again)
            rounds.place = place
        d = ep.dispatch_finish(again)
        assert ep.combine(d.tokens, d).unique().tolist() == [3.0]


def _interrupts(*_: object) -> None:
    raise Interrupted


@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_a_finish_that_is_interrupted_before_it_begins_can_be_repeated(transport: str) -> None:
    """Else the leg would be lost, and this rank's next one would overwrite what its peer still reads."""
    run_ranks(_finish_that_has_not_begun, 2, transport, mode="thread", timeout=60)


LEGS: dict[str, Callable[[ExpertParallel, Any, Any], object]] = {
    "abandon": lambda ep, d, _: d.abandon(),
    "dispatch_finish": lambda ep, _, started: ep.dispatch_finish(started),
}


@pytest.mark.parametrize("name", LEGS)
def test_an_exception_as_a_call_begins_to_end_ends_the_communicator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with tw.init() as comm, ExpertParallel(comm, 1, 1, HIDDEN, TOKENS, wire="none", lanes=2) as ep:
        tokens = torch.ones(TOKENS, HIDDEN), torch.zeros(TOKENS, 1, dtype=torch.int64), torch.ones(TOKENS, 1)
        d, started = ep.dispatch(*tokens), ep.dispatch_start(*tokens, lane=1)

        def interrupted(*_: object) -> None:
            raise Interrupted

        monkeypatch.setattr(Call, "__exit__", interrupted)
        with pytest.raises(Interrupted):
            LEGS[name](ep, d, started)
        monkeypatch.undo()
        with pytest.raises(ThinwireError, match="has ended at this rank"):
            ep.dispatch(*tokens)
