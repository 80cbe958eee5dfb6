"""The sums of a record, made tile by tile of what a program stores or has loaded: equal to those of its bytes.

What no tile covers is zero and adds nothing. A reader leaves out the padding behind the scales, and behind exact rows:
a change there reaches no result.
"""

from __future__ import annotations

from thinwire.triton_kernels.checksum import element_sums
from thinwire.triton_kernels.codec import encode_tile, load_encoded_tile, scaled_tile, tile_columns
from thinwire.triton_kernels.compat import tl, triton
from thinwire.triton_kernels.floats import float_bits, rounded, store_float32
from thinwire.triton_kernels.record import NONE

_ODD = tl.constexpr(0x5851F42D)


@triton.jit
def octet_sums(octets, first):
    """What int8 of any shape, side by side from the offset `first` of a record on, add to its sums; 8 divides both."""
    # Words of 32 bits first, so that only every fourth step takes 64.
    count: tl.constexpr = octets.numel // 4
    parts = tl.reshape(octets.to(tl.int32) & 0xFF, (count, 4))
    words = tl.sum(parts << (8 * tl.arange(0, 4))[None, :], axis=1)
    return element_sums(words.to(tl.int64) & 0xFFFFFFFF, first + 4 * tl.arange(0, count))


@triton.jit
def tile_sums(payload, scale_bits, tile, LAYOUT: tl.constexpr):
    """What one tile adds to a record's sums, a and b, int64.

    `payload` and `scale_bits` are as `encode_tile` and `load_encoded_tile` give them; of `none` the elements, in their
    own dtype, and anything. What is past the row's end is zero.
    """
    if LAYOUT.KIND == NONE:
        columns = tile * LAYOUT.GROUP + tl.arange(0, LAYOUT.GROUP)[None, :]
        size: tl.constexpr = LAYOUT.DTYPE.primitive_bitwidth // 8
        return element_sums(float_bits(payload).to(tl.int64) & 0xFFFFFFFF, columns * size)
    else:
        groups = tile * LAYOUT.TILE_GROUPS + tl.arange(0, LAYOUT.TILE_GROUPS)
        a, b = octet_sums(payload, tile * (LAYOUT.TILE_GROUPS * LAYOUT.GROUP_BYTES))
        if LAYOUT.ROW_SCALE:
            # Every tile has it, and it is there once. The tiles' shares of it add up to that only if all have the same.
            share: tl.constexpr = _ODD if LAYOUT.NUM_TILES > 1 else 0
            bits = scale_bits.to(tl.int64) & 0xFFFFFFFF
            bits = tl.where(groups < 1, bits - bits * (share * (LAYOUT.NUM_TILES - 1)), bits * share)
            more_a, more_b = element_sums(bits, LAYOUT.SCALES_OFFSET + groups * 0)
        else:
            bits = tl.where(groups < LAYOUT.NUM_GROUPS, scale_bits, 0).to(tl.int64) & 0xFFFF
            more_a, more_b = element_sums(bits, LAYOUT.SCALES_OFFSET + 2 * groups)
        return a + more_a, b + more_b


@triton.jit
def stored_tile_sums(x, amax_bits, tile, LAYOUT: tl.constexpr):
    """`tile_sums` of what `store_record_tile` stores of these; what both compute is computed once."""
    if LAYOUT.KIND == NONE:
        return tile_sums(rounded(x, LAYOUT.DTYPE), None, tile, LAYOUT)
    else:
        payload, scale_bits = encode_tile(x, amax_bits, LAYOUT)
        return tile_sums(payload, scale_bits, tile, LAYOUT)


@triton.jit
def dequantize_and_sum_row(base, out_row, length, LAYOUT: tl.constexpr):
    """`dequantize_row`; returns the record's two sums, without seeds, of the values that the row was made of."""
    a = tl.full((), 0, tl.int64)
    b = tl.full((), 0, tl.int64)
    for tile in range(LAYOUT.NUM_TILES):
        payload, scale_bits = load_encoded_tile(base, tile, LAYOUT, True)
        more_a, more_b = tile_sums(payload, scale_bits, tile, LAYOUT)
        a, b = a + more_a, b + more_b
        columns = tile_columns(tile, LAYOUT)
        mask = columns < length
        if LAYOUT.KIND == NONE:
            tl.store(out_row + columns, payload, mask=mask)
        else:
            store_float32(out_row + columns, scaled_tile(payload, scale_bits, LAYOUT), mask, True)
    return a, b
