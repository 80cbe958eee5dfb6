"""Experts on torch's grouped product beside the loop over experts, forward, and forward with backward.

    python -m benchmarks.bench_experts
    python -m benchmarks.bench_experts --json experts.json

`x loop` is the loop's time divided by the grouped product's: above 1 the grouped product is faster. Experts are gated,
with SiLU. Rows are drawn at random. Everything runs in one CPU thread, where `GroupedExperts` chooses between the two
by itself.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

import torch

from benchmarks import timing
from thinwire.moe.experts import GroupedExperts

#: Experts of a rank, rows, hidden size, inner size.
SIZES = ((8, 64, 256, 512), (8, 1024, 512, 1024), (32, 64, 256, 512), (32, 512, 256, 512), (64, 64, 128, 128))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COLUMNS = {
    "experts": "d",
    "rows": "d",
    "hidden": "d",
    "inner": "d",
    "dtype": "s",
    "forward ms": ".2f",
    "x loop": ".2f",
    "and backward ms": ".2f",
    "x loop ": ".2f",
}


def bench(size: Sequence[int], dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """Seconds of a call, and ratios."""
    num_experts, rows, hidden, inner = size
    experts = GroupedExperts(num_experts, hidden, inner, gated=True, dtype=dtype)
    tokens = torch.randn(rows, hidden).to(dtype).requires_grad_()
    counts = torch.randint(num_experts, (rows,)).bincount(minlength=num_experts)
    if "grouped_mm" not in (chosen := experts.explain(tokens, counts)):
        raise SystemExit(f"there is nothing to compare: {chosen}")
    segments = experts._segments(rows, counts, None)
    upstream, inputs = torch.randn(rows, hidden).to(dtype), [tokens, *experts.parameters()]
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "grouped": lambda: experts(tokens, counts),
        "loop": lambda: experts._loop(tokens, *segments),
    }

    def forward(way: Callable[[], torch.Tensor]) -> Callable[[], object]:
        def run() -> None:
            with torch.no_grad():
                way()

        return run

    def both(way: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(way(), inputs, upstream)

    functions = {f"{name} forward": forward(way) for name, way in ways.items()}
    functions |= {f"{name} both": both(way) for name, way in ways.items()}
    times = timing.interleaved(functions, tokens.device, repeats)
    ratios = {
        f"{leg} ratio": timing.median_ratio(times[f"loop {leg}"], times[f"grouped {leg}"])
        for leg in ("forward", "both")
    }
    return {name: statistics.median(taken) for name, taken in times.items()} | ratios


def main(arguments: Sequence[str] | None = None) -> None:
    parser = timing.parser(__doc__, repeats=15)
    parser.add_argument("--size", type=int, nargs=4, metavar=("EXPERTS", "ROWS", "HIDDEN", "INNER"))
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    options = parser.parse_args(arguments)
    described = timing.machine(timing.check_device("cpu"))
    timing.print_machine(described)
    figures: list[dict[str, Any]] = []
    for size in [options.size] if options.size else SIZES:
        for name in options.dtypes:
            sizes = dict(zip(("experts", "rows", "hidden", "inner"), size, strict=True))
            figures.append({**sizes, "dtype": name, **bench(size, DTYPES[name], options.repeats)})
    shown = [
        {
            **figure,
            "forward ms": figure["grouped forward"] * 1e3,
            "x loop": figure["forward ratio"],
            "and backward ms": figure["grouped both"] * 1e3,
            "x loop ": figure["both ratio"],
        }
        for figure in figures
    ]
    timing.finish(options, "experts", described, (shown, COLUMNS), figures, repeats=options.repeats)


if __name__ == "__main__":
    main()
