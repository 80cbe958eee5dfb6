"""The loops of `thinwire.triton_kernels.cpu.checksum`, as intrinsics."""

from __future__ import annotations

from typing import Any

from thinwire.triton_kernels.checksum import GOLDEN, STAGES
from thinwire.triton_kernels.cpu.compat import cgutils, emits, ir
from thinwire.triton_kernels.cpu.ir.control import loop
from thinwire.triton_kernels.cpu.ir.vectors import broadcast, constant, filled, integers, load, store

_LANES = 8
#: Bytes that one turn of `sum_blocks` adds.
BLOCK_BYTES = 8 * _LANES


@emits("int64")
def mix(builder, word):
    """One step of splitmix64 from a state."""
    z = builder.add(word, constant(GOLDEN))
    for shift, factor in STAGES:
        z = builder.mul(builder.xor(z, builder.lshr(z, constant(shift))), constant(factor))
    return z


def _sum_of_lanes(builder: Any, vector: Any) -> Any:
    name = f"llvm.vector.reduce.add.v{vector.type.count}i{vector.type.element.width}"
    reduction = ir.FunctionType(vector.type.element, [vector.type])
    return builder.call(cgutils.get_or_insert_function(builder.module, reduction, name), [vector])


@emits("void")
def sum_blocks(builder, address, blocks, sums):
    """Writes, for `blocks` of 64 bytes, the sum of their words, and that of each word times its place from 1 on.

    The second one without a product in the loop: adding the running sum in each turn counts a block as often as turns
    follow.
    """
    vector = integers(64, _LANES)
    total, turns = cgutils.alloca_once(builder, vector), cgutils.alloca_once(builder, vector)
    for variable in (total, turns):
        builder.store(filled(vector, 0), variable)
    with loop(builder, blocks) as index:
        words = load(builder, builder.add(address, builder.mul(index, constant(BLOCK_BYTES))), vector, 1)
        running = builder.add(builder.load(total), words)
        builder.store(running, total)
        builder.store(builder.add(builder.load(turns), running), turns)
    # Block k of K was added K - k times.
    running = builder.load(total)
    before = builder.sub(builder.mul(broadcast(builder, blocks, _LANES), running), builder.load(turns))
    places = ir.Constant(vector, [lane + 1 for lane in range(_LANES)])
    placed = builder.add(builder.mul(before, filled(vector, _LANES)), builder.mul(running, places))
    store(builder, _sum_of_lanes(builder, running), sums, 8)
    store(builder, _sum_of_lanes(builder, placed), builder.add(sums, constant(8)), 8)
