"""The flight recorder's benchmark runs, and compares calls with and without it within rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

from benchmarks import bench_flight_recorder


@pytest.mark.exhaustive
def test_it_runs_and_says_what_an_entry_and_what_a_call_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "flight_recorder.json"
    bench_flight_recorder.main(["--repeats", "2", "--sample-seconds", "0", "--json", str(file)])
    written = json.loads(file.read_text())
    assert written["entry_ns"]["off"] > 0 < written["entry_ns"]["on"]  # which is more shows on a quiet machine alone
    assert f"an entry: {written['entry_ns']['on']:.0f} ns" in capsys.readouterr().out
    assert written["skipped"] == {} and len(written["figures"]) == 8
    for line in written["figures"]:
        assert set(line) == set(bench_flight_recorder.COLUMNS) and line["us on"] > 0 < line["us off"]


def test_ratios_and_differences_are_within_rounds() -> None:
    samples = {"a off": [1e-6, 2e-6, 9e-6], "a on": [2e-6, 3e-6, 9.9e-6]}
    (line,) = bench_flight_recorder.figures(samples, {"a": 8})
    assert line["ratio"] == 1.5 and round(line["ns"]) == 1000 and line["us off"] == pytest.approx(2)
