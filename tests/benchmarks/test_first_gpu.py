"""The first run on a GPU, with steps made up here: what a run that is cut off leaves, and how it goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
#: The program with other steps, on a GPU that is not there: each runs lines of Python.
PROGRAM = """
import json, sys
from benchmarks import first_gpu, timing
steps = json.loads(sys.argv.pop(1))
first_gpu.STEPS = {
    name: (limit, tuple(("timeit", "-n1", "-r1", code) for code in codes)) for name, (limit, *codes) in steps.items()
}
first_gpu._LEAST_SECONDS = 0.5
timing.check_device, timing.machine = (lambda name: name), (lambda device: dict(gpu="none"))
sys.exit(first_gpu.main())
"""


def _named(word: str) -> list[int]:
    """Processes that have the word in their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [int(path.parent.name)] * (word.encode() in path.read_bytes())
    return found


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_failures_hangs_and_cuts_are_noted_nothing_is_left_and_what_is_left_to_do_is_done(
    how: signal.Signals, tmp_path: Path
) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    ends, fails, word = "print('ended')", "raise ValueError('as asked')", f"{600 + os.getpid() / 1e7 + how / 1e9:.9f}"
    leaves = f"import subprocess; subprocess.Popen(['sleep', '{word}'])"
    hangs = f"{leaves}; import time; time.sleep(600)"

    def start(steps: dict[str, tuple[Any, ...]], *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, json.dumps(steps), "--out", str(tmp_path), *options]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def outcomes() -> dict[str, list[Any]]:
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert summary["machine"] == {"gpu": "none"} and "commit" in summary
        return {name: step["status"] for name, step in summary["steps"].items()}

    steps = {"a": (60, fails), "b": (60, leaves), "c": (4, ends, hangs), "d": (600, hangs), "e": (60, ends)}
    before = {"a": [1], "b": [0], "c": [0, "stopped after 4 s"]}
    process, deadline = start(steps), time.monotonic() + 120
    while not (tmp_path / "d.txt").exists() or len(_named(word)) < 3:  # the program, the step and its child
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    process.send_signal(how)
    process.communicate(timeout=60)
    while left := _named(word):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
    assert outcomes() == before | {"d": ["cut off"]} and (tmp_path / "c.txt").read_text().count("ended") == 1
    process = start(steps | {"d": (60, ends), "e": (60, fails)}, "--from", "d")
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and "Traceback" not in printed, printed
    assert outcomes() == before | {"d": [0], "e": [1]}
