"""Draws docs/error_bytes.png: what each wire format costs in bytes and in error. Measures it first, in seconds.

    PYTHONPATH=. python docs/draw_error_bytes.py

The figures are also written to benchmarks/results/cpu/error_bytes.json.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch

from benchmarks.error_bytes import CAPTION, draw_error_bytes, measure
from thinwire.tools.bench.plots import png
from thinwire.version import VERSION

ROOT = Path(__file__).parents[1]


def main() -> None:
    costs = measure()
    (ROOT / "docs" / "error_bytes.png").write_bytes(png(draw_error_bytes(costs)))
    content = {
        "command": "python docs/draw_error_bytes.py",
        "machine": {"thinwire": VERSION, "torch": torch.__version__},
        "caption": CAPTION,
        "figures": [dataclasses.asdict(cost) for cost in costs],
    }
    (ROOT / "benchmarks/results/cpu/error_bytes.json").write_text(json.dumps(content, indent=1) + "\n")
    for cost in costs:
        print(f"{cost.wire:10} {cost.bytes_an_element:.3f} {cost.relative_error:.4f} {cost.rows}")


if __name__ == "__main__":
    main()
