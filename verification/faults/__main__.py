"""The matrix of faults: transports, operations, faults and victims, each cell judged by the rules in `rules.py`.

    python -m verification.faults --repeats 20 --add --json benchmarks/results/cpu/faults.json

A run counts only if the machine let the ranks run in time, as the rules have time limits. With `--add` the runs in FILE
are kept, and cells with fewer runs continue; a cell whose rule has changed begins anew. A failure names its cell and
repeat; `--only TEXT --first REPEAT --repeats 1` draws the same moments again.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from tests.helpers.runs import Runs
from thinwire import testing
from verification.faults.ranks import THREADS_TIMEOUT, TIMEOUT
from verification.faults.rules import Cell, cells, expected, known_defect, left_out
from verification.faults.worlds import MOST_LATE, SPARE, Result, run

#: What a record says of its cell, and what of the rule that its runs were judged by.
_PLACE, _RULE = ("transport", "operation", "fault", "victim"), ("expected", "known_defect")


def main() -> int:
    """Runs all cells, goes on after failures, and gives 1 if there were any but known ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="runs that count, of every cell and in all")
    parser.add_argument("--first", type=int, default=0, help="the first repeat, from which moments are drawn")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="to begin new ones for")
    parser.add_argument("--only", default="", help="the cells with this in their names")
    parser.add_argument("--parallel", type=int, default=4, help="worlds at a time; the default keeps two cores busy")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what came of them there, after every repeat")
    parser.add_argument("--add", action="store_true", help="to what is there")
    arguments = parser.parse_args()
    chosen = [cell for cell in cells() if arguments.only in str(cell)]
    if not chosen:
        raise SystemExit(f"no cell has {arguments.only!r} in its name, such as {str(cells()[0])!r}")
    settings = {"timeout": TIMEOUT, "threads_timeout": THREADS_TIMEOUT, "spare": SPARE, "most_late": MOST_LATE}
    runs = Runs("verification.faults", arguments.json, arguments.add, **settings)
    records = _records(chosen, runs)
    testing.preload("tests.helpers.warm")
    failures, ran, end = 0, 0, time.monotonic() + arguments.seconds
    while time.monotonic() < end and (repeat := _next_repeat(records, arguments.repeats)) is not None:
        due = [cell for cell in chosen if _is_due(records[str(cell)], arguments.repeats, repeat)]
        for result in run(due, arguments.first + repeat, arguments.parallel, end):
            record = records[str(result.cell)]
            _count(record, result, arguments.first + repeat)
            ran += 1
            if result.problems and record["known_defect"] is None:
                late = f" (not counted, late by {result.late:.2f} s)" if result.late > MOST_LATE else ""
                failures += not late
                where = f"repeat {arguments.first + repeat}, {result.cell}{late}"
                print("\n".join(f"{where}: {problem}" for problem in result.problems), flush=True)
        print(f"repeat {repeat}: {ran} runs, {failures} failures", file=sys.stderr, flush=True)
        runs.write(
            {"runs": ran},
            failures=sum(
                record["runs"] - record["held"] for record in records.values() if record["known_defect"] is None
            ),
            left_out=left_out(),
            cells_in_all=len(cells()),
            cells=[*records.values()],
        )
    print(f"{len(chosen)} cells, {ran} runs, {failures} failures")
    return 1 if failures else 0


def _is_due(record: dict[str, Any], repeats: int, repeat: int) -> bool:
    """Whether a cell lacks runs, and this repeat is its next. Of a machine that is always busy no more is expected."""
    tries = record["runs"] + record["late"]
    return record["runs"] < repeats and tries == repeat < 3 * repeats


def _next_repeat(records: dict[str, dict[str, Any]], repeats: int) -> int | None:
    """The first that is due for a cell."""
    tries = {record["runs"] + record["late"] for record in records.values()}
    return next((n for n in sorted(tries) if any(_is_due(each, repeats, n) for each in records.values())), None)


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
