"""The figures of machine code are those of a kernel whose instructions are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="compiling kernels needs Triton")

from benchmarks import machine_code
from benchmarks.machine_code import GPUS, pipe_cycles, resident_warps
from tests.helpers.speeds import exhaustive_but
from verification.ahead_of_time.matrix import Case
from verification.ahead_of_time.sass import Instruction


def test_it_runs_and_writes_a_figure_for_every_case(tmp_path: Path) -> None:
    file = tmp_path / "machine_code.json"
    machine_code.main(["--kernels", "quantize", "--hidden", "2048", "--targets", "sm_80", "sm_90", "--json", str(file)])
    figures = json.loads(file.read_text())["figures"]
    assert [figure["target"] for figure in figures] == ["sm_80", "sm_90"]
    for figure in figures:
        # 2048 columns are 64 threads of 32: so many instructions a thread are as many by 32 an element.
        assert figure["issued"] == figure["instructions"] * 64 / 2048
        assert figure["pipe"] >= figure["issued"] and figure["shuffles"] >= 1


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


def test_a_pipe_of_sixteen_lanes_is_held_for_two_cycles() -> None:
    way = [
        Instruction(0, "", name, "") for name in ("LOP3.LUT", "IMAD.X", "FMUL", "I2F.S8", "LDG.E.128", "BRA", "UIADD3")
    ]
    later = {"ALU": 2, "multiply": 2, "float": 2, "function": 8, "memory": 16}
    assert pipe_cycles(way, GPUS["sm_90"]) == later
    assert pipe_cycles(way, GPUS["sm_80"]) == later | {"float": 4}


@pytest.mark.parametrize(
    ("registers", "warps", "shared", "resident"),
    [(32, 8, 0, 64), (72, 16, 0, 16), (96, 8, 0, 16), (32, 8, 64 << 10, 24)],
)
def test_registers_and_shared_memory_limit_resident_warps(
    registers: int, warps: int, shared: int, resident: int
) -> None:
    assert resident_warps(registers, warps, shared, GPUS["sm_90"]) == resident
