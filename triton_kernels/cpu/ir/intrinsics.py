"""Scalars at addresses: what kernels read, write, move and reinterpret one at a time.

Addresses are int64. A kernel that takes addresses serves a tensor, a record in a peer's mapped memory and a buffer on
the stack alike, and compiles once for all of them.
"""

from __future__ import annotations

from typing import Any

from thinwire.triton_kernels.cpu.compat import cgutils, emits, intrinsic, ir, types

_CACHE_LINE = 64


def _pointer(builder: Any, address: Any, element: Any) -> Any:
    return builder.inttoptr(address, element.as_pointer())


def _access(number: str) -> tuple[Any, Any]:
    """Intrinsics `(address) -> number` and `(address, number)`."""

    def load(builder, address):
        element = ir.FloatType() if number == "float32" else ir.IntType(int(number.removeprefix("int")))
        return builder.load(_pointer(builder, address, element))

    def store(builder, address, value):
        builder.store(value, _pointer(builder, address, value.type))

    load.__name__, store.__name__ = f"load_{number}", f"store_{number}"
    return emits(number)(load), emits("void", value=number)(store)


_, store_int8 = _access("int8")
load_int32, store_int32 = _access("int32")
load_int64, store_int64 = _access("int64")
load_float32, store_float32 = _access("float32")


@emits("float32", bits="int32")
def bits_to_float32(builder, bits):
    """The float32 of the same 32 bits."""
    return builder.bitcast(bits, ir.FloatType())


@emits("int64")
def log2(builder, value):
    """The logarithm of a power of two."""
    return builder.cttz(value, ir.Constant(ir.IntType(1), 1))


@emits("void")
def copy_bytes(builder, target, source, count):
    """Copies `count` bytes between places that do not overlap."""
    target, source = (_pointer(builder, address, ir.IntType(8)) for address in (target, source))
    cgutils.raw_memcpy(builder, target, source, count, 1)


@emits("void")
def zero_bytes(builder, target, count):
    """Zeroes `count` bytes."""
    cgutils.memset(builder, _pointer(builder, target, ir.IntType(8)), count, 0)


@intrinsic(prefer_literal=True)
def stack_buffer(typing_context, size):
    """The address of `size` bytes, a compile-time constant, that live until the calling function returns."""
    if not isinstance(size, types.IntegerLiteral):
        return None

    def codegen(context, builder, signature, args):
        # Not cgutils.alloca_once, which also writes zeros.
        with builder.goto_entry_block():
            buffer = builder.alloca(ir.ArrayType(ir.IntType(8), size.literal_value))
            buffer.align = _CACHE_LINE
        return builder.ptrtoint(buffer, ir.IntType(64))

    return types.int64(size), codegen
