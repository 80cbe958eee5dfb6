"""Compiles every kernel for every GPU, without a GPU: `python -m verification.ahead_of_time.matrix [--jobs N]`.

Prints a table of registers, spills, fused multiply-adds and access widths. Exits non-zero if an assertion of `check`
fails.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.helpers.rounds import make_lanes
from thinwire.errors import TransportUnavailable
from thinwire.fused.backend import require_wire_support
from thinwire.fused.channel import channel_layout
from thinwire.fused.collective import collective_layout
from thinwire.triton_kernels import all_to_all_v, collective, combine, dispatch, pack, permute, reach, sums
from thinwire.triton_kernels.expert_gemm import INNER_WIRE, expert_gemm
from thinwire.triton_kernels.forward import forward_tokens
from thinwire.triton_kernels.int8_weights import Int8Weights
from thinwire.triton_kernels.leg_layout import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    SIGNATURE_WORDS,
    Endpoint,
    Job,
)
from thinwire.triton_kernels.list_records import list_records
from thinwire.triton_kernels.record import RecordLayout
from thinwire.triton_kernels.round_layout import COMBINE, DISPATCH
from thinwire.triton_kernels.small_collective import in_one_launch
from thinwire.wire import EXACT, WireFormat
from verification.ahead_of_time.harness import (
    TARGETS,
    Launch,
    Report,
    compile_launch,
    inspect,
    inspect_signals,
    record_launches,
)

CODEC_KERNELS = ("quantize", "dequantize", "pack", "unpack", "pack_weighted_sums", "sum_records")
ROUND_KERNELS = ("send_tokens", "gather", "send_sums", "sum_home")
#: Of a round over two levels: `send_tokens` that leaves a message for other hosts, and sums of floats.
TWO_LEVEL_KERNELS = ("send_message", "forward_tokens", "send_floats", "sum_floats")
#: Of the direct all-to-all-v: the first pieces with their header, and a piece of the ring, which is given back.
CHANNEL_KERNELS = ("send_rows", "recv_rows")
#: Of the direct collectives. `reduce` gives its sums to a tensor, `reduce_and_send_to_all` to all ranks.
COLLECTIVE_KERNELS = ("scatter", "send_to_all", "reduce", "reduce_and_send_to_all", "gather_recv")
#: The same of little data, in one launch; not on AMD's GPUs.
SMALL_KERNELS = {"all_reduce": ALL_REDUCE, "reduce_scatter": REDUCE_SCATTER, "all_gather": ALL_GATHER}
#: Products of experts: gate and the other half, whose rows are quantised again, and what follows; with few rows each.
EXPERT_KERNELS = ("gate_and_up", "gate_and_up_few", "down", "down_few")
#: Kernels that take experts' rows as records, too.
RECORD_KERNELS = ("send_sums", "pack_weighted_sums")
#: Kernels that move rows.
KERNELS = CODEC_KERNELS + ROUND_KERNELS + CHANNEL_KERNELS + COLLECTIVE_KERNELS
READERS = ("dequantize", "unpack", "sum_records", "gather", "sum_home", "recv_rows")  # of records; others write them
#: Kernels that copy exact rows, of any dtype.
COPIERS = ("send_bytes", "recv_bytes")
#: Kernels that move none, and do not depend on the wire or the row length.
ROUND_CONTROL_KERNELS = ("reach", "wait_dispatch", "wait_combine", "close_round", "count", "place", "list_records")
LEG_WAITS = ("wait_first_leg", "wait_second_leg")  # of collectives
CONTROL_KERNELS = (*ROUND_CONTROL_KERNELS, *LEG_WAITS, "note")
CONTROL_KERNELS += ("wait_headers", "wait_room", "wait_pieces", *COPIERS)
#: Has no floats, but AMD divides integers with them.
DIVIDER = "note"
#: Kernels that signal peers once.
PUBLISHERS = ("send_tokens", "send_sums", "close_round", *CHANNEL_KERNELS, *COPIERS)
PUBLISHERS += ("scatter", "send_to_all", "reduce_and_send_to_all", "send_message", "forward_tokens", "send_floats")
#: Of the collectives, those that read records.
RECEIVERS = ("reduce", "reduce_and_send_to_all", "gather_recv")
HIDDEN_SIZES = (2048, 5121, 7168)
#: Elements of a row of the collectives.
COLLECTIVE_ROWS = (1024, 4096)
OTHER_WIRES = ("int8:row", "int8:64", "int8:32", "int4", "fp8", "none")
OTHER_TARGETS = ("sm_90", "gfx942")
#: Blocks that are rotated, on sm_100, too, where pairs of floats take more registers; bit planes; and both.
BLOCK_TARGETS = {"int8+h64": ("sm_90", "sm_100"), "int6+h64": OTHER_TARGETS, "int10": ("sm_90",)}


@dataclass(frozen=True)
class Case:
    """One kernel, for one wire, row length and GPU, of a round's forward or backward; bfloat16 rows."""

    kernel: str
    wire: str
    hidden: int
    target: str
    backward: bool = False  # a lane that carries gradients of router weights
    invariant: bool = False  # a lane to which each expert's row comes home by itself
    rows: str = "floats"  # of experts, for the kernels of RECORD_KERNELS; "records", or "as they are"


def cases() -> Iterator[Case]:
    """int8 for every target and row length; the other wires at the longest on one GPU of each maker."""
    for kernel in KERNELS:
        sizes = COLLECTIVE_ROWS if kernel in COLLECTIVE_KERNELS else HIDDEN_SIZES
        for target in TARGETS:
            for hidden in sizes:
                yield Case(kernel, "int8", hidden, target)
        for wire in OTHER_WIRES:
            if kernel in CHANNEL_KERNELS and wire == "none":
                continue  # see COPIERS
            for target in OTHER_TARGETS:
                yield Case(kernel, wire, sizes[-1], target)
        for wire in ("int8", "int8+h64") if kernel in ("send_sums", "sum_home") else ():
            for target in OTHER_TARGETS:
                yield Case(kernel, wire, sizes[-1], target, invariant=True)
        for wire in BLOCK_TARGETS if kernel not in ("pack", "unpack") else ():
            for target in BLOCK_TARGETS[wire]:
                yield Case(kernel, wire, sizes[-1], target)
    for kernel in SMALL_KERNELS:
        for target in (target for target in TARGETS if target.startswith("sm_")):
            for hidden in COLLECTIVE_ROWS:
                yield Case(kernel, "int8", hidden, target)
        for wire in (*OTHER_WIRES, *BLOCK_TARGETS):
            yield Case(kernel, wire, COLLECTIVE_ROWS[-1], "sm_90")
    for kernel in (*CONTROL_KERNELS, *TWO_LEVEL_KERNELS):
        for target in TARGETS:
            yield Case(kernel, "int8", 7168, target)
    for kernel in EXPERT_KERNELS:
        gate = kernel.startswith("gate")
        for target in TARGETS:
            for hidden in HIDDEN_SIZES[1:] if gate else HIDDEN_SIZES[:1]:
                yield Case(kernel, "int8" if gate else str(INNER_WIRE), hidden, target)
        for wire in ("int8:row", "int8:32", "int8:256") if gate else ():
            for target in OTHER_TARGETS:
                yield Case(kernel, wire, HIDDEN_SIZES[-1], target)
    for kernel in RECORD_KERNELS:
        for rows in ("records", "as they are") if kernel == "send_sums" else ("records",):
            for target in TARGETS:
                yield Case(kernel, "int8", HIDDEN_SIZES[-1], target, rows=rows)
            for wire in OTHER_WIRES[:-1]:  # `none` has no records
                for target in OTHER_TARGETS:
                    yield Case(kernel, wire, HIDDEN_SIZES[-1], target, rows=rows)


def _round_launcher(case: Case) -> tuple[Callable[..., None], tuple[object, ...], int]:
    """The launcher of a kernel of the direct round, its arguments, and which of its launches the kernel is."""
    top_k, tokens = 8, 128
    x = torch.empty(tokens, case.hidden, dtype=torch.bfloat16)
    lane = make_lanes(
        8, 256, top_k, case.hidden, tokens, case.wire, weight_grads=case.backward, invariant=case.invariant
    )[0]
    if case.kernel in TWO_LEVEL_KERNELS:
        layout = replace(lane.layout, MEMBERS=4, SUM_BYTES=EXACT.row_bytes(case.hidden, torch.float32))
        message = torch.empty(layout.MESSAGE_RECORDS, dtype=torch.int8)
        lane = replace(lane, layout=layout, message=message, combine_wire=EXACT)
    ids = torch.zeros(tokens, top_k, dtype=torch.int64)
    out = _expert_rows(case, x)
    sends = lane, out, x.dtype, None, lane.weights if case.backward else None, case.rows == "as they are"
    return {
        "reach": (reach.exchange, (0, lane.buffer, torch.zeros(8).long(), 2.0), 0),
        "send_tokens": (dispatch.send_tokens, (lane, x, ids, ids.float()), 0),
        "wait_dispatch": (dispatch.wait, (lane, DISPATCH, 30.0, 1.0), 0),
        "count": (permute.route, (lane,), 0),
        "place": (permute.route, (lane,), 1),
        "gather": (permute.gather, (lane, x, torch.tensor(False)), 0),
        "list_records": (list_records, (lane, ids, ids.float(), ids[:, :2].clone()), 0),
        "send_sums": (combine.send_sums, sends, 0),
        "close_round": (dispatch.close_round, (lane,), 0),
        "wait_combine": (dispatch.wait, (lane, COMBINE, 30.0, 1.0), 0),
        "sum_home": (combine.sum_home, (lane, x, ids.float() if case.backward else None), 0),
        "send_message": (dispatch.send_tokens, (lane, x, ids, ids.float()), 0),
        "forward_tokens": (forward_tokens, (lane, lane.message, 4, x.dtype), 0),
        "send_floats": (combine.send_sums, (lane, x, torch.float32), 0),
        "sum_floats": (combine.sum_home, (lane, x.float()), 0),
    }[case.kernel]


def _expert_rows(case: Case, x: torch.Tensor) -> torch.Tensor:
    if case.rows == "floats":
        return x
    return torch.empty(len(x), WireFormat.parse(case.wire).row_bytes(case.hidden), dtype=torch.uint8)


def _channel_launcher(case: Case) -> tuple[Callable[..., None], tuple[object, ...], int]:
    """The same for a kernel of the direct all-to-all-v."""
    layout = channel_layout(8, 4 << 20)
    end = Endpoint.of(layout, 0, torch.zeros(0, dtype=torch.uint8), torch.zeros(8).long())
    x, signature = (
        torch.empty(4, case.hidden, dtype=torch.bfloat16),
        torch.zeros(SIGNATURE_WORDS, dtype=torch.int64),
    )
    octets = x.view(-1).view(torch.uint8)
    step, counts = 2 * case.hidden, ([4] * 8, [0] * 8)
    if case.kernel in CHANNEL_KERNELS:
        record = RecordLayout.of(WireFormat.parse(case.wire), case.hidden, x.dtype)
        if case.kernel == "send_rows":
            return all_to_all_v.send, (end, x, case.hidden, record, False, signature, 0, 4), 0
        return all_to_all_v.recv, (end, x, case.hidden, record, False, 1, 4), 0
    function, arguments = {
        "note": (all_to_all_v.note, (end, counts, counts, 1, 500)),
        "wait_headers": (all_to_all_v.wait, (end, all_to_all_v.HEADERS, 0, signature, True, 30.0, 1.0)),
        "wait_room": (all_to_all_v.wait, (end, all_to_all_v.ROOM, 1, signature, False, 30.0, 1.0)),
        "wait_pieces": (all_to_all_v.wait, (end, all_to_all_v.PIECES, 1, signature, False, 30.0, 1.0)),
        "send_bytes": (all_to_all_v.send, (end, octets, step, None, False, signature, 1, 4)),
        "recv_bytes": (all_to_all_v.recv, (end, octets, step, None, False, 1, 4)),
    }[case.kernel]
    return function, arguments, 0


def _collective_launcher(case: Case) -> tuple[Callable[..., None], tuple[object, ...], int]:
    """The same for a kernel of the direct collectives, whose tensors begin anywhere."""
    layout, wire = collective_layout(8), WireFormat.parse(case.wire)
    lane = Endpoint.of(layout, 0, torch.empty(layout.NUM_BYTES, dtype=torch.uint8), torch.zeros(8).long())
    x, parts = torch.empty(32 * case.hidden + 1, dtype=torch.bfloat16)[1:], torch.full((2, 8), 4 * case.hidden)
    ops = {"reduce": REDUCE_SCATTER, "send_to_all": ALL_GATHER} | SMALL_KERNELS
    job = Job(
        op=ops.get(case.kernel, ALL_REDUCE), signature=(1, 2, 3, 2**40), parts=parts, most_rows=4, row=case.hidden,
        wire=wire, gather_wire=wire, dtype=x.dtype, rows_per_chunk=4,
    )  # fmt: skip
    times = 30.0, 1.0
    if case.kernel in SMALL_KERNELS:
        return in_one_launch, (lane, job, x, x, *times, 8), 0
    return {
        "scatter": (collective.send, (lane, job, x, 0), 0),
        "send_to_all": (collective.send, (lane, job, x, 0), 0),
        "wait_first_leg": (collective.reduce, (lane, job, None, 0, *times), 0),
        "reduce": (collective.reduce, (lane, job, x, 0, *times), 1),
        "reduce_and_send_to_all": (collective.reduce, (lane, job, None, 0, *times), 1),
        "wait_second_leg": (collective.gather_recv, (lane, job, x, 0, *times), 0),
        "gather_recv": (collective.gather_recv, (lane, job, x, 0, *times), 1),
    }[case.kernel]


def _expert_launcher(case: Case) -> tuple[Callable[..., None], tuple[object, ...], int]:
    """The same for a product of 32 experts, whose other side has 1536 columns."""
    wire, experts, width, gate = WireFormat.parse(case.wire), 32, 1536, case.kernel.startswith("gate")
    rows, channels = (64 if case.kernel.endswith("few") else 4096), width * (1 + gate)
    payload = torch.empty(experts, channels, wire.scales_offset(case.hidden), dtype=torch.int8)
    weights = Int8Weights(payload, torch.empty(experts, channels), case.hidden, gate)
    records = torch.empty(4, wire.row_bytes(case.hidden), dtype=torch.uint8)
    index, offsets = torch.zeros(rows, dtype=torch.int64), torch.zeros(experts + 1, dtype=torch.int64)
    if gate:
        inner = torch.empty(rows, INNER_WIRE.row_bytes(width), dtype=torch.uint8)
        return expert_gemm, (records, wire, index, offsets, weights, inner, INNER_WIRE), 0
    return expert_gemm, (records, wire, None, offsets, weights, torch.empty(rows, width, dtype=torch.bfloat16)), 0


def _launcher(case: Case) -> tuple[Callable[..., None], tuple[object, ...], int]:
    if case.kernel in EXPERT_KERNELS:
        return _expert_launcher(case)
    if case.kernel in (*COLLECTIVE_KERNELS, *SMALL_KERNELS, *LEG_WAITS):
        return _collective_launcher(case)
    if case.kernel in (*ROUND_KERNELS, *ROUND_CONTROL_KERNELS, *TWO_LEVEL_KERNELS):
        return _round_launcher(case)
    if case.kernel not in CODEC_KERNELS:
        return _channel_launcher(case)
    wire = WireFormat.parse(case.wire)
    rows, top_k = 4, 8
    x = torch.empty(rows, case.hidden, dtype=torch.bfloat16)
    records = torch.empty(rows, wire.row_bytes(case.hidden, x.dtype), dtype=torch.uint8)
    index = torch.zeros(rows, dtype=torch.int64)
    table = torch.zeros(rows, top_k, dtype=torch.int64)
    packs = _expert_rows(case, x), table, table.float(), wire, x.dtype, records, case.hidden
    function, arguments = {
        "quantize": (pack.pack_rows, (x, wire, None, records)),
        "dequantize": (pack.unpack_rows, (records, wire, None, None, x)),
        "pack": (pack.pack_rows, (x, wire, index, records)),
        "unpack": (pack.unpack_rows, (records, wire, index, index, x)),
        "pack_weighted_sums": (sums.pack_weighted_sums, packs),
        "sum_records": (sums.sum_records, (records, table, wire, x)),
    }[case.kernel]
    return function, arguments, 0


def launch_of(case: Case) -> Launch:
    """The launch of one case, as its launcher makes it."""
    function, arguments, number = _launcher(case)
    return record_launches(function, *arguments)[number]


def compiled_case(case: Case) -> Any:
    """Compiles one case."""
    return compile_launch(launch_of(case), case.target)


def compile_case(case: Case) -> Report:
    """Compiles one case and reads the machine code."""
    return inspect(compiled_case(case), case.target)


def check_signals(case: Case) -> list[str]:
    """What is wrong with the signals of one of PUBLISHERS, on an NVIDIA GPU; empty when nothing is."""
    signals = inspect_signals(compiled_case(case))
    faults = []
    if signals.system_fences != 1:
        faults.append(f"{signals.system_fences} fences at system scope for a publication in one place")
    if signals.exchanges:
        faults.append(f"{signals.exchanges} atomic exchanges with peers or the host")
    if not signals.after_barrier:
        faults.append("no barrier between the stores and the release")
    if signals.arrivals != (case.kernel != "close_round"):
        faults.append(f"{signals.arrivals} arrivals with acquire and release order")
    return faults


def check_tensor_cores(case: Case) -> list[str]:
    """Whether one of EXPERT_KERNELS multiplies int8 on tensor cores, and brings bytes to them 16 at a time."""
    assembly = compiled_case(case).asm
    if case.target.startswith("gfx"):
        code, product, copy = assembly["amdgcn"], r"\bv_mfma_i32_\w+_i8\b", r"\b(?:global|buffer)_load_dwordx4\b"
    else:
        # 256 threads share 64 rows of 32 bytes, where that is a group.
        code, width = assembly["ptx"], "8" if (case.kernel, case.wire) == ("gate_and_up", "int8:32") else "10"
        copy = rf"\bcp\.async\.c[ag]\.shared\.global[^;]*, 0x{width}, "
        # 64 rows are what a warpgroup of sm_90 takes. Triton gives sm_100 the instruction of those before it.
        warpgroup = case.target == "sm_90" and not case.kernel.endswith("few")
        product = r"\bwgmma\.mma_async\S*\.s32\.s8\.s8\b" if warpgroup else r"\bmma\.sync\S*\.s32\.s8\.s8\.s32\b"
    others = set(re.findall(r"\b(?:\w*mma\.\S+|v_mfma_\w+|v_dot\w+)", re.sub(product, "", code)))
    others = {name for name in others if not name.startswith(("wgmma.fence", "wgmma.commit", "wgmma.wait"))}
    faults = [] if re.search(product, code) else ["no int8 products on tensor cores"]
    if not re.search(copy, code):
        faults.append("no copies of 16 bytes")
    return faults + ([f"other products: {sorted(others)}"] if others else [])


def check(case: Case, report: Report) -> list[str]:
    """What is wrong with a report; empty when nothing is."""
    faults = []
    if report.spills:
        faults.append(f"{report.spills} spills")
    if report.fused and case.kernel != DIVIDER:
        faults.append(f"{report.fused} fused multiply-adds")
    if case.kernel in COPIERS and min(report.load_bytes, report.store_bytes) < 16:
        faults.append(f"copies {report.load_bytes} bytes to {report.store_bytes} bytes")
    if case.kernel in (*CONTROL_KERNELS, *EXPERT_KERNELS):
        return faults
    if case.kernel in (*COLLECTIVE_KERNELS, *SMALL_KERNELS):
        return faults + _check_collective(case, report)
    # Rows of 5121 bfloat16 begin on odd addresses: only their records, 32-byte aligned, can move 16 bytes at a time.
    wide_load = case.hidden % 8 == 0 or case.kernel in READERS
    # Half a byte a column, 8192 columns over 8 wavefronts of 64 lanes: 8 bytes are all there is for a lane to load.
    narrow_payload = case.wire == "int4" and case.target.startswith("gfx") and case.kernel in READERS
    # Sums are added up by twice the threads, of which AMD has 64 in a wavefront.
    narrow_payload |= case.kernel == "sum_home" and case.target.startswith("gfx")
    # So are rows that are records, by wavefronts of 64; as they are, they are a reader's.
    of_records = case.rows == "records" or (case.rows == "as they are" and case.wire == "int4")
    narrow_payload |= of_records and case.target.startswith("gfx")
    if wide_load and report.load_bytes < (8 if narrow_payload else 16):
        faults.append(f"loads of {report.load_bytes} bytes")
    wide_store = case.hidden % 8 == 0 or case.kernel not in READERS
    if wide_store and report.store_bytes < 8:
        faults.append(f"stores of {report.store_bytes} bytes")
    return faults


def _check_collective(case: Case, report: Report) -> list[str]:
    """Widths of the accesses to records, and to rows of tensors that begin on 16-byte boundaries."""
    faults = []
    amd = case.target.startswith("gfx")
    # A sum is made by twice the threads, of which AMD has 64 in a wavefront: 8 columns are a thread's there.
    narrowest = 8 if amd and (case.wire == "int4" or case.kernel.startswith("reduce")) else 16
    if report.load_bytes < (narrowest if case.kernel in RECEIVERS else 16):
        faults.append(f"loads of {report.load_bytes} bytes")
    if report.store_bytes < (16 if case.kernel in ("reduce", "gather_recv") else narrowest):
        faults.append(f"stores of {report.store_bytes} bytes")
    return faults


def _row(case: Case) -> tuple[Case, Report, list[str]]:
    report = compile_case(case)
    signals = check_signals(case) if case.kernel in PUBLISHERS and case.target.startswith("sm_") else []
    products = check_tensor_cores(case) if case.kernel in EXPERT_KERNELS else []
    return case, report, check(case, report) + signals + products


def main() -> int:
    parser = argparse.ArgumentParser(description="compile every kernel for every GPU and check the machine code")
    parser.add_argument("--jobs", type=int, default=2, help="compile in this many processes (default 2)")
    jobs = parser.parse_args().jobs
    header = ("regs", "spills", "fma", "load", "store", "bar")
    print(f"{'kernel':24}{'wire':10}{'hidden':>7} {'target':8}" + "{:>5}{:>7}{:>5}{:>6}{:>6}{:>5}".format(*header))
    failures = 0
    with ProcessPoolExecutor(jobs) as pool:
        for case, report, faults in pool.map(_row, list(cases()), chunksize=4):
            failures += bool(faults)
            name = case.kernel + {"floats": "", "records": ", records", "as they are": ", as is"}[case.rows]
            name += ", invariant" * case.invariant
            print(
                f"{name:24}{case.wire:10}{case.hidden:>7} {case.target:8}{report.registers:>5}{report.spills:>7}"
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
