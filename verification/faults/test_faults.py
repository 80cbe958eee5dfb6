"""The matrix of faults: its rules in `make test`, each cell in `make test-all`, 20 times in `make soak`."""

from __future__ import annotations

import json
import os
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba", reason="the direct transport of CPU ranks needs numba")
if not hasattr(os, "pidfd_open"):
    pytest.skip("needs Linux's signals and /proc", allow_module_level=True)

from tests.helpers.files import open_files
from thinwire import testing
from verification.faults import __main__ as faults
from verification.faults import worlds
from verification.faults.ranks import Called, Report
from verification.faults.rules import (
    ALL_REDUCE,
    BARRIER,
    DIRECT,
    FAULTS,
    OPERATIONS,
    RAISES,
    STAGED,
    TRANSPORTS,
    VICTIMS,
    Cell,
    cells,
    expected,
    known_defect,
    left_out,
)
from verification.faults.table import PAGE, RUN, page


def check(chosen: list[Cell]) -> None:
    assert chosen
    testing._prepare_server(testing._preloaded, dict(os.environ))  # of the ranks; it stays
    before = len(open_files())
    results = list(worlds.run(chosen, repeat=0))
    assert [result.cell for result in results] == [cell for world in worlds.worlds(chosen) for cell in world]
    if again := [result for result in results if result.problems]:
        # Each cell has its moments, and other tests run beside this one: what is wrong shows more than once.
        warnings.warn("\n".join(f"{result.cell}: {result.problems}" for result in again), stacklevel=2)
        results = list(worlds.run([result.cell for result in again], repeat=0))
    problems = [f"{result.cell}: {problem}" for result in results for problem in result.problems]
    assert not problems, "\n".join(problems)
    assert not worlds.ranks_left()
    assert len(open_files()) <= before, open_files()


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.replace(" ", "-"))
def test_every_cell_holds(fault: str) -> None:
    check([cell for cell in cells() if cell.fault == fault and known_defect(cell) is None])


def test_every_cell_is_there_or_left_out_for_a_reason() -> None:
    there = cells()
    assert len(there) + sum(left_out().values()) == len(TRANSPORTS) * len(OPERATIONS) * len(FAULTS) * len(VICTIMS)
    assert {cell.operation for cell in there if cell.transport == DIRECT} == {*OPERATIONS} - {BARRIER}
    assert {cell.fault for cell in there if cell.transport == STAGED} == {*FAULTS}


LOST = Called(1.1, "PeerTimeout", (2,), "")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, None),
        ({"calls": [Called(0.1), LOST]}, "expected the others name it"),
        ({"calls": [replace(LOST, ranks=(1,))]}, "name different ones"),
        ({"calls": [replace(LOST, ranks=())]}, r"ranks \(2,\) named"),
        ({"calls": [replace(LOST, error="CountsError")]}, "it got"),
        ({"calls": [replace(LOST, seconds=9.0)]}, "9.00 s"),
        ({"size_after": 1}, "went on among 1 ranks, expected 2"),
    ],
)
def test_what_is_against_the_rules_is_a_problem(change: dict[str, object], told: str | None) -> None:
    cell = Cell(DIRECT, ALL_REDUCE, RAISES, 2)
    assert expected(cell).loses
    right = Report(calls=[LOST], size_after=2)
    result = worlds.Result(cell)
    worlds._judge(result, {0: right, 1: replace(right, **change)}, worlds.TIMEOUT)  # type: ignore[arg-type]
    assert bool(result.problems) == (told is not None), result.problems
    if told is not None:
        with pytest.raises(AssertionError, match=told):
            raise AssertionError("\n".join(result.problems))


def test_repeats_add_up_in_a_file_and_cells_of_another_rule_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, played, cell = tmp_path / "faults.json", list[int](), str(cells()[-1])

    def run(chosen: list[Cell], repeat: int, at_a_time: int, end: float) -> list[worlds.Result]:
        played.append(repeat)
        wrong, late = ["it is wrong"] if repeat in (2, 3) else [], 9.0 if repeat == 3 else 0.0
        return [worlds.Result(each, wrong, 0.5 + repeat, late) for each in chosen]

    def add(repeats: int, only: str = cell) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr("sys.argv", ["f", "--only", only, "--repeats", str(repeats), "--add", "--json", str(path)])
        status = faults.main()
        (record,) = json.loads(path.read_text())["cells"]
        return status, record

    monkeypatch.setattr(faults, "run", run)
    assert add(2)[0] == 0
    status, record = add(4)
    assert played == [0, 1, 2, 3, 4] and status == 1
    assert (record["runs"], record["held"], record["slowest"]) == (4, 3, 4.5)
    assert (record["late"], record["late_held"]) == (1, 0)
    assert record["problems"] == ["repeat 2: it is wrong"]
    written = json.loads(path.read_text())
    assert written["failures"] == 1 and [run["runs"] for run in written["runs"]] == [2, 3]
    with pytest.raises(SystemExit, match="holds 1 cells, which are not the 1 of this run"):
        add(4, str(cells()[0]))
    written["cells"][0]["expected"] = "something else"
    path.write_text(json.dumps(written))
    assert add(1)[1]["runs"] == 1 and played[-1] == 0


def test_no_world_begins_behind_the_end() -> None:
    assert not list(worlds.run(cells()[:3], 0, end=time.monotonic()))


def test_the_table_in_the_documentation_is_that_of_the_run() -> None:
    text = PAGE.read_text()
    assert page(text, json.loads(RUN.read_text())) == text, "write it anew: python -m verification.faults.table"
