"""The comparison of two checkouts runs, here of this one with itself, and refuses what is no checkout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="the CPU kernels need numba")

from benchmarks import compare

HERE = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_each_case_is_timed_on_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, cases = tmp_path / "compare.json", ["all_reduce direct int8 2", "round staged int8 1"]
    compare.main(
        [str(HERE), str(HERE), "--repeats", "2", "--sample-seconds", "0", "--json", str(file), "--cases", *cases]
    )
    written = json.loads(file.read_text())
    assert [line["call"] for line in written["figures"]] == cases and cases[0] in capsys.readouterr().out
    for line in written["figures"]:
        assert line["fastest"] == pytest.approx(line["us before"] / line["us after"]) and line["median"] > 0


@pytest.mark.exhaustive
def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected a checkout with src/thinwire"):
        compare.main([str(tmp_path), str(HERE)])
