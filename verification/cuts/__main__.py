"""Cuts links between three ranks for about a timeout, and judges who goes on; or kills and cuts off ranks of two hosts.

    python -m verification.cuts --repeats 10 --json benchmarks/results/cpu/cuts.json
    python -m verification.cuts --two-hosts --repeats 10

Needs root on Linux, as each rank or host has a network namespace. `judge` in `worlds.py` and in `two_hosts.py` has the
rules. Prints a line of JSON for each rank, and at the end the outcome of each cell. `--only TEXT --first REPEAT
--repeats 1` draws the same moment again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tests.helpers.runs import Runs
from thinwire import testing
from verification.cuts import two_hosts, worlds
from verification.cuts.network import left_behind, remove
from verification.cuts.worlds import LIMIT, RIGHT, TIMEOUT, TRIES, Result


def main() -> int:
    """Runs all cells, goes on after failures, and gives 1 if there were any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="runs of every cell")
    parser.add_argument("--first", type=int, default=0, help="the first repeat, from which moments are drawn")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="to begin new runs for")
    parser.add_argument("--only", default="", help="the cells with this in their names")
    parser.add_argument("--parallel", type=int, default=6, help="worlds at a time, which mostly wait")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what came of them there, after every repeat")
    parser.add_argument("--two-hosts", action="store_true", help="the cells of `two_hosts.py`")
    arguments = parser.parse_args()
    kind = two_hosts if arguments.two_hosts else worlds
    chosen = [cell for cell in kind.cells() if arguments.only in str(cell)]
    if not chosen:
        raise SystemExit(f"no cell has {arguments.only!r} in its name, such as {str(kind.cells()[0])!r}")
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        raise SystemExit("network namespaces need root on Linux")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it, too, ends with everything removed
    remove(left_behind())
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it would warn that these addresses have no names
    testing.preload("tests.helpers.warm", "verification.cuts.two_hosts")
    testing._prepare_server(testing._preloaded, dict(os.environ))
    runs = Runs("verification.cuts", arguments.json, adds=False, timeout=TIMEOUT, limit=LIMIT, tries=TRIES)
    results: dict[Any, list[Result]] = {cell: [] for cell in chosen}
    end, numbers = time.monotonic() + arguments.seconds, itertools.count()
    for repeat in range(arguments.first, arguments.first + arguments.repeats):
        for result in _run_all(kind.run, chosen, repeat, numbers, arguments.parallel, end):
            results[result.cell].append(result)
            print("\n".join(map(json.dumps, _lines(result))), flush=True)
        records = [_record(cell, found) for cell, found in results.items()]
        ran, wrong = (sum(record[key] for record in records) for key in ("runs", "wrong"))
        runs.write({"runs": ran}, wrong=wrong, cells=records)
    for record in records:
        print(_row(record))
    print(f"{len(chosen)} cells, {ran} runs, {wrong} wrong")
    return 1 if wrong else 0


def _run_all(
    run: Callable[..., Result], chosen: list[Any], repeat: int, numbers: Iterator[int], at_a_time: int, end: float
) -> Iterator[Result]:
    """Runs each cell once, and gives results as they come; begins none after `end`."""
    stopping = threading.Event()

    def one(cell: Any, number: int) -> Result | None:
        return run(cell, repeat, number, stopping) if time.monotonic() < end else None

    with ThreadPoolExecutor(at_a_time) as pool:
        try:
            for future in as_completed([pool.submit(one, cell, next(numbers)) for cell in chosen]):
                if (result := future.result()) is not None:
                    yield result
        finally:  # after Ctrl-C, or an error, the worlds under way are taken apart at once
            stopping.set()
            pool.shutdown(cancel_futures=True)


def _lines(result: Result) -> list[dict[str, Any]]:
    """What became of each rank."""
    run = {"cell": str(result.cell), "repeat": result.repeat}
    return [{**run, "rank": rank, **report._asdict()} for rank, report in enumerate(result.reports)]


def _record(cell: Any, results: list[Result]) -> dict[str, Any]:
    """What came of a cell."""
    wrong = [result for result in results if result.verdict not in RIGHT]
    return {
        "cell": str(cell),
        "runs": len(results),
        "wrong": len(wrong),
        "verdicts": dict(Counter(result.verdict for result in results).most_common()),
        "names_differ": sum(result.names_differ for result in results),
        "failures": [{"verdict": result.verdict, "ranks": _lines(result)} for result in wrong],
    }


def _row(record: dict[str, Any]) -> str:
    """The same in words.

    >>> _row({"cell": "rank 0, both, 1.1", "verdicts": {"two go on": 3, "several worlds": 1}, "names_differ": 1})
    '  rank 0, both, 1.1: 3 two go on, 1 WRONG: several worlds; error.ranks differ in 1'
    """
    counts = [f"{count} {'' if what in RIGHT else 'WRONG: '}{what}" for what, count in record["verdicts"].items()]
    differ = f"; error.ranks differ in {record['names_differ']}" if record["names_differ"] else ""
    return f"{record['cell']:>19}: {', '.join(counts)}{differ}"


if __name__ == "__main__":
    sys.exit(main())
