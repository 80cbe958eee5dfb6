"""What the pages' pictures and tables of formats show is what the codec does, and what was recorded."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="pictures need matplotlib")
import torch

from benchmarks import wire_table
from benchmarks.error_bytes import GAUSSIAN, MODEL, OUTLIERS, WIRES, Cost, draw_error_bytes
from benchmarks.error_bytes import measure as measure_errors
from benchmarks.field_formats import FIELD
from benchmarks.wire_table import BEGIN, END, PAGE, RESULTS, Row, completed, draw, markdown, measure, undominated

ROOT = Path(__file__).parents[2]
BY_NAME = {each.name: each for each in FIELD}
#: On Gaussian rows. bfloat16 and e4m3 follow from their bits; for the others, within a fifth of int8's or int4's kind.
ERRORS = {
    "bfloat16": 0.0017, "LogFMT-10": 0.0035, "spike int8": 0.0051, "DeepEP fp8": 0.0257, "mxfp8": 0.029,
    "nvfp4": 0.095, "mxfp4": 0.115,
}  # fmt: skip


@pytest.mark.exhaustive
def test_errors_are_those_of_the_formats_and_the_recorded_ones() -> None:
    costs = {(cost.wire, cost.rows): cost for cost in measure_errors()}
    # What uniform rounding of Gaussian rows gives by theory, and bfloat16 on top; a tenth of it either way.
    for wire, error in (("int8:32", 0.0056), ("int8", 0.0066), ("int8:row", 0.0092), ("fp8", 0.0257), ("int4", 0.097)):
        assert costs[wire, GAUSSIAN].relative_error == pytest.approx(error, rel=0.1)
    assert costs["int8:row", OUTLIERS].relative_error > 5 * costs["int8", OUTLIERS].relative_error
    held = json.loads((ROOT / "benchmarks/results/cpu/error_bytes.json").read_text())["figures"]
    for cost, committed in zip(costs.values(), held, strict=True):
        assert committed == vars(cost) | {"relative_error": pytest.approx(cost.relative_error, rel=1e-3)}


def test_the_picture_of_errors_shows_every_cost() -> None:
    made_up = [
        Cost(wire, rows, 256, 2 - place / 8, 0.0 if wire == "none" else 0.004 * 2**place)
        for place, wire in enumerate(WIRES)
        for rows in (GAUSSIAN, OUTLIERS, MODEL)
    ]
    bars, dots = draw_error_bytes(made_up).axes
    assert [label.get_text() for label in bars.get_yticklabels()] == list(WIRES)
    drawn = sorted(line.get_xdata()[0] for line in dots.lines)
    assert drawn == sorted(cost.relative_error for cost in made_up if cost.relative_error)


@pytest.mark.parametrize("script", ["docs/draw_dispatch_combine.py", "docs/draw_speedups.py"])
def test_drawings_are_what_their_scripts_draw_from_the_results(script: str) -> None:
    command = [sys.executable, script, "--check"]
    assert subprocess.run(command, cwd=ROOT).returncode == 0, f"draw it anew: python {script}"


@pytest.mark.parametrize("name", ERRORS)
def test_rows_of_others_arrive_as_their_formats_say(name: str) -> None:
    passed = BY_NAME[name].passed
    rows = torch.randn(32, 576, generator=torch.Generator().manual_seed(0))
    rows[0], rows[1, :300] = 0.0, 0.0
    got = passed(rows)
    assert wire_table.error(passed, rows) == pytest.approx(ERRORS[name], rel=0.06)
    assert got.shape == rows.shape and got[0].abs().max() == 0
    assert passed(-rows)[2:].equal(-got[2:]) or name == "spike int8"  # whose zero is the least element
    for factor in (2.0**-8, 2.0**12):
        assert passed(rows * factor).equal(got * factor) or name == "LogFMT-10"  # whose logarithms round


def test_values_of_a_format_stay_as_they_are() -> None:
    halves = torch.tensor([[0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, -6.0] * 4])
    assert BY_NAME["mxfp4"].passed(halves).equal(halves) and BY_NAME["nvfp4"].passed(halves).equal(halves)
    assert BY_NAME["mxfp4"].passed(torch.full((1, 32), 7.5)).eq(6.0).all()  # cut: the scale is rounded down
    spiked = torch.linspace(0, 255, 128)[None].round()
    spiked[0, 5], spiked[0, 9] = 4096.0, -4096.0
    assert BY_NAME["spike int8"].passed(spiked).equal(spiked)


def test_the_table_shows_what_was_recorded_and_keeps_what_is_not_measured_again() -> None:
    rows = [Row(**row) for row in json.loads((RESULTS / "cpu" / "wire_table.json").read_text())["figures"]]
    assert [row.name for row in rows] == [*wire_table.WIRES, *BY_NAME]
    assert markdown(rows) == PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    row = measure(names=["int8+h64"])[0]
    (made,) = completed([row], [dataclasses.replace(row, gaussian=1.0, kl=0.001, smollm2=0.01)])
    assert row.kl is None and (made.gaussian, made.kl, made.smollm2) == (row.gaussian, 0.001, 0.01)
    (held,) = [each for each in rows if each.name == row.name]
    assert row.gaussian == pytest.approx(held.gaussian, rel=1e-3) and row.model == pytest.approx(held.model, rel=1e-3)
    assert draw(rows).axes[0].get_xlabel() == "bytes an element"
    sizes = [
        Row(name, "", size, 0, 0, 0, kl=kl) for name, size, kl in (("a", 1, 3), ("b", 2, 4), ("c", 1, 2), ("d", 3, 1))
    ]
    assert [row.name for row in undominated(sizes)] == ["c", "d"]
