"""Times two checkouts of this project against each other: the same calls, in turn, on the same ranks.

    python -m benchmarks.compare BEFORE AFTER --json FILE

BEFORE and AFTER are folders of checkouts. Each has its own ranks: processes that wait while the other's are at work, so
other load on the machine hits both alike. A block is as many calls as take about `--sample-seconds`; its time is that
of the slowest rank. Columns:

    us before, us after   fastest block, for each call
    fastest               before divided by after, of these
    median                before divided by after, within the rounds
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if not __package__:  # run as a file, and as a rank
    sys.path[:0] = [str(Path(__file__).parents[1])] if "--rank" not in sys.argv else []

import torch

if TYPE_CHECKING:  # a rank shall import its own checkout's, and only when it serves
    from thinwire.comm import Communicator

COLUMNS = {"call": "s", "us before": ".1f", "us after": ".1f", "fastest": ".2f", "median": ".2f"}
HIDDEN = 2048
CASES = (
    *(f"all_to_all_v {way} {wire} {rows}" for way in ("direct", "staged") for wire in ("none", "int8")
      for rows in (1, 64, 1024)),
    *(f"{name} {way} int8 {rows}" for name in ("all_reduce", "reduce_scatter", "all_gather")
      for way in ("direct", "staged") for rows in (2, 64, 1024)),
    *(f"round {way} int8 {rows}" for way in ("direct", "staged") for rows in (1, 16, 512)),
)  # fmt: skip


@torch.no_grad()
def serve() -> None:
    """A rank of one checkout: reads `count case` from its input, and answers with seconds."""
    import thinwire as tw

    torch.set_num_threads(1)
    comm = tw.init()
    calls: dict[str, Callable[[], object]] = {}
    print(tw.__file__, flush=True)
    for line in sys.stdin:
        count, case = line.strip().split(" ", 1)
        call = calls.get(case) or calls.setdefault(case, _call(comm, *case.split()))
        start = time.perf_counter()
        for _ in range(int(count)):
            call()
        print(time.perf_counter() - start, flush=True)


def _call(comm: Communicator, name: str, transport: str, wire: str, rows: str) -> Callable[[], object]:
    import thinwire as tw

    x = torch.randn(int(rows), HIDDEN, generator=torch.Generator().manual_seed(comm.rank))
    if name == "all_to_all_v":
        counts, x = [int(rows)] * comm.size, x.repeat(comm.size, 1)
        return lambda: tw.all_to_all_v(x, counts, counts, wire=wire, comm=comm, transport=transport)
    if name != "round":
        operation = getattr(tw, name)
        return lambda: operation(x, wire=wire, comm=comm, transport=transport)
    ep = tw.ExpertParallel(comm, 8, 4, HIDDEN, int(rows), wire=wire, transport=transport)
    ids = torch.arange(4).repeat(int(rows), 1) * 2
    weights = torch.ones(int(rows), 4)

    def exchange() -> None:
        d = ep.dispatch(x, ids, weights)
        ep.combine(d.tokens, d)

    return exchange


class World:
    """The ranks of one checkout."""

    def __init__(self, tree: Path, ranks: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        shared = {
            **os.environ,
            "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(ranks),
        }
        self._ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank"],
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        for answer in self._answers():
            if tree not in Path(answer).resolve().parents:
                self._stop(f"{tree}: its ranks imported {answer}; expected a checkout with src/thinwire")

    def _answers(self) -> list[str]:
        answers = [process.stdout.readline().strip() for process in self._ranks if process.stdout]
        if "" in answers:
            self._stop("a rank ended; what it printed stands above")
        return answers

    def _stop(self, reason: str) -> NoReturn:
        for process in self._ranks:
            process.kill()
        self.close()
        raise SystemExit(reason)

    def seconds(self, case: str, count: int) -> float:
        """Of a block, on the slowest rank."""
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write(f"{count} {case}\n")
            process.stdin.flush()
        return max(map(float, self._answers()))

    def close(self) -> None:
        """Ends the ranks."""
        for process in self._ranks:
            process.communicate()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    from benchmarks import timing

    parser = timing.parser(__doc__, 15)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sample-seconds", type=float, default=0.05, help="how long a block is to take, about")
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="CASE", help="such as 'all_reduce direct int8 64'")
    options = parser.parse_args(arguments)
    with contextlib.ExitStack() as stack:
        worlds = [
            stack.enter_context(contextlib.closing(World(tree.resolve(), options.ranks)))
            for tree in (options.before, options.after)
        ]
        figures = [_compare(worlds, case, options.repeats, options.sample_seconds) for case in options.cases]
    described = timing.machine(torch.device("cpu"))
    timing.finish(options, "compare", described, (figures, COLUMNS), figures, ranks=options.ranks)


def _compare(worlds: Sequence[World], case: str, repeats: int, sample_seconds: float) -> dict[str, Any]:
    for world in worlds:
        world.seconds(case, 3)
    count = max(1, round(sample_seconds / (worlds[0].seconds(case, 5) / 5)))
    times: list[list[float]] = [[], []]
    for number in range(repeats):
        for side in (0, 1) if number % 2 else (1, 0):
            times[side].append(worlds[side].seconds(case, count) / count)
    before, after = (min(samples) for samples in times)
    median = statistics.median(b / a for b, a in zip(*times, strict=True))
    row = {"call": case, "us before": before * 1e6, "us after": after * 1e6}
    return {**row, "fastest": before / after, "median": median, "calls": count}


if __name__ == "__main__":
    serve() if "--rank" in sys.argv else main()
