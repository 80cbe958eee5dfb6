"""Copying past the caches: for what is written now and read much later, if at all by this processor.

An ordinary store reads the line that it is about to overwrite, and drives out of the cache what might be needed. Where
megabytes go to memory that is not in the cache, doing without is faster by half.
"""

from __future__ import annotations

from thinwire.triton_kernels.cpu.compat import device, emits, ir
from thinwire.triton_kernels.cpu.ir.atomics import finish_stores
from thinwire.triton_kernels.cpu.ir.control import loop
from thinwire.triton_kernels.cpu.ir.intrinsics import copy_bytes
from thinwire.triton_kernels.cpu.ir.vectors import constant, integers

_VECTOR_BYTES = 32  # such a store must be aligned to its size, or it is an ordinary one
_BLOCK_SHIFT = 7  # a block is 128 bytes


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
def stream_unfinished(target, source, count):
    """Copies `count` bytes between places that do not overlap, without reading or keeping the target's lines.

    Whoever publishes them calls `finish_stores` before.
    """
    head = min(count, -target & (_VECTOR_BYTES - 1))
    copy_bytes(target, source, head)
    blocks = (count - head) >> _BLOCK_SHIFT
    stream_blocks(target + head, source + head, blocks)
    done = head + (blocks << _BLOCK_SHIFT)
    copy_bytes(target + done, source + done, count - done)


@device
def stream_bytes(target, source, count):
    """The same, and they come before whatever is stored next."""
    stream_unfinished(target, source, count)
    finish_stores()
