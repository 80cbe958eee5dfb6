"""Outputs in symmetric memory: the bits of the ordinary way, and nothing stored before its rank enters the call."""

from __future__ import annotations

import ctypes
import random
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

import torch

import thinwire as tw
from thinwire.comm.communicator import Communicator
from thinwire.errors import (
    ArgumentError,
    CapacityError,
    ConfigMismatch,
    CountsError,
    PeerTimeout,
    ThinwireError,
    TransportUnavailable,
)
from thinwire.fused.all_to_all import open_channel
from thinwire.fused.empty import SymmetricTensors
from thinwire.fused.host_channel import HostChannel
from thinwire.testing import run_ranks
from thinwire.triton_kernels.cpu.all_to_all_v import HEADERS, PEERS, SCALARS
from thinwire.triton_kernels.signal import SIGNAL_LINE_BYTES

#: Bytes of a piece: a few rows are more.
PIECE = 640
DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int64, torch.complex64, torch.bool)


def channel_of(comm: Communicator) -> HostChannel:
    """The channel, of small pieces; to be called by all ranks before anything else."""
    channel = open_channel(comm, piece_bytes=PIECE, pieces=2)
    assert isinstance(channel, HostChannel)
    return channel


def values(rng: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bytes that are numbers of the dtype."""
    octets = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), generator=rng).byte()
    return octets.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _random_calls(comm: Communicator, seed: int, calls: int) -> None:
    channel, rank, size = channel_of(comm), comm.rank, comm.size
    together, alone = random.Random(seed), torch.Generator().manual_seed(100 * seed + rank)
    expected = 0
    for _ in range(calls):
        dtype, width = together.choice(DTYPES), together.choice([0, 1, 7, 64, 200])
        tail = together.choice([(width,), (width, 1), ()])
        region = tw.empty(700 * size, *tail, dtype=dtype, comm=comm)
        for _ in range(3):
            counts = [
                [together.choice([0, 1, 3, 40, 200]) if together.random() < 0.8 else 100 for _ in range(size)]
                for _ in range(size)
            ]
            sends, receives = counts[rank], [row[rank] for row in counts]
            in_region = [together.random() < 0.7 for _ in range(size)]  # each receiver decides for itself
            gaps = together.choice([None, 0, 2])
            displs, next_row = [], together.randrange(3)
            for count in receives:
                displs.append(next_row)
                next_row += count + (gaps or 0)
            x = values(alone, dtype, sum(sends), *tail)
            if together.random() < 0.3 and in_region[rank]:
                x = region[-len(x) :].copy_(x) if len(x) else x  # input and output of one memory
            first, options = together.randrange(50), {"recv_displs": displs if gaps is not None else None}
            rows = next_row if gaps is not None else sum(receives)
            out = region[first : first + rows] if in_region[rank] else region.new_empty(rows, *tail)
            bits(out).fill_(1)
            ordinary = out.clone()
            before = bits(region).clone()
            way = {"wire": "none", "comm": comm, **options}
            tw.all_to_all_v(x, sends, receives, out=ordinary, **way)
            if together.random() < 0.3:
                tw.all_to_all_v(x, sends, receives, out=out, async_op=True, **way).wait()
            else:
                assert tw.all_to_all_v(x, sends, receives, out=out, **way) is out
            assert torch.equal(bits(out), bits(ordinary))
            row_bytes = region[:1].nbytes
            if in_region[rank]:
                long = [count * row_bytes > PIECE for peer, count in enumerate(receives) if peer != rank]
                expected += sum(long)
                before[first * row_bytes : (first + rows) * row_bytes] = bits(ordinary)
            assert torch.equal(bits(region), before), "something else in the region was written"
            assert channel.straight_segments == expected


@pytest.mark.parametrize(("size", "mode"), [(1, "thread"), (2, "thread"), (4, "thread")])
def test_rows_are_those_of_the_ordinary_way(size: int, mode: str) -> None:
    run_ranks(_random_calls, size, 7 + size, 8, mode=mode)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("size", "mode"), [(2, "process"), (3, "process"), (5, "thread")])
def test_rows_are_those_of_the_ordinary_way_again(size: int, mode: str, seed: int) -> None:
    run_ranks(_random_calls, size, seed, 40, mode=mode)


def _late_receiver(comm: Communicator) -> None:
    channel_of(comm)
    out, x = tw.empty(200, 64, comm=comm), torch.full((200, 64), 1.0 + comm.rank)
    for number in range(3):
        if comm.rank == 1:
            out.fill_(-5.0 - number)  # the place that it told in the call before is its own again
            time.sleep(0.1)
            assert bool((out == -5.0 - number).all()), "a peer stored before this rank entered the call"
        tw.all_to_all_v(x, [100, 100], [100, 100], out=out, wire="none", comm=comm)
        assert out[:, 0].tolist() == [1.0] * 100 + [2.0] * 100


def test_nothing_is_stored_before_the_receiver_has_entered_the_call() -> None:
    run_ranks(_late_receiver, 2, mode="thread")


def _other_outputs(comm: Communicator) -> None:
    channel_of(comm)
    out, x = tw.empty(200, 64, comm=comm), torch.full((200, 64), 127.0)
    options: dict[str, Any] = {"wire": "none", "comm": comm}
    tw.all_to_all_v(x, [100, 100], [100, 100], out=out, **options)
    out.fill_(-1.0)
    ordinary = torch.empty_like(x)
    for later in (
        lambda: tw.all_to_all_v(x, [100, 100], [100, 100], out=ordinary, **options),
        lambda: tw.all_to_all_v(x, [100, 100], [100, 100], **options),
        lambda: tw.all_to_all_v(x, [100, 100], **options),
        lambda: tw.all_to_all_v(x, [100, 100], out=ordinary, **options),
        lambda: tw.all_to_all_v(x, [100, 100], [100, 100], comm=comm),
    ):
        assert torch.equal(later(), x)
        assert bool((out == -1.0).all()), "rows of a call with another output came into that of an earlier one"
    assert torch.equal(tw.all_to_all_v(x, [100, 100], out=out, **options), x)  # whose counts are not known before


def test_a_place_is_of_one_call() -> None:
    run_ranks(_other_outputs, 2, mode="thread")


def _at_once(comm: Communicator) -> None:
    open_channel(comm, piece_bytes=1 << 22, pieces=1)
    rows, rank = 2048, comm.rank
    out, x = tw.empty(rows, 1024, comm=comm), torch.zeros(rows, 1024)
    sends, receives = ([0, rows], [0, 0]) if rank == 0 else ([0, 0], [rows, 0])
    for number in range(8):
        x.fill_(number)
        tw.all_to_all_v(x[: sum(sends)], sends, receives, out=out[: sum(receives)], wire="none", comm=comm)
        assert rank == 0 or out[-1, -1] == number


def test_rows_are_there_when_the_call_ends() -> None:
    run_ranks(_at_once, 2, mode="thread")


def _disagree(comm: Communicator) -> None:
    channel_of(comm)
    rank, out = comm.rank, tw.empty(400, 64, comm=comm)
    options: dict[str, Any] = {"wire": "none", "comm": comm}
    x = torch.full((200, 64), float(rank))
    for _ in range(2):
        sends = [100, 100] if rank == 0 else [90, 100]
        if rank == 0:
            with pytest.raises(CountsError, match="rank 1 sends rank 0 90 rows, but rank 0 expects 100"):
                tw.all_to_all_v(x, sends, [100, 100], out=out[:200], **options)
        else:
            tw.all_to_all_v(x, sends, [100, 100], out=out[:200], **options)
            assert out[:200, 0].tolist() == [0.0] * 100 + [1.0] * 100
        other = x if rank else x.int()
        with pytest.raises(CountsError, match="sends rows of 64 elements"):
            tw.all_to_all_v(other, [100, 100], [100, 100], out=out[:200].view(other.dtype), **options)
        got = tw.all_to_all_v(x, [100, 100], [100, 100], out=out[:200], **options)
        assert got[:, 0].tolist() == [0.0] * 100 + [1.0] * 100
    with pytest.raises(CountsError, match="shares memory"):
        tw.all_to_all_v(out[100:300], [100, 100], [100, 100], out=out[:200], **options)


def test_ranks_that_disagree_go_on_as_with_any_output() -> None:
    run_ranks(_disagree, 2, mode="thread")


def _gather(comm: Communicator) -> None:
    channel, rank, size = channel_of(comm), comm.rank, comm.size
    x = torch.full((50, 64), float(rank))
    out = tw.empty(50 * size, 64, comm=comm)
    expected = [float(source) for source in range(size) for _ in range(50)]
    assert tw.all_gather(x, out=out, wire="none", comm=comm)[:, 0].tolist() == expected
    out[: 50 * rank].zero_()
    out[50 * rank : 50 * (rank + 1)] = x
    tw.all_gather(out[50 * rank : 50 * (rank + 1)], out=out, wire="none", comm=comm)  # in place
    assert out[:, 0].tolist() == expected
    counts = [20 + 10 * source for source in range(size)]
    some = tw.all_gather_v(x[: counts[rank]], counts, out=out[: sum(counts)], wire="none", comm=comm)
    assert some[:, 0].tolist() == [float(source) for source in range(size) for _ in range(counts[source])]
    assert channel.straight_segments == 3 * (size - 1)


def test_an_all_gather_takes_the_same_way() -> None:
    run_ranks(_gather, 3, mode="thread")


def _redistribute(comm: Communicator) -> None:
    channel, rank = channel_of(comm), comm.rank
    whole = torch.randn(60, 90, generator=torch.Generator().manual_seed(4))
    rows, columns = whole[20 * rank : 20 * (rank + 1)], whole[:, 30 * rank : 30 * (rank + 1)]
    out, options = tw.empty(60 * 90, comm=comm), {"wire": "none", "comm": comm}
    gathered = tw.redistribute(rows, (3, 1), (1, 1), out=out.view(60, 90), **options)
    assert torch.equal(gathered, whole) and channel.straight_segments == 2
    turned = tw.redistribute(rows, (3, 1), (1, 3), out=out[:1800].view(60, 30), **options)
    assert torch.equal(turned, columns) and channel.straight_segments == 4
    turned = tw.redistribute(columns.clone(), (1, 3), (3, 1), out=out[:1800].view(20, 90), **options)
    assert torch.equal(turned, rows) and channel.straight_segments == 4  # its parts lie apart


def test_a_redistribution_takes_it_where_parts_lie_one_after_the_other() -> None:
    run_ranks(_redistribute, 3, mode="thread")


def _memory(comm: Communicator) -> None:
    channel_of(comm)
    tensors: SymmetricTensors
    held = []
    for number in range(3):
        held.append(tw.empty(100, 64, comm=comm))
        tensors = comm.attached("empty")
        assert len(tensors._regions) == number + 1
    one = tensors.tensor_bytes // 3
    assert comm.memory_bytes == tensors.tensor_bytes == 3 * one >= 3 * 25600
    view = held[0][90:]
    held[0] = held[1] if comm.rank else held[0]  # a view is left of it on rank 1, and the whole on rank 0
    del held[2]
    kept = tw.empty(3, comm=comm)
    assert len(tensors._regions) == 3 and kept.tolist() == [0.0] * 3  # one has gone, one came
    del view
    assert tw.empty(0, 64, comm=comm).shape == (0, 64)
    assert len(tensors._regions) == 4  # rank 0 has the first one
    held.clear()
    assert tw.empty((2, 3), dtype=torch.int16, comm=comm).shape == (2, 3)
    assert len(tensors._regions) == 2
    tw.all_to_all_v(torch.ones(2), [1, 1], [1, 1], out=kept[:2], wire="none", comm=comm)
    assert f"empty: 2 tensors in {tensors.tensor_bytes / 2**20:.1f} MiB of symmetric memory" in comm.explain()
    comm.close()
    assert kept.tolist() == [1.0, 1.0, 0.0] and comm.memory_bytes == 0


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.exhaustive)])
def test_memory_goes_when_no_rank_has_a_view_of_it(mode: str) -> None:
    run_ranks(_memory, 2, mode=mode)


def _lost(comm: Communicator) -> None:
    with Communicator(comm.group, timeout=1.0) as brief:
        channel_of(brief)
        out, x = tw.empty(200, 64, comm=brief), torch.ones(200, 64)
        options: dict[str, Any] = {"out": out, "wire": "none", "comm": brief}
        if brief.rank == 1:  # its header and its place leave, and no more
            work: Any = tw.all_to_all_v(x, [100, 100], [100, 100], async_op=True, **options)
            time.sleep(4.0)
            with pytest.raises(PeerTimeout):  # rank 0 had stored all, and wants nothing of this rank any more
                work.wait()
            comm.barrier()
        else:
            with pytest.raises(PeerTimeout, match="rank 1") as caught:
                tw.all_to_all_v(x, [100, 100], [100, 100], **options)
            assert caught.value.ranks == (1,)
            brief.close()
            comm.barrier()
            assert bool((out[:100] == 1).all())  # its own rows; the tensor outlives its communicator
            assert bool((out[103:] == 0).all()), "rank 1 stored more than its first piece"


@pytest.mark.exhaustive
def test_a_rank_that_stops_in_the_middle_is_named() -> None:
    run_ranks(_lost, 2)


@pytest.mark.parametrize("knows", [False, True])
@pytest.mark.parametrize("closes", [False, True])
def test_who_is_late_stores_nothing_into_what_was_the_output_and_is_told(closes: bool, knows: bool) -> None:
    meeting = threading.Barrier(2)

    def fn(comm: Communicator) -> None:
        channel = channel_of(comm)
        channel._voters = None
        out, x = tw.empty(200, 64, comm=comm), torch.ones(200, 64)
        options: dict[str, Any] = {"out": out, "wire": "none", "comm": comm}
        if comm.rank == 1:  # its header and its place leave, and no more
            tw.all_to_all_v(x[:100], [0, 100], [100, 100], async_op=True, **options)
            meeting.wait(30)
            meeting.wait(30)
            if closes:
                comm.close()
            else:
                store_as(channel, 0, channel.layout.STUCK, 1)  # as one that gives up
            out.fill_(3.0)
            meeting.wait(30)
        else:
            meeting.wait(30)
            work: Any = tw.all_to_all_v(x, [100, 100], async_op=True, **options)
            if knows:  # the place, before it is withdrawn
                channel._move(HEADERS)
            meeting.wait(30)
            meeting.wait(30)
            with pytest.raises(PeerTimeout, match="rank 1 ended, or closed" if closes else "rank 1 gave up too"):
                work.wait()
        meeting.wait(30)
        assert comm.rank == 0 or bool((out == 3.0).all())

    run_ranks(fn, 2, mode="thread")


def _arguments(comm: Communicator) -> None:
    rank = comm.rank
    for shape in ((-1,), (2, -3), (1.5,), (True,), ("",), ("ab",), (b"",), ([2, "a"],), ((1, 2), 3), (None,)):
        with pytest.raises(ArgumentError, match="expected ints of at least 0"):
            tw.empty(*shape, comm=comm)  # type: ignore[arg-type]
    for shape in ((0, 2**70), (2**63,), (2**31, 2**31), (0, 2**62, 8)):
        with pytest.raises(ArgumentError, match="more than a tensor can be"):
            tw.empty(*shape, comm=comm)
    for dtype in ("float32", 4, torch.qint8):
        with pytest.raises(ArgumentError, match="dtype"):
            tw.empty(3, dtype=dtype, comm=comm)  # type: ignore[arg-type]
    with pytest.raises(ConfigMismatch, match="shape"):
        tw.empty(3 + rank, comm=comm)
    with pytest.raises(ConfigMismatch, match="dtype"):
        tw.empty(3, dtype=torch.int64 if rank else None, comm=comm)
    for most in (2**45, 2**60):
        with pytest.raises(CapacityError, match="bytes of symmetric memory"):
            tw.empty(most, comm=comm)
    scalar = tw.empty(comm=comm)
    assert scalar.shape == () and scalar.dtype == torch.get_default_dtype()
    with torch.inference_mode():
        inside = tw.empty(4, comm=comm)
    inside.requires_grad_()  # no tensor of inference mode


def test_what_no_tensor_can_be_of_is_refused_on_every_rank() -> None:
    run_ranks(_arguments, 2, mode="thread")


def _tritons(comm: Communicator) -> None:
    with pytest.raises(TransportUnavailable, match="rank 0: its kernels are not numba's"):
        tw.empty(3, comm=comm)


@pytest.mark.exhaustive
def test_ranks_with_tritons_kernels_are_told_that_there_is_none() -> None:
    run_ranks(_tritons, 2, env={"THINWIRE_BACKEND": "triton", "TRITON_INTERPRET": "1"})


def _on_a_gpu(comm: Communicator) -> None:
    comm._device = torch.device("cuda:1" if comm.rank else "cpu")
    with pytest.raises(TransportUnavailable, match="rank 1: its tensors live on cuda:1"):
        tw.empty(3, comm=comm)
    assert comm.attached("all_to_all_v") is None  # nothing was allocated for it


def test_ranks_with_gpus_are_told_that_there_is_none_before_memory_is_taken() -> None:
    run_ranks(_on_a_gpu, 2, mode="thread")


def _refused(comm: Communicator) -> None:
    with pytest.raises(TransportUnavailable, match="CPU ranks; it needs the numba backend and .* on rank 0"):
        tw.empty(3, comm=comm)


@pytest.mark.exhaustive
def test_ranks_without_the_direct_transport_are_told_why() -> None:
    run_ranks(_refused, 2, env={"THINWIRE_BACKEND": "torch"})


def test_a_place_that_cannot_be_is_none() -> None:
    meeting = threading.Barrier(2)

    def fn(comm: Communicator) -> int:
        channel, rank = channel_of(comm), comm.rank
        out, x = tw.empty(200, 64, comm=comm), torch.full((200, 64), 1.0 + rank)
        region = comm.attached("empty")._regions[0]
        end = region.memory.num_bytes - 100 * 256
        line = channel.memory.local[channel.layout.HEADS + SIGNAL_LINE_BYTES :][:SIGNAL_LINE_BYTES].view(torch.int64)
        lies = [(1, 1), (1, -1), (2, -1), (2, end + 1), (2, 2**63 - 1), (2, -(2**63)), (3, 5), (3, -1)]
        for word, value in lies:
            out.fill_(-1.0)
            meeting.wait(30)
            work: Any = None
            if rank == 1:  # its header and its place are at rank 0
                work = tw.all_to_all_v(x, [100, 100], [100, 100], out=out, wire="none", comm=comm, async_op=True)
            meeting.wait(30)
            if rank == 0:
                line[word] = value
                work = tw.all_to_all_v(x, [100, 100], [100, 100], out=out, wire="none", comm=comm, async_op=True)
            assert work.wait()[:, 0].tolist() == [1.0] * 100 + [2.0] * 100
        return channel.straight_segments

    assert run_ranks(fn, 2, mode="thread") == [8, 0]  # rank 0 put all of its own into the ring


def test_a_mark_counts_only_where_a_place_was_told() -> None:
    meeting = threading.Barrier(2)

    def fn(comm: Communicator) -> None:
        channel, rank = channel_of(comm), comm.rank
        tw.empty(200, 64, comm=comm)
        x = torch.full((200, 64), 1.0 + rank)
        line = channel.memory.local[channel.layout.TAILS :][:SIGNAL_LINE_BYTES].view(torch.int64)
        for _ in range(2):
            meeting.wait(30)
            if rank == 1:
                line[1] = int(channel._peers[PEERS.index("received"), 0]) + 1
            got = tw.all_to_all_v(x, [100, 100], [100, 100], wire="none", comm=comm)
            assert got[:, 0].tolist() == [1.0] * 100 + [2.0] * 100

    run_ranks(fn, 2, mode="thread")


def store_as(channel: HostChannel, peer: int, offset: int, value: int) -> None:
    """Writes an int32 into a peer's memory, as this rank's kernel does."""
    address = int(channel.memory.buffer_ptrs[peer]) + offset + channel.rank * SIGNAL_LINE_BYTES
    ctypes.c_int32.from_address(address).value = value


#: Bytes from a tail's flag to the number of pieces that were stored straight.
STORED = 16


def test_a_rank_that_still_stores_is_not_late() -> None:
    def fn(comm: Communicator) -> list[float]:
        channel, rank = channel_of(comm), comm.rank
        channel._call[SCALARS.index("timeout")] = round(0.4e9)  # nanoseconds
        out, x = tw.empty(200, 64, comm=comm), torch.full((200, 64), 1.0 + rank)
        options: dict[str, Any] = {"out": out, "wire": "none", "comm": comm}
        if rank == 0:
            tw.all_to_all_v(x, [100, 100], [100, 100], **options)
        else:
            work: Any = tw.all_to_all_v(x, [100, 100], [100, 100], async_op=True, **options)
            for number in range(9):  # for more than two timeouts, in steps of less than one
                time.sleep(0.1)
                store_as(channel, 0, channel.layout.TAILS + STORED, -8 + number)
            work.wait()
        assert channel.straight_segments == 1
        values: list[float] = out[:, 0].tolist()
        return values

    assert run_ranks(fn, 2, mode="thread") == [[1.0] * 100 + [2.0] * 100] * 2


@pytest.mark.parametrize("stores", [True, False])
def test_of_two_ranks_whose_rows_are_missing_only_the_one_that_stopped_is_lost(stores: bool) -> None:
    over = threading.Barrier(3)

    def fn(comm: Communicator) -> tuple[int, ...]:
        channel, rank = channel_of(comm), comm.rank
        channel._voters = None  # whom the kernel names is looked at
        out, x = tw.empty(300, 64, comm=comm), torch.zeros(300, 64)
        options: dict[str, Any] = {"out": out, "wire": "none", "comm": comm, "async_op": True}
        work: Any = tw.all_to_all_v(x, [100] * 3, [100] * 3, **options)
        lost: tuple[int, ...] = ()
        over.wait(30)
        if rank == 0:
            with pytest.raises(PeerTimeout) as caught:
                work.wait()
            lost = caught.value.ranks
        elif rank == 1:  # which goes on storing
            for number in range(1, 9):
                time.sleep(0.04)
                store_as(channel, 0, channel.layout.TAILS + STORED, number if stores else 0)
        else:  # which gives up
            time.sleep(0.1)
            store_as(channel, 0, channel.layout.STUCK, 1)
        over.wait(30)
        return lost

    assert run_ranks(fn, 3, mode="thread")[0] == (() if stores else (1,))


class Interrupted(Exception):
    """What a signal handler might raise."""


def _interrupted(comm: Communicator) -> list[float]:
    def handler(number: int, frame: object) -> None:
        raise Interrupted

    short = comm.split(groups=[[0, 1]])
    channel_of(short)
    out, x = tw.empty(200, 64, comm=short), torch.full((200, 64), 1.0 + comm.rank)
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupted):
            tw.all_to_all_v(x, [100, 100], [100, 100], out=out, wire="none", comm=short)
        with pytest.raises(ThinwireError, match="has ended at this rank"):
            tw.empty(200, 64, comm=short)
        out.fill_(7.0)  # its user's again: peers are told, and store nothing into it
    else:
        time.sleep(0.5)
        with pytest.raises(PeerTimeout) as caught:
            tw.all_to_all_v(x, [100, 100], [100, 100], out=out, wire="none", comm=short)
        assert caught.value.ranks == (0,)
    comm.barrier()
    values: list[float] = out[:, 0].unique().tolist()
    return values


@pytest.mark.exhaustive
def test_peers_store_nothing_into_the_output_of_a_call_that_was_interrupted() -> None:
    assert run_ranks(_interrupted, 2)[0] == [7.0]


class Raise:
    """Raises at one of the lines of this module's subject that this thread goes through, once."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(("fused/empty.py", "fused/host_channel.py")):
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self.at:
                raise Interrupted
        return self


def _interrupted_anywhere(comm: Communicator) -> int:
    at, ended = 0, 0
    while True:
        at += 1
        short = comm.split(groups=[[0]])
        channel_of(short)
        kept, x, trace = tw.empty(30, comm=short), torch.arange(30.0), Raise(at)
        tw.all_to_all_v(x, [30], [30], out=kept, wire="none", comm=short)
        try:
            sys.settrace(trace)
            tw.empty(40, comm=short)
        except Interrupted:
            sys.settrace(None)
            if short.closed:  # it has not before peers are told of the call
                ended += 1
                with pytest.raises(ThinwireError, match="has ended at this rank, as Interrupted"):
                    tw.empty(40, comm=short)
            else:
                assert tw.empty(40, comm=short).sum() == 0
        finally:
            sys.settrace(None)
        short.close()
        assert torch.equal(kept, x), "what was made before stays readable"
        if trace.seen < at:
            return ended


def test_an_exception_at_any_place_of_empty_ends_the_communicator() -> None:
    assert run_ranks(_interrupted_anywhere, 1, mode="thread")[0] > 20
