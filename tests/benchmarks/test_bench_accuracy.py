"""The benchmark of accuracy runs, and its errors are those of quantising."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import bench_accuracy


def test_errors_are_those_of_quantising(tmp_path: Path) -> None:
    file = tmp_path / "accuracy.json"
    bench_accuracy.main(["--ranks", "2", "--json", str(file)])
    (line,) = json.loads(file.read_text())["figures"]
    assert set(line) == set(bench_accuracy.COLUMNS)
    assert (
        line["16-bit gather"] < 0.0070 < line["int8 both legs"] < 0.0096 < line["beside outliers"] < line["cancelling"]
    )
