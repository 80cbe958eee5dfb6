"""The benchmark of small calls runs, and sets goals for what it times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

from benchmarks import bench_small


@pytest.mark.exhaustive
def test_it_runs_and_times_each_call_among_others_and_alone(tmp_path: Path) -> None:
    file = tmp_path / "small.json"
    arguments = ["--repeats", "2", "--sample-seconds", "0", "--ranks", "2", "--mode", "thread", "--json", str(file)]
    bench_small.main(arguments)
    lines = json.loads(file.read_text())["figures"]
    assert {*bench_small.GOALS} == {line["call"] for line in lines if line["goal"] is not None}
    for line in lines:
        assert {*line} == {*bench_small.COLUMNS, "goal"} and 0 < line["quartile"] <= line["us"] and line["alone"] > 0


def test_a_time_is_compared_with_the_copy_of_the_same_round() -> None:
    among = {"copy of a row": [1e-6, 2e-6, 8e-6], "round, 16 tokens": [3e-6, 6e-6, 24e-6]}
    copy, of_tokens = bench_small.figures(2, "process", {"among": among, "alone": among})
    assert copy["copies"] == 1 and copy["goal"] is None and copy["alone"] == pytest.approx(2)
    assert of_tokens["copies"] == pytest.approx(3) and of_tokens["goal"] == 250
