"""Where the time of a call goes on one rank: processor time by thread and phase, and time in line for a core.

Linux counts both for each thread (`/proc/self/task/*/schedstat`). What the kernel does on behalf of a packet is counted
for whichever thread it interrupts, so a rank's figures are exact only in sum with those of the other ranks here.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from thinwire.comm import Communicator

#: What is no phase: the whole time, processor time of threads other than the one that calls, and time in line.
WHOLE, GLOO, OTHER, IN_LINE = "whole", "Gloo", "other", "in line"
#: Of the thread that calls, before and outside of the phases that the call names.
OUTSIDE = "call"


def account(comm: Communicator, function: Callable[[], object], calls: int) -> dict[str, float]:
    """Seconds of a call on this rank, the mean over some calls, each behind a barrier. Collective.

    Returns:
        Processor time of the thread that calls by phase, of Gloo's threads (`GLOO`) and of others (`OTHER`); the time
        that the calling thread and Gloo's were ready to run and found no core (`IN_LINE`), and the whole (`WHOLE`).
    """
    taken: dict[str, float] = defaultdict(float)
    phases = _Phases(taken)
    recorder = comm.recorder
    for _ in range(calls):
        comm.barrier()
        before = _threads()
        recorder.phase = phases.begin  # type: ignore[method-assign]
        try:
            start = time.perf_counter()
            phases.begin(OUTSIDE)
            function()
            phases.begin("")
            taken[WHOLE] += time.perf_counter() - start
        finally:
            del recorder.phase
        for thread, (name, ran, stood) in _threads().items():
            _, ran_before, stood_before = before.get(thread, (name, 0.0, 0.0))
            own, of_gloo = thread == threading.get_native_id(), name.startswith("gloo")
            if not own:
                taken[GLOO if of_gloo else OTHER] += ran - ran_before
            if own or of_gloo:
                taken[IN_LINE] += stood - stood_before
    return {name: seconds / calls for name, seconds in taken.items()}


class _Phases:
    """Processor time of this thread, by the phase that it was in; what a flight recorder's `phase` is for a while."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._name, self._since = "", 0.0

    def begin(self, name: str) -> None:
        """The phase so far ends here; "" is none."""
        now = time.thread_time()
        if self._name:
            self._seconds[self._name] += now - self._since
        self._name, self._since = name, now


def _threads() -> dict[int, tuple[str, float, float]]:
    """Of each of this process's threads the name, and how many seconds it ran and stood in line."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            ran, stood, _ = (task / "schedstat").read_text().split()
            name = (task / "comm").read_text().strip()
        except FileNotFoundError:  # it ended meanwhile
            continue
        found[int(task.name)] = name, int(ran) / 1e9, int(stood) / 1e9
    return found
