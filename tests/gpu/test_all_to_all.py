"""The direct all-to-all-v on a GPU: ranks that share one device, CUDA graphs, and failures that are told later."""

from __future__ import annotations

import random
import re
import time
from itertools import accumulate

import pytest

pytest.importorskip("triton", reason="compiled kernels need Triton")

import torch

from tests.gpu.capture import capture
from tests.gpu.sharing import on_host, run_on_one_gpu, sharing
from tests.gpu.waiting import waiting_refused
from tests.helpers.wires import DTYPES, WIRES, assert_same_bits, magnitudes
from thinwire.comm.communicator import Communicator
from thinwire.comm.work import Work
from thinwire.errors import CountsError, PeerTimeout
from thinwire.fused.all_to_all import all_to_all_v, open_channel
from thinwire.fused.device_channel import DeviceChannel
from thinwire.triton_kernels.codec_reference import dequantize_reference, quantize_reference
from thinwire.wire import WireFormat

#: Small enough that segments of a few hundred rows go several times round their rings.
PIECE_BYTES = 32768


def _channel(comm: Communicator, piece_bytes: int | None = PIECE_BYTES) -> DeviceChannel:
    channel = open_channel(comm, None, piece_bytes)
    assert isinstance(channel, DeviceChannel), channel.reason
    return channel


def _through(x: torch.Tensor, spec: str) -> torch.Tensor:
    """What rows on the CPU are on arrival."""
    wire = WireFormat.parse(spec)
    if not wire.quantized or not x.shape[0]:
        return x
    return dequantize_reference(quantize_reference(x, wire), wire, x.shape[1], x.dtype)


def _same_bytes(name: str, expected: torch.Tensor, got: torch.Tensor) -> None:
    if expected.is_floating_point() and expected.dtype.itemsize < 8:
        assert_same_bits(name, expected, got)
    else:
        assert torch.equal(expected.view(-1).view(torch.uint8), got.reshape(-1).view(torch.uint8)), name


def _move(
    comm: Communicator, counts: list[list[int]], hidden: int, dtype: torch.dtype, spec: str, seed: int, known: bool
) -> None:
    """One call with gaps between segments on both sides, compared with slices of what everyone sends."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    inputs, starts = [], []
    for row in counts:
        displs = [end - count + rng.randint(0, 2) for end, count in zip(accumulate(row), row, strict=True)]
        rows = max(displ + count for displ, count in zip(displs, row, strict=True)) + 1
        if dtype in DTYPES:
            inputs.append(magnitudes(rows, hidden, dtype, generator))
        else:
            inputs.append(torch.randint(-100, 100, (rows, hidden), generator=generator).to(dtype))
        starts.append(displs)
    received = [row[comm.rank] for row in counts]
    places, position = [0] * comm.size, 1
    for source in rng.sample(range(comm.size), comm.size):
        places[source] = position
        position += received[source] + rng.randint(0, 2)
    out = torch.full((position + 1, hidden), 7).to(dtype)
    expected = out.clone()
    for source, x in enumerate(inputs):
        start, count = starts[source][comm.rank], received[source]
        expected[places[source] : places[source] + count] = _through(x[start : start + count], spec)
    out = out.to(comm.device)
    got = all_to_all_v(
        inputs[comm.rank].to(comm.device), counts[comm.rank], received if known else None,
        send_displs=starts[comm.rank], recv_displs=places, out=out, wire=spec, comm=comm, transport="direct",
    )  # fmt: skip
    assert got is out
    _same_bytes(f"{spec} {dtype} {hidden} known={known}", expected, on_host(out))


def _every_wire(comm: Communicator) -> None:
    channel = _channel(comm)
    rng = random.Random(comm.size)  # the same on every rank
    for number, spec in enumerate(WIRES):
        for dtype in DTYPES:
            for hidden in (1, 200, 5121):
                counts = [[rng.choice([0, 0, 1, 3, 60]) for _ in range(comm.size)] for _ in range(comm.size)]
                _move(comm, counts, hidden, dtype, spec, number, known=rng.random() < 0.5)
    for dtype in (torch.int64, torch.int8, torch.float64, torch.bool, torch.complex64):
        for hidden in (1, 33, 4000):
            counts = [[rng.choice([0, 1, 90]) for _ in range(comm.size)] for _ in range(comm.size)]
            _move(comm, counts, hidden, dtype, "none", hidden, known=rng.random() < 0.5)
    channel.check()


@sharing
def test_rows_of_every_wire_and_dtype_arrive_where_they_belong(mode: str) -> None:
    run_on_one_gpu(mode, _every_wire)


def _flat(comm: Communicator) -> None:
    channel = _channel(comm)
    for spec in ("none", "int8", "int4"):
        x = torch.randn(comm.size * 3001, generator=torch.Generator().manual_seed(comm.rank)).bfloat16()
        counts = [3001 - 100 * abs(comm.rank - peer) for peer in range(comm.size)]
        got = all_to_all_v(x.to(comm.device), counts, counts, wire=spec, comm=comm, transport="direct")
        everyone = [
            torch.randn(comm.size * 3001, generator=torch.Generator().manual_seed(rank)).bfloat16()
            for rank in range(comm.size)
        ]
        expected = []
        for source, theirs in enumerate(everyone):
            sent = [3001 - 100 * abs(source - peer) for peer in range(comm.size)]
            start = sum(sent[: comm.rank])
            padded = torch.zeros(3072, dtype=x.dtype)
            padded[: sent[comm.rank]] = theirs[start : start + sent[comm.rank]]
            expected.append(_through(padded.view(3, 1024), spec).view(-1)[: sent[comm.rank]])
        assert isinstance(got, torch.Tensor)
        assert_same_bits(spec, torch.cat(expected), on_host(got))
    channel.check()


@sharing
def test_segments_of_a_flat_tensor_end_anywhere_in_a_row(mode: str) -> None:
    run_on_one_gpu(mode, _flat)


def _many_calls(comm: Communicator) -> None:
    """Nothing is waited for between the calls, so ranks run ahead of each other as far as the protocol lets them."""
    channel = _channel(comm, 1024)
    rng = random.Random(3)
    results = []
    for call in range(60):
        counts = [[rng.choice([0, 1, 40, 300]) for _ in range(comm.size)] for _ in range(comm.size)]
        rows = [
            torch.tensor([(call, source, target, row) for row in range(counts[source][target])], dtype=torch.int64)
            for source in range(comm.size)
            for target in range(comm.size)
        ]
        rows = [of_a_pair.view(-1, 4) for of_a_pair in rows]
        x = torch.cat(rows[comm.rank * comm.size : (comm.rank + 1) * comm.size]).to(comm.device)
        pending = all_to_all_v(
            x, counts[comm.rank], [row[comm.rank] for row in counts], wire="none", comm=comm, transport="direct",
            async_op=call % 3 == 0,
        )  # fmt: skip
        got = pending.wait() if isinstance(pending, Work) else pending
        results.append((torch.cat(rows[comm.rank :: comm.size]), got))
    channel.check()
    for expected, got in results:
        assert torch.equal(expected, on_host(got))


@sharing
def test_many_calls_in_a_row_through_small_rings(mode: str) -> None:
    run_on_one_gpu(mode, _many_calls)


def _two_under_way(comm: Communicator) -> None:
    channel = _channel(comm)
    x = torch.arange(300.0 * comm.size, device=comm.device).view(-1, 1) + 10000 * comm.rank
    counts = [300] * comm.size
    first = all_to_all_v(x, counts, counts, wire="none", comm=comm, transport="direct", async_op=True)
    own = torch.cuda.current_stream()
    with torch.cuda.stream(torch.cuda.Stream()):  # another stream, whose call ends the first
        torch.cuda.current_stream().wait_stream(own)
        second = all_to_all_v(-x, counts, wire="none", comm=comm, transport="direct")
        assert isinstance(second, torch.Tensor)
        host = on_host(second)
    assert isinstance(first, Work)
    mine = torch.arange(300.0 * comm.rank, 300.0 * (comm.rank + 1))
    expected = torch.cat([mine + 10000 * source for source in range(comm.size)]).view(-1, 1)
    assert torch.equal(first.wait().cpu(), expected) and torch.equal(host, -expected)
    channel.check()


@sharing
def test_a_later_call_ends_the_one_under_way_on_whatever_stream(mode: str) -> None:
    run_on_one_gpu(mode, _two_under_way)


# ---------------------------------------------------------------------------------------------------------------------
# The host


def _graphs(comm: Communicator) -> None:
    """Two calls in a graph, one through the rings, replayed with other rows each time and eager calls in between."""
    channel = _channel(comm)
    counts, few = [70] * comm.size, [comm.rank] * comm.size
    x = torch.zeros(70 * comm.size, 2048, dtype=torch.bfloat16, device=comm.device)
    y = torch.zeros(comm.rank * comm.size, 33, device=comm.device)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        a = all_to_all_v(x, counts, counts, wire="int8", comm=comm, transport="direct")
        b = all_to_all_v(y, few, list(range(comm.size)), wire="none", comm=comm, transport="direct")
        assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        return a, b

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    channel.check()

    def captured() -> tuple[torch.Tensor, torch.Tensor]:
        results = step()
        with pytest.raises(CountsError, match="recv_counts must be given"):
            all_to_all_v(x, counts, wire="int8", comm=comm, transport="direct")
        return results

    graph, (a, b) = capture(comm, captured)
    for seed in range(6):
        generator = torch.Generator().manual_seed(100 * seed + comm.rank)
        x.copy_(torch.randn(x.shape, generator=generator))
        y.copy_(torch.randn(y.shape, generator=generator))
        graph.replay()
        replayed = a.clone(), b.clone()
        eager = step()
        for name, expected, got in zip(("quantised", "exact"), eager, replayed, strict=True):
            assert_same_bits(f"{name}, replay {seed}", on_host(expected), on_host(got))
        sent = torch.randn(x.shape, generator=torch.Generator().manual_seed(100 * seed)).bfloat16()
        start = 70 * comm.rank
        assert_same_bits("from rank 0", _through(sent[start : start + 70], "int8"), on_host(replayed[0][:70]))
    channel.check()


@sharing
def test_graphs_replay_with_other_rows(mode: str) -> None:
    run_on_one_gpu(mode, _graphs)


def _no_synchronisation(comm: Communicator) -> None:
    channel = _channel(comm)
    counts = [90] * comm.size
    x = torch.randn(90 * comm.size, 1024, device=comm.device).bfloat16()

    def step() -> None:
        for wire in ("int8", "none"):
            all_to_all_v(x, counts, counts, wire=wire, comm=comm, transport="direct")
            pending = all_to_all_v(x, counts, counts, wire=wire, comm=comm, transport="direct", async_op=True)
            assert isinstance(pending, Work)
            pending.wait()

    step()
    channel.check()
    with waiting_refused(comm):
        for _ in range(5):
            step()
    channel.check()


@sharing
def test_calls_with_receive_counts_never_wait_for_the_device(mode: str) -> None:
    run_on_one_gpu(mode, _no_synchronisation)


# ---------------------------------------------------------------------------------------------------------------------
# Failures


def _a_silent_rank(comm: Communicator) -> tuple[tuple[int, ...], float]:
    """The last rank stays away: the others' output is NaN, and the next call says why."""
    channel = _channel(comm)
    channel.timeout = 2.0
    counts = [2] * comm.size
    x = torch.ones(2 * comm.size, 64, device=comm.device)
    all_to_all_v(x, counts, counts, wire="int8", comm=comm, transport="direct")
    channel.check()
    comm.barrier()
    blamed: tuple[int, ...] = ()
    waited = 0.0
    if comm.rank < comm.size - 1:
        started = time.monotonic()
        got = all_to_all_v(x, counts, counts, wire="int8", comm=comm, transport="direct")
        with pytest.raises(PeerTimeout) as caught:
            channel.check()
        waited, blamed = time.monotonic() - started, caught.value.ranks
        assert isinstance(got, torch.Tensor) and got.isnan().all()
        assert caught.value.phase == "headers" and caught.value.epoch == 2
        with pytest.raises(PeerTimeout, match="cannot be used any more"):
            all_to_all_v(x, counts, counts, wire="int8", comm=comm, transport="direct")
    comm.barrier()
    return blamed, waited


@sharing
def test_survivors_name_a_rank_that_never_comes(mode: str) -> None:
    results = run_on_one_gpu(mode, _a_silent_rank)
    for blamed, waited in results[:-1]:  # type: ignore[misc]
        assert blamed == (len(results) - 1,) and waited < 5.0


def _a_wrong_count(comm: Communicator) -> str:
    """Rank 1 expects a row too many: it is told, and the others are not left waiting."""
    channel = _channel(comm)
    counts = [80] * comm.size
    expected = [81, *counts[1:]] if comm.rank == 1 else counts
    x = torch.ones(80 * comm.size, 1024, device=comm.device)
    all_to_all_v(x, counts, counts, wire="none", comm=comm, transport="direct")  # kernels are compiled
    channel.check()
    comm.barrier()
    started = time.monotonic()
    all_to_all_v(x, counts, expected, wire="none", comm=comm, transport="direct")
    with pytest.raises(CountsError if comm.rank == 1 else PeerTimeout) as caught:
        channel.check()
    assert time.monotonic() - started < 15  # not the communicator's 30 seconds
    comm.barrier()
    return str(caught.value)


@sharing
def test_a_count_that_differs_ends_the_channel_and_nobody_hangs(mode: str) -> None:
    told = run_on_one_gpu(mode, _a_wrong_count)
    assert told[1] == "in call 2: rank 0 sends rank 1 80 rows, but rank 1 expects 81 from rank 0"
    for text in (told[0], *told[2:]):
        assert re.search(r"\b1\b[^;]* gave up", str(text)), text
