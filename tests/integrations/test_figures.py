"""The table in docs/integrations.md is what `python -m tests.integrations.models` wrote; without transformers too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HEAD = """\
| family | ranks | none: logits | gradients | all_to_all: both | int8: a layer | other experts |
|---|---|---|---|---|---|---|
"""


def table(figures: list[dict[str, Any]], use: str) -> str:
    """A line for each model and number of ranks, of the worst rank, parameter and layer."""
    lines = HEAD
    for found in (each for each in figures if each["use"] == use):
        exact, stock, int8 = (found[name] for name in ("thinwire:none", "all_to_all", "thinwire:int8"))
        lines += (
            f"| {found['family']} | {found['ranks']} | {exact['logits']:.1e} | {max(exact['gradients'].values()):.1e} "
            f"| {stock['logits']:.1e}, {max(stock['gradients'].values()):.1e} "
            f"| {max(int8['layers']):.4f} | {int8['flips']} of {int8['routed']} |\n"
        )
    return lines


def test_the_tables_are_the_recorded_ones() -> None:
    figures = json.loads((ROOT / "benchmarks" / "results" / "cpu" / "transformers.json").read_text())["figures"]
    text = (ROOT / "docs" / "integrations.md").read_text()
    for use in ("a batch each", "one batch"):
        assert table(figures, use) in text, table(figures, use)
    assert all(found["thinwire:none"]["tokens_equal"] and found["thinwire:none"]["flips"] == 0 for found in figures)
    assert f"{sum(found['thinwire:int8']['tokens_equal'] for found in figures)} of {len(figures)}" in text
