"""Writes the tables of docs/slow-links.md, in seconds and measuring nothing: `python docs/write_slow_links.py`.

What two levels gain is from benchmarks/results/cpu/two_level.json; without that file the page has no such section.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.tools.planning.crossing import count_crossings
from thinwire.tools.planning.plan import Request

TARGET = Path(__file__).parent / "slow-links.md"
MEASURED = Path(__file__).parents[1] / "benchmarks" / "results" / "cpu" / "two_level.json"
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


_SECTION = """\
## What two levels gain

The hosts are network namespaces of one machine, joined by a limited link. Times are medians in ms. A ratio is the
median of {runs} runs, in brackets the least and the greatest. The bfloat16 of rounds is one level in the format `none`,
that of collectives torch.distributed over Gloo. MB are what a host sent in a call, in brackets what was predicted.
Where `busy` is near 1, the {cores} cores that both hosts share are the limit, not the link; hosts with cores of their
own gain more. A round has {host_tokens} tokens of {hidden} elements a host, each for {top_k} of {experts} experts.
Collectives have {mebibytes} MiB of bfloat16 a rank.

{table}
*Source: `{command}`, commit {commit}, {cpus} x {cpu}, torch {torch}:
[two_level.json](../benchmarks/results/cpu/two_level.json).*

"""


def gains(found: Mapping[str, Any]) -> str:
    """A line for each way to take two levels, beside one level, from what `bench_two_level` wrote."""
    lines = [
        "| link | hosts x ranks | operation | bfloat16 | int8, one level | two levels | over bfloat16 | over int8 "
        "| MB, one level | MB, two levels | busy |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    by_way = {(each["rate"], each["ranks_per_host"], each["operation"], each["way"]): each for each in found["figures"]}
    for (*of, way), two in by_way.items():
        if not way.startswith("two levels"):
            continue
        baselines = "one level none" if of[2] == "round" else "gloo bf16", "one level int8"
        bf16, int8 = (by_way[(*of, baseline)] for baseline in baselines)
        wire = way.removeprefix("two levels").replace(" int8", "").strip()
        cells = [f"{of[0].removesuffix('gbit')} Gbit/s", f"2 x {of[1]}", f"{of[2]}{wire and f' ({wire})'}"]
        cells += [f"{each['seconds'] * 1e3:,.0f}" for each in (bf16, int8, two)]
        for ratios in (two["ratios_to_bf16"], two["ratios_to_int8"]):
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
        cells += [f"{each['payload_bytes'] / 1e6:.1f} ({each['predicted_bytes'] / 1e6:.1f})" for each in (int8, two)]
        lines.append(f"| {' | '.join(cells)} | {two['machine']:.2f} |")
    return "\n".join(lines) + "\n"


def section() -> str:
    """What two levels gain, if that was measured."""
    if not MEASURED.exists():
        return ""
    found = json.loads(MEASURED.read_text())
    return _SECTION.format(**found["machine"] | found, table=gains(found))


def page() -> str:
    """All of the page."""
    text = TARGET.read_text()
    for name, content in (("table of crossings", table() + "\n"), ("what two levels gain", section())):
        text = re.sub(
            rf"(<!-- {name} -->\n\n).*?(?=<!-- end -->)", lambda m, content=content: m[1] + content, text, flags=re.S
        )
    return text


if __name__ == "__main__":
    TARGET.write_text(page())
