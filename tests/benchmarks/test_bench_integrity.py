"""The benchmark of integrity runs, and compares calls with and without it within rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

from benchmarks import bench_integrity


@pytest.mark.exhaustive
def test_it_runs_and_says_what_sums_and_calls_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "integrity.json"
    bench_integrity.main(["--repeats", "1", "--sample-seconds", "0", "--json", str(file)])
    written = json.loads(file.read_text())
    assert min(written["sums_gb_per_second"].values()) > 0
    assert "GB/s cached" in capsys.readouterr().out
    assert [line["transport"] for line in written["figures"]].count("auto") == 14
    for line in written["figures"]:
        assert set(line) == set(bench_integrity.COLUMNS) and line["ms on"] > 0 < line["ms off"]


def test_ratios_are_within_rounds() -> None:
    samples = {"a none": [1e-3, 2e-3, 9e-3], "a checksum": [2e-3, 3e-3, 9.9e-3]}
    (line,) = bench_integrity.figures(samples, {"a": ("staged", 8)})
    assert line["ratio"] == 1.5 and line["ms off"] == 2 and line["call"] == "a"
