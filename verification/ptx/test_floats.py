"""Arithmetic on floats and conversions against their definitions: exact fractions, rounded here; and torch's casts."""

from __future__ import annotations

import itertools
import math
import random
import struct
from collections.abc import Callable
from fractions import Fraction

import pytest

pytest.importorskip("triton", reason="the device compiles with Triton")

import numpy as np
import torch

from tests.helpers.speeds import exhaustive_but
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


def rounded(exact: Fraction, name: str, mode: str = "rn", saturate: bool = False) -> float:
    """The number of a format that a fraction is rounded to."""
    digits, least, _ = SHAPES[name]
    if exact == 0:
        return 0.0
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, least) - digits + 1)
    below = math.floor(exact / unit)
    rest = exact / unit - below
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and below % 2 == 1), "rm": False, "rp": rest > 0,
        "rz": exact < 0 and rest > 0, "rna": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and exact > 0),
    }[mode]  # fmt: skip
    result = (below + up) * unit
    if abs(result) > _largest(name):
        kept = saturate or mode == "rz" or (mode == "rm" and exact > 0) or (mode == "rp" and exact < 0)
        return math.copysign(float(_largest(name)) if kept else math.inf, exact)
    return math.copysign(float(result), exact)


def _floats(name: str, count: int, seed: int) -> list[float]:
    """Numbers of a format of all magnitudes, ends, subnormals, zeros, infinities and NaN."""
    draw, (digits, least, most) = random.Random(seed), SHAPES[name]
    units = [draw.getrandbits(digits) for _ in range(count)]
    values = [rounded(Fraction(unit) * Fraction(2) ** draw.randint(least - digits, most - digits), name, "rz")
              for unit in units]  # fmt: skip
    near = [rounded(Fraction(unit, 2 ** (digits - 2)), name, "rz") for unit in units[: count // 2]]
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


def _exact(function: Callable[..., Fraction], name: str, *values: float) -> float | None:
    """The result of finite values that is not zero, rounded once; None for others."""
    if not all(map(math.isfinite, values)):
        return None
    exact = function(*map(Fraction, values))
    return None if exact == 0 else rounded(exact, name)


ARITHMETIC: dict[str, Callable[..., object]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "fma": lambda a, b, c: a * b + c,
}  # fmt: skip


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "f16x2", "bf16x2"])
@pytest.mark.parametrize("operation", list(ARITHMETIC))
def test_arithmetic_is_the_exact_result_rounded_once(operation: str, name: str) -> None:
    form, function = name.removesuffix("x2"), ARITHMETIC[operation]
    count = function.__code__.co_argcount
    columns = [_floats(form, 512, seed) for seed in range(count)]
    if operation == "fma":  # where the product and the sum nearly cancel, or one is far below a tie of the other
        columns[2][::3] = [rounded(-Fraction(x) * Fraction(y), form) if math.isfinite(x * y) else x
                           for x, y in zip(columns[0][::3], columns[1][::3], strict=True)]  # fmt: skip
    integer = np.uint32 if name.endswith("x2") else _integer(form)
    operands = ", ".join(["{d}", "{a}", "{b}", "{c}"][: count + 1])
    got = evaluate(f"{operation}.rn.{name} {operands};", *(_bits(each, form).view(integer) for each in columns),
                   result=integer)  # fmt: skip
    for row, *values in zip(_numbers(got.view(_integer(form)), form), *columns, strict=True):
        expected = _exact(function, form, *values)
        if expected is None:
            with np.errstate(all="ignore"):
                expected = float(function(*map(np.float64, values)))
        assert same(row, expected), (operation, values, row, expected)


def test_quotients_and_roots_are_rounded_once() -> None:
    a, b = _floats("f32", 512, 1), _floats("f32", 512, 2)
    got = _numbers(evaluate("div.rn.f32 {d}, {a}, {b};", _bits(a, "f32"), _bits(b, "f32")), "f32")
    inverse = _numbers(evaluate("rcp.rn.f32 {d}, {a};", _bits(b, "f32")), "f32")
    for x, y, quotient, reciprocal in zip(a, b, got, inverse, strict=True):
        if y and math.isfinite(y) and math.isfinite(x) and x:
            assert same(quotient, rounded(Fraction(x) / Fraction(y), "f32"))
            assert same(reciprocal, rounded(1 / Fraction(y), "f32"))
    roots = _numbers(evaluate("sqrt.rn.f32 {d}, {a};", _bits(a, "f32")), "f32")
    for x, root in zip(a, roots, strict=True):
        if x < 0 or math.isnan(x):
            assert math.isnan(root)
        elif math.isfinite(x) and root:
            low, high = np.nextafter(np.float32(root), np.float32([0, np.inf])).tolist()
            assert ((Fraction(low) + Fraction(root)) / 2) ** 2 < x < ((Fraction(high) + Fraction(root)) / 2) ** 2


def test_what_is_not_a_number_has_the_canonical_pattern() -> None:
    patterns = np.array([0x7FC00000, 0xFFC00001, 0x7F800001, 0xFFFFFFFF], np.uint32)
    for instruction in ("add.f32", "mul.rn.f32", "max.NaN.f32", "div.rn.f32"):
        got = evaluate(f"{instruction} {{d}}, {{a}}, {{b}};", patterns, np.full(4, 0x3F800000, np.uint32))
        assert got.tolist() == [0x7FFFFFFF] * 4, instruction
    assert evaluate("cvt.rn.bf16x2.f32 {d}, {a}, {a};", patterns).tolist() == [0x7FFF7FFF] * 4


def _ordered(x: float) -> tuple[float, float]:
    return x, math.copysign(1, x)


@pytest.mark.parametrize("name", ["f32", "f16x2", "bf16x2", "f16", "bf16"])
@pytest.mark.parametrize("of_nan", [False, True], ids=["number", "NaN"])
def test_extremes_order_zeros_by_their_sign(name: str, of_nan: bool) -> None:
    form = name.removesuffix("x2")
    some = [0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan, float(Fraction(2) ** SHAPES[form][1] / 2)]
    pairs = list(itertools.product(some, some))
    integer = np.uint32 if name.endswith("x2") else _integer(form)
    columns = [_bits([pair[side] for pair in pairs], form).view(integer) for side in range(2)]
    for operation, pick in (("min", min), ("max", max)):
        opcode = f"{operation}.NaN.{name}" if of_nan else f"{operation}.{name}"
        got = evaluate(f"{opcode} {{d}}, {{a}}, {{b}};", *columns, result=integer)
        for row, pair in zip(_numbers(got.view(_integer(form)), form), pairs, strict=True):
            numbers = [x for x in pair if not math.isnan(x)]
            nan = len(numbers) < 2 if of_nan else not numbers
            assert same(row, math.nan if nan else pick(numbers, key=_ordered)), (opcode, pair)


@pytest.mark.parametrize("name", ["f32", "f16", "bf16x2"])
def test_extremes_of_magnitudes_have_the_product_s_sign(name: str) -> None:
    form = name.removesuffix("x2")
    some = [0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan]
    pairs = list(itertools.product(some, some))
    integer = np.uint32 if name.endswith("x2") else _integer(form)
    pairs += pairs[:1] * (len(pairs) % 2)
    columns = [_bits([pair[side] for pair in pairs], form).view(integer) for side in range(2)]
    for operation, pick in (("min", min), ("max", max)):
        got = evaluate(f"{operation}.NaN.xorsign.abs.{name} {{d}}, {{a}}, {{b}};", *columns, result=integer)
        for row, (x, y) in zip(_numbers(got.view(_integer(form)), form), pairs, strict=True):
            sign = math.copysign(1, x) * math.copysign(1, y)
            expected = math.copysign(pick(abs(x), abs(y)), sign)
            assert same(row, math.nan if math.isnan(x) or math.isnan(y) else expected), (operation, x, y)


@pytest.mark.parametrize("name", ["f32", "f16x2", "bf16x2", "f16"])
def test_signs_are_bits(name: str) -> None:
    form = name.removesuffix("x2")
    integer = np.uint32 if name.endswith("x2") else _integer(form)
    bits = _bits(_floats(form, 128, 1), form)
    sign = 1 << (8 * bits.itemsize - 1)
    for operation, expected in (("neg", bits ^ bits.dtype.type(sign)), ("abs", bits & bits.dtype.type(sign - 1))):
        got = evaluate(f"{operation}.{name} {{d}}, {{a}};", bits.view(integer), result=integer)
        assert np.array_equal(got.view(bits.dtype), expected), operation


@pytest.mark.parametrize("mode", exhaustive_but(["rn"], ["rn", "rz", "rm", "rp"]))
@pytest.mark.parametrize("name", ["f16", "bf16"])
@pytest.mark.parametrize("saturate", [False, True], ids=["", "satfinite"])
def test_float32_to_sixteen_bits(name: str, mode: str, saturate: bool) -> None:
    draw = random.Random(3)
    values = _floats("f32", 512, 1) + _floats(name, 256, 2)
    ties = [(x + math.nextafter(x, math.inf) * 0) * (1 + 2.0 ** -SHAPES[name][0]) for x in _floats(name, 256, 4)]
    values += np.array(ties, np.float32).astype(np.float64).tolist() + [float(_largest(name)) * 1.002]
    draw.shuffle(values)
    opcode = f"cvt.{mode}{'.satfinite' * saturate}.{name}"
    got = _numbers(evaluate(f"{opcode}.f32 {{d}}, {{a}};", _bits(values, "f32"), result=np.uint16), name)
    largest = float(_largest(name))
    for row, value in zip(got, np.array(values, np.float32).astype(np.float64).tolist(), strict=True):
        if math.isinf(value):
            expected = math.copysign(largest, value) if saturate else value
        elif value == 0 or math.isnan(value):
            expected = value
        else:
            expected = rounded(Fraction(value), name, mode, saturate)
        assert same(row, expected), (value, row, expected)
    both = evaluate(f"{opcode}x2.f32 {{d}}, {{a}}, {{b}};", _bits(values, "f32"), _bits(values[::-1], "f32"))
    halves = both.view(np.uint16).reshape(-1, 2)
    for column, expected_ in ((halves[:, 1], got), (halves[:, 0], got[::-1])):  # the first operand is the high half
        assert all(map(same, _numbers(np.ascontiguousarray(column), name), expected_))


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_rounding_to_nearest_is_torchs_cast(name: str) -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, 30_000, np.uint32)
    x = torch.from_numpy(bits.view(np.float32).copy())
    got = torch.from_numpy(evaluate(f"cvt.rn.{name}.f32 {{d}}, {{a}};", bits, result=np.uint16).view(np.int16))
    expected = x.to(DTYPES[name])
    number = ~expected.isnan()
    assert torch.equal(got[number], expected.view(torch.int16)[number])
    assert got.view(DTYPES[name])[~number].isnan().all()


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
            assert same(row, rounded(Fraction(value), name, "rn", True) if finite else kept), value
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


@pytest.mark.parametrize("kind", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("mode", exhaustive_but(["rni"], ["rni", "rzi", "rmi", "rpi"]))
def test_float32_to_integers_ends_at_the_type(kind: str, mode: str) -> None:
    bits = int(kind[1:])
    values = [x for x in _floats("f32", 400, 1) + [0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5] if not math.isnan(x)]
    values = np.array(values, np.float32).astype(np.float64).tolist() + [math.nan]
    result = {8: np.uint32, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]
    got = evaluate(f"cvt.{mode}.{kind}.f32 {{d}}, {{a}};", _bits(values, "f32"), result=result).tolist()
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)
    to_integer = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode]
    mask = (1 << 8 * np.dtype(result).itemsize) - 1
    for row, value in zip(got, values, strict=True):
        if math.isnan(value):
            assert row == (1 << 63 if bits == 64 else 0)
        else:
            exact = to_integer(value) if math.isfinite(value) else most if value > 0 else least
            assert row == min(max(exact, least), most) & mask, value


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_float32_to_whole_numbers_keeps_the_sign(mode: str) -> None:
    values = [0.5, 1.5, 2.5, -0.5, -1.5, 0.0, -0.0, 8388609.0, 1e30, -0.2]
    to_integer = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode]
    got = _numbers(evaluate(f"cvt.{mode}.f32.f32 {{d}}, {{a}};", _bits(values, "f32")), "f32")
    exact = np.array(values, np.float32).astype(np.float64).tolist()
    assert all(same(row, math.copysign(to_integer(value), value)) for row, value in zip(got, exact, strict=True))


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
        "fma.rn.sat.f32 {d}, {a}, {a}, {a};",
        "cvt.rna.tf32.f32 {d}, {a};",
    ],
)
def test_what_would_round_otherwise_is_refused(line: str) -> None:
    with pytest.raises(PtxError, match="not built|not exact"):
        evaluate(line, _bits([1.0], "f32"))
