"""Kernels stay as lean as they are, by their machine code."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="compiling kernels needs Triton")

from benchmarks import machine_code
from benchmarks.machine_code import GPUS
from tests.helpers.speeds import exhaustive_but
from verification.ahead_of_time.matrix import Case

#: The most instructions and cycles for each element, and the fewest resident warps, of int8 and 7168 columns. Launches
#: have four programs a multiprocessor at most: of gather, 32 warps.
LEAN = {
    "quantize": (10, 11, 32),
    "dequantize": (8, 9, 64),
    "gather": (9, 11, 32),
    "send_tokens": (12, 12, 24),
    "send_sums": (24, 24, 32),
    "sum_home": (14, 14, 32),
}


@pytest.mark.parametrize("target", exhaustive_but(["sm_90"], list(GPUS)))
@pytest.mark.parametrize("kernel", exhaustive_but(["dequantize"], list(LEAN)))
def test_kernels_stay_as_lean_as_they_are(kernel: str, target: str) -> None:
    figures = machine_code.examine(Case(kernel, "int8", 7168, target))
    instructions, cycles, warps = LEAN[kernel]
    assert figures["issued"] <= instructions and figures["pipe"] <= cycles and figures["warps"] >= warps, figures
