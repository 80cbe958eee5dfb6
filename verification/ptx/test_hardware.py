"""What kernels for NVIDIA GPUs compute by instructions of their own: the definitions' bits, of every input.

All 2**16 upper halves of a float32 are tried, with lower halves on both sides of where rounding to 16 bits turns. Of
narrower formats the last place is in the upper half, and any lower half that is not zero counts as much.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="compiling kernels needs Triton")

import torch
import triton
import triton.language as tl

from tests.helpers.speeds import exhaustive_but
from tests.helpers.wires import assert_same_bits
from thinwire.triton_kernels import hardware
from thinwire.triton_kernels.codec_reference import round_reference
from verification.ptx.device import Device

BLOCK = 8192
LOWER_HALVES = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


@triton.jit
def _round(x_ptr, out_ptr, SATURATE: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + columns)
    tl.store(out_ptr + columns, hardware.rounded(x, out_ptr.dtype.element_ty, SATURATE))


@triton.jit
def _bfloat16_bits(x_ptr, out_ptr, BLOCK: tl.constexpr):
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + columns, hardware.bfloat16_bits(tl.load(x_ptr + columns)))


@triton.jit
def _widen(x_ptr, out_ptr, BLOCK: tl.constexpr):
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + columns, hardware.widened(tl.load(x_ptr + columns).to(tl.int16, bitcast=True)))


@triton.jit
def _encode_e4m3(x_ptr, kept_ptr, out_ptr, BLOCK: tl.constexpr):
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + columns, hardware.encode_e4m3(tl.load(x_ptr + columns), tl.load(kept_ptr + columns)))


@triton.jit
def _octets_at(x_ptr, kept_ptr, out_ptr, PLACE: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + columns, hardware.octets_at(tl.load(x_ptr + columns), tl.load(kept_ptr + columns), PLACE))


@triton.jit
def _select(low_ptr, high_ptr, out_ptr, UP: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    low, high = tl.load(low_ptr + columns), tl.load(high_ptr + columns)
    tl.store(out_ptr + columns, hardware.selected(low, hardware.shifted(high, UP), MASK))


@triton.jit
def _decode_numbers(octets_ptr, high_ptr, int6_ptr, int10_ptr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    octets = tl.load(octets_ptr + columns)
    tl.store(int6_ptr + columns, hardware.decode_octets(octets, 32))
    tl.store(int10_ptr + columns, hardware.decode_int10(octets, tl.load(high_ptr + columns)))


@triton.jit
def _decode(x_ptr, int8_ptr, e4m3_ptr, even_ptr, odd_ptr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    octets = tl.load(x_ptr + columns)
    tl.store(int8_ptr + columns, hardware.decode_octets(octets, 128))
    tl.store(e4m3_ptr + columns, hardware.decode_e4m3(octets))
    even, odd = hardware.decode_int4(octets)
    tl.store(even_ptr + columns, even)
    tl.store(odd_ptr + columns, odd)


def _floats(lower_halves: tuple[int, ...] = LOWER_HALVES) -> torch.Tensor:
    """Every upper half with each of these lower halves, as float32."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    return torch.cat([upper | lower for lower in lower_halves]).view(torch.float32)


def _kept(count: int) -> torch.Tensor:
    """-1 and 0 in every order among four: those of a thread may be of several groups."""
    places = torch.arange(count, dtype=torch.int32)
    return -(places // 4 >> places % 4 & 1)


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("dtype", exhaustive_but([torch.bfloat16], [torch.bfloat16, torch.float16]), ids=str)
def test_floats_are_rounded_to_the_nearest_half_to_even(dtype: torch.dtype, saturate: bool) -> None:
    x = _floats()
    out = torch.empty(x.shape, dtype=dtype)
    with Device().patch():
        _round[(len(x) // BLOCK,)](x, out, saturate, BLOCK)
    assert_same_bits("rounded", round_reference(x, dtype, saturate), out, any_nan=dtype != torch.bfloat16)


def test_bits_of_bfloat16_are_those_of_the_reference_and_come_back() -> None:
    x = _floats()
    bits, back = torch.empty(x.shape, dtype=torch.int32), torch.empty(2**16)
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    with Device().patch():
        _bfloat16_bits[(len(x) // BLOCK,)](x, bits, BLOCK)
        _widen[(2**16 // BLOCK,)](every, back, BLOCK)
    rounded = round_reference(x, torch.bfloat16, saturate=False)
    assert torch.equal(bits, rounded.view(torch.int16).int() & 0xFFFF)
    assert torch.equal(back.view(torch.int32), every.view(torch.int16).int() << 16)


def test_e4m3_is_the_nearest_code_half_to_even() -> None:
    # The last place of e4m3 is bit 20 of a float32, and one further left for each binade below 2**-6.
    x = _floats((0, 1, 0x8000, 0xFFFF))
    x = torch.where(x.abs() < 464, x, 0.0)
    kept, out = _kept(len(x)), torch.empty(x.shape, dtype=torch.int8)
    with Device().patch():
        _encode_e4m3[(len(x) // BLOCK,)](x, kept, out, BLOCK)
    codes = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.int8)
    assert torch.equal(out, torch.where(kept != 0, codes, 0))


@pytest.mark.parametrize("place", [0, 1])
def test_octets_are_packed_where_they_are_kept(place: int) -> None:
    x = torch.randint(-(2**31), 2**31, (BLOCK,), generator=torch.Generator().manual_seed(1)).int()
    kept, out = _kept(BLOCK), torch.empty(BLOCK, dtype=torch.int8)
    with Device().patch():
        _octets_at[(1,)](x, kept, out, place, BLOCK)
    assert torch.equal(out, torch.where(kept != 0, (x >> 8 * place).to(torch.int8), 0))


@pytest.mark.parametrize("up,mask", [(4, 0x0F), (2, 0x33), (-4, 0x70), (-2, 0x4F)])
def test_bits_of_octets_are_shifted_and_selected(up: int, mask: int) -> None:
    low, high = (torch.randint(0, 256, (BLOCK,), generator=torch.Generator().manual_seed(n)).byte() for n in (1, 2))
    out = torch.empty(BLOCK, dtype=torch.int8)
    with Device().patch():
        _select[(1,)](low.view(torch.int8), high.view(torch.int8), out, up, mask, BLOCK)
    # What comes in from the octet beside it counts for nothing: only bits of the octet's own are compared.
    shifted, own = (high << up, 0xFF << up & 0xFF) if up > 0 else (high >> -up, 0xFF >> -up)
    assert torch.equal(out.view(torch.uint8) & (own | mask), (low & mask | shifted & ~mask & 0xFF) & (own | mask))


def test_every_code_is_decoded_exactly() -> None:
    codes = (37 * torch.arange(256) % 256 - 128).to(torch.int8)  # those of a register differ in both halves
    int8, e4m3, even, odd = torch.empty(4, 256)
    with Device().patch():
        _decode[(1,)](codes, int8, e4m3, even, odd, BLOCK=256, num_warps=1)
    exact = codes.view(torch.float8_e4m3fn).float()
    exact = torch.where(exact.isnan(), torch.where(codes < 0, -480.0, 480.0), exact)
    low, high = (codes << 4 >> 4).float(), (codes >> 4).float()
    for got, wanted in ((int8, codes.float()), (e4m3, exact), (even, low), (odd, high)):
        assert torch.equal(got.view(torch.int32), wanted.view(torch.int32))


def test_every_number_of_6_and_of_10_bits_is_decoded_exactly_whatever_is_above_it() -> None:
    code = 37 * torch.arange(2**12) % 2**12  # two bits are above the number
    low, high = (code & 255).to(torch.uint8).view(torch.int8), (code >> 8 | code << 4 & 0xF0).to(torch.uint8)
    int6, int10 = torch.empty(2, len(code))
    with Device().patch():
        _decode_numbers[(1,)](low, high.view(torch.int8), int6, int10, BLOCK=len(code))
    for got, bits in ((int6, 6), (int10, 10)):
        sign = 1 << bits - 1
        assert torch.equal(got, (((code & 2 * sign - 1) ^ sign) - sign).float())
