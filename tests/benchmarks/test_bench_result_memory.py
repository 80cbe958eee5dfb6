"""The benchmark of results' memory runs, and its shares are within rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

from benchmarks import bench_result_memory


@pytest.mark.exhaustive
def test_it_runs_and_says_what_each_memory_costs(tmp_path: Path) -> None:
    file = tmp_path / "result_memory.json"
    bench_result_memory.main(["--tokens", "512", "--hidden", "2048", "--repeats", "3", "--json", str(file)])
    lines = json.loads(file.read_text())["figures"]
    assert len(lines) == 12
    for line in lines:
        assert set(line) == set(bench_result_memory.COLUMNS) and line["ms"] > 0 < line["share"]
    faults = {(line["transport"], line["call"], line["memory"]): line["faults"] for line in lines}
    dispatch = bench_result_memory.CALLS[0]
    assert faults["direct", dispatch, "kept"] < faults["direct", dispatch, "new"]


def test_shares_are_within_rounds() -> None:
    parts = [
        f"{transport} {memory} {call}"
        for transport in bench_result_memory.TRANSPORTS
        for memory in bench_result_memory.MEMORIES
        for call in bench_result_memory.CALLS
    ]
    samples = {part: [2e-3, 4e-3, 9e-3] for part in parts}
    samples |= {f"copy {call}": [1e-3, 3e-3, 9e-3] for call in bench_result_memory.CALLS}
    found = {
        "samples": samples,
        "faults": dict.fromkeys(parts, 5),
        "bytes": dict.fromkeys(bench_result_memory.CALLS, 1 << 20),
    }
    lines = bench_result_memory.figures(found, 3)
    assert {(line["share"], line["ms"], line["faults"], line["MiB"]) for line in lines} == {(0.75, 4.0, 5, 1.0)}
    assert {line["memory"] for line in bench_result_memory.figures(found, 3, ["kept", "new"])} == {"kept", "new"}


def test_a_memory_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_result_memory.main(["--memory", "kept", "old"])
    assert "invalid choice: 'old' (choose from 'kept', 'new', 'torch')" in capsys.readouterr().err
