"""Measures how long the quick start's program takes: in its first run on a machine, which compiles, and in later ones.

    python -m benchmarks.bench_first_run --json benchmarks/results/cpu/first_run.json

Ranks are started as torchrun starts them. A first run has an empty cache of kernels. In turn with it runs one in which
each rank has an empty cache of its own, so that each compiles all kernels, as without the turns that ranks take.

    ranks         of the program
    run           first: an empty cache for all ranks; each for itself: one for each; later: the cache of the first
    s             from the start of the ranks to the end of the last; the median
    silence s     the longest time without a line on standard output or standard error
"""

from __future__ import annotations

import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from benchmarks import timing

COLUMNS = {"ranks": "d", "run": "", "s": ".1f", "silence s": ".1f"}
FIRST, ALONE, LATER = "first", "each for itself", "later"
_QUICK_START = re.compile(r"<!-- quick start example -->\n```python\n(.*?)```", re.DOTALL)


def program() -> str:
    """The quick start's first program."""
    found = _QUICK_START.search((Path(__file__).parents[1] / "docs" / "quick-start.md").read_text())
    assert found is not None
    return found[1]


def run(script: Path, caches: list[Path]) -> tuple[float, float]:
    """Runs a rank for each cache; returns seconds, and the longest of them in which no rank wrote a line.

    Raises:
        RuntimeError: a rank failed; with what it wrote.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    began = time.monotonic()
    written, texts = [began], []

    def read(rank: subprocess.Popen[str]) -> None:
        assert rank.stdout is not None
        for line in rank.stdout:
            written.append(time.monotonic())
            texts.append(line)

    ranks = []
    for number, cache in enumerate(caches):
        variables = {
            "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(len(caches)), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "NUMBA_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        command = [sys.executable, str(script)]
        ranks.append(
            subprocess.Popen(
                command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    readers = [threading.Thread(target=read, args=(rank,)) for rank in ranks]
    for reader in readers:
        reader.start()
    codes = [rank.wait() for rank in ranks]
    ended = time.monotonic()
    for reader in readers:
        reader.join()
    if any(codes):
        raise RuntimeError(f"ranks ended with exit codes {codes}, and wrote:\n{''.join(texts)}")
    moments = [*sorted(written), ended]
    return ended - began, max(after - before for before, after in zip(moments, moments[1:], strict=False))


def measure(sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    """A row for each number of ranks and kind of run."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "program.py"
        script.write_text(program())
        for size in sizes:
            taken: dict[str, list[tuple[float, float]]] = {FIRST: [], ALONE: [], LATER: []}
            for repeat in range(repeats):
                caches = [Path(folder) / f"{size}-{repeat}-{rank}" for rank in range(size + 1)]
                taken[ALONE].append(run(script, caches[:size]))
                taken[FIRST].append(run(script, caches[size:] * size))
                taken[LATER].append(run(script, caches[size:] * size))
            for name, samples in taken.items():
                seconds, silences = zip(*samples, strict=True)
                row = {"ranks": size, "run": name, "s": statistics.median(seconds), "silence s": max(silences)}
                rows.append(row | {"all seconds": seconds})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = timing.parser(__doc__, repeats=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args(arguments)
    described = timing.machine(timing.check_device("cpu"))
    timing.print_machine(described)
    rows = measure(options.ranks, options.repeats)
    timing.finish(options, "first_run", described, (rows, COLUMNS), rows, repeats=options.repeats)


if __name__ == "__main__":
    main()
