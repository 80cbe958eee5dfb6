"""Lanes are replaced by larger ones: a rank that is lost meanwhile, or interrupted, is named."""

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
from thinwire.errors import PeerTimeout, RoutingError, ThinwireError
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks

HIDDEN = 32


def _make(comm: Communicator, **options: Any) -> ExpertParallel:
    size = {"num_experts": comm.size, "top_k": comm.size, "hidden_size": HIDDEN, "max_tokens": 1} | options
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


def _lost(comm: Communicator, how: str, step: str) -> list[tuple[int, int]]:
    """Rank 1 dies, or is interrupted, as lanes are replaced."""
    short = Communicator(comm.group, timeout=1.5)
    ep = _make(short, timeout=1.5)
    _end(ep, ep.dispatch(*_tokens(comm, 1, 1)))
    if comm.rank == 1:

        def lost(*arguments: Any, **options: Any) -> Any:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt

        setattr(ep._assembly, step, lost)
        with pytest.raises(KeyboardInterrupt):
            ep.ensure_capacity(6)
        for call in (lambda: ep.dispatch(*_tokens(comm, 3, 1)), lambda: ep.ensure_capacity(1), ep.rebuild):
            with pytest.raises(ThinwireError, match="has ended at this rank, as KeyboardInterrupt"):
                call()
        return []
    with pytest.raises(PeerTimeout) as caught:
        ep.ensure_capacity(6)
    assert caught.value.ranks == (1,)
    with pytest.raises(PeerTimeout):
        ep.dispatch(*_tokens(comm, 3, 1))
    ep.rebuild()
    ep.ensure_capacity(6)
    ids = torch.arange(4).expand(6, -1).contiguous()
    return _end(ep, ep.dispatch(_tokens(comm, 3, 6)[0], ids, torch.ones(6, 4)))


_STEPS = ["make_room", "_open"]


def _killed(comm: Communicator, store: Any, step: str) -> list[tuple[int, int]]:
    return _lost(comm, "killed", step)


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", _STEPS)
def test_a_rank_that_dies_as_lanes_are_replaced_is_named(nursery: Connection, step: str) -> None:  # noqa: F811
    with Case(nursery, _killed, step) as case:
        came = case.results([0, 2, 3])
    assert came == dict.fromkeys([0, 2, 3], [(0, 3), (2, 3), (3, 3)])


@pytest.mark.parametrize("step", _STEPS)
def test_a_rank_that_is_interrupted_as_lanes_are_replaced_is_named(step: str) -> None:
    came = run_ranks(_lost, 4, "interrupted", step, timeout=60)
    assert came == [[] if rank == 1 else [(0, 3), (2, 3), (3, 3)] for rank in range(4)]


def _backward_of_other_rounds(comm: Communicator) -> None:
    """Rank 0 differentiates a round of the old lanes, rank 1 the one with as many rounds before it on the new ones."""
    with _make(comm) as ep:
        ys = []
        for call, count in ((1, 1), (2, 4), (3, 4)):
            x, ids, weights = _tokens(comm, call, count)
            ep.ensure_capacity(count)
            d = ep.dispatch(x.requires_grad_(), ids, weights)
            ys.append(ep.combine(d.tokens, d))
        with pytest.raises(RoutingError, match="of round [13]"):
            ys[0 if comm.rank == 0 else 1].sum().backward()
        ys[2].sum().backward()


def test_backward_of_rounds_of_old_and_of_new_lanes_do_not_meet() -> None:
    run_ranks(_backward_of_other_rounds, 2, mode="thread", timeout=60)
