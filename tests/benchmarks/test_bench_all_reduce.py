"""The all-reduce benchmark runs, sends what it says, and compares within rounds; so does that of accuracy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_accuracy, bench_all_reduce

ELEMENTS = 3000


@pytest.mark.exhaustive
def test_it_runs_and_what_comes_out_is_the_sum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "all_reduce.json"
    sizes = ["--ranks", "2", "3", "--num-bytes", str(2 * ELEMENTS)]
    bench_all_reduce.main([*sizes, "--repeats", "2", "--sample-seconds", "0", "--json", str(file)])
    written = json.loads(file.read_text())
    printed = capsys.readouterr().out.splitlines()
    named = [
        f"{transport} {', '.join(wires)}" for transport in ("direct", "staged") for wires in bench_all_reduce.WIRES
    ]
    measured = [name for name in named if name not in written["skipped"]]
    assert "staged int8, int8" in measured
    assert all(any(line.startswith(f"{name} skipped: ") for line in printed) for name in written["skipped"])
    for size, rows in ((2, (2, 1)), (3, (1, 1, 1))):  # of 1024 elements
        lines = {line["way"]: line for line in written["figures"] if line["ranks"] == size}
        assert list(lines) == ["gloo bf16", "gloo fp32", *measured]
        for way, line in lines.items():
            assert 0 < line["fastest"] <= line["seconds"] <= line["slowest"] and line["goal"] is None
            low, high = (
                (0.008, 0.012) if way.endswith("int8, int8") else (0.004, 0.008) if "int8" in way else (0, 0.003)
            )
            assert low <= line["error"] <= high, (way, line["error"])
        assert lines["gloo bf16"]["ratio_to_bf16"] == lines["gloo fp32"]["ratio_to_fp32"] == 1
        assert lines["gloo fp32"]["wire_bytes"] == int(2 * (size - 1) / size * ELEMENTS * 4)
        sent = sum(rows[1:]) * 1056 + (size - 1) * rows[0] * 2048
        assert lines["staged int8, none"]["wire_bytes"] == sent


def test_ratios_are_within_rounds_and_goals_are_for_long_messages() -> None:
    samples = {"gloo bf16": [1.0, 2.0, 9.0], "gloo fp32": [2.0, 4.0, 9.0], "staged int8, int8": [4.0, 8.0, 3.0]}
    errors = dict.fromkeys(samples, 0.1)
    rank = {"samples": samples, "error": errors, "wire_bytes": dict.fromkeys(samples, 1), "num_bytes": 32 << 20}
    worse = rank | {"error": dict.fromkeys(samples, 0.3)}
    line = bench_all_reduce.figures("1gbit", [rank, worse])[2]
    assert (line["ratio_to_bf16"], line["ratio_to_fp32"], line["seconds"], line["error"]) == (0.25, 0.5, 4.0, 0.3)
    assert line["goal"] == 1.8
    assert bench_all_reduce.figures("1gbit", [rank | {"num_bytes": 1}])[2]["goal"] is None
    assert bench_all_reduce.figures("cpu", [rank])[2]["goal"] is None


def test_errors_are_those_of_quantising(tmp_path: Path) -> None:
    file = tmp_path / "accuracy.json"
    bench_accuracy.main(["--ranks", "2", "--json", str(file)])
    (line,) = json.loads(file.read_text())["figures"]
    assert set(line) == set(bench_accuracy.COLUMNS)
    assert (
        line["16-bit gather"] < 0.0070 < line["int8 both legs"] < 0.0096 < line["beside outliers"] < line["cancelling"]
    )
