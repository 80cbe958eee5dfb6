"""What threads of a warp do together: shuffles, reductions, and matrices to and from shared memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from verification.ptx.errors import PtxError
from verification.ptx.program import Instruction
from verification.ptx.state import Mask, State, Step, elements

Builder = Callable[[State, Instruction], Step]


def _members(state: State, instruction: Instruction, operand: str) -> Callable[[Mask], None]:
    """A check that those who execute are the members that the instruction names, in each warp of which any does."""
    members = state.source(operand, "u32")
    lanes = np.arange(state.size) % 32

    def check(mask: Mask) -> None:
        named = (members >> lanes.astype(np.uint32) & np.uint32(1)).astype(bool)
        here = np.ones(state.size, bool) if mask is True else mask
        if ((named != here).reshape(-1, 32).any(1) & here.reshape(-1, 32).any(1)).any():
            raise PtxError(f"not the threads that it names came to {instruction.site}")

    return check


def _shuffle(state: State, instruction: Instruction) -> Step:
    """`shfl.sync`: another lane's register, or one's own where that is out of range."""
    mode = instruction.opcode[2]
    names = [name.strip() for name in instruction.operands[0].split("|")]
    target = state.target(names[0], "u32")
    in_range = state.target(names[1], "pred") if len(names) > 1 else None
    value, by, bounds = (state.source(operand, "u32") for operand in instruction.operands[1:4])
    check = _members(state, instruction, instruction.operands[4])
    lane = np.arange(state.size) % 32
    first = np.arange(state.size) - lane

    def step(mask: Mask) -> None:
        check(mask)
        amount, segment, clamp = (
            by.astype(np.int64) & 31,
            bounds.astype(np.int64) >> 8 & 31,
            bounds.astype(np.int64) & 31,
        )
        least = lane & segment
        most = least | (clamp & ~segment)
        if mode == "up":
            source = lane - amount
            inside = source >= most
        else:
            source = {"bfly": lane ^ amount, "down": lane + amount, "idx": least | (amount & ~segment)}[mode]
            inside = source <= most
        result = value[first + np.where(inside, source, lane)]
        np.copyto(target, result, where=mask)
        if in_range is not None:
            np.copyto(in_range, inside, where=mask)

    return step


def _reduce(state: State, instruction: Instruction) -> Step:
    """`redux.sync`: a sum, an extreme or a logical function over the members."""
    function = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
                "xor": np.bitwise_xor}[instruction.opcode[2]]  # fmt: skip
    value = state.source(instruction.operands[1], instruction.type)
    target = state.target(instruction.operands[0], instruction.type)
    check = _members(state, instruction, instruction.operands[2])

    def step(mask: Mask) -> None:
        check(mask)
        for warp in range(state.size // 32):
            lanes = slice(32 * warp, 32 * warp + 32)
            here = np.arange(32) if mask is True else np.flatnonzero(mask[lanes])
            if here.size:
                target[lanes][here] = function.reduce(value[lanes][here], dtype=value.dtype)

    return step


def _matrices(stores: bool) -> Builder:
    """`ldmatrix` and `stmatrix`: 8x8 matrices of 16 bits in shared memory, a row at the address of a lane each.

    Lane l has elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4; with .trans, of column l / 4.
    """

    def build(state: State, instruction: Instruction) -> Step:
        if "m8n8" not in instruction.opcode or instruction.type != "b16":
            raise PtxError(f"not built: {instruction.text}")
        place, registers = instruction.operands if stores else instruction.operands[::-1]
        names, address = elements(registers), state.address(place)
        transposed = "trans" in instruction.opcode
        fragments = [state.source(name, "u32") if stores else state.target(name, "u32") for name in names]
        lane = np.arange(state.size) % 32
        first = np.arange(state.size) - lane

        def step(mask: Mask) -> None:
            state.whole_warps(mask, instruction)
            chosen = state.chosen(mask)
            rows = address()
            for number, fragment in enumerate(fragments):
                halves = []
                for half in range(2):
                    row, column = lane // 4, 2 * (lane % 4) + half
                    if transposed:
                        row, column = column, row
                    starts = rows[(first + 8 * number + row)[chosen]].astype(np.int64)
                    if (starts % 16).any():
                        raise PtxError(f"misaligned row of {instruction.text}")
                    places = starts + 2 * column[chosen]
                    offsets = state.shared.offsets(places, 2, instruction.name)
                    values = (fragment >> np.uint32(16 * half)).astype(np.uint16)[chosen]
                    if state.races is not None and state.clocks is not None:
                        written = values.view(np.uint8).reshape(-1, 2) if stores else None
                        state.races.access(
                            state.shared_shadow, state.clocks, chosen, offsets, 2, 1, None, instruction.site, written
                        )
                    if stores:
                        state.shared.store(places, 2, values)
                    else:
                        halves.append(state.shared.load(places, 2).astype(np.uint32))
                if not stores:
                    fragment[chosen] = halves[0] | halves[1] << np.uint32(16)

        return step

    return build


WARPS: dict[str, Builder] = {
    "shfl": _shuffle,
    "redux": _reduce,
    "ldmatrix": _matrices(stores=False),
    "stmatrix": _matrices(stores=True),
}
