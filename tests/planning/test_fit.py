"""Fits find what made the points, and files that are no results are refused by name."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import ArgumentError
from thinwire.planning.fit import fit_figures, fit_results
from thinwire.planning.results import Figure, read_results


def points(alpha: float, beta: float, sizes: tuple[float, ...] = (0, 1e3, 1e5, 1e7)) -> list[Figure]:
    return [Figure("dispatch", "thinwire", "int8", "direct", "uniform", size, alpha + size / beta) for size in sizes]


@pytest.mark.parametrize(("alpha", "beta"), [(20e-6, 300e9), (1e-3, 1e8), (5e-6, 1e12)])
def test_a_fit_finds_the_line_that_made_the_points(alpha: float, beta: float) -> None:
    fit = fit_figures(points(alpha, beta)[::-1])
    assert fit.alpha == pytest.approx(alpha) and fit.beta == pytest.approx(beta)
    assert max(map(abs, fit.residuals)) < 1e-9 and fit.r2 == pytest.approx(1)
    assert fit.seconds(2e7) == pytest.approx(alpha + 2e7 / beta)


def test_residuals_are_relative_so_that_small_messages_count() -> None:
    generator = random.Random(3)
    sizes = [4.0**power for power in range(4, 15)]
    times = [(30e-6 + size / 1e9) * generator.uniform(0.95, 1.05) for size in sizes]
    noisy = [Figure("combine", "thinwire", "int8", None, None, *point) for point in zip(sizes, times, strict=True)]
    fit = fit_figures(noisy)
    assert fit.alpha == pytest.approx(30e-6, rel=0.05) and fit.beta == pytest.approx(1e9, rel=0.05)
    best = sum(residual**2 for residual in fit.residuals)
    for alpha, beta in ((1.001, 1), (0.999, 1), (1, 1.001), (1, 0.999)):
        other = [(fit.alpha * alpha + p.wire_bytes / fit.beta / beta) / p.seconds - 1 for p in noisy]
        assert best <= sum(residual**2 for residual in other)


def test_alpha_and_beta_are_never_negative() -> None:
    falling = [Figure("dispatch", "x", "int8", None, None, size, 1 / size) for size in (1.0, 2.0, 4.0)]
    assert fit_figures(falling).beta == float("inf") and fit_figures(falling).alpha > 0
    steep = [Figure("dispatch", "x", "int8", None, None, size, size**2) for size in (1.0, 2.0, 4.0)]
    assert fit_figures(steep).alpha == 0 and fit_figures(steep).beta > 0
    with pytest.raises(ArgumentError, match="1 points with one number of bytes"):
        fit_figures(falling[:1])


def content(**changed: Any) -> dict[str, Any]:
    figures = [
        {"operation": "dispatch", "implementation": "thinwire", "wire": "int8", "transport": "direct",
         "routing": "uniform", "wire_bytes": size, "seconds": {"median": 1e-5 + size / 1e9}}
        for size in (1000, 100000)
    ]  # fmt: skip
    return {"format": "thinwire bench", "version": 1, "ranks": 4, "hosts": 1, "figures": figures} | changed


def test_a_file_is_read_and_fitted_by_operation(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(content()))
    results = read_results(file)
    assert (results.ranks, results.hosts, len(results.figures)) == (4, 1, 2)
    (key, fit), *others = fit_results(results).items()
    assert key == ("dispatch", "thinwire", "int8", "direct", "uniform") and not others
    assert fit.alpha == pytest.approx(1e-5) and fit.beta == pytest.approx(1e9)


def changed_figure(**changed: Any) -> dict[str, Any]:
    return content(figures=[content()["figures"][0], content()["figures"][1] | changed])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "expected an object"),
        (content(format="nccl-tests"), "format is 'nccl-tests', expected 'thinwire bench'"),
        (content(version=2), "version is 2, expected 1"),
        (content(version=True), "version is True"),
        (content(ranks=0), "ranks is 0, expected an int from 1"),
        (content(hosts="1"), "hosts is '1'"),
        (content(figures={}), "figures is {}, expected a list"),
        ({"format": "thinwire bench", "version": 1}, "no field 'figures'"),
        (changed_figure(wire_bytes=-1), r"figures\[1\]: wire_bytes is -1"),
        (changed_figure(wire_bytes=float("nan")), r"figures\[1\]: wire_bytes is nan"),
        (changed_figure(seconds=1.0), r"figures\[1\]: seconds is 1.0, expected an object"),
        (changed_figure(seconds={"median": 0}), r"figures\[1\]: seconds: median is 0"),
        (changed_figure(seconds={}), r"figures\[1\]: seconds: no field 'median'"),
        (changed_figure(operation="\x1b[2J"), r"figures\[1\]: operation is '\\x1b\[2J', expected printable text"),
        (changed_figure(transport=3), r"figures\[1\]: transport is 3"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, value: Any, said: str) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(value))
    with pytest.raises(ArgumentError, match=said) as caught:
        read_results(file)
    assert str(file) in str(caught.value) and str(caught.value).isprintable()


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_bytes(b"\xff{")
    with pytest.raises(ArgumentError, match="not JSON"):
        read_results(file)
