"""Writes README.md's figures from the files in benchmarks/results: `python docs/write_readme_figures.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu"
TARGET = ROOT / "README.md"

_ROWS = (8192, 1024, 64, 1)
_SIZES = (64, 16, 4, 1)  # MiB
_WAYS = {
    "exact, into `tw.empty`": "tw.empty/none/direct",
    "exact": "thinwire/none/direct",
    "int8": "thinwire/int8/direct",
}


def links() -> str:
    """The chart of slow links, which docs/draw_speedups.py draws, with its figures of int8 in words."""
    found = [figure for figure in _figures("link") if figure["transfer"] == "thinwire int8"]
    rates = ", ".join(figure["rate"].replace("gbit", "") for figure in found)
    ratios = ", ".join(f"{figure['ratio_to_best_bf16']:.2f}" for figure in found)
    words = f"Speedup of an all-to-all-v between two hosts over bfloat16: int8 {ratios} over {rates} Gbit/s"
    return f"![{words}](docs/links.svg)\n"


def tables() -> str:
    """Speedups between ranks of one host; large calls first."""
    found = {
        (ranks, figure["operation"], figure["rows"] or figure["size"] >> 20, figure["what"]): figure["of Open MPI"]
        for ranks in (2, 4)
        for figure in _figures(f"open_mpi_{ranks}")
    }
    exchange = [
        [str(ranks), way, *(f"{found[ranks, 'all_to_all_v', count, what]:.2f}" for count in _ROWS)]
        for ranks in (2, 4)
        for way, what in _WAYS.items()
    ]
    reduce = [
        [str(ranks), *(f"{found[ranks, 'all_reduce', size, _WAYS['int8']]:.2f}" for size in _SIZES)] for ranks in (2, 4)
    ]
    return (
        "All-to-all-v on one host, speedup over Open MPI, by rows of 8 KiB to each rank:\n\n"
        + _table(["ranks", "", *(f"{count:,} row{'s' * (count > 1)}" for count in _ROWS)], exchange)
        + "\nAll-reduce in int8 on one host, speedup over Open MPI's in float32:\n\n"
        + _table(["ranks", *(f"{size} MiB" for size in _SIZES)], reduce)
    )


def _figures(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["figures"]
    return found


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, ["---"] * len(head), *rows])


def page() -> str:
    """The README with its figures in their places."""
    written = TARGET.read_text()
    for mark, content in (("links", links()), ("figures", tables())):
        place = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- end -->)", re.DOTALL)
        written, places = place.subn(lambda found, content=content: found[1] + content + found[2], written)
        if places != 1:
            raise SystemExit(f"{places} places for {mark} in {TARGET.name}, expected one")
    return written


if __name__ == "__main__":
    TARGET.write_text(page())
