"""The formats of others are what their sources say, and the page shows what was recorded."""

from __future__ import annotations

import dataclasses
import json

import pytest

pytest.importorskip("matplotlib", reason="pictures need matplotlib")
import torch

from benchmarks import wire_table
from benchmarks.field_formats import FIELD
from benchmarks.wire_table import BEGIN, END, PAGE, RESULTS, WIRES, Row, completed, draw, markdown, measure, undominated
from tests.bench.test_plots import require_legible

BY_NAME = {each.name: each for each in FIELD}
#: On Gaussian rows. bfloat16 and e4m3 follow from their bits; for the others, within a fifth of int8's or int4's kind.
ERRORS = {
    "bfloat16": 0.0017, "LogFMT-10": 0.0035, "spike int8": 0.0051, "DeepEP fp8": 0.0257, "mxfp8": 0.029,
    "nvfp4": 0.095, "mxfp4": 0.115,
}  # fmt: skip


def recorded() -> list[Row]:
    return [Row(**row) for row in json.loads((RESULTS / "cpu" / "wire_table.json").read_text())["figures"]]


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


def test_what_is_not_measured_again_is_kept() -> None:
    row = measure(names=["int8+h64"])[0]
    assert row.kl is None
    before = dataclasses.replace(row, gaussian=1.0, kl=0.001, smollm2=0.01)
    (made,) = completed([row], [before])
    assert (made.gaussian, made.kl, made.smollm2) == (row.gaussian, 0.001, 0.01)
    (held,) = [each for each in recorded() if each.name == row.name]
    assert row.gaussian == pytest.approx(held.gaussian, rel=1e-3) and row.model == pytest.approx(held.model, rel=1e-3)


def test_the_page_shows_what_was_recorded() -> None:
    rows = recorded()
    assert [row.name for row in rows] == [*WIRES, *BY_NAME]
    assert markdown(rows) == PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def test_the_picture_is_legible_and_joins_the_best() -> None:
    require_legible(draw(recorded()).canvas)
    sizes = [
        Row(name, "", size, 0, 0, 0, kl=kl) for name, size, kl in (("a", 1, 3), ("b", 2, 4), ("c", 1, 2), ("d", 3, 1))
    ]
    assert [row.name for row in undominated(sizes)] == ["c", "d"]
