"""The table, in the manner of nccl-tests: a line as soon as it is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: Heads and widths; a wider cell pushes the others to the right.
_COLUMNS = (
    ("operation", 14), ("size", 10), ("tokens", 7), ("implementation", 22), ("wire", 8), ("transport", 9),
    ("min us", 10), ("median us", 10), ("max us", 10), ("algbw", 8), ("busbw", 8),
    ("wire GB/s", 9), ("error", 8), ("#wrong", 7), ("speedup", 7),
)  # fmt: skip
_LEFT = ("operation", "implementation", "wire", "transport")


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
