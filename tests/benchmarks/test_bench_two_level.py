"""The benchmark of two levels counts what crosses the link, and compares rounds of the same ranks."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_two_level
from benchmarks.bench_two_level import GLOO, ONE_LEVEL, ONE_LEVEL_BF16, OPERATIONS, ROUND, TWO_LEVELS, WAYS


@pytest.mark.exhaustive
def test_it_runs_and_what_crosses_is_what_was_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numba", reason="the CPU kernels need numba")
    few = "--rate 1gbit --ranks-per-host 2 --runs 1 --repeats 2 --host-tokens 600 --hidden 1024 --experts 10".split()
    few += "--top-k 2 --mebibytes 1".split()
    bench_two_level.main([*few, "--json", str(tmp_path / "two_level.json")])
    if (printed := capsys.readouterr().out).startswith("skipped: "):
        pytest.skip(printed)
    found = json.loads((tmp_path / "two_level.json").read_text())
    lines = found["figures"]
    ways = [(operation, way) for operation in OPERATIONS for way in WAYS[operation]]
    assert [(line["operation"], line["way"]) for line in lines] == ways
    for line in lines:
        assert 0 < line["fastest"] <= line["seconds"] <= line["slowest"] and line["error"] < 0.04
        assert line["payload_bytes"] < line["interface_bytes"] < 1.25 * line["payload_bytes"]  # small packets
        if line["way"] != GLOO:
            # Counts, and the messages of barriers.
            assert 1 <= line["payload_bytes"] / line["predicted_bytes"] < 1.03
        if line["operation"] == ROUND:
            # Another rank may be the slowest in each part.
            assert sum(line[part] for part in bench_two_level.PARTS) > 0.9 * line["seconds"]
    assert "2x2 at 1gbit, to one level int8: " in printed
    page = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "write_slow_links.py"))
    rows = [line.split(" | ")[1:3] for line in page["gains"](found).splitlines()[2:]]
    assert rows == [["2 x 2", name] for name in ("round", "round (fp8, none)", "all_reduce", "all_gather")]


def test_ratios_are_within_runs_and_headers_are_taken_off() -> None:
    def rank(two_levels: float, packets: int) -> dict[str, Any]:
        samples = {ONE_LEVEL: [4.0, 8.0], ONE_LEVEL_BF16: [8.0, 16.0], TWO_LEVELS: [two_levels, 2 * two_levels]}
        samples |= {f"{way}: {part}": [1.0, 3.0] for way in samples for part in bench_two_level.PARTS}
        samples |= {f"{way}: legs": [4.0 if way == TWO_LEVELS else 2.0] * 2 for way in list(samples)[:3]}
        ways = (ONE_LEVEL, ONE_LEVEL_BF16, TWO_LEVELS)
        meter = {"bytes": 1000, "packets": packets, "rank": 1.0, "machine": 3.0, "seconds": 2.0}
        one = {"samples": samples, "meters": dict.fromkeys(ways, meter), "error": dict.fromkeys(ways, 0.1 * packets)}
        return {ROUND: one | {"predicted": dict.fromkeys(ways, [800, 820])}}

    runs = [[rank(seconds, packets) for packets in (1, 9, 3, 9)] for seconds in (2.0, 1.0, 4.0)]
    line = bench_two_level.figures("1gbit", 2, runs, cores=2)[-1]
    assert line["ratios_to_int8"] == [2.0, 4.0, 1.0] and line["ratios_to_bf16"] == [4.0, 8.0, 2.0]
    assert line["legs_ratios_to_int8"] == [0.5] * 3
    assert line["payload_bytes"] == 1000 - 2 * 66 and line["predicted_bytes"] == 810  # the mean of both hosts
    assert line["cores"] == 1.0 and line["machine"] == 0.75 and line["dispatch"] == 2.0  # 4 ranks of 1 s in 2 s
    assert line["error"] == pytest.approx(0.9)


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    bench_two_level.main([])
    assert capsys.readouterr().out == "skipped: network namespaces need root; this is user 1000\n"
