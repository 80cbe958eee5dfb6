"""Tiles of callers' rows, which may begin at any element and end at any, in the widest accesses that a row allows.

Records begin on 16-byte boundaries, and rows of a round have a stride that is known when compiling. Rows of collectives
and of all-to-all-v are found in tables. So each program looks where its row begins: from a 16-byte boundary on it moves
16 bytes a thread at a time, and element by element only what is left at the end, or a row that begins elsewhere.
"""

from __future__ import annotations

from thinwire.triton_kernels.compat import tl, triton


@triton.jit
def tile_columns(tile, LAYOUT: tl.constexpr):
    """Column numbers of one tile, int32 [TILE_GROUPS, GROUP].

    Where a format has blocks, [parts, BLOCKS, WIDTH], of which a thread has blocks: all parts of WIDTH columns each.
    """
    if LAYOUT.BLOCKS > 0:
        parts: tl.constexpr = 64 // LAYOUT.WIDTH
        in_block = tl.arange(0, parts)[:, None] * LAYOUT.WIDTH + tl.arange(0, LAYOUT.WIDTH)[None, :]
        blocks = tile * LAYOUT.BLOCKS + tl.arange(0, LAYOUT.BLOCKS)
        return in_block[:, None, :] + blocks[None, :, None] * 64
    else:
        return columns_in_order(tile, LAYOUT)


@triton.jit
def columns_in_order(tile, LAYOUT: tl.constexpr):
    """Column numbers of what `in_order` gives of a tile: int32 [TILE_GROUPS, GROUP]."""
    groups = tile * LAYOUT.TILE_GROUPS + tl.arange(0, LAYOUT.TILE_GROUPS)
    return groups[:, None] * LAYOUT.GROUP + tl.arange(0, LAYOUT.GROUP)[None, :]


@triton.jit
def in_order(tile, LAYOUT: tl.constexpr):
    """A tile, in the shape of its `tile_columns` (or of a part of each block's), as [TILE_GROUPS, ...] in order.

    So it is stored: 16 bytes of each lane's block, a block apart, would ask for every sector twice.
    """
    if LAYOUT.BLOCKS > 0:
        tile = tl.reshape(tl.permute(tile, (1, 0, 2)), (LAYOUT.TILE_GROUPS, tile.numel // LAYOUT.TILE_GROUPS))
    return tile


@triton.jit
def in_blocks(tile, LAYOUT: tl.constexpr):
    """The inverse of `in_order`, of a whole tile in any shape."""
    if LAYOUT.BLOCKS > 0:
        return tl.permute(tl.reshape(tile, (LAYOUT.BLOCKS, 64 // LAYOUT.WIDTH, LAYOUT.WIDTH)), (1, 0, 2))
    else:
        return tl.reshape(tile, (LAYOUT.TILE_GROUPS, LAYOUT.GROUP))


@triton.jit
def row_length(length, LAYOUT: tl.constexpr):
    """Elements of a row, int32, where `length` of the tensor's are left, which may be more."""
    return tl.minimum(length, LAYOUT.HIDDEN).to(tl.int32)


@triton.jit
def wide_length(row, length):
    """How many of the first `length` elements of a row can move 16 bytes at a time."""
    step: tl.constexpr = 128 // row.dtype.element_ty.primitive_bitwidth
    return tl.where((row.to(tl.int64) & 15) == 0, length // step * step, 0)


@triton.jit
def aligned(row):
    """A pointer to where `row` points, of which the compiler knows that it is on a 16-byte boundary; `row` is not."""
    return tl.multiple_of(row.to(tl.int64).to(row.dtype), 16)


@triton.jit
def load_row_tile(row, length, tile, LAYOUT: tl.constexpr):
    """One tile of a row of int32 `length` elements, at most HIDDEN, in their own dtype; past its end it is zero."""
    columns, wide = tile_columns(tile, LAYOUT), wide_length(row, length)
    elements = tl.load(aligned(row) + columns, mask=columns < wide, other=0.0)
    if wide < length:
        rest = tl.load(row + columns, mask=(columns >= wide) & (columns < length), other=0.0)
        elements = tl.where(columns < wide, elements, rest)
    return elements


@triton.jit
def load_tile(row, columns, tile, LAYOUT: tl.constexpr):
    """One tile of a row of HIDDEN elements, in their own dtype, given its columns; past its end it is zero."""
    if LAYOUT.BLOCKS > 0 and LAYOUT.HIDDEN % LAYOUT.WIDTH > 0:
        # Elements that can only be loaded one by one would be dealt out so that no thread has a whole block.
        return load_row_tile(row, LAYOUT.HIDDEN, tile, LAYOUT)
    else:
        return tl.load(row + columns, mask=columns < LAYOUT.HIDDEN, other=0.0)


@triton.jit
def store_row_tile(row, elements, length, tile, LAYOUT: tl.constexpr):
    """One tile, in the row's dtype, into a row of int32 `length` elements, at most HIDDEN."""
    columns, wide = columns_in_order(tile, LAYOUT), wide_length(row, length)
    elements = in_order(elements, LAYOUT)
    tl.store(aligned(row) + columns, elements, mask=columns < wide)
    if wide < length:
        tl.store(row + columns, elements, mask=(columns >= wide) & (columns < length))
