"""What kernels know of a wire format at compile time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from thinwire.triton_kernels.compat import tl
from thinwire.wire import BLOCK, FORMATS, WireFormat

#: What the kernels call a wire format.
NONE, INT4, FP8 = (tl.constexpr(FORMATS[name].kind) for name in ("none", "int4", "fp8"))
INT6, INT10 = (tl.constexpr(FORMATS[name].kind) for name in ("int6", "int10"))
_TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
#: Columns that one program holds at a time. A longer row goes through in tiles, twice where one scale serves all of it.
MAX_TILE = 8192
# The narrowest tile: 16 bytes of the narrowest payload, so that tiles always reach the scales.
_MIN_TILE = 32


def _next_power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()


@dataclass(frozen=True)
class RecordLayout:
    """What a kernel must know of a record at compile time: passed whole, as one constexpr."""

    KIND: int
    QMAX: float
    ROW_SCALE: bool
    HIDDEN: int
    GROUP: int  # columns that share a scale; with one scale a row or none, the columns of a tile
    TILE_GROUPS: int
    NUM_TILES: int
    TWO_PASSES: bool  # the scale is not known before the last tile
    NUM_GROUPS: int
    SCALES_OFFSET: int  # bytes
    ROW_BYTES: int
    ELEMENTS: int  # of DTYPE that fill a record, for `none`
    TAIL_WORDS: int  # 2-byte words of padding behind what the tiles write
    TAIL_BLOCK: int
    DTYPE: Any  # of the record's elements, for `none`
    BITS: int  # of an element
    PAYLOAD_BYTES: int
    COPY_BLOCK: int  # bytes of a record that are copied at a time
    SECOND_PLANE: int  # where the plane of two bits begins, in bytes, where there is one; else 0
    BLOCKS: int  # of a tile, where a format has them; else 0
    WIDTH: int  # columns of a block that a thread loads at a time
    ROTATED: bool
    LOWERED: int  # subtracted from a scale's bits: 2**-6 of what is rotated

    @classmethod
    def of(cls, wire: WireFormat, hidden: int, dtype: torch.dtype, most: int = MAX_TILE) -> RecordLayout:
        """The layout of `wire` for rows of `hidden` elements; `dtype` is the rows' own, which `none` keeps.

        A tile has at most so many columns, or one group.
        """
        row_bytes, planes = wire.row_bytes(hidden, dtype), FORMATS[wire.name].planes
        scales_offset = wire.scales_offset(hidden, dtype)
        block = max(BLOCK if wire.blocks else _MIN_TILE, _next_power_of_2(hidden))
        if wire.quantized and not wire.row_scale:
            group = wire.group
            tile_groups = max(1, min(block, most) // group)
        else:
            group = min(block, most)
            tile_groups = 1
        num_tiles = -(-hidden // (group * tile_groups))
        tail_words = 0
        if wire.quantized:
            scales = 1 if wire.row_scale else num_tiles * tile_groups
            covered = scales_offset + scales * wire.scale_bytes
            tail_words = max(0, row_bytes - covered) // 2
        elif (elements := row_bytes // dtype.itemsize) > num_tiles * group:
            tail_words = (elements - num_tiles * group) * dtype.itemsize // 2
        return cls(
            KIND=wire.kind,
            QMAX=wire.qmax,
            ROW_SCALE=wire.row_scale,
            HIDDEN=hidden,
            GROUP=group,
            TILE_GROUPS=tile_groups,
            NUM_TILES=num_tiles,
            TWO_PASSES=wire.row_scale and num_tiles > 1,
            NUM_GROUPS=wire.num_groups(hidden),
            SCALES_OFFSET=scales_offset,
            ROW_BYTES=row_bytes,
            ELEMENTS=0 if wire.quantized else row_bytes // dtype.itemsize,
            TAIL_WORDS=tail_words,
            TAIL_BLOCK=_next_power_of_2(max(1, tail_words)),
            DTYPE=_TRITON_DTYPES[dtype],
            BITS=FORMATS[wire.name].bits,
            PAYLOAD_BYTES=wire.payload_bytes(hidden, dtype),
            COPY_BLOCK=min(MAX_TILE, _next_power_of_2(row_bytes)),
            SECOND_PLANE=wire.columns(hidden) * planes[0] // 8 if planes else 0,
            BLOCKS=group * tile_groups // BLOCK if wire.blocks else 0,
            WIDTH=16 // dtype.itemsize,
            ROTATED=wire.rotated,
            LOWERED=wire.rotated * 6 << (23 if wire.row_scale else 7),
        )

    @property
    def num_warps(self) -> int:
        """32 columns a thread: 16-byte loads with registers left for a second operand; or a block."""
        return max(1, self.GROUP * self.TILE_GROUPS // (2048 if self.BLOCKS else 1024))
