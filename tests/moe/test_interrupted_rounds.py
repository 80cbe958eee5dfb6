"""A round of the direct transport that an exception ends at any place: no peer ever sees rows of two rounds mixed."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

import torch

from tests.speeds import exhaustive_but
from thinwire.comm.communicator import Communicator
from thinwire.comm.flight_recorder import DETAILS, NAME, NUMBER, FlightRecorder
from thinwire.errors import LaneError, PeerTimeout, RoutingError
from thinwire.moe.direct import DirectRounds
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks

TOKENS, HIDDEN, LAST = 40, 32, 99
#: Where the exception comes from: what runs in Python between a call and its kernels.
TRACED = (
    "moe/parallel.py",
    "moe/direct.py",
    "moe/direct_lanes.py",
    "moe/dispatched.py",
    "cpu/dispatch.py",
    "cpu/combine.py",
    "cpu/signal.py",
)


class Interrupted(Exception):
    """What a signal handler might raise."""


def _both(comm: Communicator) -> ExpertParallel:
    return ExpertParallel(comm, 2, 1, HIDDEN, TOKENS, wire="none", transport="direct", timeout=20.0)


def _tokens(comm: Communicator, value: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All of them for the other rank's expert."""
    return torch.full((TOKENS, HIDDEN), float(value)), torch.full((TOKENS, 1), 1 - comm.rank), torch.ones(TOKENS, 1)


class _Raise:
    """Raises at one of the lines that this thread goes through, once."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(TRACED):
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self.at:
                raise Interrupted
        return self


def _interrupted(comm: Communicator, ep: ExpertParallel, leg: str, at: int) -> bool:
    """Three rounds, the second of which is interrupted at a line of one leg; False: it has no such line."""
    trace = _Raise(at)
    leg, *halves = leg.split(" in ")
    for value in (1, 2, 3, LAST):
        try:
            if (value, leg) == (2, "dispatch"):
                sys.settrace(trace)
            if halves:
                d = ep.dispatch_finish(ep.dispatch_start(*_tokens(comm, value)))
            else:
                d = ep.dispatch(*_tokens(comm, value))
            sys.settrace(None)
            out = d.tokens * 2
            if (value, leg) == (2, "combine"):
                sys.settrace(trace)
            if halves:
                ep.combine_finish(ep.combine_start(out, d))
            else:
                ep.combine(out, d)
        except Interrupted:
            continue
        finally:
            sys.settrace(None)
    return trace.seen >= at


def _slow_peer(comm: Communicator, ep: ExpertParallel) -> list[tuple[set[float], set[float]]]:
    """Of each round until the last: the values in the rows that came, and in those that came home."""
    seen = []
    while not seen or LAST not in seen[-1][0]:
        d = ep.dispatch(*_tokens(comm, 10))
        time.sleep(0.002)  # the other rank shall be at its next round before this one has read anything
        tokens = d.tokens
        time.sleep(0.002)
        home = ep.combine(tokens * 2, d)
        seen.append((set(tokens.unique().tolist()), set(home.unique().tolist())))
    return seen


def _everywhere(comm: Communicator, leg: str) -> list[Any]:
    """On rank 0 how many lines the leg has, on rank 1 what it saw for each of them."""
    found: list[Any] = []
    with _both(comm) as ep:
        at = 1
        while True:
            if comm.rank == 0:
                found.append(_interrupted(comm, ep, leg, at))
            else:
                found.append(_slow_peer(comm, ep))
            more = comm.share_objects(found[-1])[0]
            if not more:
                return found
            at += 1


_LEGS = ["dispatch", "combine", "dispatch in halves", "combine in halves"]


@pytest.mark.parametrize("leg", exhaustive_but(["combine"], _LEGS))
def test_rows_of_two_rounds_are_never_mixed(leg: str) -> None:
    lines, rounds = run_ranks(_everywhere, 2, leg, mode="thread", timeout=240)
    assert len(lines) > 20
    for number, seen in enumerate(rounds, 1):
        for came, home in seen:
            assert len(came) == 1, f"line {number} of {leg}: rows of {came} in one round"
            assert home in ({0.0}, {20.0}), f"line {number} of {leg}: {home} came home"
        # The interrupted round is there, without anything of rank 0's expert, or it never began.
        values = [value for came, _ in seen for value in came]
        assert values in ([1.0, 2.0, 3.0, LAST], [1.0, 3.0, LAST]), f"line {number} of {leg}: {values}"
        assert sum(home == {0.0} for _, home in seen) <= 1


def _mismatched(comm: Communicator, after: str) -> list[set[float]]:
    """Rank 0 is interrupted as it finds out that rank 1 has tokens of another dtype; both go on."""
    came = []
    with _both(comm) as ep:
        rounds = ep._rounds
        assert isinstance(rounds, DirectRounds)
        x, ids, weights = _tokens(comm, 1)
        if comm.rank == 0:
            kernels, describe = rounds.kernels, rounds._mismatch

            def interrupted(*arguments: Any) -> Any:
                rounds.kernels, rounds._mismatch = kernels, describe  # type: ignore[method-assign]
                if after == "the wait":
                    kernels.wait(*arguments)
                raise Interrupted

            if after == "the wait":
                rounds.kernels = replace(kernels, wait=interrupted)
            else:
                rounds._mismatch = interrupted  # type: ignore[method-assign]
            with pytest.raises(Interrupted):
                ep.dispatch(x, ids, weights)
        else:
            with pytest.raises(RoutingError, match="the same dtype"):
                ep.dispatch(x.half(), ids, weights)
        for value in (2, 3):
            d = ep.dispatch(*_tokens(comm, value))
            came.append(set(d.tokens.unique().tolist()))
            ep.combine(d.tokens, d)
    return came


@pytest.mark.parametrize("after", ["the wait", "it was seen"])
def test_an_exception_beside_a_mismatch_leaves_the_lane_of_use(after: str) -> None:
    assert run_ranks(_mismatched, 2, after, mode="thread", timeout=60) == [[{2.0}, {3.0}]] * 2


def _numbered(comm: Communicator) -> list[tuple[int, str, int]]:
    """Rank 0 is interrupted in each kind of wait, and before anything is sent; rank 1's rounds are all whole."""
    with _both(comm) as ep:
        rounds = ep._rounds
        assert isinstance(rounds, DirectRounds)
        kernels = rounds.kernels

        def interrupted(*arguments: Any) -> Any:
            rounds.kernels = kernels
            raise Interrupted

        def interrupt(name: str, call: Callable[[], object]) -> None:
            rounds.kernels = replace(kernels, **{name: interrupted})
            with pytest.raises(Interrupted):
                call()

        def dispatch() -> Dispatched:
            return ep.dispatch(*_tokens(comm, 1))

        if comm.rank == 0:
            interrupt("send_tokens", dispatch)
            interrupt("wait", dispatch)  # 1, which rank 1 has
            interrupt("wait", dispatch)  # in which 1 is gone on with
            d = dispatch()  # 2, which first closes 1
            interrupt("send_sums", lambda: ep.combine(d.tokens, d))
            interrupt("wait", dispatch)  # 2 is closed
            d = dispatch()  # 3
            interrupt("wait", lambda: ep.combine(d.tokens, d))
            dispatch()  # 4
            with pytest.raises(RoutingError, match="x is"):
                ep.dispatch(torch.zeros(1), *_tokens(comm, 1)[1:])  # 5
        else:
            for _ in range(4):
                d = dispatch()
                ep.combine(d.tokens, d)
            with pytest.raises(RoutingError, match="rank 0 refused"):
                dispatch()
        d = dispatch()  # 6
        ep.combine(d.tokens, d)
    recorder = comm._recorder
    assert isinstance(recorder, FlightRecorder)
    entries = [entry for entry in recorder._snapshot() if entry[NAME] in ("dispatch", "combine", "abandon")]
    ends = {"combine": "end", "abandon": "end"}
    return [(entry[NUMBER], ends.get(entry[NAME], entry[NAME]), entry[DETAILS][3]) for entry in entries]


def test_what_is_recorded_has_the_numbers_of_the_peers() -> None:
    first, second = run_ranks(_numbered, 2, mode="thread", timeout=60)
    assert first == second
    assert [epoch for _, name, epoch in first if name == "dispatch"] == [1, 2, 3, 4, 5, 6]


def _told_late(comm: Communicator) -> tuple[list[Any], ...]:
    """Rank 1 never comes. Rank 0 gives up on lane 1 and is interrupted while it tells so on the others."""
    part = comm.split(groups=[range(comm.size)])
    with ExpertParallel(part, 2, 1, HIDDEN, TOKENS, transport="direct", timeout=0.3, lanes=4) as ep:
        rounds = ep._rounds
        assert isinstance(rounds, DirectRounds)
        d = ep.dispatch(*_tokens(comm, 1), lane=2)
        own: list[Any] = []
        if comm.rank == 0:
            kernels, seen = rounds.kernels, 0

            def interrupted(*arguments: Any) -> Any:
                nonlocal seen
                seen += 1
                if seen == 3:  # its own wait, and what it tells on lane 0, were the first
                    rounds.kernels = kernels
                    raise Interrupted
                return kernels.wait(*arguments)

            rounds.kernels = replace(kernels, wait=interrupted)
            with pytest.raises(Interrupted):
                ep.dispatch(*_tokens(comm, 1), lane=1)
            for call in (ep.check, lambda: ep.combine(d.tokens, d), ep.check):
                with pytest.raises(PeerTimeout, match="lane 1, round 1, dispatch: no answer from rank 1") as caught:
                    call()
                own.append((caught.value.ranks, rounds.lost))
        comm.share_objects(None)
        lines = [rounds._lines(lane, rounds.lanes[lane].layout.STUCK)[0].tolist()[:4] for lane in range(4)]
        return own, lines


def test_a_rank_that_is_interrupted_as_it_gives_up_tells_it_on_every_lane_in_the_end() -> None:
    (named, _), (_, lines) = run_ranks(_told_late, 2, mode="thread", timeout=60)
    assert named == [((1,), (1,))] * 3
    # Flag, round, phase, and that it is this rank that is missed.
    assert lines == [[1, 1, 0, 1], [1, 1, 0, 1], [1, 1, 1, 1], [1, 1, 0, 1]]


def _ctrl_c(comm: Communicator) -> list[set[float]]:
    """Rank 0 is interrupted while it waits for rank 1's sums, which come late."""
    came = []
    with _both(comm) as ep:
        for value in (1, 2, 3):
            d = ep.dispatch(*_tokens(comm, value))
            if comm.rank == 1 and value == 2:
                time.sleep(1.0)
            tokens = d.tokens
            came.append(set(tokens.unique().tolist()))
            if comm.rank == 0 and value == 2:
                signal.setitimer(signal.ITIMER_REAL, 0.2)
                start = time.monotonic()
                with pytest.raises(Interrupted):
                    ep.combine(tokens, d)
                assert time.monotonic() - start < 0.7
            else:
                ep.combine(tokens, d)
    return came


def _ctrl_c_process(comm: Communicator) -> list[set[float]]:
    def handler(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    signal.signal(signal.SIGALRM, handler)
    return _ctrl_c(comm)


def test_a_signal_ends_a_wait_and_the_next_round_waits_for_what_is_left() -> None:
    assert run_ranks(_ctrl_c_process, 2) == [[{1.0}, {2.0}, {3.0}]] * 2


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
