"""The first run on a GPU, with steps made up here: their order and limits, and what a run that is cut off leaves."""

from __future__ import annotations

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
#: A module that notes its name and its process, and one of its children's, and then does as it was told.
STEP = """
import os, subprocess, sys, time
name, what = sys.argv[1:]
child = subprocess.Popen(["sleep", "600"])
with open("begun", "a") as file:
    print(name, os.getpid(), child.pid, file=file, flush=True)
os.write(1, f"output of {name}\\n".encode())  # at once: another one may write there, too
while what == "hangs":
    time.sleep(1)
if what != "leaves":
    child.kill()
sys.exit(what == "fails")
"""
#: The program with other steps, on a GPU that is not there.
PROGRAM = """
import json, sys
from benchmarks import first_gpu, timing
steps = json.loads(sys.argv.pop(1))
first_gpu.STEPS = {
    name: (limit, tuple(("a_step", name, what) for what in whats)) for name, (limit, *whats) in steps.items()
}
first_gpu._LEAST_SECONDS = 0.5
timing.check_device, timing.machine = (lambda name: name), (lambda device: {"gpu": "none"})
sys.exit(first_gpu.main())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_step.py").write_text(STEP)
    return tmp_path


def _start(steps: dict[str, tuple[Any, ...]], *options: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([".", str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, "-c", PROGRAM, json.dumps(steps), "--out", "out", *options]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _run(steps: dict[str, tuple[Any, ...]], *options: str) -> tuple[int, dict[str, list[Any]]]:
    process = _start(steps, *options)
    printed, _ = process.communicate(timeout=120)
    assert "Traceback" not in printed, printed
    return process.returncode, _outcomes()


def _outcomes() -> dict[str, list[Any]]:
    """Each step's status, out of a file that is whole."""
    summary = json.loads(Path("out/summary.json").read_text())
    assert summary["machine"] == {"gpu": "none"} and "commit" in summary
    return {name: step["status"] for name, step in summary["steps"].items()}


def _begun() -> list[str]:
    file = Path("begun")
    return [line.split()[0] for line in file.read_text().splitlines()] if file.exists() else []


def _none_is_left() -> bool:
    """Whether no process of a step, nor a child of one, is there in a few seconds."""
    pids = [pid for line in Path("begun").read_text().splitlines() for pid in line.split()[1:]]
    until = time.monotonic() + 20
    while alive := [pid for pid in pids if _is_alive(pid)]:
        if time.monotonic() > until:
            for pid in alive:
                os.kill(int(pid), signal.SIGKILL)
            return False
        time.sleep(0.02)
    return len(pids) > 0


def _is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_steps_run_in_order_and_a_failure_or_a_child_left_behind_stops_none() -> None:
    steps = {"a": (60, "fails"), "b": (60, "leaves"), "c": (60, "ends", "ends")}
    assert _run(steps) == (1, {"a": [1], "b": [0], "c": [0, 0]})
    assert _begun() == ["a", "b", "c", "c"] and _none_is_left()
    assert Path("out/c.txt").read_text().count("output of c") == 2


def test_a_step_that_hangs_is_killed_with_its_children_and_the_next_begins() -> None:
    assert _run({"a": (8, "ends", "hangs"), "b": (60, "ends")}) == (1, {"a": [0, "stopped after 8 s"], "b": [0]})
    assert _begun()[-1] == "b" and _none_is_left()


@pytest.mark.parametrize(("cut", "how"), [("a", signal.SIGTERM), ("b", signal.SIGKILL)])
def test_a_run_that_is_cut_off_leaves_its_steps_until_then_and_none_of_their_processes(
    cut: str, how: signal.Signals
) -> None:
    steps = {name: (600, "hangs" if name == cut else "ends") for name in "abc"}
    process = _start(steps)
    while cut not in _begun():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(how)
    process.communicate(timeout=60)
    before = [name for name in "abc" if name < cut]
    assert _outcomes() == {**{name: [0] for name in before}, cut: ["cut off"]}
    assert _none_is_left()
    # What is left to do is done from there, and the file tells of all.
    steps[cut] = (600, "ends")
    assert _run(steps, "--from", cut) == (0, {name: [0] for name in "abc"})
    assert _begun() == [*before, cut, *(name for name in "abc" if name >= cut)]


def test_without_a_gpu_nothing_begins() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_gpu"], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 1 and "needs a GPU" in done.stderr
