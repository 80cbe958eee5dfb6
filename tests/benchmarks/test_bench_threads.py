"""The benchmark of threads runs, and compares what was timed in the same round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

from benchmarks import bench_threads


@pytest.mark.exhaustive
def test_it_runs_and_times_each_way(tmp_path: Path) -> None:
    file = tmp_path / "threads.json"
    ways = ["own", "straight"]  # the third takes long where cores are few
    few = ["--repeats", "2", "--sample-seconds", "0", "--mebibytes", "1", "8"]
    bench_threads.main([*few, "--ways", *ways, "--json", str(file)])
    lines = json.loads(file.read_text())["figures"]
    expected = [(way, wire, size) for way in ways for wire in bench_threads.WAYS[way][1:] for size in (1, 8)]
    assert [(line["way"], line["wire"], line["MiB"]) for line in lines] == expected
    assert all({*line} == {*bench_threads.COLUMNS} and line["ms"] > 0 and line["x"] > 0 for line in lines)


def test_threads_are_compared_with_one_thread_of_the_same_round() -> None:
    times = {"1": [2.0, 4.0, 8.0], "4": [1.0, 2.0, 2.0], "2": [1.0, 2.0, 4.0], "copy": [0.5, 1.0, 2.0]}
    two, four = bench_threads.figures("own", "int8", 64, times)
    assert (two["threads"], two["x"], two["quartiles"], two["copy"]) == (2, 2.0, "2.00-2.00", 0.5)
    assert (four["threads"], four["x"], four["ms"]) == (4, 2.0, 4000.0)
