"""The direct transport on a GPU: its kernels, many ranks on one device, CUDA graphs, and waits that end."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("triton", reason="compiled kernels need Triton")

import torch

from tests.gpu.capture import capture
from tests.gpu.sharing import on_host, run_on_one_gpu, sharing
from tests.gpu.waiting import waiting_refused
from tests.helpers.round_kernels import KERNELS
from tests.helpers.rounds import Tokens, make_lanes, run_round
from tests.helpers.wires import DTYPES, WIRES, assert_same_bits
from tests.moe.test_rounds_direct import (
    HIDDEN,
    MAX_TOKENS,
    NUM_EXPERTS,
    TOP_K,
    assert_same,
    experts,
    tokens,
    transcript,
)
from thinwire.comm.communicator import Communicator
from thinwire.errors import PeerTimeout, RoutingError
from thinwire.moe.parallel import ExpertParallel
from thinwire.testing import run_ranks
from thinwire.triton_kernels.signal import CONTROL_EPOCH, SIGNAL_LINE_BYTES


def _rounds(
    wire: str,
    world: int,
    num_experts: int,
    top_k: int,
    hidden: int,
    counts: tuple[int, ...],
    dtype: torch.dtype,
    align: int = 1,
    first_epoch: int = 0,
) -> None:
    """Rounds of ranks whose kernels are launched one after the other, each step compared with plain torch."""
    generator = torch.Generator().manual_seed(hidden)
    sizes = (world, num_experts, top_k, hidden, max(counts), wire)
    lanes = make_lanes(*sizes, align=align, device="cuda", weight_grads=align > 1)
    for lane in lanes:
        lane.control[CONTROL_EPOCH] = first_epoch
        lane.buffer[: 3 * world * SIGNAL_LINE_BYTES].view(torch.int32).view(3, world, -1)[:, :, 0] = first_epoch
    scales = torch.randn(num_experts, hidden, generator=generator)
    for number in range(3):
        sent = [Tokens.random(count, hidden, top_k, num_experts, dtype, generator) for count in counts]
        on_gpu = [Tokens(mine.x.cuda(), mine.ids.cuda(), mine.weights.cuda()) for mine in sent]
        run_round(KERNELS, lanes, on_gpu, scales, closing=(0,) if number == 1 else ())


@pytest.mark.parametrize("wire", WIRES)
def test_kernels_equal_plain_torch_for_every_wire(wire: str) -> None:
    for dtype in DTYPES:
        _rounds(wire, 4, 13, 4, 5121, (17, 0, 33, 8), dtype)


@pytest.mark.parametrize(
    ("world", "num_experts", "top_k", "hidden", "counts"),
    [
        (1, 8, 2, 7168, (128,)),
        (8, 256, 8, 7168, (128, 0, 1, 64, 128, 3, 100, 77)),
        (3, 2, 2, 1, (5, 0, 4)),
        (2, 300, 32, 9001, (70, 9)),
        (72, 100, 3, 64, tuple(range(72))),
    ],
)
def test_kernels_equal_plain_torch_for_every_shape(
    world: int, num_experts: int, top_k: int, hidden: int, counts: tuple[int, ...]
) -> None:
    _rounds("int8", world, num_experts, top_k, hidden, counts, torch.bfloat16, align=8, first_epoch=2**31 - 2)


@sharing
def test_ranks_that_share_a_gpu_give_what_the_cpu_gives(mode: str) -> None:
    got = run_on_one_gpu(mode, transcript, "direct", True, 4)
    assert_same(mode, run_ranks(transcript, len(got), "staged", False, 4, mode="thread", timeout=300), got)


def _graphs(comm: Communicator) -> None:
    """Dispatch, gather, experts and combine in a graph, replayed with other tokens and other routing each time."""
    with ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS, transport="direct", lanes=2) as ep:
        x, ids, weights = (tensor.to(comm.device) for tensor in tokens(1, "one_expert", torch.bfloat16, 0))
        scales = torch.randn(HIDDEN, device=comm.device)
        capacity = comm.size * MAX_TOKENS * TOP_K

        def step(lane: int) -> tuple[torch.Tensor, torch.Tensor]:
            d = ep.dispatch(x, ids, weights, lane=lane)
            rows, overflow = d.gather(capacity)
            return ep.combine(rows * scales, d), overflow

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(0)
        torch.cuda.current_stream().wait_stream(stream)
        ep.check()
        graph, (y, overflow) = capture(comm, lambda: step(0))
        for seed in range(1, 9):
            kind = ("ragged", "one_expert")[seed % 2]
            fresh = tokens(comm.rank, "one_expert", torch.bfloat16, seed)
            x.copy_(fresh[0])
            ids.copy_(fresh[1] if kind == "one_expert" else torch.randint(-1, NUM_EXPERTS, ids.shape))
            weights.copy_(fresh[2])
            graph.replay()
            replayed = y.clone()
            eager, _ = step(1)
            assert_same_bits(f"replay {seed}", on_host(eager), on_host(replayed))
            assert not overflow
        ep.check()


@sharing
def test_graphs_replay_with_routing_that_changes(mode: str) -> None:
    run_on_one_gpu(mode, _graphs)


def _no_synchronisation(comm: Communicator) -> None:
    with ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS, transport="direct") as ep:
        x, ids, weights = (tensor.to(comm.device) for tensor in tokens(comm.rank, "ragged", torch.bfloat16, 0))

        def step() -> torch.Tensor:
            d = ep.dispatch(x, ids, weights)
            rows, _ = d.gather(comm.size * MAX_TOKENS * TOP_K)
            return ep.combine(rows, d)

        step()
        ep.check()
        with waiting_refused(comm):
            for _ in range(5):
                step()
        ep.check()


@sharing
def test_the_hot_path_never_waits_for_the_device(mode: str) -> None:
    run_on_one_gpu(mode, _no_synchronisation)


def _a_silent_rank(comm: Communicator) -> tuple[tuple[int, ...], float]:
    """The last rank stays away: the others are told so, get NaN, and go on as a process."""
    with ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS, transport="direct", timeout=2.0) as ep:
        x, ids, weights = (tensor.to(comm.device) for tensor in tokens(1, "one_expert", torch.bfloat16, 0))
        d = ep.dispatch(x, ids, weights)
        ep.combine(d.tokens, d)
        ep.check()
        blamed: tuple[int, ...] = ()
        waited = 0.0
        if comm.rank < comm.size - 1:
            started = time.monotonic()
            d = ep.dispatch(x, ids, weights)
            rows, _ = d.gather(MAX_TOKENS)
            y = ep.combine(rows, d)
            with pytest.raises(PeerTimeout) as caught:
                ep.check()
            waited, blamed = time.monotonic() - started, caught.value.ranks
            assert caught.value.phase == "dispatch" and caught.value.lane == 0 and caught.value.epoch == 2
            assert rows.isnan().all() and y.isnan().all()
            with pytest.raises(PeerTimeout):
                ep.dispatch(x, ids, weights)
        comm.barrier()
        ep.rebuild(comm)
        d = ep.dispatch(x, ids, weights)
        assert not ep.combine(d.tokens, d).isnan().any()
        ep.check()
    return blamed, waited


@sharing
def test_waits_end_and_all_name_the_same_rank(mode: str) -> None:
    results = run_on_one_gpu(mode, _a_silent_rank)
    world = len(results)
    for blamed, waited in results[:-1]:  # type: ignore[misc]
        assert blamed == (world - 1,) and waited < 4.0


def _bad_ids(comm: Communicator) -> None:
    with ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS, transport="direct") as ep:
        x, ids, weights = (tensor.to(comm.device) for tensor in tokens(1, "one_expert", torch.bfloat16, 0))
        d = ep.dispatch(x, torch.full_like(ids, NUM_EXPERTS), weights)
        y = ep.combine(d.tokens, d)
        with pytest.raises(RoutingError, match="outside of -1 ... 6"):
            ep.check()
        assert not y.any()
        d = ep.dispatch(x, ids, weights)
        expert_out = experts(ep, d.tokens, d.expert_counts, d.expert_offsets)
        ep.combine(expert_out, d)
        ep.check()


def test_ids_out_of_range_are_told_later_and_count_as_none() -> None:
    run_ranks(_bad_ids, 2, mode="thread", device="cuda", timeout=120)
