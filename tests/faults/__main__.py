"""The matrix of faults: transports, operations, faults and victims, each cell judged by the rules in `rules.py`.

    python -m tests.faults --repeats 20 --json benchmarks/results/cpu/faults.json

A failure names its cell and repeat; `--only TEXT --first REPEAT --repeats 1` draws the same moments again.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from typing import Any

import torch

from benchmarks.timing import machine, write_json
from tests.faults.ranks import THREADS_TIMEOUT, TIMEOUT
from tests.faults.rules import cells, expected, known_defect, left_out
from tests.faults.worlds import SPARE, Result, run
from thinwire import testing


def main() -> int:
    """Runs all cells, goes on after failures, and gives 1 if there were any but known ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="of every cell")
    parser.add_argument("--first", type=int, default=0, help="the first repeat, from which moments are drawn")
    parser.add_argument("--only", default="", help="the cells with this in their names")
    parser.add_argument("--json", metavar="FILE", help="write what came of them there, after every repeat")
    arguments = parser.parse_args()
    chosen = [cell for cell in cells() if arguments.only in str(cell)]
    if not chosen:
        raise SystemExit(f"no cell has {arguments.only!r} in its name, such as {str(cells()[0])!r}")
    testing.preload("tests.warm")
    results: dict[str, list[Result]] = {str(cell): [] for cell in chosen}
    start, described = time.monotonic(), machine(torch.device("cpu"))
    for repeat in range(arguments.first, arguments.first + arguments.repeats):
        for result in run(chosen, repeat):
            results[str(result.cell)].append(result)
            for problem in [] if known_defect(result.cell) else result.problems:
                print(f"repeat {repeat}, {result.cell}: {problem}", flush=True)
        print(f"{repeat + 1 - arguments.first} repeats, {_failures(results)} failures", file=sys.stderr, flush=True)
        if arguments.json:
            write_json(
                arguments.json,
                command=shlex.join(["python", "-m", "tests.faults", *sys.argv[1:]]),
                machine=described,
                timeout=TIMEOUT,
                threads_timeout=THREADS_TIMEOUT,
                spare=SPARE,
                repeats=repeat + 1 - arguments.first,
                seconds=round(time.monotonic() - start, 1),
                failures=_failures(results),
                left_out=left_out(),
                cells_in_all=len(cells()),
                cells=[_record(results[str(cell)]) for cell in chosen],
            )
    print(f"{len(chosen)} cells, {arguments.repeats} repeats, {_failures(results)} failures")
    return 1 if _failures(results) else 0


def _failures(results: dict[str, list[Result]]) -> int:
    return sum(
        bool(result.problems) for repeats in results.values() for result in repeats if known_defect(result.cell) is None
    )


def _record(results: list[Result]) -> dict[str, Any]:
    cell = results[0].cell
    return {
        "transport": cell.transport,
        "operation": cell.operation,
        "fault": cell.fault,
        "victim": cell.victim,
        "expected": expected(cell).value,
        "runs": len(results),
        "held": sum(not result.problems for result in results),
        "slowest": round(max(result.seconds for result in results), 3),
        "known_defect": known_defect(cell),
        "problems": [problem for result in results for problem in result.problems],
    }


if __name__ == "__main__":
    sys.exit(main())
