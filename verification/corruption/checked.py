"""Memory that goes wrong under `integrity="checksum"`: what peers have written to a rank becomes something else.

Ranks are threads. One of them has its memory changed: before its call, when the others have sent; between any two steps
of its call; or while its kernels run. What each rank then gets is compared with plain torch's bits. A call may give
them, or raise an error of thinwire's; what it may not give is another result, and neither may the call after it.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import thinwire
from tests.helpers.tampering import CHANGES, run_threads
from thinwire.comm.communicator import Communicator
from thinwire.comm.memory import symmetric
from thinwire.comm.memory.symmetric import SymmetricMemory
from thinwire.errors import IntegrityError, ThinwireError, TransportUnavailable
from thinwire.fused import transport
from verification.corruption.words import scribble
from verification.faults.operations import BY_NAME, Operation
from verification.faults.rules import BARRIER

__all__ = ["OPERATIONS", "refused", "run_case"]

WORLD = 3
TIMEOUT = 0.5  # seconds
OPERATIONS = [name for name in BY_NAME if name != BARRIER]
_LIBRARY = str(Path(thinwire.__file__).parent)
_STRETCHES = (1, 8, 64, 512, 1 << 20)  # bytes, of which something becomes something else
_CHANGES = (*CHANGES, lambda rng, octets: scribble(rng, octets, 2))


class Steps:
    """What a rank's own calls pass through: entries to functions of the library, and returns from them.

    With `at`, `then` is called in that step. Every kernel is called by a function, so all that lies between two kernels
    is reached.
    """

    def __init__(self, at: int = -1, then: Any = None) -> None:
        self.count, self.at, self.then = 0, at, then

    def __enter__(self) -> Steps:
        sys.setprofile(self._step)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)

    def _step(self, frame: Any, event: str, _: object) -> None:
        if event in ("call", "return") and frame.f_code.co_filename.startswith(_LIBRARY):
            if self.count == self.at:
                self.then()
            self.count += 1


class Memories:
    """The symmetric memory of each rank that was made meanwhile."""

    def __init__(self) -> None:
        self.of: dict[int, list[SymmetricMemory]] = defaultdict(list)

    def allocate(self, comm: Communicator, *arguments: Any) -> SymmetricMemory:
        made = symmetric.allocate(comm, *arguments)
        self.of[comm.rank].append(made)
        return made

    def change(self, rng: random.Random, rank: int) -> None:
        """Something of what a rank has there becomes something else, in one place or in several."""
        octets = rng.choice(self.of[rank]).local
        written = octets.clone().view(torch.int64).nonzero()[:, 0] * 8  # a copy, as kernels may be writing
        for _ in range(rng.choice((1, 3, 10))):
            anywhere = rng.random() < 0.1 or not len(written)
            start = rng.randrange(len(octets) // 8) * 8 if anywhere else int(written[rng.randrange(len(written))])
            stretch = octets[start : start + rng.choice(_STRETCHES)]
            if len(stretch) >= 8 or rng.random() < 0.5:
                rng.choice(_CHANGES if len(stretch) >= 8 else CHANGES)(rng, stretch)


def refused() -> dict[str, str]:
    """The operations that do not take the direct transport with checksums, and why; compiles what the others need."""

    def try_out(comm: Communicator, name: str) -> None:
        with _operation(comm, name) as operation:
            operation.call(1)

    reasons = {}
    for name in OPERATIONS:
        for result in run_threads(WORLD, lambda comm, name=name: try_out(comm, name), integrity="checksum"):
            if isinstance(result, TransportUnavailable):
                reasons[name] = str(result)
            elif isinstance(result, Exception):
                raise result
    return reasons


@contextmanager
def _operation(comm: Communicator, name: str) -> Any:
    operation: Operation = BY_NAME[name](comm, "direct")
    try:
        yield operation
    finally:
        operation.close()


def run_case(rng: random.Random, names: list[str], integrity: str = "checksum") -> tuple[str, str]:
    """Draws an operation of these and changes a rank's memory in it: which it was, and what came of it.

    That is "right", if all ranks' results are; "IntegrityError", if a rank raised it; another error's name; or what
    must not be, "wrong" first.
    """
    name, victim, first = rng.choice(names), rng.randrange(WORLD), rng.randrange(1, 1 << 30)
    moment, part = rng.choice(("before", "between", "between", "between", "during")), rng.random()
    memories = Memories()

    def rank(comm: Communicator) -> None:
        with _operation(comm, name) as operation:
            for number in range(first, first + 4):
                operation.prepare(number)
            operation.call(first)
            with Steps() as steps:
                operation.call(first + 1)
            comm.barrier()
            if comm.rank != victim:
                operation.call(first + 2)
            else:
                _meet(operation, first + 2, int(part * steps.count))
            operation.call(first + 3)

    def _meet(operation: Operation, number: int, step: int) -> None:
        change = partial(memories.change, rng, victim)
        if moment == "before":
            time.sleep(0.002)  # meanwhile the others send
            change()
        if moment == "during":
            timer = threading.Timer(part * 0.003, change)
            timer.start()
            try:
                operation.call(number)
            finally:
                timer.join()
        else:
            with Steps(step if moment == "between" else -1, change):
                operation.call(number)

    with mock.patch.object(transport, "allocate", memories.allocate):
        results = run_threads(WORLD, rank, TIMEOUT, integrity=integrity)
    return name, _outcome(results)


def _outcome(results: list[Any]) -> str:
    """Of a case, out of what the ranks raised."""
    raised = [result for result in results if result is not None]
    for error in raised:
        if isinstance(error, AssertionError):
            return f"wrong: {error}"
        if not isinstance(error, ThinwireError):
            raise error
    if any(isinstance(error, IntegrityError) for error in raised):
        return "IntegrityError"
    return type(raised[0]).__name__ if raised else "right"
