"""Integer arithmetic, logic, shifts, comparisons and selections, and what moves bits between registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from verification.ptx.errors import PtxError
from verification.ptx.floats import FLOATS
from verification.ptx.memory import UNSIGNED
from verification.ptx.program import Instruction
from verification.ptx.state import SIGNED, Mask, State, Step, dtype_of, elements, width_of

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
    if opcode[0] == "mul" and kind == "f32":
        return FLOATS["mul"](state, instruction)
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
    "mul": _multiply,
    "mad": _multiply,
    "and": _logical(np.bitwise_and, np.logical_and, 2),
    "or": _logical(np.bitwise_or, np.logical_or, 2),
    "xor": _logical(np.bitwise_xor, np.logical_xor, 2),
    "not": _logical(np.invert, np.logical_not, 1),
    "shl": _shift(left=True),
    "shr": _shift(left=False),
    "setp": _set_predicate,
    "selp": _select,
    "mov": _move,
}
