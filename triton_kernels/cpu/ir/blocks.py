"""Blocks of 64 columns: how they are read as float32, rotated and rotated back.

`thinwire.wire` has the definition. A block is four vectors of 16 lanes. In the stages within a vector each lane, or its
negative, is added to its partner; LLVM's machine code is as short as that of more elaborate orders.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from thinwire.triton_kernels.cpu.compat import cgutils, emits, ir
from thinwire.triton_kernels.cpu.ir.control import groups_of, steps, switch
from thinwire.triton_kernels.cpu.ir.vectors import (
    BITS,
    FLOAT32,
    ROW_ELEMENTS,
    SIGNLESS,
    constant,
    filled,
    integers,
    larger,
    largest_lane,
    load_floats,
    store,
)
from thinwire.wire import BLOCK

_LANES = 16


_COLUMNS = [range(start, start + _LANES) for start in range(0, BLOCK, _LANES)]


def _flipped(builder: Any, vector: Any, signs: list[int]) -> Any:
    """A vector of float32 whose lanes change their signs where `signs` is 1."""
    word = integers(32, _LANES)
    bits = builder.xor(builder.bitcast(vector, word), ir.Constant(word, [sign << 31 for sign in signs]))
    return builder.bitcast(bits, vector.type)


def _signed(builder: Any, parts: list[Any]) -> list[Any]:
    signs = [[(column & column >> 1 & 0x15).bit_count() & 1 for column in columns] for columns in _COLUMNS]
    return [_flipped(builder, part, each) for part, each in zip(parts, signs, strict=True)]


def _stages(builder: Any, parts: list[Any]) -> list[Any]:
    for apart in (1, 2, 4, 8):
        others = ir.Constant(integers(32, _LANES), [lane ^ apart for lane in range(_LANES)])
        signs = [lane // apart % 2 for lane in range(_LANES)]
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


def _load(builder: Any, x: Any, column: Any, element: int) -> list[Any]:
    return [load_floats(builder, address, _LANES, element) for address in _addresses(builder, x, column, element)]


def _store(builder: Any, parts: list[Any], out: Any, column: Any) -> None:
    for part, address in zip(parts, _addresses(builder, out, column, FLOAT32), strict=True):
        store(builder, part, address, 4)


@emits("void")
def widen_groups(builder, x, columns, group, dtype, rotated, out, amax):
    """Writes groups of whole blocks of a row as float32, and each one's largest magnitude, as float32 bits, to `amax`.

    With `rotated` 1, those of the rotated row, unscaled. The maximum is that of `amax_groups`.
    """
    word = integers(32, _LANES)

    def emit(rotated: int, element: int) -> None:
        total = cgutils.alloca_once(builder, word)
        with groups_of(builder, columns, group) as (number, first, width):
            builder.store(filled(word, 0), total)
            with steps(builder, width, constant(BLOCK)) as (_, step):
                column = builder.add(first, step)
                parts = _load(builder, x, column, element)
                if rotated:
                    parts = _stages(builder, _signed(builder, parts))
                _store(builder, parts, out, column)
                signless = [builder.and_(builder.bitcast(part, word), filled(word, SIGNLESS)) for part in parts]
                while len(signless) > 1:
                    signless = [larger(builder, *pair) for pair in zip(signless[::2], signless[1::2], strict=True)]
                builder.store(larger(builder, builder.load(total), signless[0]), total)
            place = builder.add(amax, builder.shl(number, constant(2)))
            store(builder, largest_lane(builder, builder.load(total)), place, 4)

    switch(builder, [rotated, dtype], emit, product((0, 1), ROW_ELEMENTS))


def turned_back(builder: Any, values: Any) -> list[Any]:
    """A block of a rotated row, as it was, in two halves."""
    lanes = [ir.Constant(integers(32, _LANES), [*columns]) for columns in _COLUMNS]
    parts = _signed(builder, _stages(builder, [builder.shuffle_vector(values, values, each) for each in lanes]))
    both = ir.Constant(integers(32, 2 * _LANES), [*range(2 * _LANES)])
    return [builder.shuffle_vector(*pair, both) for pair in zip(parts[::2], parts[1::2], strict=True)]


@emits("void")
def rotate_back(builder, values, columns):
    """Rotates whole blocks of float32 back, in place."""
    with steps(builder, columns, constant(BLOCK)) as (_, column):
        parts = _stages(builder, _load(builder, values, column, FLOAT32))
        _store(builder, _signed(builder, parts), values, column)
