"""Mutants of a small file: what is changed and what is not; and of a small checkout: which are caught, by what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.files import marked
from verification.mutants.__main__ import Trees, draw
from verification.mutants.changes import changes_of

SOURCE = '''\
def least(values: list[int] = [], far: bool = False) -> int:
    """Gives the least of 1."""
    log(f"of {len(values) + 1}")
    if not far:
        raise ValueError(f"{values} has {1 + 1}")
    self.found[0] = (
        values and  # both
        far
    )
    close()
    return -values[2]
'''


def test_each_change_is_of_one_place_and_texts_stay() -> None:
    found, lines = changes_of("it.py", SOURCE), SOURCE.splitlines()
    told = [f"{change.line} {' '.join(change.before.split())} > {change.after}" for change in found]
    assert told == [
        "1 False > (True)", "4 not far > (True)", "4 not far > (False)", "4 not far > (far)",
        '5 raise ValueError(f"{values} has {1 + 1}") > pass',
        "6 self.found[0] = ( values and # both far ) > pass\n\n\n", "6 0 > (1)", "6 0 > (-1)",
        "7 values and # both far > (values or far\n)", "10 close() > return", "10 close() > pass",
        "11 return -values[2] > return None", "11 -values[2] > (values[2])", "11 2 > (3)", "11 2 > (1)",
    ]  # fmt: skip
    for change in found:
        changed, last = (change.apply(SOURCE) or "").splitlines(), change.line + change.before.count("\n")
        assert changed[: change.line - 1] == lines[: change.line - 1] and changed[last:] == lines[last:] != changed


def test_a_seed_draws_the_same_and_a_room_as_often_as_it_has_lines() -> None:
    sources = {"small/it.py": "a = 1\n" * 10, "large/it.py": "a = 1\n" * 90}
    drawn = [str(change) for change, _ in draw(sources, seed=1)]
    assert len({*drawn}) == len(drawn) == 200 and drawn == [str(change) for change, _ in draw(sources, seed=1)]
    assert 0 < sum(change.startswith("small") for change in drawn[:100]) < 30


@pytest.fixture
def trees(tmp_path: Path) -> Iterator[Trees]:
    (tmp_path / "it.py").write_text("A = 1\n")
    tests = ("one", "it.A < 3"), ("two", "it.A < 2"), ("none", "not 1")
    tests = (f"def test_{name}():\n    assert {condition}\n" for name, condition in tests)
    (tmp_path / "test_it.py").write_text("import it\n" + "".join(tests))
    made = Trees(tmp_path, limit=240.0)
    yield made
    made.close()
    assert not made.folder.exists()


@pytest.mark.parametrize(
    "text,verdict", [("A = 0\n", ("survived", "")), ("A = 2\n", ("caught", "test_it.py::test_two"))]
)
def test_what_fails_without_the_change_catches_nothing(trees: Trees, text: str, verdict: tuple[str, str]) -> None:
    trees.change("it.py", text)
    assert trees.judge(["test_it.py"], []) == verdict
    assert (trees.original / "it.py").read_text() == "A = 1\n"


def test_what_hangs_is_ended_with_all_that_it_started(trees: Trees) -> None:
    trees.change("it.py", "import subprocess\nsubprocess.run(['sleep', '999'], start_new_session=True)\n")
    trees.limit = 5.0
    assert trees.run(trees.mutant, ["test_it.py"], []) == "no end in time"
    assert not marked(trees.mark)
