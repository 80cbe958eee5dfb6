"""Float formats, with bits that depend neither on the hardware nor on the interpreter.

Where an NVIDIA GPU gives them by an instruction that is used (`thinwire.triton_kernels.hardware`); otherwise they are
made in integer arithmetic. A bfloat16 that is NaN has the pattern 0x7FFF, which is what those GPUs make.
"""

from __future__ import annotations

from thinwire.triton_kernels import hardware
from thinwire.triton_kernels.compat import tl, triton

#: Added to a float32 below 2**22 in magnitude, it rounds it to an integer, half to even, in the low bits of the sum.
ROUND_MAGIC = tl.constexpr(12582912.0)
SIGNLESS = tl.constexpr(0x7FFFFFFF)

INFINITY_BITS = tl.constexpr(0x7F800000)
_BF16_NAN_BITS = tl.constexpr(0x7FFF)
LARGEST_FLOAT32 = tl.constexpr(3.4028234663852886e38)
_LARGEST_BFLOAT16 = tl.constexpr(3.3895313892515355e38)
_LARGEST_FLOAT16 = tl.constexpr(65504.0)


@triton.jit
def widened(y):
    """float32, float16 or bfloat16 as float32."""
    if y.dtype == tl.bfloat16:
        bits = y.to(tl.int16, bitcast=True)
        if hardware.capability() >= 80:
            return hardware.widened(bits)
        else:
            return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return y.to(tl.float32)


@triton.jit
def load_float32(ptr, mask):
    """Loads float32, float16 or bfloat16 as float32; masked elements are +0.0."""
    return widened(tl.load(ptr, mask=mask, other=0.0))


@triton.jit
def bfloat16_bits(y):
    """float32 to the bits of the nearest bfloat16, half to even, as int32; NaN becomes 0x7FFF."""
    if hardware.capability() >= 80:
        return hardware.bfloat16_bits(y)
    else:
        bits = y.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
        return tl.where((bits & SIGNLESS) > INFINITY_BITS, _BF16_NAN_BITS, rounded)


@triton.jit
def saturated(y, DTYPE: tl.constexpr):
    """float32 that stays finite in a dtype, unless it is NaN."""
    largest: tl.constexpr = (
        _LARGEST_BFLOAT16 if DTYPE == tl.bfloat16 else _LARGEST_FLOAT16 if DTYPE == tl.float16 else LARGEST_FLOAT32
    )
    y = tl.minimum(y, largest, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(y, -largest, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rounded(y, DTYPE: tl.constexpr, SATURATE: tl.constexpr = False):
    """float32 in a dtype, rounded once, half to even; SATURATE keeps what is not NaN finite."""
    if DTYPE != tl.float32 and hardware.capability() >= 80:
        return hardware.rounded(y, DTYPE, SATURATE)
    else:
        if SATURATE:
            y = saturated(y, DTYPE)
        if DTYPE == tl.bfloat16:
            return bfloat16_bits(y).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            return y.to(DTYPE)


@triton.jit
def store_float32(ptr, y, mask, SATURATE: tl.constexpr):
    """Stores float32 in the pointer's dtype, as `rounded` makes it."""
    tl.store(ptr, rounded(y, ptr.dtype.element_ty, SATURATE), mask=mask)


@triton.jit
def encode_e4m3(v):
    """float32 of magnitude below 464 to e4m3 codes (int32), half to even."""
    bits = v.to(tl.int32, bitcast=True)
    magnitude = bits & SIGNLESS
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960  # exponent bias 127 -> 7, in eighths
    # Below 2**-6 codes count multiples of 2**-9; code 8 is 2**-6 itself.
    scaled = magnitude.to(tl.float32, bitcast=True) * 512.0 + ROUND_MAGIC
    subnormal = scaled.to(tl.int32, bitcast=True) & 0xF
    return tl.where(magnitude < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)


@triton.jit
def decode_e4m3(code):
    """e4m3 codes (any integer, the low byte counts) to float32; exact."""
    code = code.to(tl.int32)
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + 0x3C000000).to(tl.float32, bitcast=True)
    subnormal = magnitude.to(tl.float32) * 0.001953125
    absolute = tl.where(magnitude < 8, subnormal, normal)
    # The sign goes in as a bit: Triton negates as 0 - x, which loses -0.0.
    return (absolute.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
