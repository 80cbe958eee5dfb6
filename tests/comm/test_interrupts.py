"""An exception from outside in a call ends the communicator at that rank, at once, in every kind of call."""

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
from thinwire.comm.communicator import Communicator
from thinwire.comm.exchange import PeerExchange
from thinwire.errors import LaneError, PeerTimeout, ThinwireError
from thinwire.fused.ops import Op
from thinwire.testing import run_ranks
from thinwire.triton_kernels.cpu import HAS_NUMBA
from verification.interrupts.__main__ import run_rank
from verification.interrupts.calls import KINDS, PLACES, Interrupted, judge, was_slow

#: Seconds that a signal may have to wait, on a busy machine.
SOON = 0.5
ENDED = "has ended at this rank, as {} came in the middle of a call"
IDS, WEIGHTS = torch.tensor([[0], [1]]), torch.ones(2, 1)

needs_numba = pytest.mark.skipif(not HAS_NUMBA, reason="the direct transport of CPU ranks needs numba")


def _interrupted(call: Callable[[], object], error: type[BaseException] = Interrupted) -> float:
    """Seconds until a signal after .2 s ended a call."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise error

    signal.signal(signal.SIGALRM, handler)
    start = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(error):
        call()
    return time.monotonic() - start - 0.2


#: What a rank prepares that its peers take part in, and the call in which it then waits for them.
Prepared = Callable[[], object]


def _calls(transport: str) -> dict[str, Callable[[Communicator], Prepared]]:
    x = torch.arange(400.0).view(2, 200)
    options: dict[str, Any] = {"wire": "int8", "transport": transport}

    def pending(comm: Communicator) -> Any:
        return tw.all_to_all_v(x, comm=comm, async_op=True, **options)

    def parallel(comm: Communicator) -> tuple[tw.ExpertParallel, Any]:
        ep = tw.ExpertParallel(comm, 2, 1, 64, 8, wire="none", transport=transport, timeout=1.0)
        return ep, ep.dispatch(torch.ones(2, 64), IDS, WEIGHTS)

    def dispatch(comm: Communicator) -> Prepared:
        ep, d = parallel(comm)
        ep.combine(d.tokens, d)
        return lambda: ep.dispatch(torch.ones(2, 64), IDS, WEIGHTS)

    def combine(comm: Communicator) -> Prepared:
        ep, d = parallel(comm)
        return lambda: ep.combine(d.tokens, d)

    def backward(comm: Communicator) -> Prepared:
        ep, d = parallel(comm)
        ep.combine(d.tokens, d)
        inputs = torch.ones(2, 64, requires_grad=True)
        d = ep.dispatch(inputs, IDS, WEIGHTS)
        y = ep.combine(d.tokens, d).sum()
        return lambda: y.backward(retain_graph=True)  # type: ignore[no-untyped-call]

    calls: dict[str, Callable[[Communicator], Prepared]] = {
        "all_to_all_v": lambda comm: lambda: tw.all_to_all_v(x, comm=comm, **options),
        "all_gather": lambda comm: lambda: tw.all_gather(x, comm=comm, **options),
        "all_reduce": lambda comm: lambda: tw.all_reduce(x, comm=comm, **options),
        "the wait of a Work": lambda comm: lambda: pending(comm).wait(),
        "what ends a Work": lambda comm: lambda: (pending(comm), comm.barrier()),
        "dispatch": dispatch,
        "combine": combine,
        "backward": backward,
    }
    if transport == "staged":
        calls |= {
            "barrier": lambda comm: comm.barrier,
            "exchange_counts": lambda comm: lambda: comm.exchange_counts([7, 7]),
            "exact all_reduce": lambda comm: lambda: comm.all_reduce(torch.ones(40_000), async_op=True).wait(),
            "the wait of a Posted": lambda comm: lambda: comm.post(*_one_byte_each(comm)).wait(),
        }
    return calls


def _one_byte_each(comm: Communicator) -> tuple[list[torch.Tensor | None], ...]:
    return tuple([None if r == comm.rank else torch.zeros(1, dtype=torch.uint8) for r in range(2)] for _ in range(2))


def _late_peer(comm: Communicator, transport: str, error: type[BaseException]) -> dict[str, float]:
    """Rank 0 waits for rank 1, which comes late to each call, and is interrupted."""
    taken = {}
    for name, prepare in _calls(transport).items():
        short = comm.split(groups=[range(comm.size)])
        tw.all_to_all_v(torch.ones(2, 200), comm=short, wire="int8", transport=transport)
        call = prepare(short)
        short._exchange.timeout = 1.0
        comm.barrier()
        if comm.rank == 0:
            taken[name] = _interrupted(call, error)
            # To its peers the same call would be the next one.
            with pytest.raises(ThinwireError, match=f"{ENDED.format(error.__name__)}|is over: it was combined"):
                call()
            with pytest.raises(ThinwireError, match=ENDED.format(error.__name__)):
                short.barrier()
            started = time.monotonic()
            short.close()
            assert time.monotonic() - started < SOON, name
        else:
            time.sleep(0.6)
            with pytest.raises(PeerTimeout) as caught:
                call()  # which may find all that it needs
                short.barrier()
            assert caught.value.ranks == (0,), name
        assert comm.exchange_counts([comm.rank] * comm.size) == list(range(comm.size)), "another is not touched"
    return taken


@needs_numba
@pytest.mark.parametrize("error", exhaustive_but([KeyboardInterrupt], [KeyboardInterrupt, Interrupted]))
@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_a_signal_ends_a_wait_at_once_and_the_communicator_with_it(transport: str, error: type[BaseException]) -> None:
    taken, nothing = run_ranks(_late_peer, 2, transport, error, timeout=120)
    assert not nothing and taken.keys() == _calls(transport).keys() and max(taken.values()) < SOON, taken


@needs_numba
@pytest.mark.parametrize("place", exhaustive_but(["all_gather int8"], [place.name for place in PLACES]))
def test_an_interrupt_anywhere_gives_no_wrong_result(place: str) -> None:
    """The call is completed, or the communicator ends at that rank, and its peer names it."""
    kinds = ["an event", "a signal, the peer late"] if place == "all_gather int8" else list(KINDS)
    found = run_ranks(run_rank, 2, [place], kinds, 3, 7, timeout=300)[0]
    assert len(found) == 2 * len(kinds)
    wrong = {cell: key for cell, seen in found.items() for key in seen if key.startswith("WRONG")}
    assert not wrong and any(seen["ended"] for seen in found.values()), wrong


def test_a_second_interrupt_while_the_first_is_handled_ends_the_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    comm, run = tw.init(), Op.run

    def interrupted(*args: Any) -> None:
        run(*args)
        monkeypatch.setattr(torch._C, "_set_grad_enabled", mock.Mock(side_effect=[KeyboardInterrupt, None]))
        raise KeyboardInterrupt  # behind the call, of which its entry's frame knows nothing

    monkeypatch.setattr(Op, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tw.all_reduce(torch.ones(4), wire="none", comm=comm)
    monkeypatch.undo()
    with pytest.raises(ThinwireError, match="has ended at this rank"):
        comm.barrier()


def test_what_must_not_be_is_found() -> None:
    right, ended = ["right"] * 4, ["right", "KeyboardInterrupt", *["ThinwireError: it has ended at this rank"] * 3]
    assert judge([right, right]) == "right" and judge([ended, ["right", *["PeerTimeout [0]"] * 3]]) == "ended"
    assert judge([[*right, "RoutingError: it is over"], right]) == "told"
    slow, gone = ["PeerTimeout []"] * 4, ["PeerTimeout [0]"] * 4
    for odd in ([right, ["WRONG: [1.0] in place of [2.0]"]], [ended, ["right", *["PeerTimeout []"] * 3]], [slow, slow]):
        assert judge(odd) == str(odd)
    assert was_slow([slow, slow]) and was_slow([right, slow])  # on a busy machine, before anything was interrupted
    assert not was_slow([right, right]) and not was_slow([slow, gone]) and not was_slow([["right", *slow], right])


def _closed_in_its_wait(comm: Communicator, by: str, what: str) -> None:
    short = comm.split(groups=[[0, 1]])
    ep = tw.ExpertParallel(short, 2, 1, 64, 8, wire="none", timeout=20.0) if what == "a dispatch" else None
    comm.barrier()
    if comm.rank == 0:
        close = short.close if ep is None else ep.close
        if by == "a signal handler":
            signal.signal(signal.SIGALRM, lambda *_: close())
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        else:
            threading.Timer(0.2, close).start()
        with pytest.raises((ThinwireError, LaneError), match="closed while"):
            short.barrier() if ep is None else ep.dispatch(torch.ones(2, 64), IDS, WEIGHTS)
    comm.barrier()  # and rank 1 never comes


@needs_numba
@pytest.mark.parametrize("what", ["a barrier", "a dispatch"])
@pytest.mark.parametrize("by", ["a signal handler", "another thread"])
def test_who_closes_it_while_a_call_waits_ends_that(by: str, what: str) -> None:
    run_ranks(_closed_in_its_wait, 2, by, what, timeout=15)


def _closed_while_armed(comm: Communicator) -> None:
    """What Gloo may still fill is alive for as long as it may."""
    short = Communicator(comm.group, timeout=0.5)
    if comm.rank == 0:
        memory = numpy.zeros(3, numpy.uint8)
        posted = short.post([None, None], [None, torch.from_numpy(memory)])
        alive = weakref.ref(memory)
        del memory
        assert _interrupted(posted.wait) < SOON
        assert short.closed
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


def test_what_may_still_be_received_is_kept_alive_after_an_interrupt() -> None:
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


class _DeafGroup:
    """A group of which Gloo loses a receive."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.send = group.send

    def recv(self, buffers: object, peer: int, tag: int) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda limit: threading.Event().wait())


def _deaf(comm: Communicator) -> tuple[float, tuple[int, ...], str]:
    comm._exchange.timeout = 0.4
    began = time.monotonic()
    deaf = property(lambda exchange: _DeafGroup(exchange._group))
    with mock.patch.object(PeerExchange, "group", deaf), pytest.raises(PeerTimeout) as caught:
        comm.barrier()
    seconds = time.monotonic() - began
    with pytest.raises(PeerTimeout, match="cannot be used any more"):
        comm.barrier()
    return seconds, caught.value.ranks, str(caught.value)


def test_a_wait_that_gloo_does_not_end_is_left_behind() -> None:
    for rank, (seconds, ranks, told) in enumerate(run_ranks(_deaf, 2)):
        assert 0.4 < seconds < 30 and "Gloo's wait has taken no notice" in told
        assert f"no answer from rank {1 - rank} within 0.4 s" in told and ranks in ((), (1 - rank,))
