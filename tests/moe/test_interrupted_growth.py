"""Lanes that grow, and exceptions: a dispatch ends once on every rank, and rows of two calls never meet in a round."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

import torch

from tests.comm.test_threads import with_timeout
from tests.moe.test_interrupted_rounds import Interrupted, _Raise
from tests.moe.test_round_faults import Case, nursery  # noqa: F401
from tests.speeds import exhaustive_but
from thinwire.comm.communicator import Communicator
from thinwire.comm.flight_recorder import NAME, NUMBER, FlightRecorder
from thinwire.errors import CapacityError, LaneError, PeerTimeout, RoutingError, ThinwireError, TransportUnavailable
from thinwire.moe.direct import DirectRounds
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks

HIDDEN = 32
Values = list[set[float]]


def _growing(comm: Communicator, **options: Any) -> ExpertParallel:
    size = {"num_experts": comm.size, "top_k": comm.size, "hidden_size": HIDDEN, "max_tokens": None} | options
    return ExpertParallel(comm, wire="none", transport="direct", lanes=2, **size)


def _tokens(comm: Communicator, call: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For the experts of all ranks; their value says whose and of which call they are."""
    ids = torch.arange(comm.size).expand(count, -1).contiguous()
    return torch.full((count, HIDDEN), 1000.0 * comm.rank + call), ids, torch.ones(count, comm.size)


def _calls(d: Dispatched) -> list[tuple[int, int]]:
    """The ranks and their calls of which rows are in a round."""
    return sorted({divmod(int(value), 1000) for value in d.tokens.unique().tolist()})


def _end(ep: ExpertParallel, d: Dispatched) -> list[tuple[int, int]]:
    came = _calls(d)
    ep.combine(d.tokens, d)
    return came


def _of(comm: Communicator, call: int) -> list[tuple[int, int]]:
    return [(rank, call) for rank in range(comm.size)]


# ---------------------------------------------------------------------------------------------------------------------
# Anywhere in a dispatch


def _dispatch(ep: ExpertParallel, halves: bool, *tokens: torch.Tensor) -> Dispatched:
    return ep.dispatch_finish(ep.dispatch_start(*tokens)) if halves else ep.dispatch(*tokens)


def _interrupted(comm: Communicator, halves: bool, at: int) -> tuple[int, list[Any]]:
    """Rank 0 is interrupted at a line of its second dispatch, for which lanes grow, and leaves that one out."""
    seen: list[Any] = []
    trace, call = _Raise(at), 0
    with _growing(comm, timeout=20.0) as ep:
        while call < 4 if comm.rank == 0 else (0, 4) not in [pair for came in seen for pair in came]:
            call += 1
            tokens = _tokens(comm, call, (1, 6, 9, 2, 1)[call - 1])
            try:
                if (comm.rank, call) == (0, 2):
                    sys.settrace(trace)
                d = _dispatch(ep, halves, *tokens)
                sys.settrace(None)
                seen.append(_end(ep, d))
            except (Interrupted, RoutingError, TransportUnavailable) as error:
                seen.append([(type(error).__name__, call)])
            finally:
                sys.settrace(None)
    return trace.seen, seen


def _everywhere(comm: Communicator, halves: bool) -> list[list[Any]]:
    found: list[list[Any]] = []
    while True:
        lines, seen = _interrupted(comm, halves, len(found) + 1)
        found.append(seen)
        if not comm.share_objects(lines >= len(found))[0]:
            return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("halves", [False, True])
def test_a_dispatch_that_makes_lanes_grow_may_end_anywhere(halves: bool) -> None:
    ends: dict[str, int] = {}
    by_line = zip(*run_ranks(_everywhere, 2, halves, mode="thread", timeout=280), strict=True)
    for number, (own, peer) in enumerate(by_line, 1):
        first, *_, last = own
        assert first == peer[0] == [(0, 1), (1, 1)] and last == peer[-1], f"line {number}: {own}, {peer}"
        error = own[1][0][0]
        if peer[1] == [(0, 3), (1, 2)]:
            end = "never begun"  # the next call takes its place
            expected = [[(0, 4), (1, 3)]]
        else:
            # It was begun here, or failed there as it did here.
            failures = ("RoutingError", 2), ("TransportUnavailable", 2)
            assert peer[1] in ([(0, 2), (1, 2)], *([failure] for failure in failures)), f"line {number}: {peer}"
            end = str(peer[1][0][0])
            expected = [[(0, 3), (1, 3)], [(0, 4), (1, 4)]]
        assert peer[2:] == expected and own[2:] == peer[-2:], f"line {number}: {own}, {peer}"
        assert error in (0, "Interrupted") or error == end == "TransportUnavailable", f"line {number}: {own}, {peer}"
        ends[end] = ends.get(end, 0) + 1
    # The last run comes to no such line.
    assert min(ends.get(end, 0) for end in ("never begun", "0", "RoutingError", "TransportUnavailable")) > 5, ends


# ---------------------------------------------------------------------------------------------------------------------
# At each step, with each kind of next call


def _interrupt(ep: ExpertParallel, when: str) -> None:
    """The next dispatch, for which lanes grow, gets an interrupt then."""
    rounds, grow = ep._rounds, ep._grow
    assert isinstance(rounds, DirectRounds)
    kernels = rounds.kernels

    def wait(*arguments: Any) -> None:
        rounds.kernels = kernels
        if when == "after the wait":
            kernels.wait(*arguments)
        raise KeyboardInterrupt

    def growth(*arguments: Any) -> None:
        ep._grow = grow  # type: ignore[method-assign]
        if when == "after growth":
            grow(*arguments)
        raise KeyboardInterrupt

    def close() -> None:
        rounds.close = closing  # type: ignore[method-assign]
        raise KeyboardInterrupt

    if when == "as the old lanes are closed":
        closing, rounds.close = rounds.close, close  # type: ignore[method-assign]
    elif when.endswith("growth"):
        ep._grow = growth  # type: ignore[method-assign]
    else:
        rounds.kernels = replace(kernels, wait=wait)


_WHEN = ("before the wait", "after the wait", "before growth", "as the old lanes are closed", "after growth")


def _record(comm: Communicator) -> list[tuple[int, str]]:
    recorder = comm._recorder
    assert isinstance(recorder, FlightRecorder)
    return [(entry[NUMBER], entry[NAME]) for entry in recorder._snapshot() if entry[NAME] in ("dispatch", "growth")]


def _next_calls(comm: Communicator, when: str, then: str) -> list[tuple[int, str]]:
    with _growing(comm) as ep:
        _end(ep, ep.dispatch(*_tokens(comm, 1, 1)))
        wide = _tokens(comm, 2, 6 * (comm.rank == 1))
        if comm.rank == 0:
            _interrupt(ep, when)
            with pytest.raises(KeyboardInterrupt):
                ep.dispatch(*wide)
        else:
            with pytest.raises(RoutingError, match="rank 0 cannot send it again"):
                ep.dispatch(*wide)
        assert comm.rank == 0 or ep.max_tokens == 8
        if then == "ensure_capacity":
            ep.ensure_capacity(9)
        elif then == "refused":
            x, ids, weights = _tokens(comm, 3, 2)
            with pytest.raises(RoutingError, match="rank 0 refused" if comm.rank else "x is"):
                ep.dispatch(x if comm.rank else x[:, 1:], ids, weights)
        else:
            lane = int(then == "other lane")
            for call, count in ((3, 2), (4, 20 * (comm.rank != 1))):
                assert _end(ep, ep.dispatch(*_tokens(comm, call, count), lane=lane)) == [
                    (rank, call) for rank in range(comm.size) if call == 3 or rank != 1
                ]
        for lane in range(2):
            assert _end(ep, ep.dispatch(*_tokens(comm, 5, 3), lane=lane)) == _of(comm, 5)
        return _record(comm)


@pytest.mark.parametrize("then", ["same lane", "other lane", "ensure_capacity", "refused"])
@pytest.mark.parametrize("when", _WHEN)
def test_what_an_exception_ended_fails_at_the_peers_and_the_next_calls_meet(when: str, then: str) -> None:
    records = run_ranks(_next_calls, 3, when, then, mode="thread", timeout=60)
    assert records[0] == records[1] == records[2]


def _other_lane_in_use(comm: Communicator, when: str, then: str) -> None:
    """What keeps lanes from growing is raised where the dispatch goes on, and not by the next call of who left it."""
    with _growing(comm) as ep:
        if then == "finish":
            started = ep.dispatch_start(*_tokens(comm, 1, 1), lane=1)
        else:
            d = ep.dispatch(*_tokens(comm, 1, 1), lane=1)
        what = "what was started is not finished" if then == "finish" else "a round is open"
        if comm.rank == 0:
            _interrupt(ep, when)
            with pytest.raises(KeyboardInterrupt):
                ep.dispatch(*_tokens(comm, 2, 6))
        else:
            with pytest.raises(LaneError, match=f"on lane 1 {what} at ranks 0, 1, 2"):
                ep.dispatch(*_tokens(comm, 2, 6))
        if then == "finish":
            d = ep.dispatch_finish(started)
        assert _end(ep, d) == _of(comm, 1)
        assert ep.max_tokens == 1
        assert _end(ep, ep.dispatch(*_tokens(comm, 3, 6))) == _of(comm, 3)


@pytest.mark.parametrize("then", ["finish", "combine"])
@pytest.mark.parametrize("when", _WHEN[:3])
def test_a_lane_in_use_is_told_once(when: str, then: str) -> None:
    run_ranks(_other_lane_in_use, 3, when, then, mode="thread", timeout=60)


def _no_memory(comm: Communicator, when: str) -> None:
    with _growing(comm, top_k=1, hidden_size=2**20) as ep:
        ids, weights = torch.zeros(2**22, 1, dtype=torch.int64), torch.ones(2**22, 1)
        some = slice(None) if comm.rank else slice(1)
        if comm.rank == 0:
            _interrupt(ep, when)
        with pytest.raises(CapacityError if comm.rank else KeyboardInterrupt, match="no room" if comm.rank else None):
            ep.dispatch(torch.zeros(1, 2**20).expand(2**22, -1)[some], ids[some], weights[some])
        d = ep.dispatch(torch.full((1, 2**20), 1.0 + comm.rank), ids[:1], weights[:1])
        assert set(d.tokens.unique().tolist()) == ({1.0, 2.0} if comm.rank == 0 else set())
        ep.combine(d.tokens, d)


@pytest.mark.parametrize("when", _WHEN[:3])
def test_memory_that_is_not_there_is_told_once(when: str) -> None:
    run_ranks(_no_memory, 2, when, mode="thread", timeout=60)


# ---------------------------------------------------------------------------------------------------------------------
# Started, and not finished


def _not_finished(comm: Communicator, finishing: tuple[int, ...]) -> None:
    """Some ranks finish what they started, for which lanes grow; the others go on to another dispatch on the lane."""
    with _growing(comm) as ep:
        for call in (1, 2):
            wide = _tokens(comm, call, 5 * call)
            started = ep.dispatch_start(*wide)
            if comm.rank in finishing:
                others = [rank for rank in range(comm.size) if rank not in finishing]
                with pytest.raises(RoutingError, match=f"ranks? {', '.join(map(str, others))} cannot send it again"):
                    ep.dispatch_finish(started)
            assert _end(ep, ep.dispatch(*_tokens(comm, 10 + call, 2))) == _of(comm, 10 + call)
            with pytest.raises(LaneError, match="is over"):
                ep.dispatch_finish(started)
        # What is in the way on another lane may be finished after that.
        started = ep.dispatch_start(*_tokens(comm, 3, 40), lane=1)
        with pytest.raises(LaneError, match="on lane 1 what was started is not finished at ranks 0, 1, 2"):
            ep.dispatch(*_tokens(comm, 4, 50))
        assert _end(ep, ep.dispatch_finish(started)) == _of(comm, 3)
        assert _end(ep, ep.dispatch(*_tokens(comm, 5, 100))) == _of(comm, 5)


@pytest.mark.parametrize("finishing", [(), (1,), (0, 2)])
def test_what_was_started_and_not_finished_ends_with_the_next_dispatch(finishing: tuple[int, ...]) -> None:
    run_ranks(_not_finished, 3, finishing, mode="thread", timeout=60)


# ---------------------------------------------------------------------------------------------------------------------
# Growth itself fails


def _ends(where: str, ep: ExpertParallel) -> None:
    """Growth gets an interrupt there."""
    name = {"before": "_grow", "in its exchange": "_exchange_needs", "in its allocation": "_open_direct"}[where]

    def interrupted(*arguments: Any, **options: Any) -> Any:
        delattr(ep, name)
        raise KeyboardInterrupt

    setattr(ep, name, interrupted)


def _unusable(ep: ExpertParallel, comm: Communicator, kind: type[ThinwireError], match: str) -> None:
    start = time.monotonic()
    calls: list[Callable[[], object]] = [
        lambda: ep.dispatch(*_tokens(comm, 3, 1)),
        lambda: ep.dispatch_start(*_tokens(comm, 3, 1), lane=1),
        lambda: ep.ensure_capacity(1),
        ep.check,
    ]
    for call in calls:
        with pytest.raises(kind, match=match):
            call()
    assert time.monotonic() - start < 5.0


def _fails(comm: Communicator, where: str, late: bool) -> None:
    """Rank 1 does not get through growth, and rank 0 comes to it late, in its next call."""
    short = with_timeout(comm) if comm.in_process else Communicator(comm.group, timeout=1.0)
    ep = _growing(short, timeout=0.6)
    _end(ep, ep.dispatch(*_tokens(comm, 1, 1)))
    if comm.rank == 1:
        _ends(where, ep)
        with pytest.raises(KeyboardInterrupt):
            ep.dispatch(*_tokens(comm, 2, 6))
        if where != "before":
            _unusable(ep, comm, LaneError, "making room for 8 tokens a rank was ended by an exception at this rank")
    else:
        if late and comm.rank == 0:
            _interrupt(ep, "after the wait")
            with pytest.raises(KeyboardInterrupt):
                ep.dispatch(*_tokens(comm, 2, 6))
        with pytest.raises(PeerTimeout) as caught:
            ep.dispatch(*_tokens(comm, 3, 6))
        assert ("while peers made room" in str(caught.value)) == (late and comm.rank == 0)
        _unusable(ep, comm, PeerTimeout, "making room for 8 tokens a rank failed before")
        assert set(caught.value.ranks) <= {1}
        ep.rebuild([1])
        d = ep.dispatch(*_tokens(ep.comm, 4, 6)[:1], torch.ones(6, 3, dtype=torch.int64), torch.ones(6, 3))
        assert {call for _, call in _calls(d)} <= {4}
        ep.combine(d.tokens, d)
    ep.close()
    ep.close()
    with pytest.raises(LaneError, match="closed"):
        ep.dispatch(*_tokens(comm, 5, 1))


_WHERE = ("before", "in its exchange", "in its allocation")


@pytest.mark.parametrize(
    ("where", "late"),
    exhaustive_but(
        [("in its allocation", True)],
        [(where, late) for where in _WHERE for late in (False, True)],
        several=True,
    ),
)
def test_growth_that_fails_is_told_at_once_by_all_later_calls(where: str, late: bool) -> None:
    run_ranks(_fails, 3, where, late, mode="thread", timeout=60)


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", _WHERE)
def test_growth_of_processes_that_fails_is_told_at_once_by_all_later_calls(where: str) -> None:
    run_ranks(_fails, 3, where, True, timeout=100)


def _all_rebuild(comm: Communicator, where: str) -> None:
    """Rank 1 is interrupted in growth, and lives: all go on together."""
    with _growing(Communicator(comm.group, timeout=1.0)) as ep:
        if comm.rank == 1:
            _ends(where, ep)
        with pytest.raises(KeyboardInterrupt if comm.rank == 1 else PeerTimeout) as caught:
            ep.dispatch(*_tokens(comm, 1, 6))
        assert getattr(caught.value, "ranks", ()) == ()
        ep.rebuild()
        assert ep.comm.size == comm.size
        assert _end(ep, ep.dispatch(*_tokens(comm, 2, 6))) == _of(comm, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", _WHERE[1:])
def test_all_ranks_rebuild_after_an_interrupt_in_growth(where: str) -> None:
    run_ranks(_all_rebuild, 3, where, timeout=100)


def _killed(comm: Communicator, store: Any, step: str) -> list[tuple[int, int]]:
    """Rank 1 dies as lanes grow."""
    ep = _growing(Communicator(comm.group, timeout=1.5), timeout=1.5)
    _end(ep, ep.dispatch(*_tokens(comm, 1, 1)))
    if comm.rank == 1:
        setattr(ep, step, lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(PeerTimeout) as caught:
        ep.dispatch(*_tokens(comm, 2, 6))
    assert caught.value.ranks == (1,)
    _unusable(ep, comm, PeerTimeout, "making room for 8 tokens a rank failed before")
    ep.rebuild()
    ids = torch.arange(4).expand(6, -1).contiguous()
    return _end(ep, ep.dispatch(_tokens(comm, 3, 6)[0], ids, torch.ones(6, 4)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", ["_grow", "_exchange_needs", "_open_direct"])
def test_a_rank_that_dies_as_lanes_grow_is_named(nursery: Connection, step: str) -> None:  # noqa: F811
    with Case(nursery, _killed, step) as case:
        came = case.results([0, 2, 3])
    assert came == dict.fromkeys([0, 2, 3], [(0, 3), (2, 3), (3, 3)])


# ---------------------------------------------------------------------------------------------------------------------
# Backward


def _backward_of_other_rounds(comm: Communicator) -> None:
    """Rank 0 differentiates a round from before growth, rank 1 the one with as many rounds before it since."""
    with _growing(comm) as ep:
        ys = []
        for call, count in ((1, 1), (2, 4), (3, 4)):
            x, ids, weights = _tokens(comm, call, count)
            d = ep.dispatch(x.requires_grad_(), ids, weights)
            ys.append(ep.combine(d.tokens, d))
        with pytest.raises(RoutingError, match="of round [13]"):
            ys[0 if comm.rank == 0 else 1].sum().backward()
        ys[2].sum().backward()


def test_backward_of_rounds_before_and_after_growth_do_not_meet() -> None:
    run_ranks(_backward_of_other_rounds, 2, mode="thread", timeout=60)
