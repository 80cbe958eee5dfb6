"""Scalars at addresses: what kernels read, write, move and reinterpret one at a time.

Addresses are int64. A kernel that takes addresses serves a tensor, a record in a peer's mapped memory and a buffer on
the stack alike, and compiles once for all of them.
"""

from __future__ import annotations

from typing import Any

from thinwire.triton_kernels.cpu.compat import cgutils, intrinsic, ir, types

__all__ = [
    "bits_to_float32",
    "copy_bytes",
    "load_float32",
    "load_int32",
    "load_int64",
    "stack_buffer",
    "store_float32",
    "store_int8",
    "store_int32",
    "store_int64",
    "zero_bytes",
]

_CACHE_LINE = 64


def _pointer(builder: Any, address: Any, element: Any) -> Any:
    return builder.inttoptr(address, element.as_pointer())


def _loader(number: str) -> Any:
    """An intrinsic `(address) -> number`."""

    def load(typing_context, address):
        def codegen(context, builder, signature, args):
            element = context.get_value_type(signature.return_type)
            return builder.load(_pointer(builder, args[0], element))

        return getattr(types, number)(types.int64), codegen

    load.__name__ = f"load_{number}"
    return intrinsic(load)


def _storer(number: str) -> Any:
    """An intrinsic `(address, number)`."""

    def store(typing_context, address, value):
        def codegen(context, builder, signature, args):
            builder.store(args[1], _pointer(builder, args[0], args[1].type))
            return context.get_dummy_value()

        return types.void(types.int64, getattr(types, number)), codegen

    store.__name__ = f"store_{number}"
    return intrinsic(store)


store_int8 = _storer("int8")
load_int32, store_int32 = _loader("int32"), _storer("int32")
load_int64, store_int64 = _loader("int64"), _storer("int64")
load_float32, store_float32 = _loader("float32"), _storer("float32")


@intrinsic
def bits_to_float32(typing_context, bits):
    """The float32 of the same 32 bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def copy_bytes(typing_context, target, source, count):
    """Copies `count` bytes between places that do not overlap."""

    def codegen(context, builder, signature, args):
        byte = ir.IntType(8)
        target, source = (_pointer(builder, address, byte) for address in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def zero_bytes(typing_context, target, count):
    """Zeroes `count` bytes."""

    def codegen(context, builder, signature, args):
        cgutils.memset(builder, _pointer(builder, args[0], ir.IntType(8)), args[1], 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


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
