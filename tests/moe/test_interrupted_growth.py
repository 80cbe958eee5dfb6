"""Lanes that grow: a dispatch ends once on every rank, and a rank that is lost meanwhile, or interrupted, is named."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

import torch

from tests.moe.test_round_faults import Case, nursery  # noqa: F401
from thinwire.comm.communicator import Communicator
from thinwire.errors import LaneError, PeerTimeout, RoutingError, ThinwireError
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks

HIDDEN = 32


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


def _lost(comm: Communicator, how: str, step: str) -> list[tuple[int, int]]:
    """Rank 1 dies, or is interrupted, as lanes grow."""
    short = Communicator(comm.group, timeout=1.5)
    ep = _growing(short, timeout=1.5)
    _end(ep, ep.dispatch(*_tokens(comm, 1, 1)))
    if comm.rank == 1:

        def lost(*arguments: Any, **options: Any) -> Any:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt

        setattr(ep, step, lost)
        with pytest.raises(KeyboardInterrupt):
            ep.dispatch(*_tokens(comm, 2, 6))
        for call in (lambda: ep.dispatch(*_tokens(comm, 3, 1)), lambda: ep.ensure_capacity(1), ep.rebuild):
            with pytest.raises(ThinwireError, match="has ended at this rank, as KeyboardInterrupt"):
                call()
        return []
    with pytest.raises(PeerTimeout) as caught:
        ep.dispatch(*_tokens(comm, 2, 6))
    assert caught.value.ranks == (1,)
    with pytest.raises(PeerTimeout):
        ep.dispatch(*_tokens(comm, 3, 1))
    ep.rebuild()
    ids = torch.arange(4).expand(6, -1).contiguous()
    return _end(ep, ep.dispatch(_tokens(comm, 3, 6)[0], ids, torch.ones(6, 4)))


_STEPS = ["_make_room", "_open_direct"]


def _killed(comm: Communicator, store: Any, step: str) -> list[tuple[int, int]]:
    return _lost(comm, "killed", step)


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", _STEPS)
def test_a_rank_that_dies_as_lanes_grow_is_named(nursery: Connection, step: str) -> None:  # noqa: F811
    with Case(nursery, _killed, step) as case:
        came = case.results([0, 2, 3])
    assert came == dict.fromkeys([0, 2, 3], [(0, 3), (2, 3), (3, 3)])


@pytest.mark.parametrize("step", _STEPS)
def test_a_rank_that_is_interrupted_as_lanes_grow_is_named(step: str) -> None:
    came = run_ranks(_lost, 4, "interrupted", step, timeout=60)
    assert came == [[] if rank == 1 else [(0, 3), (2, 3), (3, 3)] for rank in range(4)]


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
