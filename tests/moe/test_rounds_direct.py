"""The direct transport gives what the staged one gives, to the last bit, on every kind of rank."""

from __future__ import annotations

import time
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from tests.helpers.wires import WIRES, assert_same_bits
from thinwire.comm.communicator import Communicator
from thinwire.errors import CapacityError, ConfigMismatch, LaneError, RoutingError, TransportUnavailable
from thinwire.fused import transport as transports
from thinwire.moe.direct import DirectRounds
from thinwire.moe.parallel import ExpertParallel
from thinwire.moe.pulled import PulledRounds
from thinwire.testing import run_ranks
from thinwire.triton_kernels.compat import HAS_TRITON
from thinwire.triton_kernels.cpu.lane import PulledLane

TOP_K, HIDDEN, NUM_EXPERTS, MAX_TOKENS = 3, 72, 7, 6
INTERPRETED = {"TRITON_INTERPRET": "1", "THINWIRE_BACKEND": "triton"}
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def tokens(rank: int, kind: str, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(31 * seed + rank)
    count = {
        "ragged": (3 * rank + 2) % 7,
        "empty_first": 0 if rank == 0 else 3,
        "one_expert": 4,
        "one_token": rank == 1,
    }
    x = torch.randn(int(count[kind]), HIDDEN, generator=generator).to(dtype)
    ids = torch.randint(-1, NUM_EXPERTS, (x.shape[0], TOP_K), generator=generator)
    if kind == "one_expert":
        ids[:] = NUM_EXPERTS - 1
    if x.shape[0] > 2:
        ids[1] = -1
        ids[2, 1] = ids[2, 0]
    return x, ids, torch.rand(x.shape[0], TOP_K, generator=generator)


def experts(ep: ExpertParallel, tokens: torch.Tensor, counts: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Random experts: identity experts would hide a second quantisation."""
    scales = torch.randn(NUM_EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(8)).to(tokens.device)
    out = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
    for expert, count in enumerate(counts.tolist()):
        rows = slice(int(offsets[expert]), int(offsets[expert]) + count)
        out[rows] = tokens[rows].float() * scales[ep.local_experts.start + expert] + scales[expert].flip(0)
    return out


KINDS = ("ragged", "empty_first", "one_expert", "one_token")


def transcript(comm: Communicator, transport: str, poisoned: bool, rounds: int) -> list[torch.Tensor]:
    """Everything that a rank sees in some rounds of each wire, on the CPU."""
    wires = WIRES
    seen: list[torch.Tensor] = []
    for number, wire in enumerate(wires):
        dtype = DTYPES[number % 3]
        with ExpertParallel(
            comm, NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS, wire=wire, combine_wire=wires[number - 1], lanes=2,
            align=1 + number % 2 * 3, transport=transport,
        ) as ep:  # fmt: skip
            assert ep.transport == transport
            for seed in range(rounds):
                if poisoned:
                    poison(ep)
                x, ids, weights = (
                    tensor.to(comm.device)
                    for tensor in tokens(comm.rank, KINDS[(seed + number) % 4], dtype, seed + number)
                )
                d = ep.dispatch(x, ids, weights, lane=seed % 2)
                expert_out = experts(ep, d.tokens, d.expert_counts, d.expert_offsets)
                seen += [d.tokens, d.expert_counts.clone(), d.expert_offsets.clone()]
                seen.append(ep.combine(expert_out, d))
    return [tensor.cpu() for tensor in seen]


def poison(ep: ExpertParallel) -> None:
    """Overwrites all of the lanes' memory but signals and lines, while no peer can be writing to it."""
    ep.comm.barrier()
    rounds = ep._assembly.rounds
    assert isinstance(rounds, DirectRounds | PulledRounds)
    for lane in rounds.lanes:
        if isinstance(lane, PulledLane):
            lane.memory[:] = 0xFF
        else:
            lane.buffer[lane.layout.IDS :] = 0xFF
    ep.check()
    ep.comm.barrier()


def assert_same(name: str, expected: list[list[torch.Tensor]], got: list[list[torch.Tensor]]) -> None:
    for rank, (left, right) in enumerate(zip(expected, got, strict=True)):
        for place, (a, b) in enumerate(zip(left, right, strict=True)):
            if a.is_floating_point():
                assert_same_bits(f"{name}, rank {rank}, tensor {place}", a, b)
            else:
                assert torch.equal(a, b), f"{name}, rank {rank}, tensor {place}: {a.tolist()} and {b.tolist()}"


def _run(transport: str, rounds: int, **options: object) -> list[list[torch.Tensor]]:
    poisoned = transport == "direct"
    return run_ranks(transcript, 4, transport, poisoned, rounds, timeout=300, **options)  # type: ignore[arg-type]


def test_direct_staged_and_threads_are_bit_identical_for_every_wire() -> None:
    expected = _run("staged", 4)
    assert_same("direct, processes", expected, _run("direct", 4))
    assert_same("direct, threads", expected, _run("direct", 4, mode="thread"))
    assert_same("staged, threads", expected, _run("staged", 4, mode="thread"))


@pytest.mark.exhaustive
def test_the_interpreter_in_four_processes_is_bit_identical_for_every_wire() -> None:
    assert_same("interpreted", _run("staged", 1), _run("direct", 1, env=INTERPRETED))


def _without_process_group(comm: Communicator) -> None:
    with ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS, transport="direct", lanes=2) as ep:
        names = (
            "all_to_all_single", "all_to_all", "isend", "irecv", "send", "recv", "batch_isend_irecv", "all_reduce",
            "all_gather", "all_gather_object", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast",
            "barrier",
        )  # fmt: skip
        with mock.patch.multiple(dist, **dict.fromkeys(names, mock.DEFAULT)) as calls:
            with mock.patch.object(Communicator, "post", side_effect=AssertionError("the process group was used")):
                for lane in (0, 1):
                    x, ids, weights = tokens(comm.rank, "ragged", torch.float32, lane)
                    d = ep.dispatch(x, ids, weights, lane=lane)
                    ep.combine(d.tokens, d)
                    d = ep.dispatch(x, ids, weights, lane=lane)
                    d.gather(5)
                    d.abandon()
                ep.check()
        assert not any(call.called for call in calls.values())


def test_the_direct_path_makes_no_process_group_call() -> None:
    run_ranks(_without_process_group, 2)


def _open_rounds_are_closed(comm: Communicator) -> None:
    """A dispatch on a lane with an open round ends that one everywhere, as activation checkpointing needs."""
    with ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS, transport="direct", wire="none") as ep:
        x, ids, weights = tokens(comm.rank, "one_expert", torch.float32, 0)
        first = ep.dispatch(x, ids, weights)
        second = ep.dispatch(x * 2, ids, weights)
        with pytest.raises(LaneError, match="lane 0 is over"):
            ep.combine(torch.zeros(1, HIDDEN), first)
        with pytest.raises(LaneError, match="gone on to a later round"):
            _ = first.dispatch_traffic
        y = ep.combine(second.tokens, second)
        weight = torch.where((ids == NUM_EXPERTS - 1), weights, 0.0)
        total = torch.zeros(x.shape[0])
        for k in range(TOP_K):
            total += weight[:, k]
        assert_same_bits("y", total[:, None] * (x * 2) + 0.0, y)


def test_a_dispatch_closes_the_open_round_of_its_lane() -> None:
    run_ranks(_open_rounds_are_closed, 3)


def _traffic(comm: Communicator) -> None:
    x, ids, weights = tokens(comm.rank, "ragged", torch.bfloat16, 0)
    figures = []
    for transport in ("staged", "direct"):
        with ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS, transport=transport) as ep:
            d = ep.dispatch(x, ids, weights)
            figures.append((d.dispatch_traffic, d.combine_traffic))
            ep.combine(d.tokens, d)
    (out, back), (direct_out, direct_back) = figures
    assert (direct_out.rows, direct_out.logical_bytes) == (out.rows, out.logical_bytes)
    assert (direct_back.rows, direct_back.logical_bytes) == (back.rows, back.logical_bytes)
    record = ep.wire.row_bytes(HIDDEN)
    peers = comm.size - 1
    assert direct_out.wire_bytes == out.rows * record + peers * (x.shape[0] * TOP_K * 8 + 12)
    assert direct_back.wire_bytes == back.rows * record + peers * 8


def test_traffic_counts_what_was_stored_at_peers() -> None:
    run_ranks(_traffic, 3)


def _many_experts_and_wide_rows(comm: Communicator) -> None:
    for num_experts, top_k, hidden in ((300, 32, 33), (2, 2, 4099), (5, 1, 1)):
        results = []
        for transport in ("staged", "direct"):
            generator = torch.Generator().manual_seed(comm.rank)
            with ExpertParallel(comm, num_experts, top_k, hidden, 9, transport=transport) as ep:
                x = torch.randn(9 - comm.rank, hidden, generator=generator)
                ids = torch.randint(-1, num_experts, (x.shape[0], top_k), generator=generator)
                d = ep.dispatch(x, ids, torch.rand(ids.shape, generator=generator))
                results.append((d.tokens, ep.combine(d.tokens * 3, d)))
        for staged, direct in zip(*results, strict=True):
            assert_same_bits(f"{num_experts} experts, top {top_k}, {hidden}", staged, direct)


def test_any_number_of_experts_and_any_row_length() -> None:
    run_ranks(_many_experts_and_wide_rows, 3, timeout=120)


def _memory(comm: Communicator) -> None:
    room = 100  # as memory comes in pages
    with ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, room, wire="none") as ep:
        any_dtype = ep.memory_bytes
        x, ids, weights = tokens(comm.rank, "ragged", torch.bfloat16, 0)
        d = ep.dispatch(x, ids, weights)
        ep.combine(d.tokens, d)
        assert ep.memory_bytes == any_dtype > 0
        assert "direct (every rank can map every peer's memory)" in ep.explain() and "posix heap" in ep.explain()
    with ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, room, wire="none", dtype=torch.bfloat16) as ep:
        assert ep.memory_bytes < any_dtype
    with pytest.raises(CapacityError):
        ExpertParallel(comm, NUM_EXPERTS, TOP_K, 2**20, 2**20, transport="direct")
    with ExpertParallel(comm, NUM_EXPERTS, TOP_K, 2**20, 2**20) as ep:
        assert ep.transport == "staged" and "direct is not available" in ep.explain()


def test_memory_is_known_beforehand_and_auto_says_why_it_fell_back() -> None:
    run_ranks(_memory, 2)


def _records_in_place(comm: Communicator) -> None:
    """What arrived is copied out of the peers' memory when it is first asked for, and only while the round is open."""
    with ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS, transport="direct", wire="none") as ep:
        x, ids, weights = tokens(comm.rank, "ragged", torch.float32, 0)
        d, later = ep.dispatch(x, ids, weights), ep.dispatch(x, ids, weights)
        with pytest.raises(LaneError, match="is over"):
            _ = d.rows
        rows, used = later.rows, later.index[later.index >= 0]
        assert rows.shape == (comm.size * MAX_TOKENS, ep.wire.row_bytes(HIDDEN, torch.float32))
        assert_same_bits("rows", later.tokens, rows[used].view(torch.float32)[:, :HIDDEN])
        ep.combine(later.tokens, later)
        assert later.rows is rows


def test_rows_are_a_copy_of_what_is_in_the_peers_memory() -> None:
    run_ranks(_records_in_place, 2, mode="thread")


def _different_kernels(comm: Communicator) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            for name, value in INTERPRETED.items():
                patch.setenv(name, value)
        with pytest.raises(ConfigMismatch, match="kernels: 'numba' on rank 0; 'triton' on rank 1"):
            ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS, transport="direct")


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_ranks_that_store_and_ranks_that_read_refuse_each_other() -> None:
    run_ranks(_different_kernels, 2)


def _reference_backend(comm: Communicator) -> None:
    with pytest.raises(TransportUnavailable, match="needs the numba backend and THINWIRE_BACKEND=torch"):
        ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS, transport="direct")
    with ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS) as ep:
        assert ep.transport == "staged" and "THINWIRE_BACKEND=torch" in ep.explain()


def test_plain_torch_has_no_direct_transport() -> None:
    run_ranks(_reference_backend, 2, env={"THINWIRE_BACKEND": "torch"})


def _different_dtypes(comm: Communicator) -> None:
    """All ranks refuse the round, and the lane goes on."""
    with ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS, transport="direct") as ep:
        x, ids, weights = tokens(comm.rank, "ragged", torch.float32, 0)
        for _ in range(2):
            with pytest.raises(RoutingError, match="rank 1 5 tokens of torch.float16"):
                ep.dispatch(x.half() if comm.rank == 1 else x, ids, weights)
            d = ep.dispatch(x, ids, weights)
            ep.combine(d.tokens, d)


def test_ranks_with_different_dtypes_all_refuse_and_go_on() -> None:
    run_ranks(_different_dtypes, 3)


def _a_smaller_grid(comm: Communicator) -> list[torch.Tensor]:
    seen = []
    for num_programs in (None, 1, 5):
        with ExpertParallel(
            comm, NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS, transport="direct", num_programs=num_programs
        ) as ep:
            x, ids, weights = tokens(comm.rank, "ragged", torch.float32, 0)
            d = ep.dispatch(x, ids, weights)
            seen.append(ep.combine(d.tokens, d))
    return seen


@pytest.mark.exhaustive
def test_the_grid_changes_nothing() -> None:
    for seen in run_ranks(_a_smaller_grid, 2, env=INTERPRETED, timeout=120):
        assert_same_bits("one program", seen[0], seen[1])
        assert_same_bits("five programs", seen[0], seen[2])


def _a_long_wait(comm: Communicator) -> float:
    """Seconds of the processor that rank 0's thread takes while it waits about a second for rank 1."""
    with ExpertParallel(comm, 4, 1, 32, 4, transport="direct") as ep:
        batch = torch.ones(2, 32), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
        d = ep.dispatch(*batch)
        ep.combine(d.tokens, d)
        comm.barrier()
        if comm.rank == 1:
            time.sleep(1)
        before = time.thread_time()
        ep.dispatch(*batch)
        return time.thread_time() - before


def test_who_waits_for_long_leaves_the_core_to_others() -> None:
    assert run_ranks(_a_long_wait, 2, timeout=200)[0] < 0.5


def _missing_signal(comm: Communicator) -> None:
    """The rounds above would fail if a rank read before it was told: here a wait is left out."""
    with ExpertParallel(comm, NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS, transport="direct", wire="none") as ep:
        rounds = ep._assembly.rounds
        assert isinstance(rounds, PulledRounds)
        rounds.await_peers = lambda *arguments: None  # type: ignore[method-assign]
        poison(ep)
        x, ids, weights = tokens(comm.rank, "one_expert", torch.float32, 0)
        if comm.rank == 0:
            comm.barrier()  # the owner of the expert that all want is rank 1, and rank 0 is late
        try:
            missed = ep.dispatch(x, ids, weights).tokens.shape[0] < 3 * 2
        except RoutingError:  # its line is not there, nor how many tokens it has
            missed = True
        if comm.rank == 1:
            assert missed
            comm.barrier()


def test_without_its_wait_a_rank_would_miss_tokens() -> None:
    run_ranks(_missing_signal, 2)


def _described(comm: Communicator, transport: str) -> None:
    with ExpertParallel(comm, 4, 2, 64, 8, wire="int8", transport=transport) as ep:
        name = "ExpertParallel(num_experts=4, top_k=2, hidden_size=64, max_tokens=8, wire='int8', rank 0 of 1, "
        assert repr(ep) == f"{name}{transport})"
        d = ep.dispatch(torch.ones(3, 64), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))
        assert repr(d) == f"Dispatched(3 tokens of torch.float32 sent, {transport}, lane 0, open)"
        ep.combine(d.tokens, d)
        assert repr(d).endswith("lane 0, over)")
    assert repr(ep) == f"{name}closed)"


@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_objects_and_errors_say_what_they_are(transport: str) -> None:
    run_ranks(_described, 1, transport, mode="thread")


def _too_large(comm: Communicator) -> None:
    with pytest.warns(RuntimeWarning, match="ExpertParallel takes the staged transport, which is slower: .* bytes"):
        ep = ExpertParallel(comm, 4, 2, 64, 10**9)
    assert ep.transport == "staged"


def test_a_transport_that_memory_is_not_there_for_is_left_with_a_warning() -> None:
    run_ranks(_too_large, 1, mode="thread")


def _out_of_reach(comm: Communicator, reason: str) -> None:
    why = f"{reason} on rank 0" if "installed" in reason else reason
    with pytest.MonkeyPatch.context() as patch:
        if why == reason:
            patch.setattr(transports, "allocate", mock.Mock(side_effect=TransportUnavailable(reason)))
        else:
            patch.setattr(transports, "_why_not", lambda _: reason)
        with pytest.warns(RuntimeWarning, match=f"ExpertParallel takes the staged transport.*: {why}"):
            ExpertParallel(comm, 4, 2, 64, 8)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for size in (8, 9, 8):
                tw.all_reduce(torch.ones(size), wire="none", comm=comm)
            tw.all_reduce(torch.ones(7), wire="none", transport="staged", comm=comm)
        assert len(caught) == 1 and f"all_reduce takes the staged transport, which is slower: {why}" in str(caught[0])


@pytest.mark.parametrize("reason", ["rank 0 cannot map the memory of rank 1", "numba is not installed"])
def test_ranks_of_one_host_that_cannot_reach_each_others_memory_are_told_once(reason: str) -> None:
    run_ranks(_out_of_reach, 1, reason, mode="thread")
