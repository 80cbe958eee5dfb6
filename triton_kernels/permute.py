"""Routing on the device: which record is which row of the experts' input, from the planes that all ranks sent.

Rows are sorted by expert, then source rank, then token. Two launches:

1. *count*: for each chunk of a source's tokens, how many of them go to each expert of this rank;
2. *place*: each record's row is where its expert begins, plus the rows of earlier chunks, plus those before it in its
   own chunk. Each program adds up the counts of all chunks by itself, which takes less time than a launch for it.

Chunks are numbered by what came, and programs take as many as there are, since a CUDA graph's grid is fixed; of
positions and index only what the last routing filled is cleared. So it costs what this round and the last one brought,
and not what there is room for.

No program waits for another and nothing is added atomically, so the order never depends on timing. What peers wrote is
only compared: an id that is not one of this rank's experts matches nothing, whatever it is.
"""

from __future__ import annotations

from typing import Any

import torch

from thinwire.triton_kernels.codec import dequantize_row, dequantized_tile, fill_row
from thinwire.triton_kernels.combine import slot_of
from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.launch import Launcher, kept, launcher_of
from thinwire.triton_kernels.record import INT4, RecordLayout
from thinwire.triton_kernels.round_layout import Lane
from thinwire.triton_kernels.rows import columns_in_order
from thinwire.triton_kernels.signal import most_programs, num_programs_for, register_limit, signal_words
from thinwire.triton_kernels.sums import load_positions, num_terms

_EXPERT_BLOCK = 32
_CHUNKS_AT_ONCE = 128


@triton.jit
def received_tokens(base, control_ptr, sources, ROUND: tl.constexpr):
    """How many tokens came from each of `sources`, int32; 0 past the last rank, and on a poisoned lane."""
    lines = signal_words(base, ROUND.SIGNALS, ROUND.TOKENS, sources, ROUND)
    tokens = tl.load(lines, mask=sources < ROUND.WORLD, other=0)
    if tl.load(control_ptr + ROUND.STATUS) != ROUND.RUNNING:
        tokens = tokens * 0
    return tl.minimum(tl.maximum(tokens, 0), ROUND.MAX_TOKENS)


@triton.jit
def received_chunks(base, control_ptr, ROUND: tl.constexpr, CHUNK: tl.constexpr, RANKS: tl.constexpr):
    """Tokens of each source, and how many chunks of tokens there are up to its last one: int32 [RANKS]."""
    tokens = received_tokens(base, control_ptr, tl.arange(0, RANKS), ROUND)
    return tokens, tl.cumsum((tokens + (CHUNK - 1)) // CHUNK, axis=0)


@triton.jit
def chunk_slots(tokens, ends, number, ROUND: tl.constexpr, CHUNK: tl.constexpr):
    """Slots of chunk `number` of what came, int64 [CHUNK], where their ids are in a buffer, and which hold a token.

    `tokens` and `ends` are those of `received_chunks`. Past the last chunk no slot holds one.
    """
    source = tl.sum(tl.where(ends <= number, 1, 0))
    begin = tl.max(tl.where(ends <= number, ends, 0))
    chosen = (number - begin) * CHUNK + tl.arange(0, CHUNK)
    slots = (source * ROUND.MAX_TOKENS + chosen).to(tl.int64)
    sent = tl.sum(tl.where(tl.arange(0, ends.shape[0]) == source, tokens, 0))
    return slots, ROUND.IDS + slots * (ROUND.TOP_K * 4), chosen < sent


@triton.jit
def block_experts(first_expert, num_local, block, EXPERTS: tl.constexpr):
    """Ids of a block of this rank's experts; past the last one -2, which nothing matches."""
    experts = block * EXPERTS + tl.arange(0, EXPERTS)
    return tl.where(experts < num_local, first_expert + experts, -2)


@triton.jit
def clear_positions(positions_ptr, slots, mask, ROUND: tl.constexpr, K_BLOCK: tl.constexpr):
    """Writes -1 to all positions of slots."""
    ks = tl.arange(0, K_BLOCK)
    nothing = tl.full((slots.shape[0], K_BLOCK), -1, tl.int64)
    there = tl.where(ks[None, :] < ROUND.TOP_K, mask[:, None], False)
    tl.store(positions_ptr + slots[:, None] * ROUND.TOP_K + ks[None, :], nothing, mask=there)


@triton.jit(do_not_specialize=["first_expert", "num_local"])
def count_kernel(
    buffer_ptr,
    control_ptr,
    first_expert,
    num_local,
    scratch_ptr,  # int32 [chunks, num_local]
    index_ptr,
    positions_ptr,
    ROUND: tl.constexpr,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
    K_BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Step 1; and what the last routing wrote and step 2 does not is set to -1. Program (any, block of experts)."""
    block = tl.program_id(1)
    base = buffer_ptr.to(tl.int64)
    filled, filled_rows = tl.load(control_ptr + ROUND.ROUTED_TOKENS), tl.load(control_ptr + ROUND.ROUTED_ROWS)
    tokens, ends = received_chunks(base, control_ptr, ROUND, CHUNK, RANKS)
    experts = block_experts(first_expert, num_local, block, EXPERTS)
    chunk = tl.program_id(0)
    while chunk < tl.max(ends):
        slots, places, active = chunk_slots(tokens, ends, chunk, ROUND, CHUNK)
        member = tl.zeros((CHUNK, EXPERTS), tl.int32)
        for k in tl.range(ROUND.TOP_K, loop_unroll_factor=UNROLL):
            ids = tl.load((base + places + 4 * k).to(tl.pointer_type(tl.int32)), mask=active, other=-1)
            member = tl.where(ids[:, None] == experts[None, :], 1, member)
        columns = block * EXPERTS + tl.arange(0, EXPERTS)
        tl.store(scratch_ptr + chunk * num_local + columns, tl.sum(member, axis=0), mask=columns < num_local)
        if block == 0:
            clear_positions(positions_ptr, slots, active, ROUND, K_BLOCK)
        chunk += tl.num_programs(0)
    start = (tl.program_id(0) * tl.num_programs(1) + block) * CHUNK
    while start < filled * ROUND.WORLD:
        numbers = start + tl.arange(0, CHUNK)
        sources = numbers // filled
        stale = numbers % filled >= received_tokens(base, control_ptr, sources, ROUND)
        stale_slots = (sources * ROUND.MAX_TOKENS + numbers % filled).to(tl.int64)
        clear_positions(positions_ptr, stale_slots, stale & (sources < ROUND.WORLD), ROUND, K_BLOCK)
        start += tl.num_programs(0) * tl.num_programs(1) * CHUNK
    start = (tl.program_id(0) * tl.num_programs(1) + block) * CHUNK * K_BLOCK
    while start < filled_rows:
        rows = start + tl.arange(0, CHUNK * K_BLOCK)
        tl.store(index_ptr + rows, tl.full((CHUNK * K_BLOCK,), -1, tl.int64), mask=rows < filled_rows)
        start += tl.num_programs(0) * tl.num_programs(1) * CHUNK * K_BLOCK


@triton.jit
def rows_of_experts(scratch_ptr, num_local, block, num_chunks, chunk, CHUNKS: tl.constexpr, EXPERTS: tl.constexpr):
    """Rows of each expert of a block, and how many of them chunks before `chunk` hold: int32 [EXPERTS] each."""
    columns = block * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    before = tl.zeros((EXPERTS,), tl.int32)
    start = num_chunks * 0
    while start < num_chunks:
        chunks = start + tl.arange(0, CHUNKS)
        mask = tl.where(chunks[:, None] < num_chunks, columns[None, :] < num_local, False)
        counts = tl.load(scratch_ptr + chunks[:, None] * num_local + columns[None, :], mask=mask, other=0)
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where(chunks[:, None] < chunk, counts, 0), axis=0)
        start += CHUNKS
    return total, before


@triton.jit
def padded(counts, ALIGN: tl.constexpr):
    """Rows of each expert with its padding, int64."""
    return (counts.to(tl.int64) + (ALIGN - 1)) // ALIGN * ALIGN


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
    CHUNKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Step 2. Program (any, block of experts)."""
    block = tl.program_id(1)
    base = buffer_ptr.to(tl.int64)
    tokens, ends = received_chunks(base, control_ptr, ROUND, CHUNK, RANKS)
    num_chunks = tl.max(ends)
    earlier = tl.zeros((), tl.int64)
    other = block * 0
    while other < block:
        of_other, _ = rows_of_experts(scratch_ptr, num_local, other, num_chunks, 0, CHUNKS, EXPERTS)
        earlier += tl.sum(padded(of_other, ALIGN))
        other += 1
    chunk = tl.program_id(0)
    counts, before = rows_of_experts(scratch_ptr, num_local, block, num_chunks, chunk, CHUNKS, EXPERTS)
    with_padding = padded(counts, ALIGN)
    expert_ends = tl.cumsum(with_padding, axis=0) + earlier
    offsets = expert_ends - with_padding
    columns = block * EXPERTS + tl.arange(0, EXPERTS)
    if chunk == 0:
        tl.store(expert_counts_ptr + columns, counts.to(tl.int64), mask=columns < num_local)
        tl.store(expert_offsets_ptr + 1 + columns, expert_ends, mask=columns < num_local)
        if block == 0:
            tl.store(expert_offsets_ptr, earlier)
            tl.store(control_ptr + ROUND.ROUTED_TOKENS, tl.max(tokens))
        if block == tl.num_programs(1) - 1:
            tl.store(control_ptr + ROUND.ROUTED_ROWS, tl.minimum(tl.max(expert_ends), num_rows).to(tl.int32))
    experts = block_experts(first_expert, num_local, block, EXPERTS)
    while chunk < num_chunks:
        slots, places, active = chunk_slots(tokens, ends, chunk, ROUND, CHUNK)
        addresses = base + places
        member = tl.zeros((CHUNK, EXPERTS), tl.int32)
        ordinal = tl.zeros((CHUNK, EXPERTS), tl.int32)  # of an expert among those of the token's on this rank
        weight = tl.zeros((CHUNK, EXPERTS), tl.float32)
        # Each id is read once: a peer that was given up may write while this reads, and ordinals stay below TOP_K.
        for k in tl.range(ROUND.TOP_K, loop_unroll_factor=UNROLL):
            ids = tl.load((addresses + 4 * k).to(tl.pointer_type(tl.int32)), mask=active, other=-1)
            plane = addresses + (ROUND.WEIGHTS - ROUND.IDS) + 4 * k
            weight_k = tl.load(plane.to(tl.pointer_type(tl.float32)), mask=active, other=0.0)
            is_expert = ids[:, None] == experts[None, :]
            member = tl.where(is_expert, 1, member)
            weight = tl.where(is_expert, weight_k[:, None], weight)
            local = tl.where(ids >= first_expert, 1, 0)
            ordinal += tl.where(ids[:, None] < experts[None, :], local[:, None], 0)
        rows = offsets[None, :] + before[None, :] + (tl.cumsum(member, axis=0) - member)
        mask = tl.where(member > 0, rows < num_rows, False)
        tl.store(index_ptr + rows, slots[:, None] + tl.zeros((CHUNK, EXPERTS), tl.int64), mask=mask)
        entries = slots[:, None] * ROUND.TOP_K + ordinal
        tl.store(positions_ptr + entries, rows, mask=mask)
        tl.store(weights_ptr + entries, weight, mask=mask)
        chunk += tl.num_programs(0)
        if chunk < num_chunks:
            _, before = rows_of_experts(scratch_ptr, num_local, block, num_chunks, chunk, CHUNKS, EXPERTS)


@triton.jit
def store_rows(base, positions, out_ptr, out_row_stride, capacity, LAYOUT: tl.constexpr, TERMS: tl.constexpr):
    """The record at `base` into each of the rows that its TERMS `positions` name.

    It is loaded and decoded once, unless it has several tiles: two of them would take all registers.
    """
    # As combine reads them: a peer that names an expert twice leaves a hole, and what is behind it was counted.
    terms = num_terms(load_positions(positions, TERMS))
    if LAYOUT.NUM_TILES == 1:
        elements = dequantized_tile(base, 0, out_ptr.dtype.element_ty, LAYOUT)
    for k in range(terms):
        target = tl.load(positions + k)
        if tl.where(target < capacity, target, -1) >= 0:
            out_row = out_ptr + target * out_row_stride
            if LAYOUT.NUM_TILES == 1:
                columns = columns_in_order(0, LAYOUT)
                tl.store(out_row + columns, elements, mask=columns < LAYOUT.HIDDEN)
            else:
                dequantize_row(base, out_row, LAYOUT.HIDDEN, LAYOUT)


@triton.jit(do_not_specialize=["num_local", "capacity", "zero_tail"])
def gather_kernel(
    out_ptr,
    overflow_ptr,
    out_row_stride,
    capacity,
    zero_tail,  # 1: rows past the last expert's are zeroed; 0: they are left as they are
    buffer_ptr,
    control_ptr,
    positions_ptr,
    expert_counts_ptr,
    expert_offsets_ptr,
    num_local,
    ALIGN: tl.constexpr,
    ROUND: tl.constexpr,
    LAYOUT: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Each record that came into the rows of its experts, and zeros between experts. Any number of programs."""
    base, program, step = buffer_ptr.to(tl.int64), tl.program_id(0), tl.num_programs(0)
    running = tl.load(control_ptr + ROUND.STATUS) == ROUND.RUNNING
    peers = tl.arange(0, LAUNCH.BLOCK)
    counts = received_tokens(base, control_ptr, peers, ROUND)
    ends, total = tl.cumsum(counts, axis=0), tl.sum(counts)
    number = program
    slot = slot_of(number, peers, counts, ends, ROUND).to(tl.int64)
    wanted = tl.load(positions_ptr + slot * ROUND.TOP_K, mask=number < total, other=-1) >= 0
    while number < total:
        record, here = slot, wanted
        # Whether the next one is for experts here is on its way while this one is stored.
        number += step
        slot = slot_of(number, peers, counts, ends, ROUND).to(tl.int64)
        wanted = tl.load(positions_ptr + slot * ROUND.TOP_K, mask=number < total, other=-1) >= 0
        if here:
            address = tl.multiple_of(buffer_ptr + (ROUND.RECORDS + record * ROUND.RECORD_BYTES), 16)
            positions = positions_ptr + record * ROUND.TOP_K
            store_rows(address, positions, out_ptr, out_row_stride, capacity, LAYOUT, ROUND.TOP_K)
    if ALIGN > 1:
        padding = program
        while padding < tl.where(running, num_local, 0) * (ALIGN - 1):
            expert = padding // (ALIGN - 1)
            end = tl.minimum(tl.load(expert_offsets_ptr + expert + 1), capacity)
            gap = tl.load(expert_offsets_ptr + expert) + tl.load(expert_counts_ptr + expert) + padding % (ALIGN - 1)
            if tl.where(gap < end, gap, -1) >= 0:  # users see these, too
                fill_row(out_ptr + gap * out_row_stride, LAYOUT.HIDDEN, 0.0, LAYOUT)
            padding += step
    used = tl.load(expert_offsets_ptr + num_local)
    if program == 0:
        tl.store(overflow_ptr, tl.where(used > capacity, 1, 0).to(tl.int8))
    # Users see the offsets, too: as they may be, a program's number more could be a row before the first.
    used = tl.minimum(tl.maximum(used, 0), capacity)
    unused = tl.where(running, used, 0) + program
    while unused < tl.where(running, capacity * zero_tail, capacity):
        fill_row(out_ptr + unused * out_row_stride, LAYOUT.HIDDEN, tl.where(running, 0.0, float("nan")), LAYOUT)
        unused += step


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
    programs = num_programs_for(chunks, lane.buffer.device, None)
    constants = {
        "EXPERTS": _EXPERT_BLOCK,
        "CHUNKS": min(_CHUNKS_AT_ONCE, 1 << max(0, chunks - 1).bit_length()),
        "RANKS": 1 << (lane.layout.WORLD - 1).bit_length(),
    }
    options: dict[str, Any] = {"num_warps": 8, **register_limit(lane.buffer.device, 8)}
    # Ids that a thread loads at a time: with more of them it would spill.
    kernels = [(count_kernel, 256), (place_kernel, 128)] if chunks else [(place_kernel, 128)]
    unrolled = [
        (kernel, {**constants, "UNROLL": min(lane.layout.TOP_K, ids // lane.layout.chunk)}) for kernel, ids in kernels
    ]
    return [(launcher_of(lane, kernel, staying, **options), programs, blocks) for kernel, staying in unrolled]


def gather(lane: Lane, out: torch.Tensor, overflow: torch.Tensor, zero_tail: bool = False) -> None:
    """The experts' input: out[positions[r, k]] = dequantised record r, zero where an expert's padding is.

    Args:
        lane: a lane that was routed. A poisoned one gives NaN in all of `out`.
        out: [capacity, hidden] in the tokens' dtype, contiguous rows.
        overflow: bool [], whether there are more rows than `capacity`.
        zero_tail: whether rows from `expert_offsets[-1]` on are zeroed; else they are left as they are.
    """
    launch, most = kept(lane, _gathering, out.dtype)
    programs = max(1, min(max(out.shape[0], lane.positions.shape[0]), most))
    launch(programs, 1, (out, overflow), (out.stride(0),), (out.shape[0], zero_tail))


def _gathering(lane: Lane, dtype: torch.dtype) -> tuple[Launcher, int]:
    layout = RecordLayout.of(lane.wire, lane.layout.HIDDEN, dtype)
    programs = 4 if layout.NUM_TILES == 1 else 2
    least = 128 if layout.BLOCKS or layout.KIND == INT4 else 64  # what decoding needs
    limit = register_limit(lane.buffer.device, layout.num_warps, programs, least)
    launch = launcher_of(
        lane, gather_kernel, {"LAYOUT": layout}, ("out_ptr", "overflow_ptr"), ("out_row_stride",),
        ("capacity", "zero_tail"), num_warps=layout.num_warps, enable_fp_fusion=False, **limit,
    )  # fmt: skip
    return launch, most_programs(lane.buffer.device, None)
