"""Integer, logic and selection instructions, and what moves bits between registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.errors import PtxError
from tests.ptx.floats import FLOATS
from tests.ptx.memory import UNSIGNED
from tests.ptx.program import Instruction
from tests.ptx.state import SIGNED, Mask, State, Step, dtype_of, elements, width_of

Builder = Callable[[State, Instruction], Step]


def _lanewise(function: Callable[..., np.ndarray], count: int, sources: str | None = None) -> Builder:
    """An instruction that gives each thread `function` of its `count` sources, all of one type."""

    def build(state: State, instruction: Instruction) -> Step:
        kind = sources or instruction.type
        operands = [state.source(operand, kind) for operand in instruction.operands[1 : 1 + count]]
        return state.emit(instruction.operands[0], instruction.type, function, *operands)

    return build


def _either(integers: Callable[..., np.ndarray], count: int) -> Builder:
    """The same, but of types that are floats by their own rules (`floats.py`)."""
    of_integers = _lanewise(integers, count)

    def build(state: State, instruction: Instruction) -> Step:
        if instruction.type in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2"):
            return FLOATS[instruction.name](state, instruction)
        if "sat" in instruction.opcode or "cc" in instruction.opcode:
            raise PtxError(f"not built: {instruction.text}")
        return of_integers(state, instruction)

    return build


def _wide(x: np.ndarray) -> np.ndarray:
    """Integers of which products do not overflow: twice the width, or Python's."""
    if x.itemsize == 8:
        return x.astype(object)
    return x.astype((SIGNED if x.dtype.kind == "i" else UNSIGNED)[2 * x.itemsize])


def _high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    bits = 8 * a.itemsize
    if a.itemsize == 8:
        return np.array([int(x) * int(y) >> bits for x, y in zip(a, b, strict=True)], object).astype(a.dtype)
    return (_wide(a) * _wide(b) >> bits).astype(a.dtype)


def _multiply(state: State, instruction: Instruction) -> Step:
    """`mul` and `mad` of integers: .lo, .hi and .wide."""
    kind, opcode = instruction.type, instruction.opcode
    result = f"{kind[0]}{16 * width_of(kind)}" if "wide" in opcode else kind
    a, b = (state.source(operand, kind) for operand in instruction.operands[1:3])
    if "wide" in opcode:
        wide = dtype_of(result)

        def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            return np.multiply(a, b, dtype=wide)

    elif "hi" in opcode:
        product = _high
    elif "lo" in opcode:
        product = np.multiply
    else:
        raise PtxError(f"not built: {instruction.text}")
    if instruction.name == "mul":
        return state.emit(instruction.operands[0], result, product, a, b)
    c = state.source(instruction.operands[3], result)
    return state.emit(instruction.operands[0], result, lambda: product(a, b) + c)


def _multiplication(state: State, instruction: Instruction) -> Step:
    if instruction.type[0] in "su":
        return _multiply(state, instruction)
    return FLOATS[instruction.name](state, instruction)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Truncated, as in C; by zero, which PTX leaves open, all ones."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // safe
    if a.dtype.kind == "i":
        quotient = quotient + ((a % safe != 0) & ((a < 0) != (safe < 0)))
    return np.where(b == 0, ~b.dtype.type(0), quotient)


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(b == 0, a, a - _quotient(a, b) * b)


def _shift(left: bool) -> Builder:
    """`shl` and `shr`: amounts are clamped to the width."""

    def build(state: State, instruction: Instruction) -> Step:
        kind = instruction.type if not left else "u" + instruction.type[1:]
        value, amount = state.source(instruction.operands[1], kind), state.source(instruction.operands[2], "u32")
        bits, shift = 8 * value.itemsize, np.left_shift if left else np.right_shift

        def shifted() -> np.ndarray:
            small = shift(value, np.minimum(amount, bits - 1).astype(value.dtype))
            if value.dtype.kind == "i":
                return small  # the sign fills
            return np.where(amount >= bits, value.dtype.type(0), small)

        return state.emit(instruction.operands[0], kind, shifted)

    return build


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


_COMPARISONS: dict[str, Any] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
_COMBINED: dict[str, Any] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _compared(name: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """A comparison; of floats the plain ones are false where one is NaN, but `ne` too, and those with a u are true."""
    if name in _COMPARISONS:
        if name == "ne":
            return lambda a, b: (a != b) & (a == a) & (b == b)
        return _COMPARISONS[name]
    if name in ("num", "nan"):
        return lambda a, b: ((a == a) & (b == b)) == (name == "num")
    plain = _COMPARISONS[name[:-1]]
    return lambda a, b: plain(a, b) | (a != a) | (b != b)


def _set_predicate(state: State, instruction: Instruction) -> Step:
    """`setp`: a comparison, and its contrary; either may be combined with a further predicate."""
    if instruction.type in ("f16", "bf16", "f16x2", "bf16x2") or "ftz" in instruction.opcode:
        raise PtxError(f"not built: {instruction.text}")
    a, b = (state.source(operand, instruction.type) for operand in instruction.operands[1:3])
    compare = _compared(instruction.opcode[1])
    if instruction.opcode[1] == "ne" and a.dtype.kind != "f":
        compare = np.not_equal
    destinations = instruction.operands[0].split("|")
    combine = _COMBINED.get(instruction.opcode[2]) if len(instruction.operands) > 3 else None
    if len(destinations) == 1 and combine is None:
        return state.emit(destinations[0], "pred", compare, a, b)
    further = instruction.operands[3] if combine is not None else "1"
    third = state.source(further.lstrip("!"), "pred")
    targets = [state.target(name.strip(), "pred") for name in destinations]

    def step(mask: Mask) -> None:
        result, other = compare(a, b), ~third if further.startswith("!") else third.copy()
        for target, value in zip(targets, (result, ~result), strict=False):
            np.copyto(target, value if combine is None else combine(value, other), where=mask)

    return step


def _select(state: State, instruction: Instruction) -> Step:
    a, b = (state.source(operand, instruction.type) for operand in instruction.operands[1:3])
    predicate = state.source(instruction.operands[3], "pred")
    return state.emit(instruction.operands[0], instruction.type, lambda: np.where(predicate, a, b))


def _move(state: State, instruction: Instruction) -> Step:
    """`mov`, also between a register and the vector of its parts, low ones first."""
    kind, (destination, source) = instruction.type, instruction.operands
    if source in ("%globaltimer", "%clock64"):
        return state.emit(destination, kind, lambda: np.full(state.size, state.clock(), np.uint64))
    if "{" not in destination + source:
        return state.emit(destination, kind, np.positive if kind != "pred" else np.logical_or,
                          *[state.source(source, kind)] * (1 + (kind == "pred")))  # fmt: skip
    parts = elements(destination if destination.startswith("{") else source)
    part = f"u{8 * width_of(kind) // len(parts)}"
    if destination.startswith("{"):
        targets = [state.target(name, part) for name in parts]
        whole = state.source(source, "u" + kind[1:])

        def step(mask: Mask) -> None:
            split = np.ascontiguousarray(whole).view(dtype_of(part)).reshape(state.size, -1).copy()
            for place, target in enumerate(targets):
                np.copyto(target, split[:, place], where=mask)

        return step
    sources = [state.source(name, part) for name in parts]
    wide = dtype_of("u" + kind[1:])
    return state.emit(destination, "u" + kind[1:], lambda: np.stack(sources, 1).view(wide)[:, 0])


def _logical(bits: Any, predicates: Any, count: int) -> Builder:
    def build(state: State, instruction: Instruction) -> Step:
        function = predicates if instruction.type == "pred" else bits
        return _lanewise(function, count)(state, instruction)

    return build


INTEGERS: dict[str, Builder] = {
    "add": _either(np.add, 2),
    "sub": _either(np.subtract, 2),
    "min": _either(np.minimum, 2),
    "max": _either(np.maximum, 2),
    "neg": _either(np.negative, 1),
    "abs": _either(np.abs, 1),
    "div": _either(_quotient, 2),
    "rem": _lanewise(_remainder, 2),
    "mul": _multiplication,
    "mad": _multiplication,
    "and": _logical(np.bitwise_and, np.logical_and, 2),
    "or": _logical(np.bitwise_or, np.logical_or, 2),
    "xor": _logical(np.bitwise_xor, np.logical_xor, 2),
    "not": _logical(np.invert, np.logical_not, 1),
    "shl": _shift(left=True),
    "shr": _shift(left=False),
    "shf": _funnel,
    "bfe": _extract,
    "bfi": _insert,
    "prmt": _permute,
    "lop3": _logic,
    "dp4a": _dot,
    "popc": _count(np.bitwise_count),
    "clz": _count(_leading),
    "brev": _lanewise(_reversed, 1),
    "setp": _set_predicate,
    "selp": _select,
    "mov": _move,
}
