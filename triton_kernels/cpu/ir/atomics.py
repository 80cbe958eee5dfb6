"""What waiting needs beside loads and stores: ordered access to memory, the time, and giving up the processor.

numba has none of these. The flags are 4 bytes at addresses that are multiples of 4, so the processor reads and writes
them whole.
"""

from __future__ import annotations

from typing import Any

from thinwire.triton_kernels.cpu.compat import cgutils, emits, ir

_FLAG_BYTES, _WORD_BYTES = 4, 8
_CLOCK_MONOTONIC = 1  # Linux's number of it


@emits("int32")
def load_acquire(builder, address):
    """The int32 at an address; what is read afterwards is at least as new as it."""
    pointer = builder.inttoptr(address, ir.IntType(32).as_pointer())
    return builder.load_atomic(pointer, "acquire", _FLAG_BYTES)


@emits("void", value="int32")
def store_release(builder, address, value):
    """Writes an int32; who reads it with `load_acquire` sees all that was written before it."""
    pointer = builder.inttoptr(address, ir.IntType(32).as_pointer())
    builder.store_atomic(value, pointer, "release", _FLAG_BYTES)


@emits("int64")
def load_relaxed(builder, address):
    """The int64 at an address that is a multiple of 8, as some thread wrote it; says nothing of its other stores."""
    return builder.load_atomic(builder.inttoptr(address, ir.IntType(64).as_pointer()), "monotonic", _WORD_BYTES)


@emits("void")
def store_relaxed(builder, address, value):
    """Writes an int64 that other threads read with `load_relaxed`."""
    builder.store_atomic(value, builder.inttoptr(address, ir.IntType(64).as_pointer()), "monotonic", _WORD_BYTES)


@emits("void")
def finish_stores(builder):
    """Waits until what was stored has left the processor; stores past the caches come before later ones only so."""
    builder.fence("seq_cst")


@emits("boolean", expected="int32", value="int32")
def compare_and_swap(builder, address, expected, value):
    """Replaces an int32 if it is the expected one, in one step, and says whether it was."""
    pointer = builder.inttoptr(address, ir.IntType(32).as_pointer())
    return builder.extract_value(builder.cmpxchg(pointer, expected, value, "acq_rel", "acquire"), 1)


@emits("void", value="int32")
def add_release(builder, address, value):
    """Adds to an int32 in one step; who reads the sum with `load_acquire` sees what was written before each step."""
    builder.atomic_rmw("add", builder.inttoptr(address, ir.IntType(32).as_pointer()), value, "release")


def _libc(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    # Declared by name and found in the process when the code is loaded: a ctypes pointer could not be cached on disk.
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


@emits("void")
def yield_processor(builder):
    """Lets another thread of this machine run: ranks may outnumber cores."""
    builder.call(_libc(builder, "sched_yield", ir.IntType(32), []), [])


@emits("void", duration="int32")
def sleep_microseconds(builder, duration):
    """Gives up the processor for at least so long."""
    builder.call(_libc(builder, "usleep", ir.IntType(32), [ir.IntType(32)]), [duration])


@emits("int32")
def process_id(builder):
    """`os.getpid`."""
    return builder.call(_libc(builder, "getpid", ir.IntType(32), []), [])


@emits("int64")
def monotonic_ns(builder):
    """Nanoseconds of the clock behind `time.monotonic`."""
    word = ir.IntType(64)
    moment = ir.LiteralStructType([word, word])
    with builder.goto_entry_block():
        now = builder.alloca(moment)
    read = _libc(builder, "clock_gettime", ir.IntType(32), [ir.IntType(32), moment.as_pointer()])
    builder.call(read, [ir.Constant(ir.IntType(32), _CLOCK_MONOTONIC), now])
    seconds, rest = (builder.load(cgutils.gep_inbounds(builder, now, 0, field)) for field in range(2))
    return builder.add(builder.mul(seconds, ir.Constant(word, 10**9)), rest)
