"""Float formats in the instructions of NVIDIA GPUs: the same bits as in integer arithmetic, in fewer instructions.

Which of the two a kernel takes is decided when it is compiled, by `capability`. What is here is called where that is at
least what the function says; `thinwire.triton_kernels.floats` has the integer arithmetic beside it.
"""

from __future__ import annotations

import os
import re

from thinwire.triton_kernels.compat import tl, triton

if os.environ.get("TRITON_INTERPRET") == "1":

    def capability():
        """The interpreter has no such instructions."""
        return 0

else:

    @tl.core.builtin
    def capability(_semantic=None):
        """The compute capability of the NVIDIA GPU that is compiled for, times ten; 0 for all others: a constexpr.

        It is the compiler's own target: `tl.target_info` tells of the GPU that is there, and there may be none.
        """
        options = _semantic.builder.options
        return tl.constexpr(int(re.findall(r"\d+", str(options.arch))[0]) if options.backend_name == "cuda" else 0)


@triton.jit
def larger_or_nan(a, b):
    """The larger of two float32; NaN if one of them is. One instruction, and the magnitude of its operands is in it."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def bfloat16_bits(y):
    """float32 to the bits of the nearest bfloat16, half to even, as int32; NaN becomes 0x7FFF. From 80 on."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, 0f00000000, $1;", "=r,f", [y], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def rounded(y, DTYPE: tl.constexpr, SATURATE: tl.constexpr):
    """float32 to float16 or bfloat16, half to even, and finite with SATURATE; NaN becomes 0x7FFF. From 80 on."""
    name: tl.constexpr = ("satfinite." if SATURATE else "") + ("bf16x2" if DTYPE == tl.bfloat16 else "f16x2")
    bits = tl.inline_asm_elementwise(
        "cvt.rn." + name + ".f32 $0, $2, $1;", "=r,f,f", [y], dtype=tl.int16, is_pure=True, pack=2
    )
    return bits.to(DTYPE, bitcast=True)


@triton.jit
def decode_octets(octets, SIGN: tl.constexpr):
    """Numbers of 8 bits (SIGN is 128), or of 6 with whatever above them (SIGN is 32), int8, to float32, exactly."""
    # Conversions of integers have an eighth of the lanes. These are the low bits of 2**23 + SIGN + q.
    biased: tl.constexpr = (
        "xor.b32 $3, $4, 0x80808080;" if SIGN == 128 else "and.b32 $3, $4, 0x3F3F3F3F; xor.b32 $3, $3, 0x20202020;"
    )
    return tl.inline_asm_elementwise(
        biased
        + """
        prmt.b32 $0, $3, 0x4B000000, 0x7440;
        prmt.b32 $1, $3, 0x4B000000, 0x7441;
        prmt.b32 $2, $3, 0x4B000000, 0x7442;
        prmt.b32 $3, $3, 0x4B000000, 0x7443;""",
        "=r,=r,=r,=r,r",
        [octets],
        dtype=tl.float32,
        is_pure=True,
        pack=4,
    ) - (8388608.0 + SIGN)


@triton.jit
def decode_int4(octets):
    """The low and the high half of each octet, int8, as signed numbers, to float32."""
    even, odd = tl.inline_asm_elementwise(
        """{
        .reg .b32 biased;
        and.b32 biased, $8, 0x0F0F0F0F;
        xor.b32 biased, biased, 0x08080808;
        prmt.b32 $0, biased, 0x4B000000, 0x7440;
        prmt.b32 $1, biased, 0x4B000000, 0x7441;
        prmt.b32 $2, biased, 0x4B000000, 0x7442;
        prmt.b32 $3, biased, 0x4B000000, 0x7443;
        shr.u32 biased, $8, 4;
        and.b32 biased, biased, 0x0F0F0F0F;
        xor.b32 biased, biased, 0x08080808;
        prmt.b32 $4, biased, 0x4B000000, 0x7440;
        prmt.b32 $5, biased, 0x4B000000, 0x7441;
        prmt.b32 $6, biased, 0x4B000000, 0x7442;
        prmt.b32 $7, biased, 0x4B000000, 0x7443;
        }""",
        "=&r,=&r,=&r,=&r,=r,=r,=r,=r,r",
        [octets],
        dtype=(tl.float32, tl.float32),
        is_pure=True,
        pack=4,
    )
    return even - 8388616.0, odd - 8388616.0


@triton.jit
def decode_int10(octets, pairs):
    """Numbers of 10 bits, the low 8 and the high 2, with whatever above them, as int8, to float32, exactly."""
    return (
        tl.inline_asm_elementwise(
            """{
        .reg .b32 high, both;
        and.b32 high, $5, 0x03030303;
        xor.b32 high, high, 0x02020202;
        prmt.b32 both, $4, high, 0x5140;
        prmt.b32 $0, both, 0x4B000000, 0x7410;
        prmt.b32 $1, both, 0x4B000000, 0x7432;
        prmt.b32 both, $4, high, 0x7362;
        prmt.b32 $2, both, 0x4B000000, 0x7410;
        prmt.b32 $3, both, 0x4B000000, 0x7432;
        }""",
            "=&r,=&r,=&r,=r,r,r",
            [octets, pairs],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
        - 8389120.0
    )


@triton.jit
def shifted(octets, UP: tl.constexpr):
    """Octets, int8, UP bits up, or down where that is negative, those of a thread together: bits of others come in."""
    return tl.inline_asm_elementwise(
        f"shl.b32 $0, $1, {UP};" if UP > 0 else f"shr.u32 $0, $1, {-UP};",
        "=r,r", [octets], dtype=tl.int8, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def selected(low, high, MASK: tl.constexpr):
    """The bits of `low` where MASK, of 7 bits, has ones, those of `high` elsewhere: octets, int8."""
    return tl.inline_asm_elementwise(
        f"lop3.b32 $0, $1, $2, {MASK * 0x01010101}, 0xE4;",
        "=r,r,r", [low, high], dtype=tl.int8, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def octets_at(words, kept, PLACE: tl.constexpr):
    """Byte PLACE, 0 or 1, of each of int32 words, as int8, where `kept`, int32, is -1; 0 where that is 0."""
    # The four of a thread may be of four groups: which, is for the compiler to choose. What is made of `kept` alone is
    # made once for all fours of the same groups.
    first: tl.constexpr = "0x0051; " if PLACE == 1 else "0x0040; "
    third: tl.constexpr = "0x0510; " if PLACE == 1 else "0x0410; "
    fourth: tl.constexpr = "0x5210; " if PLACE == 1 else "0x4210; "
    return tl.inline_asm_elementwise(
        "{ .reg .b32 kept; prmt.b32 $0, $1, $2, "
        + first
        + "prmt.b32 $0, $0, $3, "
        + third
        + "prmt.b32 $0, $0, $4, "
        + fourth
        + """
        prmt.b32 kept, $5, $6, 0x0040;
        prmt.b32 kept, kept, $7, 0x0410;
        prmt.b32 kept, kept, $8, 0x4210;
        and.b32 $0, $0, kept;
        }""",
        "=&r,r,r,r,r,r,r,r,r",
        [words, kept],
        dtype=tl.int8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def widened(bits):
    """bfloat16, as int16, to float32."""
    return tl.inline_asm_elementwise(
        """shl.b32 $0, $2, 16;
        and.b32 $1, $2, 0xFFFF0000;""",
        "=&r,=r,r",
        [bits],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def encode_e4m3(v, kept):
    """float32 below 464 in magnitude to e4m3, as int8, half to even; `kept` is as in `octets_at`. From 89 on."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        .reg .b32 octets, kept;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 octets, {low, high};
        prmt.b32 kept, $5, $6, 0x0040;
        prmt.b32 kept, kept, $7, 0x0410;
        prmt.b32 kept, kept, $8, 0x4210;
        and.b32 $0, octets, kept;
        }""",
        "=r,f,f,f,f,r,r,r,r",
        [v, kept],
        dtype=tl.int8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def decode_e4m3(octets):
    """e4m3, as int8, to float32, exactly; the codes that stand for NaN are read on to 480."""
    # As a float16's bits a code is the value times 2**-8, subnormal codes and zeros included.
    return (
        tl.inline_asm_elementwise(
            """{
        .reg .b32 octets, halves;
        .reg .b16 low, high;
        prmt.b32 octets, $4, 0, 0x1404;
        shr.u32 halves, octets, 1;
        and.b32 halves, halves, 0x3F803F80;
        lop3.b32 halves, octets, 0x80008000, halves, 0xEA;
        mov.b32 {low, high}, halves;
        cvt.f32.f16 $0, low;
        cvt.f32.f16 $1, high;
        prmt.b32 octets, $4, 0, 0x3424;
        shr.u32 halves, octets, 1;
        and.b32 halves, halves, 0x3F803F80;
        lop3.b32 halves, octets, 0x80008000, halves, 0xEA;
        mov.b32 {low, high}, halves;
        cvt.f32.f16 $2, low;
        cvt.f32.f16 $3, high;
        }""",
            "=&f,=&f,=f,=f,r",
            [octets],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
        * 256.0
    )
