"""The loops of `thinwire.triton_kernels.cpu.checksum`, as intrinsics: numba takes long to inline a function."""

from __future__ import annotations

from typing import Any

from thinwire.triton_kernels.checksum_seed import GOLDEN, STAGES
from thinwire.triton_kernels.cpu.compat import cgutils, emits, ir
from thinwire.triton_kernels.cpu.ir.control import loop
from thinwire.triton_kernels.cpu.ir.vectors import broadcast, constant, filled, integers, load, store

_LANES = 8
_BLOCK_SHIFT = 6  # a block is 64 bytes


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
def sum_words(builder, address, num_bytes, sums):
    """Writes the sum of the words at an address, the last one padded with zeros, and that of each times its place.

    The second one without a product in the loop: adding the running sum in each turn counts a block as often as turns
    follow.
    """
    vector, word = integers(64, _LANES), ir.IntType(64)
    total, turns = cgutils.alloca_once(builder, vector), cgutils.alloca_once(builder, vector)
    for variable in (total, turns):
        builder.store(filled(vector, 0), variable)
    blocks = builder.lshr(num_bytes, constant(_BLOCK_SHIFT))
    with loop(builder, blocks) as index:
        block = builder.add(address, builder.shl(index, constant(_BLOCK_SHIFT)))
        running = builder.add(builder.load(total), load(builder, block, vector, 1))
        builder.store(running, total)
        builder.store(builder.add(builder.load(turns), running), turns)
    # Block k of K was added K - k times.
    running = builder.load(total)
    before = builder.sub(builder.mul(broadcast(builder, blocks, _LANES), running), builder.load(turns))
    places = ir.Constant(vector, [lane + 1 for lane in range(_LANES)])
    placed = builder.add(builder.mul(before, filled(vector, _LANES)), builder.mul(running, places))
    store(builder, _sum_of_lanes(builder, running), sums, 8)
    store(builder, _sum_of_lanes(builder, placed), builder.add(sums, constant(8)), 8)

    def add(value: Any, number: Any) -> None:
        factors = constant(1), builder.add(number, constant(1))
        for place, factor in zip((sums, builder.add(sums, constant(8))), factors, strict=True):
            store(builder, builder.add(load(builder, place, word, 8), builder.mul(value, factor)), place, 8)

    first = builder.mul(blocks, constant(_LANES))
    with loop(builder, builder.sub(builder.lshr(num_bytes, constant(3)), first)) as index:
        number = builder.add(first, index)
        add(load(builder, builder.add(address, builder.shl(number, constant(3))), word, 1), number)
    whole = builder.lshr(num_bytes, constant(3))
    rest = builder.add(address, builder.shl(whole, constant(3)))
    with loop(builder, builder.and_(num_bytes, constant(7))) as index:
        octet = builder.zext(load(builder, builder.add(rest, index), ir.IntType(8), 1), word)
        add(builder.shl(octet, builder.shl(index, constant(3))), whole)
