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
from thinwire.triton_kernels.codec import round_reference
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
def _low_octets(x_ptr, kept_ptr, out_ptr, BLOCK: tl.constexpr):
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + columns, hardware.low_octets(tl.load(x_ptr + columns), tl.load(kept_ptr + columns)))


@triton.jit
def _decode(x_ptr, int8_ptr, e4m3_ptr, even_ptr, odd_ptr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    octets = tl.load(x_ptr + columns)
    tl.store(int8_ptr + columns, hardware.decode_int8(octets))
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


def test_low_octets_are_packed_where_they_are_kept() -> None:
    x = torch.randint(-(2**31), 2**31, (BLOCK,), generator=torch.Generator().manual_seed(1)).int()
    kept, out = _kept(BLOCK), torch.empty(BLOCK, dtype=torch.int8)
    with Device().patch():
        _low_octets[(1,)](x, kept, out, BLOCK)
    assert torch.equal(out, torch.where(kept != 0, x.to(torch.int8), 0))


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
