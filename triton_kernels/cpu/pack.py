"""Quantising rows into an order, and dequantising them out of one, without a tensor in between.

Equal to `thinwire.triton_kernels.pack` to the last bit. The permutations that a collective needs on either side of the
wire cost no pass of their own: each row is read once, and its record is written once, in its place.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import lru_cache

import torch

from thinwire.log import LOGGER
from thinwire.triton_kernels.cpu.codec import Layout, dequantize_row, dtype_code, quantize_row, record_layout
from thinwire.triton_kernels.cpu.compat import kernel
from thinwire.triton_kernels.cpu.ir.memory import load_int64
from thinwire.triton_kernels.pack import item_count
from thinwire.wire import WireFormat

#: Bytes of rows that are worth a thread. One takes 25 us of the caller's time, and as long again until it runs. With
#: half as many bytes it is worth that on an idle core, and a loss of a sixth where another process keeps the core busy.
BYTES_PER_THREAD = 4 << 20
_LEAST_STACK_BYTES = 128 << 10  # of a thread; kernels keep 32 KiB of a row there, and 20 KiB of records


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


def threads_for(count: int, row_bytes: int, threads: int) -> int:
    """How many of the threads that a rank may use are worth it for `count` rows.

    One where `threading.stack_size` gives new threads too little for kernels: they would overrun it.
    """
    if count * row_bytes < 2 * BYTES_PER_THREAD or 0 < threading.stack_size() < _LEAST_STACK_BYTES:
        return 1
    return max(1, min(threads, count, count * row_bytes // BYTES_PER_THREAD))


def share_rows(threads: int, count: int, run: Callable[[int, int], object]) -> None:
    """Calls `run(first, stop)` for all of `count` rows, a part in each of so many threads, and waits for them.

    Threads are started for the call and end with it: a pool would have to be made anew after a fork. Where the system
    has no more of them, this thread does their parts, and the log says so once. `run` holds the tensors that it works
    on, as an exception may end this call before the others do.
    """
    if threads == 1 or sys.is_finalizing():  # a thread that is started now would never run
        run(0, count)
        return
    others: list[threading.Thread] = []
    rows = -(-count // threads)
    for first in range(rows, count, rows):
        other = threading.Thread(target=run, args=(first, min(first + rows, count)), daemon=True)
        try:
            other.start()
        except (RuntimeError, MemoryError) as error:
            _warn(f"{1 + len(others)} of {threads} threads share the rows of large calls: {error!r}")
            run(first, count)
            break
        others.append(other)
    run(0, min(rows, count))
    for other in others:
        other.join()


@lru_cache(maxsize=16)
def _warn(message: str) -> None:
    """Once for each message."""
    LOGGER.warning(message)


@lru_cache(maxsize=1024)
def _form(wire: WireFormat, hidden: int, dtype: torch.dtype) -> tuple[int, int, Layout]:
    """Gives the bytes of an element of such rows, what kernels call the dtype, and their records' layout."""
    return dtype.itemsize, dtype_code(dtype), record_layout(wire, hidden, dtype)


def _place_in(index: torch.Tensor | None, first: int) -> int:
    """The address of an index from its number `first` on; 0 for None."""
    return 0 if index is None else index.data_ptr() + 8 * first


def pack_rows(
    x: torch.Tensor, wire: WireFormat, row_index: torch.Tensor | None, records: torch.Tensor, threads: int = 1
) -> None:
    """Record i = x[row_index[i]], quantised: `thinwire.triton_kernels.pack.pack_rows` for CPU tensors.

    Up to `threads` threads share the rows of a large call. The columns of a row lie side by side. Raises
    WireFormatError for another dtype, TransportUnavailable without numba.
    """
    count, hidden = records.shape[0], x.shape[1]
    if count == 0:
        return
    size, code, layout = _form(wire, hidden, x.dtype)
    x_stride, stride, index = (
        x.stride(0) * size,
        records.stride(0),
        None if row_index is None else row_index.contiguous(),
    )

    def pack(first: int, stop: int) -> None:
        rows, target = x.data_ptr() + (first * x_stride if index is None else 0), records.data_ptr() + first * stride
        pack_kernel(rows, x_stride, code, _place_in(index, first), target, stride, stop - first, layout)

    share_rows(threads_for(count, hidden * size, threads), count, pack)


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
    count, hidden = item_count(records, record_index, row_index), out.shape[1]
    if count == 0:
        return
    size, code, layout = _form(wire, hidden, out.dtype)
    stride, out_stride = records.stride(0), out.stride(0) * size
    chosen, index = (None if each is None else each.contiguous() for each in (record_index, row_index))

    def unpack(first: int, stop: int) -> None:
        source = records.data_ptr() + (first * stride if chosen is None else 0)
        rows = out.data_ptr() + (first * out_stride if index is None else 0)
        places = _place_in(chosen, first), _place_in(index, first)
        unpack_kernel(source, stride, places[0], rows, out_stride, code, places[1], stop - first, layout)

    share_rows(threads_for(count, hidden * size, threads), count, unpack)
