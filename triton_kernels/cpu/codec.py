"""The codec on the CPU: rows of float32, float16 or bfloat16 to wire records and back.

Equal to `thinwire.triton_kernels.codec` to the last bit. `codec_reference.py` there is the reference of this file too.

`quantize_row` and `dequantize_row` take addresses, so that a kernel elsewhere may read a row straight out of a peer's
mapped memory. A layout, `record_layout(...)`, tells them all they must know of the record.

Without numba the modules of this folder import, and their functions raise `TransportUnavailable` when called.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from thinwire.errors import WireFormatError
from thinwire.triton_kernels.cpu.compat import device, kernel
from thinwire.triton_kernels.cpu.ir.loops import (
    amax_groups,
    decode_groups,
    encode_groups,
    magnitude_bits,
    read_scales,
    round_columns,
    scale_groups,
    widen_groups,
)
from thinwire.triton_kernels.cpu.ir.memory import (
    bits_to_float32,
    copy_bytes,
    load_float32,
    load_int32,
    log2,
    stack_buffer,
    store_int32,
    stream_bytes,
    zero_bytes,
)
from thinwire.triton_kernels.cpu.ir.vectors import BFLOAT16, BITS, FLOAT16, FLOAT32, LOW_BITS, NONE, ROTATED
from thinwire.wire import BLOCK, FORMATS, WireFormat

#: A tuple of integers, since numba reads that fastest: LAYOUT_FIELDS. ROTATED is added to the kind of what is rotated.
Layout = tuple[int, int, int, int, int, int]
LAYOUT_FIELDS = ("kind", "group", "row_scale", "hidden", "scales_offset", "row_bytes")

_DTYPE_CODES = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}

_LANES = 16  # columns of the narrowest block
# A tile is what passes from memory to the first-level cache once, though its columns are looked at twice.
_TILE_BYTES = 16384
_MAX_TILE_GROUPS = 64
_MIN_TILE_GROUPS = 8  # 16 bytes of scales
_GROUP_BYTES = 4 * _MAX_TILE_GROUPS
_WIDE_TILE = _MIN_TILE_GROUPS * 1024
_WIDE_TILE_BYTES = 4 * _WIDE_TILE
_BLOCK_BYTES = 4 * BLOCK
_REST_BYTES = 4 * _LANES
_WORD = 4
#: Bytes of the longest record that is made on the stack, if it is to be stored past the caches.
STACK_RECORD_BYTES = 16384 + 64
_ZERO = np.float32(0.0)
_LARGEST_FLOAT32 = np.float32(torch.finfo(torch.float32).max)
_LARGEST_FLOAT16 = np.float32(torch.finfo(torch.float16).max)
_LARGEST_BFLOAT16 = np.float32(torch.finfo(torch.bfloat16).max)
_BOUNDS = tuple(np.float32(each.bound) for each in FORMATS.values())


def dtype_code(dtype: torch.dtype) -> int:
    """What the kernels call a row's dtype.

    Raises:
        WireFormatError: for a dtype other than float32, float16 and bfloat16.
    """
    if dtype not in _DTYPE_CODES:
        accepted = ", ".join(map(str, _DTYPE_CODES))
        raise WireFormatError(f"rows of {dtype} cannot be put on the wire; accepted: {accepted}")
    return _DTYPE_CODES[dtype]


@lru_cache(maxsize=1024)
def record_layout(wire: WireFormat, hidden: int, dtype: torch.dtype) -> Layout:
    """What the row functions must know of a record; `dtype` is the rows' own, which `none` keeps.

    >>> record_layout(WireFormat.parse("int8"), 7168, torch.bfloat16)
    (1, 128, 0, 7168, 7168, 7296)
    """
    return (
        wire.kind + ROTATED * wire.rotated,
        wire.group or wire.columns(hidden),
        int(wire.row_scale),
        hidden,
        wire.scales_offset(hidden, dtype),
        wire.row_bytes(hidden, dtype),
    )


# ---------------------------------------------------------------------------------------------------------------------
# One row, by address


@device
def element_bytes(dtype):
    """Bytes of one element of a row."""
    return 4 if dtype == FLOAT32 else 2


@device
def tile_columns(group, size):
    """Columns, of `size` bytes, of a tile: whole groups, a power of two of them, a multiple of 16 bytes of scales."""
    return max(_MIN_TILE_GROUPS * group, min(_MAX_TILE_GROUPS * group, _TILE_BYTES // size))


@device
def group_count(columns, group, row_scale):
    """Groups of so many columns. A division would take as long as a group does."""
    return 1 if row_scale else (columns + group - 1) >> log2(group)


@device
def element_kind(kind):
    """What a layout's kind says of its elements, without what it says of their rotation."""
    return kind & ROTATED - 1


@device
def columns_of(kind, hidden):
    """Columns that travel for a row of `hidden`: those of whole blocks, where there are blocks."""
    element = element_kind(kind)
    return (hidden + BLOCK - 1) & -BLOCK if kind != element or LOW_BITS[element] < BITS[element] else hidden


@device
def second_plane(kind, hidden):
    """Bytes from the beginning of a payload to its second plane."""
    return columns_of(kind, hidden) * LOW_BITS[element_kind(kind)] >> 3


@device
def load_blocks(x, columns, group, dtype, rotated, out, amax, last):
    """Columns of a row as float32, filled up to whole blocks with zeros and then rotated; each group's amax."""
    whole = columns & -BLOCK
    store_int32(last, 0)  # where the last group has no whole block
    widen_groups(x, whole, group, dtype, rotated, out, amax)
    if whole < columns:
        size = element_bytes(dtype)
        rest = stack_buffer(_BLOCK_BYTES)
        zero_bytes(rest, _BLOCK_BYTES)
        copy_bytes(rest, x + whole * size, (columns - whole) * size)
        rest_amax = stack_buffer(_WORD)
        widen_groups(rest, BLOCK, BLOCK, dtype, rotated, out + 4 * whole, rest_amax)
        store_int32(last, max(load_int32(last), load_int32(rest_amax)))


@device
def quantize_row(x, dtype, record, layout):
    """Quantises the row at address `x` into the record at address `record`, and writes all bytes of it."""
    kind, group, row_scale, hidden, scales_offset, row_bytes = layout
    size = element_bytes(dtype)
    if kind == NONE:
        copy_bytes(record, x, hidden * size)
        zero_bytes(record + hidden * size, row_bytes - hidden * size)
        return
    rotated, all_columns, plane = kind // ROTATED, columns_of(kind, hidden), record + second_plane(kind, hidden)
    blocks = rotated or LOW_BITS[element_kind(kind)] < BITS[element_kind(kind)]
    kind = element_kind(kind)
    bits = LOW_BITS[kind]
    inverses = stack_buffer(_GROUP_BYTES)
    rest_x = stack_buffer(_REST_BYTES)
    rest_amax = stack_buffer(_WORD)
    floats = stack_buffer(_WIDE_TILE_BYTES)
    scales = record + scales_offset
    zero_bytes(scales - 16, 16)  # the payload's pad, before the payload
    tile = all_columns if row_scale else tile_columns(group, 4 if blocks else size)
    looks, row_amax, element = 1, np.int32(0), dtype
    if blocks:
        element, tile = FLOAT32, min(tile, _WIDE_TILE)
        looks = 2 if row_scale else 1  # all of a row is rotated before the first code can be made
    for look in range(looks):
        start = 0
        while start < all_columns:  # a range would divide
            columns = min(tile, all_columns - start)
            whole = columns & -_LANES
            rest = columns - whole
            groups = group_count(columns, group, row_scale)
            last = inverses + 4 * (groups - 1)
            source = x + start * size
            if blocks:
                if not look or tile < all_columns:  # else all of the row is still there
                    load_blocks(source, min(columns, hidden - start), group, dtype, rotated, floats, inverses, last)
                source = floats
            else:
                store_int32(last, 0)
                amax_groups(source, whole, group, element, inverses)
            payload = record + (start * bits >> 3)
            if rest:
                zero_bytes(rest_x, _REST_BYTES)
                copy_bytes(rest_x, source + whole * size, rest * size)
                amax_groups(rest_x, _LANES, _LANES, element, rest_amax)
                store_int32(last, max(load_int32(last), load_int32(rest_amax)))
            if looks == 2:
                row_amax = max(row_amax, load_int32(last))
                store_int32(last, row_amax)
            if look == looks - 1:
                some_dead = scale_groups(inverses, groups, kind, row_scale, rotated, scales)
                high = plane + (start >> 2)
                encode_groups(source, whole, group, element, inverses, payload, high, kind)
                if rest:
                    encode_groups(rest_x, _LANES, _LANES, element, last, payload + (whole * bits >> 3), high, kind)
                if some_dead:
                    # Only now: 0 * x is NaN for some x, and -0.0 has a sign bit in fp8.
                    written = columns + -columns % _LANES
                    for number in range(groups):
                        if load_float32(inverses + 4 * number) == _ZERO:
                            first = number * group
                            ends = min(group, written - first)
                            zero_bytes(payload + (first * bits >> 3), ends * bits >> 3)
                            if bits < BITS[kind]:
                                zero_bytes(high + (first >> 2), ends >> 2)
                scales += 0 if looks == 2 else (groups * (4 if row_scale else 2) + 15) & -16
            start += tile
    if looks == 2:
        scales += 16
    if scales < record + row_bytes:
        zero_bytes(scales, record + row_bytes - scales)


@device
def round_row(values, columns, out, dtype, saturate):
    """Rounds float32 at `values`, which has room for a multiple of 16, to `columns` elements at `out`."""
    whole = columns & -_LANES
    round_columns(values, whole, out, dtype, saturate)
    if whole < columns:
        size = element_bytes(dtype)
        rest_out = stack_buffer(_REST_BYTES)
        round_columns(values + 4 * whole, _LANES, rest_out, dtype, saturate)
        copy_bytes(out + whole * size, rest_out, (columns - whole) * size)


@kernel
def pack_row(x, dtype, record, layout, far):
    """`quantize_row`; past the caches, where far peers read the record, unless it is too long for that."""
    packed, row_bytes = stack_buffer(STACK_RECORD_BYTES), layout[5]
    made = packed if far and row_bytes <= STACK_RECORD_BYTES else record
    quantize_row(x, dtype, made, layout)
    if made != record:
        stream_bytes(record, made, row_bytes)


@device
def dequantize_row(record, out, dtype, layout):
    """Dequantises the record at address `record` into the row at address `out`."""
    kind, group, row_scale, hidden, scales_offset, row_bytes = layout
    size = element_bytes(dtype)
    if kind == NONE:
        copy_bytes(out, record, hidden * size)
        return
    rotated, all_columns, plane = kind // ROTATED, columns_of(kind, hidden), record + second_plane(kind, hidden)
    kind = element_kind(kind)
    bits = LOW_BITS[kind]
    bound = _BOUNDS[kind]
    largest = _LARGEST_FLOAT32 if dtype == FLOAT32 else _LARGEST_FLOAT16 if dtype == FLOAT16 else _LARGEST_BFLOAT16
    floats = stack_buffer(_GROUP_BYTES)
    wide = stack_buffer(_WIDE_TILE_BYTES)
    scales = record + scales_offset
    tile = _TILE_BYTES // size if row_scale else tile_columns(group, size)
    start = 0
    while start < all_columns:
        columns = min(tile, all_columns - start)
        whole = columns & -_LANES
        group = columns if row_scale else group
        groups = group_count(columns, group, row_scale)
        payload = record + (start * bits >> 3)
        rest_payload = payload + (whole * bits >> 3)
        high = plane + (start >> 2)
        target = out + start * size
        if row_scale:
            scale_bits = load_int32(scales)
            store_int32(floats, scale_bits)
            largest_scale = magnitude_bits(scale_bits)
        else:
            largest_scale = read_scales(scales, groups, floats)
            scales += 2 * groups
        last = floats + 4 * (groups - 1)
        # Otherwise some scale is NaN, so large that the output's dtype may overflow, or next to nothing.
        plain = bits_to_float32(largest_scale) * bound <= largest
        # Nor may whole blocks be written that the row does not have.
        plain = (plain or rotated) and start + columns <= hidden
        decoded_dtype, decoded = (dtype, target) if plain else (FLOAT32, wide)
        decode_groups(payload, high, kind, rotated, floats, whole, group, decoded, decoded_dtype)
        if whole < columns:
            rest_out = wide if plain else wide + 4 * whole
            decode_groups(rest_payload, high, kind, 0, last, _LANES, _LANES, rest_out, decoded_dtype)
            if plain:
                copy_bytes(target + whole * size, wide, (columns - whole) * size)
        if not plain:
            round_row(wide, min(columns, hidden - start), target, dtype, 1)
        start += tile
