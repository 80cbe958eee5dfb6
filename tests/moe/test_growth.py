"""Room for more tokens: made on all ranks at once, and neither rounds, gradients nor errors differ after it."""

from __future__ import annotations

import pytest
import torch

from tests.moe.test_gradients import _inputs, _make, _sharded, _target
from tests.moe.test_rounds_direct import HIDDEN, INTERPRETED, NUM_EXPERTS, TOP_K, experts, tokens
from tests.speeds import exhaustive_but
from tests.wires import assert_same_bits
from thinwire.comm.communicator import Communicator
from thinwire.errors import CapacityError, LaneError, PeerTimeout, RoutingError
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks

pytest.importorskip("numba", reason="CPU ranks need numba")

TRANSPORTS = ("direct", "staged")
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _batch(rank: int, count: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(77 * seed + rank)
    ids = torch.randint(-1, NUM_EXPERTS, (count, TOP_K), generator=generator)
    return torch.randn(count, HIDDEN, generator=generator), ids, torch.rand(count, TOP_K, generator=generator)


def _round(ep: ExpertParallel, batch: Batch, lane: int = 0) -> torch.Tensor:
    d = ep.dispatch(*batch, lane=lane)
    return ep.combine(experts(ep, d.tokens, d.expert_counts, d.expert_offsets), d)


def _asked_for(comm: Communicator, transport: str) -> None:
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
        assert (ep.memory_bytes > before) == (transport == "direct")
        for lane in (0, 1, 0):
            assert_same_bits("small", expected[0], _round(ep, small, lane))
            assert_same_bits("wide", expected[1], _round(ep, wide, lane))
        ep.ensure_capacity(1)
        assert ep.max_tokens == 10 + comm.size
        with pytest.raises(CapacityError):
            ep.dispatch(*_batch(comm.rank, 11 + comm.size))
        # Memory that is not there leaves everything as it was.
        if transport == "direct":
            with pytest.raises(CapacityError, match="lanes are as before"):
                ep.ensure_capacity(2**31 - 1 - comm.rank)
        assert_same_bits("after", expected[1], _round(ep, wide))
    with pytest.raises(LaneError, match="closed"):
        ep.ensure_capacity(1)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", exhaustive_but([3], [1, 2, 3, 4]))
def test_all_ranks_get_the_room_that_one_asks_for(size: int, transport: str) -> None:
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
    own = Communicator(comm.group, timeout=2.0)
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


# ---------------------------------------------------------------------------------------------------------------------
# By themselves


def _growing(comm: Communicator, transport: str, **options: object) -> ExpertParallel:
    return ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, None, transport=transport, **options)  # type: ignore[arg-type]


def _count(rank: int, step: int) -> int:
    """Nobody has tokens, one rank has more than there is room for, all do, or one has more than another one more."""
    return ((0, 0, 0, 0), (0, 1, 0, 2), (3, 0, 0, 0), (3, 4, 1, 2), (5, 17, 9, 0), (0, 0, 3, 0), (40, 1, 70, 3))[step][
        rank
    ]


_STEPS = (0, 1, 2, 3, 4, 5, 6, 0, 3)


def _by_themselves(comm: Communicator, transport: str, steps: tuple[int, ...] = _STEPS) -> None:
    with (
        ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, 99, transport=transport) as large,
        _growing(comm, transport, lanes=2) as ep,
    ):
        rooms = []
        for step in steps:
            batch = _batch(comm.rank, _count(comm.rank, step), step)
            expected = _round(large, batch)
            assert_same_bits(f"step {step}", expected, _round(ep, batch, lane=step % 2))
            rooms.append(ep.max_tokens)
            x, ids, weights = (tensor.clone() for tensor in batch)
            started = ep.dispatch_start(x, ids, weights)
            for tensor in (x, ids, weights):
                tensor.zero_()
            d = ep.dispatch_finish(started)
            assert_same_bits(
                "halves", expected, ep.combine(experts(ep, d.tokens, d.expert_counts, d.expert_offsets), d)
            )
        most = [max(_count(rank, step) for rank in range(comm.size)) for step in steps]
        if transport == "direct":
            assert rooms == [
                max([1, *(1 << (n - 1).bit_length() for n in most[:k] if n)]) for k in range(1, len(steps) + 1)
            ]
        else:
            assert set(rooms) == {2**31 - 1}
    # The first that grows may be a half.
    with _growing(comm, transport) as ep:
        x, ids, weights = (tensor.clone() for tensor in batch)
        started = ep.dispatch_start(x, ids, weights)
        for tensor in (x, ids, weights):
            tensor.zero_()
        d = ep.dispatch_finish(started)
        assert_same_bits("half", expected, ep.combine(experts(ep, d.tokens, d.expert_counts, d.expert_offsets), d))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", exhaustive_but([3], [1, 2, 3, 4]))
def test_lanes_grow_with_what_some_rank_has(size: int, transport: str) -> None:
    run_ranks(_by_themselves, size, transport, mode="thread", timeout=100)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("transport", "env"),
    [("direct", {}), ("staged", {}), ("direct", {"THINWIRE_INTEGRITY": "checksum"})],
)
def test_lanes_of_processes_grow(transport: str, env: dict[str, str]) -> None:
    run_ranks(_by_themselves, 2, transport, env=env, timeout=280)


@pytest.mark.exhaustive
def test_lanes_of_tritons_kernels_grow() -> None:
    run_ranks(_by_themselves, 2, "direct", (0, 2), env=INTERPRETED, timeout=280)


def _gradients_grow(comm: Communicator, transport: str) -> None:
    grads = []
    for max_tokens in (99, None):
        with ExpertParallel(
            comm, NUM_EXPERTS, TOP_K, HIDDEN, max_tokens, wire="none", transport=transport, lanes=2
        ) as ep:
            for kind in ("one_token", "ragged"):
                inputs = _inputs(comm.rank, kind)
                y = _sharded(ep, inputs)
                (y * _target(comm.rank, len(y))).sum().backward()
                grads.append([inputs[0].grad, inputs[2].grad, inputs[3].grad])
        with ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, max_tokens, wire="none", transport=transport) as ep:
            inputs = _inputs(comm.rank, "one_expert")
            d = ep.dispatch_finish(ep.dispatch_start(*inputs[:3]))
            ep.combine(d.tokens * 3, d).sum().backward()
            grads.append([inputs[0].grad, inputs[2].grad])
    half = len(grads) // 2
    for left, right in zip(grads[:half], grads[half:], strict=True):
        for a, b in zip(left, right, strict=True):
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_gradients_are_the_same_on_lanes_that_grow(transport: str) -> None:
    run_ranks(_gradients_grow, 2, transport, mode="thread", timeout=100)


def _in_the_way(comm: Communicator) -> None:
    """What keeps lanes from growing is an error on all ranks, and all go on."""
    with _growing(comm, "direct", lanes=2) as ep:
        small, wide = _batch(comm.rank, 1), _batch(comm.rank, 20 * (comm.rank == 1))
        d = ep.dispatch(*small, lane=1)
        with pytest.raises(LaneError, match="on lane 1 a round is open at ranks 0, 1, 2"):
            ep.dispatch(*wide)
        started = ep.dispatch_start(*wide)
        with pytest.raises(LaneError, match="on lane 1 a round is open at ranks 0, 1, 2"):
            ep.dispatch_finish(started)
        ep.combine(experts(ep, d.tokens, d.expert_counts, d.expert_offsets), d)
        # A rank that refuses its tokens, and another dtype, come first.
        with pytest.raises(RoutingError, match="rank 0 refused|x is"):
            ep.dispatch(wide[0] if comm.rank else wide[0][:, 1:], *wide[1:])
        with pytest.raises(RoutingError, match="rank 1 20 tokens of torch.float32"):
            ep.dispatch(wide[0] if comm.rank else wide[0].half(), *wide[1:])
        assert ep.max_tokens == 1
        _round(ep, small)
        _round(ep, wide, lane=1)
        assert ep.max_tokens == 32
        # A dispatch takes the lane of a round that is open on it, also where it grows.
        d = ep.dispatch(*small)
        _round(ep, _batch(comm.rank, 33))
        with pytest.raises(LaneError):
            ep.combine(d.tokens, d)
        ep.rebuild(comm)
        assert ep.max_tokens == 1
        _round(ep, wide)


def test_what_keeps_lanes_from_growing_is_told_on_all_ranks() -> None:
    run_ranks(_in_the_way, 3, mode="thread", timeout=100)


def _no_memory(comm: Communicator) -> None:
    with ExpertParallel(comm, 4, 1, 2**20, None, wire="none", transport="direct") as ep:
        too_many = torch.zeros(1, 2**20).expand(2**22, -1)
        ids, weights = torch.zeros(2**22, 1, dtype=torch.int64), torch.ones(2**22, 1)
        some = slice(None) if comm.rank else slice(1)
        with pytest.raises(CapacityError, match="no room for 4194304 tokens a rank"):
            ep.dispatch(too_many[some], ids[some], weights[some])
        d = ep.dispatch(torch.ones(1, 2**20), ids[:1], weights[:1])
        assert (ep.combine(d.tokens, d) == 1).all()


def test_memory_that_is_not_there_is_told_on_all_ranks() -> None:
    run_ranks(_no_memory, 2, mode="thread", timeout=100)


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
