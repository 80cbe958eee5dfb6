"""Experts' products on received int8 records on the CPU, equal to those of `thinwire.triton_kernels` to the last bit.

Four rows of an expert at a time are multiplied by two channels at a time, so that each byte that is read is used more
than once.
"""

from __future__ import annotations

import torch

from thinwire.triton_kernels.cpu.codec import dtype_code, quantize_row, record_layout, round_row
from thinwire.triton_kernels.cpu.compat import device, kernel
from thinwire.triton_kernels.cpu.ir.intrinsics import (
    load_float32,
    load_int32,
    load_int64,
    stack_buffer,
    store_float32,
    store_int32,
    store_int64,
    zero_bytes,
)
from thinwire.triton_kernels.cpu.ir.loops import read_scales
from thinwire.triton_kernels.cpu.ir.products import multiply_groups, silu_columns
from thinwire.triton_kernels.cpu.ir.vectors import FLOAT32
from thinwire.triton_kernels.int8_weights import Int8Weights, require_int8_sums
from thinwire.wire import WireFormat

_ROWS = 4
_ADDRESSES = 8 * _ROWS
_LANES = 16


@device
def multiply_rows(first, count, rows_in, weights, values, values_stride, scales):
    """Products of up to four rows of one expert with all its channels, without the channels' scales."""
    records, record_stride, num_records, index, layout = rows_in
    kind, group, row_scale, hidden, scales_offset, row_bytes = layout
    payload, num_channels = weights
    groups = (hidden + group - 1) // group
    scales_stride = 4 * ((groups + 7) & -8)
    sources = stack_buffer(_ADDRESSES)
    for row in range(count):
        record = load_int64(index + 8 * (first + row)) if index else first + row
        place = scales + row * scales_stride
        if 0 <= record < num_records:
            source = records + record * record_stride
            store_int64(sources + 8 * row, source)
            if row_scale:
                store_int32(place, load_int32(source + scales_offset))
            else:
                read_scales(source + scales_offset, groups, place)
        else:
            store_int64(sources + 8 * row, payload)  # whatever bytes, times zero
            zero_bytes(place, scales_stride)
    width = scales_offset if row_scale else group  # of a group; a row's padding is multiplied by zeros
    for channel in range(0, num_channels & -2, 2):
        multiply_groups(
            sources, scales, scales_stride, count, payload + channel * scales_offset, scales_offset, 2,
            scales_offset, width, values + 4 * channel, values_stride,
        )  # fmt: skip
    if num_channels & 1:
        last = num_channels - 1
        multiply_groups(
            sources, scales, scales_stride, count, payload + last * scales_offset, scales_offset, 1,
            scales_offset, width, values + 4 * last, values_stride,
        )  # fmt: skip


@kernel
def expert_gemm_kernel(rows_in, offsets, num_experts, weights, end, out_rows, scratch):
    """All rows of all experts. `scratch` has room for four rows of channels, then as many of a record's scales."""
    payload, weight_scales, num_channels = weights
    gated, activate = end
    out, out_stride, dtype, quantised, out_layout, num_rows, values_stride = out_rows
    columns = rows_in[4][4]
    width = num_channels // 2 if gated else num_channels
    half = values_stride // 2 if gated else 0  # where the channels behind the gate's are moved to
    scales = scratch + _ROWS * values_stride
    written = 0
    for expert in range(num_experts):
        first = max(load_int64(offsets + 8 * expert), written)
        last = min(load_int64(offsets + 8 * expert + 8), num_rows)
        while first < last:
            count = 4 if last - first >= 4 else 2 if last - first >= 2 else 1
            own = payload + expert * num_channels * columns
            for part in range(1 + gated):
                channels = own + part * width * columns
                multiply_rows(first, count, rows_in, (channels, width), scratch + part * half, values_stride, scales)
            for row in range(count):
                values = scratch + row * values_stride
                for part in range(1 + gated):
                    of_channels = weight_scales + 4 * (expert * num_channels + part * width)
                    for column in range(width):
                        place = values + part * half + 4 * column
                        store_float32(place, load_float32(place) * load_float32(of_channels + 4 * column))
                if gated or activate:
                    silu_columns(values, values + half, width, gated, values)
                target = out + (first + row) * out_stride
                if quantised:
                    quantize_row(values, FLOAT32, target, out_layout)
                else:
                    round_row(values, width, target, dtype, 0)
            first += count
        written = max(written, min(last, num_rows))


def expert_gemm(
    records: torch.Tensor,
    wire: WireFormat,
    index: torch.Tensor | None,
    expert_offsets: torch.Tensor,
    weights: Int8Weights,
    out: torch.Tensor,
    out_wire: WireFormat | None = None,
) -> None:
    """One product of all experts: `thinwire.triton_kernels.expert_gemm.expert_gemm` for CPU tensors.

    Raises WireFormatError for another wire or dtype, TransportUnavailable without numba.
    """
    require_int8_sums(wire, weights.inward)
    layout = record_layout(wire, weights.inward, torch.float32)
    index = None if index is None else index.long().contiguous()
    offsets = expert_offsets.long().contiguous()
    payload, scales = weights.payload.contiguous(), weights.scales.contiguous()
    half = 4 * (weights.width + -weights.width % _LANES)
    stride = half * (1 + weights.gated)
    room = 4 * (wire.num_groups(weights.inward) + 8)
    scratch = torch.empty(_ROWS * (stride + room), dtype=torch.uint8, device="cpu")
    quantised = out_wire is not None
    dtype = FLOAT32 if quantised else dtype_code(out.dtype)
    out_layout = record_layout(out_wire or wire, weights.width, torch.float32)
    expert_gemm_kernel(
        (records.data_ptr(), records.stride(0), records.shape[0], 0 if index is None else index.data_ptr(), layout),
        offsets.data_ptr(), payload.shape[0], (payload.data_ptr(), scales.data_ptr(), payload.shape[1]),
        (int(weights.gated), int(weights.activate)),
        (out.data_ptr(), out.stride(0) * out.itemsize, dtype, int(quantised), out_layout, out.shape[0], stride),
        scratch.data_ptr(),
    )  # fmt: skip
