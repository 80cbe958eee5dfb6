"""Writes README.md's figures from the files in benchmarks/results: `python docs/write_readme_figures.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu"
TARGET = ROOT / "README.md"


def links() -> str:
    """The chart of slow links, which docs/draw_speedups.py draws, with its figures of int8 in words."""
    found = [figure for figure in _figures("link") if figure["transfer"] == "thinwire int8"]
    rates = ", ".join(figure["rate"].replace("gbit", "") for figure in found)
    ratios = ", ".join(f"{figure['ratio_to_best_bf16']:.2f}" for figure in found)
    words = f"Speedup of an all-to-all-v between two hosts over bfloat16: int8 {ratios} over {rates} Gbit/s"
    return f"![{words}](docs/links.svg)\n"


def _figures(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["figures"]
    return found


def page() -> str:
    """The README with its figures in their place."""
    place = re.compile(r"(<!-- links -->\n).*?(<!-- end -->)", re.DOTALL)
    written, places = place.subn(lambda found: found[1] + links() + found[2], TARGET.read_text())
    if places != 1:
        raise SystemExit(f"{places} places for links in {TARGET.name}, expected one")
    return written


if __name__ == "__main__":
    TARGET.write_text(page())
