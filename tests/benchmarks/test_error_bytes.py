"""What the picture of bytes and errors shows is what the codec does; the documentation's pictures are up to date."""

from __future__ import annotations

import json
import re
import shutil
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


@pytest.mark.parametrize("script", ["docs/draw_dispatch_combine.py", "docs/draw_speedups.py"])
def test_drawings_are_what_their_scripts_draw_from_the_results(script: str) -> None:
    command = [sys.executable, script, "--check"]
    assert subprocess.run(command, cwd=ROOT).returncode == 0, f"draw it anew: python {script}"


def test_a_drawing_that_is_not_what_its_script_draws_is_found(tmp_path: Path) -> None:
    for name in ("docs", "benchmarks/results/cpu"):
        shutil.copytree(ROOT / name, tmp_path / name)
    results = tmp_path / "benchmarks/results/cpu/link.json"
    changed = json.loads(results.read_text())
    changed["figures"][-1]["ratio_to_best_bf16"] += 0.1
    results.write_text(json.dumps(changed))
    assert subprocess.run([sys.executable, "docs/draw_speedups.py", "--check"], cwd=tmp_path).returncode == 1


def test_the_charts_show_every_ratio_of_the_results() -> None:
    results = {name: json.loads((ROOT / f"benchmarks/results/cpu/{name}.json").read_text())["figures"] for name in (
        "link", "open_mpi_2", "open_mpi_4", "bench"
    )}  # fmt: skip
    links, open_mpi, one_host = ((ROOT / f"docs/{name}.svg").read_text() for name in ("links", "open_mpi", "one_host"))
    shown = re.findall(r'class="name">(\d\.\d\d)<', links)
    ratios = [f["ratio_to_best_bf16"] for f in results["link"] if f["transfer"].startswith("thinwire")]
    assert sorted(shown) == sorted(f"{ratio:.2f}" for ratio in ratios) and len(shown) == 9
    ways = {"thinwire/none/direct", "tw.empty/none/direct", "thinwire/int8/direct"}
    of_mpi = [
        f for ranks in (2, 4) for f in results[f"open_mpi_{ranks}"]
        if f["operation"] in ("all_to_all_v", "all_reduce") and f["what"] in ways
    ]  # fmt: skip
    assert len(of_mpi) > 40 and len(_marks(open_mpi)) == len(of_mpi) + 3  # and those of the legend
    operations = {f["operation"] for f in results["bench"]}
    assert len(operations) == 7 and len(_marks(one_host)) == 4 * len(operations) + 4


def _marks(drawing: str) -> list[str]:
    return re.findall(r'<circle|width="10" height="10"|l6\.5 -6\.5', drawing)


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
@pytest.mark.parametrize("name", ["dispatch_combine", "dispatch_combine_narrow", "links", "one_host", "open_mpi"])
def test_texts_stay_in_their_boxes_in_a_browser(name: str, tmp_path: Path) -> None:
    drawing = (ROOT / f"docs/{name}.svg").read_text()
    found = measured(_page_with(drawing), 1100, tmp_path, MEASURE_SVG)
    assert found == {"texts": drawing.count("<text "), "found": []}


def _page_with(drawing: str) -> str:
    return f"<!DOCTYPE html><html><head><title></title></head><body>{drawing}</body></html>"


@in_browser
@pytest.mark.exhaustive
def test_the_browser_sees_a_text_that_leaves_its_box(tmp_path: Path) -> None:
    body = _page_with((ROOT / "docs/dispatch_combine.svg").read_text())
    longer = body.replace("int8 from rank 1", "int8 sum of rank 1 and more")
    problems = measured(longer, 1100, tmp_path, MEASURE_SVG)["found"]
    assert set(problems) == {'"int8 sum of rank 1 and more" leaves its box'}
