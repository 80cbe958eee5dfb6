"""Products of int8 matrices on tensor cores: `mma.sync` of a warp; `wgmma` of four, of matrices in shared memory.

A `wgmma` is carried out when it is issued. The detector hears that it reads shared memory then, and again when it is
waited for, so that nothing may be overwritten in between.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from verification.ptx.errors import PtxError
from verification.ptx.program import Instruction
from verification.ptx.state import Mask, State, Step, elements

Builder = Callable[[State, Instruction], Step]
_ROWS = 64  # of the first matrix of a `wgmma`
_DEPTH = 32  # columns of the first and rows of the second matrix, of either instruction


def _warp_product(state: State, instruction: Instruction) -> Step:
    """D [16, 8] = A [16, 32] B [32, 8] + C, int32, each warp its own.

    Lane l has, with g = l / 4 and t = l % 4: of A rows g and g + 8, columns 4 t ... 4 t + 3 and those 16 further; of B
    column g, rows likewise; of C and D rows g and g + 8, columns 2 t and 2 t + 1.
    """
    if [part for part in instruction.opcode[3:] if part != "satfinite"] != "m16n8k32 row col s32 s8 s8 s32".split():
        raise PtxError(f"not built: {instruction.text}")
    targets = [state.target(name, "s32") for name in elements(instruction.operands[0])]
    of_a, of_b, of_c = ([state.source(name, "u32") for name in elements(each)] for each in instruction.operands[1:4])
    saturates = "satfinite" in instruction.opcode
    warps = state.size // 32
    g, t = np.arange(32) // 4, np.arange(32) % 4

    def octets(register: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(register).view(np.int8).reshape(warps, 32, 4)

    def step(mask: Mask) -> None:
        state.whole_warps(mask, instruction)
        a, b = np.zeros((warps, 16, _DEPTH)), np.zeros((warps, _DEPTH, 8))  # float64, in which sums are exact
        c = np.zeros((warps, 16, 8), np.int64)
        for column in range(4):
            for number, register in enumerate(of_a):
                a[:, g + 8 * (number % 2), 4 * t + 16 * (number // 2) + column] = octets(register)[:, :, column]
            for number, register in enumerate(of_b):
                b[:, 4 * t + 16 * number + column, g] = octets(register)[:, :, column]
        for number, register in enumerate(of_c):
            c[:, g + 8 * (number // 2), 2 * t + number % 2] = register.view(np.int32).reshape(warps, 32)
        total = (a @ b).astype(np.int64) + c
        if saturates:
            total = total.clip(-(2**31), 2**31 - 1)
        for number, target in enumerate(targets):
            np.copyto(target, total[:, g + 8 * (number // 2), 2 * t + number % 2].ravel().astype(np.int32), where=mask)

    return step


def _places(descriptor: int, rows: int) -> np.ndarray:
    """Where the bytes of a matrix [rows, 32] lie in shared memory, by its descriptor: rows run along bytes.

    Eight rows are together. Without swizzling so are 16 bytes of each, a core matrix; with it, 32, 64 or 128 bytes,
    whose 16-byte parts are exchanged by the bits of the address above.
    """
    start, leading, stride = ((descriptor >> shift & 0x3FFF) * 16 for shift in (0, 16, 32))
    if descriptor >> 49 & 7:
        raise PtxError("not built: a base offset in the descriptor of a matrix")
    swizzle = {0: 0, 1: 3, 2: 2, 3: 1}[descriptor >> 62 & 3]  # bits that are exchanged
    row, column = np.arange(rows)[:, None], np.arange(_DEPTH)[None, :]
    if not swizzle:
        return start + row // 8 * stride + column // 16 * leading + row % 8 * 16 + column % 16
    address = start + row // 8 * stride + row % 8 * (16 << swizzle) + column
    return address ^ (address >> 7 & (1 << swizzle) - 1) << 4


def _group_product(state: State, instruction: Instruction) -> Step:
    """D [64, n] = A [64, 32] B [32, n], plus D if the predicate says so; warp w of a group of four has rows 16 w ..."""
    shape, kinds = instruction.opcode[4], instruction.opcode[5:]
    if kinds != ("s32", "s8", "s8") or not shape.startswith("m64n") or not shape.endswith("k32"):
        raise PtxError(f"not built: {instruction.text}")
    columns = int(shape[4:-3])
    targets = [state.target(name, "s32") for name in elements(instruction.operands[0])]
    descriptors = [state.source(operand, "u64") for operand in instruction.operands[1:3]]
    accumulate = state.source(instruction.operands[3], "pred")
    lane = np.arange(128) % 32
    row, column = np.arange(128) // 32 * 16 + lane // 4, lane % 4 * 2

    def matrix(places: np.ndarray, first: int) -> np.ndarray:
        state.shared.offsets(places.ravel(), 1, instruction.name)
        _read(state, places, first, instruction)
        state.matrices_read.append((first, places, instruction))
        return state.shared.load(places.ravel(), 1).view(np.int8).reshape(places.shape).astype(np.float64)

    def step(mask: Mask) -> None:
        if mask is not True and (mask.reshape(-1, 128).any(1) != mask.reshape(-1, 128).all(1)).any():
            raise PtxError(f"not four whole warps came to {instruction.site}")
        for first in state.chosen(mask)[::128].tolist():
            a = matrix(_places(int(descriptors[0][first]), _ROWS), first)
            b = matrix(_places(int(descriptors[1][first]), columns), first)
            product = (a @ b.T).astype(np.int64)
            for number, target in enumerate(targets):
                part = product[row + 8 * (number // 2 % 2), column + 8 * (number // 4) + number % 2]
                here = slice(first, first + 128)
                total = part + np.where(accumulate[here], target[here].astype(np.int64), 0)
                target[here] = total.astype(np.int32)  # it wraps

    return step


def _read(state: State, places: np.ndarray, first: int, instruction: Instruction) -> None:
    """Tells the detector that the first thread of a group reads a matrix."""
    if state.races is not None and state.clocks is not None:
        offsets = np.unique(places.ravel() // 16 * 16)
        threads = np.full(len(offsets), first)
        state.races.access(
            state.shared_shadow, state.clocks, threads, offsets, 16, 1, None, instruction.site, None
        )  # fmt: skip


def _group(state: State, instruction: Instruction) -> Step:
    """`wgmma`: `.fence` and `.commit_group` order what is carried out in order here; waits are for all."""
    what = instruction.opcode[1]
    if what == "mma_async":
        return _group_product(state, instruction)
    if what in ("fence", "commit_group"):
        return lambda mask: state.whole_warps(mask, instruction)
    if what != "wait_group" or instruction.operands != ("0",):
        raise PtxError(f"not built: {instruction.text}")

    def wait(mask: Mask) -> None:
        threads = set(state.chosen(mask).tolist())
        for first, places, product in state.matrices_read:
            if first in threads:
                _read(state, places, first, product)
        state.matrices_read[:] = [each for each in state.matrices_read if each[0] not in threads]

    return wait


PRODUCTS: dict[str, Builder] = {"mma": _warp_product, "wgmma": _group}
