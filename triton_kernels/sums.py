"""Combine: what happens to expert outputs on their way home, in two kernels.

At the experts' rank, for the token of record r::

    record[r] = quantise( sum over k of weights[r, k] * expert_out[positions[r, k]] )

with k running over the token's experts on this rank in ascending expert id: whoever builds `positions` sorts them so.
At the token's home, j running over the ranks that served it in ascending order::

    out[t] = round( sum over j of dequantise(records[record_index[t, j]]) )

Both sums are explicit float32 loops from +0.0, each product rounded before it is added, absent terms (-1) skipped: the
result does not depend on timing, on the grid or on the backend. A tree sum would depend on how many ranks there are.

expert_out may be records itself, of the same format: each tile is dequantised where it is read, to the float32 that
`tw.dequantize` gives. Where every record's row was weighted and summed before, records travel as they are.
"""

from __future__ import annotations

import torch

from thinwire.triton_kernels.blocks import rotated, rotated_back
from thinwire.triton_kernels.codec import (
    group_amax,
    load_record_tile,
    store_record_tail,
    store_record_tile,
    store_rounded_tile,
    tile_columns,
)
from thinwire.triton_kernels.codec_reference import (
    dequantize_reference,
    quantize_reference,
    round_reference,
    row_reference,
    scaled_reference,
    sum_dtype,
)
from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.floats import load_float32, saturated, widened
from thinwire.triton_kernels.put import put
from thinwire.triton_kernels.record import NONE, RecordLayout
from thinwire.triton_kernels.rows import load_tile
from thinwire.wire import WireFormat


@triton.jit
def num_terms(listed):
    """How many of a record's positions, as `load_positions` gives them, its sum has to look at: up to the last."""
    return tl.max(tl.where(listed >= 0, tl.arange(0, listed.shape[0]) + 1, 0))


@triton.jit
def load_positions(positions, TERMS: tl.constexpr, there=True):
    """A record's TERMS positions, int64 [a power of 2]; -1 behind them, and everywhere if there is none."""
    block: tl.constexpr = triton.next_power_of_2(TERMS)
    ks = tl.arange(0, block)
    return tl.load(positions + ks, mask=tl.where(there, ks < TERMS, False), other=-1)


@triton.jit
def weighted_sum_tile(rows, positions, weights, terms, tile, LAYOUT: tl.constexpr, ENCODED: tl.constexpr):
    """One tile of a record's weighted sum, float32; `positions` and `weights` point to its own `terms`.

    `rows` is where the experts' rows begin, the step from one to the next, and how many there are; others add nothing.
    ENCODED: they are records, and the step is in bytes.
    """
    rows_ptr, row_stride, num_rows = rows
    columns = tile_columns(tile, LAYOUT)
    total = tl.zeros(columns.shape, tl.float32)
    for k in range(terms):
        position = tl.load(positions + k)
        # Skipped, not added as zero: 0 * infinity would be NaN.
        if tl.where(position < num_rows, position, -1) >= 0:
            weight = tl.load(weights + k)
            if ENCODED:
                # What is past the row's end is whatever the records' owner left there.
                y = load_record_tile(tl.multiple_of(rows_ptr + position * row_stride, 16), tile, LAYOUT)
                y = rotated_back(y, LAYOUT)
                y = tl.where(columns < LAYOUT.HIDDEN, saturated(y, tl.float32), 0.0)
            elif LAYOUT.BLOCKS == 0:
                y = load_float32(rows_ptr + position * row_stride + columns, columns < LAYOUT.HIDDEN)
            else:
                y = widened(load_tile(rows_ptr + position * row_stride, columns, tile, LAYOUT))
            total = total + weight * y
    return total


@triton.jit
def copy_record(rows, positions, record, LAYOUT: tl.constexpr):
    """The record at the first of `positions`, as it is, or one of zeros where there is none; else as `store_sum`."""
    rows_ptr, row_stride, num_rows = rows
    position = tl.load(positions)
    there = tl.where(position < num_rows, position, -1) >= 0
    base = tl.multiple_of(rows_ptr + position * row_stride, 16)
    end: tl.constexpr = LAYOUT.SCALES_OFFSET + LAYOUT.NUM_GROUPS * (4 if LAYOUT.ROW_SCALE else 2)
    for first in range(0, LAYOUT.ROW_BYTES, LAYOUT.COPY_BLOCK):
        offsets = first + tl.arange(0, LAYOUT.COPY_BLOCK)
        used = (offsets < LAYOUT.PAYLOAD_BYTES) | ((offsets >= LAYOUT.SCALES_OFFSET) & (offsets < end))
        octets = tl.load(base + offsets, mask=tl.where(there, offsets < LAYOUT.ROW_BYTES, False), other=0)
        put(record + offsets, tl.where(used, octets, 0), offsets < LAYOUT.ROW_BYTES)


@triton.jit
def store_sum(
    rows, positions, weights, terms, record, part, PARTS: tl.constexpr, LAYOUT: tl.constexpr, ENCODED: tl.constexpr
):
    """One of PARTS, 1 or NUM_TILES, of the weighted sum of the rows that `positions` names, quantised into `record`.

    With TWO_PASSES there is but one. Other arguments are as above.
    """
    row_amax = tl.zeros((1,), tl.int32)
    if LAYOUT.TWO_PASSES:
        for tile in range(LAYOUT.NUM_TILES):
            total = weighted_sum_tile(rows, positions, weights, terms, tile, LAYOUT, ENCODED)
            row_amax = tl.maximum(row_amax, group_amax(rotated(total, LAYOUT), LAYOUT))
    tiles: tl.constexpr = LAYOUT.NUM_TILES // PARTS
    for number in range(tiles):
        tile = part * tiles + number
        total = rotated(weighted_sum_tile(rows, positions, weights, terms, tile, LAYOUT, ENCODED), LAYOUT)
        amax = row_amax if LAYOUT.TWO_PASSES else group_amax(total, LAYOUT)
        store_record_tile(record, total, amax, tile, LAYOUT)
    if part == PARTS - 1:
        store_record_tail(record, LAYOUT)


@triton.jit(do_not_specialize=["num_rows"])
def pack_weighted_sums_kernel(
    expert_out_ptr,
    expert_out_row_stride,
    num_rows,
    positions_ptr,  # int64 [records, top_k]
    weights_ptr,  # float32 [records, top_k]
    records_ptr,
    record_stride,
    TOP_K: tl.constexpr,
    LAYOUT: tl.constexpr,
    ENCODED: tl.constexpr,
):
    """One record of the weighted sums at the experts' rank, program r."""
    record = tl.program_id(0).to(tl.int64)
    base = tl.multiple_of(records_ptr + record * record_stride, 16)
    positions, weights = positions_ptr + record * TOP_K, weights_ptr + record * TOP_K
    rows = (expert_out_ptr, expert_out_row_stride, num_rows)
    terms = num_terms(load_positions(positions, TOP_K))
    store_sum(rows, positions, weights, terms, base, 0, 1, LAYOUT, ENCODED)


@triton.jit
def sum_records_kernel(
    records_ptr,
    record_stride,
    record_index_ptr,  # int64 [tokens, slots]
    out_ptr,
    out_row_stride,
    SLOTS: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """One token of the sums at home, program t."""
    token = tl.program_id(0).to(tl.int64)
    for tile in range(LAYOUT.NUM_TILES):
        total = tl.zeros(tile_columns(tile, LAYOUT).shape, tl.float32)
        for j in range(SLOTS):
            record = tl.load(record_index_ptr + token * SLOTS + j)
            if record >= 0:
                base = tl.multiple_of(records_ptr + record * record_stride, 16)
                total = total + load_record_tile(base, tile, LAYOUT)
        total = rotated_back(total, LAYOUT)
        out_row = out_ptr + token * out_row_stride
        store_rounded_tile(out_row, total, LAYOUT.HIDDEN, tile, LAYOUT.KIND != NONE, LAYOUT)


def sum_warps(wire: WireFormat, layout: RecordLayout) -> int:
    """Warps of a program that sums rows into a record."""
    # 16 columns a thread, since the running sum and the next row are held together: 32 spill on sm_120. int4 keeps 32,
    # or its stores would shrink to 4 bytes on 64-lane wavefronts; and a block stays in a thread.
    return layout.num_warps if wire.name == "int4" or layout.BLOCKS else 2 * layout.num_warps


def pack_weighted_sums(
    expert_out: torch.Tensor,
    positions: torch.Tensor,
    weights: torch.Tensor,
    wire: WireFormat,
    dtype: torch.dtype,
    records: torch.Tensor,
    hidden: int | None = None,
) -> None:
    """Sums each token's weighted expert rows and writes the sum as its record.

    Args:
        expert_out: [rows, hidden] float32, float16 or bfloat16 with contiguous rows; or uint8 [rows, row_bytes],
            records in `wire`, which is quantised then; their row stride is a multiple of 16.
        positions: int64 [n, top_k], contiguous; rows of `expert_out` in ascending expert id, -1 for none.
        weights: float32 [n, top_k], contiguous.
        wire: the records' format.
        dtype: what `none` rounds the sum to (half to even, as IEEE has it).
        records: uint8 [n, row_bytes], written whole; the row stride is a multiple of 16.
        hidden: elements of a row, of an expert_out of records.
    """
    if records.shape[0] == 0:
        return
    layout, encoded = RecordLayout.of(wire, hidden or expert_out.shape[1], dtype), expert_out.dtype == torch.uint8
    with torch.cuda.device_of(records):  # Triton launches on the current device
        pack_weighted_sums_kernel[(records.shape[0],)](
            expert_out.view(torch.int8) if encoded else expert_out,
            expert_out.stride(0),
            expert_out.shape[0],
            positions,
            weights,
            records.view(torch.int8),
            records.stride(0),
            TOP_K=positions.shape[1],
            LAYOUT=layout,
            ENCODED=encoded,
            num_warps=sum_warps(wire, layout),
            enable_fp_fusion=False,
        )


def sum_records(records: torch.Tensor, record_index: torch.Tensor, wire: WireFormat, out: torch.Tensor) -> None:
    """Dequantises and sums each token's records.

    Args:
        records: uint8 [records, row_bytes]; the row stride is a multiple of 16.
        record_index: int64 [tokens, slots], contiguous; records in ascending rank, -1 for none.
        wire: the records' format; the elements of `none` are of `out`'s dtype.
        out: [tokens, hidden] float32, float16 or bfloat16 with contiguous rows, written whole; zero where a token has
            no record. Rounded once, saturating at the largest finite value unless the wire is `none`.
    """
    if out.shape[0] == 0:
        return
    layout = RecordLayout.of(wire, out.shape[1], out.dtype)
    with torch.cuda.device_of(records):  # Triton launches on the current device
        sum_records_kernel[(out.shape[0],)](
            records.view(torch.int8),
            records.stride(0),
            record_index,
            out,
            out.stride(0),
            SLOTS=record_index.shape[1],
            LAYOUT=layout,
            num_warps=layout.num_warps,
            enable_fp_fusion=False,
        )


def _add_present(total: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.where((index >= 0).unsqueeze(-1), total + rows, total)


def pack_weighted_sums_reference(
    expert_out: torch.Tensor,
    positions: torch.Tensor,
    weights: torch.Tensor,
    wire: WireFormat,
    dtype: torch.dtype,
    hidden: int | None = None,
) -> torch.Tensor:
    """`pack_weighted_sums` in plain torch: the records, uint8 [n, row_bytes]."""
    hidden = hidden or expert_out.shape[1]
    if expert_out.dtype == torch.uint8:
        expert_out = dequantize_reference(expert_out, wire, hidden, torch.float32)
    total = torch.zeros(positions.shape[0], hidden, dtype=sum_dtype(dtype), device=expert_out.device)
    # A row to point at where there is none.
    rows = torch.cat((expert_out.to(total.dtype), total.new_zeros(1, hidden)))
    for k in range(positions.shape[1]):
        total = _add_present(total, weights[:, k, None] * rows[positions[:, k]], positions[:, k])
    return quantize_reference(total if wire.quantized else round_reference(total, dtype, saturate=False), wire)


def sum_records_reference(
    records: torch.Tensor, record_index: torch.Tensor, wire: WireFormat, hidden: int, dtype: torch.dtype
) -> torch.Tensor:
    """`sum_records` in plain torch: [tokens, hidden] in `dtype`."""
    rows = scaled_reference(records, wire, hidden, dtype)
    total = rows.new_zeros(record_index.shape[0], rows.shape[1])
    rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    for j in range(record_index.shape[1]):
        total = _add_present(total, rows[record_index[:, j]], record_index[:, j])
    return round_reference(row_reference(total, wire, hidden), dtype, saturate=wire.quantized)
