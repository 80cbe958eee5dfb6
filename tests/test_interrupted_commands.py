"""Ctrl-C ends a command at once: one line says so, and no rank stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.files import kill_marked, marked

_LIMIT = 240.0  # seconds; kernels may have to be compiled before a stage is reached
_SETTLING = 30.0  # seconds that an ended process may take to be gone
_DEMO = ("demo", "--ranks", "2", "--wire", "int8")
#: What shells show as 130: the status, or where Python saw the interrupt in an extension module's import, the signal.
_STATUSES = (130, -signal.SIGINT)


@contextmanager
def _started(command: tuple[str, ...], tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command as a foreground job, in a process group of its own, and the mark of all its processes."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-m", "thinwire", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"MARK_OF_A_TEST": mark, "TRITON_CACHE_DIR": str(tmp_path)},
        start_new_session=True,
    )
    try:
        yield process, mark
    finally:
        kill_marked(mark)
        process.communicate()


def _interrupt_at(stage: str, process: subprocess.Popen[str]) -> list[str]:
    """Sends the whole group a SIGINT once that stage is told; returns what is told from then on."""
    assert process.stderr is not None
    told = []
    for line in process.stderr:
        told.append(line)
        if stage in line:
            os.killpg(process.pid, signal.SIGINT)
            break
    else:
        raise AssertionError(f"{stage!r} was not told, but {told}")
    _, rest = process.communicate(timeout=_LIMIT)
    return rest.splitlines()


@pytest.mark.parametrize(
    ("command", "stage"),
    [
        pytest.param(_DEMO, "loading torch", id="demo, torch is loaded"),
        pytest.param(_DEMO, "starting 2 ranks", id="demo, ranks start"),
        pytest.param(_DEMO, "scoring with int8", id="demo, ranks work", marks=pytest.mark.exhaustive),
        pytest.param(("doctor",), "2 CPU ranks, processes", id="doctor", marks=pytest.mark.exhaustive),
        pytest.param(
            ("warmup", "--arch", "sm_90", *"--ranks 8 --experts 8 --top-k 2 --hidden 64 --max-tokens 64".split()),
            "what is launched",
            id="warmup",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_ctrl_c_ends_a_command_in_one_line(command: tuple[str, ...], stage: str, tmp_path: Path) -> None:
    if command[0] == "warmup":
        pytest.importorskip("triton", reason="it compiles Triton's kernels")
    with _started(command, tmp_path) as (process, mark):
        told = _interrupt_at(stage, process)
        stages = [line for line in told if line.startswith("[")]
        assert [line for line in told if line not in stages] == ["thinwire: stopped"]
        assert process.returncode in _STATUSES
        deadline = time.monotonic() + _SETTLING
        while left := marked(mark):
            assert time.monotonic() < deadline, f"still running: {left}"
            time.sleep(0.05)


def test_ctrl_c_while_ranks_are_being_started_has_no_traceback_of_theirs(tmp_path: Path) -> None:
    """At any moment of their start: the server that imports torch, and ranks, are in the foreground job at first."""
    for delay in (0.2, 0.8, 1.6, 3.0):
        with _started(_DEMO, tmp_path) as (process, _):
            assert process.stderr is not None
            while "starting 2 ranks" not in process.stderr.readline():
                assert process.poll() is None
            time.sleep(delay)
            os.killpg(process.pid, signal.SIGINT)
            _, rest = process.communicate(timeout=_LIMIT)
        assert "Traceback" not in rest and rest.endswith("thinwire: stopped\n")
        assert process.returncode in _STATUSES
