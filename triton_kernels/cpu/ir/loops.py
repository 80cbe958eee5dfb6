"""The inner loops, over groups of columns, as intrinsics that a numba kernel calls; and what writes loops as LLVM IR.

Every loop walks *groups*: runs of `group` columns, of which the last may be short. Column counts are multiples of 16,
the narrowest block; callers pass the rest of a row through a padded buffer. All arguments are int64, addresses too, and
`dtype`, `kind` and `element` are codes of `vectors.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

from thinwire.triton_kernels.cpu.compat import cgutils, emits, ir
from thinwire.triton_kernels.cpu.ir.vectors import (
    BFLOAT16,
    BITS,
    FLOAT16,
    FLOAT32,
    FP8,
    INT8,
    LOW_BITS,
    QUANTIZED,
    ROW_ELEMENTS,
    SIGNLESS,
    bfloat16_bits,
    broadcast,
    constant,
    filled,
    from_halves,
    integers,
    larger,
    largest_lane,
    load,
    load_floats,
    singles,
    store,
    store_floats,
    store_quantized,
)
from thinwire.wire import BLOCK, FORMATS

_QMAX = tuple(each.qmax for each in FORMATS.values())
_INFINITY_BITS = 0x7F800000
_TINY_BITS = 0x08800000  # 2**-110
_SMALLEST_PLAIN_BITS = 0x05000000  # 2**-117
_WIDE, _NARROW = 32, 16  # columns of a block
_PLANES = tuple(code for code in QUANTIZED if LOW_BITS[code] < BITS[code])
# Where a block has a loop of its own, over sources. Rows often come from memory. LLVM loads the 256 bytes of a wider
# block in no order, and processors, which fetch ahead where addresses rise, then take up to twice the time.
_WIDEST_OF_ROWS, _WIDEST_OF_RECORDS = 64, 128
_COLUMNS = [range(start, start + _NARROW) for start in range(0, BLOCK, _NARROW)]  # of a rotated block's vectors

# ---------------------------------------------------------------------------------------------------------------------
# Loops and branches


@contextmanager
def loop(builder: Any, count: Any) -> Iterator[Any]:
    """Counts from 0 to `count`. LLVM is told not to unroll: blocks are wide enough, and the code would triple."""
    with steps(builder, count, constant(1)) as (index, _):
        yield index


@contextmanager
def steps(builder: Any, count: Any, step: Any) -> Iterator[tuple[Any, Any]]:
    """Counts from 0 to `count` by `step`: (how often, where). No division, which takes as long as a group does."""
    before = builder.basic_block
    head, body, end = (builder.append_basic_block(f"loop.{name}") for name in ("head", "body", "end"))
    builder.branch(head)
    builder.position_at_end(head)
    number, position = builder.phi(ir.IntType(64)), builder.phi(ir.IntType(64))
    for counter in (number, position):
        counter.add_incoming(constant(0), before)
    builder.cbranch(builder.icmp_signed("<", position, count), body, end)
    builder.position_at_end(body)
    yield number, position
    for counter, by in ((number, constant(1)), (position, step)):
        counter.add_incoming(builder.add(counter, by, flags=["nuw", "nsw"]), builder.basic_block)
    builder.branch(head).set_metadata("llvm.loop", _not_unrolled(builder.module))
    builder.position_at_end(end)


@contextmanager
def groups_of(builder: Any, columns: Any, group: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Loops over groups: (number, first column, columns)."""
    with steps(builder, columns, group) as (number, first):
        left = builder.sub(columns, first)
        yield number, first, builder.select(builder.icmp_signed("<", left, group), left, group)


def _not_unrolled(module: Any) -> Any:
    wish = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    identity = module.add_metadata([ir.MetaDataString(module, "thinwire"), wish])
    identity.operands = (identity, wish)  # a loop's metadata begins with a reference to itself
    return identity


def switch(builder: Any, selectors: list[Any], emit: Callable[..., None], cases: Iterable[tuple[int, ...]]) -> None:
    """Emits `emit(*codes)` for each of `cases`; the kernel runs the one that equals `selectors`.

    One switch within another, so that a selector that turns out to be constant drops the other cases early.
    """
    if not selectors:
        emit()
        return
    cases = list(cases)
    end = builder.append_basic_block("switch.end")
    instruction = builder.switch(selectors[0], end)
    for code in dict.fromkeys(case[0] for case in cases):
        block = builder.append_basic_block("switch.case")
        instruction.add_case(constant(code), block)
        builder.position_at_end(block)
        switch(builder, selectors[1:], partial(emit, code), [case[1:] for case in cases if case[0] == code])
        builder.branch(end)
    builder.position_at_end(end)


# ---------------------------------------------------------------------------------------------------------------------
# Blocks of 64 columns: read as float32, rotated and rotated back, as `thinwire.wire` defines it
#
# A block is four vectors of 16 lanes. In the stages within a vector each lane, or its negative, is added to its
# partner; LLVM's machine code is as short as that of more elaborate orders.


def _flipped(builder: Any, vector: Any, signs: list[int]) -> Any:
    """A vector of float32 whose lanes change their signs where `signs` is 1."""
    word = integers(32, _NARROW)
    bits = builder.xor(builder.bitcast(vector, word), ir.Constant(word, [sign << 31 for sign in signs]))
    return builder.bitcast(bits, vector.type)


def _signed(builder: Any, parts: list[Any]) -> list[Any]:
    signs = [[(column & column >> 1 & 0x15).bit_count() & 1 for column in columns] for columns in _COLUMNS]
    return [_flipped(builder, part, each) for part, each in zip(parts, signs, strict=True)]


def _stages(builder: Any, parts: list[Any]) -> list[Any]:
    for apart in (1, 2, 4, 8):
        others = ir.Constant(integers(32, _NARROW), [lane ^ apart for lane in range(_NARROW)])
        signs = [lane // apart % 2 for lane in range(_NARROW)]
        parts = [
            builder.fadd(builder.shuffle_vector(part, part, others), _flipped(builder, part, signs)) for part in parts
        ]
    for first, second in ((0, 1), (2, 3), (0, 2), (1, 3)):
        pair = parts[first], parts[second]
        parts[first], parts[second] = builder.fadd(*pair), builder.fsub(*pair)
    return parts


def _addresses(builder: Any, first: Any, column: Any, element: int) -> list[Any]:
    places = [builder.add(column, constant(columns[0])) for columns in _COLUMNS]
    return [builder.add(first, builder.mul(place, constant(BITS[element] // 8))) for place in places]


def _load_block(builder: Any, x: Any, column: Any, element: int) -> list[Any]:
    return [load_floats(builder, address, _NARROW, element) for address in _addresses(builder, x, column, element)]


def _store_block(builder: Any, parts: list[Any], out: Any, column: Any) -> None:
    for part, address in zip(parts, _addresses(builder, out, column, FLOAT32), strict=True):
        store(builder, part, address, 4)


@emits("void")
def widen_groups(builder, x, columns, group, dtype, rotated, out, amax):
    """Writes groups of whole blocks of a row as float32, and each one's largest magnitude, as float32 bits, to `amax`.

    With `rotated` 1, those of the rotated row, unscaled. The maximum is that of `amax_groups`.
    """
    word = integers(32, _NARROW)

    def emit(rotated: int, element: int) -> None:
        total = cgutils.alloca_once(builder, word)
        with groups_of(builder, columns, group) as (number, first, width):
            builder.store(filled(word, 0), total)
            with steps(builder, width, constant(BLOCK)) as (_, step):
                column = builder.add(first, step)
                parts = _load_block(builder, x, column, element)
                if rotated:
                    parts = _stages(builder, _signed(builder, parts))
                _store_block(builder, parts, out, column)
                signless = [builder.and_(builder.bitcast(part, word), filled(word, SIGNLESS)) for part in parts]
                while len(signless) > 1:
                    signless = [larger(builder, *pair) for pair in zip(signless[::2], signless[1::2], strict=True)]
                builder.store(larger(builder, builder.load(total), signless[0]), total)
            place = builder.add(amax, builder.shl(number, constant(2)))
            store(builder, largest_lane(builder, builder.load(total)), place, 4)

    switch(builder, [rotated, dtype], emit, product((0, 1), ROW_ELEMENTS))


def _turned_back(builder: Any, values: Any) -> list[Any]:
    """A block of a rotated row, as it was, in two halves."""
    lanes = [ir.Constant(integers(32, _NARROW), [*columns]) for columns in _COLUMNS]
    parts = _signed(builder, _stages(builder, [builder.shuffle_vector(values, values, each) for each in lanes]))
    both = ir.Constant(integers(32, 2 * _NARROW), [*range(2 * _NARROW)])
    return [builder.shuffle_vector(*pair, both) for pair in zip(parts[::2], parts[1::2], strict=True)]


@emits("void")
def rotate_back(builder, values, columns):
    """Rotates whole blocks of float32 back, in place."""
    with steps(builder, columns, constant(BLOCK)) as (_, column):
        parts = _stages(builder, _load_block(builder, values, column, FLOAT32))
        _store_block(builder, _signed(builder, parts), values, column)


# ---------------------------------------------------------------------------------------------------------------------
# Groups


def _blocks(
    builder: Any, first: Any, columns: Any, emit: Callable[[Any, int], None], element: int, widest: int = _WIDE,
    rotated: int = 0,
) -> None:  # fmt: skip
    """Calls `emit(column, lanes)` for blocks of the widest kind, then for one of each narrower kind that is left.

    If `rotated`, or of an `element` of two planes, for whole blocks of 64 columns, as there are no others.
    """
    whole_blocks = rotated or element in _PLANES
    if whole_blocks:
        widest = BLOCK
    whole = builder.and_(columns, constant(-widest))
    with steps(builder, whole, constant(widest)) as (_, column):
        emit(builder.add(first, column), widest)
    while widest > _NARROW and not whole_blocks:
        widest //= 2
        left = builder.icmp_signed("!=", builder.and_(columns, constant(widest)), constant(0))
        with builder.if_then(left, likely=False):
            emit(builder.add(first, builder.and_(columns, constant(-2 * widest))), widest)


def _at(builder: Any, address: Any, number: Any, element: int) -> Any:
    """The address of one column's element, or of its part in the first plane."""
    bits = LOW_BITS[element]
    if bits % 8:
        return builder.add(address, builder.lshr(builder.mul(number, constant(bits)), constant(3)))
    return builder.add(address, builder.mul(number, constant(bits // 8)))


def _high(builder: Any, plane: Any, number: Any) -> Any:
    """The address of one column's part in the second plane, which begins at `plane`."""
    return builder.add(plane, builder.lshr(number, constant(2)))


@emits("void")
def amax_groups(builder, x, columns, group, dtype, amax):
    """Writes each group's largest magnitude, as float32 bits, to the int32 array `amax`.

    It is an integer maximum over bit patterns: a float maximum loses NaN.
    """

    def emit(element: int) -> None:
        bits = BITS[element]
        total = cgutils.alloca_once(builder, integers(bits, _WIDE))

        def include(column: Any, lanes: int) -> None:
            pattern = load(builder, _at(builder, x, column, element), integers(bits, lanes), bits // 8)
            pattern = builder.and_(pattern, filled(pattern.type, SIGNLESS >> (32 - bits)))
            if lanes < _WIDE:
                order = ir.Constant(integers(32, _WIDE), [min(lane, lanes) for lane in range(_WIDE)])
                pattern = builder.shuffle_vector(pattern, filled(pattern.type, 0), order)
            builder.store(larger(builder, builder.load(total), pattern), total)

        with groups_of(builder, columns, group) as (number, first, width):
            builder.store(filled(integers(bits, _WIDE), 0), total)
            _blocks(builder, first, width, include, element)
            largest = largest_lane(builder, builder.load(total))
            word = ir.IntType(32)
            if element == BFLOAT16:
                largest = builder.shl(builder.zext(largest, word), ir.Constant(word, 16))
            elif element == FLOAT16:
                value = from_halves(builder, broadcast(builder, largest, 1))
                largest = builder.extract_element(builder.bitcast(value, integers(32, 1)), ir.Constant(word, 0))
            store(builder, largest, _at(builder, amax, number, FLOAT32), 4)

    switch(builder, [dtype], emit, product(ROW_ELEMENTS))


@emits("int64")
def scale_groups(builder, groups, count, kind, row_scale, rotated, scales):
    """Turns amax bits of `count` groups, in place, into float32 1/s, and writes the scales, times 2**-6 if `rotated`.

    They are float32 with `row_scale` 1 and bfloat16 with 0, written 16 bytes at a time, zeros behind their end: the
    array at `groups` must have room, to a multiple of 8. Returns whether some group's payload must be all zeros; its
    1/s is 0.
    """
    some_dead = cgutils.alloca_once_value(builder, constant(0))

    def emit(wide: int, kind: int) -> None:
        lanes = 4 if wide else 8
        word, single = integers(32, lanes), singles(lanes)
        zero, one = filled(single, 0.0), filled(single, 1.0)
        with loop(builder, builder.sdiv(builder.add(count, constant(lanes - 1)), constant(lanes))) as number:
            address = builder.add(groups, builder.mul(number, constant(4 * lanes)))
            lane_numbers = ir.Constant(word, list(range(lanes)))
            left = builder.trunc(builder.sub(count, builder.mul(number, constant(lanes))), ir.IntType(32))
            counted = builder.icmp_signed("<", lane_numbers, broadcast(builder, left, lanes))
            amax = builder.select(counted, load(builder, address, word, 4), filled(word, 0))
            finite = builder.icmp_signed("<", amax, filled(word, _INFINITY_BITS))
            live = builder.and_(finite, builder.icmp_signed(">=", amax, filled(word, _TINY_BITS)))
            s = builder.fmul(builder.bitcast(amax, single), filled(single, 1.0 / _QMAX[kind]))
            bits = builder.bitcast(s, word) if wide else bfloat16_bits(builder, s)
            if not wide:
                bits = builder.and_(bits, filled(word, 0xFFFF0000))
            inverse = builder.fdiv(one, builder.select(live, builder.bitcast(bits, single), one))
            store(builder, builder.select(live, inverse, zero), address, 4)
            dead = builder.select(finite, filled(word, 0), filled(word, 0x7FC00000))
            lowered = builder.trunc(builder.mul(rotated, constant(6 << 23)), ir.IntType(32))
            bits = builder.select(live, builder.sub(bits, broadcast(builder, lowered, lanes)), dead)
            if not wide:
                bits = builder.trunc(builder.lshr(bits, filled(word, 16)), integers(16, lanes))
            store(builder, bits, builder.add(scales, builder.mul(number, constant(16))), 2)
            dead = builder.zext(builder.and_(counted, builder.not_(live)), word)
            found = builder.zext(largest_lane(builder, dead), ir.IntType(64))
            builder.store(builder.or_(builder.load(some_dead), found), some_dead)

    switch(builder, [row_scale, kind], emit, [(1, INT8), *product((0,), QUANTIZED)])
    return builder.load(some_dead)


@emits("void")
def encode_groups(builder, x, columns, group, dtype, inverses, payload, plane, kind):
    """Writes each group's quantised elements; `inverses` holds float32 1/s. The second plane, if any, is at `plane`."""

    def emit(element: int, kind: int) -> None:
        with groups_of(builder, columns, group) as (number, first, width):
            inverse = load(builder, _at(builder, inverses, number, FLOAT32), ir.FloatType(), 4)

            def quantize(column: Any, lanes: int) -> None:
                source, target = _at(builder, x, column, element), _at(builder, payload, column, kind)
                high = _high(builder, plane, column)
                store_quantized(builder, source, lanes, element, inverse, target, kind, high)

            _blocks(builder, first, width, quantize, kind)

    whole = [kind for kind in QUANTIZED if kind not in _PLANES]  # blocks of 64 columns are float32 by now
    switch(builder, [dtype, kind], emit, [*product(ROW_ELEMENTS, whole), *product((FLOAT32,), _PLANES)])


def _magnitudes(builder: Any, bits: Any) -> Any:
    magnitude = builder.and_(bits, filled(bits.type, SIGNLESS))
    below_zero = builder.sub(magnitude, filled(bits.type, 1))  # zero becomes the largest number
    tiny = builder.icmp_unsigned("<", below_zero, filled(bits.type, _SMALLEST_PLAIN_BITS - 1))
    return builder.select(tiny, filled(bits.type, _INFINITY_BITS), magnitude)


@emits("int32", bits="int32")
def magnitude_bits(builder, bits):
    """The magnitude of a scale, both as float32 bits; infinity for one whose products with codes may be subnormal.

    The smallest code is 2**-9, of fp8.
    """
    return builder.extract_element(_magnitudes(builder, broadcast(builder, bits, 1)), ir.Constant(ir.IntType(32), 0))


@emits("int32")
def read_scales(builder, scales, count, floats):
    """Writes `count` bfloat16 scales as float32, and returns `magnitude_bits` of the largest of them.

    Eight at a time: both arrays must have room, to a multiple of 8.
    """
    word = integers(32, 8)
    total = cgutils.alloca_once_value(builder, filled(word, 0))
    with loop(builder, builder.lshr(builder.add(count, constant(7)), constant(3))) as number:
        bits = load(builder, builder.add(scales, builder.shl(number, constant(4))), integers(16, 8), 2)
        bits = builder.shl(builder.zext(bits, word), filled(word, 16))
        store(builder, bits, builder.add(floats, builder.shl(number, constant(5))), 4)
        builder.store(larger(builder, builder.load(total), _magnitudes(builder, bits)), total)
    return largest_lane(builder, builder.load(total))


@emits("void")
def decode_groups(builder, payload, plane, kind, rotated, scales, columns, group, out, dtype):
    """Writes q * s, rounded once to the row's dtype; `scales` holds float32. The second plane, if any, is at `plane`.

    With `rotated` 1 whole blocks are rotated back before that, and saturate. Else no scale may be NaN, and no product
    overflow the dtype or be subnormal: see `magnitude_bits`.
    """

    def emit(rotated: int, kind: int, element: int) -> None:
        with groups_of(builder, columns, group) as (number, first, width):
            scale = load(builder, _at(builder, scales, number, FLOAT32), ir.FloatType(), 4)

            def dequantize(column: Any, lanes: int) -> None:
                high = _high(builder, plane, column)
                values = load_floats(builder, _at(builder, payload, column, kind), lanes, kind, high)
                values = builder.fmul(values, broadcast(builder, scale, lanes))
                target = _at(builder, out, column, element)
                if not rotated:
                    store_floats(builder, values, target, element, plain=True, saturate=False)
                    return
                for half in _turned_back(builder, values):
                    store_floats(builder, half, target, element, plain=False, saturate=True)
                    target = builder.add(target, constant(BLOCK // 2 * BITS[element] // 8))

            _blocks(builder, first, width, dequantize, kind, rotated=rotated)

    rotates = [kind for kind in QUANTIZED if kind != FP8]
    cases = [*product((0,), QUANTIZED, ROW_ELEMENTS), *product((1,), rotates, ROW_ELEMENTS)]
    switch(builder, [rotated, kind, dtype], emit, cases)


@emits("void")
def round_columns(builder, values, columns, out, dtype, saturate):
    """float32 to a row's dtype, half to even; `saturate` 1 keeps what is not NaN finite, 0 lets it overflow."""

    def emit(element: int, saturate: int) -> None:
        def convert(column: Any, lanes: int) -> None:
            floats = load_floats(builder, _at(builder, values, column, FLOAT32), lanes, FLOAT32)
            target = _at(builder, out, column, element)
            store_floats(builder, floats, target, element, plain=False, saturate=bool(saturate))

        _blocks(builder, constant(0), columns, convert, FLOAT32)

    switch(builder, [dtype, saturate], emit, product(ROW_ELEMENTS, (0, 1)))


@emits("void")
def accumulate_groups(builder, sources, scales, count, element, plane, row_scale, columns, group, out):
    """Writes, as float32, the sum from +0.0 of `element * scale` over `count` sources, in their order.

    `sources` and `scales` are arrays of int64 addresses: of a source's first element, and of its one float32 scale
    (`row_scale` 1) or its bfloat16 scales, one a group (`row_scale` 0). Each product is rounded, then each sum. The
    second plane, if any, begins `plane` bytes behind a source's first element.
    """

    def emit(row_scale: int, element: int) -> None:
        widest = _WIDEST_OF_ROWS if element in ROW_ELEMENTS else _WIDEST_OF_RECORDS
        with groups_of(builder, columns, group) as (number, first, width):

            def add_up(column: Any, lanes: int) -> None:
                total = cgutils.alloca_once(builder, singles(lanes))
                builder.store(filled(singles(lanes), 0.0), total)
                with loop(builder, count) as j:
                    entry = builder.mul(j, constant(8))
                    source = load(builder, builder.add(sources, entry), ir.IntType(64), 8)
                    scale = load(builder, builder.add(scales, entry), ir.IntType(64), 8)
                    if row_scale:
                        scale = load(builder, scale, ir.FloatType(), 4)
                    else:
                        bits = load(builder, _at(builder, scale, number, BFLOAT16), ir.IntType(16), 2)
                        bits = builder.shl(builder.zext(bits, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
                        scale = builder.bitcast(bits, ir.FloatType())
                    high = _high(builder, builder.add(source, plane), column)
                    values = load_floats(builder, _at(builder, source, column, element), lanes, element, high)
                    product = builder.fmul(values, broadcast(builder, scale, lanes))
                    builder.store(builder.fadd(builder.load(total), product), total)
                store(builder, builder.load(total), _at(builder, out, column, FLOAT32), 4)

            _blocks(builder, first, width, add_up, element, widest)

    switch(builder, [row_scale, element], emit, [*product((1,), (INT8, *ROW_ELEMENTS)), *product((0,), QUANTIZED)])
