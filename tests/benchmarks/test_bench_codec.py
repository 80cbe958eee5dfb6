"""The codec benchmark runs and writes its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_codec


def test_it_runs_and_writes_a_figure_for_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_codec, "_CALLS_PER_SAMPLE_BYTES", 1)
    file = tmp_path / "codec.json"
    cases = ["--rows", "2", "3", "--hidden", "200", "--repeats", "2", "--wires", "int8", "int4", "--dtypes", "bfloat16"]
    bench_codec.main([*cases, "--json", str(file)])
    figures = json.loads(file.read_text())["figures"]
    assert [(figure["rows"], figure["wire"]) for figure in figures] == [
        (rows, wire) for rows in (2, 3) for wire in ("int8", "int4")
    ]
    assert all(figure["quantise"] > 0 and figure["quantise share"] > 0 for figure in figures)
