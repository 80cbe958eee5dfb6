"""Integer instructions against their definitions in the PTX manual, written here with Python's integers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="the device compiles with Triton")

import numpy as np

from tests.helpers.speeds import exhaustive_but
from verification.ptx.snippets import evaluate

UNSIGNED = {16: np.uint16, 32: np.uint32, 64: np.uint64}


def _values(bits: int, count: int, seed: int) -> list[int]:
    """Patterns of bits: ends, powers of two, small ones, random ones."""
    draw = random.Random(seed)
    corners = [0, 1, 2, 3, 7, 8, 31, 32, 33, 63, 64, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1]
    drawn = [draw.getrandbits(draw.randint(1, bits)) for _ in range(count - len(corners))]
    values = [value & ((1 << bits) - 1) for value in corners + drawn]
    draw.shuffle(values)
    return values


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def _truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _field(a: int, first: int, count: int, bits: int, signed: bool) -> int:
    """As the manual has it: bits past the end are the sign, or 0."""
    first, count = first & 255, count & 255
    top = bits - 1
    sign = a >> min(first + count - 1, top) & 1 if signed and count else 0
    return sum((a >> first + i & 1 if i < count and first + i <= top else sign) << i for i in range(bits))


def _inserted(a: int, b: int, first: int, count: int, bits: int) -> int:
    for i in range(count & 255):
        place = (first & 255) + i
        if place < bits:
            b = b & ~(1 << place) | (a >> i & 1) << place
    return b


def _permuted(a: int, b: int, selector: int) -> int:
    octets = (a | b << 32).to_bytes(8, "little")
    chosen = [octets[selector >> 4 * i & 7] for i in range(4)]
    signs = [selector >> 4 * i & 8 for i in range(4)]
    return int.from_bytes(
        bytes((255 if one & 128 else 0) if sign else one for one, sign in zip(chosen, signs, strict=True)), "little"
    )


def _funnelled(a: int, b: int, c: int, left: bool, wrap: bool) -> int:
    by = c & 31 if wrap else min(c, 32)
    both = b << 32 | a
    return both << by >> 32 if left else both >> by


#: Type, instruction, and what it gives of operands that are read as the type.
DEFINITIONS: list[tuple[str, str, Callable[..., int]]] = [
    *((kind, "add", lambda a, b: a + b) for kind in ("s32", "u32", "s64", "u64", "s16", "u16")),
    *((kind, "sub", lambda a, b: a - b) for kind in ("s32", "u64", "u16")),
    *((kind, "min", min) for kind in ("s32", "u32", "s64", "u64", "s16", "u16")),
    *((kind, "max", max) for kind in ("s32", "u32", "s64", "u64", "s16", "u16")),
    *((kind, "mul.lo", lambda a, b: a * b) for kind in ("s32", "u32", "s64", "u64", "s16")),
    *((f"{sign}{n}", "mul.hi", lambda a, b, n=n: a * b >> n) for sign in "su" for n in (32, 64)),
    *((kind, "and", lambda a, b: a & b) for kind in ("b16", "b32", "b64")),
    *((kind, "or", lambda a, b: a | b) for kind in ("b16", "b32", "b64")),
    *((kind, "xor", lambda a, b: a ^ b) for kind in ("b16", "b32", "b64")),
    *((kind, "not", lambda a: ~a) for kind in ("b16", "b32", "b64")),
    *((kind, "neg", lambda a: -a) for kind in ("s16", "s32", "s64")),
    *((kind, "abs", abs) for kind in ("s16", "s32", "s64")),
    *((kind, "mad.lo", lambda a, b, c: a * b + c) for kind in ("s32", "u32", "s64")),
    ("s32", "mad.hi", lambda a, b, c: (a * b >> 32) + c),
    ("b32", "lop3@0xE8", lambda a, b, c: a & b | a & c | b & c),
    ("b32", "lop3@0x96", lambda a, b, c: a ^ b ^ c),
    ("b32", "lop3@0xCA", lambda a, b, c: a & b | ~a & c),
    *(("b32", f"shf.{way}.{mode}", lambda a, b, c, way=way, mode=mode: _funnelled(a, b, c, way == "l", mode == "wrap"))
      for way in "lr" for mode in ("wrap", "clamp")),
    ("b32", "prmt", _permuted),
]  # fmt: skip


@pytest.mark.parametrize("kind,name,define", DEFINITIONS, ids=[f"{name}.{kind}" for kind, name, _ in DEFINITIONS])
def test_an_instruction_gives_what_is_defined(kind: str, name: str, define: Callable[..., int]) -> None:
    bits = int(kind[1:])
    count = define.__code__.co_argcount if hasattr(define, "__code__") else 1 if define is abs else 2
    count -= len(getattr(define, "__defaults__", None) or ())
    columns = [_values(bits, 256, seed) for seed in range(count)]
    name, _, table = name.partition("@")
    opcode = f"{name}.{kind}"
    operands = ", ".join(["{d}", "{a}", "{b}", "{c}"][: count + 1] + ([table] if table else []))
    got = evaluate(
        f"{opcode} {operands};", *(np.array(each, UNSIGNED[bits]) for each in columns), result=UNSIGNED[bits]
    )
    for row, values in zip(got.tolist(), zip(*columns, strict=True), strict=True):
        read = [_signed(value, bits) if kind[0] == "s" else value for value in values]
        assert row == define(*read) & ((1 << bits) - 1), f"{opcode} of {values}"


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32"])
@pytest.mark.parametrize("added", [False, True], ids=["mul", "mad"])
def test_wide_products_have_twice_the_bits(kind: str, added: bool) -> None:
    bits = int(kind[1:])
    wide = UNSIGNED[2 * bits]
    a, b, c = _values(bits, 256, 1), _values(bits, 256, 2), _values(2 * bits, 256, 3)
    columns = [np.array(a, UNSIGNED[bits]), np.array(b, UNSIGNED[bits]), np.array(c, wide)]
    opcode = "mad.wide" if added else "mul.wide"
    operands = "{d}, {a}, {b}" + ", {c}" * added
    got = evaluate(f"{opcode}.{kind} {operands};", *columns[: 2 + added], result=wide)
    for row, x, y, z in zip(got.tolist(), a, b, c, strict=True):
        x, y = (_signed(value, bits) if kind[0] == "s" else value for value in (x, y))
        assert row == (x * y + z * added) & ((1 << 2 * bits) - 1)


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("name", ["div", "rem"])
def test_quotients_are_truncated(name: str, kind: str) -> None:
    bits = int(kind[1:])
    a, b = _values(bits, 256, 1), [value or 1 for value in _values(bits, 256, 2)]
    got = evaluate(f"{name}.{kind} {{d}}, {{a}}, {{b}};", np.array(a, UNSIGNED[bits]), np.array(b, UNSIGNED[bits]),
                   result=UNSIGNED[bits])  # fmt: skip
    for row, x, y in zip(got.tolist(), a, b, strict=True):
        x, y = (_signed(value, bits) if kind[0] == "s" else value for value in (x, y))
        quotient = _truncated(x, y)
        assert row == (quotient if name == "div" else x - quotient * y) & ((1 << bits) - 1), (x, y)


@pytest.mark.parametrize("kind", ["b16", "b32", "b64", "s16", "s32", "s64", "u16", "u32", "u64"])
def test_shifts_are_clamped_to_the_width(kind: str) -> None:
    bits = int(kind[1:])
    a, by = _values(bits, 256, 1), [value & 0x7F for value in _values(32, 256, 2)]
    by[0] = 2**31 + 3
    arguments = np.array(a, UNSIGNED[bits]), np.array(by, np.uint32)
    if kind[0] == "b":
        got = evaluate(f"shl.{kind} {{d}}, {{a}}, {{b}};", *arguments, result=UNSIGNED[bits])
        assert got.tolist() == [x << min(n, bits) & ((1 << bits) - 1) for x, n in zip(a, by, strict=True)]
    got = evaluate(f"shr.{kind} {{d}}, {{a}}, {{b}};", *arguments, result=UNSIGNED[bits])
    read = [_signed(x, bits) if kind[0] == "s" else x for x in a]
    assert got.tolist() == [x >> min(n, bits) & ((1 << bits) - 1) for x, n in zip(read, by, strict=True)]


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_fields_of_bits(kind: str) -> None:
    bits = int(kind[1:])
    a, first, count = _values(bits, 256, 1), _values(7, 256, 2), _values(7, 256, 3)
    columns = np.array(a, UNSIGNED[bits]), np.array(first, np.uint32), np.array(count, np.uint32)
    got = evaluate(f"bfe.{kind} {{d}}, {{a}}, {{b}}, {{c}};", *columns, result=UNSIGNED[bits])
    for row, *values in zip(got.tolist(), a, first, count, strict=True):
        assert row == _field(*values, bits, kind[0] == "s"), values
    for start, length in ((0, 8), (8, 8), (24, 8), (5, 0), (3, 40), (31, 1)):
        got = evaluate(f"bfe.{kind} {{d}}, {{a}}, {start}, {length};", columns[0], result=UNSIGNED[bits])
        assert got.tolist() == [_field(x, start, length, bits, kind[0] == "s") for x in a]
        if kind == "u32":
            other = np.array(_values(32, 256, 4), np.uint32)
            got = evaluate(f"bfi.b32 {{d}}, {{a}}, {{b}}, {start}, {length};", columns[0], other)
            assert got.tolist() == [_inserted(x, y, start, length, 32) for x, y in zip(a, other.tolist(), strict=True)]


@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_bits_are_counted(kind: str) -> None:
    bits = int(kind[1:])
    a = _values(bits, 256, 1)
    column = np.array(a, UNSIGNED[bits])
    assert evaluate(f"popc.{kind} {{d}}, {{a}};", column).tolist() == [x.bit_count() for x in a]


@pytest.mark.parametrize("source", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize(
    "target", exhaustive_but(["s8", "u32"], ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
)
def test_conversions_of_integers_keep_the_low_bits_and_extend(target: str, source: str) -> None:
    bits, to = int(source[1:]), int(target[1:])
    held = max(bits, 16)  # of a byte, more than what counts is in the register
    a = _values(held, 128, 1)
    result = UNSIGNED[max(to, 32)]
    got = evaluate(f"cvt.{target}.{source} {{d}}, {{a}};", np.array(a, UNSIGNED[held]), result=result)
    for row, value in zip(got.tolist(), a, strict=True):
        low = value & ((1 << bits) - 1)
        read = _signed(low, bits) if source[0] == "s" else low
        kept = read & ((1 << to) - 1)
        extended = _signed(kept, to) if target[0] == "s" else kept
        assert row == extended & ((1 << 8 * np.dtype(result).itemsize) - 1), value


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64", "b32"])
def test_comparisons_and_selections(kind: str) -> None:
    bits = int(kind[1:])
    a, b = _values(bits, 256, 1), _values(bits, 256, 2)
    b[::7] = a[::7]
    columns = np.array(a, UNSIGNED[bits]), np.array(b, UNSIGNED[bits])
    read = [(_signed(x, bits), _signed(y, bits)) if kind[0] == "s" else (x, y) for x, y in zip(a, b, strict=True)]
    definitions: dict[str, Callable[[int, int], bool]] = {
        "eq": lambda x, y: x == y, "ne": lambda x, y: x != y, "lt": lambda x, y: x < y, "le": lambda x, y: x <= y,
        "gt": lambda x, y: x > y, "ge": lambda x, y: x >= y,
    }  # fmt: skip
    for name, define in definitions.items():
        if kind[0] == "b" and name not in ("eq", "ne"):
            continue
        body = f"setp.{name}.{kind} %p1|%p2, {{a}}, {{b}}; selp.u32 %r1, 1, 0, %p1; selp.u32 %r2, 2, 0, %p2;"
        got = evaluate(body + "or.b32 {d}, %r1, %r2;", *columns)
        assert got.tolist() == [1 if define(x, y) else 2 for x, y in read], name
    body = f"setp.eq.u32 %p3, %r31, 5; setp.ne.{kind} %p1, {{a}}, {{b}}; setp.ne.or.{kind} %p2, {{a}}, {{b}}, !%p3;"
    got = evaluate(body + "selp.u32 {d}, 1, 0, %p2;", *columns)
    assert got.tolist() == [int(x != y or thread != 5) for thread, (x, y) in enumerate(read)]


def test_vectors_of_registers_are_moved_low_parts_first() -> None:
    a = np.array(_values(64, 64, 1), np.uint64)
    swapped = evaluate("mov.b64 {{%r1, %r2}}, {a}; mov.b64 {d}, {{%r2, %r1}};", a, result=np.uint64)
    assert swapped.tolist() == [(x >> 32 | x << 32) & (2**64 - 1) for x in a.tolist()]
    body = "mov.b64 {{%rs1, %rs2, %rs3, %rs4}}, {a}; mov.b64 {d}, {{%rs4, %rs1, %rs3, %rs2}};"
    got = evaluate(body, a, result=np.uint64)
    order = (3, 0, 2, 1)
    assert got.tolist() == [sum((x >> 16 * n & 0xFFFF) << 16 * i for i, n in enumerate(order)) for x in a.tolist()]


def test_a_predicate_says_who_executes() -> None:
    got = evaluate("mov.u32 {d}, 7; setp.lt.u32 %p1, {a}, 10; @%p1 mov.u32 {d}, 8; @!%p1 add.u32 {d}, {d}, {a};",
                   np.arange(64, dtype=np.uint32))  # fmt: skip
    assert got.tolist() == [8 if x < 10 else 7 + x for x in range(64)]
