"""The dispatch benchmark runs, counts the bytes that travel, and compares within rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_dispatch
from thinwire.wire import WireFormat

HIDDEN = 96


@pytest.mark.exhaustive
def test_it_runs_and_counts_what_travels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "dispatch.json"
    sizes = ["--tokens", "1", "5", "--hidden", str(HIDDEN), "--experts", "8", "--top-k", "8"]
    bench_dispatch.main([*sizes, "--repeats", "2", "--sample-seconds", "0", "--json", str(file)])
    written = json.loads(file.read_text())
    printed = capsys.readouterr().out.splitlines()
    named = [f"{transport} {wire}" for transport, wire in bench_dispatch.ROUNDS]
    measured = [name for name in named if name not in written["skipped"]]
    assert "staged none" in measured and "staged int8" in measured
    assert all(any(line.startswith(f"{name} skipped: ") for line in printed) for name in written["skipped"])
    assert [(line["tokens"], line["round"]) for line in written["figures"]] == [
        (tokens, name) for tokens in (1, 5) for name in measured
    ]
    for line in written["figures"]:
        # Every token names all experts, so each rank gets every token for each of its four.
        assert line["expert_rows"] == 2 * 4 * line["tokens"]
        assert line["copied_bytes"] // (4 * HIDDEN) == (line["tokens"] + line["expert_rows"]) // 2
        quantised = line["round"].endswith("int8")
        assert 0.001 < line["error"] < 0.012 if quantised else line["error"] == 0
        row_bytes = WireFormat.parse("int8").row_bytes(HIDDEN) if quantised else 2 * HIDDEN
        for leg in (line["dispatch"], line["combine"]):
            assert leg["rows"] == line["tokens"] and leg["logical_bytes"] == line["tokens"] * 2 * HIDDEN
            assert leg["wire_bytes"] >= line["tokens"] * row_bytes
            assert 0 < leg["fastest"] <= leg["seconds"] <= leg["slowest"] and leg["share"] > 0


def test_sizes_that_do_not_fit_into_memory_are_skipped_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_dispatch, "_free_memory", lambda device: 1 << 20)
    bench_dispatch.main(["--tokens", "1024", "--hidden", "4096"])
    assert "1024 tokens of 4096 skipped: needs 0.5 GiB of memory" in capsys.readouterr().out


def test_shares_are_within_rounds() -> None:
    samples = {"copy": [1.0, 2.0, 9.0], "staged int8 dispatch": [4.0, 8.0, 3.0], "staged int8 combine": [2.0, 4.0, 1.0]}
    rank = {"samples": samples, "rows": 6, "copied_bytes": 10, "traffic": {"staged int8": [(1, 2, 3), (4, 5, 6)]}}
    line = bench_dispatch.figures(3, 8, [{**rank, "error": {"staged int8": error}} for error in (0.1, 0.3)])[0]
    assert (line["dispatch"]["share"], line["combine"]["share"]) == (0.25, 0.5)
    assert (line["ranks"], line["error"], line["combine"]["wire_bytes"]) == (2, 0.3, 6)
