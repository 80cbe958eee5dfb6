"""What waiting needs beside loads and stores: ordered access to memory, the time, and giving up the processor.

numba has none of these. The flags are 4 bytes at addresses that are multiples of 4, so the processor reads and writes
them whole.
"""

from __future__ import annotations

import platform
from typing import Any

from thinwire.triton_kernels.cpu.compat import cgutils, emits, ir

_FLAG_BYTES = 4
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


@emits("void")
def finish_stores(builder):
    """Waits until what was stored has left the processor; stores past the caches come before later ones only so."""
    builder.fence("seq_cst")


def _libc(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    # Declared by name and found in the process when the code is loaded: a ctypes pointer could not be cached on disk.
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


@emits("void")
def yield_processor(builder):
    """Lets another thread of this machine run: ranks may outnumber cores."""
    builder.call(_libc(builder, "sched_yield", ir.IntType(32), []), [])


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


# ---------------------------------------------------------------------------------------------------------------------
# Sleeping on a word of memory that other processes have mapped too.

_FUTEX = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "s390x": 238, "riscv64": 98}.get(platform.machine(), 0)
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1


@emits("int32", value="int32")
def exchange(builder, address, value):
    """Replaces an int32 in one step, and gives what it was."""
    return builder.atomic_rmw("xchg", builder.inttoptr(address, ir.IntType(32).as_pointer()), value, "seq_cst")


@emits("int32", value="int32")
def add(builder, address, value):
    """Adds to an int32 in one step, and gives what it was."""
    return builder.atomic_rmw("add", builder.inttoptr(address, ir.IntType(32).as_pointer()), value, "seq_cst")


def _futex(builder: Any, address: Any, operation: int, value: Any, timeout: Any) -> None:
    word = ir.IntType(64)
    arguments = [ir.Constant(word, number) for number in (_FUTEX, operation)]
    call = ir.FunctionType(word, [word], var_arg=True)
    function = cgutils.get_or_insert_function(builder.module, call, "syscall")
    zero = ir.Constant(word, 0)
    builder.call(function, [arguments[0], address, arguments[1], value, timeout, zero, zero])


@emits("void", expected="int32")
def sleep_on(builder, address, expected, nanoseconds):
    """Sleeps while an int32 is the expected one, until it is woken, a signal comes, or so long has passed."""
    word = ir.IntType(64)
    moment = ir.LiteralStructType([word, word])
    with builder.goto_entry_block():
        limit = builder.alloca(moment)
    if not _FUTEX:  # a machine whose number of the call is not known: look again soon
        builder.call(_libc(builder, "usleep", ir.IntType(32), [ir.IntType(32)]), [ir.Constant(ir.IntType(32), 200)])
        return
    second = ir.Constant(word, 10**9)
    for field, value in enumerate((builder.sdiv(nanoseconds, second), builder.srem(nanoseconds, second))):
        builder.store(value, cgutils.gep_inbounds(builder, limit, 0, field))
    _futex(builder, address, _FUTEX_WAIT, builder.zext(expected, word), builder.ptrtoint(limit, word))


@emits("void")
def wake_sleeper(builder, address):
    """Wakes who sleeps on the word at an address."""
    word = ir.IntType(64)
    if _FUTEX:
        _futex(builder, address, _FUTEX_WAKE, ir.Constant(word, 1), ir.Constant(word, 0))
