"""Computes the most that the kernels' machine code allows, without a GPU: compiles and disassembles every kernel.

    python -m benchmarks.machine_code                                  # sm_80, sm_90 and sm_100, int8, 7168 columns
    python -m benchmarks.machine_code --kernels quantize dequantize --hidden 5121 --wires int8 fp8 --targets sm_90

Instructions and cycles are per 32 elements of a row, so one instruction per thread and element counts as 1. They follow
the longest path through the code that runs once for each row. A loop over a token's experts, sums or peers counts once;
`each` is the cost of every further one. `pipe` is how long the busiest pipe of a multiprocessor is occupied, in the
same unit: at 1, one instruction a cycle. `warps` is the number of warps that registers and shared memory let a
multiprocessor hold. `GB/s` is the rate that the longer of issue and pipe allows, in bytes of the wire, on all
multiprocessors and on 20; memory and links allow less. It is a ceiling, not a measurement. `sectors` is the number of
32-byte sectors that loads and stores request for each 128 bytes that they need, at least 4. It is found by running the
compiled code of kernels that work alone on the CPU, except for sm_100.

Assumptions about the hardware, which no tool reports: a multiprocessor has four parts, each of which issues one
instruction a cycle, of 32 lanes. Per part the ALU (integers, logic, comparisons, minima, conversions to narrower
floats) has 16 lanes; integer multiply-adds have 16; floats have 16 on sm_80 and 32 on later ones, which share the 16 of
the multiply-adds; functions and conversions between integers and floats have 4; loads, stores and shuffles have 8
lanes of 4 bytes. Registers: 65,536. Shared memory: 164 KiB on sm_80, 228 KiB on later ones.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton

from benchmarks import timing
from thinwire.triton_kernels.record import RecordLayout
from verification.ahead_of_time.harness import Launch, compile_launch, cuobjdump
from verification.ahead_of_time.matrix import (
    CODEC_KERNELS,
    COLLECTIVE_KERNELS,
    COLLECTIVE_ROWS,
    CONTROL_KERNELS,
    EXPERT_KERNELS,
    KERNELS,
    Case,
    launch_of,
)
from verification.ahead_of_time.sass import Code, Instruction, bytes_moved, instructions_of
from verification.ptx.device import Device
from verification.ptx.memory import GlobalMemory

#: Kernels that move no rows, of which there are figures of the whole alone.
OTHERS = (*CONTROL_KERNELS, *EXPERT_KERNELS)
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
    "sectors": "s",
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


def registers_of(compiled: Any) -> int:
    """Of a thread of what Triton compiled."""
    return int(re.search(r"REG:(\d+)", cuobjdump(compiled.asm["cubin"], "--dump-resource-usage"))[1])


def resident_warps(registers: int, warps: int, shared: int, gpu: Multiprocessor) -> int:
    """How many warps of programs of so many a multiprocessor holds."""
    per_warp = -(-registers // 8) * 8 * 32
    programs = min(65536 // (per_warp * warps), gpu.warps // warps, gpu.programs, gpu.shared_bytes // (shared + 1024))
    return programs * warps


def _widths(way: Iterable[Instruction], opcodes: tuple[str, ...]) -> str:
    counted = Counter(i.access_bytes for i in way if i.opcode in opcodes)
    return "+".join(f"{count}x{width}" for width, count in sorted(counted.items(), reverse=True)) or "-"


class _Counted(GlobalMemory):
    """Memory that counts what is asked of it; warps must come one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.sectors = self.octets = 0

    def offsets(self, addresses: np.ndarray, size: int, what: str) -> np.ndarray:
        distinct = np.unique(addresses.astype(np.int64))
        self.octets += size * len(distinct)
        self.sectors += len(np.unique(distinct // 32))  # no access crosses one
        return super().offsets(addresses, size, what)


def sectors_of(launch: Launch, target: str) -> float:
    """Sectors that a launch of four programs asks for, for each 128 bytes that it needs."""
    device = Device(target, warps="any order")
    device.memory = memory = _Counted()
    with device.patch():
        launch.kernel.run(grid=(4,), warmup=False, **launch.arguments, **launch.options)
    return 128 * memory.sectors / memory.octets


def figures_of(
    compiled: Any, target: str, elements: float, wire_bytes: float, strides: bool, together: int = 1
) -> dict[str, Any]:
    """The figures of a compiled kernel.

    Args:
        compiled: what Triton compiled for the target.
        elements: of a row, that one program handles on the way; 0 for a kernel that moves no rows.
        wire_bytes: of a record, for each element.
        strides: a program takes one row after the other.
        together: rows that the innermost loop takes at a time, of which one is to count.
    """
    gpu = GPUS[target]
    cubin, warps, shared = compiled.asm["cubin"], compiled.metadata.num_warps, compiled.metadata.shared
    code = Code(instructions_of(cuobjdump(cubin, "-sass")))
    registers = registers_of(compiled)
    head = code.row_loop() if strides else None
    body = None if head is None else code.loops[head]
    way = code.longest_way(head or 0, body)
    inner = _innermost(code, body, bytes_moved(way)) if elements else []
    cycles, instructions = Counter(pipe_cycles(way, gpu)), float(len(way))
    if together > 1:
        instructions -= len(inner) * (1 - 1 / together)
        for pipe, held in pipe_cycles(inner, gpu).items():
            cycles[pipe] -= held * (1 - 1 / together)
    busiest = max(cycles, key=lambda pipe: cycles[pipe])
    found = {
        "kernel name": compiled.metadata.name,
        "instructions": instructions,
        "cycles": dict(cycles),
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
        found["each"] = lanes * len(inner) / together
        found["issued"] = lanes * instructions
        found["pipe"] = lanes * max(cycles[busiest], instructions)
        per_second = gpu.count * 4 * 32 * gpu.hertz / found["pipe"] * wire_bytes
        found["GB/s"] = per_second / 1e9
        found["on 20"] = found["GB/s"] * FEW_MULTIPROCESSORS / gpu.count
    return found


def _innermost(code: Code, body: set[int] | None, moved: int) -> list[Instruction]:
    """The longest way through a loop within the body, with none in it, that moves a tenth of its bytes at least."""
    within = {head: loop for head, loop in code.loops.items() if body is None or loop < body}
    ways = {head: code.longest_way(head, loop) for head, loop in within.items()}
    moving = [head for head, way in ways.items() if bytes_moved(way) >= 0.1 * moved]
    innermost = [head for head in moving if not any(within[other] < within[head] for other in moving)]
    return max((ways[head] for head in innermost), key=len, default=[])


def examine(case: Case) -> dict[str, Any]:
    """The figures of one case of the matrix."""
    launch = launch_of(case)
    layout = next((value for value in launch.arguments.values() if isinstance(value, RecordLayout)), None)
    rows = layout is not None and case.kernel not in OTHERS
    elements, wire_bytes = (layout.HIDDEN / layout.NUM_TILES, layout.ROW_BYTES / layout.HIDDEN) if rows else (0, 0)
    compiled = compile_launch(launch, case.target)
    alone = case.kernel in CODEC_KERNELS
    together = launch.arguments.get("FLIGHT", 1)
    described = {"kernel": case.kernel, "wire": case.wire, "hidden": case.hidden, "target": case.target}
    figures = described | figures_of(compiled, case.target, elements, wire_bytes, not alone, together)
    # What runs compiled code here does not know the pairs of floats of sm_100.
    runs = alone and case.target != "sm_100"
    return figures | ({"sectors": sectors_of(launch, case.target)} if runs else {})


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
    parser.add_argument(
        "--kernels", nargs="+", default=list(KERNELS), metavar="KERNEL", help="of verification/ahead_of_time"
    )
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
    for line in shown:
        line["sectors"] = f"{line['sectors']:.1f}" if line["sectors"] else "-"
    timing.finish(options, "machine_code", {"triton": triton.__version__}, (shown, COLUMNS), figures)


if __name__ == "__main__":
    main()
