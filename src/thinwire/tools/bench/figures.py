"""Figures of what was measured, as they are written to JSON: seconds, bytes, bytes a second; and the table of them.

The table is in the manner of nccl-tests: names, a row of units, and a line as soon as it is known.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from thinwire.tools.bench.measure import Measured, by_operation
from thinwire.tools.bench.timing import median_ratio
from thinwire.tools.bench.units import name_text, significant


class Sizes(NamedTuple):
    """What the figures of one operation at one size have in common.

    Attributes:
        tokens: tokens or rows of a rank.
        size_bytes: a rank's buffer.
        logical_bytes: what leaves a rank if nothing is quantised, mean over ranks.
        routing: its name, or None.
        skew: rows of the busiest rank by the mean, or None.
        max_violation: of rounds, rows of the busiest expert by the mean over experts, less 1.
    """

    tokens: int
    size_bytes: int
    logical_bytes: float
    routing: str | None
    skew: float | None
    max_violation: float | None = None


def figures_of(found: Measured, sizes: dict[str, Sizes], reference: str) -> list[dict[str, Any]]:
    """A figure for each operation and contender. `reference` is the implementation whose time speed-ups are of.

    A contender with a wrong result has neither seconds nor what is made of them; what is wrong in a leg that was not
    asked for counts in those that were. A speed-up is the ratio of the medians; the paired one is the median over
    rounds of the ratio within the round.
    """
    return [
        _figure(found, sizes[operation], operation, contender.label, reference, frozenset(sizes))
        | {"implementation": contender.implementation, "wire": contender.wire, "transport": contender.transport}
        for operation, contender in by_operation(found, list(sizes))
    ]


def _figure(
    found: Measured, sizes: Sizes, operation: str, label: str, reference: str, shown: frozenset[str]
) -> dict[str, Any]:
    samples = found.samples.get(f"{label} {operation}")
    verdict = found.verdicts.get((label, operation))
    others = sum(each.wrong for (name, of), each in found.verdicts.items() if name == label and of not in shown)
    wire_bytes = found.wire_bytes[label, operation]
    compared = next(
        (
            found.samples.get(f"{contender.label} {operation}")
            for contender in found.contenders
            if contender.implementation == reference and contender.wire == "none"
        ),
        None,
    )
    seconds = _summarised(samples) if samples else None
    fastest = found.fastest.get(f"{label} {operation}", ())
    period = found.periods.get(label) if samples and operation == "moe" else None
    return {
        "operation": operation,
        "implementation": "",
        "wire": "",
        "transport": None,
        "routing": sizes.routing,
        "skew": sizes.skew,
        "max_violation": sizes.max_violation,
        "tokens": sizes.tokens,
        "size_bytes": sizes.size_bytes,
        "logical_bytes": sizes.logical_bytes,
        "wire_bytes": wire_bytes,
        "seconds": seconds,
        "fastest_rank": statistics.median(fastest) if samples and fastest else None,
        "rank_spread": _spread(samples, fastest) if samples and fastest else None,
        "period": statistics.median(period) if period else None,
        "algorithm_bandwidth": _rate(sizes.size_bytes, seconds),
        "bus_bandwidth": _rate(sizes.logical_bytes, seconds),
        "wire_bandwidth": _rate(wire_bytes, seconds),
        "relative_error": None if verdict is None else _relative(verdict.error_squares, verdict.squares),
        "wrong": None if verdict is None else verdict.wrong + others,
        "speedup": statistics.median(compared) / statistics.median(samples) if compared and samples else None,
        "paired_speedup": median_ratio(compared, samples) if compared and samples else None,
        "reference": reference,
        "called": found.called.get(label),
    }


def _summarised(samples: Sequence[float]) -> dict[str, float]:
    """Quantiles are samples: the least that so large a share of all does not exceed. Of less than 100, p99 is the last.

    >>> list(_summarised([4.0, 1.0, 3.0, 2.0]).values())
    [1.0, 1.0, 2.5, 3.0, 4.0, 4.0]
    """
    ordered = sorted(samples)
    lower, upper, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.25, 0.75, 0.99))
    return {
        "minimum": ordered[0],
        "lower_quartile": lower,
        "median": statistics.median(ordered),
        "upper_quartile": upper,
        "p99": p99,
        "maximum": ordered[-1],
    }


def _spread(slowest: Sequence[float], fastest: Sequence[float]) -> float:
    return statistics.median(most - least for most, least in zip(slowest, fastest, strict=True))


def _rate(num_bytes: float, seconds: dict[str, float] | None) -> float | None:
    return None if seconds is None else num_bytes / seconds["median"]


def _relative(error_squares: float, squares: float) -> float | None:
    error = math.sqrt(error_squares / squares) if squares else 0.0
    return error if math.isfinite(error) else None


# ---------------------------------------------------------------------------------------------------------------------
# The table


def _seconds(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda figure: significant(figure["seconds"] and figure["seconds"][name] * 1e6)


def _microseconds(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda figure: "-" if figure[name] is None else significant(figure[name] * 1e6)


def _gigabytes(name: str) -> Callable[[Mapping[str, Any]], str]:
    def cell(figure: Mapping[str, Any]) -> str:
        rate = figure[f"{name}_bandwidth"]
        return "-" if rate is None or not figure["wire_bytes"] and name != "algorithm" else significant(rate / 1e9, 3)

    return cell


class _Column(NamedTuple):
    name: str
    unit: str
    width: int  # a wider cell pushes the others to the right
    cell: Callable[[Mapping[str, Any]], str]
    only_wide: bool = False


def _median(figure: Mapping[str, Any]) -> str:
    return "WRONG" if figure["seconds"] is None else _seconds("median")(figure)


_COLUMNS = (
    _Column("size", "bytes", 11, lambda f: str(f["size_bytes"])),
    _Column("count", "", 8, lambda f: str(f["tokens"])),
    _Column("operation", "", 14, lambda f: str(f["operation"]), only_wide=True),
    _Column("implementation", "", 24, lambda f: name_text(f["implementation"], f["wire"], f["transport"])),
    _Column("min", "us", 8, _seconds("minimum"), only_wide=True),
    _Column("median", "us", 8, _median),
    _Column("p99", "us", 8, _seconds("p99")),
    _Column("max", "us", 8, _seconds("maximum"), only_wide=True),
    _Column("fastest", "us", 8, _microseconds("fastest_rank"), only_wide=True),
    _Column("spread", "us", 8, _microseconds("rank_spread"), only_wide=True),
    _Column("period", "us", 8, _microseconds("period"), only_wide=True),
    _Column("algbw", "GB/s", 7, _gigabytes("algorithm")),
    _Column("busbw", "GB/s", 7, _gigabytes("bus")),
    _Column("wire", "GB/s", 7, _gigabytes("wire")),
    _Column("error", "", 7, lambda f: significant(f["relative_error"], 2)),
    _Column("#wrong", "", 6, lambda f: "-" if f["wrong"] is None else str(f["wrong"])),
    _Column("speedup", "", 7, lambda f: significant(f["speedup"], 3)),
    _Column("paired", "", 7, lambda f: significant(f["paired_speedup"], 3), only_wide=True),
)
_LEFT = ("operation", "implementation")


def _columns(wide: bool) -> list[_Column]:
    return [column for column in _COLUMNS if wide or not column.only_wide]


def heading(counted: str, reference: str, wide: bool) -> str:
    """Names and units over the first lines of a table.

    Args:
        counted: what `count` counts, such as "tokens".
        reference: whose time speed-ups are of.
    """
    units = {"count": counted, "speedup": f"x {reference}", "paired": f"x {reference}"}
    columns = _columns(wide)
    rows = [column.name for column in columns], [units.get(column.name, column.unit) for column in columns]
    return "\n".join("#" + _line(row, wide)[1:] for row in rows)


def title(operation: str, dtype: str, routing: str | None, skew: float | None, max_violation: float | None) -> str:
    """What stands over the lines of one operation and routing."""
    routed = "" if routing is None else f", routing {routing}, skew {skew:.2f}"
    violated = "" if max_violation is None else f", MaxVio {max_violation:.2f}"
    return f"# {operation} of {dtype}{routed}{violated}"


def line(figure: Mapping[str, Any], wide: bool) -> str:
    """One figure; bandwidths are in GB/s, of 10^9 bytes."""
    return _line([column.cell(figure) for column in _columns(wide)], wide)


def _line(cells: Sequence[str], wide: bool) -> str:
    padded = [
        cell.ljust(column.width) if column.name in _LEFT else cell.rjust(column.width)
        for cell, column in zip(cells, _columns(wide), strict=True)
    ]
    return " ".join(padded).rstrip()
