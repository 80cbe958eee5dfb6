"""Pieces of an all-to-all-v on the CPU: rows into a slot and out of it, and what the kernel knows of a call.

What it must know of the memory and of a call lies in int64 words: a struct, `call`, and behind it a matrix, `peers`.
So does what it notes for itself.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np

from thinwire.triton_kernels.cpu.compat import device, kernel
from thinwire.triton_kernels.cpu.ir.fields import struct_of
from thinwire.triton_kernels.cpu.ir.intrinsics import copy_bytes, stack_buffer, zero_bytes
from thinwire.triton_kernels.cpu.ir.streaming import stream_bytes
from thinwire.triton_kernels.cpu.pack import pack_kernel, unpack_kernel
from thinwire.triton_kernels.cpu.peer_stores import goes_aside, store

#: Words of `call`: first what stays for as long as the channel lives, ...
SCALARS = (
    "world", "rank", "half_lines", "half_bytes", "slot_bytes", "slots",
    "timeout", "grace", "report", "buffer_ptrs", "stuck", "status", "epoch", "give_up_by",
    "looks",  # before the first yield of a wait
    "regions", "num_regions",  # see `thinwire.triton_kernels.cpu.straight`; the first is 0 until there has been one
    "team",  # the address of that which shares the pieces while a large call runs, else 0
    "starting",  # whether threads are being started for a call that has not begun
    # ... from here on what a call brings: addresses of two tensors, bytes from one of what is counted to the next,
    "discard", "x", "x_step", "out", "out_step",
    # the form of the rows, and what the header says of it.
    "exact", "counts_per_row", "unit_bytes", "units_per_piece", "dtype",
    "kind", "group", "row_scale", "hidden", "scales_offset", "record_bytes",
    "signature0", "signature1", "signature2", "signature3",
)  # fmt: skip
call_at = struct_of(*SCALARS)

#: Rows of `peers`, which has a column for each rank: what a call brings, ...
_ROWS = (
    "SEND_COUNT", "SEND_DISPL", "RECV_COUNT", "RECV_DISPL",
    # what the kernel notes of the call (pieces, the parity piece being number 0; times; whether it told the peer where
    # to store, how many pieces the peer had stored straight at the last look, and where it may store itself), and for
    # good (ring pieces; segments that came straight; pieces stored straight; see `peer_stores`),
    "NEXT_OUT", "END_OUT", "NEXT_IN", "END_IN", "ANSWER", "LIMIT", "TOLD", "SEEN_STORED", "PLACE",
    "SENT", "RECEIVED", "STRAIGHT", "STORED", "SEEN",
    # and where a line or slot of this rank lies at the peer ("there"), or of the peer in this rank's memory ("here").
    "HEADER_THERE", "HEADER_HERE", "PARITY_THERE", "PARITY_HERE", "RING_THERE", "RING_HERE",
    "TAIL_THERE", "TAIL_HERE", "HEAD_THERE", "HEAD_HERE",
)  # fmt: skip
#: The number of each. A tuple, as numba 0.61 takes no member of an enum as an index.
P: Any = namedtuple("P", _ROWS)(*range(len(_ROWS)))
PEERS = tuple(map(str.lower, _ROWS))

#: Of exact rows: the output is then larger than the cache that its reader could have it in.
STREAM_BYTES = 4 << 20
_SCRATCH_RECORDS = 16384  # bytes of records that are made before they are stored: of a cache that is not the only one
_SCRATCH_ROW = 4096  # bytes of the largest row that a 1-D tensor is cut into


# ---------------------------------------------------------------------------------------------------------------------
# Rows and pieces. A piece holds `units_per_piece` units: bytes of exact rows, or records of quantised ones.


@device
def units_of(call, count):
    """Units of so many rows (or elements, for a 1-D tensor)."""
    return count * call.unit_bytes if call.exact else -(-count // call.counts_per_row)


@device
def pieces_of(call, count):
    """Pieces of so many rows, the parity piece among them even where it is empty."""
    return max(np.int64(1), -(-units_of(call, count) // call.units_per_piece))


@device
def layout_of(call):
    """The record's layout as the codec takes it."""
    return call.kind, call.group, call.row_scale, call.hidden, call.scales_offset, call.record_bytes


@kernel
def pack_part(call, peers, peer, number, target, begin, end):
    """Stores units `begin` to before `end` of piece `number` to `peer`, which lies at the address `target`."""
    count = peers[P.SEND_COUNT, peer]
    first = number * call.units_per_piece
    source = call.x + peers[P.SEND_DISPL, peer] * call.x_step
    if call.exact:
        # Of several threads any may note what it has seen: the word is whole, and each notes what is so.
        peers[P.SEEN, peer] = store(target + begin, source + first + begin, end - begin, peers[P.SEEN, peer])
        return
    layout, record_bytes, dtype, in_order = layout_of(call), call.record_bytes, call.dtype, np.int64(0)
    stride = call.x_step * call.counts_per_row
    whole = min(end, count // call.counts_per_row - first)
    scratch = stack_buffer(_SCRATCH_RECORDS)
    turn = min(call.units_per_piece, _SCRATCH_RECORDS // max(1, record_bytes))  # records that are made aside at once
    aside = peer != call.rank and goes_aside(turn * record_bytes, peers[P.SEEN, peer])
    if not aside:
        turn = call.units_per_piece
    for start in range(begin, whole, turn):
        record, rows = target + start * record_bytes, min(turn, whole - start)
        made = scratch if aside else record
        pack_kernel(source + (first + start) * stride, stride, dtype, in_order, made, record_bytes, rows, layout)
        if aside:
            peers[P.SEEN, peer] = store(record, scratch, rows * record_bytes, peers[P.SEEN, peer])
    if whole < end:  # a 1-D segment ends within a row, which zeros complete
        row = stack_buffer(_SCRATCH_ROW)
        rest = count % call.counts_per_row * call.x_step
        copy_bytes(row, source + (first + whole) * stride, rest)
        zero_bytes(row + rest, stride - rest)
        record = target + whole * record_bytes
        pack_kernel(row, stride, dtype, in_order, record, record_bytes, end - whole, layout)


@kernel
def unpack_part(call, peers, peer, number, source, begin, end):
    """Puts units `begin` to before `end` of piece `number` from `peer`, at the address `source`, into the output."""
    count = peers[P.RECV_COUNT, peer]
    first = number * call.units_per_piece
    target = call.out + peers[P.RECV_DISPL, peer] * call.out_step
    if call.exact:
        if units_of(call, count) >= STREAM_BYTES:
            stream_bytes(target + first + begin, source + begin, end - begin)
        else:
            copy_bytes(target + first + begin, source + begin, end - begin)
        return
    layout, record_bytes, dtype, in_order = layout_of(call), call.record_bytes, call.dtype, np.int64(0)
    stride = call.out_step * call.counts_per_row
    whole = min(end, count // call.counts_per_row - first)
    target += first * stride
    record, row = source + begin * record_bytes, target + begin * stride
    unpack_kernel(record, record_bytes, in_order, row, stride, dtype, in_order, whole - begin, layout)
    if whole < end:
        row = stack_buffer(_SCRATCH_ROW)
        record = source + whole * record_bytes
        unpack_kernel(record, record_bytes, in_order, row, stride, dtype, in_order, end - whole, layout)
        copy_bytes(target + whole * stride, row, count % call.counts_per_row * call.out_step)
