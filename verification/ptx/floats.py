"""Arithmetic on floats, and conversions: rounded to nearest even, subnormals kept, NaN canonical."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from verification.ptx.errors import PtxError
from verification.ptx.formats import FORMATS, narrow, widen
from verification.ptx.program import Instruction
from verification.ptx.state import State, Step, dtype_of, width_of

Builder = Callable[[State, Instruction], Step]
_NAN = np.array(FORMATS["f32"].nan, np.uint32).view(np.float32)


def canonical(x: np.ndarray) -> np.ndarray:
    """float32; what is NaN has the pattern of a GPU's arithmetic."""
    return np.where(x != x, _NAN, x)


def _parts(bits: np.ndarray, kind: str) -> np.ndarray:
    """Values of one or two packed floats a thread, float64 [threads, 1 or 2], low ones first."""
    name = kind.removesuffix("x2")
    octets = FORMATS[name].unsigned
    return widen(np.ascontiguousarray(bits).view(octets).reshape(len(bits), -1), name)


def _whole(parts: np.ndarray, kind: str) -> np.ndarray:
    """Bits of packed floats, [threads, 1 or 2], as what a register of the type holds."""
    return np.ascontiguousarray(parts).view(dtype_of(kind))[:, 0]


def _plain(instruction: Instruction, allowed: tuple[str, ...] = ()) -> None:
    """
    Raises:
        PtxError: a modifier that would change the result and is not built.
    """
    known = {instruction.name, instruction.type, "rn", *allowed}
    if unknown := [part for part in instruction.opcode if part not in known]:
        raise PtxError(f"not built: .{unknown[0]} in {instruction.text}")


def _arithmetic(function: Callable[..., np.ndarray]) -> Builder:
    """Of two float32. Kernels compute in no other floats, and fuse no operations."""

    def build(state: State, instruction: Instruction) -> Step:
        _plain(instruction)
        if instruction.type != "f32" or (instruction.name == "div" and "rn" not in instruction.opcode):
            raise PtxError(f"not built: {instruction.text}")
        a, b = (state.source(operand, "f32") for operand in instruction.operands[1:3])
        return state.emit(instruction.operands[0], "f32", lambda: canonical(function(a, b)))

    return build


def _extreme(greatest: bool) -> Builder:
    """`min` and `max` of float32: -0.0 is below +0.0; of one NaN the other operand, with .NaN a NaN."""

    def build(state: State, instruction: Instruction) -> Step:
        _plain(instruction, ("NaN",))
        if instruction.type != "f32" or len(instruction.operands) != 3:
            raise PtxError(f"not built: {instruction.text}")
        of_nan = "NaN" in instruction.opcode
        x, y = (state.source(operand, "f32") for operand in instruction.operands[1:3])

        def chosen() -> np.ndarray:
            first = (x > y) | ((x == y) & ~np.signbit(x)) if greatest else (x < y) | ((x == y) & np.signbit(x))
            result = np.where(first | np.isnan(y), x, y)
            return np.where(np.isnan(x) | np.isnan(y), _NAN, result) if of_nan else canonical(result)

        return state.emit(instruction.operands[0], "f32", chosen)

    return build


def _sign(negates: bool) -> Builder:
    """`neg` and `abs`, of any pattern of bits."""

    def build(state: State, instruction: Instruction) -> Step:
        _plain(instruction)
        kind = instruction.type
        width, packed = width_of(kind), kind.endswith("x2")
        sign = 1 << (8 * width - 1) | (1 << (4 * width - 1) if packed else 0)
        raw = f"b{8 * width}"
        bits = state.source(instruction.operands[1], raw)
        if negates:
            return state.emit(instruction.operands[0], raw, np.bitwise_xor, bits, np.asarray(bits.dtype.type(sign)))
        kept = np.asarray(bits.dtype.type(~sign & ((1 << 8 * width) - 1)))
        return state.emit(instruction.operands[0], raw, np.bitwise_and, bits, kept)

    return build


def _convert(state: State, instruction: Instruction) -> Step:
    """`cvt`: between integers, from integers to float32, and between floats, to nearest."""
    destination, source = instruction.opcode[-2:]
    target, *operands = instruction.operands
    floats = [kind[0] not in "sub" or kind[:2] == "bf" for kind in (destination, source)]
    modifiers = set(instruction.opcode[1:-2])
    if modifiers - {"rn", "satfinite"} or "f64" in (destination, source) or floats == [False, True]:
        raise PtxError(f"not built: {instruction.text}")
    if not floats[1]:
        if floats[0] and destination != "f32":
            raise PtxError(f"not built: {instruction.text}")
        value = state.source(operands[0], source)
        return state.emit(target, destination, lambda: value.astype(dtype_of(destination)))
    sources = [_reader(state, operand, source) for operand in reversed(operands)]  # the second is the low half

    def converted() -> np.ndarray:
        x = sources[0]() if len(sources) == 1 else np.concatenate([read() for read in sources], 1)
        bits = narrow(x, destination.removesuffix("x2"), "satfinite" in modifiers)
        return _whole(bits, f"b{8 * width_of(destination)}")

    return state.emit(target, f"b{8 * width_of(destination)}", converted)


def _reader(state: State, operand: str, kind: str) -> Callable[[], np.ndarray]:
    bits = state.source(operand, f"b{8 * width_of(kind)}")
    return lambda: _parts(bits, kind)


#: Instructions on floats; those of `integers.py` come here with a type that is one.
FLOATS: dict[str, Builder] = {
    "add": _arithmetic(np.add),
    "sub": _arithmetic(np.subtract),
    "mul": _arithmetic(np.multiply),
    "div": _arithmetic(np.divide),
    "min": _extreme(greatest=False),
    "max": _extreme(greatest=True),
    "neg": _sign(negates=True),
    "abs": _sign(negates=False),
    "cvt": _convert,
}
