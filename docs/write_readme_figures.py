"""Writes README.md's table of figures from the files in benchmarks/results: `python docs/write_readme_figures.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu"
TARGET = ROOT / "README.md"

_PLACE = re.compile(r"(<!-- figures -->\n).*?(<!-- end -->)", re.DOTALL)
_RATES = ("1gbit", "2.5gbit", "10gbit")
_ROWS = (1, 64, 1024, 8192)
_SIZES = (1 << 20, 16 << 20, 64 << 20)


def table() -> str:
    """What stands between the marks."""
    links = {(figure["rate"], figure["transfer"]): figure["ratio_to_best_bf16"] for figure in _figures("link")}
    lines = [
        ("All-to-all-v in int8 between two hosts, a link of 1, 2.5, 10 Gbit/s", "bfloat16, the fastest way")
        + (_in_a_row(links[rate, "thinwire int8"] for rate in _RATES),)
    ]
    for ranks in (2, 4):
        found = {
            (figure["operation"], figure["what"], figure["rows"] or figure["size"]): figure["of Open MPI"]
            for figure in _figures(f"open_mpi_{ranks}")
        }
        rows = ", ".join(map(str, _ROWS))
        for text, what in (
            (f"All-to-all-v, {ranks} ranks of a host, {rows} rows of 8 KiB to each", "thinwire/none/direct"),
            ("The same into `tw.empty`", "tw.empty/none/direct"),
            ("The same in int8", "thinwire/int8/direct"),
        ):
            lines.append((text, "Open MPI", _in_a_row(found["all_to_all_v", what, count] for count in _ROWS)))
        ratios = _in_a_row(found["all_reduce", "thinwire/int8/direct", size] for size in _SIZES)
        lines.append((f"All-reduce in int8, {ranks} ranks, 1, 16, 64 MiB", "Open MPI, float32", ratios))
    head = ["| on two cores | compared with | speedup |\n", "| --- | --- | --- |\n"]
    return "".join(head + [f"| {' | '.join(line)} |\n" for line in lines])


def _figures(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["figures"]
    return found


def _in_a_row(ratios: Any) -> str:
    return ", ".join(f"{ratio:.2f}" for ratio in ratios)


def page() -> str:
    """The README with the table in its place."""
    written, places = _PLACE.subn(lambda found: found[1] + table() + found[2], TARGET.read_text())
    assert places == 1, f"{places} places for figures in {TARGET.name}"
    return written


if __name__ == "__main__":
    TARGET.write_text(page())
