"""Products of int8 rows and channels, and SiLU, as intrinsics that a numba kernel calls.

All arguments are int64, addresses too; see `loops.py`.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from thinwire.triton_kernels import silu
from thinwire.triton_kernels.cpu.compat import cgutils, emits, ir
from thinwire.triton_kernels.cpu.ir.control import groups_of, loop, switch
from thinwire.triton_kernels.cpu.ir.vectors import constant, filled, integers, load, singles, store

_LANES = 16
#: Rows and channels that are multiplied at a time: as many sums as there are registers for.
ROW_BLOCKS, CHANNEL_BLOCKS = (4, 2, 1), (2, 1)


def _sum_lanes(builder: Any, vector: Any) -> Any:
    name = f"llvm.vector.reduce.add.v{vector.type.count}i{vector.type.element.width}"
    reduction = ir.FunctionType(vector.type.element, [vector.type])
    return builder.call(cgutils.get_or_insert_function(builder.module, reduction, name), [vector])


@emits("void")
def multiply_groups(
    builder, sources, scales, scales_stride, rows, weights, weights_stride, channels, columns, group, out, out_stride
):
    """Writes, as float32, ``sum over groups of scale * sum of row * channel`` for each row and channel.

    `sources` holds the addresses of so many rows, `scales` the float32 scales of each one's groups; rows and channels
    are as many as the blocks above. Strides are in bytes, and columns a multiple of 16. The inner sum is one of int32;
    each product with a scale is rounded, then each sum, from +0.0.
    """

    def emit(rows: int, channels: int) -> None:
        numbers, wide = integers(8, _LANES), integers(32, _LANES)
        pairs = list(product(range(rows), range(channels)))
        row_at = [load(builder, builder.add(sources, constant(8 * row)), ir.IntType(64), 8) for row in range(rows)]
        channel_at = [builder.add(weights, builder.mul(weights_stride, constant(number))) for number in range(channels)]
        totals = {pair: cgutils.alloca_once(builder, ir.FloatType()) for pair in pairs}
        sums = {pair: cgutils.alloca_once(builder, wide) for pair in pairs}
        for pair in pairs:
            builder.store(ir.Constant(ir.FloatType(), 0.0), totals[pair])
        with groups_of(builder, columns, group) as (number, first, width):
            for pair in pairs:
                builder.store(filled(wide, 0), sums[pair])
            with loop(builder, builder.lshr(width, constant(4))) as block:
                at = builder.add(first, builder.shl(block, constant(4)))
                xs, ws = (
                    [builder.sext(load(builder, builder.add(side, at), numbers, 1), wide) for side in sides]
                    for sides in (row_at, channel_at)
                )
                for row, channel in pairs:
                    total = builder.load(sums[row, channel])
                    builder.store(builder.add(total, builder.mul(xs[row], ws[channel])), sums[row, channel])
            for row in range(rows):
                place = builder.add(scales, builder.mul(scales_stride, constant(row)))
                scale = load(builder, builder.add(place, builder.shl(number, constant(2))), ir.FloatType(), 4)
                for channel in range(channels):
                    value = builder.sitofp(_sum_lanes(builder, builder.load(sums[row, channel])), ir.FloatType())
                    total = builder.load(totals[row, channel])
                    builder.store(builder.fadd(total, builder.fmul(value, scale)), totals[row, channel])
        for row, channel in pairs:
            place = builder.add(builder.add(out, builder.mul(out_stride, constant(row))), constant(4 * channel))
            store(builder, builder.load(totals[row, channel]), place, 4)

    switch(builder, [rows, channels], emit, product(ROW_BLOCKS, CHANNEL_BLOCKS))


@emits("void")
def silu_columns(builder, gate, other, columns, gated, out):
    """Writes silu(gate), times the other with `gated` 1, float32, in blocks of 16 columns, as `silu.py` has it."""

    def emit(gated: int) -> None:
        single, word = singles(_LANES), integers(32, _LANES)

        def times(value: Any, factor: float) -> Any:
            return builder.fmul(value, filled(single, factor))

        with loop(builder, builder.lshr(builder.add(columns, constant(_LANES - 1)), constant(4))) as block:
            at = builder.shl(block, constant(6))
            x = load(builder, builder.add(gate, at), single, 4)
            magnitude = builder.bitcast(builder.and_(builder.bitcast(x, word), filled(word, 0x7FFFFFFF)), single)
            lowest, zero, one = (filled(single, value) for value in (silu.LOWEST, 0.0, 1.0))
            smaller = builder.fcmp_ordered("<", magnitude, lowest)
            y = builder.fsub(zero, builder.select(smaller, magnitude, lowest))
            bits = builder.bitcast(builder.fadd(times(y, silu.LOG2_E), filled(single, silu.MAGIC)), word)
            n = builder.sub(bits, filled(word, silu.MAGIC_BITS))
            whole = builder.sitofp(n, single)
            r = builder.fsub(builder.fsub(y, times(whole, silu.LOG_2_HIGH)), times(whole, silu.LOG_2_LOW))
            p = filled(single, silu.POLYNOMIAL[0])
            for coefficient in silu.POLYNOMIAL[1:]:
                p = builder.fadd(builder.fmul(p, r), filled(single, coefficient))
            e = builder.fadd(builder.fadd(builder.fmul(p, builder.fmul(r, r)), r), one)
            power = builder.shl(builder.add(n, filled(word, 127)), filled(word, 23))
            e = builder.fmul(e, builder.bitcast(power, single))
            upper = builder.select(builder.fcmp_ordered(">=", x, zero), one, e)
            value = builder.fmul(x, builder.fdiv(upper, builder.fadd(one, e)))
            if gated:
                value = builder.fmul(value, load(builder, builder.add(other, at), single, 4))
            store(builder, value, builder.add(out, at), 4)

    switch(builder, [gated], emit, product((0, 1)))
