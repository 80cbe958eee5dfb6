"""Quantising rows into an order, and dequantising them out of one, without a tensor in between.

Equal to `thinwire.triton_kernels.pack` to the last bit. The permutations that a collective needs on either side of the
wire cost no pass of their own: each row is read once, and its record is written once, in its place.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from thinwire.triton_kernels.cpu.codec import Layout, dequantize_row, dtype_code, quantize_row, record_layout
from thinwire.triton_kernels.cpu.compat import device, kernel
from thinwire.triton_kernels.cpu.ir.intrinsics import load_int64
from thinwire.triton_kernels.cpu.team import do_rows, run_in_team, threads_for
from thinwire.triton_kernels.pack import item_count
from thinwire.wire import WireFormat


@kernel
def pack_kernel(x, x_stride, dtype, row_index, records, record_stride, count, layout):
    """Record i from row row_index[i], or from row i where `row_index` is 0. Strides are in bytes."""
    for i in range(count):
        row = load_int64(row_index + 8 * i) if row_index else i
        quantize_row(x + row * x_stride, dtype, records + i * record_stride, layout)


@kernel
def unpack_kernel(records, record_stride, record_index, out, out_stride, dtype, row_index, count, layout):
    """Row row_index[i] from record record_index[i], where 0 for either stands for i. Strides are in bytes."""
    for i in range(count):
        record = load_int64(record_index + 8 * i) if record_index else i
        row = load_int64(row_index + 8 * i) if row_index else i
        dequantize_row(records + record * record_stride, out + row * out_stride, dtype, layout)


@device
def pack_some(where, first, stop):
    """Records `first` to before `stop`, of a team's work."""
    x, x_stride, dtype, row_index, records, record_stride, layout = where
    index = row_index + 8 * first if row_index else row_index
    rows = x if row_index else x + first * x_stride
    pack_kernel(rows, x_stride, dtype, index, records + first * record_stride, record_stride, stop - first, layout)


@kernel
def pack_in_team_kernel(x, x_stride, dtype, row_index, records, record_stride, count, layout, words, member):
    """`pack_kernel` in each thread of a team."""
    do_rows(words, member, count, pack_some, (x, x_stride, dtype, row_index, records, record_stride, layout))


@device
def unpack_some(where, first, stop):
    """Items `first` to before `stop`, of a team's work."""
    records, record_stride, record_index, out, out_stride, dtype, row_index, layout = where
    chosen = record_index + 8 * first if record_index else record_index
    index = row_index + 8 * first if row_index else row_index
    source = records if record_index else records + first * record_stride
    target = out if row_index else out + first * out_stride
    unpack_kernel(source, record_stride, chosen, target, out_stride, dtype, index, stop - first, layout)


@kernel
def unpack_in_team_kernel(
    records, record_stride, record_index, out, out_stride, dtype, row_index, count, layout, words,
    member,
):  # fmt: skip
    """`unpack_kernel` in each thread of a team; no two items have the same row."""
    where = (records, record_stride, record_index, out, out_stride, dtype, row_index, layout)
    do_rows(words, member, count, unpack_some, where)


@lru_cache(maxsize=1024)
def _form(wire: WireFormat, hidden: int, dtype: torch.dtype) -> tuple[int, int, Layout]:
    """Of such rows: bytes of an element, what kernels call the dtype, and their records' layout."""
    return dtype.itemsize, dtype_code(dtype), record_layout(wire, hidden, dtype)


def _in_a_row(index: torch.Tensor | None) -> tuple[torch.Tensor | None, int]:
    """An index without gaps, which the caller holds on to while a kernel reads it, and its address: 0 for None."""
    index = None if index is None else index.contiguous()
    return index, 0 if index is None else index.data_ptr()


def pack_rows(
    x: torch.Tensor, wire: WireFormat, row_index: torch.Tensor | None, records: torch.Tensor, threads: int = 1
) -> None:
    """Record i = x[row_index[i]], quantised: `thinwire.triton_kernels.pack.pack_rows` for CPU tensors.

    Up to `threads` threads share the rows of a large call. The columns of a row lie side by side. Raises
    WireFormatError for another dtype, TransportUnavailable without numba.
    """
    count = records.shape[0]
    if count == 0:
        return
    row_index, rows = _in_a_row(row_index)
    hidden = x.shape[1]
    size, code, layout = _form(wire, hidden, x.dtype)
    arguments = x.data_ptr(), x.stride(0) * size, code, rows, records.data_ptr(), records.stride(0), count, layout
    if threads > 1:
        threads = threads_for(count, hidden * size, threads)
    if threads > 1:
        run_in_team(threads, count, pack_in_team_kernel, *arguments)
    else:
        pack_kernel(*arguments)


def unpack_rows(
    records: torch.Tensor,
    wire: WireFormat,
    record_index: torch.Tensor | None,
    row_index: torch.Tensor | None,
    out: torch.Tensor,
    threads: int = 1,
) -> None:
    """out[row_index[i]] = record record_index[i]: `thinwire.triton_kernels.pack.unpack_rows` for CPU tensors.

    Up to `threads` threads share the rows of a large call. The columns of a row lie side by side. Raises
    WireFormatError for another dtype, TransportUnavailable without numba.
    """
    count = item_count(records, record_index, row_index)
    if count == 0:
        return
    record_index, chosen = _in_a_row(record_index)
    row_index, rows = _in_a_row(row_index)
    hidden = out.shape[1]
    size, code, layout = _form(wire, hidden, out.dtype)
    target = out.data_ptr(), out.stride(0) * size
    arguments = records.data_ptr(), records.stride(0), chosen, *target, code, rows, count, layout
    if threads > 1:
        threads = threads_for(count, hidden * size, threads)
    if threads > 1:
        run_in_team(threads, count, unpack_in_team_kernel, *arguments)
    else:
        unpack_kernel(*arguments)
