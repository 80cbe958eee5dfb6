"""The channel under the direct all-to-all-v: its protocol, among threads of this process that share plain memory."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

import torch

from tests.helpers.channels import send_rows
from tests.helpers.wires import DTYPES, WIRES, assert_same_bits
from thinwire.errors import CapacityError, CountsError, PeerTimeout, ThinwireError
from thinwire.fused.channel import RecvBuffer, Transfer, channel_layout
from thinwire.fused.codec import dequantize, quantize
from thinwire.fused.counts import receive_segments, send_segments
from thinwire.fused.host_channel import HostChannel
from thinwire.triton_kernels.cpu import all_to_all_v as kernels
from thinwire.triton_kernels.signal import SIGNAL_LINE_BYTES
from thinwire.wire import WireFormat

NONE = WireFormat.parse("none")
#: Rows of 64 float32 in pieces this small are whole messages in several pieces.
TINY = 640
#: Seconds that a wait with a timeout of 1 may last: the grace time is 1 too, and the machine may be busy.
MOST = 5.0


class Memory:
    """What `HostChannel` needs of symmetric memory, in one process."""

    def __init__(self, local: torch.Tensor, buffer_ptrs: torch.Tensor) -> None:
        self.local, self.buffer_ptrs, self.num_bytes, self.closed = local, buffer_ptrs, local.numel(), False

    def held(self) -> object:
        return self

    def close(self) -> None:
        self.closed = True


class Group:
    """Channels of ranks that are threads of this process."""

    def __init__(
        self,
        world: int,
        piece_bytes: int = TINY,
        pieces: int = 2,
        timeout: float = 20.0,
        threads: int = 1,
    ) -> None:
        self.layout = channel_layout(world, piece_bytes, pieces)
        self.buffers = [torch.zeros(self.layout.NUM_BYTES, dtype=torch.uint8) for _ in range(world)]
        buffer_ptrs = torch.tensor([buffer.data_ptr() for buffer in self.buffers])
        self.channels: list[Any] = [
            HostChannel(Memory(buffer, buffer_ptrs), self.layout, rank, timeout, None, threads)  # type: ignore[arg-type]
            for rank, buffer in enumerate(self.buffers)
        ]
        self.meeting = threading.Barrier(world)
        self.shared: Any = None

    def run(self, fn: Callable[..., Any], *args: Any, ranks: list[int] | None = None) -> list[Any]:
        """`fn(rank, channel, *args)` of every rank at once; the first exception of any is raised here."""
        chosen = list(range(self.layout.WORLD)) if ranks is None else ranks
        results: dict[int, Any] = {}
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            try:
                results[rank] = fn(rank, self.channels[rank], *args)
            except BaseException as error:
                errors.append(error)
                self.meeting.abort()

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in chosen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank hangs"
        if errors:
            raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
        return [results[rank] for rank in chosen]

    def poison_together(self, rank: int) -> None:
        """Between calls: fills every slot, so that nothing an older call left there can pass for a newer one's."""
        self.meeting.wait(30)
        self.buffers[rank][self.layout.HALVES :] = 0xFF
        self.meeting.wait(30)


def exchange(
    channel: HostChannel,
    x: torch.Tensor,
    send_counts: list[int],
    recv_counts: list[int] | None = None,
    *,
    send_displs: list[int] | None = None,
    recv_displs: list[int] | None = None,
    out: torch.Tensor | None = None,
    wire: WireFormat = NONE,
    wait: bool = True,
) -> Transfer:
    """`all_to_all_v` without its checks."""

    def place(counts: list[int]) -> RecvBuffer:
        receives = receive_segments(counts, recv_displs, None if out is None else out.shape[0])
        return RecvBuffer(receives, x.new_zeros((receives.rows, *x.shape[1:])) if out is None else out)

    sends = send_segments(send_counts, send_displs, x.shape[0])
    return send_rows(
        channel, x, x.shape[1:], sends, None if recv_counts is None else place(recv_counts), place, wire, wait=wait
    )


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


@pytest.mark.parametrize(("piece_bytes", "pieces"), [(0, 4), (100, 4), (128, 0)])
def test_a_layout_of_nonsense_is_refused(piece_bytes: int, pieces: int) -> None:
    with pytest.raises(ThinwireError, match="expected at least 1|expected slots of a positive multiple"):
        channel_layout(2, piece_bytes, pieces)


# ---------------------------------------------------------------------------------------------------------------------
# Rows


Problem = tuple[list[list[int]], list[list[int]], list[list[int]]]


def _problem(world: int, rng: random.Random) -> Problem:
    """Counts [source][target], send displacements, and receive displacements in any order and with gaps."""
    counts = [[rng.choice([0, 0, 1, 2, 3, 11]) for _ in range(world)] for _ in range(world)]
    kind = rng.randrange(4)
    if kind == 0:  # everything to one rank
        counts = [[sum(row) if target == 0 else 0 for target in range(world)] for row in counts]
    if kind == 1:  # a rank without rows
        counts[rng.randrange(world)] = [0] * world
    if kind == 2:  # one row in all
        counts = [[0] * world for _ in range(world)]
        counts[rng.randrange(world)][rng.randrange(world)] = 1
    send_displs = [[rng.randint(0, 3) for _ in row] for row in counts]
    recv_displs = []
    for target in range(world):
        order = rng.sample(range(world), world)
        displs, position = [0] * world, rng.randint(0, 2)
        for source in order:
            displs[source] = position
            position += counts[source][target] + rng.randint(0, 2)
        recv_displs.append(displs)
    return counts, send_displs, recv_displs


def _slices(rank: int, problem: Problem, inputs: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    counts, send_displs, recv_displs = problem
    out = out.clone()
    for source, x in enumerate(inputs):
        count, start, place = counts[source][rank], send_displs[source][rank], recv_displs[rank][source]
        out[place : place + count] = x[start : start + count]
    return out


def _blank_output(rank: int, problem: Problem, tail: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An output with rows to spare, all of them 7."""
    counts, _, recv_displs = problem
    rows = max(displ + row[rank] for displ, row in zip(recv_displs[rank], counts, strict=True)) + 2
    return torch.full((rows, *tail), 7).to(dtype)


def _moves_of(rank: int, channel: HostChannel, group: Group, wire: WireFormat, dtype: torch.dtype) -> None:
    rng = random.Random(7)  # the same on every rank
    generator = torch.Generator().manual_seed(1)
    for hidden in (1, 33, 128, 1500):
        for known in (True, False):
            problem = _problem(group.layout.WORLD, rng)
            counts, send_displs, recv_displs = problem
            # A view: rows lie apart.
            inputs = [torch.randn(max(row) + 3, hidden + 2, generator=generator).to(dtype)[:, 1:-1] for row in counts]
            out = _blank_output(rank, problem, (hidden,), dtype)
            expected = _slices(rank, problem, [dequantize(quantize(x, wire)) for x in inputs], out)
            got = exchange(
                channel,
                inputs[rank],
                counts[rank],
                [row[rank] for row in counts] if known else None,
                send_displs=send_displs[rank],
                recv_displs=recv_displs[rank],
                out=out,
                wire=wire,
            ).wait()
            assert got is out
            assert_same_bits(f"{wire} {dtype} {hidden}", expected, got)
            group.poison_together(rank)


@pytest.mark.parametrize("spec", WIRES)
def test_rows_of_every_wire_and_dtype_arrive_where_they_belong(spec: str) -> None:
    # In pieces of 640 bytes: rows of 1500 elements are longer than a piece, of the others there are several to a piece.
    for world in (1, 2, 3):
        for dtype in DTYPES:
            group = Group(world)
            group.run(_moves_of, group, WireFormat.parse(spec), dtype)


def _flat_moves(rank: int, channel: HostChannel, group: Group, wire: WireFormat, dtype: torch.dtype) -> None:
    rng = random.Random(3)
    for known in (True, False):
        problem = _problem(group.layout.WORLD, rng)
        counts = [[count * rng.choice([1, 500, 1024]) for count in row] for row in problem[0]]
        recv_displs = []
        for target in range(len(counts)):
            ends = [sum(row[target] for row in counts[: source + 1]) + source for source in range(len(counts))]
            recv_displs.append([end - row[target] for end, row in zip(ends, counts, strict=True)])
        problem = counts, problem[1], recv_displs
        inputs = [torch.randn(2 * (max(row) + 3)).to(dtype)[::2] for row in counts]
        if rank == 0:
            group.shared = inputs
        group.meeting.wait(30)
        inputs = group.shared
        out = _blank_output(rank, problem, (), dtype)
        # Quantised, each segment travels as rows of 1024 elements of its own.
        expected = out.clone()
        for source, x in enumerate(inputs):
            count, start, place = counts[source][rank], problem[1][source][rank], recv_displs[rank][source]
            padded = torch.zeros(-(-count // 1024) * 1024, dtype=dtype)
            padded[:count] = x[start : start + count]
            through = dequantize(quantize(padded.view(-1, 1024), wire)).view(-1) if count else padded
            expected[place : place + count] = through[:count]
        got = exchange(
            channel,
            inputs[rank],
            counts[rank],
            [row[rank] for row in counts] if known else None,
            send_displs=problem[1][rank],
            recv_displs=recv_displs[rank],
            out=out,
            wire=wire,
        ).wait()
        assert_same_bits(f"{wire} {dtype}", expected, got)
        group.poison_together(rank)


@pytest.mark.parametrize("spec", ["none", "int8", "int8:row", "int4", "fp8:32"])
@pytest.mark.parametrize("piece_bytes", [2048, 6400], ids="pieces of {} bytes".format)
def test_segments_of_a_flat_tensor_end_anywhere_in_a_row(spec: str, piece_bytes: int) -> None:
    for dtype in DTYPES:
        group = Group(3, piece_bytes)
        group.run(_flat_moves, group, WireFormat.parse(spec), dtype)


def _long_segments(rank: int, channel: HostChannel) -> None:
    sizes = [[5_000_003, 4_300_001], [4_200_000, 4 << 20]]
    inputs = [torch.arange(sum(row) + 9).mul(37 + source).to(torch.uint8) for source, row in enumerate(sizes)]
    received = [row[rank] for row in sizes]
    out = torch.full((sum(received) + 40,), 7, dtype=torch.uint8)
    displs = [3, received[0] + 20]
    expected = _slices(rank, (sizes, [[5, 5], [1, 2]], [displs, displs]), inputs, out)
    exchange(
        channel, inputs[rank], sizes[rank], received, send_displs=[[5, 5], [1, 2]][rank], recv_displs=displs, out=out
    )
    assert torch.equal(out, expected)


def test_segments_of_megabytes_at_odd_addresses() -> None:
    group = Group(2, 1 << 16, 4)
    group.run(_long_segments)


#: Elements of a row: several rows to what is made before it is stored, and one that is longer than that.
_WIDTHS = (1025, 20_001)


def _moves_to(seen: int, rank: int, channel: HostChannel, group: Group, wire: WireFormat) -> None:
    channel._peers[kernels.PEERS.index("seen")] = seen
    generator = torch.Generator().manual_seed(1)
    for tail in (*((width,) for width in _WIDTHS), ()):
        counts = [[3, 61], [57, 2]] if tail else [[5, 150_001], [170_003, 1]]
        inputs = [torch.randn(sum(row), *tail, generator=generator) for row in counts]
        parts = []
        for source, x in enumerate(inputs):
            part = x[sum(counts[source][:rank]) :][: counts[source][rank]]
            rows = part if tail else torch.nn.functional.pad(part, (0, -len(part) % 1024)).view(-1, 1024)
            parts.append(dequantize(quantize(rows, wire)).reshape(-1, *tail)[: len(part)])
        got = exchange(channel, inputs[rank], counts[rank], [row[rank] for row in counts], wire=wire).wait()
        assert_same_bits(f"{wire} {tail}", torch.cat(parts), got)
        group.poison_together(rank)
    if seen:
        assert channel._peers[kernels.PEERS.index("seen")].tolist() == [seen] * 2


@pytest.mark.parametrize("spec", ["none", "int8", "int4"])
def test_rows_are_the_same_to_a_near_peer_and_to_a_far_one(spec: str) -> None:
    never = 1 << 62  # the next look is further off than the clock goes
    for seen in (never, never + 1, 0):
        group = Group(2, 1 << 16, 4)
        group.run(partial(_moves_to, seen), group, WireFormat.parse(spec))


def _many_calls(rank: int, channel: HostChannel, group: Group, calls: int, seed: int) -> None:
    world = group.layout.WORLD
    rng = random.Random(seed)  # the same on every rank
    delays = random.Random(100 * seed + rank)
    for call in range(calls):
        counts = [[rng.choice([0, 1, 5, 40]) for _ in range(world)] for _ in range(world)]
        # Every row says whose it is, for whom, and which.
        rows = [
            torch.tensor([[call, source, target, number] for number in range(count)], dtype=torch.int64).view(-1, 4)
            for source in range(world)
            for target, count in enumerate(counts[source])
        ]
        x = torch.cat(rows[rank * world : (rank + 1) * world])
        if delays.random() < 0.1:
            time.sleep(0.001)
        received = [row[rank] for row in counts]
        got = exchange(channel, x, counts[rank], received if rng.random() < 0.5 else None).wait()
        assert torch.equal(got, torch.cat(rows[rank::world])), (call, got)


@pytest.mark.parametrize(("world", "pieces"), [(2, 1), (3, 2), (4, 3)])
def test_many_calls_in_a_row_through_small_rings(world: int, pieces: int) -> None:
    group = Group(world, 128, pieces)  # four rows to a piece
    group.run(_many_calls, group, 150, world)


def test_epochs_and_piece_numbers_wrap() -> None:
    group = Group(3, 128, 2)
    nearly = 2**31 - 6
    for rank, channel in enumerate(group.channels):
        channel._call[kernels.SCALARS.index("epoch")] = nearly
        channel._peers[kernels.PEERS.index("sent")] = nearly
        channel._peers[kernels.PEERS.index("received")] = nearly
        lines = group.buffers[rank][: group.layout.HALVES].view(torch.int32).view(-1, SIGNAL_LINE_BYTES // 4)
        for first in (group.layout.TAILS, group.layout.HEADS):
            lines[first // SIGNAL_LINE_BYTES :][:3, 0] = nearly
    group.run(_many_calls, group, 30, 5)
    for channel in group.channels:
        assert channel._call[kernels.SCALARS.index("epoch")] == nearly + 30 - 2**32
        sent = channel._peers[kernels.PEERS.index("sent")].tolist()
        assert all(count > 2**31 for peer, count in enumerate(sent) if peer != channel.rank), sent


# ---------------------------------------------------------------------------------------------------------------------
# Calls under way


def _overlapping_calls(rank: int, channel: HostChannel, group: Group) -> None:
    size = group.layout.WORLD
    for first_rows, second_rows in ((1, 1), (50, 50), (0, 50), (50, 0)):
        x = torch.arange(size * 50).view(-1, 1) + 1000.0 * rank
        first = exchange(channel, x, [first_rows] * size, [first_rows] * size, wait=False)
        second = exchange(channel, -x, [second_rows] * size, wait=False)  # ends the first
        expected = [torch.arange(rank * n, (rank + 1) * n).view(-1, 1) for n in (first_rows, second_rows)]
        # The first is there already, into an output of its own.
        assert first.result is not None
        for transfer, part, sign in ((second, expected[1], -1), (first, expected[0], 1)):
            want = sign * torch.cat([part + 1000.0 * source for source in range(size)])
            assert torch.equal(transfer.wait(), want)
            assert transfer.wait() is transfer.wait()


def test_a_later_call_ends_the_one_under_way() -> None:
    group = Group(3, 128)
    group.run(_overlapping_calls, group)


def _dropped_pending(rank: int, channel: HostChannel) -> list[float]:
    x = torch.full((40, 1), float(rank))
    exchange(channel, x, [20, 20], wait=False)  # nobody ever waits for it, and it is longer than the rings
    return exchange(channel, x + 10, [1, 1]).wait().view(-1).tolist()


def test_a_call_that_nobody_waits_for_does_not_stop_the_next() -> None:
    assert Group(2, 128).run(_dropped_pending) == [[10.0, 11.0]] * 2


class Interrupted(Exception):
    """What a signal handler might raise."""


def _interrupt(error: type[BaseException], call: Callable[[], object]) -> None:
    """Makes a call that waits, which this exception of a signal handler's ends."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, handler)
    started = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(error):
            call()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - started < 5.0


@pytest.mark.parametrize("error", [KeyboardInterrupt, Interrupted])
def test_what_a_signal_handler_raises_ends_a_wait_and_the_next_call_ends_what_was_begun(
    error: type[BaseException],
) -> None:
    group = Group(2)
    channel, x = group.channels[0], torch.arange(80.0).view(-1, 1)
    transfer = exchange(channel, x, [40, 40], wait=False)
    _interrupt(error, transfer.wait)
    _interrupt(error, lambda: exchange(channel, x, [1, 1]))  # while it ends the one before, and before it has begun

    def fn(rank: int, channel: HostChannel) -> torch.Tensor:
        if rank == 1:
            assert torch.equal(exchange(channel, -x, [40, 40]).wait(), torch.cat([x[40:], -x[40:]]))
        return exchange(channel, x + rank, [1, 1]).wait()

    assert [rows.view(-1).tolist() for rows in group.run(fn)] == [[0.0, 1.0], [1.0, 2.0]]
    assert torch.equal(transfer.wait(), torch.cat([x[:40], -x[:40]]))


def test_rows_that_found_no_room_are_not_delivered_by_whoever_goes_on() -> None:
    group = Group(2, 128)
    channel, x, refused = group.channels[0], torch.ones(400, 1), CapacityError("no room")
    answers: list[Any] = [refused]

    def place(counts: list[int]) -> RecvBuffer:
        if answers:
            raise answers.pop()
        return RecvBuffer(receive_segments(counts, None, None), torch.zeros(sum(counts), 1))

    transfer = send_rows(channel, x, x.shape[1:], send_segments([200, 200], None, 400), None, place, NONE, wait=False)

    def late(rank: int, channel: HostChannel) -> None:
        # Its header, and the first of many pieces: the other rank is interrupted while it drops them.
        exchange(channel, x, [200, 200], wait=False)

    group.run(late, ranks=[1])
    _interrupt(Interrupted, transfer.wait)
    assert not answers

    def fn(rank: int, channel: HostChannel) -> list[float]:
        return exchange(channel, x[:2] + rank, [1, 1]).wait().view(-1).tolist()

    assert group.run(fn) == [[1.0, 2.0]] * 2
    with pytest.raises(CapacityError, match="no room"):
        transfer.wait()


def test_a_closed_channel_says_so() -> None:
    group = Group(1)
    channel = group.channels[0]
    pending = exchange(channel, torch.ones(2, 2), [2], wait=False)
    channel.close()
    channel.close()
    assert channel.memory.closed
    for call in (pending.wait, lambda: exchange(channel, torch.ones(2, 2), [2])):
        with pytest.raises(ThinwireError, match="closed"):
            call()


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that disagree


def _disagree(rank: int, channel: HostChannel, group: Group, size: int) -> list[str]:
    """Rank 1 expects something else; `size` rows a pair. Returns what it was told."""
    x = torch.arange(3.0 * size * 64).view(-1, 64)
    counts, told = [size] * 3, []
    odd = rank == 1
    for sent, expected, wire, misled in (
        (x, [size, size, size + 1], NONE, [2]),
        (x, [size, size, size - 1], NONE, [2]),
        (x.double() if odd else x, counts, NONE, [0, 2]),
        (x, None, WireFormat.parse("int8:32" if odd else "int8"), [0, 2]),
        (x.view(-1, 8, 8) if odd else x, None, NONE, [0, 2]),
        (x[:, :63] if odd else x, counts, NONE, [0, 2]),
        # What the peers send is fine here, but it has no place.
        (x, None, NONE, []),
    ):
        out = torch.full((3 * size + 2, *sent.shape[1:]), 7).to(sent.dtype)
        placed = {"recv_displs": [0, 0, 0]} if not misled else {}
        if odd:
            transfer = exchange(channel, sent, counts, expected, wire=wire, out=out, wait=False, **placed)
            with pytest.raises(CountsError) as caught:
                transfer.wait()
            told.append(str(caught.value))
            # The segments of the peers that differ, and what lies behind, are as before.
            ends = [sum((expected or counts)[: peer + 1]) for peer in range(3)]
            for peer in misled or [0, 1, 2]:
                assert (out[ends[peer] - (expected or counts)[peer] : ends[peer]] == 7).all(), (peer, told)
            assert (out[ends[2] :] == 7).all()
        else:
            transfer = exchange(channel, sent, counts, counts if expected else None, wire=wire, wait=False)
            if 0 in misled:  # then what rank 1 sends is not what the others expect, either
                with pytest.raises(CountsError, match="^rank 1 sends [^;]*$"):
                    transfer.wait()
            else:
                assert torch.equal(transfer.wait(), x[rank * size : (rank + 1) * size].repeat(3, 1))
        # Everyone goes on.
        again = exchange(channel, x + 1, counts, counts).wait()
        assert torch.equal(again, (x + 1)[rank * size : (rank + 1) * size].repeat(3, 1))
        group.poison_together(rank)
    return told


@pytest.mark.parametrize("size", [1, 2, 40], ids="{} rows".format)
def test_ranks_that_disagree_are_told_and_go_on(size: int) -> None:
    group = Group(3)
    told = group.run(_disagree, group, size)[1]
    assert told[0] == f"rank 2 sends rank 1 {size} rows, but rank 1 expects {size + 1} from rank 2"
    assert told[1] == f"rank 2 sends rank 1 {size} rows, but rank 1 expects {size - 1} from rank 2"
    whole = "WireFormat(name='none', group=0, alignment=32)"
    assert told[2] == "; ".join(
        f"rank {peer} sends rows of 64 elements of torch.float32 as {whole}, but rank 1 expects rows of 64 elements of "
        f"torch.float64 as {whole}"
        for peer in (0, 2)
    )
    assert "as WireFormat(name='int8', group=128, alignment=32), but" in told[3] and "group=32" in told[3]
    assert told[4].endswith(", of another shape")
    assert "rows of 64 elements" in told[5] and "rows of 63 elements" in told[5]
    assert "received rows overlap" in told[6]


def _failing_place(rank: int, channel: HostChannel) -> list[float]:
    x = torch.full((20, 64), float(rank))

    def place(counts: list[int]) -> RecvBuffer:
        raise MemoryError(f"no room for {counts}")

    if rank == 0:
        with pytest.raises(MemoryError, match=r"no room for \[10, 10\]"):
            send_rows(channel, x, x.shape[1:], send_segments([10, 10], None, 20), None, place, NONE, wait=True).wait()
    else:
        assert exchange(channel, x, [10, 10]).wait()[:, 0].tolist() == [0.0] * 10 + [1.0] * 10
    return exchange(channel, x, [1, 1]).wait()[:, 0].tolist()


def test_a_rank_that_cannot_make_its_output_takes_the_rows_in_all_the_same() -> None:
    assert Group(2).run(_failing_place) == [[0.0, 1.0]] * 2


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that stay away


def _waits(rank: int, channel: HostChannel, rows: int) -> tuple[float, PeerTimeout]:
    """A call that cannot be completed: how long that took, and what was raised, now and ever after."""
    x = torch.zeros(3 * rows, 64)
    started = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        exchange(channel, x, [rows] * 3, [rows] * 3).wait()
    waited = time.monotonic() - started
    with pytest.raises(PeerTimeout, match="cannot be used any more") as again:
        exchange(channel, x, [rows] * 3)
    assert time.monotonic() - started - waited < 1.0
    assert again.value.ranks == caught.value.ranks
    return waited, caught.value


def test_survivors_name_a_rank_that_never_comes() -> None:
    group = Group(3, timeout=1.0)
    for waited, error in group.run(_waits, 1, ranks=[0, 1]):
        assert 1.0 <= waited < MOST
        assert error.ranks == (2,) and error.phase == "headers" and error.epoch == 1
        assert "no answer from rank 2 within 1 s" in str(error)
    # To one that comes too late everything has been sent; its next call cannot be answered, and that shows at once.
    late = group.channels[2]
    assert exchange(late, torch.zeros(3, 64), [1] * 3).wait().shape == (3, 64)
    ((waited, error),) = group.run(_waits, 1, ranks=[2])
    assert waited < 1.0 and error.ranks == ()
    assert "ranks 0, 1 waited for this rank for too long and gave up" in str(error)


@pytest.mark.exhaustive
def test_survivors_name_a_rank_that_stops_in_the_middle() -> None:
    group = Group(3, timeout=1.0)

    def fn(rank: int, channel: HostChannel) -> tuple[float, PeerTimeout]:
        if rank == 2:  # the parity part leaves, and no more
            exchange(channel, torch.zeros(120, 64), [40] * 3, [40] * 3, wait=False)
            return 1.0, PeerTimeout("", ranks=[2])
        return _waits(rank, channel, 40)

    for rank, (waited, error) in enumerate(group.run(fn)):
        assert 1.0 <= waited < MOST and error.ranks == (2,)
        assert rank == 2 or error.phase == "pieces"


@pytest.mark.exhaustive
def test_a_rank_that_has_done_its_part_and_is_silent_since_is_not_blamed() -> None:
    group = Group(3, timeout=1.0)

    def fn(rank: int, channel: HostChannel) -> PeerTimeout | None:
        x, counts = torch.zeros(40, 64), [40 if rank == 2 else 0, 0, 0]
        transfer = exchange(channel, x, counts, wait=False)
        if rank == 1:
            assert transfer.wait().shape == (0, 64)
        if rank == 0:
            with pytest.raises(PeerTimeout) as caught:
                transfer.wait()
            return caught.value
        return None

    error = group.run(fn)[0]
    assert error.ranks == (2,) and "waiting for rank 2 in call 1" in str(error)


@pytest.mark.exhaustive
def test_a_report_ends_the_wait_of_the_patient_and_nobody_who_reports_is_blamed() -> None:
    group = Group(3, timeout=30.0)
    group.channels[0]._call[kernels.SCALARS.index("timeout")] = 10**9
    for waited, error in group.run(_waits, 40, ranks=[0, 1]):
        assert 1.0 <= waited < MOST and error.ranks == (2,)
        assert "gave up too" in str(error)


@pytest.mark.exhaustive
def test_what_has_arrived_is_delivered_although_a_peer_gave_up_since() -> None:
    group = Group(3, timeout=1.0)
    x = torch.arange(9.0).view(3, 3)

    def fn(rank: int, channel: HostChannel) -> Any:
        if rank == 0:
            return exchange(channel, x, [1] * 3, wait=False)
        exchange(channel, x, [1] * 3, [1] * 3).wait()
        if rank == 1:
            with pytest.raises(PeerTimeout):
                exchange(channel, x, [1] * 3, [1] * 3).wait()
        return None

    late = group.run(fn)[0]
    assert torch.equal(late.wait(), x[:1].repeat(3, 1))
    with pytest.raises(PeerTimeout):
        exchange(group.channels[0], x, [1] * 3, [1] * 3).wait()


@pytest.mark.exhaustive
def test_a_peer_that_sends_a_piece_now_and_then_is_not_silent() -> None:
    group = Group(2, 128, 2, timeout=2.0)
    buffer, peers_buffer = (memory.view(torch.int32) for memory in group.buffers)
    header = (group.layout.HEADERS + 3 * SIGNAL_LINE_BYTES) // 4  # of rank 1 for the first epoch, whose half is 1
    sequence = (group.layout.TAILS + SIGNAL_LINE_BYTES) // 4
    pieces = 6

    def puppet() -> None:
        """Plays rank 1: a header, and then a piece every half second."""
        while peers_buffer[header - SIGNAL_LINE_BYTES // 4] == 0:
            time.sleep(0.001)
        buffer[header + 4 : header + 12] = peers_buffer[header - 12 : header - 4]  # what a row is, as rank 0 says it
        buffer[header + 1] = pieces
        buffer[header + 2] = 32 * (pieces + 1)
        buffer[header] = 1
        for number in range(pieces):
            time.sleep(0.5)
            buffer[sequence] = number + 1

    helper = threading.Thread(target=puppet, daemon=True)
    helper.start()
    started = time.monotonic()
    got = exchange(group.channels[0], torch.zeros(0, 1), [0, 0]).wait()
    helper.join()
    assert got.shape == (32 * (pieces + 1), 1) and time.monotonic() - started > 2.5
    assert peers_buffer[(group.layout.HEADS) // 4] == pieces


def test_a_call_of_a_signal_handler_ends_the_one_that_waits_for_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(2)
    own, launch, nested = group.channels[0], group.channels[0]._launch, []

    def launch_and_handle(todo: int, num_bytes: int) -> int:
        status: int = launch(todo, num_bytes)
        if status == kernels.PAUSED:
            monkeypatch.undo()
            nested.append(exchange(own, torch.full((4, 8), 5.0), [1, 3], [1, 3]).wait())
        return status

    def fn(rank: int, channel: HostChannel) -> list[torch.Tensor]:
        if rank == 0:
            return [exchange(channel, torch.zeros(5, 8), [2, 3]).wait(), *nested]
        time.sleep(0.3)  # rank 0's wait for its header is paused meanwhile
        first = exchange(channel, torch.ones(5, 8), [4, 1]).wait()
        return [first, exchange(channel, torch.full((6, 8), 6.0), [3, 3], [3, 3]).wait()]

    monkeypatch.setattr(own, "_launch", launch_and_handle)
    found = [[rows[:, 0].tolist() for rows in results] for results in group.run(fn)]
    assert found == [[[0, 0, 1, 1, 1, 1], [5, 6, 6, 6]], [[0, 0, 0, 1], [5, 5, 5, 6, 6, 6]]]
