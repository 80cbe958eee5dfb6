"""A call that `close`, an interrupt or a rank's end cuts off: who still needs something of it hears at once."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

import torch

import thinwire as tw
from tests.helpers.speeds import exhaustive_but
from thinwire.comm.communicator import Communicator
from thinwire.errors import PeerTimeout, ThinwireError
from thinwire.fused.all_to_all import open_channel
from thinwire.fused.channel import RecvBuffer
from thinwire.fused.counts import receive_segments, send_segments
from thinwire.fused.pulled_legs import PulledLegs, memory_bytes, open_legs
from thinwire.testing import run_ranks
from thinwire.triton_kernels.cpu import pull
from thinwire.wire import WireFormat
from verification.corruption.words import memories

MUCH = 400  # rows that take more pieces than a rank may be ahead


def channel_of(comm: Communicator) -> None:
    """Makes it, with pieces of a few rows."""
    open_channel(comm, piece_bytes=4608)


# What rank 0 sends rank 1, what comes back, and whether rank 1 knows how much it gets.
NEEDS = {"rows": (1, MUCH, True), "room": (MUCH, 1, True), "room for any number": (MUCH, 1, False)}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Kernels for the ranks that are threads here: the tests' limits of time are for calls."""
    run_ranks(channel_of, 2, mode="thread", timeout=300)


def _cut_off(comm: Communicator, need: str, wire: str) -> None:
    channel_of(comm)
    there, back, known = NEEDS[need]
    send, receive = ([0, there], [0, back]) if comm.rank == 0 else ([back, 0], [there, 0])
    options: dict[str, Any] = {"wire": wire, "comm": comm}
    x = torch.ones(sum(send), 64)
    comm.barrier()
    if comm.rank == 1:
        tw.all_to_all_v(x, send, receive if known else None, async_op=True, **options)
        comm.close()
    else:
        with pytest.raises(
            PeerTimeout, match="rank 1 ended, or closed the communicator in the middle of a call"
        ) as caught:
            tw.all_to_all_v(x, send, receive, **options)
        assert caught.value.ranks == (1,)


@pytest.mark.parametrize("wire", exhaustive_but(["none"], ["none", "int8"]))
@pytest.mark.parametrize("need", NEEDS)
def test_who_needs_more_of_a_rank_that_closes_hears_long_before_the_timeout(need: str, wire: str) -> None:
    run_ranks(_cut_off, 2, need, wire, mode="thread", timeout=20)  # the communicator's is 30 s


@pytest.mark.exhaustive
def test_and_so_do_processes() -> None:
    run_ranks(_cut_off, 2, "rows", "none", timeout=20)


def _needed_no_more(comm: Communicator) -> list[float]:
    channel_of(comm)
    x, rows = torch.full((3, 64), float(comm.rank)), [1] * 3
    comm.barrier()
    if comm.rank == 1:
        tw.all_to_all_v(x, rows, rows, wire="none", comm=comm, async_op=True)
        comm.close()
        return []
    if comm.rank == 2:
        time.sleep(0.3)  # rank 0 waits for it meanwhile
    values: list[float] = tw.all_to_all_v(x, rows, rows, wire="none", comm=comm)[:, 0].tolist()
    return values


def test_who_has_all_it_needs_of_such_a_rank_notices_nothing() -> None:
    assert run_ranks(_needed_no_more, 3, mode="thread") == [[0.0, 1.0, 2.0], [], [0.0, 1.0, 2.0]]


def _with_a_late_rank(
    comm: Communicator, counts: list[list[int]], late: int, over: threading.Barrier
) -> tuple[object, int]:
    channel_of(comm)
    sends, receives = counts[comm.rank], [row[comm.rank] for row in counts]
    x = torch.full((sum(sends), 64), float(comm.rank))
    options: dict[str, Any] = {"wire": "none", "comm": comm}
    comm.barrier()
    if comm.rank == 1:
        tw.all_to_all_v(x, sends, receives, async_op=True, **options)
        comm.close()
        over.wait(20)
        return (), 0
    time.sleep(0.8 if comm.rank == late else 0)  # for longer than ranks that give up wait for others, and vote
    found: tuple[object, int]
    try:
        found = "done", len(tw.all_to_all_v(x, sends, receives, **options))
    except PeerTimeout as error:
        found = error.ranks, 0
    over.wait(20)  # who has ended is lost, too
    return found


@pytest.mark.parametrize("late", exhaustive_but([2], [0, 2]))
def test_that_another_needs_more_of_such_a_rank_ends_nothing_for_who_does_not(late: int) -> None:
    counts = [[1, 1, 1], [1, 1, MUCH], [1, 1, 1]]
    found = run_ranks(_with_a_late_rank, 3, counts, late, threading.Barrier(3), mode="thread", timeout=20)
    assert found == [("done", 3), ((), 0), ((1,), 0)]


@pytest.mark.exhaustive
def test_who_is_late_is_not_blamed_by_ranks_that_give_up_as_another_left() -> None:
    counts = [[1, 1, 1, 1], [1, 1, MUCH, 1], [MUCH, 1, 1, 1], [1, 1, 1, 1]]  # rank 0 needs what rank 2 cannot finish
    found = run_ranks(_with_a_late_rank, 4, counts, 3, threading.Barrier(4), mode="thread", timeout=20)
    assert [outcome for outcome, _ in found[:3]] == [(1,), (), (1,)]


def _closed_meanwhile(comm: Communicator, name: str, by: str) -> None:
    channel_of(comm)
    x, rows = torch.ones(2 * MUCH, 64), [MUCH] * 2
    calls: dict[str, Callable[[], object]] = {
        "all_to_all_v": lambda: tw.all_to_all_v(x, rows, rows, wire="none", comm=comm),
        "all_reduce": lambda: tw.all_reduce(x, comm=comm, transport="direct"),
    }
    call = calls[name]
    call()
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.4)
        with pytest.raises(PeerTimeout, match="rank 0 ended, or closed the communicator in the middle of a call"):
            call()
        return

    def handler(number: int, frame: FrameType | None) -> None:
        comm.close()

    if by == "a signal handler":
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
    else:
        threading.Timer(0.1, comm.close).start()
    with pytest.raises(ThinwireError, match="the communicator was closed while this call was under way"):
        call()
    with pytest.raises(ThinwireError, match="this communicator is closed"):
        call()


@pytest.mark.parametrize("by", ["a signal handler", "another thread"])
@pytest.mark.parametrize("name", ["all_to_all_v", "all_reduce"])
def test_who_closes_it_while_the_call_waits_ends_it(name: str, by: str) -> None:
    run_ranks(_closed_meanwhile, 2, name, by, timeout=20)


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("all_to_all_v", "send_kernel"), ("all_to_all_v", "take_kernel"), ("all_reduce", "whole_kernel")],
)
def test_memory_stays_mapped_for_the_kernel_that_is_at_work(
    name: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, x = getattr(pull, kernel), torch.ones(2, 64)

    def closed_meanwhile(*arguments: Any) -> int:
        comm.close()
        gc.collect()
        assert held() is not None
        return int(run(*arguments))

    monkeypatch.setattr(pull, kernel, closed_meanwhile)
    with tw.init() as comm:
        legs: Any = open_legs(comm)
        held = weakref.ref(legs.board)
        with contextlib.suppress(ThinwireError):  # it may have been all that was left to do
            if name == "all_reduce":
                tw.all_reduce(x, comm=comm, transport="direct")
            else:
                tw.all_to_all_v(x, comm=comm, async_op=True).wait()  # type: ignore[union-attr]
        gc.collect()
        assert legs.closed and held() is None


# ---------------------------------------------------------------------------------------------------------------------
# Interrupts, and ranks that end


class Interrupted(Exception):
    """What a signal handler might raise."""


def throw(error: type[BaseException], number: int, frame: FrameType | None) -> None:
    raise error


def interrupted(comm: Communicator) -> None:
    """A signal handler that raises ends the communicator in whatever waits; the peer is told at once."""
    counts = [300, 300]
    x = torch.ones(600, 64)
    calls: list[Callable[[Communicator], object]] = [
        lambda short: tw.all_to_all_v(x, counts, counts, wire="none", comm=short),
        lambda short: tw.all_to_all_v(x, counts, wire="int8", comm=short),
        lambda short: tw.all_reduce(x, comm=short, transport="direct"),
        lambda short: tw.all_to_all_v(x, counts, wire="none", comm=short, async_op=True).wait(),  # type: ignore[union-attr]
        lambda short: (tw.all_to_all_v(x, counts, wire="none", comm=short, async_op=True), short.barrier()),
    ]
    for number, call in enumerate(calls):
        comm.barrier()
        error = (KeyboardInterrupt, Interrupted)[number % 2]
        with comm.split(groups=[[0, 1]]) as short:
            channel_of(short)
            short.barrier()
            if comm.rank == 1:
                time.sleep(0.3)
                begun = time.monotonic()
                with pytest.raises(PeerTimeout) as caught:
                    call(short)
                assert caught.value.ranks == (0,) and time.monotonic() - begun < 8, number
                continue
            before = signal.signal(signal.SIGALRM, partial(throw, error))
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(error):
                call(short)
            signal.signal(signal.SIGALRM, before)
            for again in calls:
                with pytest.raises(ThinwireError, match=f"{error.__name__} came in the middle of a call"):
                    again(short)


def test_an_interrupt_in_the_middle_of_a_call_ends_the_communicator() -> None:
    run_ranks(interrupted, 2, timeout=120)


def test_who_ends_with_its_part_done_is_no_loss_while_another_is_late() -> None:
    legs = [PulledLegs(memory, rank, 640, True, 20.0) for rank, memory in enumerate(memories(memory_bytes(3, 640)))]
    x = torch.ones(3, 64)

    def begin(rank: int) -> Callable[[], torch.Tensor]:
        placed = RecvBuffer(receive_segments([1] * 3, None, None), torch.zeros(3, 64))
        call: Any = SimpleNamespace(
            tail=x.shape[1:], sends=send_segments([1] * 3, None, 3), receives=None, wire=WireFormat("none"), route=None
        )
        return legs[rank].rows.begin(None, call, x, placed, None, False)  # type: ignore[arg-type]

    def find_ended(peers: Sequence[int]) -> list[int]:
        if 1 in peers:  # between two looks it does its part, and ends
            begin(1)
            threading.Timer(0.2, begin, [2]).start()
            return [1]
        return []

    end = begin(0)
    legs[0]._find = find_ended  # type: ignore[assignment]
    assert torch.equal(end(), x)


def test_a_pending_call_outlives_what_its_caller_forgets() -> None:
    comm: Communicator | None = tw.init()
    x = torch.ones(4, 4)
    work: Any = tw.all_to_all_v(x, [4], wire="none", comm=comm, transport="direct", async_op=True)
    comm = None
    gc.collect()
    assert torch.equal(work.wait(), x)
    tw.init().close()


def _wait_after_all_else_is_gone(comm: Communicator) -> None:
    split = comm.split(groups=[[*range(comm.size)]])
    channel_of(split)
    work: Any = tw.all_to_all_v(
        torch.ones(2 * MUCH, 64), [MUCH] * 2, [MUCH] * 2, wire="none", comm=split, transport="direct", async_op=True
    )
    comm.barrier()  # of another group: the call stays under way
    split.close()
    del split
    gc.collect()
    with pytest.raises(ThinwireError, match="closed while this call was under way"):
        work.wait()


def test_a_call_can_be_waited_for_once_its_communicator_is_closed_and_dropped() -> None:
    run_ranks(_wait_after_all_else_is_gone, 2, timeout=120)


def _tensors_of_an_ended_call(comm: Communicator) -> None:
    x = torch.ones(2, 64)
    held = weakref.ref(x)
    work: Any = tw.all_to_all_v(x, [1, 1], wire="none", comm=comm, transport="direct", async_op=True)
    del x
    tw.all_to_all_v(torch.ones(2, 64), [1, 1], [1, 1], wire="none", comm=comm, transport="direct")  # ends it
    gc.collect()
    assert held() is None and torch.equal(work.wait(), torch.ones(2, 64))


def test_a_call_that_a_later_one_has_ended_keeps_no_input() -> None:
    run_ranks(_tensors_of_an_ended_call, 2, mode="thread", timeout=120)
