"""Calls that are interrupted at rank 0, made again there, and followed by others, on communicators of their own.

`python -m verification.interrupts` runs them. Each element of what a rank gives to step s is 1000 * s + 100 * rank, so
results of another step, or of two, are told from right ones, quantised or not.
"""

from __future__ import annotations

import functools
import random
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch

import thinwire as tw
from thinwire.comm.communicator import Communicator
from thinwire.errors import PeerTimeout, ThinwireError

STEPS, INTERRUPTED, TIMEOUT = 4, 2, 0.6
ROWS, HIDDEN = 4, 64
#: When the exception comes: at an event of the profiler's (a function of Python's begins, or one in C has returned:
#: there Python looks for signals), or with signals at a random time, while the peer is there already, or late.
KINDS = (
    "an event",
    "an event, the peer late",
    "an event, another error",
    "an event, then a signal",
    "a signal",
    "a signal, the peer late",
    "a signal, another error",
    "two signals",
)


class Interrupted(Exception):
    """What a signal handler might raise."""


def _value(rank: int, step: int) -> float:
    return 1000.0 * step + 100.0 * rank


class Steps(NamedTuple):
    """What is done in each step: what comes before, the call that may be interrupted, and what is read of its result.

    Attributes:
        expected: what is read if nothing goes wrong.
    """

    before: Callable[[int], Any]
    call: Callable[[Any], Any]
    read: Callable[[Any], list[float]]
    expected: Callable[[int], list[float]]


class Place(NamedTuple):
    """A call that can be interrupted, on a communicator and a transport."""

    name: str
    make: Callable[[Communicator, str], Steps]


def _collective(name: str, wire: str) -> Place:
    def make(comm: Communicator, transport: str) -> Steps:
        function = getattr(tw, name)

        def expected(step: int) -> list[float]:
            each = [_value(rank, step) for rank in range(comm.size)]
            return {
                "all_to_all_v": each,
                "all_gather": [value for value in each for _ in range(comm.size)],
                "reduce_scatter": [sum(each)],
                "all_reduce": [sum(each)] * comm.size,
            }[name]

        return Steps(
            lambda step: torch.full((ROWS * comm.size, HIDDEN), _value(comm.rank, step)),
            lambda x: function(x, wire=wire, comm=comm, transport=transport),
            lambda result: result.mean(1).view(-1, ROWS).mean(1).tolist(),  # type: ignore[no-any-return]
            expected,
        )

    return Place(f"{name} {wire}", make)


def _pending(kind: str, comm: Communicator, transport: str) -> Steps:
    """A call that is pending: its own wait may be interrupted, or what ends it before another call."""

    def begin(step: int) -> tuple[torch.Tensor, Any]:
        x = torch.full((comm.size * ROWS, 5000), _value(comm.rank, step))
        if kind == "an exact Work":
            return x, comm.all_reduce(x, async_op=True)
        out = torch.empty_like(x)
        return out, tw.all_to_all_v(x, out=out, wire="none", comm=comm, transport=transport, async_op=True)

    def end(begun: tuple[torch.Tensor, Any]) -> torch.Tensor:
        if kind == "what ends a Work":
            comm.exchange_counts([1] * comm.size)
        begun[1].wait()
        return begun[0]

    def expected(step: int) -> list[float]:
        each = [_value(rank, step) for rank in range(comm.size)]
        return [sum(each)] * comm.size if kind == "an exact Work" else each

    return Steps(begin, end, lambda out: out.view(comm.size, -1).mean(1).tolist(), expected)


def _data(comm: Communicator, transport: str) -> Steps:
    return Steps(
        lambda step: 1000 * step + 100 * comm.rank,
        lambda value: comm.all_gather_data(value, int),
        lambda told: told,
        lambda step: [_value(rank, step) for rank in range(comm.size)],
    )


def _round(leg: str, comm: Communicator, transport: str) -> Steps:
    """A round whose leg may be interrupted."""
    ep = tw.ExpertParallel(comm, comm.size, 1, HIDDEN, ROWS, wire="none", transport=transport, timeout=TIMEOUT)
    ids, ones = torch.full((ROWS, 1), (comm.rank + 1) % comm.size), torch.ones(ROWS, 1)
    gradients = leg == "backward"

    def tokens(step: int) -> tuple[torch.Tensor, ...]:
        return torch.full((ROWS, HIDDEN), _value(comm.rank, step), requires_grad=gradients), ids, ones

    def open_round(step: int) -> tuple[Any, ...]:
        d = ep.dispatch(*tokens(step))
        return d.tokens * 2, d

    def forward(step: int) -> tuple[Any, ...]:
        inputs = tokens(step)
        d = ep.dispatch(*inputs)
        return ep.combine(d.tokens * 2, d), inputs[0], step

    def left(step: int) -> float:
        return _value((comm.rank - 1) % comm.size, step)

    def both(step: int) -> list[float]:
        return [left(step), 2 * _value(comm.rank, step)]

    def read_round(d: Any) -> list[float]:
        rows = d.tokens
        return [*rows.unique().tolist(), *ep.combine(rows * 2, d).unique().tolist()]

    def home(y: torch.Tensor) -> list[float]:
        return y.unique().tolist()  # type: ignore[no-any-return]

    def differentiate(made: tuple[torch.Tensor, torch.Tensor, int]) -> torch.Tensor:
        y, x, step = made
        y.sum().mul(100 * step).backward(retain_graph=True)
        assert x.grad is not None
        return x.grad

    legs: dict[str, Steps] = {
        "dispatch": Steps(tokens, lambda inputs: ep.dispatch(*inputs), read_round, both),
        "dispatch_start": Steps(
            tokens, lambda inputs: ep.dispatch_start(*inputs), lambda s: read_round(ep.dispatch_finish(s)), both
        ),
        "dispatch_finish": Steps(
            lambda step: ep.dispatch_start(*tokens(step)), lambda s: ep.dispatch_finish(s), read_round, both
        ),
        "combine": Steps(open_round, lambda made: ep.combine(*made), home, lambda step: both(step)[1:]),
        "combine_start": Steps(
            open_round, lambda made: ep.combine_start(*made), lambda s: home(ep.combine_finish(s)),
            lambda step: both(step)[1:],
        ),
        "combine_finish": Steps(
            lambda step: ep.combine_start(*open_round(step)), lambda s: ep.combine_finish(s), home,
            lambda step: both(step)[1:],
        ),
        "abandon": Steps(open_round, lambda made: made[1].abandon(), lambda _: [0.0], lambda step: [0.0]),
        "backward": Steps(forward, differentiate, home, lambda step: [200.0 * step]),
    }  # fmt: skip
    return legs[leg]


PLACES = [
    *(_collective(name, wire) for name in ("all_to_all_v", "all_gather") for wire in ("none", "int8")),
    _collective("reduce_scatter", "int8"),
    _collective("all_reduce", "int8"),
    Place("all_gather_data", _data),
    *(Place(kind, functools.partial(_pending, kind)) for kind in ("a Work", "an exact Work", "what ends a Work")),
    *(
        Place(leg, functools.partial(_round, leg))
        for leg in (
            "dispatch", "dispatch_start", "dispatch_finish", "combine", "combine_start", "combine_finish", "abandon",
            "backward",
        )
    ),
]  # fmt: skip


class Raise:
    """Raises at one of the events of this thread's profiler, which ends the profiler, and has a signal follow."""

    def __init__(self, at: int, error: type[BaseException], then: float = 0.0) -> None:
        self.at, self.error, self.then, self.seen = at, error, then, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_return"):
            self.seen += 1
            if self.seen == self.at:
                if self.then:
                    signal.setitimer(signal.ITIMER_REAL, self.then)
                raise self.error


def _interrupt(call: Callable[[], Any], kind: str, at: float, rng: random.Random) -> tuple[Any, int]:
    """What the call gives, or the exception that ended it, and how many events it had."""
    error = Interrupted if "another error" in kind else KeyboardInterrupt
    profile = Raise(int(min(at, 1e9)), error, 1e-5 + 1e-4 * rng.random() if "then a signal" in kind else 0.0)

    def handler(number: int, frame: FrameType | None) -> None:
        raise error

    signal.signal(signal.SIGALRM, handler)
    signal.signal(signal.SIGPROF, handler)
    found: Any = None  # what the call gave: after that an interrupt is no matter of the library's
    try:
        try:
            if kind.startswith("an event"):
                sys.setprofile(profile)
            else:
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, at))
            if kind == "two signals":
                signal.setitimer(signal.ITIMER_PROF, max(1e-6, at + 0.001 * rng.random()))
            found = call()
        finally:
            sys.setprofile(None)
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
    except (Interrupted, KeyboardInterrupt) as caught:
        found = caught if found is None else found
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)  # again: of two signals, the first may have come before it
    return found, profile.seen


def _compared(found: list[float], expected: list[float]) -> str:
    """What int8 changes is less than what another rank or step would."""
    near = len(found) == len(expected) and all(abs(a - b) < 45 for a, b in zip(found, expected, strict=True))
    return "right" if near else f"WRONG: {found} in place of {expected}"


def _outcome(steps: Steps, step: int, call: Callable[[Any], Any]) -> str:
    try:
        return _compared(steps.read(call(steps.before(step))), steps.expected(step))
    except PeerTimeout as error:
        return f"PeerTimeout {list(error.ranks)}"
    except ThinwireError as error:
        return f"{type(error).__name__}: {error}"[:160]


def trial(world: Communicator, place: Place, transport: str, kind: str, at: float, seed: int) -> tuple[list[str], int]:
    """Outcomes of one rank: of each step, and of the interrupted one that of its repetition; and the call's events."""
    rng, outcomes, events = random.Random(seed), [], 0
    comm = world.split(groups=[range(world.size)])
    try:
        steps = place.make(comm, transport)
        comm._exchange.timeout = TIMEOUT

        def twice(given: Any) -> Any:
            """The call, which is interrupted, and made again."""
            nonlocal events
            found, events = _interrupt(lambda: steps.call(given), kind, at, rng)
            if not isinstance(found, KeyboardInterrupt | Interrupted):
                return found
            outcomes.append(type(found).__name__)
            return steps.call(given)

        for step in range(1, STEPS + 1):
            interrupted = step == INTERRUPTED and world.rank == 0
            if step == INTERRUPTED and "late" in kind and not interrupted:
                time.sleep(0.02)
            outcomes.append(_outcome(steps, step, twice if interrupted else steps.call))
    finally:
        comm.close()
    return outcomes, events


def was_slow(outcomes: list[list[str]]) -> bool:
    """Whether ranks waited too long for each other before anything was interrupted, though none was gone."""
    first = {found[0] for found in outcomes}
    return "PeerTimeout []" in first and first <= {"right", "PeerTimeout []"}


def judge(outcomes: list[list[str]]) -> str:
    """How a trial ended, by the outcomes of all ranks: "right", "ended", "told", or what must not be, in words."""
    fine = {"right", "KeyboardInterrupt", "Interrupted"}
    if any(outcome.startswith("WRONG") for found in outcomes for outcome in found):
        return str(outcomes)
    if any(found[0] != "right" for found in outcomes):  # an earlier trial has left something
        return str(outcomes)
    if all(set(found) <= fine for found in outcomes):
        return "right"
    own, *others = outcomes
    if any("has ended at this rank" in one for one in own):
        named = all(one in ("right", "PeerTimeout [0]") for found in others for one in found)
        return "ended" if named else str(outcomes)
    return "told"  # errors that say what is wrong, such as that the round is over
