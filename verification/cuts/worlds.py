"""Worlds of three ranks whose links are cut and come back, what the ranks tell of it, and whether that is right."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

import thinwire as tw
from tests.helpers import mortal
from thinwire import testing
from thinwire._rank_process import ServedProcess
from thinwire.comm.communicator import Communicator
from thinwire.errors import PeerTimeout, ThinwireError
from verification.cuts.network import INTERFACE, Network, address, enter

SIZE = 3
TIMEOUT = 3.0  # seconds that ranks wait for each other
LIMIT = 12  # timeouts from the beginning of a cut, after which a rank that has told nothing hangs
TRIES = 4  # calls of `shrink`
VICTIMS = {"rank 0": (0,), "rank 1": (1,), "rank 2": (2,), "pair 0-1": (0, 1), "pair 1-2": (1, 2)}
DIRECTIONS = ("both", "out", "in")
LENGTHS = (0.95, 1.02, 1.1, 1.2, 1.5, 2.0, 4.0)  # timeouts that a cut lasts
AS_EXPECTED = "as expected"  # in worlds of two hosts
RIGHT = ("nobody noticed", "two go on", "three go on", AS_EXPECTED)
_NEVER_RIGHT = ("not started", "wrong result", "another error", "hang")
_START_SECONDS = 30.0  # that ranks get to meet, and for their first steps
_FIRST_STEPS = 20  # after which all is imported and connected
_STEP_SECONDS = 0.01  # between steps
_PAUSE_SECONDS = 0.2  # before `shrink` is called again
_MOST_PRINTED = 500  # characters of what a rank printed that has told nothing
_PORT = "29500"  # any: each world has a network of its own
_ROWS, _HIDDEN = 4, 128


class Cell(NamedTuple):
    """Whose links are cut, in which direction, and for how many timeouts.

    "out" loses what the victim sends, or of a pair what its first rank sends to the other; "in" loses the answers.
    """

    victim: str
    direction: str
    length: float

    def __str__(self) -> str:
        return f"{self.victim}, {self.direction}, {self.length:g}"

    def pairs(self) -> list[tuple[int, int]]:
        """Senders and receivers between whom packets are lost.

        >>> Cell("rank 1", "in", 2.0).pairs(), Cell("pair 0-1", "both", 2.0).pairs()
        ([(0, 1), (2, 1)], [(0, 1), (1, 0)])
        """
        first, *second = VICTIMS[self.victim]
        others = second or [rank for rank in range(SIZE) if rank != first]
        out, into = [(first, other) for other in others], [(other, first) for other in others]
        return {"both": out + into, "out": out, "in": into}[self.direction]


def cells() -> list[Cell]:
    """All that there are."""
    return [Cell(*each) for each in itertools.product(VICTIMS, DIRECTIONS, LENGTHS)]


class Report(NamedTuple):
    """What became of a rank.

    Attributes:
        end: "unnoticed", "went on", "told", or what is never right.
        members: old ranks of the world that it is in; empty unless it is in one.
        named: `PeerTimeout.ranks`, if it was raised.
        text: the last error.
        seconds: from the beginning of the cut.
    """

    end: str
    members: tuple[int, ...] = ()
    named: tuple[int, ...] = ()
    text: str = ""
    seconds: float = 0.0


class Result(NamedTuple):
    """A run of a cell, here or of `two_hosts`: a report of each rank, and what `judge` says of them."""

    cell: Any
    repeat: int
    reports: list[Any]
    verdict: str

    @property
    def names_differ(self) -> bool:
        """Whether the ranks that go on were told different ones that are lost."""
        return len({report.named for report in self.reports if report.members}) > 1


def judge(cell: Cell, reports: Sequence[Report]) -> str:
    """One of `RIGHT`, or in words what must not be.

    Either nobody notices, or one world of at least two ranks goes on, whose members agree on it, and all others get an
    error. Where a single rank is cut off, both others are in that world. Of a pair, either may be left out.

    >>> cut, told, three = Cell("rank 0", "both", 1.1), Report("told"), Report("unnoticed", (0, 1, 2))
    >>> def after(*worlds, cut=cut):
    ...     return judge(cut, [Report("went on", members) if members else told for members in worlds])
    >>> judge(cut, [three] * 3), after((), (1, 2), (1, 2)), after((0, 1, 2), (0, 1, 2), (0, 1, 2))
    ('nobody noticed', 'two go on', 'three go on')
    >>> after((), (), ()), after((0,), (), ()), after((0,), (1, 2), (1, 2))
    ('nobody goes on', 'a world of one', 'several worlds')
    >>> after((), (1, 2), ()), judge(cut, [three, told, told])
    ('they disagree on who goes on', 'they disagree on who goes on')
    >>> after((0, 1), (0, 1), ()), after((0, 1), (0, 1), (), cut=Cell("pair 1-2", "both", 1.1))
    ('a healthy rank is thrown out', 'two go on')
    >>> judge(cut, [Report("hang"), *[Report("went on", (1, 2))] * 2])
    'hang'
    """
    ends = [report.end for report in reports]
    for end in _NEVER_RIGHT:
        if end in ends:
            return end
    worlds = {report.members for report in reports if report.members}
    if not worlds:
        return "nobody goes on"
    if len(worlds) > 1:
        return "several worlds"
    (world,) = worlds
    if world != tuple(rank for rank, report in enumerate(reports) if report.members):
        return "they disagree on who goes on"
    if len(world) == 1:
        return "a world of one"
    victims = VICTIMS[cell.victim]
    if len(victims) == 1 and any(rank not in world for rank in range(SIZE) if rank not in victims):
        return "a healthy rank is thrown out"
    if set(ends) == {"unnoticed"}:
        return "nobody noticed"
    return "three go on" if len(world) == SIZE else "two go on"


# ---------------------------------------------------------------------------------------------------------------------
# In a rank


def _run_rank(
    namespace: str,
    rank: int,
    size: int,
    folder: Path,
    environ: dict[str, str],
    timeout: float,
    play: Callable[..., None],
    arguments: tuple[object, ...],
) -> None:
    enter(namespace)
    printed = os.open(folder / f"printed.{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    mortal._run(rank, size, folder, environ, timeout, play, arguments)


def _play(comm: Communicator) -> None:
    """Communicates until a link is cut, goes on if the rank can, and tells what became of it."""
    torch.set_num_threads(1)  # several worlds share the cores
    rank, members, named = comm.rank, tuple(range(comm.size)), tuple[int, ...]()
    try:
        end = "unnoticed"
        try:
            right = _communicate(comm)
        except PeerTimeout as error:
            end, named = "went on", error.ranks
            comm = _shrink(comm)
            members = tuple(comm.all_gather_data(rank, int))
            right = all(_ranks_with_enough(comm, step, False) == 0 for step in range(5))
        report = Report(end, members, named) if right else Report("wrong result", (), named)
    except ThinwireError as error:
        report = Report("told", (), named, f"{type(error).__name__}: {error}")
    mortal.tell("report", report._replace(seconds=time.monotonic()))
    mortal.wait_for("over")  # which never comes: others may still ask this process


def _communicate(comm: Communicator) -> bool:
    """Whether all results are right until the harness has had enough, which all ranks learn in the same step."""
    for step in itertools.count():
        said = _ranks_with_enough(comm, step, (mortal.own_folder() / "enough").exists())
        x = torch.cat([torch.full((_ROWS, _HIDDEN), _value(comm.rank, step) + peer) for peer in range(comm.size)])
        y = tw.all_to_all_v(x, wire="int8", comm=comm, transport="staged")
        expected = torch.tensor([[_value(peer, step) + comm.rank] for peer in range(comm.size)])
        assert isinstance(y, torch.Tensor)
        if said is None or not torch.allclose(y, expected.repeat_interleave(_ROWS, 0), atol=0.4):
            return False
        if said:
            break
        if step == _FIRST_STEPS:
            mortal.tell("ready")
        time.sleep(_STEP_SECONDS)
    return True


def _ranks_with_enough(comm: Communicator, step: int, enough: bool) -> int | None:
    """How many have, as an all_reduce says; None if other sums of it are wrong."""
    x = torch.full((1024,), _value(comm.rank, step))
    x[0] = enough
    comm.all_reduce(x)
    right = bool((x[1:] == sum(_value(rank, step) for rank in range(comm.size))).all())
    return int(x[0]) if right else None


def _value(rank: int, step: int) -> float:
    """What a rank gives: int8 changes it by less than another rank or step does."""
    return 1.0 + 3 * (rank + SIZE * (step % 8))


def _shrink(comm: Communicator) -> Communicator:
    for _ in range(TRIES - 1):
        try:
            return comm.shrink()
        except PeerTimeout:
            time.sleep(_PAUSE_SECONDS)
    return comm.shrink()


# ---------------------------------------------------------------------------------------------------------------------
# Around the ranks


class Stopped(Exception):
    """The harness ends."""


def run(cell: Cell, repeat: int, number: int, stopping: threading.Event) -> Result:
    """Runs a cell once and leaves nothing behind.

    Args:
        repeat: which draws the moment of the cut.
        number: of this world, among all of this process.
        stopping: set when the harness ends.

    Raises:
        Stopped: the harness ends.
    """
    with ExitStack() as ended:
        folder = Path(ended.enter_context(tempfile.TemporaryDirectory(prefix="cuts-")))
        network = ended.enter_context(Network(SIZE, number))
        ended.enter_context(ranks(folder, [(namespace, {}) for namespace in network.namespaces], _play))
        ready = told(folder, SIZE, "ready", time.monotonic() + _START_SECONDS, stopping)
        if len(ready) < SIZE or any(ready.values()):
            reports = [Report("not started", text=str(ready.get(rank) or "")) for rank in range(SIZE)]
            return Result(cell, repeat, reports, judge(cell, reports))
        pause(random.Random(f"{cell} {repeat}").uniform(0, 1), stopping)
        network.cut(cell.pairs())
        begin = time.monotonic()
        pause(cell.length * TIMEOUT, stopping)
        network.heal()
        pause(TIMEOUT, stopping)  # by then every rank that is to miss another does
        (folder / "enough").touch()
        told_by = told(folder, SIZE, "report", begin + LIMIT * TIMEOUT, stopping)
        reports = [_report(told_by.get(rank), folder / f"printed.{rank}", begin) for rank in range(SIZE)]
    return Result(cell, repeat, reports, judge(cell, reports))


@contextmanager
def ranks(
    folder: Path,
    places: Sequence[tuple[str, dict[str, str]]],
    play: Callable[..., None],
    *arguments: object,
    timeout: float = TIMEOUT,
) -> Iterator[None]:
    """Starts `play(comm, *arguments)` on a rank for each namespace and variables, and kills them in the end."""
    environ = {"MASTER_ADDR": address(0), "MASTER_PORT": _PORT, "GLOO_SOCKET_IFNAME": INTERFACE}
    modules = [*testing._PRELOAD, *testing._preloaded]
    processes = []
    try:
        with testing._without_main():
            for rank, (namespace, own) in enumerate(places):
                told = (namespace, rank, len(places), folder, environ | own, timeout, play, arguments)
                process = ServedProcess(modules, os.environ, target=_run_rank, args=told)
                process.start()
                processes.append(process)
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()


def told(folder: Path, number: int, key: str, deadline: float, stopping: threading.Event) -> dict[int, Any]:
    """What so many ranks have told under a key by the deadline, or the text of what they raised."""
    found: dict[int, Any] = {}
    while len(found) < number and time.monotonic() < deadline:
        for file in itertools.chain(folder.glob("raised.?"), folder.glob(f"{key}.?")):
            found.setdefault(int(file.suffix[1:]), file)
        pause(0.02, stopping)
    return {rank: pickle.loads(file.read_bytes()) for rank, file in found.items()}


def _report(told: Report | str | None, printed: Path, begin: float) -> Report:
    if told is None:
        return Report("hang", text=printed.read_text(errors="replace")[-_MOST_PRINTED:])
    if isinstance(told, str):
        return Report("another error", text=told.strip().splitlines()[-1])
    return told._replace(seconds=round(told.seconds - begin, 2))


def pause(seconds: float, stopping: threading.Event) -> None:
    """Sleeps, but no longer than until the harness ends."""
    if stopping.wait(seconds):
        raise Stopped
