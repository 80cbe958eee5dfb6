"""Memory at addresses: numbers that kernels read and write, bytes that they move, flags between ranks, and sleep.

Addresses are int64. A kernel that takes addresses serves a tensor, a record in a peer's mapped memory and a buffer on
the stack alike, and compiles once for all of them. Flags are 4 bytes at addresses that are multiples of 4, so the
processor reads and writes them whole.
"""

from __future__ import annotations

import platform
from collections import namedtuple
from typing import Any, cast

from thinwire.triton_kernels.cpu.compat import cgutils, device, emits, intrinsic, ir, types
from thinwire.triton_kernels.cpu.ir.loops import loop
from thinwire.triton_kernels.cpu.ir.vectors import constant, integers, load

_CACHE_LINE = 64
_FLAG_BYTES = 4
_VECTOR_BYTES = 32  # a store past the caches must be aligned to its size, or it is an ordinary one
_BLOCK_SHIFT = 7  # a block is 128 bytes
_CLOCK_MONOTONIC = 1  # Linux's number of it
#: Linux's number of the call that sleeps on a word of memory, which other processes may have mapped too.
_FUTEX = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "s390x": 238, "riscv64": 98}.get(platform.machine(), 0)
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1

# ---------------------------------------------------------------------------------------------------------------------
# Numbers and bytes


def _pointer(builder: Any, address: Any, element: Any) -> Any:
    return builder.inttoptr(address, element.as_pointer())


def _access(number: str) -> tuple[Any, Any]:
    """Intrinsics `(address) -> number` and `(address, number)`."""

    def read(builder, address):
        element = ir.FloatType() if number == "float32" else ir.IntType(int(number.removeprefix("int")))
        return builder.load(_pointer(builder, address, element))

    def write(builder, address, value):
        builder.store(value, _pointer(builder, address, value.type))

    read.__name__, write.__name__ = f"load_{number}", f"store_{number}"
    return emits(number)(read), emits("void", value=number)(write)


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


@emits("void")
def stream_blocks(builder, target, source, blocks):
    """Copies blocks to a target aligned to a vector; whoever publishes them calls `finish_stores` before."""
    vector = integers(8, _VECTOR_BYTES)
    once = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
    parts = range(0, 1 << _BLOCK_SHIFT, _VECTOR_BYTES)
    with loop(builder, blocks) as index:
        start = builder.shl(index, constant(_BLOCK_SHIFT))
        read, written = builder.add(source, start), builder.add(target, start)
        values = [
            builder.load(builder.inttoptr(builder.add(read, constant(part)), vector.as_pointer()), align=1)
            for part in parts
        ]
        for part, value in zip(parts, values, strict=True):
            address = builder.inttoptr(builder.add(written, constant(part)), vector.as_pointer())
            builder.store(value, address, align=_VECTOR_BYTES).set_metadata("nontemporal", once)


@device
def stream_bytes(target, source, count):
    """Copies `count` bytes between places that do not overlap, past the caches; call `finish_stores` afterwards.

    An ordinary store takes the line that it is about to overwrite out of other caches, reads it, and drives out of its
    own cache what might be needed. To megabytes, and to what a distant core has read, doing without is faster.
    """
    head = min(count, -target & (_VECTOR_BYTES - 1))
    copy_bytes(target, source, head)
    blocks = (count - head) >> _BLOCK_SHIFT
    stream_blocks(target + head, source + head, blocks)
    done = head + (blocks << _BLOCK_SHIFT)
    copy_bytes(target + done, source + done, count - done)


# ---------------------------------------------------------------------------------------------------------------------
# Numbers by their names


def reader_of(*names: str) -> Any:
    """An intrinsic `(address) -> named tuple`, for numbers that lie at the address as int64."""
    fields = cast(Any, namedtuple("Numbers", names))

    def numbers_at(typing_context, address):
        def codegen(context, builder, signature, args):
            addresses = (builder.add(args[0], constant(8 * field)) for field in range(len(names)))
            word = context.get_value_type(types.int64)
            return context.make_tuple(
                builder, signature.return_type, [load(builder, address, word, 8) for address in addresses]
            )

        return types.NamedUniTuple(types.int64, len(names), fields)(types.int64), codegen

    return intrinsic(numbers_at)


def struct_of(*names: str) -> Any:
    """An intrinsic `(address) -> struct`, for numbers that change: each is read where it is used."""

    def struct_at(typing_context, address):
        struct = types.Record.make_c_struct([(name, types.int64) for name in names])

        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(struct))

        return struct(types.int64), codegen

    return intrinsic(struct_at)


# ---------------------------------------------------------------------------------------------------------------------
# Flags, and sleep


@emits("int32")
def load_acquire(builder, address):
    """The int32 at an address; what is read afterwards is at least as new as it."""
    return builder.load_atomic(_pointer(builder, address, ir.IntType(32)), "acquire", _FLAG_BYTES)


@emits("void", value="int32")
def store_release(builder, address, value):
    """Writes an int32; who reads it with `load_acquire` sees all that was written before it."""
    builder.store_atomic(value, _pointer(builder, address, ir.IntType(32)), "release", _FLAG_BYTES)


@emits("void")
def finish_stores(builder):
    """Waits until what was stored has left the processor; stores past the caches come before later ones only so."""
    builder.fence("seq_cst")


def _libc(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    # Declared by name and found in the process when the code is loaded: a ctypes pointer could not be cached on disk.
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def _timespec(builder: Any) -> tuple[Any, list[Any]]:
    """Room for seconds and nanoseconds, as the system calls take them: its address, and that of either."""
    with builder.goto_entry_block():
        moment = builder.alloca(ir.LiteralStructType([ir.IntType(64)] * 2))
    return moment, [cgutils.gep_inbounds(builder, moment, 0, field) for field in range(2)]


@emits("void")
def yield_processor(builder):
    """Lets another thread of this machine run: ranks may outnumber cores."""
    builder.call(_libc(builder, "sched_yield", ir.IntType(32), []), [])


@emits("int64")
def monotonic_ns(builder):
    """Nanoseconds of the clock behind `time.monotonic`."""
    now, fields = _timespec(builder)
    read = _libc(builder, "clock_gettime", ir.IntType(32), [ir.IntType(32), now.type])
    builder.call(read, [ir.Constant(ir.IntType(32), _CLOCK_MONOTONIC), now])
    seconds, rest = (builder.load(field) for field in fields)
    return builder.add(builder.mul(seconds, constant(10**9)), rest)


@emits("int32", value="int32")
def exchange(builder, address, value):
    """Replaces an int32 in one step, and gives what it was."""
    return builder.atomic_rmw("xchg", _pointer(builder, address, ir.IntType(32)), value, "seq_cst")


@emits("int32", value="int32")
def add(builder, address, value):
    """Adds to an int32 in one step, and gives what it was."""
    return builder.atomic_rmw("add", _pointer(builder, address, ir.IntType(32)), value, "seq_cst")


def _futex(builder: Any, address: Any, operation: int, value: Any, timeout: Any) -> None:
    word = ir.IntType(64)
    call = cgutils.get_or_insert_function(builder.module, ir.FunctionType(word, [word], var_arg=True), "syscall")
    builder.call(call, [constant(_FUTEX), address, constant(operation), value, timeout, constant(0), constant(0)])


@emits("void", expected="int32")
def sleep_on(builder, address, expected, nanoseconds):
    """Sleeps while an int32 is the expected one, until it is woken, a signal comes, or so long has passed."""
    word = ir.IntType(64)
    limit, fields = _timespec(builder)
    if not _FUTEX:  # a machine whose number of the call is not known: look again soon
        builder.call(_libc(builder, "usleep", ir.IntType(32), [ir.IntType(32)]), [ir.Constant(ir.IntType(32), 200)])
        return
    for field, divide in zip(fields, (builder.sdiv, builder.srem), strict=True):
        builder.store(divide(nanoseconds, constant(10**9)), field)
    _futex(builder, address, _FUTEX_WAIT, builder.zext(expected, word), builder.ptrtoint(limit, word))


@emits("void")
def wake_sleeper(builder, address):
    """Wakes who sleeps on the word at an address."""
    if _FUTEX:
        _futex(builder, address, _FUTEX_WAKE, constant(1), constant(0))
