"""A process that was forked from a rank may not use its communicators: it is told so, and cannot disturb the rank."""

from __future__ import annotations

import atexit
import gc
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")

import torch

import thinwire as tw
from tests.helpers import mortal
from tests.helpers.speeds import exhaustive_but
from thinwire.comm.communicator import Communicator
from thinwire.errors import LaneError, ThinwireError

ROWS = 40_000  # so many that their ring has no room for them
IDS, WEIGHTS = torch.tensor([[0], [1]]), torch.ones(2, 1)


def _in_a_child(action: Callable[[], object]) -> None:
    """Runs it in a process that is forked here, and raises if it does."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0, "what happened in the child was printed"


def _refused(comm: Communicator, begun: Any, ep: tw.ExpertParallel) -> None:
    calls: list[Callable[[], object]] = [
        comm.barrier,
        lambda: comm.all_reduce(torch.ones(3)),
        lambda: comm.split(groups=[[0, 1]]),
        lambda: comm.exchange_counts([1, 1]),
        lambda: tw.all_reduce(torch.ones(3), comm=comm),
        lambda: tw.all_to_all_v(torch.ones(2, 64), [1, 1], [1, 1], wire="none", comm=comm),
        begun.wait,
    ]
    for call in calls:
        with pytest.raises(ThinwireError, match=f"this communicator is of process {os.getppid()}, from which this one"):
            call()
    with pytest.raises(LaneError, match=f"is closed, as this communicator is of process {os.getppid()}, from which"):
        ep.dispatch(torch.ones(2, 64), IDS, WEIGHTS)
    assert comm.closed and "closed" in comm.explain()


def _forks(comm: Communicator, transport: str, what: str) -> None:
    x, counts = torch.full((2 * ROWS, 8), 1.0 + comm.rank), [ROWS] * 2
    options: dict[str, Any] = {"wire": "none", "comm": comm, "transport": transport, "async_op": True}
    tw.all_to_all_v(x[:2], [1, 1], [1, 1], **options).wait()
    ep = tw.ExpertParallel(comm, 2, 1, 64, 8, wire="none", transport=transport)
    d = ep.dispatch(torch.ones(2, 64), IDS, WEIGHTS)
    there = what == "calls, and the rows are there"
    if comm.rank == 1 and not there:
        mortal.wait_for("forked")
        time.sleep(0.2)  # until rank 0 waits
    begun: Any = tw.all_to_all_v(x, counts, counts, **options)
    if comm.rank == 0:
        time.sleep(0.3 if there else 0.0)
        actions: dict[str, Callable[[], object]] = {
            **dict.fromkeys(CALLS, lambda: _refused(comm, begun, ep)),
            "closes": lambda: (ep.close(), comm.close(), comm.close(), gc.collect()),
            "ends": atexit._run_exitfuncs,
        }
        _in_a_child(actions[what])
        mortal.tell("forked")
    assert begun.wait()[:, 0].tolist() == [1.0] * ROWS + [2.0] * ROWS
    assert torch.equal(ep.combine(d.tokens, d), torch.ones(2, 64))
    comm.barrier()
    tw.all_reduce(x, wire="int8", comm=comm, transport=transport)
    comm.close()


CALLS = "calls", "calls, and the rows are there"
CASES = [(transport, what) for transport in ("direct", "staged") for what in (*CALLS, "closes", "ends")]


@pytest.mark.parametrize(
    ("transport", "what"),
    exhaustive_but([("direct", CALLS[0]), ("direct", CALLS[1]), ("direct", "closes")], CASES, several=True),
)
def test_a_child_leaves_all_to_its_parent(transport: str, what: str, tmp_path: Path) -> None:
    with mortal.ranks(tmp_path, 2, _forks, transport, what, timeout=5.0) as case:
        case.told([0], "forked")
        case.allow("forked")
        case.told([0, 1])


def _differentiates(comm: Communicator, transport: str, closed: bool) -> None:
    x = torch.ones(2, 64, requires_grad=True)
    ep = tw.ExpertParallel(comm, 2, 1, 64, 8, wire="none", transport=transport)
    d = ep.dispatch(x, IDS, WEIGHTS)
    y = ep.combine(d.tokens, d)
    del ep, d  # what is left is the graph's
    comm.barrier()
    if closed:  # of which direct lanes need no more
        comm.close()

    def in_the_child() -> None:
        with pytest.raises(ThinwireError, match=f"this communicator is of process {os.getppid()}, from which this one"):
            y.backward(torch.full_like(y, 7.0))

    if comm.rank == 0:
        _in_a_child(in_the_child)
    y.backward(torch.ones_like(y))
    assert x.grad is not None and torch.equal(x.grad, torch.ones(2, 64))


@pytest.mark.parametrize(("transport", "closed"), [("direct", False), ("direct", True), ("staged", False)])
def test_backward_in_a_child_is_refused_and_puts_nothing_into_its_parents_gradients(
    transport: str, closed: bool, tmp_path: Path
) -> None:
    with mortal.ranks(tmp_path, 2, _differentiates, transport, closed, timeout=5.0) as case:
        case.told([0, 1])


_FORKS_AND_ENDS = """
import os, signal, sys, time
import thinwire as tw
comm = tw.init(device="cpu")
comm.barrier()
child = os.fork()
if child == 0:
    sys.exit(7)
deadline = time.monotonic() + 30
while not (ended := os.waitpid(child, os.WNOHANG))[0]:
    if time.monotonic() > deadline:
        os.kill(child, signal.SIGKILL)
    time.sleep(0.01)
print(os.waitstatus_to_exitcode(ended[1]))
comm.barrier()
"""


@pytest.mark.parametrize("size", [1, 2])
def test_a_child_ends_with_the_status_that_it_gives(size: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    ranks = []
    for rank in range(size):
        place = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        program = [sys.executable, "-c", _FORKS_AND_ENDS]
        ranks.append(subprocess.Popen(program, env=os.environ | place, text=True, stdout=subprocess.PIPE))
    assert [rank.communicate()[0] for rank in ranks] == ["7\n"] * size
    assert [rank.returncode for rank in ranks] == [0] * size


def _drops_and_loads(comm: Communicator) -> None:
    held = [comm.split(groups=[[0, 1]])]
    held[0].barrier()
    if comm.rank == 0:
        _in_a_child(lambda: (held.clear(), gc.collect()))
    loader: Any = torch.utils.data.DataLoader(list(range(8)), num_workers=2, multiprocessing_context="fork")
    for batch in loader:
        comm.all_reduce(batch)
    held[0].barrier()


def test_a_split_that_a_child_drops_stays_its_parents_and_so_with_a_loaders_workers(tmp_path: Path) -> None:
    with mortal.ranks(tmp_path, 2, _drops_and_loads, timeout=5.0) as case:
        case.told([0, 1])
