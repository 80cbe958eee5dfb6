"""Files that runs of a proof add up in: what is added to what, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import proofs, runs
from tests.helpers.runs import Runs


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that a run of commit "a" has left behind."""
    monkeypatch.setattr(runs, "commit", lambda: "a")
    monkeypatch.setattr("sys.argv", ["it", "--json", "FILE"])
    Runs("tests.it", tmp_path / "it.json", True, seed=1).write({"rounds": 3}, right=2)
    return tmp_path / "it.json"


def test_runs_add_up_and_those_of_one_commit_and_command_become_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for commit, rounds in (("a", 4), ("b", 5), ("a", 6)):
        monkeypatch.setattr(runs, "commit", lambda commit=commit: commit)
        run = Runs("tests.it", path, True, seed=1)
        assert run.stored["right"] == 2
        for done in (1, rounds):  # a run may write as often as it likes
            run.write({"rounds": done}, right=2)
    written = json.loads(path.read_text())
    assert [(run["commit"], run["rounds"]) for run in written["runs"]] == [("a", 7), ("b", 5), ("a", 6)]
    assert written["seed"] == 1 and written["command"] == "python -m tests.it --json FILE"


def test_a_run_that_does_not_add_begins_anew(path: Path) -> None:
    run = Runs("tests.it", path, False, seed=2)
    assert run.stored == {}
    run.write({"rounds": 9})
    assert [run["rounds"] for run in json.loads(path.read_text())["runs"]] == [9]


def test_runs_of_other_settings_or_of_unknown_commits_are_refused(path: Path) -> None:
    with pytest.raises(SystemExit, match=r"holds runs of \{'seed': 1\}, and this one is of \{'seed': 2\}"):
        Runs("tests.it", path, True, seed=2)
    path.write_text(json.dumps({"seed": 1, "right": 2}))
    with pytest.raises(SystemExit, match="does not say of which runs"):
        Runs("tests.it", path, True, seed=1)


def test_the_documentation_says_what_was_run() -> None:
    text = proofs.PAGE.read_text()
    assert proofs.between(text, proofs.BEGIN, proofs.END, proofs.section()) == text, (
        "run python -m tests.helpers.proofs"
    )
