"""The direct all-to-all-v with Triton's kernels, interpreted, between ranks that are processes and share memory.

`TRITON_INTERPRET=1` must be set before Triton is imported, so each test runs its checks in processes of their own. An
interpreted kernel takes its time: rows are few and short, and rings small enough to be filled all the same.
"""

from __future__ import annotations

import os
import random
import time
from itertools import accumulate
from typing import Any

import pytest

pytest.importorskip("triton", reason="interpreting kernels needs Triton")

import torch

from tests.helpers.speeds import exhaustive_but
from thinwire.comm.communicator import Communicator
from thinwire.comm.work import Work
from thinwire.errors import ConfigMismatch, CountsError, PeerTimeout, ThinwireError, TransportUnavailable
from thinwire.fused.all_to_all import all_to_all_v, open_channel
from thinwire.fused.channel import FLAT_ROW, channel_layout
from thinwire.fused.device_channel import DeviceChannel
from thinwire.fused.ops import all_reduce
from thinwire.testing import run_ranks
from thinwire.triton_kernels import all_to_all_v as kernels
from thinwire.triton_kernels.codec_reference import dequantize_reference, quantize_reference
from thinwire.triton_kernels.signal import CONTROL_EPOCH, SIGNAL_LINE_BYTES
from thinwire.wire import WireFormat

INTERPRETED = {"TRITON_INTERPRET": "1", "THINWIRE_BACKEND": "triton"}
#: Rows of 40 int8 elements are records of 64 bytes: ten to a piece.
TINY = 640


def _channel(comm: Communicator, piece_bytes: int, pieces: int = 2) -> DeviceChannel:
    channel = open_channel(comm, None, piece_bytes, pieces)
    assert isinstance(channel, DeviceChannel), channel
    return channel


def _through(x: torch.Tensor, spec: str) -> torch.Tensor:
    """What the rows of x are on arrival."""
    wire = WireFormat.parse(spec)
    if not wire.quantized or not x.numel():
        return x
    rows = x.flatten(1)
    return dequantize_reference(quantize_reference(rows, wire), wire, rows.shape[1], x.dtype).view(x.shape)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _segment(x: torch.Tensor, start: int, count: int, spec: str) -> torch.Tensor:
    rows = x[start : start + count]
    if x.dim() > 1 or spec == "none":
        return _through(rows, spec)
    padded = torch.zeros(-(-count // FLAT_ROW) * FLAT_ROW, dtype=x.dtype)
    padded[:count] = rows
    return _through(padded.view(-1, FLAT_ROW), spec).view(-1)[:count]


def _check(
    comm: Communicator,
    counts: list[list[int]],
    tail: tuple[int, ...],
    dtype: torch.dtype,
    spec: str,
    *,
    known: bool = True,
    spread: bool = False,
    seed: int = 0,
) -> None:
    """One call, compared with slices of what everyone sends; `spread` leaves gaps, and reverses the sources' order."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    gap = (lambda: rng.randint(1, 3)) if spread else (lambda: 0)
    inputs, starts = [], []
    for row in counts:
        displs = [end - count + gap() for end, count in zip(accumulate(row), row, strict=True)]
        shape = (max(displ + count for displ, count in zip(displs, row, strict=True)) + 1, *tail)
        inputs.append((100 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype))
        starts.append(displs)
    received = [row[comm.rank] for row in counts]
    places, position = [0] * comm.size, gap()
    for source in reversed(range(comm.size)) if spread else range(comm.size):
        places[source] = position
        position += received[source] + gap()
    out = torch.full((position + 1, *tail), 7).to(dtype)
    expected = out.clone()
    for source, x in enumerate(inputs):
        rows = _segment(x, starts[source][comm.rank], received[source], spec)
        expected[places[source] : places[source] + received[source]] = rows
    x = inputs[comm.rank]
    if spread and len(tail) == 1:  # rows that lie apart
        x = torch.cat([x, x], 1)[:, : tail[0]]
    got = all_to_all_v(
        x, counts[comm.rank], received if known else None, send_displs=starts[comm.rank], recv_displs=places, out=out,
        wire=spec, comm=comm, transport="direct",
    )  # fmt: skip
    assert got is out
    differs = (_bits(expected) != _bits(out)).nonzero()
    assert not len(differs), f"{spec} {dtype} {tail} known={known}: {len(differs)} bytes differ, first {differs[0]}"


# ---------------------------------------------------------------------------------------------------------------------
# Memory


@pytest.mark.parametrize(("world", "piece_bytes", "pieces"), [(1, None, 4), (2, 128, 1), (3, 640, 3), (72, None, 4)])
def test_no_two_lines_or_slots_share_a_byte(world: int, piece_bytes: int | None, pieces: int) -> None:
    layout = channel_layout(world, piece_bytes, pieces)
    spans = []
    for rank in range(world):
        lines = [
            layout.STUCK,
            layout.HEADERS,
            layout.HEADERS + world * SIGNAL_LINE_BYTES,
            layout.TAILS,
            layout.HEADS,
        ]
        spans += [(line + rank * SIGNAL_LINE_BYTES, SIGNAL_LINE_BYTES) for line in lines]
        spans += [(layout.HALVES + (half * world + rank) * layout.SLOT_BYTES, layout.SLOT_BYTES) for half in (0, 1)]
        first = layout.RINGS + rank * pieces * layout.SLOT_BYTES
        spans += [(first + piece * layout.SLOT_BYTES, layout.SLOT_BYTES) for piece in range(pieces)]
    spans.sort()
    for (start, size), (following, _) in zip(spans, [*spans[1:], (layout.NUM_BYTES, 0)], strict=True):
        assert start % SIGNAL_LINE_BYTES == 0 and start + size <= following
    assert layout.NUM_BYTES <= (66 << 20)


# ---------------------------------------------------------------------------------------------------------------------
# Rows

# Of the first list's pairs one fills its ring of two slots more than twice, and one is empty.
LONG = [[3, 45], [0, 11]]
SHORT = [[2, 1], [4, 0]]


def _quantized(comm: Communicator) -> None:
    channel = _channel(comm, TINY)
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    _check(comm, LONG, (40,), bf16, "int8", seed=1)
    channel.always_looks = False  # as on a GPU
    _check(comm, SHORT, (150,), fp32, "int8:row", spread=True, seed=2)
    _check(comm, SHORT, (3, 11), fp16, "int4", known=False, seed=3)
    _check(comm, [[1, 9], [9, 2]], (200,), bf16, "fp8", spread=True, seed=4)
    _check(comm, SHORT, (700,), bf16, "int8", seed=5)  # a record is longer than a piece
    _check(comm, SHORT, (1,), fp32, "int8", known=False, spread=True, seed=6)
    if comm.rank == 0:  # ring pieces of the calls with more than one piece: to itself, and to rank 1
        assert channel._end.counters.tolist()[:2] == [2, 4 + 4 + 1]


@pytest.mark.exhaustive
def test_quantised_rows_arrive_as_the_codec_says_and_where_they_belong() -> None:
    run_ranks(_quantized, 2, env=INTERPRETED, timeout=300)


def _exact(comm: Communicator) -> None:
    channel = _channel(comm, TINY)
    channel.always_looks = False
    # Addresses and lengths that allow words of 16, 4, 2 bytes and single ones, cut by pieces anywhere.
    _check(comm, LONG, (32,), torch.bfloat16, "none", seed=1)
    for number, (tail, dtype) in enumerate(
        [
            ((33,), torch.bfloat16),
            ((3,), torch.float32),
            ((7,), torch.int8),
            ((2, 2), torch.complex64),
            ((), torch.bool),
        ]
    ):
        _check(comm, [[5, 150], [0, 31]], tail, dtype, "none", known=number % 2 == 0, spread=True, seed=number)
    _check(comm, SHORT, (0,), torch.float32, "none")
    _check(comm, [[0, 0], [0, 0]], (4,), torch.float64, "none", known=False)


@pytest.mark.exhaustive
def test_exact_rows_of_any_dtype_arrive_as_they_are() -> None:
    run_ranks(_exact, 2, env=INTERPRETED, timeout=300)


def _flat(comm: Communicator) -> None:
    channel = _channel(comm, 2432)  # two rows of 1024 elements
    for number, spec in enumerate(("int8", "int4", "int8:row")):
        channel.always_looks = number == 1
        dtype = (torch.bfloat16, torch.float32, torch.float16)[number]
        _check(comm, [[1, 5000], [1024, 0]], (), dtype, spec, known=number < 2, spread=True, seed=number)


@pytest.mark.exhaustive
def test_segments_of_a_flat_tensor_end_anywhere_in_a_row() -> None:
    run_ranks(_flat, 2, env=INTERPRETED, timeout=300)


def _three(comm: Communicator) -> None:
    channel = _channel(comm, TINY, 3)
    channel.always_looks = False
    _check(comm, [[0, 90, 1], [0, 0, 0], [30, 1, 10]], (20,), torch.float32, "none", spread=True)
    _check(comm, [[0, 0, 45], [2, 0, 0], [0, 1, 0]], (40,), torch.bfloat16, "int8", known=False)


@pytest.mark.exhaustive
def test_ranks_with_different_numbers_of_steps() -> None:
    run_ranks(_three, 3, env=INTERPRETED, timeout=300)


def _staged_too(comm: Communicator) -> None:
    _channel(comm, TINY)
    x = torch.randn(6, 70, generator=torch.Generator().manual_seed(comm.rank))
    x[0, 0], x[1, 1], x[2] = float("nan"), float("inf"), -0.0
    results = [all_to_all_v(x, wire="int8:16", comm=comm, transport=name) for name in ("staged", "direct")]
    assert torch.equal(*(_bits(result) for result in results))  # type: ignore[arg-type]
    described = comm.explain().splitlines()[-1]
    assert described == (
        "  all_to_all_v: direct, 0.0 MiB of symmetric memory, pieces of 640 bytes, by Triton's kernels"
    )


@pytest.mark.exhaustive
def test_both_transports_give_the_same_bits() -> None:
    run_ranks(_staged_too, 2, env=INTERPRETED, timeout=120)


def _epochs_and_numbers_wrap(comm: Communicator) -> None:
    channel = _channel(comm, TINY)
    nearly = 2**31 - 2
    channel._end.control[CONTROL_EPOCH] = nearly
    channel._end.counters.fill_(nearly)
    lines = channel.memory.local[: channel.layout.HALVES].view(torch.int32).view(-1, SIGNAL_LINE_BYTES // 4)
    for first in (channel.layout.TAILS, channel.layout.HEADS):
        lines[first // SIGNAL_LINE_BYTES :][:2, 0] = nearly
    comm.barrier()
    for call in range(3):
        channel.always_looks = call == 1
        _check(comm, [[1, 20], [20, 0]], (24,), torch.float32, "none", seed=call)
    assert channel._end.control[CONTROL_EPOCH] == nearly + 3 - 2**32
    assert channel._end.counters.view(2, 2)[:, 1 - comm.rank].tolist() == [nearly + 6] * 2


def test_epochs_and_piece_numbers_wrap() -> None:
    run_ranks(_epochs_and_numbers_wrap, 2, env=INTERPRETED, timeout=120)


# ---------------------------------------------------------------------------------------------------------------------
# Calls under way


def _two_under_way(comm: Communicator) -> None:
    channel = _channel(comm, TINY)
    x = torch.arange(60.0).view(60, 1) + 1000 * comm.rank
    wide = x.repeat(1, 40)  # 160 bytes a row: longer than a ring
    first = all_to_all_v(wide, [30, 30], [30, 30], wire="none", comm=comm, transport="direct", async_op=True)
    second = all_to_all_v(x[:2], [1, 1], wire="none", comm=comm, transport="direct", async_op=True)
    assert isinstance(first, Work) and isinstance(second, Work)
    assert channel._end.control[CONTROL_EPOCH] == 2
    mine = 30 * comm.rank
    expected = torch.cat([wide[mine : mine + 30] + 1000 * (source - comm.rank) for source in range(2)])
    assert second.wait().view(-1).tolist() == [comm.rank, 1000 + comm.rank]
    assert torch.equal(first.wait(), expected) and first.wait() is first.wait()


@pytest.mark.exhaustive
def test_a_later_call_ends_the_one_under_way() -> None:
    run_ranks(_two_under_way, 2, env=INTERPRETED, timeout=120)


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that disagree, and ranks that stay away


def _disagree(comm: Communicator) -> str:
    _channel(comm, TINY)
    odd = comm.rank == 1
    x = torch.ones(40, 20)
    told = ""
    for given in (x.double() if odd else x, x):
        expected = [20, 21] if odd and given is x else [20, 20]
        sent = [20, 21] if odd and given is x else [20, 20]
        rows = torch.ones(41, 20) if odd and given is x else given
        try:
            all_to_all_v(rows, sent, [21, 21] if odd and given is x else expected, wire="none", comm=comm)
        except CountsError as error:
            told += str(error) + "\n"
        _check(comm, [[1, 20], [3, 0]], (20,), torch.float32, "none")  # everyone goes on
    return told


@pytest.mark.exhaustive
def test_where_the_host_looks_ranks_that_disagree_are_told_and_go_on() -> None:
    told = run_ranks(_disagree, 2, env=INTERPRETED, timeout=120)
    whole = "WireFormat(name='none', group=0, alignment=32)"
    rows = [f"rows of 20 elements of torch.float{size} as {whole}" for size in (32, 64)]
    assert told == [
        f"rank 1 sends {rows[1]}, but rank 0 expects {rows[0]}\n",
        f"rank 0 sends {rows[0]}, but rank 1 expects {rows[1]}\n"
        "rank 0 sends rank 1 20 rows, but rank 1 expects 21 from rank 0\n",
    ]


def _disagree_unseen(world: Communicator) -> tuple[bool, str, float]:
    """As on a GPU: the calls return, and later ones say what went wrong."""
    comm = world.split(groups=[range(world.size)])  # of no use after a PeerTimeout
    channel = _channel(comm, TINY)
    channel.always_looks = False
    odd = comm.rank == 1
    out = torch.zeros(66, 20)
    recv_counts = [31, 30] if odd else [30, 30]
    all_to_all_v(torch.ones(60, 20), [30, 30], recv_counts, wire="none", out=out, comm=comm, transport="direct")
    started = time.monotonic()
    with pytest.raises(CountsError if odd else PeerTimeout) as caught:
        for _ in range(2):
            all_to_all_v(torch.ones(60, 20), [30, 30], [30, 30], wire="none", out=out, comm=comm, transport="direct")
    waited = time.monotonic() - started
    for again in (channel.check, lambda: all_to_all_v(torch.ones(2, 20), wire="none", comm=comm, transport="direct")):
        with pytest.raises(CountsError if odd else PeerTimeout, match="cannot be used any more"):
            again()
    assert "failed" in comm.explain()
    world.barrier()
    return bool(out[:60].isnan().all() and (out[61:] == 0).all()), str(caught.value), waited


def test_where_the_host_does_not_look_the_channel_ends_and_nobody_hangs() -> None:
    (_, timeout, waited), (blank, told, _) = run_ranks(_disagree_unseen, 2, env=INTERPRETED, timeout=120)
    assert blank, "rows that were not taken must be NaN"
    assert told == "in call 1: rank 0 sends rank 1 30 rows, but rank 1 expects 31 from rank 0"
    assert "rank 1 gave up too" in timeout and "no answer" not in timeout
    assert waited < 15  # and not the communicator's 30 seconds


def _without_the_last(world: Communicator, looks: bool) -> tuple[Any, ...] | None:
    comm = world.split(groups=[range(world.size)])  # of no use after a PeerTimeout
    channel = _channel(comm, TINY)
    channel.always_looks = looks
    channel.timeout = 2.0
    out = torch.zeros(3, 20)
    failure: PeerTimeout | None = None
    if comm.rank < 2:
        started = time.monotonic()
        with pytest.raises(PeerTimeout) as caught:
            for _ in range(2):  # where nobody looks, the next call says it
                all_to_all_v(torch.ones(3, 20), [1] * 3, [1] * 3, wire="none", out=out, comm=comm, transport="direct")
        failure = caught.value
        with pytest.raises(PeerTimeout, match="cannot be used any more"):
            channel.check()
        assert time.monotonic() - started < 15
    world.barrier()
    return failure and (failure.ranks, failure.epoch, failure.phase)


@pytest.mark.parametrize("looks", exhaustive_but([False], [True, False]))
def test_survivors_name_a_rank_that_never_comes(looks: bool) -> None:
    expected = ((2,), 1, "headers")
    assert run_ranks(_without_the_last, 3, looks, env=INTERPRETED, timeout=120) == [expected, expected, None]


def _half_way(comm: Communicator) -> None:
    channel = _channel(comm, TINY)
    x = torch.ones(20, 20)
    recv = kernels.recv

    def fail(*args: object) -> None:
        raise KeyboardInterrupt

    kernels.recv = fail
    with pytest.raises(KeyboardInterrupt):
        all_to_all_v(x, wire="none", comm=comm, transport="direct")
    kernels.recv = recv
    assert channel.closed and channel.under_way is None
    with pytest.raises(ThinwireError, match="has ended at this rank, as KeyboardInterrupt came in the middle"):
        all_to_all_v(x, wire="none", comm=comm, transport="direct")


def test_a_call_that_was_interrupted_ends_the_communicator() -> None:
    run_ranks(_half_way, 1, env=INTERPRETED, timeout=120)


# ---------------------------------------------------------------------------------------------------------------------
# Other backends


def _with_numba(comm: Communicator) -> None:
    os.environ["THINWIRE_BACKEND"] = "numba" if comm.rank == 0 else "triton"
    for call in (all_to_all_v, all_reduce):
        with pytest.raises(ConfigMismatch, match="numba"):
            call(torch.ones(4, 8), wire="none", comm=comm, transport="direct")


def test_ranks_whose_kernels_are_numbas_are_no_peers_of_tritons() -> None:
    pytest.importorskip("numba", reason="the other rank's kernels need numba")
    run_ranks(_with_numba, 2, env=INTERPRETED, timeout=120)


def _refused(comm: Communicator) -> str:
    with pytest.raises(TransportUnavailable) as caught:
        all_to_all_v(torch.zeros(2, 8), comm=comm, wire="none", transport="direct")
    return str(caught.value)


def test_without_the_interpreter_cpu_tensors_are_refused() -> None:
    environ = {"TRITON_INTERPRET": "0", "THINWIRE_BACKEND": "triton"}
    assert run_ranks(_refused, 1, env=environ) == [
        "all_to_all_v cannot take the direct transport: Triton runs on CPU tensors only under its interpreter, "
        "TRITON_INTERPRET=1, on rank 0"
    ]
