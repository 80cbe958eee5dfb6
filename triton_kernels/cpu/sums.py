"""The two sums of combine: a rank's experts into one record a token, and the records of all ranks into the token.

Equal to `thinwire.triton_kernels.sums` to the last bit. Sums are float32 from +0.0; each product is rounded and then
added, in the order of the positions, so that the result does not depend on the transport.

A row's columns pass through in blocks that stay in registers while all terms are added, so each source is read once and
the sum is written once.
"""

from __future__ import annotations

import numpy as np
import torch

from thinwire.triton_kernels.cpu.codec import (
    STACK_RECORD_BYTES,
    columns_of,
    dequantize_row,
    dtype_code,
    element_bytes,
    element_kind,
    pack_row,
    record_layout,
    round_row,
    second_plane,
)
from thinwire.triton_kernels.cpu.compat import device, kernel
from thinwire.triton_kernels.cpu.ir.loops import accumulate_groups, rotate_back
from thinwire.triton_kernels.cpu.ir.memory import (
    copy_bytes,
    load_int64,
    stack_buffer,
    store_float32,
    store_int64,
    stream_bytes,
    zero_bytes,
)
from thinwire.triton_kernels.cpu.ir.vectors import BITS, FLOAT32, NONE, ROTATED
from thinwire.wire import BLOCK, WireFormat

_LANES = 16
_REST_BYTES = 4 * _LANES
_ONE = np.float32(1.0)
#: In place of a dtype's code: rows are records of the format that their sums will have, or go home as they are.
ENCODED, AS_THEY_ARE = -1, -2


def scratch_bytes(hidden: int, terms: int, encoded: bool = False) -> int:
    """What the row functions of this file need to sum `terms` rows of `hidden` elements: addresses, ends, the sum.

    And, if rows are `encoded`, one float32 row for each.

    >>> scratch_bytes(7168, 8)
    29328
    """
    return terms * (16 + _REST_BYTES) + 16 + 4 * (hidden + -hidden % BLOCK) * (1 + terms * encoded)


def rows_code(rows: torch.Tensor, as_they_are: bool = False) -> int:
    """What the kernels call what rows are of: ENCODED, AS_THEY_ARE or a dtype's code, which may raise."""
    return dtype_code(rows.dtype) if rows.dtype != torch.uint8 else AS_THEY_ARE if as_they_are else ENCODED


@device
def scratch_parts(scratch, terms):
    """Addresses of a scratch's parts: sources, their scales, the ends of their rows, a constant 1.0, the sum."""
    ends = scratch + 16 * terms
    one = ends + _REST_BYTES * terms
    return scratch, scratch + 8 * terms, ends, one, one + 16


@device
def sum_sources(sources, scales, count, element, plane, row_scale, hidden, group, ends, total):
    """Sums `count` sources, as `accumulate_groups` does, over any number of columns; consumes the address arrays."""
    whole = hidden & -_LANES
    accumulate_groups(sources, scales, count, element, plane, row_scale, whole, group, total)
    if whole == hidden:
        return
    bits = BITS[element]
    for j in range(count):
        # A source may end where its memory does, so the last columns are read from a padded copy.
        end = ends + _REST_BYTES * j
        zero_bytes(end, _REST_BYTES)
        copy_bytes(end, load_int64(sources + 8 * j) + (whole * bits >> 3), ((hidden - whole) * bits + 7) >> 3)
        store_int64(sources + 8 * j, end)
        if row_scale == 0:
            store_int64(scales + 8 * j, load_int64(scales + 8 * j) + 2 * ((hidden - 1) // group))
    accumulate_groups(sources, scales, count, element, plane, row_scale, _LANES, _LANES, total + 4 * whole)


@device
def weighted_sum_row(rows, row_stride, dtype, positions, weights, terms, layout, scratch):
    """Sums weights[k] * rows[positions[k]] over k with positions[k] >= 0, and returns the sum's address in `scratch`.

    `positions` (int64) and `weights` (float32) are addresses of `terms` numbers; `row_stride` is in bytes. The sum is
    float32, with room for a multiple of 16 columns. `dtype` may be ENCODED: then `layout` is that of the rows, too.
    """
    kind, group, row_scale, hidden, scales_offset, row_bytes = layout
    sources, scales, ends, one, total = scratch_parts(scratch, terms)
    room = 4 * (hidden + -hidden % BLOCK)
    count = 0
    for k in range(terms):
        position = load_int64(positions + 8 * k)
        if position >= 0:
            source = rows + position * row_stride
            if dtype == ENCODED:
                # Not in the sum's own loop: that has one product for an element, and this takes two.
                decoded = total + room * (1 + count)
                dequantize_row(source, decoded, FLOAT32, layout)
                source = decoded
            store_int64(sources + 8 * count, source)
            store_int64(scales + 8 * count, weights + 4 * k)
            count += 1
    element = FLOAT32 if dtype == ENCODED else dtype
    sum_sources(sources, scales, count, element, 0, 1, hidden, hidden, ends, total)
    return total


@device
def copy_record(rows, row_stride, positions, record, layout):
    """Writes the record at the first of `positions` as it is, or one of zeros where there is none."""
    kind, group, row_scale, hidden, scales_offset, row_bytes = layout
    position = load_int64(positions)
    if position < 0:
        zero_bytes(record, row_bytes)
        return
    source = rows + position * row_stride
    payload = columns_of(kind, hidden) * BITS[element_kind(kind)] + 7 >> 3
    end = scales_offset + (4 if row_scale else (hidden + group - 1) // group * 2)
    copy_bytes(record, source, payload)
    zero_bytes(record + payload, scales_offset - payload)
    copy_bytes(record + scales_offset, source + scales_offset, end - scales_offset)
    zero_bytes(record + end, row_bytes - end)


@kernel
def pack_sum_row(total, dtype, record, layout, saturate, far):
    """Writes a sum, as `weighted_sum_row` leaves it, as a record, all bytes of it; `none` rounds it to `dtype`.

    `far`: as `pack_row` has it.
    """
    kind, group, row_scale, hidden, scales_offset, row_bytes = layout
    if kind != NONE:
        pack_row(total, FLOAT32, record, layout, far)
        return
    size, packed = hidden * element_bytes(dtype), stack_buffer(STACK_RECORD_BYTES)
    made = packed if far and row_bytes <= STACK_RECORD_BYTES else record
    round_row(total, hidden, made, dtype, saturate)
    zero_bytes(made + size, row_bytes - size)
    if made != record:
        stream_bytes(record, made, row_bytes)


@device
def record_sum(records, record_stride, record_index, terms, dtype, layout, scratch):
    """Sums the records that `record_index`, an address of `terms` int64, names; -1 names none.

    Returns the sum's address in `scratch`: float32, with room for a multiple of 16 columns.
    """
    kind, group, row_scale, hidden, scales_offset, row_bytes = layout
    sources, scales, ends, one, total = scratch_parts(scratch, terms)
    store_float32(one, _ONE)
    count = 0
    for j in range(terms):
        number = load_int64(record_index + 8 * j)
        if number >= 0:
            record = records + number * record_stride
            store_int64(sources + 8 * count, record)
            store_int64(scales + 8 * count, one if kind == NONE else record + scales_offset)
            count += 1
    columns, plane, element = columns_of(kind, hidden), second_plane(kind, hidden), element_kind(kind)
    if kind == NONE:
        element, row_scale = dtype, 1
    sum_sources(sources, scales, count, element, plane, row_scale, columns, group, ends, total)
    if kind >= ROTATED:
        rotate_back(total, columns)
    return total


@device
def sum_record_row(records, record_stride, record_index, terms, dtype, layout, out, scratch):
    """Sums records as `record_sum` does, and rounds into the row at `out`; sums of quantised records saturate."""
    total = record_sum(records, record_stride, record_index, terms, dtype, layout, scratch)
    round_row(total, layout[3], out, dtype, 0 if layout[0] == NONE else 1)


@kernel
def pack_weighted_sums_kernel(
    rows, row_stride, dtype, positions, weights, terms, records, record_stride, record_dtype, count, layout, scratch,
):  # fmt: skip
    """Record r from the weighted sum of the rows that positions[r] names. Strides are in bytes."""
    for r in range(count):
        first = r * terms
        named, factors = positions + 8 * first, weights + 4 * first
        total = weighted_sum_row(rows, row_stride, dtype, named, factors, terms, layout, scratch)
        pack_sum_row(total, record_dtype, records + r * record_stride, layout, 0, False)


@kernel
def sum_records_kernel(records, record_stride, record_index, terms, out, out_stride, dtype, count, layout, scratch):
    """Row t from the records that record_index[t] names. Strides are in bytes."""
    for t in range(count):
        row_records = record_index + 8 * t * terms
        sum_record_row(records, record_stride, row_records, terms, dtype, layout, out + t * out_stride, scratch)


def pack_weighted_sums(
    expert_out: torch.Tensor,
    positions: torch.Tensor,
    weights: torch.Tensor,
    wire: WireFormat,
    dtype: torch.dtype,
    records: torch.Tensor,
    hidden: int | None = None,
) -> None:
    """`thinwire.triton_kernels.sums.pack_weighted_sums` for CPU tensors, each row's columns side by side.

    Positions are not checked. Raises WireFormatError for another dtype, TransportUnavailable without numba.
    """
    count, terms = positions.shape
    hidden, code = hidden or expert_out.shape[1], rows_code(expert_out)
    scratch = torch.empty(scratch_bytes(hidden, terms, code == ENCODED), dtype=torch.uint8, device="cpu")
    positions, weights = positions.contiguous(), weights.contiguous()
    stride, layout = expert_out.stride(0) * expert_out.itemsize, record_layout(wire, hidden, dtype)
    pack_weighted_sums_kernel(
        expert_out.data_ptr(), stride, code, positions.data_ptr(), weights.data_ptr(), terms,
        records.data_ptr(), records.stride(0), dtype_code(dtype), count, layout, scratch.data_ptr(),
    )  # fmt: skip


def sum_records(records: torch.Tensor, record_index: torch.Tensor, wire: WireFormat, out: torch.Tensor) -> None:
    """`thinwire.triton_kernels.sums.sum_records` for CPU tensors, each row's columns side by side.

    Indices are not checked. Raises WireFormatError for another dtype, TransportUnavailable without numba.
    """
    count, terms = record_index.shape
    hidden = out.shape[1]
    scratch = torch.empty(scratch_bytes(hidden, terms), dtype=torch.uint8, device="cpu")
    record_index = record_index.contiguous()
    stride, code, layout = out.stride(0) * out.itemsize, dtype_code(out.dtype), record_layout(wire, hidden, out.dtype)
    sum_records_kernel(
        records.data_ptr(), records.stride(0), record_index.data_ptr(), terms, out.data_ptr(), stride, code, count,
        layout, scratch.data_ptr(),
    )  # fmt: skip
