"""The examples that run models, and the page that shows their figures."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown(name: str) -> str:
    """A table of the page."""
    found = re.search(rf"<!-- {name} table -->\n```\n(.*?)\n```", (ROOT / "docs" / "models.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_page_shows_the_recorded_fine_tuning():
    recorded = json.loads((RESULTS / "fine_tune.json").read_text())
    assert shown("fine-tuning") == example("fine_tune").table(recorded["runs"])


def test_the_page_shows_the_recorded_generation():
    recorded, generate = json.loads((RESULTS / "generate.json").read_text()), example("generate")
    tables = [
        generate.table("the model that thinwire ships", recorded["tiny_moe"], 0),
        generate.table("SmolLM2 split into experts", recorded["ranks"], recorded["tokens"]),
    ]
    assert shown("generation") == "\n\n".join(tables)


@pytest.mark.exhaustive
def test_fine_tuning_runs_and_learns(tmp_path: Path):
    figures = tmp_path / "figures.json"
    options = ("--steps", "4", "--windows", "1", "--lr", "1e-3", "--held-out-bytes", "300", "--json", str(figures))
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "fine_tune.py"), *options], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    runs = json.loads(figures.read_text())["runs"]
    assert runs.keys() == {"none", "int8 forward", "int8 both ways"}
    for run in runs.values():
        assert run["losses"] == pytest.approx(runs["none"]["losses"], rel=0.01)
        assert run["held_out"][1] != run["held_out"][0]
    assert runs["int8 forward"]["losses"][1:] != runs["int8 both ways"]["losses"][1:] != runs["none"]["losses"][1:]
    assert runs["int8 forward"]["losses"][0] == runs["int8 both ways"]["losses"][0]  # before the first backward
