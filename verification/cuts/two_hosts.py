"""Two hosts of two ranks each, joined by a slow link: kills a rank or a host, or cuts the link, and judges the others.

`python -m verification.cuts --two-hosts` runs them; `judge` has the rules. Each world runs rounds of dispatch and
combine until its fault. Those that have lost a killed peer then rebuild, and run some more.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

import thinwire as tw
from tests.helpers import mortal
from thinwire.comm.communicator import Communicator
from thinwire.comm.hosts import VARIABLE
from thinwire.errors import PeerTimeout, ThinwireError
from verification.cuts.network import Network
from verification.cuts.worlds import AS_EXPECTED, Result, pause, ranks, told

HOSTS = ((0, 1), (2, 3))
SIZE = 4
#: Seconds that ranks wait for each other. After a cut TCP may need as long again, and a second, to send anew.
TIMEOUT = 6.0
SPARE = 2.0  # seconds that may pass after the timeout until a call ends, in which ranks vote
#: What is asked for, what that is on two hosts, and on one.
TRANSPORTS = {"staged": ("staged", "staged"), "auto": ("two_level", "direct")}
RATE = "50mbit"  # at which a dispatch takes about a tenth of a second
_TOKENS, _HIDDEN, _EXPERTS, _TOP_K = 256, 1024, 8, 4
_START_SECONDS = 40.0  # that ranks get to meet, and for their first rounds
_LIMIT = 4  # timeouts from a kill, or from the end of a cut, after which a rank that has told nothing hangs
_FIRST_ROUNDS, _LAST_ROUNDS = 5, 3  # before the fault, and after `rebuild`
_MOST_ERROR = 0.02  # of int8, in which each token travels twice


class Cell(NamedTuple):
    """Which ranks are killed in a dispatch, or for how many timeouts the link is cut."""

    transport: str
    victims: tuple[int, ...] = ()
    length: float = 0.0

    def __str__(self) -> str:
        what = f"ranks {self.victims} killed" if self.victims else f"cut for {self.length:.2g} timeouts"
        return f"{self.transport}: {what}"


class Report(NamedTuple):
    """What became of a rank.

    Attributes:
        end: "unnoticed", "lost" after a PeerTimeout, or what is never right.
        named: `PeerTimeout.ranks`.
        seconds: that the call took which raised it.
        transports: of the rounds before, and after `rebuild`.
        members: old ranks of the world that it is in after that; empty unless it rebuilt.
        text: the last error.
    """

    end: str
    named: tuple[int, ...] = ()
    seconds: float = 0.0
    transports: tuple[str, ...] = ()
    members: tuple[int, ...] = ()
    text: str = ""


def cells() -> list[Cell]:
    """All that there are."""
    faults = [((3,), 0.0), ((0,), 0.0), ((2, 3), 0.0), ((0, 1), 0.0), ((), 1 / 3), ((), 2.0)]
    return [Cell(transport, *fault) for transport in TRANSPORTS for fault in faults]


def judge(cell: Cell, reports: Sequence[Report]) -> str:
    """`AS_EXPECTED`, or what is against the rules.

    - Of a cut for less than the timeout nobody hears, and all results are right.
    - After a longer one every rank gets a PeerTimeout, within the timeout and two seconds.
    - After a kill the others do, and it names whom it hit. They rebuild, and go on with right results. On one host they
      need no link any more: `auto` is then the direct transport.

    >>> cut, killed, victim = Cell("staged", length=0.3), Cell("auto", (2, 3)), Report("killed")
    >>> judge(cut, [Report("unnoticed", transports=("staged",))] * 4)
    'as expected'
    >>> right = Report("lost", (2, 3), 1.0, ("two_level", "direct"), (0, 1))
    >>> judge(killed, [right, right._replace(seconds=9.0), victim, victim])
    'rank 1: its call took 9.0 s'
    >>> judge(killed, [right._replace(named=(3,)), Report("hang"), victim, victim])
    'rank 0: it names (3,), expected (2, 3); rank 1: hang, expected lost'
    """
    found = []
    before, alone = TRANSPORTS[cell.transport]
    left = tuple(rank for rank in range(SIZE) if rank not in cell.victims)
    transports = (before, alone if left in HOSTS else before) if cell.victims else (before,)
    for rank, report in enumerate(reports):
        end = "killed" if rank in cell.victims else "lost" if cell.victims or cell.length > 1 else "unnoticed"
        if report.end != end:
            found.append(f"rank {rank}: {report.end}, expected {end}")
        elif end == "lost":
            if report.seconds > TIMEOUT + SPARE:
                found.append(f"rank {rank}: its call took {report.seconds:.1f} s")
            if cell.victims and report.named != cell.victims:
                found.append(f"rank {rank}: it names {report.named}, expected {cell.victims}")
            if cell.victims and report.members != left:
                found.append(f"rank {rank}: it went on among {report.members}, expected {left}")
        if report.end == end in ("lost", "unnoticed") and report.transports != transports:
            found.append(f"rank {rank}: the transports were {report.transports}, expected {transports}")
    return "; ".join(found) or AS_EXPECTED


# ---------------------------------------------------------------------------------------------------------------------
# In a rank


def _play(comm: Communicator, cell: Cell, repeat: int) -> None:
    """Runs rounds until the fault, goes on if it lost a peer, and tells what became of it."""
    torch.set_num_threads(1)
    rng = random.Random(f"{cell} {repeat}")  # draws the same on all ranks
    ep = tw.ExpertParallel(comm, _EXPERTS, _TOP_K, _HIDDEN, _TOKENS, wire="int8", transport=cell.transport)
    transports, begun, before = [ep.transport], 0.0, 0.1
    report, pids = Report("unnoticed"), comm.all_gather_object(os.getpid())
    try:
        for number in itertools.count():
            strikes, enough = (any(comm.all_gather_object(_exists(key))) for key in ("strike", "enough"))
            if strikes and (comm.rank,) == cell.victims[:1]:  # a host's ranks end at once
                hit = [pids[rank] for rank in reversed(cell.victims)]
                threading.Timer(rng.random() * before, _kill, [hit]).start()
            begun = time.monotonic()
            right = _round(ep, number)
            before = time.monotonic() - begun
            if not right:
                report = Report("wrong result")
                break
            if enough:
                break
            if number == _FIRST_ROUNDS:
                mortal.tell("ready")
    except PeerTimeout as error:
        report = Report("lost", error.ranks, time.monotonic() - begun, text=str(error))
        if cell.victims:
            report = _go_on(ep, report, transports)
    except ThinwireError as error:
        report = Report("another error", text=f"{type(error).__name__}: {error}")
    mortal.tell("report", report._replace(transports=tuple(transports)))
    mortal.wait_for("over")  # which never comes: others may still ask this process


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def _go_on(ep: tw.ExpertParallel, report: Report, transports: list[str]) -> Report:
    try:
        rank = ep.comm.rank
        ep.rebuild()
        transports.append(ep.transport)
        members = tuple(ep.comm.all_gather_data(rank, int))
        right = all(_round(ep, number) for number in range(_LAST_ROUNDS))
    except ThinwireError as error:
        return report._replace(text=f"{type(error).__name__}: {error}")
    return report._replace(members=members) if right else Report("wrong result")


def _round(ep: tw.ExpertParallel, number: int) -> bool:
    """Whether tokens come back from experts that change nothing as they were, but for what int8 does to them."""
    generator = torch.Generator().manual_seed(SIZE * number + ep.comm.rank)
    x = torch.randn(_TOKENS, _HIDDEN, generator=generator)
    ids = torch.rand(_TOKENS, _EXPERTS, generator=generator).topk(_TOP_K, 1).indices.int()
    d = ep.dispatch(x, ids, torch.full((_TOKENS, _TOP_K), 1 / _TOP_K))
    y = ep.combine(d.tokens, d)
    return float((y - x).norm() / x.norm()) < _MOST_ERROR


def _exists(key: str) -> bool:
    return (mortal.own_folder() / key).exists()


# ---------------------------------------------------------------------------------------------------------------------
# Around the ranks


def run(cell: Cell, repeat: int, number: int, stopping: threading.Event) -> Result:
    """Runs a cell once and leaves nothing behind; as `worlds.run`."""
    with ExitStack() as ended:
        folder = Path(ended.enter_context(tempfile.TemporaryDirectory(prefix="cuts-")))
        network = ended.enter_context(Network(len(HOSTS), number))
        network.limit(RATE)
        places = [(network.namespaces[host], {VARIABLE: f"{host}"}) for host, ranks in enumerate(HOSTS) for _ in ranks]
        ended.enter_context(ranks(folder, places, _play, cell, repeat, timeout=TIMEOUT))
        ready = told(folder, SIZE, "ready", time.monotonic() + _START_SECONDS, stopping)
        if len(ready) < SIZE or any(ready.values()):
            reports = [Report("not started", text=str(ready.get(rank) or "")) for rank in range(SIZE)]
            return Result(cell, repeat, reports, "not started")
        pause(random.Random(f"{cell} {repeat}").uniform(0, 0.5), stopping)
        begin = time.monotonic()
        if cell.victims:
            (folder / "strike").touch()
        else:
            network.cut([(0, 1), (1, 0)])
            pause(cell.length * TIMEOUT, stopping)
            network.heal()
            begin = time.monotonic()
            pause(TIMEOUT, stopping)  # by then every rank that is to miss another does
            (folder / "enough").touch()
        told_by = told(folder, SIZE - len(cell.victims), "report", begin + _LIMIT * TIMEOUT, stopping)
        reports = [_report(rank in cell.victims, told_by.get(rank), folder / f"printed.{rank}") for rank in range(SIZE)]
    return Result(cell, repeat, reports, judge(cell, reports))


def _report(is_victim: bool, told: Report | str | None, printed: Path) -> Report:
    if told is None:
        return Report("killed" if is_victim else "hang", text=printed.read_text(errors="replace")[-500:])
    return Report("another error", text=told.strip().splitlines()[-1]) if isinstance(told, str) else told
