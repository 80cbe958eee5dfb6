"""What the picture of bytes and errors shows is what the codec does; the documentation's pictures are up to date."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="pictures need matplotlib")
import torch

from benchmarks.error_bytes import GAUSSIAN, MODEL, OUTLIERS, WIRES, Cost, draw_error_bytes, measure
from benchmarks.error_bytes import model_activations as activations
from tests.bench.test_plots import require_legible
from tests.bench.test_report import in_browser, measured
from thinwire.moe.tiny import load_tiny_moe
from thinwire.wire import WireFormat

ROOT = Path(__file__).parents[2]


def by_kind(costs: list[Cost]) -> dict[tuple[str, str], Cost]:
    return {(cost.wire, cost.rows): cost for cost in costs}


@pytest.mark.exhaustive
def test_errors_are_those_of_the_formats() -> None:
    costs = by_kind(measure())
    assert len(costs) == 3 * len(WIRES)
    # What uniform rounding of Gaussian rows gives by theory, and bfloat16 on top; a tenth of it either way.
    for wire, error in (("int8:32", 0.0056), ("int8", 0.0066), ("int8:row", 0.0092), ("fp8", 0.0257), ("int4", 0.097)):
        assert costs[wire, GAUSSIAN].relative_error == pytest.approx(error, rel=0.1)
    for kind in (GAUSSIAN, OUTLIERS, MODEL):
        assert costs["none", kind].relative_error == 0 and costs["none", kind].bytes_an_element == 2
    assert costs["int8:row", OUTLIERS].relative_error > 5 * costs["int8", OUTLIERS].relative_error
    assert costs["int8", MODEL].hidden == 256
    assert costs["int8", MODEL].bytes_an_element == WireFormat.parse("int8").row_bytes(256) / 256


@pytest.mark.exhaustive
def test_the_committed_figures_are_what_is_measured() -> None:
    held = json.loads((ROOT / "benchmarks/results/cpu/error_bytes.json").read_text())["figures"]
    for cost, committed in zip(measure(), held, strict=True):
        assert committed == vars(cost) | {"relative_error": pytest.approx(cost.relative_error, rel=1e-3)}


def test_activations_are_what_enters_every_moe_layer() -> None:
    rows, model = activations(windows=1), load_tiny_moe()
    tokens, width = model.config.context, model.config.hidden_size
    assert rows.shape == (model.config.num_layers * tokens, width) and rows.unique(dim=0).shape[0] > tokens
    # RMS norms make every row as long as their weights do.
    norms = [block.moe_norm.weight for block in model.blocks]  # type: ignore[union-attr]
    for weight, layer in zip(norms, rows.split(tokens), strict=True):
        assert torch.allclose((layer / weight).square().mean(1), torch.ones(tokens), atol=1e-2)


def made_up() -> list[Cost]:
    return [
        Cost(wire, rows, 256, 2 - place / 8, 0.0 if wire == "none" else 0.004 * 2**place)
        for place, wire in enumerate(WIRES)
        for rows in (GAUSSIAN, OUTLIERS, MODEL)
    ]


def test_the_picture_is_legible_and_shows_every_cost() -> None:
    made = draw_error_bytes(made_up()).canvas
    require_legible(made)
    bars, dots = made.axes
    assert [label.get_text() for label in bars.get_yticklabels()] == list(WIRES)
    drawn = sorted(line.get_xdata()[0] for line in dots.lines)
    assert drawn == sorted(cost.relative_error for cost in made_up() if cost.relative_error)
    assert [text.get_text() for text in dots.texts] == ["exact"]


def test_the_picture_of_dispatch_and_combine_is_what_its_script_draws() -> None:
    command = [sys.executable, "docs/draw_dispatch_combine.py", "--check"]
    assert subprocess.run(command, cwd=ROOT).returncode == 0, "draw it anew: python docs/draw_dispatch_combine.py"


#: Every text within the picture, within each box that its middle is in, and apart from the others.
MEASURE_SVG = """<script>
const found = [], svg = document.querySelector('svg');
const texts = [...svg.querySelectorAll('text')].map((text) => [text.textContent, text.getBBox()]);
const within = (a, b, room) => a.x >= b.x + room && a.y >= b.y && a.x + a.width <= b.x + b.width - room
  && a.y + a.height <= b.y + b.height;
const rects = [...svg.querySelectorAll('rect')].map((rect) => rect.getBBox());
texts.forEach(([name, a], i) => {
  rects.forEach((b) => {
    const x = a.x + a.width / 2, y = a.y + a.height / 2;
    const inside = x > b.x && x < b.x + b.width && y > b.y && y < b.y + b.height;
    if (inside && !within(a, b, 4)) found.push(`"${name}" leaves its box`);
  });
  for (const [other, b] of texts.slice(0, i))
    if (a.x < b.x + b.width && b.x < a.x + a.width && a.y + 3 < b.y + b.height && b.y + 3 < a.y + a.height)
      found.push(`"${name}" overlaps "${other}"`);
});
document.title = 'measured ' + JSON.stringify({texts: texts.length, found});
</script>"""


@in_browser
@pytest.mark.exhaustive
def test_texts_stay_in_their_boxes_in_a_browser(tmp_path: Path) -> None:
    drawing = (ROOT / "docs/dispatch_combine.svg").read_text()
    body = f"<!DOCTYPE html><html><head><title></title></head><body>{drawing}</body></html>"
    found = measured(body, 1100, tmp_path, MEASURE_SVG)
    assert found == {"texts": drawing.count("<text "), "found": []}
    longer = body.replace("int8 of rank 1", "int8 sum of rank 1 and more")
    problems = measured(longer, 1100, tmp_path, MEASURE_SVG)["found"]
    assert set(problems) == {'"int8 sum of rank 1 and more" leaves its box'}
