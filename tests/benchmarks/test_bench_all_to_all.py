"""The all-to-all benchmark runs, sends what it says, and compares within rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_all_to_all
from thinwire.wire import WireFormat

HIDDEN = 96


@pytest.mark.exhaustive
def test_it_runs_from_one_row_on_and_what_arrives_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "all_to_all.json"
    sizes = ["--ranks", "2", "3", "--rows", "1", "7", "--hidden", str(HIDDEN)]
    bench_all_to_all.main([*sizes, "--repeats", "2", "--sample-seconds", "0", "--json", str(file)])
    written = json.loads(file.read_text())
    printed = capsys.readouterr().out.splitlines()
    named = [f"{transport} {wire}" for transport, wire in bench_all_to_all.TRANSFERS]
    measured = [name for name in named if name not in written["skipped"]]
    assert "staged none" in measured and "staged int8" in measured
    assert all(any(line.startswith(f"{name} skipped: ") for line in printed) for name in written["skipped"])
    for size in (2, 3):
        for rows in (1, 7):
            lines = [line for line in written["figures"] if (line["ranks"], line["rows"]) == (size, rows)]
            assert [line["transfer"] for line in lines] == ["gloo bf16", "gloo fp32", *measured]
            leaving = rows - bench_all_to_all.deal(rows, size, 0)[0]
            row_bytes = {"int8": WireFormat.parse("int8").row_bytes(HIDDEN), "fp32": 4 * HIDDEN}
            for line in lines:
                assert line["logical_bytes"] == leaving * 2 * HIDDEN
                assert line["wire_bytes"] == leaving * row_bytes.get(line["transfer"].split()[1], 2 * HIDDEN)
                assert 0 < line["fastest"] <= line["seconds"] <= line["slowest"]
                quantised = line["transfer"].endswith("int8")
                assert 0.001 < line["error"] < 0.012 if quantised else line["error"] == 0
            assert lines[0]["ratio"] == 1


def test_every_row_is_dealt_to_somebody_and_a_single_one_changes_ranks() -> None:
    for size in (2, 3, 4):
        for rank in range(size):
            assert bench_all_to_all.deal(1, size, rank)[rank] == 0
            for rows in (0, 1, 5, 8):
                counts = bench_all_to_all.deal(rows, size, rank)
                assert sum(counts) == rows and max(counts) - min(counts) <= 1


def test_ratios_are_within_rounds_and_the_error_is_the_worst_ranks() -> None:
    samples = {"gloo bf16": [1.0, 2.0, 9.0], "direct none": [4.0, 8.0, 3.0]}
    traffic = {"logical_bytes": 10, "wire_bytes": {"gloo bf16": 10, "direct none": 10}, "rows": 4096}
    ranks = [{**traffic, "samples": samples, "error": {"direct none": error}} for error in (0.1, 0.3)]
    line = bench_all_to_all.figures(2, 4096, "cpu", ranks)[1]
    assert (line["ratio"], line["seconds"], line["error"], line["goal"]) == (0.25, 4.0, 0.3, 2.0)
    assert bench_all_to_all.figures(4, 4096, "cpu", ranks)[1]["goal"] is None
