"""Instructions of AVX-512 for which LLVM finds others that take longer; `compat` says whether the machine has them."""

from __future__ import annotations

from typing import Any

from thinwire.triton_kernels.cpu.compat import BFloat16, cgutils, ir

_VECTOR_BYTES = 64


def gather_bytes(builder: Any, first: Any, second: Any, places: list[int]) -> Any:
    """int8 [len(places)], at most 64: the bytes at these places of two vectors of 64 bytes, one behind the other."""
    octets = ir.VectorType(ir.IntType(8), _VECTOR_BYTES)
    order = ir.Constant(octets, places + [0] * (_VECTOR_BYTES - len(places)))
    # An empty piece of assembly hides that the order is constant: LLVM would make four shuffles of it.
    order = builder.asm(ir.FunctionType(octets, [octets]), "", "=v,0", [order], False)
    permutation = ir.FunctionType(octets, [octets] * 3)
    permute = cgutils.get_or_insert_function(builder.module, permutation, "llvm.x86.avx512.vpermi2var.qi.512")
    first, second = (builder.bitcast(vector, octets) for vector in (first, second))
    gathered = builder.call(permute, [first, order, second])
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), len(places)), list(range(len(places))))
    return builder.shuffle_vector(gathered, gathered, lanes)


def round_pairs(builder: Any, first: Any, second: Any) -> Any:
    """float32 [16] and [16] to the bits of the nearest bfloat16, int16 [32], half to even; none may be subnormal."""
    singles = ir.VectorType(ir.FloatType(), 16)
    rounding = ir.FunctionType(ir.VectorType(BFloat16(), 32), [singles, singles])
    convert = cgutils.get_or_insert_function(builder.module, rounding, "llvm.x86.avx512bf16.cvtne2ps2bf16.512")
    return builder.bitcast(builder.call(convert, [second, first]), ir.VectorType(ir.IntType(16), 32))
