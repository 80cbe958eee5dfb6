"""Fits find what made the points, and take them from the files of `thinwire bench`."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from thinwire.tools.bench.results import read_results
from thinwire.tools.cli import main
from thinwire.tools.planning.plan import FittedModel, Request, fit_link

SIZES = "--ranks 4 --experts 8 --top-k 2 --hidden 64 --max-tokens 16"


@pytest.mark.parametrize(("alpha", "beta"), [(20e-6, 300e9), (1e-3, 1e8), (5e-6, 1e12)])
def test_a_fit_finds_the_line_that_made_the_points(alpha: float, beta: float) -> None:
    link = fit_link([(size, alpha + size / beta) for size in (1e7, 0, 1e5, 1e3)])
    assert (link.alpha, link.beta, link.efficiency) == (pytest.approx(alpha), pytest.approx(beta), 1)
    assert link.source == "4 sizes from 0 to 10,000,000 bytes, at most 0.0 % off"


def test_residuals_are_relative_so_that_small_messages_count() -> None:
    generator = random.Random(3)
    sizes = [4.0**power for power in range(4, 15)]
    noisy = [(size, (30e-6 + size / 1e9) * generator.uniform(0.95, 1.05)) for size in sizes]
    link = fit_link(noisy)
    assert link.alpha == pytest.approx(30e-6, rel=0.05) and link.beta == pytest.approx(1e9, rel=0.05)

    def squares(alpha: float, beta: float) -> float:
        return sum(((alpha + size / beta) / seconds - 1) ** 2 for size, seconds in noisy)

    for alpha, beta in ((1.001, 1), (0.999, 1), (1, 1.001), (1, 0.999)):
        assert squares(link.alpha, link.beta) <= squares(link.alpha * alpha, link.beta * beta)


def test_alpha_and_beta_are_never_negative() -> None:
    falling = fit_link([(size, 1 / size) for size in (1.0, 2.0, 4.0)])
    assert falling.beta == float("inf") and falling.alpha > 0
    steep = fit_link([(size, size**2) for size in (1.0, 2.0, 4.0)])
    assert steep.alpha == 0 and steep.beta > 0


def content(**changed: Any) -> dict[str, Any]:
    figures = [
        {"operation": "dispatch", "implementation": "thinwire", "wire": "int8", "transport": "direct",
         "routing": "uniform", "wire_bytes": size, "seconds": {"median": 1e-5 + size / 1e9}}
        for size in (1000, 100000)
    ]  # fmt: skip
    return {"format": "thinwire bench", "version": 1, "ranks": 4, "hosts": 1, "figures": figures} | changed


def test_legs_are_fitted_without_wrong_results_and_those_of_others(tmp_path: Path) -> None:
    file, (first, second) = tmp_path / "results.json", content()["figures"]
    wrong, other = first | {"wire_bytes": 5, "seconds": None, "wrong": 3}, second | {"implementation": "gloo"}
    combined = [figure | {"operation": "combine", "wire": "none"} for figure in (first, second)]
    file.write_text(json.dumps(content(figures=[first, wrong, other, second, *combined])))
    model = FittedModel.of(Request(4, 8, 2, 64, 16, "int8", "none"), read_results(file))
    assert {*model.links} == {("dispatch", "int8"), ("combine", "none")} and (model.ranks, model.hosts) == (4, 1)
    assert model.links["dispatch", "int8"].source.startswith("2 sizes from 1,000 to 100,000 bytes")


def test_a_file_that_is_none_is_refused_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(content(ranks=0)))
    assert main(["plan", *SIZES.split(), "--fit", str(file)]) == 2
    assert f"{file}: ranks is 0, expected an int from 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--fit", "x.json", "--link", "nvlink4"], "fit and a link were given"),
        (["--link", "nvlink4", "--inter-link", "ib400"], "inter_link ib400 was given for one host"),
    ],
)
def test_a_model_that_would_not_be_used_is_refused(
    more: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *SIZES.split(), *more]) == 2
    assert told in capsys.readouterr().err
