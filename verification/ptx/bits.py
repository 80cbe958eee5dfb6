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
    """`prmt`: four of the eight bytes of b:a, by a selector."""
    if len(instruction.opcode) > 2:
        raise PtxError(f"not built: {instruction.text}")
    a, b, selector = (state.source(operand, "u32") for operand in instruction.operands[1:4])

    def permuted() -> np.ndarray:
        both = b.astype(np.uint64) << np.uint64(32) | a
        result = np.zeros(state.size, np.uint32)
        for place in range(4):
            which = selector >> np.uint32(4 * place) & np.uint32(15)
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


def _count(state: State, instruction: Instruction) -> Step:
    """`popc`: how many bits are set, in 32 bits whatever the type."""
    value = state.source(instruction.operands[1], "u" + instruction.type[1:])
    return state.emit(instruction.operands[0], "u32", lambda: np.bitwise_count(value).astype(np.uint32))


BITS: dict[str, Builder] = {
    "shf": _funnel,
    "bfe": _extract,
    "bfi": _insert,
    "prmt": _permute,
    "lop3": _logic,
    "popc": _count,
}
