"""Figures: medians over samples, ratios within rounds, and nothing where a result was wrong."""

from __future__ import annotations

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


def test_speedups_are_medians_of_the_ratios_within_rounds() -> None:
    reference, line, wrong = figures_of(_measured(), SIZES, "gloo")
    assert reference["speedup"] == 1 and reference["relative_error"] == 0
    assert line["speedup"] == 0.25  # of the medians it would be 2 / 4
    assert line["seconds"] == {"minimum": 3.0, "median": 4.0, "maximum": 8.0} and line["relative_error"] == 0.5
    assert (line["algorithm_bandwidth"], line["bus_bandwidth"], line["wire_bandwidth"]) == (1000.0, 750.0, 500.0)
    assert wrong["wrong"] == 7 and wrong["seconds"] is wrong["speedup"] is wrong["relative_error"] is None


def test_a_line_shows_microseconds_and_gigabytes_or_that_it_is_wrong() -> None:
    _, line, wrong = (figures.line(figure).split() for figure in figures_of(_measured(), SIZES, "gloo"))
    assert (
        line
        == "all_gather 4000 4 thinwire int8 - 3000000.0 4000000.0 8000000.0 0.000 0.000 0.000 5.0e-01 0 0.25".split()
    )
    assert wrong == "all_gather 4000 4 other none - WRONG - 7 -".split()
    heads = figures.heading(None, None).splitlines()[-1].split()
    assert heads[:3] == ["operation", "size", "tokens"]


def test_without_a_reference_there_is_no_speedup() -> None:
    assert all(line["speedup"] is None for line in figures_of(_measured(), SIZES, "nccl"))
