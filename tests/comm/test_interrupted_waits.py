"""Waits of the staged transport that a signal interrupts: at once, and what was begun is gone on with."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from tests.helpers.speeds import exhaustive_but
from thinwire.comm.call import Recorder
from thinwire.comm.communicator import Communicator
from thinwire.comm.exchange import PeerExchange
from thinwire.comm.recorder import NAME, NUMBER, STATE
from thinwire.comm.waiting import Waiter, Waiting
from thinwire.comm.work import Work
from thinwire.errors import PeerTimeout, ThinwireError
from thinwire.first_run import Deadline
from thinwire.testing import run_ranks
from thinwire.triton_kernels.cpu import HAS_NUMBA

#: Seconds that a signal may have to wait, on a busy machine.
SOON = 0.5


class Interrupted(Exception):
    """What a signal handler might raise."""


def _interrupted(call: Callable[[], object]) -> float:
    """Seconds until a signal after .2 s ended a call."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    signal.signal(signal.SIGALRM, handler)
    start = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(Interrupted):
        call()
    return time.monotonic() - start - 0.2


def _late_peer(comm: Communicator) -> list[float]:
    """Rank 0 waits for rank 1, which comes late to each call, and is interrupted."""
    x = torch.arange(300.0) + comm.rank
    calls: list[Callable[[Communicator], object]] = [
        Communicator.barrier,
        lambda short: short.exchange_counts([7] * comm.size),
        lambda short: tw.all_to_all_v(x, comm=short, transport="staged"),
        lambda short: tw.all_gather(x, comm=short, transport="staged"),
        lambda short: tw.all_reduce(x, comm=short, transport="staged"),
    ]
    taken = []
    for call in calls:
        short = comm.split(groups=[range(comm.size)])
        short._exchange.timeout = 1.0
        if comm.rank == 0:
            taken.append(_interrupted(lambda call=call, short=short: call(short)))
            for again in (call, Communicator.barrier):  # to its peers the same call would be the next one
                with pytest.raises(ThinwireError, match="has ended at this rank, as Interrupted came in the middle"):
                    again(short)
        else:
            time.sleep(0.8)
            with pytest.raises(PeerTimeout) as caught:
                call(short)  # which may find all that it needs
                short.barrier()
            assert caught.value.ranks == (0,)
        assert comm.exchange_counts([comm.rank] * comm.size) == list(range(comm.size)), "another is not touched"
    return taken


def test_a_signal_ends_a_wait_at_once_and_the_communicator_with_it() -> None:
    taken, nothing = run_ranks(_late_peer, 2)
    assert not nothing and len(taken) == 5 and max(taken) < SOON, taken


def _same_work(comm: Communicator) -> list[int]:
    """An exchange whose wait was interrupted is waited for again."""
    received = torch.zeros(3, dtype=torch.uint8)
    if comm.rank == 1:
        time.sleep(0.6)
        comm.post([torch.tensor([1, 2, 3], dtype=torch.uint8), None], [None, None]).wait()
        return []
    posted = comm.post([None, None], [None, received])
    assert _interrupted(posted.wait) < SOON
    posted.wait()
    return received.tolist()


def test_a_wait_that_was_interrupted_can_be_gone_on_with() -> None:
    assert run_ranks(_same_work, 2)[0] == [1, 2, 3]


def _settled(comm: Communicator) -> list[tuple[object, ...]]:
    """A work that another call was ending when it was interrupted, and one whose own wait was."""
    x = torch.arange(40_000.0) + comm.rank  # takes two steps
    tensors = [x.clone(), x.clone()]
    for tensor, ended_by in zip(tensors, (comm.barrier, None), strict=True):
        if comm.rank == 1:
            time.sleep(0.5)
        work: Work[Any] = comm.all_reduce(tensor, async_op=True)
        if comm.rank == 0:
            assert _interrupted(ended_by or work.wait) < SOON
        comm.barrier()
        work.wait()
        assert torch.equal(tensor, comm.size * torch.arange(40_000.0) + sum(range(comm.size)))
    return _recorded(comm)


def _waited_again(comm: Communicator, name: str, transport: str, wire: str) -> list[tuple[object, ...]]:
    x, call = torch.arange(300.0) + comm.rank, getattr(tw, name)
    expected = call(x, comm=comm, wire=wire, transport=transport)
    if comm.rank == 1:
        time.sleep(0.5)
    work = call(x, comm=comm, wire=wire, transport=transport, async_op=True)
    if comm.rank == 0:
        assert _interrupted(work.wait) < SOON
    assert torch.equal(work.wait(), expected)
    return _recorded(comm)


def _recorded(comm: Communicator) -> list[tuple[object, ...]]:
    assert isinstance(comm.recorder, Recorder)
    return [(entry[NAME], entry[NUMBER], entry[STATE]) for entry in comm.recorder.entries()]


CASES: list[tuple[str, ...]] = [
    (),
    ("all_to_all_v", "direct", "none"),
    ("all_to_all_v", "direct", "int8"),
    ("all_to_all_v", "staged", "none"),
    ("all_to_all_v", "staged", "int8"),
    ("all_gather", "staged", "int8"),
    ("reduce_scatter", "staged", "int8"),
]


@pytest.mark.parametrize("case", exhaustive_but([(), CASES[1], CASES[4]], CASES), ids=" ".join)
def test_a_work_whose_wait_was_interrupted_can_be_waited_for_again(case: tuple[str, ...]) -> None:
    if "direct" in case and not HAS_NUMBA:
        pytest.skip("the direct transport of CPU ranks needs numba")
    first, second = run_ranks(_waited_again if case else _settled, 2, *case)
    assert first == second and {state for *_, state in first} == {"done"}


def _timed_out_behind_the_scenes(comm: Communicator, interrupted: int) -> tuple[tuple[int, ...], str] | None:
    """Rank 0 posts a receive from each other rank, is interrupted in one wait, and comes to the other one."""
    short = Communicator(comm.group, timeout=0.6)
    if comm.rank:
        time.sleep(4.0)  # past the two waits, and the second's wait for another rank that misses somebody
        return None
    posted = {}
    for peer in (1, 2):
        received = [torch.zeros(3, dtype=torch.uint8) if rank == peer else None for rank in range(3)]
        posted[peer] = short.post([None] * 3, received)
    assert _interrupted(posted[interrupted].wait) < SOON
    with pytest.raises(PeerTimeout) as caught:
        posted[3 - interrupted].wait()
    return caught.value.ranks, str(caught.value)


@pytest.mark.parametrize("interrupted", exhaustive_but([2], [1, 2]))
def test_who_let_an_interrupted_wait_time_out_is_named_by_the_next_one(interrupted: int) -> None:
    found = run_ranks(_timed_out_behind_the_scenes, 3, interrupted)[0]
    assert found is not None
    named, text = found
    assert named == (), "nobody else votes, so who is lost is not agreed"
    assert f"no answer from rank {interrupted} within 0.6 s" in text, text


def _closed_while_armed(comm: Communicator) -> None:
    """What Gloo may still fill is alive for as long as it may."""
    short = Communicator(comm.group, timeout=0.5)
    if comm.rank == 0:
        memory = numpy.zeros(3, numpy.uint8)
        posted = short.post([None, None], [None, torch.from_numpy(memory)])
        alive = weakref.ref(memory)
        del memory
        assert _interrupted(posted.wait) < SOON
        short.close()
        del posted
        gc.collect()
        assert alive() is not None
        deadline = time.monotonic() + 20
        while alive() is not None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
            gc.collect()
    else:
        time.sleep(1.0)


def test_what_may_still_be_received_is_kept_alive_after_close() -> None:
    run_ranks(_closed_while_armed, 2)


def _dropped(comm: Communicator) -> None:
    def waiters() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "thinwire waiter"]

    comm.barrier()
    assert len(waiters()) == 1
    for _ in range(3):
        Communicator(comm.group).barrier()
    gc.collect()
    deadline = time.monotonic() + 20
    while len(waiters()) > 1:
        assert time.monotonic() < deadline, waiters()
        time.sleep(0.01)


def test_the_thread_of_a_communicator_that_is_dropped_ends() -> None:
    run_ranks(_dropped, 2)


@pytest.mark.exhaustive
def test_ctrl_c_ends_a_process_in_an_orderly_way() -> None:
    """The thread that still waits keeps nothing from ending, and nothing is aborted."""
    code = (
        "import os, signal, threading, torch.distributed as dist\n"
        "from thinwire.comm import Communicator\n"
        "rank = int(os.environ['RANK'])\n"
        "dist.init_process_group('gloo')\n"
        "comm = Communicator()\n"
        "if rank: signal.pause()\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "comm.barrier()\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], env=environ | {"RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        start = time.monotonic()
        _, told = ranks[0].communicate(timeout=60)
        assert b"KeyboardInterrupt" in told and ranks[0].returncode in (1, -signal.SIGINT), told.decode()
        assert time.monotonic() - start < 25, "the group's timeout is 30 s"
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_what_a_wait_gives_or_raises_is_told_however_often_it_is_asked() -> None:
    waiter, calls = Waiter(), []

    def call() -> int:
        calls.append(1)
        return 1 // (2 - len(calls))  # the second call raises

    def result() -> object:
        return waiting.result(waiter, Deadline(60), lambda: None, dict)

    for outcome in ("gives", "raises"):
        waiting = Waiting(call)
        for _ in range(2):
            if outcome == "gives":
                assert result() == 1
            else:
                with pytest.raises(ZeroDivisionError):
                    result()
            assert waiting.done
    assert len(calls) == 2
    waiter.close()


class _DeafGroup:
    """A group of which Gloo loses a receive."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.send = group.send

    def recv(self, buffers: object, peer: int, tag: int) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda limit: threading.Event().wait())


def _deaf(comm: Communicator) -> tuple[float, tuple[int, ...], str, str]:
    comm._exchange.timeout = 0.4
    began = time.monotonic()
    deaf = property(lambda exchange: _DeafGroup(exchange._group))
    with mock.patch.object(PeerExchange, "group", deaf), pytest.raises(PeerTimeout) as caught:
        comm.barrier()
    seconds = time.monotonic() - began
    with pytest.raises(PeerTimeout, match="cannot be used any more") as again:
        comm.barrier()
    return seconds, caught.value.ranks, str(caught.value), str(again.value)


def test_a_wait_that_gloo_does_not_end_is_left_behind() -> None:
    for rank, (seconds, ranks, told, _) in enumerate(run_ranks(_deaf, 2)):
        assert 0.4 < seconds < 30 and "Gloo's wait has taken no notice" in told
        assert f"no answer from rank {1 - rank} within 0.4 s" in told and ranks in ((), (1 - rank,))


def _closed_while_it_waits(comm: Communicator) -> None:
    if comm.rank:
        time.sleep(4)  # longer than the other waits
        return
    signal.signal(signal.SIGALRM, lambda number, frame: comm.close())
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    tensor = torch.ones(4)
    with pytest.raises(ThinwireError, match="closed"):
        comm.all_reduce(tensor)
    assert tensor.tolist() == [1.0] * 4


def test_a_wait_of_a_communicator_that_a_handler_closes_raises() -> None:
    run_ranks(_closed_while_it_waits, 2, timeout=5)
