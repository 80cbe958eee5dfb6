"""Checks the models of the protocol exhaustively: `python -m verification.protocol.check [--model NAME]`.

Each `.pml` file here is a model. Its macros choose a size, a broken variant or a goal. A case names these, and what
spin must find: nothing, in the whole state space and with every statement of the model executed; the assertion that a
broken variant must violate; a deadlock; or a goal, a state that a correct model must be able to reach. Without goals,
finding nothing would mean nothing. Any other result is a surprise, and so is an incomplete search.

Prints a table and exits non-zero on any surprise. Needs `spin` and a C compiler; takes about two minutes of one core,
and less than 1 GB.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CASES", "Case", "Result", "missing_tools", "run"]

MODELS = Path(__file__).parent

#: What a case expects, beside the text of an assertion that must be violated.
HOLDS, DEADLOCK, GOAL = "holds", "deadlock", "!(goal_reached)"

_MAX_DEPTH = 100_000  # steps of one execution
_MEMORY_MB = 4000
_LIMIT_S = 1800  # of a search, on a machine that others use as well


@dataclass(frozen=True)
class Case:
    """One search.

    Attributes:
        model: the file's name without `.pml`.
        variant: what is looked at, for people.
        macros: as the file's head explains them.
        expected: HOLDS, DEADLOCK, GOAL, or how the assertion begins that must be violated.
        min_states: how many states a search that finds nothing must have seen, at least.
        reduced: without orders of independent steps that make no difference. Not for models in which time passes when
            nothing else can happen.
    """

    model: str
    variant: str
    macros: str = ""
    expected: str = HOLDS
    min_states: int = 0
    reduced: bool = True


def _holds(model: str, variant: str, macros: str, min_states: int, *, reduced: bool = True) -> Case:
    return Case(model, variant, macros, HOLDS, min_states, reduced)


_ROUND_TRIP = [
    _holds("round_trip", "3 ranks, 3 rounds, any routes, rounds closed", "", 5_000_000),
    _holds("round_trip", "3 ranks, 3 rounds, stores in any order", "ALL_PEERS ANY_ORDER", 100_000),
    _holds("round_trip", "2 ranks, 4 rounds, any routes and order", "RANKS=2 EPOCHS=4 ANY_ORDER", 15_000),
    _holds("round_trip", "2 lanes on a stream, 3 ranks", "LANES=2 ALL_PEERS ALWAYS_SUMS ANY_ORDER", 100_000),
    _holds("round_trip", "2 lanes on a stream, 2 ranks, any routes", "LANES=2 RANKS=2 ANY_ORDER", 50_000),
    _holds(
        "round_trip", "a stream for each of 2 lanes, 2 ranks", "LANES=2 RANKS=2 EPOCHS=2 STREAMS ALL_PEERS", 500_000
    ),
    Case("round_trip", "goal: the end, after rounds of every kind", "GOAL_END", GOAL),
    Case("round_trip", "goal: a combine before a peer has routed", "GOAL_AHEAD", GOAL),
    Case("round_trip", "goal: the end, a stream a lane", "LANES=2 RANKS=2 EPOCHS=2 STREAMS GOAL_END", GOAL),
    Case("round_trip", "signal before the row is complete", "BROKEN_EARLY_SIGNAL", "record_second["),
    Case("round_trip", "no header: slots of older rounds are read", "BROKEN_NO_HEADER", "record_first["),
    Case("round_trip", "dispatch twice without combine", "BROKEN_DISPATCH_TWICE", "header["),
    Case("round_trip", "combine waits only for ranks routed to", "RANKS=2 BROKEN_FEWER_AWAITED", "header["),
    Case("round_trip", "a round closed without waiting", "RANKS=2 BROKEN_CLOSE_WITHOUT_WAIT", "header["),
    Case("round_trip", "sums of a closed round are read", "BROKEN_CLOSED_SUMS", "sum_first["),
    Case("round_trip", "one flag word, shared and cleared", "BROKEN_CLEARED_FLAG", DEADLOCK),
    Case("round_trip", "lanes in different orders on a stream", "LANES=2 RANKS=2 BROKEN_LANES_CROSSED", DEADLOCK),
]

_PUBLISH = [
    _holds("publish", "2 programs of 2 threads, 2 launches", "", 50_000),
    Case("publish", "goal: the end", "GOAL_END", GOAL),
    Case("publish", "goal: the second program is the last", "GOAL_SECOND_LAST", GOAL),
    Case("publish", "no barrier before the release", "BROKEN_NO_BARRIER", "seen["),
    Case("publish", "arrival without order", "BROKEN_RELAXED_ARRIVAL", "part["),
    Case("publish", "the look without acquire", "BROKEN_RELAXED_LOOK", "seen["),
    Case("publish", "the first program sets the epoch", "BROKEN_EARLY_EPOCH", "flag["),
    Case("publish", "the epoch is stored before all have loaded it", "BROKEN_LATE_EPOCH", "flag[1]"),
    Case("publish", "arrivals are not reset", "BROKEN_NO_RESET", DEADLOCK),
]

_PULLING = [
    _holds("pulling", "3 ranks, 3 rounds, closed or not", "EPOCHS=3", 900_000),
    _holds("pulling", "ranks that say different things", "EPOCHS=2 MISMATCHES", 900_000),
    _holds("pulling", "slots for 6 pieces, 2 readers", "LEG", 10_000),
    _holds("pulling", "one sleeps for two", "SLEEP", 60_000),
    Case("pulling", "goal: sums of one, and none of the other", "GOAL_CLOSED_AND_SUMMED", GOAL),
    Case("pulling", "goal: all slots are written again", "LEG GOAL_SLOTS_WRITTEN_AGAIN", GOAL),
    Case("pulling", "goal: sleeps for the last lines", "SLEEP GOAL_SLEPT", GOAL),
    Case("pulling", "a line before the tokens", "BROKEN_EARLY_LINE", "tokens["),
    Case("pulling", "a line before the sums", "BROKEN_EARLY_SUMS_LINE", "(of_left!=1)||(sums["),
    Case("pulling", "no wait for tokens", "BROKEN_NO_DISPATCH_WAIT", "tokens["),
    Case("pulling", "no wait for sums", "BROKEN_NO_COMBINE_WAIT", "(taken_there["),
    Case("pulling", "a ring of one line", "BROKEN_RING_OF_ONE", "(taken_there["),
    Case("pulling", "a slot is written before it was read", "LEG BROKEN_NO_ACKNOWLEDGEMENT", "(taken_there["),
    Case("pulling", "a slot is written before all have read it", "LEG BROKEN_ONE_READER", "slot["),
    Case("pulling", "a line before the slot is there", "LEG BROKEN_EARLY_PIECE_LINE", "slot["),
    Case("pulling", "a slot is taken before it is read", "LEG BROKEN_EARLY_TAKE", "slot["),
    Case("pulling", "looks for sleepers before its line is seen", "SLEEP BROKEN_NO_FENCE", DEADLOCK),
    Case("pulling", "sleeps without a second look", "SLEEP BROKEN_NO_SECOND_LOOK", DEADLOCK),
    Case("pulling", "sleeps without comparing", "SLEEP BROKEN_NO_COMPARE", DEADLOCK),
    Case("pulling", "nobody is woken", "SLEEP BROKEN_NO_WAKE", DEADLOCK),
]

_LEGS = [
    _holds("legs", "3 ranks, 4 epochs, any rows", "", 800_000),
    Case("legs", "goal: the end, with empty and full epochs", "GOAL_END", GOAL),
    Case("legs", "goal: signals before a peer has read the last", "GOAL_AHEAD", GOAL),
    Case("legs", "one half", "BROKEN_ONE_HALF", "half_first["),
    Case("legs", "one header for both halves", "BROKEN_ONE_HEADER", "header_epoch["),
    Case("legs", "a header before rows and words are there", "BROKEN_EARLY_HEADER", "header_epoch["),
    Case("legs", "no headers without rows", "BROKEN_ONLY_ROWS_SIGNAL", "header_epoch["),
    Case("legs", "takes in after the next epoch has begun", "BROKEN_LATE_TAKE", "header_epoch["),
]

_COLLECTIVE = [
    _holds("legs", "3 ranks, 4 calls of any collectives", "COLLECTIVE", 300_000),
    _holds("legs", "2 ranks, 8 calls of any collectives", "COLLECTIVE RANKS=2 EPOCHS=8", 30_000),
    _holds("legs", "one rank calls what it likes, 3 times", "COLLECTIVE ODD_RANK EPOCHS=3", 1_200_000),
    Case("legs", "goal: the end, after collectives of every kind", "COLLECTIVE GOAL_END", GOAL),
    Case("legs", "goal: the end, after ranks disagreed", "COLLECTIVE ODD_RANK GOAL_END", GOAL),
    Case("legs", "goal: signals before a peer has ended the last", "COLLECTIVE GOAL_AHEAD", GOAL),
    Case("legs", "collectives, one half", "COLLECTIVE BROKEN_ONE_HALF", "half_first["),
    Case("legs", "sums in the half of their rows", "COLLECTIVE BROKEN_SAME_HALF", "half_first["),
    Case("legs", "a flag before the sums are there", "COLLECTIVE BROKEN_EARLY_SUMS", "half_first["),
    Case("legs", "who has no part does not wait", "COLLECTIVE BROKEN_EMPTY_PART_DOES_NOT_WAIT", "half_first["),
    Case("legs", "only the left neighbour is compared", "COLLECTIVE ODD_RANK BROKEN_LEFT_ONLY", "differs=="),
    Case("legs", "the first header that differs is enough", "COLLECTIVE ODD_RANK BROKEN_LEAVES_EARLY",
         "half_first["),
]  # fmt: skip

_TWO = "RANKS=2 EPOCHS=2"
_RING = [
    _holds("legs", "ring: 2 ranks, any pieces, in steps", f"RING_STEPS {_TWO}", 130_000),
    _holds("legs", "ring: 3 ranks, all pieces or no rows", "RING_STEPS ALL_OR_NONE EPOCHS=1", 1_000_000),
    _holds("legs", "ring: 3 ranks, 2 epochs", "RING_STEPS ALL EPOCHS=2", 30_000),
    _holds("legs", "ring: 3 ranks, 2 epochs, of one slot", "RING_STEPS ALL EPOCHS=2 SLOTS=1", 20_000),
    Case("legs", "ring: goal: the end, after a wrap", f"RING_STEPS {_TWO} GOAL_END", GOAL),
    Case("legs", "ring: goal: a sender waits for a slot", f"RING_STEPS {_TWO} GOAL_FULL", GOAL),
    Case("legs", "ring: heads are not looked at", f"RING_STEPS {_TWO} BROKEN_NO_HEADS", "slot_first["),
    Case("legs", "ring: a head before the slot was read", f"RING_STEPS {_TWO} BROKEN_EARLY_HEAD", "slot_first["),
    Case("legs", "ring: a tail before the piece is there", f"RING_STEPS {_TWO} BROKEN_EARLY_TAIL", "slot_first["),
    Case("legs", "ring: numbers begin again", f"RING_STEPS {_TWO} BROKEN_NUMBERS_RESTART", "slot_first["),
    Case("legs", "ring: a slot by a number that wraps", f"RING_STEPS {_TWO} SLOTS=3 PIECES=4", "slot_first["),
    Case("legs", "ring: waits for an equal tail", f"RING_STEPS {_TWO} BROKEN_EQUALITY", DEADLOCK),
    Case("legs", "ring: a tail that is cleared", f"RING_STEPS {_TWO} BROKEN_CLEARED_FLAG", DEADLOCK),
    Case("legs", "ring: takes what it expects, not what comes", f"RING_STEPS {_TWO} BROKEN_TAKES_EXPECTED",
         "slot_first["),
    Case("legs", "ring: all is sent before any is taken", "RING_STEPS ALL EPOCHS=1 BROKEN_SEND_ALL_FIRST",
         DEADLOCK),
    Case("legs", "ring: one peer after the other", "RING_STEPS ALL EPOCHS=1 BROKEN_PEER_BY_PEER", DEADLOCK),
]  # fmt: skip

_EXACT, _NO_INNOCENTS = "blamed==dead", "(blamed& ~(dead))==0"
_BLAME = [
    Case("blame", "3 ranks, 2 rounds: exactly the dead", "", HOLDS, 10_000, reduced=False),
    Case("blame", "4 ranks: exactly the dead", "RANKS=4 EPOCHS=1", HOLDS, 50_000, reduced=False),
    Case("blame", "deadlines too short: no innocents", "NO_INNOCENTS ANY_DEADLINE", HOLDS, 500_000, reduced=False),
    Case("blame", "2 of 4 die: no innocents", "RANKS=4 DEATHS=2 EPOCHS=1 NO_INNOCENTS", HOLDS, 200_000, reduced=False),
    Case("blame", "in pieces: no innocents", "CHAIN NO_INNOCENTS", HOLDS, 10_000, reduced=False),
    Case("blame", "goal: death between two signals", "GOAL_BETWEEN_SIGNALS", GOAL, reduced=False),
    Case("blame", "goal: one finishes, another gives up", "GOAL_FINISH_AND_BLAME", GOAL, reduced=False),
    Case("blame", "no grace step", "BROKEN_NO_GRACE", _EXACT, reduced=False),
    Case("blame", "no grace step: innocents", "BROKEN_NO_GRACE NO_INNOCENTS", _NO_INNOCENTS, reduced=False),
    Case("blame", "a waiter does not look at stuck lines", "BROKEN_DEAF NO_INNOCENTS", _NO_INNOCENTS, reduced=False),
    Case("blame", "limit: grace too short", "ANY_GRACE NO_INNOCENTS", _NO_INNOCENTS, reduced=False),
    Case("blame", "limit: deadlines too short, not all are named", "ANY_DEADLINE", _EXACT, reduced=False),
    Case("blame", "limit: 2 of 4 die, not all are named", "RANKS=4 DEATHS=2 EPOCHS=1", _EXACT, reduced=False),
    Case("blame", "limit: in pieces, not all are named", "CHAIN", _EXACT, reduced=False),
]

_ON_TIME = "blamed==(1<<"
_TIMING = [
    Case("timing", "2 * LAG < TIMEOUT + GRACE", "LAG=2 TIMEOUT=4 GRACE=1", HOLDS, 500_000, reduced=False),
    Case("timing", "2 lanes", "LANES=2 RANKS=3 LAG=2 TIMEOUT=4 GRACE=1", HOLDS, 100_000, reduced=False),
    Case("timing", "LAG < TIMEOUT, if deadlines were kept", "LAG=2 TIMEOUT=3 PATIENT", HOLDS, 500_000, reduced=False),
    Case("timing", "goal: all survivors give up", "GOAL_BLAME", GOAL, reduced=False),
    Case("timing", "reports of other lanes are not looked at", "LANES=2 RANKS=3 BROKEN_STUCK_PER_LANE", _ON_TIME,
         reduced=False),
    Case("timing", "limit: 2 * LAG > TIMEOUT + GRACE", "LAG=3 TIMEOUT=4 GRACE=1", _ON_TIME, reduced=False),
]  # fmt: skip

_REBUILD = [
    _holds("rebuild", "a new process, while the old one may write", "", 100_000),
    _holds("rebuild", "the old process comes along", "REJOINS", 20_000),
    Case("rebuild", "goal: the old process writes late", "GOAL_WRITES_LATE", GOAL),
    Case("rebuild", "into the old memory", "BROKEN_SAME_MEMORY", "record_first["),
]

_VERDICT = [
    _holds("verdict", "3 ranks, links come back: all hold one verdict", "HEALS", 10_000_000),
    _holds("verdict", "3 ranks, any links cut", "NO_CHANGES", 2_000_000),
    _holds("verdict", "3 ranks, a link is cut at any time", "UP", 6_000_000),
    _holds("verdict", "the same, a majority as the quorum", "UP MAJORITY", 6_000_000),
    Case("verdict", "goal: two go on without the third", "UP GOAL_WORLD", GOAL),
    Case("verdict", "a rank makes a verdict by itself", "NO_CHANGES BROKEN_ALONE", "((world[a]>>a)&1)&&"),
    Case("verdict", "the first verdict holds, not the stronger", "HEALS BROKEN_FIRST", "held[a]==held[b]"),
    Case("verdict", "only boards of the lost are looked at", "HEALS BROKEN_ONLY_LOST", "held[a]==held[b]"),
    Case(
        "verdict", "members go on unconfirmed", "NO_CHANGES BROKEN_UNCONFIRMED", "!(((world[a]>>b)&1))||(world[b]!=0)"
    ),
]

CASES = [
    *_ROUND_TRIP, *_PULLING, *_PUBLISH, *_LEGS, *_COLLECTIVE, *_RING, *_BLAME, *_TIMING,
    *_REBUILD, *_VERDICT,
]  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What a search found.

    Attributes:
        found: HOLDS, DEADLOCK, the violated assertion, or why the search says nothing.
        states: that were stored.
        seconds: of processor time, the compiler's included.
        memory_mb: that the search took.
        surprise: whether it is anything but what the case expects.
    """

    found: str
    states: int
    seconds: float
    memory_mb: float
    surprise: bool


def missing_tools() -> list[str]:
    """What this needs and the machine lacks."""
    tools = ["spin"] if shutil.which("spin") is None else []
    return tools if _compiler() else [*tools, "a C compiler"]


def _compiler() -> str | None:
    wanted = os.environ.get("CC")
    return next((path for name in (wanted, "gcc", "cc", "clang") if name and (path := shutil.which(name))), None)


def run(case: Case) -> Result:
    """Builds one case's verifier in a temporary folder and runs it to its end.

    Raises:
        RuntimeError: a tool is missing, or the model does not compile.
    """
    missing, compiler = missing_tools(), _compiler()
    if missing or compiler is None:
        raise RuntimeError(f"checking the models needs {' and '.join(missing)}")
    macros = [f"-D{macro}" for macro in case.macros.split()]
    options = ["-DSAFETY", "-DCOLLAPSE", "-DNOFAIR", f"-DMEMLIM={_MEMORY_MB}"]
    if not case.reduced:
        options.append("-DNOREDUCE")
    # A large search is worth a second of the compiler's, and a very large one two.
    options.append("-O0" if case.min_states < 300_000 else "-O1" if case.min_states < 4_000_000 else "-O2")
    before = _child_seconds()
    with tempfile.TemporaryDirectory(prefix="thinwire-model-") as folder:
        _build(["spin", *macros, "-a", str(MODELS / f"{case.model}.pml")], folder)
        _build([compiler, "-w", *options, "-o", "pan", "pan.c"], folder)
        search = ["./pan", f"-m{_MAX_DEPTH}", "-w24"]
        try:
            done = subprocess.run(search, cwd=folder, capture_output=True, text=True, timeout=_LIMIT_S)
            output = done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            output = f"pan: no end within {_LIMIT_S} s"
    return judge(case, output, _child_seconds() - before)


def _child_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _build(command: Sequence[str], folder: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0 or "Error:" in done.stdout:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def judge(case: Case, output: str, seconds: float = 0.0) -> Result:
    """Reads what a verifier printed."""
    numbers = {
        name: float(match.group(1)) if (match := re.search(pattern, output, re.MULTILINE)) else -1.0
        for name, pattern in (
            ("errors", r"errors: (\d+)$"),
            ("states", r"^ *([\d.e+]+) states, stored"),
            ("memory", r"^ *([\d.]+)\s+total actual memory"),
        )
    }
    found = _finding(output, numbers["errors"])
    states = int(numbers["states"])
    if found == HOLDS and states < case.min_states:
        found = f"only {states} states; at least {case.min_states} are there"
    expected = found == case.expected if case.expected in (HOLDS, DEADLOCK) else found.startswith(case.expected)
    return Result(found, states, seconds, numbers["memory"], not expected)


def _finding(output: str, errors: float) -> str:
    for failure in ("max search depth too small", "reached -DMEMLIM bound", "out of memory", "no end within"):
        if failure in output:
            return f"search not completed: {failure}"
    if errors < 0:
        return f"no verdict: {output.strip()[-200:]!r}"
    if violated := re.search(r"^pan:\d+: assertion violated +(.*?) \(at depth \d+\)$", output, re.MULTILINE):
        text = violated.group(1).strip()
        # pan puts most conditions into brackets of its own.
        return (text[1:-1] if text.startswith("(") and text.endswith(")") else text).strip()
    if re.search(r"^pan:\d+: invalid end state", output, re.MULTILINE):
        return DEADLOCK
    if errors > 0 or "Search not completed" in output:
        return "an error of another kind"
    unreached = [line.strip() for line in output.splitlines() if re.search(r"\([1-9]\d* of \d+ states\)", line)]
    if unreached or " states)" not in output:
        return f"statements that were never executed: {unreached}"
    return HOLDS


def main() -> int:
    parser = argparse.ArgumentParser(description="check the models of the protocol with spin, broken variants included")
    models = sorted({case.model for case in CASES})
    parser.add_argument("--model", choices=models, help="only this one (default: all)")
    model = parser.parse_args().model
    if missing := missing_tools():
        print(f"checking the models needs {' and '.join(missing)}", file=sys.stderr)
        return 2
    print(f"{'model':11}{'variant':49}{'expected':24}{'states':>9}{'MB':>6}{'seconds':>9}  result")
    results = []
    for case in CASES:
        if model in (None, case.model):
            result = run(case)
            results.append(result)
            print(
                f"{case.model:11}{case.variant:49}{_in_words(case.expected):24}{result.states:>9}{result.memory_mb:>6.0f}"
                f"{result.seconds:>9.1f}  " + (f"SURPRISE: {result.found}" if result.surprise else "as expected"),
                flush=True,
            )
    surprises = sum(result.surprise for result in results)
    seconds = sum(result.seconds for result in results)
    print(f"{len(results) - surprises} as expected, {surprises} surprises, {seconds:.0f} s of processor time")
    return 1 if surprises else 0


def _in_words(expected: str) -> str:
    if expected in (HOLDS, DEADLOCK):
        return expected
    return "reached" if expected == GOAL else f"violates {expected[:13]}"


if __name__ == "__main__":
    sys.exit(main())
