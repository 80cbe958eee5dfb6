"""The benchmark of experts runs and writes its figures."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import bench_experts


def test_it_runs_and_writes_a_figure_for_every_case(tmp_path: Path) -> None:
    file = tmp_path / "experts.json"
    bench_experts.main(["--size", "3", "7", "8", "64", "--repeats", "2", "--json", str(file)])
    figures = json.loads(file.read_text())["figures"]
    assert [figure["dtype"] for figure in figures] == ["float32", "bfloat16"]
    assert all(figure["grouped both"] > 0 and figure["forward ratio"] > 0 for figure in figures)
