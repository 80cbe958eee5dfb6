"""The benchmark of first runs: in a later one nothing is compiled, and a silence is the time between two lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

from benchmarks import bench_first_run


@pytest.mark.exhaustive
def test_it_runs_the_quick_start_with_and_without_a_cache(tmp_path: Path) -> None:
    file = tmp_path / "first_run.json"
    bench_first_run.main(["--ranks", "1", "--repeats", "1", "--json", str(file)])
    first, alone, later = json.loads(file.read_text())["figures"]
    assert (first["run"], alone["run"], later["run"]) == ("first", "each for itself", "later")
    assert 0 < later["s"] < first["s"] and 0 < later["silence s"] <= later["s"]


def test_the_longest_silence_is_found_and_a_failure_is_told(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import time\nprint(1)\ntime.sleep(1)\nprint(2)\n")
    seconds, silence = bench_first_run.run(script, [tmp_path])
    assert 0.5 < silence < seconds
    script.write_text("raise SystemExit('no reason')\n")
    with pytest.raises(RuntimeError, match="exit codes .1.*\n.*no reason"):
        bench_first_run.run(script, [tmp_path])
