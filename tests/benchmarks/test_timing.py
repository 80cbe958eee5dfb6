"""What scripts write says where it comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import timing


def test_what_is_written_says_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/some/where/bench_it.py", "--json", "a file"])
    timing.write_json(tmp_path / "new" / "figures.json", machine=timing.machine(torch.device("cpu")), figures=[1])
    written = json.loads((tmp_path / "new" / "figures.json").read_text())
    assert written["command"] == "python -m benchmarks.bench_it --json 'a file'"
    assert written["figures"] == [1] and written["machine"]["torch"] == torch.__version__


def test_a_run_goes_on_from_a_file_of_its_own_kind_and_commit_alone(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert timing.read_json(file) == timing.read_json(None) == {}
    timing.write_json(file, seed=1, done=7)
    assert timing.read_json(file, seed=1)["done"] == 7
    assert timing.read_json(file, seed=2) == {}
    changed = json.loads(file.read_text()) | {"commit": "0123456789ab"}
    file.write_text(json.dumps(changed))
    assert timing.read_json(file, seed=1) == {}
