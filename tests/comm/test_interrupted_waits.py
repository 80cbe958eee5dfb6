"""Waits of the staged transport that a signal interrupts: at once, and what was begun is gone on with."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType

import pytest
import torch

import thinwire as tw
from thinwire.comm.communicator import Communicator
from thinwire.testing import run_ranks

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
    """Rank 0 waits for rank 1, which comes late to each call, is interrupted, and goes on with the next one."""
    x = torch.arange(300.0) + comm.rank
    calls: list[Callable[[], object]] = [
        comm.barrier,
        lambda: comm.exchange_counts([7] * comm.size),
        lambda: tw.all_to_all_v(x, comm=comm, transport="staged"),
    ]
    taken = []
    for call in calls:
        if comm.rank == 0:
            taken.append(_interrupted(call))
        else:
            time.sleep(0.8)
            call()
        assert comm.exchange_counts([comm.rank] * comm.size) == list(range(comm.size))
    # What takes several steps ends for good: this rank does not come to its second one.
    if comm.rank == 0:
        taken.append(_interrupted(lambda: tw.all_reduce(x, comm=comm, transport="staged")))
    else:
        time.sleep(0.8)
    return taken


def test_a_signal_ends_a_wait_at_once_and_the_next_call_is_right() -> None:
    taken, nothing = run_ranks(_late_peer, 2)
    assert not nothing and len(taken) == 4 and max(taken) < SOON, taken


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
