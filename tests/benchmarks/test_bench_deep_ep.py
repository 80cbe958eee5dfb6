"""The benchmark of DeepEP's API runs, and compares pairs within rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

from benchmarks import bench_deep_ep


@pytest.mark.exhaustive
def test_it_runs_and_says_what_a_pair_costs(tmp_path: Path) -> None:
    file = tmp_path / "deep_ep.json"
    bench_deep_ep.main(["--repeats", "2", "--wires", "int8", "--tokens", "8,16", "--json", str(file)])
    lines = json.loads(file.read_text())["figures"]
    assert [line["tokens"] for line in lines] == [8, 16]
    for line in lines:
        assert set(line) == set(bench_deep_ep.COLUMNS) and min(line["ms pair"], line["ms deep_ep"], line["ms plan"]) > 0


def test_ratios_are_within_rounds() -> None:
    samples = {"int8 8 pair": [1e-3, 2e-3, 9e-3], "int8 8 deep_ep": [2e-3, 3e-3, 9.9e-3], "int8 8 plan": [1e-3] * 3}
    (line,) = bench_deep_ep.figures(samples, {"int8 8 pair": 3.0, "int8 8 deep_ep": 4.0})
    assert line["ratio"] == 1.5 and line["ms deep_ep"] == 3 and line["ratio plan"] == 0.5 and line["MiB deep_ep"] == 4
