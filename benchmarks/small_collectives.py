"""Reckons what small collectives take in one launch and in several, from latencies of instructions; needs no GPU.

    python -m benchmarks.small_collectives --json benchmarks/results/small_collectives.json

The compiled kernels of rank 0 of 8 run on the CPU, all programs of them, with the flags of all peers there before they
are looked for. Times are those of `benchmarks.latency` for 8 x H100, in microseconds: `least` is launches in a graph,
paths, and flags on their way; `most` also counts cold instructions. Of several launches, one that waits begins while
flags fly; in one launch the flight of each leg's flag is added.

    KiB                         of the whole tensor in bfloat16, of 8 ranks
    launches                    of several kernels, one after the other
    least, most of several      of these
    programs                    of the kernel that does all of it
    least, most of one          of that
    ratio                       most of several launches, divided by that of one
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import triton

from benchmarks import timing
from benchmarks.latency import FLIGHT, MOST_PROGRAMS, SM_90, reckon, resident_programs
from tests.helpers.collective_calls import Call
from thinwire.fused.collective import collective_layout
from thinwire.fused.partition import split_parts
from thinwire.triton_kernels import collective, signal
from thinwire.triton_kernels.leg_layout import (
    ALL_GATHER,
    ALL_REDUCE,
    HEADER_SIGNATURE,
    REDUCE_SCATTER,
    SIGNATURE_WORDS,
    Endpoint,
)
from thinwire.triton_kernels.signal import REPORT_STATUS, RUNNING, SIGNAL_LINE_BYTES
from thinwire.triton_kernels.small_collective import programs_that_fit
from verification.ptx.collectives import register_ends
from verification.ptx.device import Device

RANKS, OPS = 8, {"all_reduce": ALL_REDUCE, "reduce_scatter": REDUCE_SCATTER, "all_gather": ALL_GATHER}
COLUMNS = {
    "op": "s", "wire": "s", "KiB": "d", "launches": "d", "least of several": ".1f", "most of several": ".1f",
    "programs": "d", "least of one": ".1f", "most of one": ".1f", "ratio": ".2f",
}  # fmt: skip


def meter(call: Call, at_once: bool) -> tuple[int, int, float, float]:
    """Launches of a call, programs of the last one, and its least and most time in microseconds."""
    layout = collective_layout(RANKS, on_gpu=True)
    buffers = [torch.zeros(layout.NUM_BYTES, dtype=torch.uint8) for _ in range(RANKS)]
    buffer_ptrs = torch.tensor([buffer.data_ptr() for buffer in buffers])
    ends = [Endpoint.of(layout, rank, buffer, buffer_ptrs) for rank, buffer in enumerate(buffers)]
    device, end, job = Device(metered=True), ends[0], call.job()
    register_ends(device, ends)
    lines = end.buffer[layout.HEADERS : layout.HALVES].view(torch.int32)
    halves = lines.view(-1, SIGNAL_LINE_BYTES // 4)[: 2 * RANKS].view(2, RANKS, -1)
    halves[:, 1:, 0] = torch.tensor([[2], [1]])
    said = halves[:, 1:, HEADER_SIGNATURE : HEADER_SIGNATURE + 2 * SIGNATURE_WORDS]
    said[:] = torch.tensor(job.signature).view(torch.int32)
    x, out = call.tensors(0)
    if at_once:
        programs = programs_that_fit(job, RANKS, SM_90.count)
        if not programs:
            raise SystemExit(f"{call} is too large for one launch")
        call = replace(call, num_programs=programs, at_once=True)
    with mock.patch.object(signal, "most_programs", lambda device, programs=None: MOST_PROGRAMS), device.patch():
        call.launch(end, job, x, out, 1.0, 0.1)
    assert end.report[REPORT_STATUS] == RUNNING
    least = most = 0.0
    for launch in device.meters:
        flight = FLIGHT if launch.kernel == collective.wait_kernel.__name__ else 0.0
        line = reckon(launch, resident_programs(device.compiled[launch.kernel]), 0.0, flight)
        legs = (1 + (call.op == ALL_REDUCE)) * at_once
        least, most = least + line["least"] + 1e6 * legs * FLIGHT, most + line["most"] + 1e6 * legs * FLIGHT
    return len(device.meters), device.meters[-1].programs, least, most


def table(op: str, wire: str, kib: int) -> dict[str, Any]:
    """A line of the table."""
    parts, row = split_parts(kib * 512, RANKS)
    call = Call(OPS[op], tuple(parts.counts), wire, wire, torch.bfloat16, row, rows_per_chunk=64)
    launches, _, least, most = meter(call, False)
    _, programs, least_at_once, most_at_once = meter(call, True)
    return {
        "op": op, "wire": wire, "KiB": kib, "launches": launches, "least of several": least, "most of several": most,
        "programs": programs, "least of one": least_at_once, "most of one": most_at_once, "ratio": most / most_at_once,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser: argparse.ArgumentParser = timing.parser(__doc__, repeats=None)
    parser.add_argument("--kib", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=OPS)
    parser.add_argument("--wires", nargs="+", default=["int8"], choices=["int8", "fp8", "none"])
    options = parser.parse_args(arguments)
    lines = [table(op, wire, kib) for op in options.ops for wire in options.wires for kib in options.kib]
    timing.finish(options, "small_collectives", {"triton": triton.__version__}, (lines, COLUMNS), lines)


if __name__ == "__main__":
    main()
