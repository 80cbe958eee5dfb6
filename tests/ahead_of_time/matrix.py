"""Every kernel for every GPU, compiled without one: `python -m tests.ahead_of_time.matrix [--jobs N]`.

Prints a table of registers, spills, fused multiply-adds and access widths, and exits non-zero where an assertion of
`check` fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch

from tests.ahead_of_time.harness import TARGETS, Report, compile_launch, inspect, record_launches
from thinwire.errors import TransportUnavailable
from thinwire.triton_kernels import codec, combine, pack
from thinwire.triton_kernels.support import require_wire_support
from thinwire.wire import WireFormat

KERNELS = ("quantize", "dequantize", "pack", "unpack", "pack_weighted_sums", "sum_records")
READERS = ("dequantize", "unpack", "sum_records")  # of records; the others write them
HIDDEN_SIZES = (2048, 5121, 7168)
OTHER_WIRES = ("int8:row", "int8:64", "int8:32", "int4", "fp8", "none")
OTHER_TARGETS = ("sm_90", "gfx942")


@dataclass(frozen=True)
class Case:
    """One kernel, for one wire, row length and GPU; bfloat16 rows."""

    kernel: str
    wire: str
    hidden: int
    target: str


def cases() -> Iterator[Case]:
    """int8 for every target and row length; the other wires at 7168 on one GPU of each maker."""
    for kernel in KERNELS:
        for target in TARGETS:
            for hidden in HIDDEN_SIZES:
                yield Case(kernel, "int8", hidden, target)
        for wire in OTHER_WIRES:
            for target in OTHER_TARGETS:
                yield Case(kernel, wire, 7168, target)


def _launcher(case: Case) -> tuple[Callable[..., None], tuple[object, ...]]:
    wire = WireFormat.parse(case.wire)
    rows, top_k = 4, 8
    x = torch.empty(rows, case.hidden, dtype=torch.bfloat16)
    records = torch.empty(rows, wire.row_bytes(case.hidden, x.dtype), dtype=torch.uint8)
    index = torch.zeros(rows, dtype=torch.int64)
    table = torch.zeros(rows, top_k, dtype=torch.int64)
    return {
        "quantize": (codec.quantize_rows, (x, wire, records)),
        "dequantize": (codec.dequantize_rows, (records, wire, x)),
        "pack": (pack.pack_rows, (x, wire, index, records)),
        "unpack": (pack.unpack_rows, (records, wire, index, index, x)),
        "pack_weighted_sums": (combine.pack_weighted_sums, (x, table, table.float(), wire, x.dtype, records)),
        "sum_records": (combine.sum_records, (records, table, wire, x)),
    }[case.kernel]


def compile_case(case: Case) -> Report:
    """Compiles one case and reads the machine code."""
    function, arguments = _launcher(case)
    (launch,) = record_launches(function, *arguments)
    return inspect(compile_launch(launch, case.target), case.target)


def check(case: Case, report: Report) -> list[str]:
    """What is wrong with a report; empty when nothing is."""
    faults = []
    if report.spills:
        faults.append(f"{report.spills} spills")
    if report.fused:
        faults.append(f"{report.fused} fused multiply-adds")
    # Rows of 5121 bfloat16 begin on odd addresses: only their records, 32-byte aligned, can move 16 bytes at a time.
    wide_load = case.hidden % 8 == 0 or case.kernel in READERS
    # Half a byte a column, 8192 columns over 8 wavefronts of 64 lanes: 8 bytes are all there is for a lane to load.
    narrow_payload = case.wire == "int4" and case.target.startswith("gfx") and case.kernel in READERS
    if wide_load and report.load_bytes < (8 if narrow_payload else 16):
        faults.append(f"loads of {report.load_bytes} bytes")
    wide_store = case.hidden % 8 == 0 or case.kernel not in READERS
    if wide_store and report.store_bytes < 8:
        faults.append(f"stores of {report.store_bytes} bytes")
    return faults


def _row(case: Case) -> tuple[Case, Report]:
    return case, compile_case(case)


def main() -> int:
    parser = argparse.ArgumentParser(description="compile every kernel for every GPU and check the machine code")
    parser.add_argument("--jobs", type=int, default=2, help="compile in this many processes (default 2)")
    jobs = parser.parse_args().jobs
    header = ("regs", "spills", "fma", "load", "store", "bar")
    print(f"{'kernel':20}{'wire':10}{'hidden':>7} {'target':8}" + "{:>5}{:>7}{:>5}{:>6}{:>6}{:>5}".format(*header))
    failures = 0
    with ProcessPoolExecutor(jobs) as pool:
        for case, report in pool.map(_row, list(cases()), chunksize=4):
            faults = check(case, report)
            failures += bool(faults)
            print(
                f"{case.kernel:20}{case.wire:10}{case.hidden:>7} {case.target:8}{report.registers:>5}{report.spills:>7}"
                f"{report.fused:>5}{report.load_bytes:>6}{report.store_bytes:>6}{report.barriers:>5}"
                + ("  <- " + ", ".join(faults) if faults else ""),
                flush=True,
            )
    try:
        require_wire_support(WireFormat.parse("fp8"), (8, 0))
    except TransportUnavailable as error:
        print(f"fp8 on sm_80: refused: {error}")
    else:
        failures += 1
        print("fp8 on sm_80: not refused")
    print(f"{len(list(cases())) - failures} passed, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
