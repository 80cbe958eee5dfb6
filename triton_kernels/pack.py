"""Pack and unpack: rows to records in the order of the wire, records to rows in the order of their reader.

    pack:    records[i] = quantise(x[row_index[i]])
    unpack:  out[row_index[i]] = dequantise(records[record_index[i]])

Each is one pass over the bytes: gathering, quantising and placing happen in the same program, one program a row.
"""

from __future__ import annotations

import torch

from thinwire.triton_kernels.codec import dequantize_row, quantize_row
from thinwire.triton_kernels.codec_reference import dequantize_reference, quantize_reference
from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.record import RecordLayout
from thinwire.wire import WireFormat


@triton.jit
def pack_kernel(
    x_ptr,
    x_row_stride,
    row_index_ptr,  # int64, or None for 0, 1, 2, ...
    records_ptr,
    record_stride,
    LAYOUT: tl.constexpr,
):
    """records[i] = quantise(x[row_index[i]]), program i."""
    record = tl.program_id(0).to(tl.int64)
    row = record
    if row_index_ptr is not None:
        row = tl.load(row_index_ptr + record)
    quantize_row(x_ptr + row * x_row_stride, tl.multiple_of(records_ptr + record * record_stride, 16), LAYOUT)


@triton.jit
def unpack_kernel(
    records_ptr,
    record_stride,
    record_index_ptr,  # int64, or None for 0, 1, 2, ...
    row_index_ptr,  # int64, or None for 0, 1, 2, ...
    out_ptr,
    out_row_stride,
    LAYOUT: tl.constexpr,
):
    """out[row_index[i]] = dequantise(records[record_index[i]]), program i."""
    item = tl.program_id(0).to(tl.int64)
    record, row = item, item
    if record_index_ptr is not None:
        record = tl.load(record_index_ptr + item)
    if row_index_ptr is not None:
        row = tl.load(row_index_ptr + item)
    base = tl.multiple_of(records_ptr + record * record_stride, 16)
    dequantize_row(base, out_ptr + row * out_row_stride, LAYOUT.HIDDEN, LAYOUT)


def pack_rows(x: torch.Tensor, wire: WireFormat, row_index: torch.Tensor | None, records: torch.Tensor) -> None:
    """Writes `records[i] = quantise(x[row_index[i]])`.

    Args:
        x: [rows, hidden] float32, float16 or bfloat16 with contiguous rows.
        wire: the format; `none` copies bit for bit.
        row_index: int64 [n], every entry a row of x; None stands for 0 ... n - 1.
        records: uint8 [n, row_bytes], written whole; the row stride is a multiple of 16.
    """
    if records.shape[0] == 0:
        return
    layout = RecordLayout.of(wire, x.shape[1], x.dtype)
    with torch.cuda.device_of(records):  # Triton launches on the current device
        pack_kernel[(records.shape[0],)](
            x,
            x.stride(0),
            row_index,
            records.view(torch.int8),
            records.stride(0),
            LAYOUT=layout,
            num_warps=layout.num_warps,
            enable_fp_fusion=False,
        )


def unpack_rows(
    records: torch.Tensor,
    wire: WireFormat,
    record_index: torch.Tensor | None,
    row_index: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Writes `out[row_index[i]] = dequantise(records[record_index[i]])`; rows of `out` not named are left alone.

    Args:
        records: uint8 [records, row_bytes]; the row stride is a multiple of 16.
        wire: the format they are in; `none` copies bit for bit.
        record_index: int64 [n], every entry a record; None stands for 0 ... n - 1.
        row_index: int64 [n], distinct rows of `out`; None stands for 0 ... n - 1.
        out: [rows, hidden] float32, float16 or bfloat16 with contiguous rows.
    """
    count = item_count(records, record_index, row_index)
    if count == 0:
        return
    layout = RecordLayout.of(wire, out.shape[1], out.dtype)
    with torch.cuda.device_of(records):  # Triton launches on the current device
        unpack_kernel[(count,)](
            records.view(torch.int8),
            records.stride(0),
            record_index,
            row_index,
            out,
            out.stride(0),
            LAYOUT=layout,
            num_warps=layout.num_warps,
            enable_fp_fusion=False,
        )


def item_count(records: torch.Tensor, record_index: torch.Tensor | None, row_index: torch.Tensor | None) -> int:
    """How many records an unpack moves: as many as whichever index is given, else all."""
    index = record_index if record_index is not None else row_index
    return records.shape[0] if index is None else index.shape[0]


def pack_rows_reference(x: torch.Tensor, wire: WireFormat, row_index: torch.Tensor | None) -> torch.Tensor:
    """`pack_rows` in plain torch: the records, uint8 [n, row_bytes]."""
    return quantize_reference(x if row_index is None else x[row_index], wire)


def unpack_rows_reference(
    records: torch.Tensor,
    wire: WireFormat,
    record_index: torch.Tensor | None,
    row_index: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """`unpack_rows` in plain torch."""
    count = item_count(records, record_index, row_index)
    chosen = records[:count] if record_index is None else records[record_index]
    rows = dequantize_reference(chosen, wire, out.shape[1], out.dtype)
    if row_index is None:
        out[:count] = rows
    else:
        out[row_index] = rows
