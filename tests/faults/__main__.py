"""The matrix of faults: transports, operations, faults and victims, each cell judged by the rules in `rules.py`.

    python -m tests.faults --repeats 20 --add --json benchmarks/results/cpu/faults.json

A run counts only if the machine let it run: what is promised is promised within times. With `--add` what FILE holds is
kept, and the repeats go on at its next; a cell whose rule is another one now begins
anew. A failure names its cell and repeat; `--only TEXT --first REPEAT --repeats 1` draws the same moments again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tests.faults.ranks import THREADS_TIMEOUT, TIMEOUT
from tests.faults.rules import Cell, cells, expected, known_defect, left_out
from tests.faults.worlds import MOST_LATE, SPARE, Result, run
from tests.runs import Runs
from thinwire import testing

#: What a record says of its cell, and what of the rule that its runs were judged by.
_PLACE, _RULE = ("transport", "operation", "fault", "victim"), ("expected", "known_defect")


def main() -> int:
    """Runs all cells, goes on after failures, and gives 1 if there were any but known ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="of every cell")
    parser.add_argument("--first", type=int, help="the first repeat, from which moments are drawn; default: the next")
    parser.add_argument("--only", default="", help="the cells with this in their names")
    parser.add_argument("--parallel", type=int, default=4, help="worlds at a time; the default keeps two cores busy")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what came of them there, after every repeat")
    parser.add_argument("--add", action="store_true", help="to what is there")
    arguments = parser.parse_args()
    chosen = [cell for cell in cells() if arguments.only in str(cell)]
    if not chosen:
        raise SystemExit(f"no cell has {arguments.only!r} in its name, such as {str(cells()[0])!r}")
    settings = {"timeout": TIMEOUT, "threads_timeout": THREADS_TIMEOUT, "spare": SPARE, "most_late": MOST_LATE}
    runs = Runs("tests.faults", arguments.json, arguments.add, **settings)
    records = _records(chosen, runs)
    first = arguments.first
    if first is None:
        first = max((run["first"] + run["repeats"] for run in runs.stored.get("runs", ())), default=0)
    runs.own["first"], failures = first, 0
    testing.preload("tests.warm")
    for repeat in range(first, first + arguments.repeats):
        for result in run(chosen, repeat, arguments.parallel):
            record = records[str(result.cell)]
            _count(record, result, repeat)
            if result.problems and record["known_defect"] is None:
                late = f" (not counted, late by {result.late:.2f} s)" if result.late > MOST_LATE else ""
                failures += not late
                print(
                    "\n".join(f"repeat {repeat}, {result.cell}{late}: {each}" for each in result.problems), flush=True
                )
        done = repeat + 1 - first
        print(f"{done} repeats, {failures} failures", file=sys.stderr, flush=True)
        runs.write(
            {"repeats": done},
            failures=sum(
                record["runs"] - record["held"] for record in records.values() if record["known_defect"] is None
            ),
            left_out=left_out(),
            cells_in_all=len(cells()),
            cells=[*records.values()],
        )
    print(f"{len(chosen)} cells, {arguments.repeats} repeats, {failures} failures")
    return 1 if failures else 0


def _records(chosen: list[Cell], runs: Runs) -> dict[str, dict[str, Any]]:
    """What is written of each cell, with what the file holds of it.

    Raises:
        SystemExit: it holds other cells.
    """
    records = {str(cell): _record(cell) for cell in chosen}
    if not runs.stored:
        return records
    stored = {tuple(found[name] for name in _PLACE): found for found in runs.stored["cells"]}
    if stored.keys() != {tuple(record[name] for name in _PLACE) for record in records.values()}:
        raise SystemExit(f"{runs.path} holds {len(stored)} cells, which are not the {len(chosen)} of this run")
    for record in records.values():
        found = stored[tuple(record[name] for name in _PLACE)]
        if all(found[name] == record[name] for name in _RULE):
            record |= found
    return records


def _record(cell: Cell) -> dict[str, Any]:
    """Of a cell that was not run."""
    return {
        "transport": cell.transport,
        "operation": cell.operation,
        "fault": cell.fault,
        "victim": cell.victim,
        "expected": expected(cell).value,
        "runs": 0,
        "held": 0,
        "slowest": 0.0,
        "late": 0,
        "late_held": 0,
        "known_defect": known_defect(cell),
        "problems": [],
    }


def _count(record: dict[str, Any], result: Result, repeat: int) -> None:
    if result.late > MOST_LATE:
        record["late"] += 1
        record["late_held"] += not result.problems
        return
    record["runs"] += 1
    record["held"] += not result.problems
    record["slowest"] = max(record["slowest"], round(result.seconds, 3))
    record["problems"] += [f"repeat {repeat}: {problem}" for problem in result.problems]


if __name__ == "__main__":
    sys.exit(main())
