"""What a rank does in a cell, and what it tells of it. Nothing is judged here but results and what is left over."""

from __future__ import annotations

import functools
import gc
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from tests.helpers import mortal
from tests.helpers.files import mapped_segments, open_files, shared_files
from thinwire.comm.communicator import Communicator
from thinwire.comm.recorder import VARIABLE
from thinwire.errors import ThinwireError
from verification.faults.operations import BY_NAME, Operation, deviating
from verification.faults.rules import (
    DEVIATIONS,
    EXITS,
    KILLED_AFTER,
    KILLED_BEFORE,
    KILLED_DURING,
    OUT_OF_MEMORY,
    RAISES,
    SIGINT,
    SIGTERM,
    STOPPED,
    STOPPED_SHORTLY,
    Cell,
)

START_SECONDS = 30.0  # that ranks wait for each other before a cell begins
TIMEOUT = 1.5  # seconds that they wait for each other in it
THREADS_TIMEOUT = 0.6  # the same between threads: `run_ranks` ends all two seconds after a rank has raised
STOP_SECONDS = 0.2  # of a rank that is stopped for less than the timeout
EXIT_CODE = 3
_LATE_SECONDS = 0.2  # that the others come later, so that the rank is in its wait when it happens
_INTERRUPT_SECONDS = 10.0  # within which it must have come, on a busy machine
_SPARE_BYTES = 1 << 20  # that are left where memory is to be short
_CALLS = 3  # in which a rank that is gone must be missed


class Deliberate(Exception):
    """What a rank raises that is to raise."""


class Link(Protocol):
    """How ranks and the test tell each other how far they are."""

    def tell(self, key: str, value: object = None) -> None: ...

    def wait_for(self, key: str) -> None: ...


class FileLink:
    """Between processes."""

    def tell(self, key: str, value: object = None) -> None:
        mortal.tell(key, value)

    def wait_for(self, key: str) -> None:
        mortal.wait_for(key)


@dataclass
class Called:
    """What came of one call; `error` is "" for a result, which was right."""

    seconds: float
    error: str = ""
    ranks: tuple[int, ...] | None = None  # of a PeerTimeout
    text: str = ""


@dataclass
class Report:
    """What a rank tells of a cell.

    Attributes:
        calls: until one raised, and one more.
        after: the ranks' number in the world that went on, and whether two calls there were right; -1: it was left out.
        why_left_out: the error's name.
    """

    calls: list[Called] = field(default_factory=list)
    size_after: int = -1
    why_left_out: str = ""


def play_world(comm: Communicator, cells: list[Cell], repeat: int) -> list[str]:
    """All cells of a world of processes, one if it is to lose a rank. Gives what is left over at the end.

    Every cell of several has a communicator of its own, so that what one of them leaves open shows.
    """
    link = FileLink()
    files = mortal.own_folder() / "temporary"
    files.mkdir(exist_ok=True)
    os.environ[VARIABLE], tempfile.tempdir = str(mortal.own_folder()), str(files)
    printed = os.open(mortal.own_folder() / f"printed.{comm.rank}", os.O_WRONLY | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(printed, standard)
    os.close(printed)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell does that started all this
    if len(cells) == 1:
        before = len(open_files())
        play_cell(comm, cells[0], 0, repeat, link)
        comm._close_all()
        return left_over(files, before)
    opened: list[int] = []
    for index, cell in enumerate(cells):
        with comm.split(groups=[range(comm.size)]) as part:
            play_cell(part, cell, index, repeat, link)
        link.wait_for(f"{index} over")
        comm.barrier()
        opened.append(_settled(opened[0] if opened else 0))
    comm._close_all()
    return left_over(files, opened[0])


def _settled(most: int) -> int:
    """How many descriptors are open once there are no more than so many, or after some seconds."""
    deadline = time.monotonic() + 5  # Gloo's threads may take a moment
    while True:
        gc.collect()
        count = len(open_files())
        if count <= most or not most or time.monotonic() > deadline:
            return count
        time.sleep(0.02)


def left_over(files: Path, most: int) -> list[str]:
    """What a rank has left that has closed its communicators, and had so many descriptors open before the fault."""
    count = _settled(most)
    links = open_files()
    found = [f"{count} open descriptors, {most} before: {sorted(links)}"] if count > most else []
    if mapped_segments():
        found.append(f"segments {sorted(mapped_segments())} are mapped")
    found += [f"{link} is open" for link in links if "thinwire" in link or link.startswith("/dev/shm")]
    found += [f"/dev/shm/{name} is there" for name in shared_files()]
    found += [f"{path} is there" for path in files.iterdir()]
    return found


def play_cell(comm: Communicator, cell: Cell, index: int, repeat: int, link: Link) -> None:
    """One cell at one rank."""
    rng = random.Random(f"{cell} {repeat}")  # draws the same on all ranks
    comm.barrier()
    # What is made from here on has a short timeout. There is no argument for it.
    comm._exchange.timeout = THREADS_TIMEOUT if cell.threads else TIMEOUT
    transport = "direct" if cell.direct else "staged"
    operation = BY_NAME[cell.operation](comm, transport, cell.victim if cell.fault == OUT_OF_MEMORY else -1)
    operation.call(100)  # memory and kernels are there
    if cell.fault in DEVIATIONS:
        operation.other(comm, transport).call(101)
    timeout, comm._exchange.timeout = comm._exchange.timeout, START_SECONDS
    for number in range(_CALLS):
        operation.prepare(number)
    comm.barrier()
    comm._exchange.timeout = timeout
    part = _Part(comm, cell, index, link, operation, rng)
    if comm.rank == cell.victim:
        part.suffer()
    elif cell.fault in DEVIATIONS:
        part.disagree(mine=False)
    else:
        part.lose()
    operation.close()


@dataclass
class _Part:
    """One rank's part in a cell."""

    comm: Communicator
    cell: Cell
    index: int
    link: Link
    operation: Operation
    rng: random.Random

    def __post_init__(self) -> None:
        # Either the others come late, so that it happens in the rank's wait, or at any moment of the call.
        in_its_wait = self.rng.random() < 0.5
        during = (KILLED_DURING, STOPPED_SHORTLY, STOPPED, SIGINT, SIGTERM)
        self.late = _LATE_SECONDS if in_its_wait and self.cell.fault in during else 0.0
        self.moment = _LATE_SECONDS / 2 if in_its_wait else self.rng.random() * 0.003
        self.orderly = self.rng.random() < 0.5
        # Whether `shrink` and `rebuild` are told whom the error named, or find out for themselves. After a thread has
        # raised, `run_ranks` leaves the others no time for that on the direct transport.
        self.told_who = self.rng.random() < 0.5 or (self.cell.threads and self.cell.fault == RAISES)
        self.report = Report()

    def called(self, call: Callable[[], None]) -> Called:
        """What comes of a call. An AssertionError is no part of that."""
        self.operation.seconds = 0.0
        try:
            call()
        except ThinwireError as error:
            return Called(self.operation.seconds, type(error).__name__, getattr(error, "ranks", None), str(error))
        return Called(self.operation.seconds)

    def tell(self) -> None:
        self.link.tell(f"{self.index}", self.report)

    # -----------------------------------------------------------------------------------------------------------------
    # The others

    def lose(self) -> None:
        """Calls until a peer is missed, and goes on without it."""
        time.sleep(self.late)
        for number in range(_CALLS):
            self.report.calls.append(self.called(functools.partial(self.operation.call, number)))
            if self.report.calls[-1].error:
                break
        if self.report.calls[-1].error:
            self.go_on()
        self.link.tell(f"{self.index} went on")
        self.tell()
        if self.cell.fault == STOPPED:
            self.link.wait_for(f"{self.index} over")  # who was left out can ask, as this rank lives

    def go_on(self) -> None:
        """Two calls among the ranks that are left."""
        named = self.report.calls[-1].ranks if self.told_who else None
        try:
            left = self.operation.go_on(named)
        except ThinwireError as error:
            self.report.why_left_out = f"{type(error).__name__}: {error}"
            return
        for number in (200, 201):
            left.call(number)
        self.report.size_after = left.comm.size
        left.close()
        left.comm.close()

    def disagree(self, mine: bool) -> None:
        """A call in which one rank does something else, and what comes after it."""
        fault = self.cell.fault
        self.report.calls.append(self.called(lambda: deviating(self.operation, 0, fault, mine)))
        if self.report.calls[0].error == "PeerTimeout":
            self.go_on()
        elif self.report.calls[0].error:
            self.report.calls.append(self.called(lambda: self.operation.call(1)))
        self.tell()

    # -----------------------------------------------------------------------------------------------------------------
    # The one that it happens to

    def suffer(self) -> None:
        """Comes back only if the rank lives on."""
        fault = self.cell.fault
        if fault in DEVIATIONS:
            return self.disagree(mine=True)
        if fault in (STOPPED, STOPPED_SHORTLY):
            return self._stop()
        if fault == OUT_OF_MEMORY:
            self._run_out_of_memory()
        elif fault == SIGINT:
            self._interrupt()
        elif fault in (KILLED_DURING, SIGTERM):
            self._signal_soon(signal.SIGKILL if fault == KILLED_DURING else signal.SIGTERM)
            self.operation.call(0)
            signal.pause()
        elif fault == KILLED_AFTER:
            self.operation.call(0)
        if fault in (KILLED_BEFORE, KILLED_AFTER):
            mortal.die()
        if fault == EXITS and not self.cell.threads:
            sys.exit(EXIT_CODE) if self.orderly else os._exit(EXIT_CODE)
        if fault in (RAISES, OUT_OF_MEMORY, SIGINT):
            raise Deliberate
        assert fault == EXITS, fault  # of a thread, which returns

    def _signal_soon(self, number: int, after: threading.Event | None = None) -> None:
        """Sends this process a signal in a moment, and sets the event when it goes on."""

        def send() -> None:
            os.kill(os.getpid(), number)
            if after is not None:
                after.set()

        timer = threading.Timer(self.moment, send)
        timer.daemon = True
        timer.start()

    def _stop(self) -> None:
        shortly, woken = self.cell.fault == STOPPED_SHORTLY, threading.Event()
        if not self.cell.threads:
            self.link.tell(f"{self.index} stops")
            self._signal_soon(signal.SIGSTOP, woken)
        elif shortly:
            time.sleep(STOP_SECONDS)
        else:
            self.link.wait_for(f"{self.index} went on")
        for number in range(_CALLS):
            self.report.calls.append(self.called(functools.partial(self.operation.call, number)))
            if self.report.calls[-1].error:
                break
            if not self.cell.threads and number == 0:
                woken.wait()
        if not shortly:
            self.go_on()
        self.tell()

    def _interrupt(self) -> None:
        started, raised = time.monotonic(), None
        try:
            self._signal_soon(signal.SIGINT)
            try:
                self.operation.call(0)
            except Exception as error:  # what the interrupt became, or came too late for
                raised = error
            while time.monotonic() < started + _INTERRUPT_SECONDS:
                time.sleep(0.01)  # it may come behind the call
        except KeyboardInterrupt as error:
            raised = raised or error
        name = "" if raised is None else type(raised).__name__
        self.report.calls.append(Called(time.monotonic() - started - self.moment, name, None, str(raised)))
        self.tell()

    def _run_out_of_memory(self) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        gc.collect()
        started, raised = time.monotonic(), None
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _SPARE_BYTES, hard))
        try:
            self.operation.call(0)
        except Exception as error:
            raised = error
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        name = "" if raised is None else type(raised).__name__
        self.report.calls.append(Called(time.monotonic() - started, name, None, str(raised)))
        self.tell()
