"""The benchmark of waits runs, and tells a wait's time from a processor's."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

from benchmarks import bench_wait


@pytest.mark.exhaustive
def test_it_runs_and_says_what_a_wait_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "wait.json"
    bench_wait.main(["--repeats", "3", "--json", str(file)])
    written = json.loads(file.read_text())
    assert [line["late ms"] for line in written["figures"]] == [late * 1e3 for late in bench_wait.LATE] * 2
    assert "share of a core after 1 ms: " in capsys.readouterr().out


def test_a_call_is_behind_by_what_it_takes_longer_after_the_late_rank_came_than_when_both_come_at_once() -> None:
    waiting = [
        {"call": "a", "late": 0.0, "samples": [(0.0, 0.25, 0.125)]},
        {"call": "a", "late": 1.0, "samples": [(4.0, 5.501, 0.251)]},
    ]
    late = [{"samples": [(0.125, 0.0, 0.0)]}, {"samples": [(5.0, 9.0, 9.0)]}]
    first, second = bench_wait.figures([waiting, late])
    assert first["behind us"] == 0 and first["cpu ms"] == 125
    assert second["behind us"] == pytest.approx(376_000) and second["after 1 ms"] == pytest.approx(0.25 / 1.5)
    assert math.isnan(bench_wait.figures([[{**waiting[0], "samples": [(0.0, 0.001, 0.0)]}], late[:1]])[0]["after 1 ms"])
