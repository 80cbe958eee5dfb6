"""Room for more tokens: made on all ranks at once, and neither rounds, gradients nor errors differ after it."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.hosts import for_transport
from tests.helpers.speeds import exhaustive_but
from tests.helpers.wires import assert_same_bits
from tests.moe.test_gradients import _inputs, _make, _sharded, _target
from tests.moe.test_rounds_direct import HIDDEN, NUM_EXPERTS, TOP_K, experts, tokens
from thinwire.comm.communicator import Communicator
from thinwire.errors import CapacityError, LaneError, PeerTimeout, RoutingError
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks

pytest.importorskip("numba", reason="CPU ranks need numba")

TRANSPORTS = ("direct", "staged", "two_level")
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _batch(rank: int, count: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(77 * seed + rank)
    ids = torch.randint(-1, NUM_EXPERTS, (count, TOP_K), generator=generator)
    return torch.randn(count, HIDDEN, generator=generator), ids, torch.rand(count, TOP_K, generator=generator)


def _round(ep: ExpertParallel, batch: Batch, lane: int = 0) -> torch.Tensor:
    d = ep.dispatch(*batch, lane=lane)
    return ep.combine(experts(ep, d.tokens, d.expert_counts, d.expert_offsets), d)


def _asked_for(comm: Communicator, transport: str) -> None:
    comm = for_transport(comm, transport)
    with (
        ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, 99, transport=transport) as large,
        ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, 2, transport=transport, lanes=2) as ep,
    ):
        small, wide = _batch(comm.rank, 2), _batch(comm.rank, 11 + comm.rank)
        expected = [_round(large, batch) for batch in (small, wide)]
        assert_same_bits("before", expected[0], _round(ep, small))
        with pytest.raises(CapacityError):
            ep.dispatch(*wide)
        d = ep.dispatch(*small, lane=1)
        for need in (0, 1, 2):
            ep.ensure_capacity(need)  # there is
        with pytest.raises(LaneError, match="on lane 1 a round is open at rank"):
            ep.ensure_capacity(3 + comm.rank)
        assert ep.max_tokens == 2 and len(d.tokens) >= 0
        d.abandon()
        started = ep.dispatch_start(*small, lane=1)
        with pytest.raises(LaneError, match="on lane 1 what was started is not finished at rank"):
            ep.ensure_capacity(3 + comm.rank)
        ep.dispatch_finish(started).abandon()
        for bad in (-1, True, 1.0, "1", 2**31):
            with pytest.raises(RoutingError, match="max_tokens is"):
                ep.ensure_capacity(bad)  # type: ignore[arg-type]
        before = ep.memory_bytes
        ep.ensure_capacity(11 + comm.rank)  # the last rank's is the most
        assert ep.max_tokens == 10 + comm.size
        assert (ep.memory_bytes > before) == (transport != "staged")
        for lane in (0, 1, 0):
            assert_same_bits("small", expected[0], _round(ep, small, lane))
            assert_same_bits("wide", expected[1], _round(ep, wide, lane))
        ep.ensure_capacity(1)
        assert ep.max_tokens == 10 + comm.size
        with pytest.raises(CapacityError):
            ep.dispatch(*_batch(comm.rank, 11 + comm.size))
        # Memory that is not there leaves everything as it was.
        if transport != "staged":
            with pytest.raises(CapacityError, match="lanes are as before"):
                ep.ensure_capacity(2**31 - 1 - comm.rank)
        assert_same_bits("after", expected[1], _round(ep, wide))
    with pytest.raises(LaneError, match="closed"):
        ep.ensure_capacity(1)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", exhaustive_but([3], [1, 2, 3, 4]))
def test_all_ranks_get_the_room_that_one_asks_for(size: int, transport: str) -> None:
    if size > 1 or transport != "two_level":  # which needs two hosts
        run_ranks(_asked_for, size, transport, mode="thread", timeout=100)


def _between_forward_and_backward(comm: Communicator, transport: str) -> None:
    """Graphs of earlier rounds go on, on lanes that have more room."""
    grads = []
    for grown in (False, True):
        with _make(comm, transport) as ep:
            inputs = _inputs(comm.rank, "ragged")
            y = _sharded(ep, inputs)
            if grown:
                ep.ensure_capacity(40)
                _sharded(ep, _inputs(comm.rank, "one_expert")).sum().backward()
                ep.ensure_capacity(50)
            (y * _target(comm.rank, len(y))).sum().backward()
            grads.append([inputs[0].grad, inputs[2].grad, inputs[3].grad])
    for left, right in zip(*grads, strict=True):
        assert left is not None and right is not None and torch.equal(left, right)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_backward_of_a_round_comes_after_lanes_were_replaced(transport: str) -> None:
    run_ranks(_between_forward_and_backward, 2, transport, mode="thread", timeout=100)


def _missing(comm: Communicator, transport: str) -> None:
    own = for_transport(Communicator(comm.group, timeout=2.0), transport)
    ep = ExpertParallel(own, NUM_EXPERTS, TOP_K, HIDDEN, 6, transport=transport)
    _round(ep, tokens(comm.rank, "ragged", torch.float32, 0))
    if comm.rank == 1:
        return
    with pytest.raises(PeerTimeout) as caught:
        ep.ensure_capacity(9)
    assert caught.value.ranks == (1,)


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_does_not_come_is_named(transport: str) -> None:
    run_ranks(_missing, 2, transport, timeout=60)


def _grown_apart(comm: Communicator) -> None:
    with (
        comm.split(groups=[[0], [1]]) as own,
        ExpertParallel(own, NUM_EXPERTS, TOP_K, HIDDEN, 16, wire="none", transport="direct") as ep,
        ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, 64, wire="none", transport="direct") as expected,
    ):
        if comm.rank == 0:
            ep.ensure_capacity(64)
        ep.rebuild(comm)
        assert ep.max_tokens == 64
        batch = _batch(comm.rank, 40)
        assert_same_bits("rebuilt", _round(expected, batch), _round(ep, batch))


def test_ranks_with_different_room_rebuild_with_the_most() -> None:
    run_ranks(_grown_apart, 2, mode="thread", timeout=100)
