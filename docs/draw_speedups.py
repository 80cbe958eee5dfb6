"""Draws the charts of speedups from the files in benchmarks/results/cpu: links.svg, open_mpi.svg, one_host.svg.

    python docs/draw_speedups.py            writes the pictures
    python docs/draw_speedups.py --check    exits non-zero where a picture is not what this draws

They bring their own white ground, so they read the same on a dark page, and are narrow enough for a telephone.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draw_dispatch_combine import text

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results" / "cpu"

WIDTH = 480
#: Where the charts' scales begin and end.
LEFT, RIGHT = 148, 462
STYLE = """
text { font: 14px system-ui, "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif; fill: #24292f }
.title { font-size: 16px; font-weight: 700 } .note { fill: #57606a; font-size: 13px } .name { font-weight: 700 }
.middle { text-anchor: middle } .end { text-anchor: end } .ground { fill: #fff; stroke: #d0d7de }
.stripe { fill: #f3f5f7 } .grid { stroke: #d8dee4 } .one { stroke: #24292f; stroke-width: 1.6 }
.range { stroke: #24292f; stroke-width: 1.2 } .line { stroke-width: 1.4 } .open { fill: #fff; stroke-width: 1.8 }
.exact { fill: #57606a; stroke: #57606a }
.int8 { fill: #0072b2; stroke: #0072b2 } .int4 { fill: #009e73; stroke: #009e73 }
.open.exact, .open.int8 { fill: #fff }
"""


@dataclass(frozen=True)
class Mark:
    """A ratio of a chart: its kind says colour and shape; `low` and `high` are the least and greatest of its runs."""

    kind: str
    ratio: float
    low: float
    high: float


def figures(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["figures"]
    return found


def line(kind: str, x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path d="M{x:.1f} {y:.1f} L{to_x:.1f} {to_y:.1f}" class="{kind}"/>'


def shape(kind: str, x: float, y: float) -> str:
    """A square for int8, a circle for exact rows; open ones are staged."""
    if "int8" in kind:
        return f'<rect x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10" class="{kind}"/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.2" class="{kind}"/>'


def drawn(title: str, height: float, parts: Sequence[str]) -> str:
    ground = f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1:g}" rx="10" class="ground"/>'
    body = "\n".join([f"<title>{title}</title>", f"<style>{STYLE}</style>", ground, *parts])
    size = f'width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}" role="img"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{body}\n</svg>\n'


def links() -> str:
    """Bars: an all-to-all-v between two hosts."""
    found = {(figure["rate"], figure["transfer"]): figure for figure in figures("link")}
    kinds = {"thinwire int4": "int4", "thinwire int8": "int8", "thinwire none": "exact"}
    scale = (RIGHT - 50 - LEFT) / max(max(figure["ratios_to_best_bf16"]) for figure in found.values())
    parts = [text(16, 30, "All-to-all-v between two hosts", "title")]
    parts += [text(16, 52, "Speedup over bfloat16 sent the fastest way; lines: 5 runs", "note")]
    y = 74.0
    for rate in dict.fromkeys(rate for rate, _ in found):
        parts.append(text(16, y + 42, rate.replace("gbit", " Gbit/s"), "name"))
        for transfer, kind in kinds.items():
            figure = found[rate, transfer]
            runs, ratio = figure["ratios_to_best_bf16"], figure["ratio_to_best_bf16"]
            width, end = scale * ratio, LEFT + scale * max(runs)
            parts.append(text(LEFT - 8, y + 17, kind, "end"))
            parts.append(f'<rect x="{LEFT}" y="{y:g}" width="{width:.1f}" height="22" class="{kind}"/>')
            parts.append(line("range", LEFT + scale * min(runs), y + 11, end, y + 11))
            parts.append(text(round(end + 8), y + 16, f"{ratio:.2f}", "name"))
            y += 26
        y += 18
    parts.insert(2, line("one", LEFT + scale, 66, LEFT + scale, y - 12))
    parts.append(text(LEFT + scale, y + 4, "bfloat16: 1", "middle note"))
    return drawn("Speedup of an all-to-all-v between two hosts over bfloat16", y + 18, parts)


def dots(
    title: str,
    note: str,
    legend: Sequence[tuple[str, str]],
    groups: Sequence[tuple[str, Sequence[tuple[str, Sequence[Mark]]]]],
    ticks: Sequence[float],
    other: str,
) -> str:
    """A row for each size or operation, with marks on a logarithmic scale: right of 1, thinwire was faster."""
    low, high = math.log(ticks[0] / 1.15), math.log(ticks[-1] * 1.1)

    def place(ratio: float) -> float:
        return LEFT + (RIGHT - LEFT) * (math.log(ratio) - low) / (high - low)

    parts = [text(16, 30, title, "title"), text(16, 52, note, "note")]
    x = 22.0
    for kind, words in legend:
        parts += [shape(kind, x, 72), text(x + 12, 77, words)]
        x += 36 + 7.4 * len(words)
    top = y = 92.0
    rows: list[str] = []
    for name, lines in groups:
        if name:
            rows.append(text(16, y + 22, name, "name"))
            y += 30
        for number, (label, marks) in enumerate(lines):
            height = 10 + 9 * len(marks)
            if number % 2 == 0:
                rows.append(f'<rect x="8" y="{y:g}" width="{WIDTH - 16}" height="{height}" class="stripe"/>')
            rows.append(text(LEFT - 10, y + height / 2 + 5, label, "end"))
            for step, mark in enumerate(marks):
                at = y + height / 2 + 9 * (step - (len(marks) - 1) / 2)
                if mark.high > mark.low:
                    rows.append(line(f"line {mark.kind}", place(mark.low), at, place(mark.high), at))
                rows.append(shape(mark.kind, place(mark.ratio), at))
            y += height
        y += 6
    scale = [line("one" if tick == 1 else "grid", place(tick), top, place(tick), y) for tick in ticks]
    labels = [text(round(place(tick)), y + 18, f"{tick:g}", "middle" + " name" * (tick == 1)) for tick in ticks]
    ends = [text(LEFT, y + 38, f"< {other} faster", "note"), text(RIGHT, y + 38, "thinwire faster >", "end note")]
    stripes = [row for row in rows if "stripe" in row]
    return drawn(
        title, y + 52, [*parts, *stripes, *scale, *(row for row in rows if row not in stripes), *labels, *ends]
    )


def open_mpi() -> str:
    kinds = {"thinwire/none/direct": "exact", "thinwire/int8/direct": "int8"}
    groups = []
    for ranks in (2, 4):
        found = {(f["operation"], f["size"], f["what"]): f for f in figures(f"open_mpi_{ranks}")}
        for operation, title in (("all_to_all_v", "all-to-all-v, rows of 8 KiB"), ("all_reduce", "all-reduce")):
            rows = []
            for size in sorted({size for done, size, _ in found if done == operation}, reverse=True):
                contenders = [(kind, found.get((operation, size, what))) for what, kind in kinds.items()]
                marks = [Mark(kind, f["of Open MPI"], f["low"], f["high"]) for kind, f in contenders if f]
                count = found[operation, size, "Open MPI/none"]["rows"]
                label = f"{count:,} row{'s' * (count > 1)}" if count else f"{size >> 20} MiB"
                rows.append((label, marks))
            groups.append((f"{ranks} ranks, {title}", rows))
    legend = (("exact", "none"), ("int8", "int8"))
    note = "Ranks share two cores. Lines: from the least to the most"
    return dots("Beside Open MPI, on one host", note, legend, groups, (0.05, 0.1, 0.2, 0.5, 1, 2, 4), "Open MPI")


def one_host() -> str:
    found = [figure for figure in figures("bench") if figure["implementation"] == "thinwire" and figure["speedup"]]
    lines: dict[str, list[Mark]] = {}
    for operation in dict.fromkeys(figure["operation"] for figure in found):
        of_it = [figure for figure in found if figure["operation"] == operation]
        size = max(figure["size_bytes"] for figure in of_it)
        for transport in ("direct", "staged"):
            for wire, kind in (("none", "exact"), ("int8", "int8")):
                for figure in of_it:
                    if (figure["size_bytes"], figure["transport"], figure["wire"]) == (size, transport, wire):
                        ratio = figure["speedup"]
                        mark = Mark(kind + " open" * (transport == "staged"), ratio, ratio, ratio)
                        lines.setdefault(operation, []).append(mark)
    legend = (("exact", "none"), ("int8", "int8"), ("exact open", "none, staged"), ("int8 open", "int8, staged"))
    note = "4 ranks share two cores; the larger size of each table"
    return dots("Beside gloo, on one host", note, legend, [("", list(lines.items()))], (0.5, 1, 2, 4, 8, 16), "gloo")


PICTURES = {"links.svg": links, "open_mpi.svg": open_mpi, "one_host.svg": one_host}


def main() -> int:
    stale = 0
    for name, draw in PICTURES.items():
        path, content = HERE / name, draw()
        if "--check" in sys.argv[1:]:
            stale += not path.exists() or path.read_text() != content
        else:
            path.write_text(content)
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main())
