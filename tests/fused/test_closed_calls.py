"""A call that `close` cuts off: peers who still need something of it hear at once, others notice nothing."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

import torch

import thinwire as tw
from tests.fused.test_empty import channel_of
from tests.helpers.speeds import exhaustive_but
from thinwire.comm.communicator import Communicator
from thinwire.errors import PeerTimeout, ThinwireError
from thinwire.testing import run_ranks
from thinwire.triton_kernels.cpu.all_to_all_v import SCALARS

MUCH = 400  # rows that take more pieces than a ring has room for

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


def _closed_before_the_kernel(comm: Communicator) -> None:
    channel: Any = channel_of(comm)
    x, rows = torch.ones(2 * MUCH, 64), [MUCH] * 2

    def call() -> None:
        tw.all_to_all_v(x, rows, rows, wire="none", comm=comm)

    call()
    require_usable = channel.require_usable

    def require_and_close() -> None:
        require_usable()
        comm.close()

    comm.barrier()
    if comm.rank == 0:
        channel.require_usable = require_and_close  # what comes last before the kernel, of what looks at no memory
        with pytest.raises(ThinwireError, match="the communicator was closed while this call was under way"):
            call()
        assert channel.open_epoch() == 1, "the kernel has begun a call in memory that is not there any more"


def test_a_call_that_has_not_come_to_its_kernel_ends_too() -> None:
    run_ranks(_closed_before_the_kernel, 2, mode="thread", timeout=20)


def _closed_with_a_place(comm: Communicator) -> None:
    out = tw.empty(2 * MUCH, 64, comm=comm)
    channel, tensors = comm.attached("all_to_all_v"), comm.attached("empty")
    assert list(comm._attachments).index("empty") < list(comm._attachments).index("all_to_all_v"), "is closed first"
    x, rows = torch.ones(2 * MUCH, 64), [MUCH] * 2
    comm.barrier()
    if comm.rank == 0:
        words = channel._call[SCALARS.index("regions") :][:2].tolist()
        held = [weakref.ref(channel._regions), weakref.ref(tensors._regions[0].memory.buffer_ptrs)]
        work = tw.all_to_all_v(x, rows, rows, out=out, wire="none", comm=comm, async_op=True)
        comm.close()
        assert words[1] == 1 and channel._call[SCALARS.index("regions") :][:2].tolist() == words
        assert all(kept() is not None for kept in held), "the kernel may be storing there"
        with pytest.raises(ThinwireError, match="the communicator was closed while this call was under way"):
            work.wait()
        del work
        gc.collect()
        assert held[1]() is None


def test_what_a_call_stores_straight_into_stays_until_it_is_over() -> None:
    run_ranks(_closed_with_a_place, 2, mode="thread", timeout=20)


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
