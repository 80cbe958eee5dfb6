"""`thinwire bench` runs between two hosts, where there can be a link."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_on_link


@pytest.mark.exhaustive
def test_a_file_for_each_rate_says_what_the_link_carries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["all_gather", "-b", "64K", "-e", "64K", "-n", "2", "--rate", "500mbit", "--wire", "int8"]
    assert bench_on_link.main([*few, "--json", str(tmp_path / "link.json")]) == 0
    if "skipped: " in (printed := capsys.readouterr().out) and "wrong" not in printed:
        pytest.skip(printed)
    written = json.loads((tmp_path / "link_500mbit.json").read_text())
    assert written["link_bandwidth"] == 62.5e6 and written["hosts"] == written["ranks"] == 2
    (line,) = [line for line in written["figures"] if line["implementation"] == "thinwire"]
    assert line["transport"] == "staged" and line["wrong"] == 0
