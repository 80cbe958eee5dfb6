"""The litmus test of message passing, under Triton's interpreter: right rounds pass, an early flag is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="its kernels are Triton's")

import torch

ROOT = Path(__file__).parents[2]


def _run(*options: str, interpreted: bool = True) -> tuple[int, str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    environment["TRITON_INTERPRET"] = "1" if interpreted else "0"
    command = [sys.executable, "-m", "benchmarks.gpu_litmus", *options]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )
    return done.returncode, done.stdout


def test_rounds_pass_with_one_program_and_several_at_both_scopes() -> None:
    code, printed = _run("--device", "cpu", "--rounds", "5", "--programs", "1", "3")
    assert code == 0 and printed.endswith("\n0 numbers were wrong\n"), printed
    rows = [line.split() for line in printed.splitlines() if line.split()[0] in ("gpu", "sys")]
    # One round goes before the others, to load the kernels.
    assert rows == [[scope, programs, "6", str(6 * 4 * 256), "0"] for scope in ("gpu", "sys") for programs in "13"]


def test_a_flag_that_comes_before_the_numbers_is_found() -> None:
    for _ in range(5):  # on a busy machine no peer may look in time
        code, printed = _run("--device", "cpu", "--rounds", "20", "--programs", "3", "--early")
        if code:
            break
    assert code == 1 and "Traceback" not in printed and not printed.endswith("\n0 numbers were wrong\n"), printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_and_without_the_interpreter_it_says_what_it_needs() -> None:
    code, printed = _run(interpreted=False)
    assert code != 0 and "--device cuda needs a GPU" in printed and "Traceback" not in printed
    code, printed = _run("--device", "cpu", interpreted=False)
    assert code != 0 and "--device cpu needs TRITON_INTERPRET=1" in printed and "Traceback" not in printed
