"""What the machine code of the kernels allows at most, known without a GPU: every kernel is compiled and disassembled.

    python -m benchmarks.machine_code                                  # sm_80, sm_90 and sm_100, int8, 7168 columns
    python -m benchmarks.machine_code --kernels quantize dequantize --hidden 5121 --wires int8 fp8 --targets sm_90

Instructions and cycles are per element of a row, times 32, so that one instruction a thread and element is 1. They are
of the longest way through what is executed once for each row, where a loop over a token's experts, sums or peers counts
once; `each` is what every further one of them costs. `pipe` is how long the busiest of a multiprocessor's pipes is
held, in the same unit: at 1, one instruction a cycle. `warps` is how many of them registers and shared memory let a
multiprocessor hold. `GB/s` is what the longer of issue and pipe allows, in bytes of the wire, on all multiprocessors
and on 20 of them; memory and links allow less. It is a ceiling and not a measurement.

What is assumed of the hardware, which is in no tool: a multiprocessor has four parts, each of which issues one
instruction a cycle, of 32 lanes. Per part the ALU (integers, logic, comparisons, minima, conversions to narrower
floats) has 16 lanes; integer multiply-adds have 16; floats have 16 on sm_80 and 32 on later ones, which share the 16 of
the multiply-adds; functions and conversions between integers and floats have 4; loads, stores and shuffles have 8
lanes of 4 bytes. Registers: 65,536. Shared memory: 164 KiB on sm_80, 228 KiB on later ones.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a file
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

import triton

from benchmarks import timing
from tests.ahead_of_time.harness import compile_launch, cuobjdump
from tests.ahead_of_time.matrix import (
    CODEC_KERNELS,
    COLLECTIVE_KERNELS,
    COLLECTIVE_ROWS,
    CONTROL_KERNELS,
    EXPERT_KERNELS,
    KERNELS,
    Case,
    launch_of,
)
from tests.ahead_of_time.sass import Code, Instruction, bytes_moved, instructions_of
from thinwire.triton_kernels.record import RecordLayout

#: Kernels that move no rows, of which there are figures of the whole alone.
OTHERS = (*CONTROL_KERNELS, "check_planes", *EXPERT_KERNELS)
FEW_MULTIPROCESSORS = 20  # what a kernel gets that runs beside a matrix product
COLUMNS = {
    "kernel": "s",
    "wire": "s",
    "hidden": "d",
    "target": "s",
    "issued": ".1f",
    "pipe": ".1f",
    "busiest": "s",
    "each": ".1f",
    "loads": "s",
    "stores": "s",
    "shuffles": "d",
    "barriers": "d",
    "registers": "d",
    "warps": "d",
    "GB/s": ".0f",
    "on 20": ".0f",
}


@dataclass(frozen=True)
class Multiprocessor:
    """What is assumed of a GPU. `float_lanes` is per part; those above 16 do no integers."""

    count: int
    hertz: float
    float_lanes: int
    shared_bytes: int
    warps: int = 64
    programs: int = 32


GPUS = {
    "sm_80": Multiprocessor(108, 1.41e9, 16, 164 << 10),  # A100 SXM
    "sm_90": Multiprocessor(132, 1.70e9, 32, 228 << 10),  # H100 SXM
    "sm_100": Multiprocessor(148, 1.85e9, 32, 228 << 10),  # B200
}
_FLOATS = {"FADD", "FMUL", "FFMA", "FADD2", "FMUL2", "FFMA2", "HADD2", "HMUL2", "HFMA2"}
_FUNCTIONS = {"MUFU", "I2F", "F2I", "I2FP", "F2F", "POPC"}
_MULTIPLIERS = {"IMAD", "IDP"}
_MEMORY = {"LDG", "LD", "STG", "ST", "LDS", "STS", "ATOM", "ATOMG", "RED", "SHFL", "REDUX", "LDSM", "STSM"}
# What no pipe of a part's lanes does: control, barriers, and what is done once for a warp.
_NEITHER = {"BRA", "EXIT", "BAR", "BSSY", "BSYNC", "BREAK", "CALL", "RET", "NOP", "WARPSYNC", "MEMBAR", "ERRBAR"}
_NEITHER |= {"LDC", "LDCU", "S2R", "S2UR", "CCTL", "DEPBAR", "YIELD", "R2UR", "LDGDEPBAR", "FENCE"}


def pipe_cycles(way: Iterable[Instruction], gpu: Multiprocessor) -> dict[str, float]:
    """Cycles for which each pipe of a multiprocessor's part is held by one warp that goes this way."""
    cycles: Counter[str] = Counter()
    for instruction in way:
        opcode = instruction.opcode
        if opcode in _FLOATS:
            cycles["float"] += 32 / gpu.float_lanes
        elif opcode in _MULTIPLIERS:
            cycles["multiply"] += 2
            cycles["float"] += 32 / gpu.float_lanes
        elif opcode in _FUNCTIONS:
            cycles["function"] += 8
        elif opcode in _MEMORY:
            cycles["memory"] += max(4, instruction.access_bytes)
        elif opcode not in _NEITHER and not re.match(r"U[A-Z]", opcode):  # of the uniform pipe
            cycles["ALU"] += 2
    return dict(cycles)


def resident_warps(registers: int, warps: int, shared: int, gpu: Multiprocessor) -> int:
    """How many warps of programs of so many a multiprocessor holds."""
    per_warp = -(-registers // 8) * 8 * 32
    programs = min(65536 // (per_warp * warps), gpu.warps // warps, gpu.programs, gpu.shared_bytes // (shared + 1024))
    return programs * warps


def _widths(way: Iterable[Instruction], opcodes: tuple[str, ...]) -> str:
    counted = Counter(i.access_bytes for i in way if i.opcode in opcodes)
    return "+".join(f"{count}x{width}" for width, count in sorted(counted.items(), reverse=True)) or "-"


def figures_of(compiled: Any, target: str, elements: float, wire_bytes: float, strides: bool) -> dict[str, Any]:
    """The figures of a compiled kernel.

    Args:
        compiled: what Triton compiled for the target.
        elements: of a row, that one program handles on the way; 0 for a kernel that moves no rows.
        wire_bytes: of a record, for each element.
        strides: a program takes one row after the other.
    """
    gpu = GPUS[target]
    cubin, warps, shared = compiled.asm["cubin"], compiled.metadata.num_warps, compiled.metadata.shared
    code = Code(instructions_of(cuobjdump(cubin, "-sass")))
    registers = int(re.search(r"REG:(\d+)", cuobjdump(cubin, "--dump-resource-usage"))[1])
    head = code.row_loop() if strides else None
    body = None if head is None else code.loops[head]
    way = code.longest_way(head or 0, body)
    cycles = pipe_cycles(way, gpu)
    busiest = max(cycles, key=lambda pipe: cycles[pipe])
    found = {
        "kernel name": compiled.metadata.name,
        "instructions": len(way),
        "cycles": cycles,
        "busiest": busiest,
        "loads": _widths(way, ("LDG", "LD")),
        "stores": _widths(way, ("STG", "ST")),
        "shuffles": sum(i.opcode in ("SHFL", "REDUX") for i in way),
        "barriers": sum(i.opcode == "BAR" for i in way),
        "registers": registers,
        "shared bytes": shared,
        "program warps": warps,
        "warps": resident_warps(registers, warps, shared, gpu),
    }
    if elements:
        lanes = 32 * warps / elements
        # Loops within, that move rows: of those within each other the innermost.
        inner = [
            other
            for other in code.loops
            if body is None or code.loops[other] < body
            if bytes_moved(code.longest_way(other, code.loops[other])) >= 0.1 * bytes_moved(way)
        ]
        innermost = [one for one in inner if not any(code.loops[other] < code.loops[one] for other in inner)]
        found["each"] = lanes * max((len(code.longest_way(one, code.loops[one])) for one in innermost), default=0)
        found["issued"] = lanes * len(way)
        found["pipe"] = lanes * max(cycles[busiest], len(way))
        per_second = gpu.count * 4 * 32 * gpu.hertz / found["pipe"] * wire_bytes
        found["GB/s"] = per_second / 1e9
        found["on 20"] = found["GB/s"] * FEW_MULTIPROCESSORS / gpu.count
    return found


def examine(case: Case) -> dict[str, Any]:
    """The figures of one case of the matrix."""
    launch = launch_of(case)
    layout = next((value for value in launch.arguments.values() if isinstance(value, RecordLayout)), None)
    rows = layout is not None and case.kernel not in OTHERS
    elements, wire_bytes = (layout.HIDDEN / layout.NUM_TILES, layout.ROW_BYTES / layout.HIDDEN) if rows else (0, 0)
    compiled = compile_launch(launch, case.target)
    described = {"kernel": case.kernel, "wire": case.wire, "hidden": case.hidden, "target": case.target}
    return described | figures_of(compiled, case.target, elements, wire_bytes, case.kernel not in CODEC_KERNELS)


def cases(options: argparse.Namespace) -> list[Case]:
    """What the options ask for."""
    found = []
    for kernel in options.kernels:
        sizes = COLLECTIVE_ROWS[-1:] if kernel in COLLECTIVE_KERNELS else options.hidden
        for target in options.targets:
            for wire in options.wires:
                found += [Case(kernel, wire, hidden, target) for hidden in sizes]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = timing.parser(__doc__, repeats=None)
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), metavar="KERNEL", help="of tests/ahead_of_time")
    parser.add_argument("--targets", nargs="+", default=list(GPUS), choices=list(GPUS))
    parser.add_argument("--wires", nargs="+", default=["int8"], metavar="WIRE")
    parser.add_argument("--hidden", nargs="+", type=int, default=[7168], help="of a row; collectives have 4096")
    parser.add_argument("--jobs", type=int, default=1, help="compile in this many processes (default 1)")
    options = parser.parse_args(arguments)
    if options.jobs == 1:
        figures = [examine(case) for case in cases(options)]
    else:
        with ProcessPoolExecutor(options.jobs) as pool:
            figures = list(pool.map(examine, cases(options)))
    shown = [{name: figure.get(name, 0) for name in COLUMNS} for figure in figures]
    timing.finish(options, "machine_code", {"triton": triton.__version__}, (shown, COLUMNS), figures)


if __name__ == "__main__":
    main()
