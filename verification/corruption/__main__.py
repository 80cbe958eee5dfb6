"""Corrupts memory of the direct transport on the CPU at random, and judges what calls do with it.

    python -m verification.corruption --rounds 300000 --seed 1 --processes 2 --json FILE

A call may return, but must not read or write elsewhere, hang, or raise anything but an error of thinwire's
(`words.py`). The calls run in separate processes, since they may end them. Case i has the seed S + i. If FILE exists,
the run continues where the last one ended, until there are N cases in all. A failure is printed as the command that
repeats it.

    --seconds N         ends after N seconds; a later run continues
    --kernels triton    hostile words for Triton's kernels, under its interpreter: a thousand times slower
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import select
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tests.helpers.runs import Runs

#: Seconds after which a case has not ended in time; many times what it is given, as the machine may be busy.
MOST_SECONDS = 20.0
SILENCE = 90.0  # of a worker, that is then taken to hang
_BATCH = 1000  # cases, after which the file is written
#: How an outcome begins that must not be.
_FAILURES = ("late", "unexpected", "crashed", "hung", "out_of_bounds")


# ---------------------------------------------------------------------------------------------------------------------
# The process in which cases run


def work(kernels: str) -> None:
    """Answers every seed that is asked for with a line of JSON: which case it was, and what came of it.

    A first line says that it is ready.
    """
    from verification.corruption import words

    faulthandler.enable()
    torch.set_num_threads(1)
    words.warm_up(kernels == "triton")
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(_timed(words.run_case, int(line), kernels == "triton")), flush=True)


def _timed(run: Callable[[random.Random, bool], tuple[str, str]], seed: int, triton: bool) -> tuple[str, str]:
    start, case = time.monotonic(), ""
    try:
        case, outcome = run(random.Random(seed), triton)
    except Exception as error:
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        place = "" if where is None else f" at {where.tb_frame.f_code.co_filename}:{where.tb_lineno}"
        outcome = f"unexpected: {type(error).__name__}: {error}{place}"
    if time.monotonic() - start > MOST_SECONDS:
        outcome = f"late: {time.monotonic() - start:.1f} s"
    return case, outcome


# ---------------------------------------------------------------------------------------------------------------------
# The process that watches


class Worker:
    """A process that runs cases; when one ends it, or hangs, the next case has another."""

    def __init__(self, kernels: str) -> None:
        self._command = [sys.executable, "-m", "verification.corruption", "--worker", "--kernels", kernels]
        self._environ = dict(os.environ)
        if kernels == "triton":
            self._environ |= {"TRITON_INTERPRET": "1", "THINWIRE_BACKEND": "triton"}
        self.start()

    def start(self) -> None:
        """Starts the process, and waits until it is ready."""
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self._environ, bufsize=0
        )
        if not self._answer(3 * SILENCE):
            raise SystemExit(f"a worker ended with {self._process.wait()} outside of any case")

    def run(self, seed: int) -> tuple[str, str]:
        """Which case it was, and what came of it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # of a process that has ended, which the missing answer tells
            self._process.stdin.write(f"{seed}\n".encode())
        line = self._answer(SILENCE)
        if line:
            case, outcome = json.loads(line)
            return case, outcome
        hung = line is None
        self.close()
        status = self._process.returncode
        segmentation = status in (-7, -11)  # SIGBUS, SIGSEGV
        self.start()
        return "", f"{'hung' if hung else 'out_of_bounds' if segmentation else 'crashed'}: exit status {status}"

    def _answer(self, seconds: float) -> bytes | None:
        """A line; none at all where the process has ended, and None where it says nothing."""
        assert self._process.stdout is not None
        if select.select([self._process.stdout], [], [], seconds)[0]:
            return self._process.stdout.readline()
        self._process.kill()
        return None

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Report:
    """What came of the cases so far, those of earlier runs in the same file too."""

    def __init__(self, seed: int, kernels: str, path: Path | None) -> None:
        self.runs = Runs("verification.corruption", path, True, seed=seed, kernels=kernels)
        stored = self.runs.stored
        self.before = self.done = stored.get("rounds", 0)
        self.outcomes, self.failures = Counter[str](stored.get("outcomes", {})), list(stored.get("failures", ()))
        self.cases = {case: Counter[str](counts) for case, counts in stored.get("cases", {}).items()}
        self._again = "" if kernels == "numba" else f" --kernels {kernels}"

    def add(self, seed: int, case: str, outcome: str) -> None:
        """One case."""
        kind = outcome.partition(":")[0]
        self.done += 1
        self.outcomes[kind] += 1
        self.cases.setdefault(case or "unknown", Counter())[kind] += 1
        if kind in _FAILURES:
            command = f"python -m verification.corruption --rounds 1 --seed {seed}{self._again}"
            self.failures.append({"reproduce": command, "outcome": f"{case} {outcome}".strip()})
            print(f"{command}  # {case} {outcome}", flush=True)

    def content(self) -> dict[str, Any]:
        """As JSON."""
        content: dict[str, Any] = {
            "rounds": self.done,
            "raised_named_errors": sum(count for kind, count in self.outcomes.items() if kind[0].isupper()),
            "returned": self.outcomes["returned"],
            "in_time": self.done - self.outcomes["late"] - self.outcomes["hung"],
        }
        content |= {kind: self.outcomes[kind] for kind in _FAILURES}
        content |= {"outcomes": dict(sorted(self.outcomes.items()))}
        content |= {"cases": {case: dict(sorted(counts.items())) for case, counts in sorted(self.cases.items())}}
        return content | {"failures": self.failures}

    def write(self) -> None:
        """To its file, if it has one."""
        self.runs.write({"rounds": self.done - self.before}, **self.content())


def watch(report: Report, workers: list[Worker], seeds: Iterator[int], end: float) -> None:
    """Has workers run the cases of these seeds, each the next one, and waits for all that they have begun."""

    reporting = threading.Lock()

    def body(worker: Worker) -> None:
        while time.monotonic() < end and (seed := next(seeds, None)) is not None:
            outcome = worker.run(seed)
            with reporting:
                report.add(seed, *outcome)

    with ThreadPoolExecutor(len(workers)) as pool:
        for future in [pool.submit(body, worker) for worker in workers]:
            future.result()
    report.write()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1, help="of the first case")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--processes", type=int, default=1, help="that run cases at the same time")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kernels", choices=("numba", "triton"), default="numba")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.kernels)
        return 0
    report = Report(arguments.seed, arguments.kernels, arguments.json)
    end = time.monotonic() + arguments.seconds
    workers = [Worker(arguments.kernels) for _ in range(arguments.processes)]
    try:
        while report.done < arguments.rounds and time.monotonic() < end:
            first = arguments.seed + report.done
            watch(report, workers, iter(range(first, min(first + _BATCH, arguments.seed + arguments.rounds))), end)
    finally:
        for worker in workers:
            worker.close()
    print(json.dumps(report.content(), indent=1))
    return 1 if report.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
