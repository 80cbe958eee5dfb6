"""Figures of what was measured, as they are written to JSON: seconds, bytes, bytes a second; and the table of them.

The table is in the manner of nccl-tests: a line as soon as it is known.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from thinwire.tools.bench.measure import Measured, by_operation
from thinwire.tools.bench.timing import median_ratio

#: Heads and widths; a wider cell pushes the others to the right.
_COLUMNS = (
    ("operation", 14), ("size", 10), ("tokens", 7), ("implementation", 22), ("wire", 8), ("transport", 9),
    ("min us", 10), ("median us", 10), ("max us", 10), ("algbw", 8), ("busbw", 8),
    ("wire GB/s", 9), ("error", 8), ("#wrong", 7), ("speedup", 7),
)  # fmt: skip
_LEFT = ("operation", "implementation", "wire", "transport")


class Sizes(NamedTuple):
    """What the figures of one operation at one size have in common.

    Attributes:
        tokens: tokens or rows of a rank.
        size_bytes: a rank's buffer.
        logical_bytes: what leaves a rank if nothing is quantised, mean over ranks.
        routing: its name, or None.
        skew: rows of the busiest rank by the mean, or None.
    """

    tokens: int
    size_bytes: int
    logical_bytes: float
    routing: str | None
    skew: float | None


def figures_of(found: Measured, sizes: dict[str, Sizes], reference: str) -> list[dict[str, Any]]:
    """A figure for each operation and contender. `reference` is the implementation whose time speed-ups are of.

    A contender with a wrong result has neither seconds nor what is made of them; what is wrong in a leg that was not
    asked for counts in those that were. Speed-ups are medians over rounds of the ratio within the round.
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
    seconds = None
    if samples:
        seconds = {"minimum": min(samples), "median": statistics.median(samples), "maximum": max(samples)}
    return {
        "operation": operation,
        "implementation": "",
        "wire": "",
        "transport": None,
        "routing": sizes.routing,
        "skew": sizes.skew,
        "tokens": sizes.tokens,
        "size_bytes": sizes.size_bytes,
        "logical_bytes": sizes.logical_bytes,
        "wire_bytes": wire_bytes,
        "seconds": seconds,
        "algorithm_bandwidth": _rate(sizes.size_bytes, seconds),
        "bus_bandwidth": _rate(sizes.logical_bytes, seconds),
        "wire_bandwidth": _rate(wire_bytes, seconds),
        "relative_error": None if verdict is None else _relative(verdict.error_squares, verdict.squares),
        "wrong": None if verdict is None else verdict.wrong + others,
        "speedup": median_ratio(compared, samples) if compared and samples else None,
        "reference": reference,
    }


def _rate(num_bytes: float, seconds: dict[str, float] | None) -> float | None:
    return None if seconds is None else num_bytes / seconds["median"]


def _relative(error_squares: float, squares: float) -> float | None:
    error = math.sqrt(error_squares / squares) if squares else 0.0
    return error if math.isfinite(error) else None


def heading(routing: str | None, skew: float | None) -> str:
    """What stands over the lines of one routing."""
    named = "" if routing is None else f"# routing {routing}, skew {skew:.2f}\n"
    return f"\n{named}{_line([name for name, _ in _COLUMNS])}"


def line(figure: Mapping[str, Any]) -> str:
    """One figure; bandwidths are in GB/s, of 10^9 bytes."""
    seconds, wrong = figure["seconds"], figure["wrong"]
    if seconds is None:
        times, rates = ["WRONG", "", ""], ["", "", ""]
    else:
        times = [f"{seconds[name] * 1e6:.1f}" for name in ("minimum", "median", "maximum")]
        rates = [f"{figure[f'{name}_bandwidth'] / 1e9:.3f}" for name in ("algorithm", "bus", "wire")]
        rates = rates if figure["wire_bytes"] else [rates[0], "-", "-"]
    error, speedup = figure["relative_error"], figure["speedup"]
    return _line(
        [
            figure["operation"],
            str(figure["size_bytes"]),
            str(figure["tokens"]),
            figure["implementation"],
            figure["wire"],
            figure["transport"] or "-",
            *times,
            *rates,
            "-" if error is None else f"{error:.1e}" if error else "0",
            "-" if wrong is None else str(wrong),
            "-" if speedup is None else f"{speedup:.2f}",
        ]
    )


def _line(cells: Sequence[str]) -> str:
    padded = [
        cell.ljust(width) if name in _LEFT else cell.rjust(width)
        for cell, (name, width) in zip(cells, _COLUMNS, strict=True)
    ]
    return "  ".join(padded).rstrip()
