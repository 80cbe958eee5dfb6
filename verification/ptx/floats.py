"""Arithmetic on floats, and conversions: rounded to nearest even, subnormals kept, NaN canonical."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from verification.ptx.errors import PtxError
from verification.ptx.formats import FORMATS, ROUNDINGS, fused_multiply_add, narrow, rounded_integer, sum_to_odd, widen
from verification.ptx.program import Instruction
from verification.ptx.state import State, Step, dtype_of, width_of

Builder = Callable[[State, Instruction], Step]
_NAN = np.array(FORMATS["f32"].nan, np.uint32).view(np.float32)


def canonical(x: np.ndarray) -> np.ndarray:
    """float32 or float64; what is NaN has the pattern of a GPU's arithmetic."""
    nan = x != x
    if nan.any():
        x = np.where(nan, _NAN if x.dtype == np.float32 else np.float64(np.nan), x)
    return x


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


def _arithmetic(function: Callable[..., np.ndarray], exact: Callable[..., np.ndarray], count: int) -> Builder:
    """float32 and float64 by `function`; narrower ones by `exact`, float64 that rounds to them as the result does."""

    def build(state: State, instruction: Instruction) -> Step:
        kind, (destination, *operands) = instruction.type, instruction.operands
        _plain(instruction)
        if instruction.name in ("div", "rcp", "sqrt") and "rn" not in instruction.opcode:
            raise PtxError(f"not exact: {instruction.text}")
        sources = [state.source(operand, kind) for operand in operands[:count]]
        if kind in ("f32", "f64"):
            if kind == "f64" and function is _fused:
                raise PtxError(f"not built: {instruction.text}")
            return state.emit(destination, kind, lambda: canonical(function(*sources)))
        name = kind.removesuffix("x2")
        return state.emit(
            destination, kind, lambda: _whole(narrow(exact(*(_parts(each, kind) for each in sources)), name), kind)
        )

    return build


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """fma of float32."""
    return fused_multiply_add(a.astype(np.float64), b.astype(np.float64), c.astype(np.float64)).astype(np.float32)


def _extreme(greatest: bool) -> Builder:
    """`min` and `max`: -0.0 is below +0.0; of one NaN the other operand, with .NaN a NaN.

    With .xorsign.abs magnitudes are compared, and the result is negative where the signs differ.
    """

    def build(state: State, instruction: Instruction) -> Step:
        kind = instruction.type
        _plain(instruction, ("NaN", "xorsign", "abs"))
        of_magnitudes = "abs" in instruction.opcode
        if of_magnitudes != ("xorsign" in instruction.opcode):
            raise PtxError(f"not built: {instruction.text}")
        name = kind.removesuffix("x2")
        if name == "f64" or len(instruction.operands) != 3:
            raise PtxError(f"not built: {instruction.text}")
        of_nan, form = "NaN" in instruction.opcode, FORMATS[name]
        raw = f"b{8 * width_of(kind)}"
        bits = [state.source(operand, raw) for operand in instruction.operands[1:3]]

        def chosen() -> np.ndarray:
            a, b = (np.ascontiguousarray(each).view(form.unsigned).reshape(state.size, -1) for each in bits)
            sign = a.dtype.type(0)
            if of_magnitudes:
                magnitude = a.dtype.type((1 << (8 * a.itemsize - 1)) - 1)
                sign, a, b = (a ^ b) & ~magnitude, a & magnitude, b & magnitude
            x, y = widen(a, name), widen(b, name)
            first = (x > y) | ((x == y) & ~np.signbit(x)) if greatest else (x < y) | ((x == y) & np.signbit(x))
            result = np.where(first | np.isnan(y), a, b) | sign
            no_number = np.isnan(x) | np.isnan(y) if of_nan else np.isnan(x) & np.isnan(y)
            return _whole(np.where(no_number, form.unsigned(form.nan), result), raw)

        return state.emit(instruction.operands[0], raw, chosen)

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


def _to_integer(x: np.ndarray, destination: str, rounding: str, wide: bool) -> np.ndarray:
    """float64 to an integer type: out of range is its nearest end; NaN is 0, or the highest bit where one is wide."""
    bits, signed = int(destination[1:]), destination[0] == "s"
    least, most = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    rounded = rounded_integer(np.where(np.isnan(x), 0.0, x), rounding)
    exact = np.array([min(max(int(value), least), most) if np.isfinite(value) else most if value > 0 else least
                      for value in rounded.ravel()], object)  # fmt: skip
    of_nan = (-(1 << (bits - 1)) if signed else 1 << (bits - 1)) if wide else 0
    return np.where(np.isnan(x), of_nan, exact).astype(dtype_of(destination))


def _convert(state: State, instruction: Instruction) -> Step:
    """`cvt`, of any pair of types."""
    destination, source = instruction.opcode[-2:]
    modifiers = instruction.opcode[1:-2]
    target, operands = instruction.operands[0], instruction.operands[1:]
    if unknown := set(modifiers) - {*ROUNDINGS, "rni", "rzi", "rmi", "rpi", "satfinite", "relu", "sat"}:
        raise PtxError(f"not built: .{min(unknown)} in {instruction.text}")
    rounding = next((part for part in modifiers if part[0] == "r" and part != "relu"), None)
    floats = [kind[0] not in "sub" or kind[0] == "b" and kind[1] == "f" for kind in (destination, source)]
    value = state.source(operands[0], source)
    if not any(floats):
        if "sat" in modifiers:
            ends = np.iinfo(dtype_of(destination))
            return state.emit(
                target, destination, lambda: np.array([min(max(int(v), ends.min), ends.max) for v in value], object)
            )
        return state.emit(target, destination, lambda: value.astype(dtype_of(destination)))
    if not floats[1]:  # from an integer
        if destination in ("f32", "f64") and rounding == "rn":
            return state.emit(target, destination, lambda: value.astype(dtype_of(destination)))
        if width_of(source) == 8 or "sat" in modifiers:
            raise PtxError(f"not built: {instruction.text}")
        return state.emit(target, destination, lambda: narrow(value.astype(np.float64), destination, rounding or ""))
    if source == "f64" or destination == "f64":
        if destination == "f64" and source == "f32" and not modifiers:
            return state.emit(target, destination, lambda: canonical(value.astype(np.float64)))
        raise PtxError(f"not built: {instruction.text}")
    sources = [_reader(state, operand, source) for operand in reversed(operands)]  # the second is the low half

    def values() -> np.ndarray:
        return sources[0]() if len(sources) == 1 else np.concatenate([read() for read in sources], 1)

    if not floats[0]:
        if rounding is None:
            raise PtxError(f"no rounding in {instruction.text}")
        wide = width_of(destination) == 8
        return state.emit(
            target, destination, lambda: _to_integer(values()[:, 0], destination, rounding.removesuffix("i"), wide)
        )
    if "sat" in modifiers:
        raise PtxError(f"not built: {instruction.text}")
    name = destination.removesuffix("x2")
    saturate, relu = "satfinite" in modifiers, "relu" in modifiers

    def converted() -> np.ndarray:
        x = values()
        if rounding is not None and rounding.endswith("i"):
            x = rounded_integer(x, rounding.removesuffix("i"))
        bits = narrow(x, name, "rn" if rounding is None or rounding.endswith("i") else rounding, saturate, relu)
        return _whole(bits, f"b{8 * width_of(destination)}")

    return state.emit(target, f"b{8 * width_of(destination)}", converted)


def _reader(state: State, operand: str, kind: str) -> Callable[[], np.ndarray]:
    bits = state.source(operand, f"b{8 * width_of(kind)}")
    return lambda: _parts(bits, kind)


#: Instructions on floats; those of `integers.py` come here with a type that is one.
FLOATS: dict[str, Builder] = {
    "add": _arithmetic(np.add, sum_to_odd, 2),
    "sub": _arithmetic(np.subtract, lambda a, b: sum_to_odd(a, -b), 2),
    "mul": _arithmetic(np.multiply, np.multiply, 2),
    "fma": _arithmetic(_fused, fused_multiply_add, 3),
    "mad": _arithmetic(_fused, fused_multiply_add, 3),
    "div": _arithmetic(np.divide, np.divide, 2),
    "rcp": _arithmetic(lambda x: np.divide(x.dtype.type(1), x), np.reciprocal, 1),
    "sqrt": _arithmetic(np.sqrt, np.sqrt, 1),
    "min": _extreme(greatest=False),
    "max": _extreme(greatest=True),
    "neg": _sign(negates=True),
    "abs": _sign(negates=False),
    "cvt": _convert,
}
