"""Rounds in halves: two micro-batches overlap on two lanes, with the results of whole calls, forward and backward."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.hosts import for_transport
from tests.helpers.speeds import exhaustive_but
from tests.helpers.wires import assert_same_bits
from tests.moe.test_gradients import Inputs, _inputs, _make, _run_experts, _target, _two_lanes
from tests.moe.test_rounds_direct import HIDDEN, INTERPRETED, KINDS, MAX_TOKENS, NUM_EXPERTS, TOP_K, experts, tokens
from thinwire.comm.communicator import Communicator
from thinwire.errors import LaneError, PeerTimeout, RoutingError
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks

pytest.importorskip("numba", reason="CPU ranks need numba")

TRANSPORTS = ("direct", "staged", "two_level")


def _overlapping(comm: Communicator, transport: str) -> None:
    comm = for_transport(comm, transport)
    for wire in ("none", "int8"):
        with ExpertParallel(
            comm, NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS, wire=wire, transport=transport, lanes=2
        ) as ep:
            for seed, kind in enumerate(KINDS):
                batches = [tokens(comm.rank, kind, torch.float32, seed + 9 * number) for number in range(2)]
                whole = []
                for batch in batches:
                    d = ep.dispatch(*batch)
                    whole.append(ep.combine(experts(ep, d.tokens, d.expert_counts, d.expert_offsets), d))
                starts = [
                    ep.dispatch_start(x.clone(), ids.clone(), weights.clone(), lane=lane)
                    for lane, (x, ids, weights) in enumerate(batches)
                ]
                sums = []
                for started in starts:
                    d = ep.dispatch_finish(started)
                    out = experts(ep, d.tokens, d.expert_counts, d.expert_offsets)
                    sums.append(ep.combine_start(out, d))
                    out.fill_(7.0)
                comm.barrier()  # other messages between the halves
                for lane in (1, 0):
                    assert_same_bits(f"lane {lane}", whole[lane], ep.combine_finish(sums[lane]))
                # A half that waits while the other lane goes on for rounds, of both forms of rows.
                late = ep.dispatch_start(*batches[0], lane=1)
                for _ in range(2):
                    d = ep.dispatch(*batches[1], lane=0)
                    y = torch.empty_like(whole[1])
                    out = experts(ep, d.tokens, d.expert_counts, d.expert_offsets)
                    assert ep.combine_finish(ep.combine_start(out, d, out=y)) is y
                    assert_same_bits("meanwhile", whole[1], y)
                d = ep.dispatch_finish(late)
                out = d.records.float() * d.record_weights.sum(1, keepdim=True)
                weighted = ep.combine_finish(ep.combine_start(out, d, weighted=True))
                d = ep.dispatch(*batches[0])
                out = d.records.float() * d.record_weights.sum(1, keepdim=True)
                assert_same_bits("weighted", ep.combine(out, d, weighted=True), weighted)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", exhaustive_but([3], [1, 2, 3, 4]))
def test_two_micro_batches_overlap(size: int, transport: str) -> None:
    if size > 1 or transport != "two_level":  # which needs two hosts
        run_ranks(_overlapping, size, transport, mode="thread", timeout=100)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("transport", "env"),
    [
        ("direct", {}),
        ("staged", {"THINWIRE_BACKEND": "torch"}),
        ("direct", INTERPRETED),
    ],
)
def test_two_micro_batches_of_processes_overlap(transport: str, env: dict[str, str]) -> None:
    run_ranks(_overlapping, 2, transport, env=env, timeout=280)


def _misused(comm: Communicator, transport: str) -> None:
    comm = for_transport(comm, transport)
    sizes = (comm, NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS)
    with ExpertParallel(*sizes, transport=transport) as ep, ExpertParallel(*sizes, transport=transport) as other:
        batch = tokens(comm.rank, "ragged", torch.float32, 0)
        d = ep.dispatch(*batch)
        expected = ep.combine(d.tokens, d)
        started = ep.dispatch_start(*batch)
        with pytest.raises(LaneError, match="another ExpertParallel"):
            other.dispatch_finish(started)
        with pytest.raises(LaneError, match="StartedDispatch; what combine_start returned"):
            ep.combine_finish(started)  # type: ignore[arg-type]
        d = ep.dispatch_finish(started)
        with pytest.raises(LaneError, match="lane 0 is over: it was finished"):
            ep.dispatch_finish(started)
        with pytest.raises(LaneError, match="Tensor; what dispatch returned"):
            ep.combine_start(d, d.tokens)  # type: ignore[arg-type]
        sums = ep.combine_start(d.tokens, d)
        for use in (lambda: d.tokens, d.abandon, lambda: ep.combine(expected, d)):
            with pytest.raises(LaneError, match="this round on lane 0 is over"):
                use()
        assert_same_bits("y", expected, ep.combine_finish(sums))
        with pytest.raises(LaneError, match="combine on lane 0 is over"):
            ep.combine_finish(sums)
        # A later dispatch takes the lane of either half, whole or started itself.
        for later in (ep.dispatch, lambda *batch: ep.dispatch_finish(ep.dispatch_start(*batch))):
            started = ep.dispatch_start(*batch)
            d = later(*batch)
            with pytest.raises(LaneError, match="a later dispatch took its lane"):
                ep.dispatch_finish(started)
            sums = ep.combine_start(d.tokens, d)
            d = later(*batch)
            with pytest.raises(LaneError, match="a later dispatch took its lane"):
                ep.combine_finish(sums)
            assert_same_bits("y", expected, ep.combine(d.tokens, d))
        # What one rank refuses, the others are told, in one half or the other.
        for _ in range(2):
            with pytest.raises(RoutingError, match="refused what dispatch was given|x is torch.float32"):
                ep.dispatch_finish(ep.dispatch_start(batch[0][:, : HIDDEN - (comm.rank == 1)], *batch[1:]))
            d = ep.dispatch_finish(ep.dispatch_start(*batch))
            assert_same_bits("y", expected, ep.combine(d.tokens, d))
        started = ep.dispatch_start(*batch)
    with pytest.raises(LaneError, match="is over"):
        ep.dispatch_finish(started)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_halves_that_do_not_fit_are_refused_and_ranks_go_on(transport: str) -> None:
    run_ranks(_misused, 3, transport, mode="thread", timeout=100)


def _lost(comm: Communicator, transport: str) -> None:
    own = for_transport(Communicator(comm.group, timeout=3.0), transport)
    ep = ExpertParallel(own, NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS, transport=transport, lanes=2)
    batch = tokens(comm.rank, "one_expert", torch.float32, 0)
    ep.combine(ep.dispatch(*batch).tokens, ep._assembly.rounds.open_rounds[0])
    if comm.rank == 1:
        return  # in place of the halves
    with pytest.raises(PeerTimeout) as caught:
        started = ep.dispatch_start(*batch)
        ep.dispatch_finish(started)
    assert caught.value.ranks == (1,)


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_is_lost_between_the_halves_is_named(transport: str) -> None:
    run_ranks(_lost, 2, transport, timeout=60)


def _in_halves(ep: ExpertParallel, inputs: Inputs) -> torch.Tensor:
    """What `_two_lanes` does."""
    x, ids, weights, everybodys = inputs
    mine = everybodys[ep.local_experts.start : ep.local_experts.stop]
    both = ((x, ids, weights), (x.cos(), ids.flip(1), weights.flip(1)))
    starts = [ep.dispatch_start(*batch, lane=lane) for lane, batch in enumerate(both)]
    sums = []
    for started in starts:
        d = ep.dispatch_finish(started)
        sums.append(ep.combine_start(_run_experts(d, d.tokens, mine), d))
    first, second = (ep.combine_finish(started) for started in sums)
    d = ep.dispatch_finish(ep.dispatch_start(first - second, ids.roll(1, 1), weights))
    mine = everybodys[ep.local_experts.start : ep.local_experts.stop]  # gradients add up in the order of uses
    return ep.combine_finish(ep.combine_start(_run_experts(d, d.tokens, mine), d)) + first


def _backward(comm: Communicator, transport: str) -> None:
    with _make(comm, transport, lanes=2) as ep:
        for kind in ("ragged", "empty_first"):
            grads = []
            for layer in (_two_lanes, _in_halves):
                inputs = _inputs(comm.rank, kind)
                y = layer(ep, inputs)
                (y * _target(comm.rank, len(y))).sum().backward()
                grads.append([y.detach(), *(tensor.grad for tensor in (inputs[0], inputs[2], inputs[3]))])
            for whole, halves in zip(*grads, strict=True):
                assert (whole is None) == (halves is None)
                assert whole is None or torch.equal(whole, halves)
        # What was changed after it was started is not differentiated as if it had not been.
        x, ids, weights, _ = _inputs(comm.rank, "one_expert")
        d = ep.dispatch_finish(ep.dispatch_start(x, ids, weights))
        out = d.tokens * 2
        started = ep.combine_start(out, d)
        out.detach().zero_()
        y = ep.combine_finish(started)
        if len(out):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_halves_have_the_gradients_of_whole_rounds(transport: str) -> None:
    run_ranks(_backward, 2, transport, mode="thread", timeout=100)
