"""Routing on the device: which record is which row of the experts' input, from the planes that all ranks sent.

Rows are sorted by expert, then source rank, then token. Three launches, none of which needs more than its own part:

1. *count*: for each chunk of record slots, how many of them go to each expert of this rank;
2. *prefix*: for each expert, how many of its rows the chunks before one hold;
3. *place*: each record's row is where its expert begins, plus the rows of earlier chunks, plus those before it in its
   own chunk.

No program waits for another and nothing is added atomically, so the order never depends on timing. What peers wrote is
only compared: an id that is not one of this rank's experts matches nothing, whatever it is.
"""

from __future__ import annotations

import torch

from thinwire.triton_kernels.codec import dequantize_row, fill_row
from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.launch import Launcher, kept
from thinwire.triton_kernels.record import RecordLayout
from thinwire.triton_kernels.record_checksum import dequantize_and_sum_row
from thinwire.triton_kernels.round_checksum import (
    RECORD,
    check_planes_kernel,
    differ,
    end_lane,
    is_running,
    seed_words,
)
from thinwire.triton_kernels.round_launch import round_launcher
from thinwire.triton_kernels.round_layout import Lane
from thinwire.triton_kernels.signal import agreed, most_programs, signal_words

_EXPERT_BLOCK = 32
_PREFIX_CHUNKS = 64


@triton.jit
def chunk_members(
    base, control_ptr, first_expert, num_local, chunk, block, ROUND: tl.constexpr, CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    """Which slots of a chunk go to which experts of a block: int32 0 or 1 [CHUNK, EXPERTS].

    Returns it with the slots [CHUNK], their ids' addresses, whether each holds a token, and the experts' ids.
    """
    slots = chunk * CHUNK + tl.arange(0, CHUNK)
    source = slots // ROUND.MAX_TOKENS
    known = slots < ROUND.WORLD * ROUND.MAX_TOKENS
    tokens = tl.load(signal_words(base, ROUND.SIGNALS, ROUND.TOKENS, source, ROUND), mask=known, other=0)
    active = tl.where(known, tl.where(slots % ROUND.MAX_TOKENS < tokens, 1, 0), 0)
    if tl.load(control_ptr + ROUND.STATUS) != ROUND.RUNNING:
        active = active * 0
    experts = block * EXPERTS + tl.arange(0, EXPERTS)
    # Past this rank's last expert nothing matches.
    experts = tl.where(experts < num_local, first_expert + experts, -2)
    addresses = base + ROUND.IDS + slots.to(tl.int64) * (ROUND.TOP_K * 4)
    member = tl.zeros((CHUNK, EXPERTS), tl.int32)
    for k in range(ROUND.TOP_K):
        ids = tl.load((addresses + 4 * k).to(tl.pointer_type(tl.int32)), mask=active > 0, other=-1)
        member = tl.where(ids[:, None] == experts[None, :], 1, member)
    return member, slots, addresses, active, experts


@triton.jit(do_not_specialize=["first_expert", "num_local", "num_rows"])
def count_kernel(
    buffer_ptr,
    control_ptr,
    first_expert,
    num_local,
    scratch_ptr,  # int32 [chunks, num_local]
    index_ptr,
    num_rows,
    positions_ptr,
    ROUND: tl.constexpr,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
    K_BLOCK: tl.constexpr,
):
    """Step 1, and everything that step 3 does not write is set to -1. Program (chunk, block of experts)."""
    chunk, block = tl.program_id(0), tl.program_id(1)
    base = buffer_ptr.to(tl.int64)
    member, slots, addresses, active, experts = chunk_members(
        base, control_ptr, first_expert, num_local, chunk, block, ROUND, CHUNK, EXPERTS
    )
    columns = block * EXPERTS + tl.arange(0, EXPERTS)
    tl.store(scratch_ptr + chunk * num_local + columns, tl.sum(member, axis=0), mask=columns < num_local)
    if block == 0:
        ks = tl.arange(0, K_BLOCK)
        mask = tl.where(ks[None, :] < ROUND.TOP_K, slots[:, None] < ROUND.WORLD * ROUND.MAX_TOKENS, False)
        nothing = tl.full((CHUNK, K_BLOCK), -1, tl.int64)
        tl.store(positions_ptr + slots[:, None].to(tl.int64) * ROUND.TOP_K + ks[None, :], nothing, mask=mask)
    programs = tl.num_programs(0) * tl.num_programs(1)
    start = (chunk * tl.num_programs(1) + block) * CHUNK * K_BLOCK
    while start < num_rows:
        rows = start + tl.arange(0, CHUNK * K_BLOCK)
        tl.store(index_ptr + rows, tl.full((CHUNK * K_BLOCK,), -1, tl.int64), mask=rows < num_rows)
        start += programs * CHUNK * K_BLOCK


@triton.jit(do_not_specialize=["num_local", "num_chunks"])
def prefix_kernel(
    scratch_ptr,
    num_local,
    num_chunks,
    expert_counts_ptr,
    CHUNKS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Step 2, in place, and each expert's count. Program (block of experts)."""
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    start = num_chunks * 0
    while start < num_chunks:
        chunks = start + tl.arange(0, CHUNKS)
        mask = tl.where(chunks[:, None] < num_chunks, experts[None, :] < num_local, False)
        pointers = scratch_ptr + chunks[:, None] * num_local + experts[None, :]
        counts = tl.load(pointers, mask=mask, other=0)
        tl.store(pointers, tl.cumsum(counts, axis=0) - counts + total[None, :], mask=mask)
        total += tl.sum(counts, axis=0)
        start += CHUNKS
    tl.store(expert_counts_ptr + experts, total.to(tl.int64), mask=experts < num_local)


@triton.jit
def padded_counts(expert_counts_ptr, experts, num_local, ALIGN: tl.constexpr):
    """Rows of each expert with its padding, int64."""
    counts = tl.load(expert_counts_ptr + experts, mask=experts < num_local, other=0)
    return (counts + (ALIGN - 1)) // ALIGN * ALIGN


@triton.jit(do_not_specialize=["first_expert", "num_local", "num_rows"])
def place_kernel(
    buffer_ptr,
    control_ptr,
    first_expert,
    num_local,
    scratch_ptr,
    expert_counts_ptr,
    expert_offsets_ptr,
    index_ptr,
    num_rows,
    positions_ptr,
    weights_ptr,
    ALIGN: tl.constexpr,
    ROUND: tl.constexpr,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
    ALL_EXPERTS: tl.constexpr,
):
    """Step 3. Program (chunk, block of experts)."""
    chunk, block = tl.program_id(0), tl.program_id(1)
    every = tl.arange(0, ALL_EXPERTS)
    earlier = tl.where(every < block * EXPERTS, padded_counts(expert_counts_ptr, every, num_local, ALIGN), 0)
    columns = block * EXPERTS + tl.arange(0, EXPERTS)
    padded = padded_counts(expert_counts_ptr, columns, num_local, ALIGN)
    ends = tl.cumsum(padded, axis=0) + tl.sum(earlier)
    offsets = ends - padded
    if chunk == 0:
        tl.store(expert_offsets_ptr + 1 + columns, ends, mask=columns < num_local)
        if block == 0:
            tl.store(expert_offsets_ptr, tl.sum(earlier))
    base = buffer_ptr.to(tl.int64)
    member, slots, addresses, active, experts = chunk_members(
        base, control_ptr, first_expert, num_local, chunk, block, ROUND, CHUNK, EXPERTS
    )
    before = tl.load(scratch_ptr + chunk * num_local + columns, mask=columns < num_local, other=0)
    rows = offsets[None, :] + before[None, :] + (tl.cumsum(member, axis=0) - member)
    # Among a token's experts on this rank, which one is this?
    ordinal = tl.zeros((CHUNK, EXPERTS), tl.int64)
    weight = tl.zeros((CHUNK, EXPERTS), tl.float32)
    for k in range(ROUND.TOP_K):
        ids = tl.load((addresses + 4 * k).to(tl.pointer_type(tl.int32)), mask=active > 0, other=-1)
        plane = addresses + (ROUND.WEIGHTS - ROUND.IDS) + 4 * k
        weight_k = tl.load(plane.to(tl.pointer_type(tl.float32)), mask=active > 0, other=0.0)
        local = tl.where(ids >= first_expert, 1, 0)
        ordinal += tl.where(ids[:, None] < experts[None, :], local[:, None], 0)
        weight = tl.where(ids[:, None] == experts[None, :], weight_k[:, None], weight)
    # A peer that was given up may write while this reads, so that what matched before has an ordinal past all places.
    mask = tl.where(member > 0, tl.where(ordinal < ROUND.TOP_K, rows < num_rows, False), False)
    tl.store(index_ptr + rows, slots[:, None].to(tl.int64) + tl.zeros((CHUNK, EXPERTS), tl.int64), mask=mask)
    entries = slots[:, None].to(tl.int64) * ROUND.TOP_K + ordinal
    tl.store(positions_ptr + entries, rows, mask=mask)
    tl.store(weights_ptr + entries, weight, mask=mask)


@triton.jit(do_not_specialize=["rank", "num_rows", "num_local", "capacity"])
def gather_kernel(
    out_ptr,
    overflow_ptr,
    out_row_stride,
    capacity,
    buffer_ptr,
    control_ptr,
    index_ptr,
    num_rows,
    expert_offsets_ptr,
    num_local,
    buffer_ptrs,
    report_ptr,
    rank,
    ROUND: tl.constexpr,
    LAYOUT: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Rows of the experts' input out of the records; zero past the last one. Any number of programs."""
    running = is_running(control_ptr, ROUND)
    row = tl.program_id(0)
    if row == 0:
        used = tl.load(expert_offsets_ptr + num_local)
        tl.store(overflow_ptr, tl.where(used > capacity, 1, 0).to(tl.int8))
    while row < capacity:
        record = tl.load(index_ptr + row, mask=row < num_rows, other=-1)
        out_row = out_ptr + row.to(tl.int64) * out_row_stride
        if running:
            # Users see the index, and may have written into it.
            if tl.where(record < ROUND.WORLD * ROUND.MAX_TOKENS, record, -1) >= 0:
                base = buffer_ptr + (ROUND.RECORDS + record * ROUND.RECORD_BYTES)
                if ROUND.CHECKSUMS:
                    a, b = dequantize_and_sum_row(tl.multiple_of(base, 16), out_row, LAYOUT.HIDDEN, LAYOUT)
                    source = (record // ROUND.MAX_TOKENS).to(tl.int32)
                    s, t = seed_words(RECORD, tl.load(control_ptr + ROUND.EPOCH), source, record)
                    sums = buffer_ptr.to(tl.int64) + ROUND.CHECKSUMS + 16 * record
                    if agreed(differ(sums, a + s, b + t, record >= 0) > 0):
                        lane = (buffer_ptrs, control_ptr, report_ptr, rank)
                        end_lane(lane, RECORD, source, (record % ROUND.MAX_TOKENS).to(tl.int32), ROUND, LAUNCH)
                        tl.debug_barrier()  # the row's stores may be other threads'
                        fill_row(out_row, LAYOUT.HIDDEN, float("nan"), LAYOUT)
                else:
                    dequantize_row(tl.multiple_of(base, 16), out_row, LAYOUT.HIDDEN, LAYOUT)
            else:
                fill_row(out_row, LAYOUT.HIDDEN, 0.0, LAYOUT)
        else:
            fill_row(out_row, LAYOUT.HIDDEN, float("nan"), LAYOUT)
        row += tl.num_programs(0)


# ---------------------------------------------------------------------------------------------------------------------
# Launchers


def route(lane: Lane) -> None:
    """Fills the lane's index, expert_counts, expert_offsets, positions and weights from what arrived.

    To be launched when the dispatch phase has been waited for. A poisoned lane gets no rows.
    """
    for launch, programs, blocks in kept(lane, _routing):
        launch(programs, blocks)


def _routing(lane: Lane) -> list[tuple[Launcher, int, int]]:
    """The launches of `route`, with their grids."""
    num_local = lane.expert_counts.shape[0]
    if num_local == 0:
        return []  # nothing can arrive, and what there is is empty
    chunks, blocks = lane.scratch.shape[0], -(-num_local // _EXPERT_BLOCK)
    constants = {
        "EXPERTS": _EXPERT_BLOCK, "CHUNKS": _PREFIX_CHUNKS, "ALL_EXPERTS": 1 << max(0, num_local - 1).bit_length(),
        "num_chunks": chunks,
    }  # fmt: skip
    grids = (
        (check_planes_kernel, chunks if lane.layout.CHECKSUMS else 0, 1),
        (count_kernel, chunks, blocks),
        (prefix_kernel, blocks, 1),
        (place_kernel, max(1, chunks), blocks),
    )
    return [
        (round_launcher(lane, kernel, constants, num_warps=4), programs, blocks)
        for kernel, programs, blocks in grids
        if programs
    ]


def gather(lane: Lane, out: torch.Tensor, overflow: torch.Tensor) -> None:
    """The experts' input: out[r] = dequantised record index[r], zero where there is none.

    Args:
        lane: a lane that was routed. A poisoned one gives NaN.
        out: [capacity, hidden] in the tokens' dtype, contiguous rows, written whole.
        overflow: bool [], whether there are more rows than `capacity`.
    """
    launch, most = kept(lane, _gathering, out.dtype)
    rows = out.shape[0]
    launch(max(1, min(rows, most)), 1, (out, overflow.view(torch.int8)), (out.stride(0),), (rows,))


def _gathering(lane: Lane, dtype: torch.dtype) -> tuple[Launcher, int]:
    layout = RecordLayout.of(lane.wire, lane.layout.HIDDEN, dtype)
    launch = round_launcher(
        lane, gather_kernel, {"LAYOUT": layout}, ("out_ptr", "overflow_ptr"), ("out_row_stride",), ("capacity",),
        num_warps=layout.num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    return launch, most_programs(lane.buffer.device, None)
