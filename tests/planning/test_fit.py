"""Fits find what made the points, and take them from the files of `thinwire bench`."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import ArgumentError
from thinwire.tools.bench.results import read_results
from thinwire.tools.cli import main
from thinwire.tools.planning.plan import Point, fit_points, fit_results


def points(alpha: float, beta: float, sizes: tuple[float, ...] = (0, 1e3, 1e5, 1e7)) -> list[Point]:
    return [Point(size, alpha + size / beta) for size in sizes]


@pytest.mark.parametrize(("alpha", "beta"), [(20e-6, 300e9), (1e-3, 1e8), (5e-6, 1e12)])
def test_a_fit_finds_the_line_that_made_the_points(alpha: float, beta: float) -> None:
    fit = fit_points(points(alpha, beta)[::-1])
    assert fit.alpha == pytest.approx(alpha) and fit.beta == pytest.approx(beta)
    assert max(map(abs, fit.residuals)) < 1e-9 and fit.r2 == pytest.approx(1)
    assert fit.seconds(2e7) == pytest.approx(alpha + 2e7 / beta)


def test_residuals_are_relative_so_that_small_messages_count() -> None:
    generator = random.Random(3)
    sizes = [4.0**power for power in range(4, 15)]
    times = [(30e-6 + size / 1e9) * generator.uniform(0.95, 1.05) for size in sizes]
    noisy = [Point(*point) for point in zip(sizes, times, strict=True)]
    fit = fit_points(noisy)
    assert fit.alpha == pytest.approx(30e-6, rel=0.05) and fit.beta == pytest.approx(1e9, rel=0.05)
    best = sum(residual**2 for residual in fit.residuals)
    for alpha, beta in ((1.001, 1), (0.999, 1), (1, 1.001), (1, 0.999)):
        other = [(fit.alpha * alpha + p.wire_bytes / fit.beta / beta) / p.seconds - 1 for p in noisy]
        assert best <= sum(residual**2 for residual in other)


def test_alpha_and_beta_are_never_negative() -> None:
    falling = [Point(size, 1 / size) for size in (1.0, 2.0, 4.0)]
    assert fit_points(falling).beta == float("inf") and fit_points(falling).alpha > 0
    steep = [Point(size, size**2) for size in (1.0, 2.0, 4.0)]
    assert fit_points(steep).alpha == 0 and fit_points(steep).beta > 0
    with pytest.raises(ArgumentError, match="1 points with one number of bytes"):
        fit_points(falling[:1])


def content(**changed: Any) -> dict[str, Any]:
    figures = [
        {"operation": "dispatch", "implementation": "thinwire", "wire": "int8", "transport": "direct",
         "routing": "uniform", "wire_bytes": size, "seconds": {"median": 1e-5 + size / 1e9}}
        for size in (1000, 100000)
    ]  # fmt: skip
    return {"format": "thinwire bench", "version": 1, "ranks": 4, "hosts": 1, "figures": figures} | changed


def test_a_file_is_read_and_fitted_by_operation_without_its_wrong_results(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    wrong = content()["figures"][0] | {"wire_bytes": 5, "seconds": None, "wrong": 3}
    file.write_text(json.dumps(content(figures=[*content()["figures"], wrong])))
    results = read_results(file)
    assert (results.ranks, results.hosts, len(results.figures)) == (4, 1, 3)
    (key, fit), *others = fit_results(results).items()
    assert key == ("dispatch", "thinwire", "int8", "direct", "uniform") and not others
    assert fit.alpha == pytest.approx(1e-5) and fit.beta == pytest.approx(1e9) and len(fit.points) == 2


def test_a_file_that_is_none_is_refused_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(content(ranks=0)))

    assert main(["plan", *SIZES.split(), "--fit", str(file)]) == 2
    assert f"{file}: ranks is 0, expected an int from 1" in capsys.readouterr().err


SIZES = "--ranks 4 --experts 8 --top-k 2 --hidden 64 --max-tokens 16"


def test_a_plan_by_a_fit_whose_bytes_cost_nothing_is_valid_json(tmp_path: Path) -> None:
    figures = [
        figure | {"operation": operation, "seconds": dict.fromkeys(figure["seconds"], 1e-2 / figure["wire_bytes"])}
        for figure in content()["figures"]
        for operation in ("dispatch", "combine")
    ]
    file, plan = tmp_path / "results.json", tmp_path / "plan.json"
    file.write_text(json.dumps(content(figures=figures)))
    assert main(["plan", *SIZES.split(), "--wire", "int8", "--fit", str(file), "--json", str(plan)]) == 0
    written = json.loads(plan.read_text(), parse_constant=pytest.fail)
    assert [fit["beta"] for fit in written["fits"].values()] == [None, None]


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
