"""Arithmetic on floats and conversions against their definitions: exact fractions, rounded here; and torch's casts."""

from __future__ import annotations

import itertools
import math
import operator
import random
import struct
from collections.abc import Callable
from fractions import Fraction

import pytest

pytest.importorskip("triton", reason="the device compiles with Triton")

import numpy as np
import torch

from verification.ptx.errors import PtxError
from verification.ptx.snippets import evaluate

#: Bits of the significand, exponents of the least and the largest normal number.
SHAPES = {
    "f32": (24, -126, 127),
    "f16": (11, -14, 15),
    "bf16": (8, -126, 127),
    "e4m3": (4, -6, 8),
    "e5m2": (3, -14, 15),
}
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _largest(name: str) -> Fraction:
    digits, _, most = SHAPES[name]
    return Fraction(448) if name == "e4m3" else (2 - Fraction(2) ** (1 - digits)) * Fraction(2) ** most


def rounded(exact: Fraction, name: str, saturate: bool = False) -> float:
    """The number of a format that is nearest to a fraction, half to even."""
    digits, least, _ = SHAPES[name]
    if exact == 0:
        return 0.0
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, least) - digits + 1)
    below = math.floor(exact / unit)
    rest = exact / unit - below
    result = (below + (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and below % 2 == 1))) * unit
    if abs(result) > _largest(name):
        return math.copysign(float(_largest(name)) if saturate else math.inf, exact)
    return math.copysign(float(result), exact)


def _floats(name: str, count: int, seed: int) -> list[float]:
    """Numbers of a format of all magnitudes, ends, subnormals, zeros, infinities and NaN."""
    draw, (digits, least, most) = random.Random(seed), SHAPES[name]
    units = [draw.getrandbits(digits) for _ in range(count)]
    values = [rounded(Fraction(unit) * Fraction(2) ** draw.randint(least - digits, most - digits), name)
              for unit in units]  # fmt: skip
    near = [rounded(Fraction(unit, 2 ** (digits - 2)), name) for unit in units[: count // 2]]
    tiny = float(Fraction(2) ** (least - digits + 1))
    ends = [0.0, -0.0, 1.0, tiny, float(Fraction(2) ** least), float(_largest(name)), math.inf, math.nan]
    values = [value * draw.choice((1, -1)) for value in (*ends, *near, *values)][:count]
    draw.shuffle(values)
    return values


def _bits(values: list[float], name: str) -> np.ndarray:
    if name == "f32":
        return np.array(values, np.float32).view(np.uint32)
    return torch.tensor(values, dtype=torch.float64).to(DTYPES[name]).view(torch.uint8).numpy().view(_integer(name))


def _numbers(bits: np.ndarray, name: str) -> list[float]:
    if name == "f32":
        return bits.view(np.float32).astype(np.float64).tolist()
    return torch.from_numpy(bits.copy().view(np.uint8)).view(DTYPES[name]).double().tolist()


def _integer(name: str) -> type:
    return {"f32": np.uint32, "f16": np.uint16, "bf16": np.uint16, "e4m3": np.uint8, "e5m2": np.uint8}[name]


def same(got: float, expected: float) -> bool:
    """One number, the signs of zeros included, or both NaN."""
    if math.isnan(got) or math.isnan(expected):
        return math.isnan(got) and math.isnan(expected)
    return got == expected and math.copysign(1, got) == math.copysign(1, expected)


ARITHMETIC = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv}


@pytest.mark.parametrize("operation", list(ARITHMETIC))
def test_arithmetic_is_the_exact_result_rounded_once(operation: str) -> None:
    columns = [_floats("f32", 512, seed) for seed in range(2)]
    got = evaluate(f"{operation}.rn.f32 {{d}}, {{a}}, {{b}};", *(_bits(each, "f32") for each in columns))
    for row, a, b in zip(_numbers(got, "f32"), *columns, strict=True):
        finite = math.isfinite(a) and math.isfinite(b) and not (operation == "div" and b == 0)
        exact = ARITHMETIC[operation](Fraction(a), Fraction(b)) if finite else Fraction(0)
        with np.errstate(all="ignore"):
            plain = float(ARITHMETIC[operation](np.float64(a), np.float64(b)))
        assert same(row, rounded(exact, "f32") if exact else plain), (operation, a, b, row)


def test_what_is_not_a_number_has_the_canonical_pattern() -> None:
    patterns = np.array([0x7FC00000, 0xFFC00001, 0x7F800001, 0xFFFFFFFF], np.uint32)
    for instruction in ("add.f32", "mul.rn.f32", "max.NaN.f32", "div.rn.f32"):
        got = evaluate(f"{instruction} {{d}}, {{a}}, {{b}};", patterns, np.full(4, 0x3F800000, np.uint32))
        assert got.tolist() == [0x7FFFFFFF] * 4, instruction
    assert evaluate("cvt.rn.bf16x2.f32 {d}, {a}, {a};", patterns).tolist() == [0x7FFF7FFF] * 4


def _ordered(x: float) -> tuple[float, float]:
    return x, math.copysign(1, x)


@pytest.mark.parametrize("of_nan", [False, True], ids=["number", "NaN"])
def test_extremes_order_zeros_by_their_sign(of_nan: bool) -> None:
    some = [0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan, 2.0**-127]
    pairs = list(itertools.product(some, some))
    columns = [_bits([pair[side] for pair in pairs], "f32") for side in range(2)]
    for operation, pick in (("min", min), ("max", max)):
        opcode = f"{operation}.NaN.f32" if of_nan else f"{operation}.f32"
        got = evaluate(f"{opcode} {{d}}, {{a}}, {{b}};", *columns)
        for row, pair in zip(_numbers(got, "f32"), pairs, strict=True):
            numbers = [x for x in pair if not math.isnan(x)]
            nan = len(numbers) < 2 if of_nan else not numbers
            assert same(row, math.nan if nan else pick(numbers, key=_ordered)), (opcode, pair)


@pytest.mark.parametrize("name", ["f32", "f16x2", "bf16x2", "f16"])
def test_signs_are_bits(name: str) -> None:
    form = name.removesuffix("x2")
    integer = np.uint32 if name.endswith("x2") else _integer(form)
    bits = _bits(_floats(form, 128, 1), form)
    sign = 1 << (8 * bits.itemsize - 1)
    for operation, expected in (("neg", bits ^ bits.dtype.type(sign)), ("abs", bits & bits.dtype.type(sign - 1))):
        got = evaluate(f"{operation}.{name} {{d}}, {{a}};", bits.view(integer), result=integer)
        assert np.array_equal(got.view(bits.dtype), expected), operation


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_sixteen_bits_to_float32_are_exact(name: str) -> None:
    bits = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    got = torch.from_numpy(evaluate(f"cvt.f32.{name} {{d}}, {{a}};", bits).view(np.float32))
    expected = torch.from_numpy(bits.view(np.int16)).view(DTYPES[name]).float()
    number = ~expected.isnan()
    assert torch.equal(got[number].view(torch.int32), expected[number].view(torch.int32))
    assert got[~number].isnan().all()


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_eight_bits_saturate_and_come_back_exactly(name: str) -> None:
    codes = np.arange(2**8, dtype=np.uint16)
    halves = evaluate(f"cvt.rn.f16x2.{name}x2 {{d}}, {{a}};", codes | codes[::-1] << np.uint16(8)).view(np.float16)
    expected = torch.from_numpy(codes.astype(np.uint8)).view(DTYPES[name]).double().numpy()
    assert np.array_equal(halves.reshape(-1, 2)[:, 0].astype(np.float64), expected, equal_nan=True)
    assert np.array_equal(halves.reshape(-1, 2)[:, 1].astype(np.float64), expected[::-1], equal_nan=True)
    values = _floats("f32", 512, 1) + _floats(name, 256, 2) + [x * (1 + 2.0**-4) for x in _floats(name, 256, 3)]
    values = np.array(values, np.float32).astype(np.float64).tolist()
    got = evaluate(f"cvt.rn.satfinite.{name}x2.f32 {{d}}, {{a}}, {{b}};", _bits(values, "f32"),
                   _bits(values[::-1], "f32"), result=np.uint16)  # fmt: skip
    octets = got.view(np.uint8).reshape(-1, 2)
    for column, numbers in ((octets[:, 1], values), (octets[:, 0], values[::-1])):
        for row, value in zip(_numbers(np.ascontiguousarray(column), name), numbers, strict=True):
            finite = math.isfinite(value) and value != 0
            kept = math.copysign(float(_largest(name)), value) if math.isinf(value) else value
            assert same(row, rounded(Fraction(value), name, True) if finite else kept), value
    of_halves = evaluate(f"cvt.rn.satfinite.{name}x2.f16x2 {{d}}, {{a}};", halves.view(np.uint32), result=np.uint16)
    number = ~np.isnan(expected) & ~np.isinf(expected)
    assert np.array_equal(of_halves.view(np.uint8).reshape(-1, 2)[number, 0], codes.astype(np.uint8)[number])


@pytest.mark.parametrize("kind", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
def test_integers_to_float32_are_rounded_to_nearest(kind: str) -> None:
    bits = int(kind[1:])
    held = max(bits, 16)
    draw = random.Random(1)
    patterns = [draw.getrandbits(draw.randint(1, held)) for _ in range(256)]
    got = evaluate(f"cvt.rn.f32.{kind} {{d}}, {{a}};", np.array(patterns, f"u{held // 8}"))
    for row, pattern in zip(_numbers(got, "f32"), patterns, strict=True):
        low = pattern & ((1 << bits) - 1)
        value = low - (1 << bits) if kind[0] == "s" and low >> (bits - 1) else low
        assert row == rounded(Fraction(value), "f32")


def test_comparisons_of_floats_are_false_of_nan_or_true_with_a_u() -> None:
    some = [0.0, -0.0, 1.0, -1.5, math.inf, math.nan]
    pairs = list(itertools.product(some, some))
    columns = [_bits([pair[side] for pair in pairs], "f32") for side in range(2)]
    definitions: dict[str, Callable[[float, float], bool]] = {
        "eq": lambda x, y: x == y, "ne": lambda x, y: x < y or x > y, "lt": lambda x, y: x < y,
        "le": lambda x, y: x <= y, "gt": lambda x, y: x > y, "ge": lambda x, y: x >= y,
    }  # fmt: skip
    for name, define in definitions.items():
        got = evaluate(f"setp.{name}.f32 %p1, {{a}}, {{b}}; selp.u32 {{d}}, 1, 0, %p1;", *columns)
        assert got.tolist() == [int(define(*pair)) for pair in pairs], name
        got = evaluate(f"setp.{name}u.f32 %p1, {{a}}, {{b}}; selp.u32 {{d}}, 1, 0, %p1;", *columns)
        assert got.tolist() == [int(define(*pair) or any(map(math.isnan, pair))) for pair in pairs], name + "u"
    for name, wanted in (("num", False), ("nan", True)):
        got = evaluate(f"setp.{name}.f32 %p1, {{a}}, {{b}}; selp.u32 {{d}}, 1, 0, %p1;", *columns)
        assert got.tolist() == [int(any(map(math.isnan, pair)) == wanted) for pair in pairs], name


def test_constants_are_bits_of_float32() -> None:
    got = evaluate("add.f32 {d}, {a}, 0f3FC00000;", _bits([1.0, -2.0], "f32"))
    assert got.view(np.float32).tolist() == [2.5, -0.5]
    assert struct.pack("<f", 1.5) == (0x3FC00000).to_bytes(4, "little")


@pytest.mark.parametrize(
    "line",
    [
        "add.ftz.f32 {d}, {a}, {a};",
        "div.full.f32 {d}, {a}, {a};",
        "ex2.approx.f32 {d}, {a};",
        "mul.rz.f32 {d}, {a}, {a};",
        "fma.rn.f32 {d}, {a}, {a}, {a};",
        "mad.rn.f32 {d}, {a}, {a}, {a};",
        "add.f16x2 {d}, {a}, {a};",
        "cvt.rna.tf32.f32 {d}, {a};",
        "cvt.rz.bf16x2.f32 {d}, {a}, {a};",
        "cvt.rni.s32.f32 {d}, {a};",
    ],
)
def test_what_would_round_otherwise_is_refused(line: str) -> None:
    with pytest.raises(PtxError, match="not built"):
        evaluate(line, _bits([1.0], "f32"))
