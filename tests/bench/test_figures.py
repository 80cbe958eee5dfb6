"""Figures: quantiles over samples, ratios, and nothing where a result was wrong; and the table of them."""

from __future__ import annotations

import re

import pytest

from thinwire.tools.bench import figures
from thinwire.tools.bench.checks import Verdict
from thinwire.tools.bench.contender import Contender
from thinwire.tools.bench.figures import Sizes, figures_of
from thinwire.tools.bench.measure import Measured

SIZES = {"all_gather": Sizes(4, 4000, 3000.0, None, None)}


def _contender(name: str, wire: str = "none") -> Contender:
    return Contender(name, wire, None, dict, lambda operation, got: Verdict(0, 0.0, 1.0), {"all_gather": 1.0})


def _measured() -> Measured:
    found = Measured(contenders=[_contender("gloo"), _contender("thinwire", "int8"), _contender("other")])
    found.wire_bytes = {(each.label, "all_gather"): 2000.0 for each in found.contenders}
    found.verdicts = {
        ("gloo/none", "all_gather"): Verdict(0, 0.0, 4.0),
        ("thinwire/int8", "all_gather"): Verdict(0, 1.0, 4.0),
        ("other/none", "all_gather"): Verdict(7, float("nan"), 4.0),
    }
    found.samples = {"gloo/none all_gather": [1.0, 2.0, 9.0], "thinwire/int8 all_gather": [4.0, 8.0, 3.0]}
    return found


def test_a_speedup_is_the_ratio_of_the_medians_and_the_paired_one_that_within_rounds() -> None:
    reference, line, wrong = figures_of(_measured(), SIZES, "gloo")
    assert reference["speedup"] == reference["paired_speedup"] == 1 and reference["relative_error"] == 0
    assert line["speedup"] == 2 / 4 and line["paired_speedup"] == 0.25
    assert (line["seconds"]["minimum"], line["seconds"]["median"], line["seconds"]["maximum"]) == (3, 4, 8)
    assert (line["algorithm_bandwidth"], line["bus_bandwidth"], line["wire_bandwidth"]) == (1000.0, 750.0, 500.0)
    assert wrong["wrong"] == 7 and wrong["seconds"] is wrong["speedup"] is wrong["relative_error"] is None


@pytest.mark.parametrize(
    ("count", "expected"), [(1, (1, 1, 1)), (10, (3, 8, 10)), (100, (25, 75, 99)), (101, (26, 76, 100))]
)
def test_quantiles_are_samples_that_the_share_does_not_exceed(count: int, expected: tuple[int, ...]) -> None:
    found = _measured()
    found.samples["thinwire/int8 all_gather"] = [float(sample) for sample in range(count, 0, -1)]
    seconds = figures_of(found, SIZES, "gloo")[1]["seconds"]
    assert tuple(seconds[name] for name in ("lower_quartile", "upper_quartile", "p99")) == expected


def test_a_line_shows_microseconds_and_gigabytes_or_that_it_is_wrong() -> None:
    found = _measured()
    found.samples["thinwire/int8 all_gather"] = [4.1253e-2, 8e-2, 3e-2]
    _, line, wrong = figures_of(found, SIZES, "gloo")
    assert (
        figures.line(line, wide=False).split()
        == "4000 4 thinwire int8 41250 80000 9.7e-05 7.3e-05 4.8e-05 0.50 0 48.5".split()
    )
    assert figures.line(wrong, wide=False).split() == "4000 4 other WRONG - - - - - 7 -".split()
    assert figures.line(line, wide=True).split()[-1] == "25.0" and "30000" in figures.line(line, wide=True)


@pytest.mark.parametrize("wide", [False, True])
def test_names_units_and_cells_end_in_the_same_columns(wide: bool) -> None:
    names, units = figures.heading("elements", "gloo", wide).splitlines()
    line = figures.line(figures_of(_measured(), SIZES, "gloo")[1], wide)
    assert names.split()[:2] == ["#", "size"] and units.split()[:2] == ["#", "bytes"]
    ends = [match.end() for match in re.finditer(r"\S+", names)]
    assert ends[-1] == len(units) == len(line)
    assert {match.end() for match in re.finditer(r"(bytes|elements|us|GB/s|x gloo)(?= |$)", units)} <= set(ends)
    assert len(line) <= 110 or wide


def test_no_line_is_wider_than_110_columns_whatever_was_measured() -> None:
    for value in (1.2345e-9, 9.9999e-4, 0.99999, 123.456, 999999.0):
        for figure in figures_of(_measured(), SIZES, "gloo")[:2]:
            figure |= {"size_bytes": 64 << 30, "tokens": 99_999_999, "relative_error": value / 1e6, "wrong": 999_999,
                       "speedup": value, "implementation": "thinwire", "wire": "int8+h64", "transport": "direct",
                       "seconds": dict.fromkeys(figure["seconds"], value / 1e6)}  # fmt: skip
            figure |= {f"{name}_bandwidth": value * 1e6 for name in ("algorithm", "bus", "wire")}
            assert len(figures.line(figure, wide=False)) == 110


def test_ranks_and_chains_have_figures_of_their_own() -> None:
    found = _measured()
    found.fastest = {"gloo/none all_gather": [1.0, 1.5, 1.0], "thinwire/int8 all_gather": [4.0, 7.0, 1.0]}
    found.periods = {"gloo/none": [5.0, 3.0, 4.0]}
    reference, line, wrong = figures_of(found, SIZES, "gloo")
    assert (reference["fastest_rank"], reference["rank_spread"]) == (1.0, 0.5)
    assert (line["fastest_rank"], line["rank_spread"]) == (4.0, 1.0)
    assert wrong["fastest_rank"] is wrong["rank_spread"] is wrong["period"] is None
    assert reference["period"] is None  # which is that of whole rounds
    for each in found.contenders:
        each.wire_bytes = {"moe": 1.0}
    found.samples = {"gloo/none moe": [1.0]}
    found.wire_bytes = {(each.label, "moe"): 1.0 for each in found.contenders}
    sizes = {"moe": SIZES["all_gather"]._replace(routing="maxvio:1", skew=1.2, max_violation=1.03)}
    (reference, *_) = figures_of(found, sizes, "gloo")
    assert (reference["period"], reference["max_violation"]) == (4.0, 1.03)
    titled = figures.title("moe", "bfloat16", *(reference[name] for name in ("routing", "skew", "max_violation")))
    assert titled == "# moe of bfloat16, routing maxvio:1, skew 1.20, MaxVio 1.03"
    names, line = (text.split() for text in (figures.heading("tokens", "gloo", True), figures.line(reference, True)))
    assert "period" in names and "4000000" in line


def test_without_a_reference_there_is_no_speedup() -> None:
    assert all(line["speedup"] is None for line in figures_of(_measured(), SIZES, "nccl"))
