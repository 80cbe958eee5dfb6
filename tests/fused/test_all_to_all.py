"""All-to-all-v: exact for every dtype, quantised within the gates, and clear about what it cannot do."""

from __future__ import annotations

import os
import random
import time

import pytest
import torch

from tests.helpers.speeds import exhaustive_but
from tests.helpers.wires import assert_same_bits, relative_error
from thinwire.comm.communicator import Communicator
from thinwire.comm.work import Work
from thinwire.errors import CountsError, PeerTimeout, TransportUnavailable
from thinwire.fused import staged
from thinwire.fused.all_to_all import all_to_all_v, open_channel
from thinwire.fused.codec import dequantize, quantize
from thinwire.testing import run_ranks
from thinwire.wire import WireFormat

EXACT_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


def _ascend_example(comm: Communicator) -> list[list[float]]:
    """The worked example of Ascend's AllToAllVV2, two ranks."""
    inputs = [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 6]][comm.rank]
    send_counts, send_displs = [[2, 4], [2, 1]][comm.rank], [0, 2]
    recv_counts, recv_displs = [[2, 2], [4, 1]][comm.rank], [[0, 2], [0, 4]][comm.rank]
    results = []
    for dtype in (
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
    ):
        got = all_to_all_v(
            torch.tensor(inputs, dtype=dtype),
            send_counts,
            recv_counts,
            send_displs=send_displs,
            recv_displs=recv_displs,
            wire="none",
            comm=comm,
        )
        assert isinstance(got, torch.Tensor) and got.dtype == dtype
        results.append(got.tolist())
    return results


def test_the_example_of_alltoallvv2() -> None:
    first, second = run_ranks(_ascend_example, 2, timeout=120)
    assert first == [[0, 1, 0, 1]] * 7
    assert second == [[2, 3, 4, 5, 2]] * 7


def _random_problem(size: int, seed: int) -> tuple[list[list[int]], list[list[int]], list[list[int]], list[int]]:
    """Counts [source][target], send displacements, receive displacements in shuffled order with gaps, input rows."""
    rng = random.Random(seed)
    counts = [[rng.choice([0, 0, 1, 2, 5, 17]) for _ in range(size)] for _ in range(size)]
    if size > 1:
        counts[rng.randrange(size)] = [0] * size  # a rank that sends nothing, and may have no rows at all
    rows = [sum(row) + rng.choice([0, 3]) for row in counts]
    send_displs = [[rng.randint(0, rows[s] - c) if c <= rows[s] else 0 for c in counts[s]] for s in range(size)]
    recv_displs = []
    for target in range(size):
        order = list(range(size))
        rng.shuffle(order)
        displs, position = [0] * size, rng.randint(0, 2)
        for source in order:
            displs[source] = position
            position += counts[source][target] + rng.randint(0, 2)
        recv_displs.append(displs)
    return counts, send_displs, recv_displs, rows


def _input(rank: int, rows: int, tail: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randint(-100, 100, (rows, *tail), generator=generator)
    return (values > 0) if dtype == torch.bool else values.to(dtype)


def _expected(
    rank: int, problem: tuple[list[list[int]], list[list[int]], list[list[int]], list[int]], inputs: list[torch.Tensor]
) -> torch.Tensor:
    counts, send_displs, recv_displs, _ = problem
    rows = max(recv_displs[rank][s] + counts[s][rank] for s in range(len(counts)))
    out = torch.zeros(rows, *inputs[0].shape[1:], dtype=inputs[0].dtype)
    for source in range(len(counts)):
        count, start, place = counts[source][rank], send_displs[source][rank], recv_displs[rank][source]
        out[place : place + count] = inputs[source][start : start + count]
    return out


def _exact_moves(comm: Communicator, transport: str) -> None:
    for seed, dtype in enumerate(EXACT_DTYPES):
        for tail in ((), (3,), (2, 5)):
            problem = _random_problem(comm.size, seed)
            counts, send_displs, recv_displs, rows = problem
            inputs = [_input(rank, rows[rank], tail, dtype, seed) for rank in range(comm.size)]
            mine = [counts[comm.rank], [counts[s][comm.rank] for s in range(comm.size)]]
            placed = {"send_displs": send_displs[comm.rank], "recv_displs": recv_displs[comm.rank]}
            expected = _expected(comm.rank, problem, inputs)
            x = inputs[comm.rank]
            for recv_counts in (mine[1], None, torch.tensor(mine[1])):
                got = all_to_all_v(
                    x, mine[0], recv_counts, **placed, wire="none", comm=comm, transport=transport, check=True
                )
                assert torch.equal(got, expected), (dtype, tail, seed)
            # What lies between the displacements stays, and out is what is returned.
            out = torch.ones(expected.shape[0] + 2, *tail, dtype=dtype)
            want = out.clone()
            for source in range(comm.size):
                place = slice(recv_displs[comm.rank][source], recv_displs[comm.rank][source] + mine[1][source])
                want[place] = expected[place]
            pending = all_to_all_v(
                x, *mine, **placed, out=out, wire="none", comm=comm, transport=transport, async_op=True
            )
            assert isinstance(pending, Work) and pending.wait() is out and pending.wait() is out
            assert torch.equal(out, want)


@pytest.mark.parametrize("transport", ["direct", "staged"])
@pytest.mark.parametrize(
    ("size", "mode"),
    exhaustive_but(
        [(2, "process"), (3, "thread")], [(1, "process"), (2, "process"), (4, "process"), (3, "thread")], True
    ),
)
def test_exact_moves_of_every_dtype_equal_slicing(size: int, mode: str, transport: str) -> None:
    run_ranks(_exact_moves, size, transport, mode=mode, timeout=120)


def _quantized_moves(comm: Communicator, transport: str, piece_bytes: int) -> None:
    staged.PIECE_BYTES = piece_bytes, 2 * piece_bytes
    if transport == "direct":
        open_channel(comm, None, piece_bytes)
    for seed, (spec, hidden, dtype) in enumerate(
        [("int8", 300, torch.float32), ("int8:row", 129, torch.bfloat16), ("int4", 64, torch.float16)]
        + [("fp8", 7, torch.float32), ("int8", 1, torch.bfloat16)]
    ):
        problem = _random_problem(comm.size, seed)
        counts, send_displs, recv_displs, rows = problem
        generator = torch.Generator().manual_seed(seed)
        inputs = [torch.randn(rows[rank], hidden, generator=generator).to(dtype) for rank in range(comm.size)]
        expected = _expected(comm.rank, problem, [dequantize(quantize(x, spec)) for x in inputs])
        got = all_to_all_v(
            inputs[comm.rank],
            counts[comm.rank],
            send_displs=send_displs[comm.rank],
            recv_displs=recv_displs[comm.rank],
            wire=spec,
            comm=comm,
            transport=transport,
            check=seed % 2 == 0,
        )
        assert isinstance(got, torch.Tensor)
        assert_same_bits(spec, expected, got)
        equal = torch.randn(2 * comm.size, 3, 43).to(dtype)
        split = all_to_all_v(equal, wire=spec, comm=comm, transport=transport)
        assert isinstance(split, torch.Tensor) and split.shape == equal.shape
        own = slice(2 * comm.rank, 2 * comm.rank + 2)
        if dtype != torch.float16:  # int4 has no gate this tight
            assert relative_error(equal[own], split[own]) < 0.04
    # 1-D: counts are in elements, and each segment travels as rows of its own.
    flat = torch.arange(5000.0) - 2500
    send_counts = [1000 + 3 * comm.size] + [7] * (comm.size - 1)
    back = all_to_all_v(flat, send_counts, comm=comm, wire="int8", transport=transport)
    assert isinstance(back, torch.Tensor)
    sent = 1000 + 3 * comm.size if comm.rank == 0 else 7
    assert back.shape == (sent * comm.size,)
    start = 0 if comm.rank == 0 else 1000 + 3 * comm.size + 7 * (comm.rank - 1)
    for source in range(comm.size):
        piece = back[source * sent : (source + 1) * sent]
        assert relative_error(flat[start : start + sent], piece) < 0.0072


@pytest.mark.parametrize("transport", ["direct", "staged"])
@pytest.mark.parametrize(("size", "piece_bytes"), [(1, 1 << 20), (4, 1 << 20), (3, 1280)])
def test_quantized_moves_equal_slicing_of_the_quantised_rows_in_any_number_of_pieces(
    size: int, piece_bytes: int, transport: str
) -> None:
    run_ranks(_quantized_moves, size, transport, piece_bytes, timeout=120)


def _without_backend(comm: Communicator) -> None:
    os.environ["THINWIRE_BACKEND"] = "none"
    with pytest.raises(TransportUnavailable, match="names no backend"):
        all_to_all_v(torch.zeros(4, 8), [1, 1], comm=comm)
    comm.barrier()


def test_a_backend_that_is_not_there_is_noticed_before_counts_are_exchanged() -> None:
    run_ranks(_without_backend, 2)


def _disagreeing(comm: Communicator) -> str:
    recv_counts = [1, 1, 1]
    if comm.rank == 2:
        recv_counts = [1, 4, 1]
    with pytest.raises(CountsError) as caught:
        all_to_all_v(torch.zeros(3, 8), [1, 1, 1], recv_counts, comm=comm, check=True)
    x = torch.zeros(3, 8 + (comm.rank == 1))
    with pytest.raises(CountsError, match=r"rank 1 moves rows of \(9,\)"):
        all_to_all_v(x, [1, 1, 1], [1, 1, 1], comm=comm, check=True)
    wire = WireFormat("int8", 128, 64 if comm.rank == 2 else 32)
    with pytest.raises(CountsError, match="rank 2 moves rows .* alignment=64"):
        all_to_all_v(x[:, :8], [1, 1, 1], [1, 1, 1], wire=wire, comm=comm, check=True)
    return str(caught.value)


def test_check_names_the_pair_that_disagrees_on_every_rank() -> None:
    messages = run_ranks(_disagreeing, 3, timeout=120)
    assert messages == ["rank 1 sends rank 2 1 rows, but rank 2 expects 4 from rank 1"] * 3


def _lying(comm: Communicator, sent: list[int], received: list[int] | None) -> None:
    honest = comm.all_gather_data
    if comm.rank == 1:
        comm.all_gather_data = lambda own, shape: honest((sent, received, own[2]), shape)  # type: ignore[method-assign, index]
    with pytest.raises(CountsError, match=r"rank 1 told \d+ counts, the least -?\w+; expected 2, each at least 0"):
        all_to_all_v(torch.zeros(2, 8), [1, 1], [1, 1], comm=comm, check=True, transport="staged")


@pytest.mark.parametrize(
    ("sent", "received"), [([1], [1, 1]), ([], None), ([1, -1], [1, 1]), ([1, 1], [1, 1, 1]), ([1, 1], [-1, 1])]
)
def test_counts_that_are_none_are_refused_on_every_rank(sent: list[int], received: list[int] | None) -> None:
    run_ranks(_lying, 2, sent, received, mode="thread")


def _other_wires(comm: Communicator, transport: str) -> None:
    # Records of 64 int8 and 64 fp8 elements are equally long: unless told apart one would be read as the other.
    open_channel(comm)  # ranks load the kernels now, which may take longer than the impatient one waits
    short = Communicator(comm.group, timeout=2.0)
    with pytest.raises(CountsError if transport == "direct" else PeerTimeout):
        wire = "fp8" if comm.rank else "int8"
        all_to_all_v(torch.ones(2, 64), [1, 1], [1, 1], wire=wire, comm=short, transport=transport)


@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_rows_of_another_wire_are_never_taken_for_ones_own(transport: str) -> None:
    run_ranks(_other_wires, 2, transport, timeout=120)


def _one_rank_raises(comm: Communicator, transport: str) -> float:
    open_channel(comm)  # ranks load the kernels now, which may take longer than the impatient one waits
    comm = Communicator(comm.group, timeout=2.0)
    if transport == "direct":
        open_channel(comm)
    started = time.monotonic()
    if comm.rank == 1:
        with pytest.raises(CountsError):
            all_to_all_v(torch.zeros(4, 8), [9, 9], [1, 1], comm=comm, transport=transport)
        time.sleep(comm.timeout + 1)
    else:
        with pytest.raises(PeerTimeout) as caught:
            all_to_all_v(torch.zeros(4, 8), [1, 1], [1, 1], comm=comm, transport=transport)
        assert caught.value.ranks == (1,)
    return time.monotonic() - started


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_peers_of_a_rank_that_raised_time_out_instead_of_hanging(transport: str) -> None:
    waited = run_ranks(_one_rank_raises, 2, transport, timeout=120)[0]
    assert 1.0 <= waited <= 10.0
