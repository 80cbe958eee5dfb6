"""Puts the recorded demo table into the README: `python -m benchmarks.readme_table`.

Record it with `python -m thinwire demo --json benchmarks/results/cpu/demo.json`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from thinwire.demo import WireScore, format_table

ROOT = Path(__file__).parents[1]
_TABLE = re.compile(r"(<!-- demo table -->\n```\n).*?(\n?```\n<!-- end -->)", re.DOTALL)


def recorded_table() -> str:
    """The table of benchmarks/results/cpu/demo.json."""
    recorded = json.loads((ROOT / "benchmarks" / "results" / "cpu" / "demo.json").read_text())
    return format_table(recorded["unsharded_bits_per_byte"], [WireScore(**score) for score in recorded["scores"]])


def with_table(readme: str) -> str:
    """The README's text with the recorded table in its place."""
    return _TABLE.sub(lambda match: f"{match[1]}{recorded_table()}\n```\n<!-- end -->", readme)


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(with_table(path.read_text()))
