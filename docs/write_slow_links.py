"""Writes the table of docs/slow-links.md, in seconds and measuring nothing: `python docs/write_slow_links.py`."""

from __future__ import annotations

import re
from pathlib import Path

from thinwire.tools.planning.crossing import count_crossings
from thinwire.tools.planning.plan import Request

TARGET = Path(__file__).parent / "slow-links.md"
_ROWS = ((2, "uniform"), (4, "uniform"), (8, "uniform"), (2, "zipf:1"), (4, "zipf:1"), (8, "zipf:1"))


def table() -> str:
    """What crosses in combine, whose messages are records alone, and how evenly."""
    lines = [
        "| hosts x ranks | routing | bfloat16, one level | int8, one level | int8, two levels "
        "| busiest link, one level | two levels | messages |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for hosts, routing in _ROWS:
        request = Request(8 * hosts, 256, 8, 7168, 4096, "int8", hosts=hosts)
        found = count_crossings(request, routing)
        legs = {(leg.wire, leg.level): leg for leg in found.legs if leg.name == "combine"}
        shown = [legs["none", "one level"], legs["int8", "one level"], legs["int8", "two levels"]]
        cells = [f"{leg.token_bytes / 1e3:.1f} KB" for leg in shown] + [f"{leg.imbalance:.2f} x" for leg in shown[1:]]
        messages = f"{found.form} ({found.host_share:.2f})"
        lines.append(f"| {hosts} x 8 | {routing} | {' | '.join(cells)} | {messages} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """All of the page."""
    return re.sub(
        r"(<!-- table of crossings -->\n\n).*?\n\n", lambda m: m[1] + table() + "\n", TARGET.read_text(), flags=re.S
    )


if __name__ == "__main__":
    TARGET.write_text(page())
