"""Instructions of AVX-512 for which LLVM finds others that take longer; `compat` says whether the machine has them."""

from __future__ import annotations

from typing import Any

from thinwire.triton_kernels.cpu.compat import BFloat16, cgutils, ir

_VECTOR_BYTES = 64
_NAN_OR_SUBNORMAL = 0b10100001  # classes of VFPCLASSPS: a signalling NaN, a subnormal number, a quiet NaN


def gather_bytes(builder: Any, first: Any, second: Any, places: list[int]) -> Any:
    """int8 [len(places)], at most 64: the bytes at these places of two vectors of 64 bytes, one behind the other."""
    octets = ir.VectorType(ir.IntType(8), _VECTOR_BYTES)
    order = ir.Constant(octets, places + [0] * (_VECTOR_BYTES - len(places)))
    # An empty piece of assembly hides that the order is constant: LLVM would make four shuffles of it.
    with builder.goto_entry_block():
        order = builder.asm(ir.FunctionType(octets, [octets]), "", "=v,0", [order], False)
    permutation = ir.FunctionType(octets, [octets] * 3)
    permute = cgutils.get_or_insert_function(builder.module, permutation, "llvm.x86.avx512.vpermi2var.qi.512")
    first, second = (builder.bitcast(vector, octets) for vector in (first, second))
    gathered = builder.call(permute, [first, order, second])
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), len(places)), list(range(len(places))))
    return builder.shuffle_vector(gathered, gathered, lanes)


def has_special(builder: Any, vectors: list[Any]) -> Any:
    """Whether some lane of float32 [16] each is NaN or subnormal, which `round_pairs` does not round as others do."""
    lanes = ir.VectorType(ir.IntType(1), 16)
    classify = ir.FunctionType(lanes, [vectors[0].type, ir.IntType(32)])
    classes = cgutils.get_or_insert_function(builder.module, classify, "llvm.x86.avx512.fpclass.ps.512")
    found = ir.Constant(lanes, [0] * 16)
    for vector in vectors:
        found = builder.or_(found, builder.call(classes, [vector, ir.Constant(ir.IntType(32), _NAN_OR_SUBNORMAL)]))
    return builder.icmp_unsigned("!=", builder.bitcast(found, ir.IntType(16)), ir.Constant(ir.IntType(16), 0))


def round_pairs(builder: Any, first: Any, second: Any) -> Any:
    """float32 [16] and [16] to the bits of the nearest bfloat16, int16 [32], half to even; none may be subnormal."""
    singles = ir.VectorType(ir.FloatType(), 16)
    rounding = ir.FunctionType(ir.VectorType(BFloat16(), 32), [singles, singles])
    convert = cgutils.get_or_insert_function(builder.module, rounding, "llvm.x86.avx512bf16.cvtne2ps2bf16.512")
    return builder.bitcast(builder.call(convert, [second, first]), ir.VectorType(ir.IntType(16), 32))
