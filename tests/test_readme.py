"""What the README shows is what happens."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.record_demo import recorded_table, with_table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROSE = " ".join(README.split())


def _example() -> str:
    block = re.search(r"```python\n(import torch, thinwire as tw\n.*?)```", README, re.DOTALL)
    assert block is not None
    return block[1]


@pytest.mark.exhaustive
def test_the_usage_example_is_ten_lines_and_runs_alone_and_on_two_ranks(tmp_path: Path) -> None:
    example = _example()
    assert len(example.splitlines()) <= 10
    script = tmp_path / "example.py"
    script.write_text(example + "assert y.shape == (64, 256) and y.isfinite().all() and y.any()\ncomm.close()\n")
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": "1",
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for command in ([], launcher):
        done = subprocess.run([sys.executable, *command, str(script)], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_demo_table_is_the_recorded_one() -> None:
    assert recorded_table() in README and with_table(README) == README


def test_the_measured_figures_are_those_of_the_files() -> None:
    results = ROOT / "benchmarks" / "results" / "cpu"
    ratios = {
        (figure["ranks"], figure["rows"], figure["transfer"]): figure["ratio"]
        for figure in json.loads((results / "all_to_all.json").read_text())["figures"]
    }
    for wire in ("none", "int8"):
        cells = " | ".join(f"{ratios[2, rows, f'direct {wire}']:.1f}" for rows in (1, 64, 4096, 8192))
        assert f"| direct, `{wire}` | {cells} |" in README
    link = {
        (figure["rate"], figure["transfer"]): figure
        for figure in json.loads((results / "link.json").read_text())["figures"]
    }
    slow, fast = (link[rate, "thinwire int8"] for rate in ("1gbit", "10gbit"))
    assert f"int8 is {slow['ratio_to_best_bf16']:.2f} times as fast" in PROSE
    assert f"and {slow['ratio_to_all_to_all']:.2f} times as fast" in PROSE
    assert f"{fast['ratio_to_best_bf16']:.2f}." in PROSE


def test_the_figures_of_all_reduce_are_those_of_the_files() -> None:
    results = ROOT / "benchmarks" / "results" / "cpu"
    ratios = {
        (figure["ranks"], figure["logical_bytes"], figure["way"]): figure["ratio_to_bf16"]
        for figure in json.loads((results / "all_reduce.json").read_text())["figures"]
    }
    for wire, gather in (("none", "none"), ("int8", "none"), ("int8", "int8")):
        sizes = (1 << 10, 256 << 10, 4 << 20, 64 << 20)
        cells = " | ".join(f"{ratios[2, size, f'direct {wire}, {gather}']:.1f}" for size in sizes)
        assert f"| direct, `{wire}` and `{gather}` | {cells} |" in README
    link = {
        (figure["where"], figure["way"]): f"{figure['ratio_to_bf16']:.2f}"
        for figure in json.loads((results / "all_reduce_link.json").read_text())["figures"]
    }
    one, both = "staged int8, none", "staged int8, int8"
    assert f"it is {link['1gbit', one]} times as fast with a 16-bit gather" in PROSE
    assert f"and {link['1gbit', both]} times with int8 on both legs" in PROSE
    assert f"at 10 Gbit/s {link['10gbit', one]} and {link['10gbit', both]}." in PROSE


def test_every_file_the_readme_points_to_is_there() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
