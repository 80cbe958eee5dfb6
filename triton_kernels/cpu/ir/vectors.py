"""Elements as LLVM vectors: how a block of columns is read as float32, quantised, and rounded to where it goes.

These functions run while a kernel compiles and write its IR. Left to itself, LLVM's vectoriser inserts quantised bytes
one at a time; portable vector IR becomes packed instructions on every ISA, of the widest kind the machine has, and
compiles sooner, as there is nothing to search for. No operation carries a fast-math flag, so that none is fused or
reordered.

An element is one of the codes below: `FLOAT32`, `FLOAT16`, `BFLOAT16` in a row, or a kind of `thinwire.wire.FORMATS` in
a record's payload. The arithmetic is that of `thinwire.triton_kernels.codec`, whose docstring has the reasons.
"""

from __future__ import annotations

from typing import Any

from thinwire.triton_kernels.cpu.compat import (
    BFloat16,
    cgutils,
    converts_halves,
    gathers_bytes,
    ir,
    rounds_pairs_to_bfloat16,
)
from thinwire.wire import BLOCK, FORMATS

NONE, INT8, INT4, FP8, INT6, INT10 = (FORMATS[name].kind for name in ("none", "int8", "int4", "fp8", "int6", "int10"))
FLOAT32, FLOAT16, BFLOAT16 = range(len(FORMATS), len(FORMATS) + 3)  # behind all kinds

#: Of each code: 0 for NONE.
BITS = (*(each.bits for each in FORMATS.values()), 32, 16, 16)
#: Of the first plane of each code; the second of those that have one has the rest.
LOW_BITS = (*(each.planes[0] if each.planes else each.bits for each in FORMATS.values()), 32, 16, 16)
#: Added to the kind of a layout whose rows are rotated.
ROTATED = 16
ROW_ELEMENTS = (FLOAT32, FLOAT16, BFLOAT16)
QUANTIZED = tuple(each.kind for each in FORMATS.values() if each.bits)
_LARGEST = {FLOAT32: 3.4028234663852886e38, FLOAT16: 65504.0, BFLOAT16: 3.3895313892515355e38}
_MAGIC = 12582912.0  # 1.5 * 2**23: adding it rounds half to even and leaves q in the low bits
SIGNLESS = 0x7FFFFFFF
_UPPER_HALF = 0xFFFF0000
_VECTOR_BYTES = 64  # of AVX-512
_NAN_OR_SUBNORMAL = 0b10100001  # classes of VFPCLASSPS: a signalling NaN, a subnormal number, a quiet NaN


def integers(bits: int, lanes: int) -> Any:
    """The type of a vector of integers."""
    return ir.VectorType(ir.IntType(bits), lanes)


def singles(lanes: int) -> Any:
    """The type of a vector of float32."""
    return ir.VectorType(ir.FloatType(), lanes)


def filled(vector_type: Any, value: float) -> Any:
    """A constant vector of one value."""
    return ir.Constant(vector_type, [value] * vector_type.count)


def constant(value: int) -> Any:
    """A constant int64."""
    return ir.Constant(ir.IntType(64), value)


def broadcast(builder: Any, scalar: Any, lanes: int) -> Any:
    """A vector of one runtime value."""
    first = builder.insert_element(
        ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0)
    )
    return builder.shuffle_vector(first, first, filled(integers(32, lanes), 0))


def largest_lane(builder: Any, vector: Any) -> Any:
    """The largest lane of a vector of unsigned integers."""
    name = f"llvm.vector.reduce.umax.v{vector.type.count}i{vector.type.element.width}"
    reduction = ir.FunctionType(vector.type.element, [vector.type])
    return builder.call(cgutils.get_or_insert_function(builder.module, reduction, name), [vector])


def larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger one of two unsigned integers, or of each lane of two vectors."""
    return builder.select(builder.icmp_unsigned(">", a, b), a, b)


def load(builder: Any, address: Any, value_type: Any, align: int) -> Any:
    """Reads a value at an int64 address."""
    return builder.load(builder.inttoptr(address, value_type.as_pointer()), align=align)


def store(builder: Any, value: Any, address: Any, align: int) -> None:
    """Puts a value at an int64 address."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def _halves(builder: Any, vector: Any) -> list[Any]:
    """The first and the second half of a vector."""
    lanes = vector.type.count
    lanes_of = (range(lanes // 2), range(lanes // 2, lanes))
    return [builder.shuffle_vector(vector, vector, ir.Constant(integers(32, lanes // 2), [*part])) for part in lanes_of]


# ---------------------------------------------------------------------------------------------------------------------
# Instructions of AVX-512 for which LLVM finds others that take longer; `compat` says whether the machine has them


def _gather_bytes(builder: Any, first: Any, second: Any, places: list[int]) -> Any:
    """int8 [len(places)], at most 64: the bytes at these places of two vectors of 64 bytes, one behind the other."""
    octets = ir.VectorType(ir.IntType(8), _VECTOR_BYTES)
    order = ir.Constant(octets, places + [0] * (_VECTOR_BYTES - len(places)))
    # An empty piece of assembly hides that the order is constant: LLVM would make four shuffles of it.
    with builder.goto_entry_block():
        order = builder.asm(ir.FunctionType(octets, [octets]), "", "=v,0", [order], False)
    permutation = ir.FunctionType(octets, [octets] * 3)
    permute = cgutils.get_or_insert_function(builder.module, permutation, "llvm.x86.avx512.vpermi2var.qi.512")
    first, second = (builder.bitcast(vector, octets) for vector in (first, second))
    gathered = builder.call(permute, [first, order, second])
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), len(places)), list(range(len(places))))
    return builder.shuffle_vector(gathered, gathered, lanes)


def _has_special(builder: Any, vectors: list[Any]) -> Any:
    """Whether some lane of float32 [16] each is NaN or subnormal, which `_round_pairs` does not round as others do."""
    lanes = ir.VectorType(ir.IntType(1), 16)
    classify = ir.FunctionType(lanes, [vectors[0].type, ir.IntType(32)])
    classes = cgutils.get_or_insert_function(builder.module, classify, "llvm.x86.avx512.fpclass.ps.512")
    found = ir.Constant(lanes, [0] * 16)
    for vector in vectors:
        found = builder.or_(found, builder.call(classes, [vector, ir.Constant(ir.IntType(32), _NAN_OR_SUBNORMAL)]))
    return builder.icmp_unsigned("!=", builder.bitcast(found, ir.IntType(16)), ir.Constant(ir.IntType(16), 0))


def _round_pairs(builder: Any, first: Any, second: Any) -> Any:
    """float32 [16] and [16] to the bits of the nearest bfloat16, int16 [32], half to even; none may be subnormal."""
    singles = ir.VectorType(ir.FloatType(), 16)
    rounding = ir.FunctionType(ir.VectorType(BFloat16(), 32), [singles, singles])
    convert = cgutils.get_or_insert_function(builder.module, rounding, "llvm.x86.avx512bf16.cvtne2ps2bf16.512")
    return builder.bitcast(builder.call(convert, [second, first]), ir.VectorType(ir.IntType(16), 32))


# ---------------------------------------------------------------------------------------------------------------------
# float16


def from_halves(builder: Any, bits: Any) -> Any:
    """int16 bits of float16 to float32."""
    lanes = bits.type.count
    if converts_halves():
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), lanes)), singles(lanes))
    word = integers(32, lanes)
    wide = builder.sext(bits, word)
    magnitude = builder.and_(wide, filled(word, 0x7FFF))
    normal = builder.add(builder.shl(magnitude, filled(word, 13)), filled(word, (127 - 15) << 23))
    special = builder.or_(normal, filled(word, 0x7F800000))
    # A subnormal counts multiples of 2**-24.
    subnormal = builder.fmul(builder.sitofp(magnitude, singles(lanes)), filled(singles(lanes), 2.0**-24))
    small = builder.icmp_signed("<", magnitude, filled(word, 0x0400))
    large = builder.icmp_signed(">=", magnitude, filled(word, 0x7C00))
    absolute = builder.select(small, builder.bitcast(subnormal, word), builder.select(large, special, normal))
    sign = builder.and_(wide, filled(word, 0x80000000))
    return builder.bitcast(builder.or_(absolute, sign), singles(lanes))


def _to_halves(builder: Any, values: Any) -> Any:
    """float32 to int16 bits of the nearest float16, half to even."""
    lanes = values.type.count
    if converts_halves():
        halves = builder.fptrunc(values, ir.VectorType(ir.HalfType(), lanes))
        return builder.bitcast(halves, integers(16, lanes))
    word = integers(32, lanes)
    bits = builder.bitcast(values, word)
    magnitude = builder.and_(bits, filled(word, 0x7FFFFFFF))
    last_place = builder.and_(builder.lshr(magnitude, filled(word, 13)), filled(word, 1))
    normal = builder.sub(builder.add(builder.add(magnitude, filled(word, 0xFFF)), last_place), filled(word, 112 << 23))
    normal = builder.lshr(normal, filled(word, 13))
    # The unit in the last place of 0.5 is 2**-24, so the adder rounds to a multiple of it.
    total = builder.fadd(builder.bitcast(magnitude, values.type), filled(values.type, 0.5))
    subnormal = builder.sub(builder.bitcast(total, word), filled(word, 0x3F000000))
    infinite = builder.icmp_signed(">", magnitude, filled(word, 0x47800000 - 1))
    special = builder.select(
        builder.icmp_signed(">", magnitude, filled(word, 0x7F800000)), filled(word, 0x7E00), filled(word, 0x7C00)
    )
    small = builder.icmp_signed("<", magnitude, filled(word, 0x38800000))
    absolute = builder.select(small, subnormal, builder.select(infinite, special, normal))
    sign = builder.lshr(builder.and_(bits, filled(word, 0x80000000)), filled(word, 16))
    return builder.trunc(builder.or_(absolute, sign), integers(16, lanes))


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def load_floats(builder: Any, address: Any, lanes: int, element: int, high: Any = None) -> Any:
    """Elements of a row, or of a payload before the scale, as float32; of two planes, the second at `high`, a block."""
    if element in (INT6, INT10):
        return _load_codes(builder, address, high, element)
    if element == BFLOAT16:
        bits = builder.zext(load(builder, address, integers(16, lanes), 2), integers(32, lanes))
        return builder.bitcast(builder.shl(bits, filled(bits.type, 16)), singles(lanes))
    if element == FLOAT16:
        return from_halves(builder, load(builder, address, integers(16, lanes), 2))
    if element == FLOAT32:
        return load(builder, address, singles(lanes), 4)
    if element == FP8:
        # As a float16's bits the code is the value times 2**-8, subnormal codes and zeros included.
        codes = builder.sext(load(builder, address, integers(8, lanes), 1), integers(16, lanes))
        halves = builder.and_(builder.shl(codes, filled(codes.type, 7)), filled(codes.type, 0xBF80))
        values = from_halves(builder, halves)
        return builder.fmul(values, filled(values.type, 256.0))
    if element == INT4:
        packed = builder.zext(load(builder, address, integers(8, lanes // 2), 1), integers(16, lanes // 2))
        spread = builder.or_(packed, builder.shl(packed, filled(packed.type, 4)))
        nibbles = builder.bitcast(builder.and_(spread, filled(packed.type, 0x0F0F)), integers(8, lanes))
        eight = filled(nibbles.type, 8)
        payload = builder.sub(builder.xor(nibbles, eight), eight)
    else:
        payload = load(builder, address, integers(8, lanes), 1)
    return builder.sitofp(payload, singles(lanes))


def _unfolded(builder: Any, octets: Any, bits: int) -> Any:
    """The fields of `bits` bits of int8 octets: first the lowest of each octet, then the next of each, and so on."""
    parts = [octets if not shift else builder.lshr(octets, filled(octets.type, shift)) for shift in range(0, 8, bits)]
    while len(parts) > 1:
        order = ir.Constant(integers(32, 2 * parts[0].type.count), list(range(2 * parts[0].type.count)))
        parts = [builder.shuffle_vector(*pair, order) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return builder.and_(parts[0], filled(parts[0].type, (1 << bits) - 1))


def _load_codes(builder: Any, address: Any, high: Any, element: int) -> Any:
    """The codes of a block of int6 or int10 as float32."""
    top = _unfolded(builder, load(builder, high, integers(8, BLOCK // 4), 1), 2)
    low = load(builder, address, integers(8, BLOCK * LOW_BITS[element] // 8), 1)
    if element == INT6:
        codes = _unfolded(builder, low, 4)
    else:
        codes, top = builder.zext(low, integers(16, BLOCK)), builder.zext(top, integers(16, BLOCK))
    codes = builder.or_(codes, builder.shl(top, filled(top.type, LOW_BITS[element])))
    sign = filled(codes.type, 1 << BITS[element] - 1)
    return builder.sitofp(builder.sub(builder.xor(codes, sign), sign), singles(BLOCK))


def load_planes(builder: Any, address: Any, lanes: int, element: int) -> list[Any]:
    """Elements of a row as one vector or, for bfloat16, as even and odd columns: one instruction each, no widening."""
    if element != BFLOAT16:
        return [load_floats(builder, address, lanes, element)]
    pairs = load(builder, address, integers(32, lanes // 2), 2)
    even, odd = builder.shl(pairs, filled(pairs.type, 16)), builder.and_(pairs, filled(pairs.type, _UPPER_HALF))
    return [builder.bitcast(plane, singles(lanes // 2)) for plane in (even, odd)]


# ---------------------------------------------------------------------------------------------------------------------
# Quantising


def store_quantized(
    builder: Any, x: Any, lanes: int, element: int, inverse: Any, payload: Any, kind: int, high: Any = None
) -> None:
    """Quantises `lanes` columns of a row, at address `x`, to the address `payload`; `inverse` is 1/s.

    Of a format of two planes, a block, whose second plane is at `high`.
    """
    encode = _encode_e4m3 if kind == FP8 else _encode_integer
    codes = []
    for plane in load_planes(builder, x, lanes, element):
        codes.append(encode(builder, builder.fmul(plane, broadcast(builder, inverse, plane.type.count))))
    values = _low_bytes(builder, codes)
    if kind in (INT6, INT10):
        top = builder.trunc(builder.lshr(codes[0], filled(codes[0].type, LOW_BITS[kind])), values.type)
        store(builder, _folded(builder, top, 2), high, 1)
        if kind == INT6:
            values = _folded(builder, values, 4)
    if kind == INT4:
        pairs = builder.bitcast(values, integers(16, lanes // 2))
        even = builder.and_(pairs, filled(pairs.type, 0xF))
        odd = builder.and_(builder.lshr(pairs, filled(pairs.type, 4)), filled(pairs.type, 0xF0))
        values = builder.trunc(builder.or_(even, odd), integers(8, lanes // 2))
    store(builder, values, payload, 1)


def _folded(builder: Any, codes: Any, bits: int) -> Any:
    """The lowest `bits` bits of int8 codes, as `_unfolded` finds them."""
    octets = builder.and_(codes, filled(codes.type, (1 << bits) - 1))
    shift = 4
    while octets.type.count > BLOCK * bits // 8:
        low, high = _halves(builder, octets)
        octets, shift = builder.or_(low, builder.shl(high, filled(high.type, shift))), shift // 2
    return octets


def _encode_integer(builder: Any, v: Any) -> Any:
    """int32 whose low 16 bits are v, rounded half to even, in two's complement."""
    return builder.bitcast(builder.fadd(v, filled(v.type, _MAGIC)), integers(32, v.type.count))


def _encode_e4m3(builder: Any, v: Any) -> Any:
    """int32 whose low byte is the code of v, |v| < 464, half to even.

    Adding 2**20 times the power of two at or below |v| (of 2**-6, for the subnormal codes, where |v| is less) rounds to
    3 bits behind the leading one and leaves them, in units of the code, in the low bits of the sum.
    """
    word = integers(32, v.type.count)
    bits = builder.bitcast(v, word)
    sign, exponent = builder.and_(bits, filled(word, 0x80000000)), builder.and_(bits, filled(word, 0x7F800000))
    smallest = filled(word, 121 << 23)
    exponent = builder.select(builder.icmp_signed(">", exponent, smallest), exponent, smallest)
    adder = builder.or_(builder.add(exponent, filled(word, 20 << 23)), sign)
    total = builder.bitcast(builder.fadd(v, builder.bitcast(adder, v.type)), word)
    eighths = builder.lshr(builder.sub(exponent, smallest), filled(word, 20))
    code = builder.add(builder.sub(total, adder), eighths)
    return builder.or_(code, builder.lshr(sign, filled(word, 24)))


def _low_bytes(builder: Any, planes: list[Any]) -> Any:
    """The lowest byte of each int32, in column order."""
    lanes = sum(plane.type.count for plane in planes)
    if lanes == 32 and gathers_bytes():
        by_turns = len(planes) == 2
        first, second = planes if by_turns else _halves(builder, planes[0])
        places = [4 * (lane // 2) + 64 * (lane % 2) if by_turns else 4 * lane for lane in range(lanes)]
        return _gather_bytes(builder, first, second, places)
    if len(planes) == 1:
        return builder.trunc(planes[0], integers(8, lanes))
    even, odd = planes
    odd = builder.shl(odd, filled(odd.type, 16))
    # Low halves of the one and high halves of the other: a single blend, where interleaving would shuffle.
    order = ir.Constant(integers(32, lanes), [lane + lanes * (lane % 2) for lane in range(lanes)])
    words = [builder.bitcast(plane, integers(16, lanes)) for plane in (even, odd)]
    return builder.trunc(builder.shuffle_vector(*words, order), integers(8, lanes))


# ---------------------------------------------------------------------------------------------------------------------
# Rounding


def bfloat16_bits(builder: Any, values: Any) -> Any:
    """float32 to int32 whose upper halves are the nearest bfloat16, half to even; NaN may come out as anything."""
    word = integers(32, values.type.count)
    bits = builder.bitcast(values, word)
    last_place = builder.and_(builder.lshr(bits, filled(word, 16)), filled(word, 1))
    return builder.add(builder.add(bits, filled(word, 0x7FFF)), last_place)


def store_floats(builder: Any, values: Any, address: Any, element: int, *, plain: bool, saturate: bool) -> None:
    """Rounds float32 once to a row's dtype. `plain` promises that each result is zero or a normal number; `saturate`
    keeps what is not NaN finite."""
    lanes = values.type.count
    if saturate and not plain:
        # Comparisons, not minnum and maxnum: NaN fails both and stays.
        for sign, comparison in ((1.0, ">"), (-1.0, "<")):
            limit = filled(values.type, sign * _LARGEST[element])
            values = builder.select(builder.fcmp_ordered(comparison, values, limit), limit, values)
    if element == BFLOAT16 and lanes == 32 and rounds_pairs_to_bfloat16():
        first, second = _halves(builder, values)
        special = ir.Constant(ir.IntType(1), 0) if plain else _has_special(builder, [first, second])
        with builder.if_else(special, likely=False) as (by_integers, by_instruction):
            with by_integers:
                store(builder, _to_bfloat16(builder, values, plain), address, 2)
            with by_instruction:
                store(builder, _round_pairs(builder, first, second), address, 2)
        return
    if element == FLOAT16:
        values = _to_halves(builder, values)
    elif element == BFLOAT16:
        values = _to_bfloat16(builder, values, plain)
    store(builder, values, address, BITS[element] // 8)


def _to_bfloat16(builder: Any, values: Any, plain: bool) -> Any:
    """float32 to int16 bits of the nearest bfloat16, half to even."""
    lanes = values.type.count
    rounded = bfloat16_bits(builder, values)
    if not plain:
        is_nan = builder.fcmp_unordered("uno", values, values)
        rounded = builder.select(is_nan, filled(rounded.type, 0x7FFF0000), rounded)
    words = builder.bitcast(rounded, integers(16, 2 * lanes))
    upper = ir.Constant(integers(32, lanes), [2 * lane + 1 for lane in range(lanes)])
    return builder.shuffle_vector(words, words, upper)
