"""The benchmark of FSDP2 on a link sends half of what bfloat16 takes, and compares steps of one round."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks import bench_fsdp


@pytest.mark.exhaustive
def test_it_runs_and_counts_what_travels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numba", reason="the CPU kernels need numba")
    few = ["--runs", "1", "--repeats", "2", "--width", "256", "--blocks", "2"]
    bench_fsdp.main([*few, "--json", str(tmp_path / "fsdp.json")])
    if (printed := capsys.readouterr().out).startswith("skipped: "):
        pytest.skip(printed)
    lines = json.loads((tmp_path / "fsdp.json").read_text())["figures"]
    assert [line["sent_as"] for line in lines] == list(bench_fsdp.WIRES) * 2
    by_name = {(line["reduced_in"], line["sent_as"]): line for line in lines}
    for (reduced, name), line in by_name.items():
        elements = line["elements"] // 2  # to the other rank, in each of two gathers and a reduce-scatter
        assert line["elements"] == 4 * (256 * 256 + 256) and line["error"] == 0 or name.startswith("int8")
        scattered = 4 if reduced == "float32" else 2
        exact = elements * {"none": 2 + 2 + scattered, "stock": 2 + 2 + 2 * scattered}.get(name, 3 * (1 + 2 / 128))
        assert exact <= line["bytes_sent"] < 1.15 * exact, (reduced, name)
        for part in ("gather", "scatter"):
            assert 0 < line[part]["fastest"] <= line[part]["seconds"] < line["step"]["slowest"]


def test_ratios_are_those_of_both_collectives_within_rounds() -> None:
    def run(*int8: list[float]) -> dict[str, object]:
        samples = {name: [[4.0, 8.0, 20.0, 100.0], [1.0, 1.0, 9.0, 100.0]] for name in bench_fsdp.WIRES}
        return {"samples": samples | {"int8": [*int8]}, "error": dict.fromkeys(samples, 0.1), "elements": 7}

    runs = [run([2.0, 1.0, 5.0, 50.0], [0.5, 0.5, 1.0, 52.0]), run([3.0, 3.0, 9.0, 50.0], [1.0, 1.0, 2.0, 52.0])]
    line = next(line for line in bench_fsdp.figures("1gbit", "float32", runs) if line["sent_as"] == "int8")
    assert line["ratios_to_stock"] == [3.0, 1.5] and line["ratio_to_stock"] == 2.25
    assert line["bytes_sent"] == 51.0 and line["gather"] == {"seconds": 1.5, "fastest": 0.5, "slowest": 3.0}


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    bench_fsdp.main([])
    assert capsys.readouterr().out == "skipped: network namespaces need root; this is user 1000\n"
