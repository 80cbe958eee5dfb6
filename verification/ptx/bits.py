"""Instructions on the bits and bytes of integers: fields, permutations, tables, counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from verification.ptx.errors import PtxError
from verification.ptx.program import Instruction
from verification.ptx.state import State, Step

Builder = Callable[[State, Instruction], Step]


def _funnel(state: State, instruction: Instruction) -> Step:
    """`shf`: 32 of the 64 bits b:a, shifted."""
    low, high, amount = (state.source(operand, "u32") for operand in instruction.operands[1:4])
    left, wrap = instruction.opcode[1] == "l", "wrap" in instruction.opcode

    def shifted() -> np.ndarray:
        by = (amount & np.uint32(31) if wrap else np.minimum(amount, np.uint32(32))).astype(np.uint64)
        both = high.astype(np.uint64) << np.uint64(32) | low
        return (both << by >> np.uint64(32) if left else both >> by).astype(np.uint32)

    return state.emit(instruction.operands[0], "u32", shifted)


def _low_bits(count: np.ndarray, kind: Any) -> np.ndarray:
    """Integers of which the lowest `count` bits are set."""
    bits = 8 * np.dtype(kind).itemsize
    return np.where(count < bits, (kind(1) << np.minimum(count, bits - 1).astype(kind)) - kind(1), ~kind(0))


def _byte(state: State, operand: str) -> Callable[[], np.ndarray]:
    """A place in a register, or a number of bits: of an operand the low eight bits count."""
    source = state.source(operand, "u32")
    return lambda: (source & np.uint32(255)).astype(np.int64)


def _extract(state: State, instruction: Instruction) -> Step:
    """`bfe`: a field of bits, extended by its highest one if it is signed."""
    kind = instruction.type
    value = state.source(instruction.operands[1], "u" + kind[1:])
    start, length = (_byte(state, operand) for operand in instruction.operands[2:4])
    unsigned, bits = value.dtype.type, 8 * value.itemsize

    def field() -> np.ndarray:
        first, count = start(), length()
        ones = _low_bits(np.minimum(count, np.maximum(bits - first, 0)), unsigned)
        taken = value >> np.minimum(first, bits - 1).astype(unsigned) & ones
        if kind[0] == "s":
            last = np.minimum(first + count - 1, bits - 1).clip(0).astype(unsigned)
            taken = np.where((count > 0) & (value >> last & unsigned(1) == 1), taken | ~ones, taken)
        return taken

    return state.emit(instruction.operands[0], "u" + kind[1:], field)


def _insert(state: State, instruction: Instruction) -> Step:
    """`bfi`: b with a field replaced by the low bits of a."""
    kind = "u" + instruction.type[1:]
    inserted, base = (state.source(operand, kind) for operand in instruction.operands[1:3])
    start, length = (_byte(state, operand) for operand in instruction.operands[3:5])
    unsigned, bits = base.dtype.type, 8 * base.itemsize

    def replaced() -> np.ndarray:
        first = start()
        by = np.minimum(first, bits - 1).astype(unsigned)
        field = np.where(first < bits, _low_bits(length(), unsigned) << by, unsigned(0))
        return (base & ~field) | (inserted << by & field)

    return state.emit(instruction.operands[0], kind, replaced)


def _permute(state: State, instruction: Instruction) -> Step:
    """`prmt`: four of the eight bytes of b:a, by a selector, or as a mode says by its low two bits."""
    a, b, selector = (state.source(operand, "u32") for operand in instruction.operands[1:4])
    mode = instruction.opcode[2] if len(instruction.opcode) > 2 else None
    modes = {
        "f4e": (0x3210, 0x4321, 0x5432, 0x6543), "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
        "rc8": (0x0000, 0x1111, 0x2222, 0x3333), "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
        "ecr": (0x0000, 0x1110, 0x2210, 0x3210), "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
    }  # fmt: skip
    if mode is not None and mode not in modes:
        raise PtxError(f"not built: {instruction.text}")

    def permuted() -> np.ndarray:
        both = b.astype(np.uint64) << np.uint64(32) | a
        chosen = selector if mode is None else np.array(modes[mode], np.uint32)[selector & np.uint32(3)]
        result = np.zeros(state.size, np.uint32)
        for place in range(4):
            which = chosen >> np.uint32(4 * place) & np.uint32(15)
            octet = (both >> (np.uint64(8) * (which & np.uint32(7)).astype(np.uint64)) & np.uint64(255)).astype(
                np.uint32
            )
            sign = np.where(octet >= 128, np.uint32(255), np.uint32(0))
            result |= np.where(which >= 8, sign, octet) << np.uint32(8 * place)
        return result

    return state.emit(instruction.operands[0], "u32", permuted)


def _logic(state: State, instruction: Instruction) -> Step:
    """`lop3`: any function of three bits, by its table."""
    if instruction.opcode[1] != "b32":
        raise PtxError(f"not built: {instruction.text}")
    a, b, c = (state.source(operand, "u32") for operand in instruction.operands[1:4])
    table = int(instruction.operands[4].rstrip("U"), 0)

    def combined() -> np.ndarray:
        result = np.zeros(state.size, np.uint32)
        for row in range(8):
            if table >> row & 1:
                result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        return result

    return state.emit(instruction.operands[0], "u32", combined)


def _dot(state: State, instruction: Instruction) -> Step:
    """`dp4a`: a sum of four products of bytes, and c."""
    first, second = instruction.opcode[-2:]
    views = []
    for operand, kind in zip(instruction.operands[1:3], (first, second), strict=True):
        source = np.broadcast_to(state.source(operand, "u32"), state.size)
        views.append((source, np.int8 if kind == "s32" else np.uint8))
    c = state.source(instruction.operands[3], "u32")

    def summed() -> np.ndarray:
        a, b = (np.ascontiguousarray(source).view(octet).reshape(-1, 4).astype(np.int64) for source, octet in views)
        return ((a * b).sum(1) + c).astype(np.uint32)

    return state.emit(instruction.operands[0], "u32", summed)


def _leading(x: np.ndarray) -> np.ndarray:
    """Zeros in front of the highest bit that is set."""
    bits, count = 8 * x.itemsize, np.zeros(len(x), np.uint32)
    for place in range(bits):
        count[(x >> x.dtype.type(place)) != 0] = place + 1
    return np.uint32(bits) - count


def _reversed(x: np.ndarray) -> np.ndarray:
    bits, result = 8 * x.itemsize, np.zeros_like(x)
    for place in range(bits):
        result |= (x >> x.dtype.type(place) & x.dtype.type(1)) << x.dtype.type(bits - 1 - place)
    return result


def _count(function: Callable[[np.ndarray], np.ndarray]) -> Builder:
    """Counts bits, into 32 bits whatever the type."""

    def build(state: State, instruction: Instruction) -> Step:
        value = state.source(instruction.operands[1], "u" + instruction.type[1:])
        return state.emit(instruction.operands[0], "u32", lambda: function(value).astype(np.uint32))

    return build


def _reverse(state: State, instruction: Instruction) -> Step:
    """`brev`: the first bit is the last."""
    value = state.source(instruction.operands[1], instruction.type)
    return state.emit(instruction.operands[0], instruction.type, _reversed, value)


BITS: dict[str, Builder] = {
    "shf": _funnel,
    "bfe": _extract,
    "bfi": _insert,
    "prmt": _permute,
    "lop3": _logic,
    "dp4a": _dot,
    "popc": _count(np.bitwise_count),
    "clz": _count(_leading),
    "brev": _reverse,
}
