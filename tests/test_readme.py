"""What the README shows is what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.record_demo import PAGE, recorded_table, with_table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def _example() -> tuple[str, str]:
    block = re.search(r"```python\n(import torch, thinwire as tw\n.*?)```.*?```text\n(.*?)```", README, re.DOTALL)
    assert block is not None
    return block[1], block[2]


@pytest.mark.exhaustive
def test_the_usage_example_is_short_and_runs_alone_and_prints_on_two_ranks_what_is_shown(tmp_path: Path) -> None:
    example, shown = _example()
    assert len(example.splitlines()) <= 15
    script = tmp_path / "example.py"
    script.write_text(example)
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": "1",
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for command, printed in ([], "relative error 0.010\nsent 0 bytes, in float32 0\n"), (launcher, shown):
        done = subprocess.run([sys.executable, *command, str(script)], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout == printed


def test_the_demo_table_is_the_recorded_one() -> None:
    page = PAGE.read_text()
    assert recorded_table() in page and with_table(page) == page
