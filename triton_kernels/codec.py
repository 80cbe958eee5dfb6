"""The codec: rows of float32, float16 or bfloat16 to wire records and back; `codec_reference.py` has it in torch.

The device functions here are what every other kernel quantises and dequantises with. Their arithmetic is chosen so that
compiled Triton, interpreted Triton, numba and torch agree to the last bit (the rules are in `thinwire.wire`):

* The largest magnitude is an integer maximum over bit patterns. `tl.max` on floats drops NaN.
* Rounding half to even is done by adding 12582912.0 = 1.5 * 2**23: the sum's unit in the last place is 1, so the adder
  itself rounds, and the low bits of the sum's pattern are q in two's complement. `.to(tl.int8)` truncates instead.
* bfloat16 is made by an instruction that is named, or with integer arithmetic. The interpreter's own cast truncates.
* 1/s is `tl.div_rn`; a plain `/` compiles to an approximation. Launchers pass `enable_fp_fusion=False`, since a fused
  multiply-add would round once where the other backends round twice.
* e4m3 is encoded and decoded with integer arithmetic: hardware casts differ between GPU generations.
* On NVIDIA GPUs `thinwire.triton_kernels.hardware` has the same in fewer instructions.

The clamp of the definition needs no instruction: s is at most half a unit in the last place of its dtype below
amax/qmax, so |x / s| <= qmax * (1 + 2**-8) * (1 + 2**-22), less than qmax + 1/2 for 127, 31 and 7, than 511 + 1/2 for
509, and below 464, where e4m3 would round up from 448.
"""

from __future__ import annotations

from thinwire.triton_kernels import hardware
from thinwire.triton_kernels.blocks import decode_int6, decode_int10, nibble_plane, pair_plane, rotated, rotated_back
from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.floats import (
    INFINITY_BITS,
    ROUND_MAGIC,
    SIGNLESS,
    bfloat16_bits,
    decode_e4m3,
    encode_e4m3,
    load_float32,
    rounded,
    store_float32,
    widened,
)
from thinwire.triton_kernels.put import put
from thinwire.triton_kernels.record import FP8, INT4, INT6, INT10, NONE
from thinwire.triton_kernels.rows import columns_in_order, in_order, load_tile, tile_columns

_SCALE_NAN_BITS = tl.constexpr(0x7FC0)
_TINY_BITS = tl.constexpr(0x08800000)  # 2**-110


# ---------------------------------------------------------------------------------------------------------------------
# Device functions


@triton.jit
def _largest(x, AXIS: tl.constexpr):
    if hardware.capability() >= 80:
        return tl.reduce(tl.abs(x), AXIS, hardware.larger_or_nan)
    else:
        return tl.max(x.to(tl.int32, bitcast=True) & SIGNLESS, axis=AXIS).to(tl.float32, bitcast=True)


@triton.jit
def group_amax(x, LAYOUT: tl.constexpr):
    """The largest magnitude of each group of a tile, float32, `rotated`, as its bit pattern: int32 [TILE_GROUPS].

    That of a group with a NaN is some NaN's.
    """
    if LAYOUT.BLOCKS > 0:
        of_blocks = _largest(_largest(x, 2), 0)
        x = tl.reshape(of_blocks, (LAYOUT.TILE_GROUPS, LAYOUT.BLOCKS // LAYOUT.TILE_GROUPS))
    return _largest(x, 1).to(tl.int32, bitcast=True)


@triton.jit
def _of_columns(values, LAYOUT: tl.constexpr):
    """What each group has, [TILE_GROUPS], in a shape that goes with a tile's."""
    if LAYOUT.BLOCKS > 0:
        each: tl.constexpr = (LAYOUT.TILE_GROUPS, LAYOUT.BLOCKS // LAYOUT.TILE_GROUPS)
        return tl.reshape(tl.broadcast_to(values[:, None], each), (LAYOUT.BLOCKS,))[None, :, None]
    else:
        return values[:, None]


@triton.jit
def encode_tile(x, amax_bits, LAYOUT: tl.constexpr):
    """Quantises a tile, float32, `rotated` (masked elements were +0.0), given each group's `group_amax`.

    Returns the payload, int8 [TILE_GROUPS, bytes of a group], or two of that for the planes of int6 and int10; and each
    group's scale as int32 bits (bfloat16 bits, or float32 bits with ROW_SCALE).
    """
    finite = amax_bits < INFINITY_BITS
    live = finite & (amax_bits >= _TINY_BITS)
    s = amax_bits.to(tl.float32, bitcast=True) * (1.0 / LAYOUT.QMAX)
    if LAYOUT.ROW_SCALE:
        scale_bits = tl.where(live, s.to(tl.int32, bitcast=True) - LAYOUT.LOWERED, tl.where(finite, 0, 0x7FC00000))
    else:
        short = bfloat16_bits(s)
        s = (short << 16).to(tl.float32, bitcast=True)
        scale_bits = tl.where(live, short - LAYOUT.LOWERED, tl.where(finite, 0, _SCALE_NAN_BITS))
    inverse = tl.div_rn(1.0, tl.where(live, s, 1.0))
    v = x * _of_columns(inverse, LAYOUT)
    kept = _of_columns(tl.where(live, -1, 0), LAYOUT) + tl.zeros(v.shape, tl.int32)
    if LAYOUT.KIND == FP8 and hardware.capability() >= 89:
        return hardware.encode_e4m3(v, kept), scale_bits
    if LAYOUT.KIND == FP8:
        q = encode_e4m3(v)
    else:
        q = (v + ROUND_MAGIC).to(tl.int32, bitcast=True)
    if LAYOUT.KIND == INT4:
        q = q & kept
        even, odd = tl.split(tl.reshape(q, q.shape[:-1] + (q.shape[-1] // 2, 2)))
        return in_order(((even & 0xF) | (odd << 4)).to(tl.int8), LAYOUT), scale_bits
    else:
        low = octets_at(q, kept, 0)
        if LAYOUT.KIND == INT6:
            return (in_order(nibble_plane(low), LAYOUT), in_order(pair_plane(low, 4), LAYOUT)), scale_bits
        elif LAYOUT.KIND == INT10:
            high = pair_plane(octets_at(q, kept, 1), 0)
            return (in_order(low, LAYOUT), in_order(high, LAYOUT)), scale_bits
        else:
            return in_order(low, LAYOUT), scale_bits


@triton.jit
def octets_at(q, kept, PLACE: tl.constexpr):
    """Byte PLACE, 0 or 1, of codes, int32, as int8, where `kept` is -1; 0 where that is 0."""
    if hardware.capability() >= 80:
        return hardware.octets_at(q, kept, PLACE)
    else:
        return ((q & kept) >> (8 * PLACE)).to(tl.int8)


@triton.jit
def decode_tile(payload, LAYOUT: tl.constexpr):
    """What `load_encoded_tile` gave of a payload to unscaled float32, in the shape of a tile."""
    if LAYOUT.KIND == FP8:
        return hardware.decode_e4m3(payload) if hardware.capability() >= 80 else decode_e4m3(payload)
    elif LAYOUT.KIND == INT4:
        if hardware.capability() >= 80:
            even, odd = hardware.decode_int4(payload)
        else:
            wide = payload.to(tl.int32)
            even, odd = ((wide << 28) >> 28).to(tl.float32), (wide >> 4).to(tl.float32)
        return tl.reshape(tl.join(even, odd), payload.shape[:-1] + (payload.shape[-1] * 2,))
    elif LAYOUT.KIND == INT6:
        return decode_int6(payload[0], payload[1])
    elif LAYOUT.KIND == INT10:
        return decode_int10(payload[0], payload[1])
    elif hardware.capability() >= 80:
        return hardware.decode_octets(payload, 128)
    else:
        return payload.to(tl.float32)


@triton.jit
def _plane_offsets(tile, BITS: tl.constexpr, LAYOUT: tl.constexpr):
    """Where in a plane of BITS bits an element the bytes of one tile lie, [TILE_GROUPS, bytes of a group], in order."""
    octets: tl.constexpr = LAYOUT.GROUP * BITS // 8
    groups = tile * LAYOUT.TILE_GROUPS + tl.arange(0, LAYOUT.TILE_GROUPS)
    return groups[:, None] * octets + tl.arange(0, octets)[None, :]


@triton.jit
def _store_plane(base, plane, tile, BITS: tl.constexpr, END: tl.constexpr, LAYOUT: tl.constexpr):
    offsets = _plane_offsets(tile, BITS, LAYOUT)
    put(base + offsets, plane, offsets < END)


@triton.jit
def store_encoded_tile(base, payload, scale_bits, tile, LAYOUT: tl.constexpr):
    """Stores what `encode_tile` gave for one tile of a row into its record.

    `base` points, as int8, to where the record begins, on a 16-byte boundary. Pad bytes among what the tile covers are
    written as zeros: masks that end at multiples of 16 bytes keep the stores 16 bytes wide.
    """
    if LAYOUT.SECOND_PLANE > 0:
        _store_plane(base, payload[0], tile, LAYOUT.BITS - 2, LAYOUT.SECOND_PLANE, LAYOUT)
        octets: tl.constexpr = LAYOUT.SCALES_OFFSET - LAYOUT.SECOND_PLANE
        _store_plane(base + LAYOUT.SECOND_PLANE, payload[1], tile, 2, octets, LAYOUT)
    else:
        _store_plane(base, payload, tile, LAYOUT.BITS, LAYOUT.SCALES_OFFSET, LAYOUT)
    groups = tile * LAYOUT.TILE_GROUPS + tl.arange(0, LAYOUT.TILE_GROUPS)
    if LAYOUT.ROW_SCALE:
        scales = (base + LAYOUT.SCALES_OFFSET).to(tl.pointer_type(tl.int32))
        put(scales + groups, scale_bits, groups < 1)
    else:
        scales = (base + LAYOUT.SCALES_OFFSET).to(tl.pointer_type(tl.int16))
        room: tl.constexpr = (LAYOUT.ROW_BYTES - LAYOUT.SCALES_OFFSET) // 2
        put(scales + groups, scale_bits.to(tl.int16), groups < room)


@triton.jit
def store_record_tile(base, x, amax_bits, tile, LAYOUT: tl.constexpr):
    """Quantises one tile of a row, x float32, `rotated`, with +0.0 past the row's end before, into its record.

    `base` points, as int8, to where the record begins, on a 16-byte boundary. `amax_bits` is its `group_amax`, but with
    TWO_PASSES, where the scale depends on the whole row, the maximum of that over all tiles.
    """
    if LAYOUT.KIND == NONE:
        columns = tile_columns(tile, LAYOUT)
        elements = base.to(tl.pointer_type(LAYOUT.DTYPE))
        put(elements + columns, rounded(x, LAYOUT.DTYPE), columns < LAYOUT.ELEMENTS)
    else:
        payload, scale_bits = encode_tile(x, amax_bits, LAYOUT)
        store_encoded_tile(base, payload, scale_bits, tile, LAYOUT)


@triton.jit
def store_record_tail(base, LAYOUT: tl.constexpr):
    """Zeroes the pad at a record's end that no tile covers."""
    if LAYOUT.TAIL_WORDS > 0:
        block: tl.constexpr = LAYOUT.TAIL_BLOCK
        words = tl.arange(0, block)
        tail = (base + (LAYOUT.ROW_BYTES - 2 * LAYOUT.TAIL_WORDS)).to(tl.pointer_type(tl.int16))
        put(tail + words, tl.zeros((block,), tl.int16), words < LAYOUT.TAIL_WORDS)


@triton.jit
def _load_plane(base, tile, BITS: tl.constexpr, END: tl.constexpr, LAYOUT: tl.constexpr, there):
    """A plane of BITS bits an element of one tile, int8; of a format with blocks, in the parts of its columns."""
    if LAYOUT.BLOCKS > 0:
        # 16 bytes at a time, of which a thread has those of whole blocks, as it has the columns.
        pieces: tl.constexpr = BITS // 2
        in_block = tl.arange(0, pieces)[:, None] * 16 + tl.arange(0, 16)[None, :]
        blocks = tile * LAYOUT.BLOCKS + tl.arange(0, LAYOUT.BLOCKS)
        offsets = in_block[:, None, :] + blocks[None, :, None] * (8 * BITS)
        octets = tl.load(base + offsets, mask=tl.where(there, offsets < END, False), other=0)
        width: tl.constexpr = LAYOUT.WIDTH * LAYOUT.BITS // 8 if LAYOUT.SECOND_PLANE == 0 else LAYOUT.WIDTH
        octets = tl.permute(tl.reshape(octets, (pieces, LAYOUT.BLOCKS, 16 // width, width)), (0, 2, 1, 3))
        return tl.reshape(octets, (8 * BITS // width, LAYOUT.BLOCKS, width))
    else:
        offsets = _plane_offsets(tile, BITS, LAYOUT)
        return tl.load(base + offsets, mask=tl.where(there, offsets < END, False), other=0)


@triton.jit
def load_encoded_tile(base, tile, LAYOUT: tl.constexpr, there=True):
    """What `store_encoded_tile` stored of one tile, for `scaled_tile`; of `none`, its elements in their own dtype.

    `base` points, as int8, to where the record begins. What is past the row's end is zero, and all of it where the
    record is not `there`, which is not read then.
    """
    if LAYOUT.KIND == NONE:
        columns = tile_columns(tile, LAYOUT)
        elements = base.to(tl.pointer_type(LAYOUT.DTYPE))
        return tl.load(elements + columns, mask=tl.where(there, columns < LAYOUT.HIDDEN, False), other=0.0), 0
    else:
        if LAYOUT.SECOND_PLANE > 0:
            octets: tl.constexpr = LAYOUT.SCALES_OFFSET - LAYOUT.SECOND_PLANE
            low = _load_plane(base, tile, LAYOUT.BITS - 2, LAYOUT.SECOND_PLANE, LAYOUT, there)
            payload = low, _load_plane(base + LAYOUT.SECOND_PLANE, tile, 2, octets, LAYOUT, there)
        else:
            payload = _load_plane(base, tile, LAYOUT.BITS, LAYOUT.SCALES_OFFSET, LAYOUT, there)
        if LAYOUT.BLOCKS > 0:  # a scale for each block
            each: tl.constexpr = LAYOUT.BLOCKS // LAYOUT.TILE_GROUPS
            groups = (tile * LAYOUT.BLOCKS + tl.arange(0, LAYOUT.BLOCKS)) // each
        else:
            groups = tile * LAYOUT.TILE_GROUPS + tl.arange(0, LAYOUT.TILE_GROUPS)
        if LAYOUT.ROW_SCALE:
            scales = (base + LAYOUT.SCALES_OFFSET).to(tl.pointer_type(tl.int32))
            scale_bits = tl.load(scales + groups * 0, mask=tl.where(there, groups >= 0, False), other=0)
        else:
            scales = (base + LAYOUT.SCALES_OFFSET).to(tl.pointer_type(tl.int16))
            mask = tl.where(there, groups < LAYOUT.NUM_GROUPS, False)
            scale_bits = tl.load(scales + groups, mask=mask, other=0).to(tl.int32)
        return payload, scale_bits


@triton.jit
def scaled_tile(payload, scale_bits, LAYOUT: tl.constexpr):
    """What `load_encoded_tile` gave as a tile, float32: q * s, not yet `rotated_back`, before any other rounding."""
    if LAYOUT.KIND == NONE:
        return widened(payload)
    else:
        s = (scale_bits if LAYOUT.ROW_SCALE else scale_bits << 16).to(tl.float32, bitcast=True)
        s = s[None, :, None] if LAYOUT.BLOCKS > 0 else s[:, None]
        return decode_tile(payload, LAYOUT) * s


@triton.jit
def load_record_tile(base, tile, LAYOUT: tl.constexpr):
    """One tile of a record as `scaled_tile` gives it; `base` points, as int8, to where the record begins."""
    if LAYOUT.KIND == NONE:
        columns = tile_columns(tile, LAYOUT)
        elements = base.to(tl.pointer_type(LAYOUT.DTYPE))
        return load_float32(elements + columns, columns < LAYOUT.HIDDEN)
    else:
        payload, scale_bits = load_encoded_tile(base, tile, LAYOUT)
        return scaled_tile(payload, scale_bits, LAYOUT)


# ---------------------------------------------------------------------------------------------------------------------
# Whole rows: one program has one row


@triton.jit
def row_amax_bits(x_row, length, LAYOUT: tl.constexpr):
    """The largest magnitude of a row's `length` elements, int32 [1], where the first tile needs it; else zero."""
    row_amax = tl.zeros((1,), tl.int32)
    if LAYOUT.TWO_PASSES:
        for tile in range(LAYOUT.NUM_TILES):
            columns = tile_columns(tile, LAYOUT)
            x = rotated(load_float32(x_row + columns, columns < length), LAYOUT)
            row_amax = tl.maximum(row_amax, group_amax(x, LAYOUT))
    return row_amax


@triton.jit
def quantize_row(x_row, base, LAYOUT: tl.constexpr):
    """One row, `x_row` pointing to its first element, into the record at `base`. `none` copies bit for bit."""
    row_amax = row_amax_bits(x_row, LAYOUT.HIDDEN, LAYOUT)
    for tile in range(LAYOUT.NUM_TILES):
        columns = tile_columns(tile, LAYOUT)
        elements = load_tile(x_row, columns, tile, LAYOUT)
        if LAYOUT.KIND == NONE:
            tl.store(base.to(tl.pointer_type(LAYOUT.DTYPE)) + columns, elements, mask=columns < LAYOUT.ELEMENTS)
        else:
            x = rotated(widened(elements), LAYOUT)
            store_record_tile(base, x, row_amax if LAYOUT.TWO_PASSES else group_amax(x, LAYOUT), tile, LAYOUT)
    store_record_tail(base, LAYOUT)


@triton.jit
def store_rounded_tile(out_row, y, length, tile, SATURATE: tl.constexpr, LAYOUT: tl.constexpr):
    """One tile, float32, in the row's dtype as `rounded` makes it, into a row of `length` elements, at most HIDDEN."""
    columns = columns_in_order(tile, LAYOUT)
    y = in_order(rounded(y, out_row.dtype.element_ty, SATURATE), LAYOUT)
    tl.store(out_row + columns, y, mask=columns < length)


@triton.jit
def dequantized_tile(base, tile, DTYPE: tl.constexpr, LAYOUT: tl.constexpr):
    """One tile of the record at `base` as a row has it, with the columns of `columns_in_order`."""
    if LAYOUT.KIND == NONE:
        columns = tile_columns(tile, LAYOUT)
        # The record's own end is known when compiling, and keeps the loads wide.
        return tl.load(base.to(tl.pointer_type(LAYOUT.DTYPE)) + columns, mask=columns < LAYOUT.HIDDEN)
    else:
        y = rotated_back(load_record_tile(base, tile, LAYOUT), LAYOUT)
        return in_order(rounded(y, DTYPE, True), LAYOUT)


@triton.jit
def dequantize_row(base, out_row, length, LAYOUT: tl.constexpr):
    """The record at `base` into one row of `length` elements, at most HIDDEN. `none` copies bit for bit."""
    for tile in range(LAYOUT.NUM_TILES):
        elements = dequantized_tile(base, tile, out_row.dtype.element_ty, LAYOUT)
        columns = columns_in_order(tile, LAYOUT)
        tl.store(out_row + columns, elements, mask=columns < length)


@triton.jit
def fill_row(out_row, length, value, LAYOUT: tl.constexpr):
    """Writes one value to a row of `length` elements, at most HIDDEN."""
    for tile in range(LAYOUT.NUM_TILES):
        columns = tile_columns(tile, LAYOUT)
        values = tl.zeros(columns.shape, tl.float32) + value
        store_float32(out_row + columns, values, columns < length, False)
