"""Runs the demo, records its figures, and puts its table into the quick start: `python -m benchmarks.record_demo`."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import torch

from benchmarks import timing
from thinwire.tools.cli import main
from thinwire.tools.commands.demo import format_table
from thinwire.tools.demo.tiny_moe import WireScore

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "benchmarks" / "results" / "cpu" / "demo.json"
PAGE = ROOT / "docs" / "quick-start.md"
_TABLE = re.compile(r"(<!-- demo table -->\n```\n).*?(\n?```\n<!-- end -->)", re.DOTALL)


def recorded_table() -> str:
    """The table of the recorded figures."""
    recorded = json.loads(FIGURES.read_text())
    return format_table(recorded["unsharded_bits_per_byte"], [WireScore(**score) for score in recorded["scores"]])


def with_table(page: str) -> str:
    """The page's text with the recorded table in its place."""
    return _TABLE.sub(lambda match: f"{match[1]}{recorded_table()}\n```\n<!-- end -->", page)


def record() -> None:
    """Runs the demo as a user would and writes the figures, with the machine and the commit, and the page."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "demo.json"
        if main(["demo", "--json", str(path)]):
            raise SystemExit("the demo failed; nothing was recorded")
        figures = json.loads(path.read_text())
    timing.write_json(FIGURES, **figures | {"machine": timing.machine(torch.device("cpu"))})
    PAGE.write_text(with_table(PAGE.read_text()))


if __name__ == "__main__":
    record()
