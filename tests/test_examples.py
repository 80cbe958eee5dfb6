"""The examples run as they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_sharded_layer_gives_what_the_whole_one_gives() -> None:
    command = [sys.executable, str(ROOT / "examples" / "sharded_layer.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"(\w+): relative error .*? outputs (.*)", done.stdout)
    errors = {wire: figures.split(", ") for wire, figures in shown}
    assert all(float(error) < 1e-6 for error in errors["none"])
    assert all(0.004 < float(error) < 0.012 for error in errors["int8"])
