"""Runs cells of the matrix, in worlds of three ranks, and judges what the ranks tell by the rules."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.helpers import mortal
from thinwire.comm.communicator import Communicator
from thinwire.errors import ThinwireError
from thinwire.testing import RankError, run_ranks
from verification.faults.ranks import (
    EXIT_CODE,
    START_SECONDS,
    STOP_SECONDS,
    THREADS_TIMEOUT,
    TIMEOUT,
    Called,
    Report,
    play_cell,
    play_world,
)
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
    WORLD,
    Cell,
    Outcome,
    expected,
)

#: Seconds that a thread may wait for a core in a run that counts: with twice that, ranks that do all that they should
#: miss the shortest timeout.
MOST_LATE = THREADS_TIMEOUT / 2
SPARE = 2.0  # seconds that may pass after the timeout until a call ends
AT_A_TIME = 3  # worlds, which mostly wait
_PULSE = 0.005  # seconds
_SOON = 20.0  # seconds within which what waits for nothing must have happened, on a busy machine
_MOST_PRINTED = 2000  # characters of what a rank printed
#: How processes end that a fault ends.
_EXIT_CODES = {
    KILLED_BEFORE: -signal.SIGKILL, KILLED_DURING: -signal.SIGKILL, KILLED_AFTER: -signal.SIGKILL,
    SIGTERM: -signal.SIGTERM, SIGINT: 1, RAISES: 1, OUT_OF_MEMORY: 1, EXITS: EXIT_CODE,
}  # fmt: skip


@dataclass
class Result:
    """What came of one run of a cell.

    Attributes:
        problems: what was against the rules; empty if it held.
        seconds: that the slowest call of a rank which was left took until it ended.
        late: seconds that the machine, meanwhile, kept a thread waiting that had something to do, at most.
    """

    cell: Cell
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    late: float = 0.0


def run(
    cells: Collection[Cell], repeat: int, at_a_time: int = AT_A_TIME, end: float = float("inf")
) -> Iterator[Result]:
    """Runs every cell once, several worlds at a time, and gives results as they come; begins none after `end`."""
    if any(cell.threads for cell in cells):
        # Kernels are loaded, which takes seconds, so that no rank is late for their sake.
        importlib.import_module("tests.helpers.warm")
    with ThreadPoolExecutor(at_a_time) as pool, _Pulse() as pulse:

        def one(world: list[Cell]) -> list[Result]:
            if (start := time.monotonic()) > end:
                return []
            results = _run_world(world, repeat)
            late = pulse.most_late(start)
            return [replace(result, late=late) for result in results]

        for results in pool.map(one, worlds(cells)):
            yield from results


class _Pulse:
    """A thread that wakes every few milliseconds, and notes when that was late."""

    def __init__(self) -> None:
        self._late: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> _Pulse:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        due = time.monotonic() + _PULSE
        while not self._over.wait(_PULSE):
            now = time.monotonic()
            if now - due > _PULSE:
                self._late.append((now, now - due))
            due = now + _PULSE

    def most_late(self, since: float) -> float:
        """The most of all that ended after that time."""
        return max((late for at, late in self._late if at > since), default=0.0)


def worlds(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Cells that share a world: those that all of its ranks survive, of one transport and victim. Others are alone."""
    shared: dict[tuple[str, str, int], list[Cell]] = {}
    alone = []
    for cell in cells:
        if cell.survived:
            shared.setdefault((cell.transport, cell.fault, cell.victim), []).append(cell)
        else:
            alone.append([cell])
    return [*shared.values(), *alone]


def _run_world(cells: list[Cell], repeat: int) -> list[Result]:
    results = [Result(cell) for cell in cells]
    try:
        if cells[0].threads:
            _run_threads(results, repeat)
        else:
            _run_processes(results, repeat)
    except (AssertionError, ThinwireError) as error:  # the cells that had come to their end say nothing more
        unfinished = [result for result in results if not result.seconds] or results
        for result in unfinished:
            result.problems.append(f"{type(error).__name__}: {error}")
    return results


# ---------------------------------------------------------------------------------------------------------------------
# Processes


def _run_processes(results: list[Result], repeat: int) -> None:
    cells = [result.cell for result in results]
    alone = [cells[0].victim] if not cells[0].survived else []
    with (
        tempfile.TemporaryDirectory(prefix="faults-") as folder,
        mortal.ranks(Path(folder), WORLD, play_world, cells, repeat, timeout=START_SECONDS) as case,
    ):
        for index, result in enumerate(results):
            reports = _follow(case, result.cell, index)
            case.allow(f"{index} over")
            _judge(result, reports, TIMEOUT)
        stopped = cells[0].fault == STOPPED
        left = [rank for rank in range(WORLD) if stopped or rank not in alone]
        for rank, found in case.told(left).items():
            results[-1].problems += [f"rank {rank} has left: {what}" for what in found]
        for rank, process in enumerate(case.processes):
            process.join(_SOON)
            wanted = 0 if rank in left else _EXIT_CODES[cells[0].fault]
            if process.exitcode != wanted:
                printed = (case.folder / f"printed.{rank}").read_text(errors="replace")[-_MOST_PRINTED:]
                results[-1].problems.append(f"rank {rank} ended with {process.exitcode}, expected {wanted}: {printed}")


def _follow(case: mortal.Ranks, cell: Cell, index: int) -> dict[int, Report]:
    """What the ranks tell of a cell, the one that it happened to too, if it lives to tell."""
    others = [rank for rank in range(WORLD) if rank != cell.victim]
    if cell.fault in (STOPPED, STOPPED_SHORTLY):
        case.told([cell.victim], f"{index} stops")
        _wait_until_stopped(case.processes[cell.victim].pid)
        if cell.fault == STOPPED:
            case.told(others, f"{index} went on")
        else:
            time.sleep(STOP_SECONDS)
        case.signal(signal.SIGCONT, cell.victim)
    reports: dict[int, Report] = case.told(others, f"{index}")
    if cell.fault in (STOPPED, STOPPED_SHORTLY, *DEVIATIONS):
        reports |= case.told([cell.victim], f"{index}")
    elif cell.fault in (SIGINT, OUT_OF_MEMORY):  # which it told before it ended
        told = case.folder / f"{index}.{cell.victim}"
        case.processes[cell.victim].join(_SOON)
        if not told.exists():
            raised = case.folder / f"raised.{cell.victim}"
            why = pickle.loads(raised.read_bytes()) if raised.exists() else ""
            code = case.processes[cell.victim].exitcode
            raise AssertionError(f"rank {cell.victim} ended with {code}, and told nothing: {why}")
        reports[cell.victim] = pickle.loads(told.read_bytes())
    return reports


def _wait_until_stopped(pid: int | None) -> None:
    deadline = time.monotonic() + _SOON
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline, "it is not stopped"
        time.sleep(0.002)


# ---------------------------------------------------------------------------------------------------------------------
# Threads


class _ThreadLink:
    """Between threads. Who waits until a rank went on waits for all but one, and until it is over, for all."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.told: dict[str, dict[int, Any]] = {}

    def of(self, rank: int) -> _RankLink:
        return _RankLink(self, rank)

    def tell(self, rank: int, key: str, value: object) -> None:
        with self._changed:
            self.told.setdefault(key, {})[rank] = value
            self._changed.notify_all()

    def wait_for(self, key: str) -> None:
        awaited, needed = (key, WORLD - 1) if key.endswith("went on") else (key.removesuffix(" over"), WORLD)
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.told.get(awaited, {})) >= needed, _SOON), key


@dataclass
class _RankLink:
    link: _ThreadLink
    rank: int

    def tell(self, key: str, value: object = None) -> None:
        self.link.tell(self.rank, key, value)

    def wait_for(self, key: str) -> None:
        self.link.wait_for(key)


def _run_threads(results: list[Result], repeat: int) -> None:
    cells, link = [result.cell for result in results], _ThreadLink()

    def body(comm: Communicator) -> None:
        for index, cell in enumerate(cells):
            if len(cells) == 1:
                play_cell(comm, cell, index, repeat, link.of(comm.rank))
            else:
                with comm.split(groups=[range(comm.size)]) as part:
                    play_cell(part, cell, index, repeat, link.of(comm.rank))

    failed: list[int] = []
    try:
        run_ranks(body, WORLD, mode="thread", timeout=mortal.LIMIT)
    except RankError as error:
        failed = list(error.failures)
        if failed != [cells[0].victim] or cells[0].fault != RAISES:
            raise
    else:
        assert cells[0].fault != RAISES, "a rank raised, and nobody heard of it"
    for index, result in enumerate(results):
        _judge(result, link.told.get(f"{index}", {}), THREADS_TIMEOUT)


# ---------------------------------------------------------------------------------------------------------------------
# Right or wrong


def _judge(result: Result, reports: dict[int, Report], timeout: float) -> None:
    cell, outcome, problems = result.cell, expected(result.cell), result.problems
    others = [rank for rank in range(WORLD) if rank != cell.victim]
    missing = [rank for rank in others if rank not in reports]
    if missing:
        problems.append(f"ranks {missing} told nothing")
        return
    for rank, report in sorted(reports.items()):
        for number, called in enumerate(report.calls):
            stopped = rank == cell.victim and cell.fault in (STOPPED, STOPPED_SHORTLY)
            if called.seconds > timeout + SPARE and not stopped:
                problems.append(f"rank {rank}, call {number}: {called.seconds:.2f} s")
            if rank != cell.victim:
                result.seconds = max(result.seconds, called.seconds)
        if rank == cell.victim and outcome.loses:
            _judge_victim(cell, report, problems)
        else:
            _judge_calls(cell, rank, report.calls, outcome, problems)
            _judge_after(rank, report, outcome, problems)
    named = {reports[rank].calls[-1].ranks for rank in others}
    if len(named) > 1:
        problems.append(f"the ranks that are left name different ones: {named}")


def _judge_calls(cell: Cell, rank: int, calls: list[Called], outcome: Outcome, problems: list[str]) -> None:
    errors = [called.error for called in calls]
    last, name = calls[-1], outcome.error
    if outcome is Outcome.OTHERS and rank == cell.victim:
        name = "ConfigMismatch"
    if outcome is Outcome.RIGHT:
        held = not any(errors)
    elif outcome is Outcome.LOST:
        held = errors == [name]
    elif outcome is Outcome.RIGHT_OR_LOST:
        held = errors in ([name], ["", name])
    elif outcome is Outcome.NOBODY_LOST:
        held = errors == [name]
    else:  # at once, and the next call is right
        held = errors == [name, ""]
    lost = (cell.victim,) if outcome.loses else ()
    if not held or (name == "PeerTimeout" and last.ranks != lost):
        told = [(called.error or "right", called.ranks, called.text) for called in calls]
        problems.append(f"rank {rank}: expected {outcome.value}, and ranks {lost} named; it got {told}")


def _judge_after(rank: int, report: Report, outcome: Outcome, problems: list[str]) -> None:
    size = {Outcome.NOBODY_LOST: WORLD}.get(outcome, WORLD - 1 if outcome.loses else -1)
    if report.size_after != size:
        problems.append(f"rank {rank} went on among {report.size_after} ranks, expected {size}: {report.why_left_out}")


def _judge_victim(cell: Cell, report: Report, problems: list[str]) -> None:
    """It is told that the others gave it up, or why its own call ended."""
    last = report.calls[-1]
    accepted = {
        SIGINT: ("KeyboardInterrupt",), OUT_OF_MEMORY: ("CapacityError", "MemoryError", "RuntimeError"),
    }.get(cell.fault, ("PeerTimeout",))  # fmt: skip
    if last.error not in accepted:
        problems.append(f"rank {cell.victim} got {last.error or 'a result'}, expected {accepted}: {last.text}")
    if cell.fault == STOPPED:
        if last.ranks not in ((cell.victim,), ()):
            problems.append(f"rank {cell.victim}, which was given up, names {last.ranks}: {last.text}")
        if report.size_after != -1 or not report.why_left_out.startswith("ThinwireError"):
            problems.append(f"rank {cell.victim} was to be left out: {report}")


def ranks_left() -> list[str]:
    """Ranks that still run, as threads of this process, or as processes: what servers that it started have forked."""
    deadline = time.monotonic() + _SOON  # a server may take a moment to hear of an end
    while True:
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")]
        left += [f"process {pid}" for server in _children(os.getpid()) for pid in _children(server)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in task.read_text().split()]
    return found
