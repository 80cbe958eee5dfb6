"""What the instructions of one program of a grid work on: registers, operands, memories."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from verification.ptx.errors import PtxError
from verification.ptx.memory import UNSIGNED, GlobalMemory, SharedMemory
from verification.ptx.program import Instruction, Program
from verification.ptx.races import Races, Threads
from verification.ptx.shadow import Shadow

Mask = Any  # which threads execute: bool [threads], or True for all
Step = Callable[[Mask], None]
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_GARBAGE = 0xA5  # that registers begin with
_BYTES = {"f16x2": 4, "bf16x2": 4, "f16": 2, "bf16": 2, "tf32": 4, "e4m3x2": 2, "e5m2x2": 2}
_ADDRESS = re.compile(r"\[\s*([%$\w.@]+)\s*(?:\+\s*(-?\w+))?\s*\]")


@cache
def width_of(kind: str) -> int:
    """Bytes of a type."""
    return _BYTES.get(kind) or int(kind[1:]) // 8


@cache
def dtype_of(kind: str) -> Any:
    """The numpy dtype of a type; packed and 16-bit floats are unsigned integers."""
    if kind == "pred":
        return np.bool_
    if kind == "f32":
        return np.float32
    return (SIGNED if kind[0] == "s" else UNSIGNED)[width_of(kind)]


def elements(operand: str) -> list[str]:
    """Of a vector in braces; an operand without is one."""
    return [part.strip() for part in operand.strip().strip("{}").split(",")]


class State:
    """Registers and memories of the threads of one program; arrays have an element a thread.

    Args:
        arguments: of the kernel, by parameter.
        place, grid: which program, of how many, in x, y and z.
        clock: reads the global timer, in nanoseconds.
    """

    def __init__(
        self, program: Program, arguments: dict[str, int], place: tuple[int, ...], grid: tuple[int, ...],
        memory: GlobalMemory, shared_bytes: int, races: Races | None, clocks: Threads | None, clock: Callable[[], int],
    ) -> None:  # fmt: skip
        self.program, self.memory, self.races, self.clocks, self.clock = program, memory, races, clocks, clock
        self.shared = SharedMemory(program.static_shared + shared_bytes, 0)
        self.shared_shadow = Shadow(len(self.shared.octets))
        size = self.size = program.threads
        self.numbers = np.arange(size)
        self.arguments = arguments
        # Asynchronous copies that nobody has waited for, by group, of each warp; the last group is still open.
        self.copies: list[list[list[Callable[[], None]]]] = [[[]] for _ in range(program.threads // 32)]
        # Of products that nobody has waited for: a thread, the places, and the instruction.
        self.matrices_read: list[tuple[int, np.ndarray, Instruction]] = []
        self._registers: dict[str, np.ndarray] = {}
        for name, kind in program.registers.items():
            width = 1 if kind == "pred" else width_of(kind)
            octets = np.full(size * width, 1 if kind == "pred" else _GARBAGE, np.uint8)
            self._registers[name] = octets.view(np.bool_ if kind == "pred" else UNSIGNED[width])
        self._special: dict[str, Any] = {"%tid.x": self.numbers, "%ntid.x": size, "%laneid": self.numbers % 32}
        self._special |= {"%tid.y": 0, "%tid.z": 0, "%ntid.y": 1, "%ntid.z": 1, "%warpid": self.numbers // 32}
        for axis, number, count in zip("xyz", place, grid, strict=True):
            self._special |= {f"%ctaid.{axis}": number, f"%nctaid.{axis}": count}

    # ---------------------------------------------------------------- operands

    def source(self, operand: str, kind: str) -> np.ndarray:
        """A view of a register, which follows it, or a constant, as `kind`; of a wider register its low part."""
        wanted = np.dtype(dtype_of(kind))
        register = self._registers.get(operand)
        if register is not None:
            if kind == "pred" or register.dtype == np.bool_:
                if kind != "pred" or register.dtype != np.bool_:
                    raise PtxError(f"{operand} is not of type {kind}")
                return register
            if register.itemsize < wanted.itemsize:
                raise PtxError(f"{operand} is narrower than {kind}")
            ratio = register.itemsize // wanted.itemsize
            return register.view(UNSIGNED[wanted.itemsize])[::ratio].view(wanted)
        if operand in self._special:
            return np.broadcast_to(np.asarray(self._special[operand]).astype(wanted), self.size)
        if operand in self.program.shared:
            return np.broadcast_to(np.asarray(self.program.shared[operand]).astype(wanted), self.size)
        return np.broadcast_to(self._constant(operand, wanted), self.size)

    def _constant(self, operand: str, wanted: np.dtype) -> np.ndarray:
        if operand[:2] in ("0f", "0F", "0d", "0D"):
            bits = np.array([int(operand[2:], 16)], np.uint32 if operand[1] in "fF" else np.uint64)
            value = bits.view(np.float32 if operand[1] in "fF" else np.float64)
            if wanted.kind == "f":
                return value.astype(wanted)[0]
            return bits.astype(wanted)[0]
        try:
            value_ = int(operand.rstrip("U"), 0)
        except ValueError:
            raise PtxError(f"no operand {operand!r} is known") from None
        if wanted == np.bool_:
            return np.asarray(bool(value_))
        if wanted.kind == "f":
            return np.asarray(float(value_), wanted)
        unsigned = UNSIGNED[wanted.itemsize](value_ & ((1 << 8 * wanted.itemsize) - 1))
        return np.asarray(unsigned).view(wanted)

    def target(self, operand: str, kind: str) -> np.ndarray:
        """A register to be written as `kind`: what is copied there is extended to a wider register's width."""
        if operand == "_":
            return np.zeros(self.size, dtype_of(kind))
        register = self._registers.get(operand)
        if register is None:
            raise PtxError(f"no register {operand!r} is known")
        if (register.dtype == np.bool_) != (kind == "pred"):
            raise PtxError(f"{operand} is not of type {kind}")
        wanted = np.dtype(dtype_of(kind))
        if kind == "pred" or register.itemsize == wanted.itemsize:
            return register.view(wanted)
        if register.itemsize < wanted.itemsize:
            raise PtxError(f"{operand} is narrower than {kind}")
        return register.view((SIGNED if wanted.kind == "i" else UNSIGNED)[register.itemsize])

    def address(self, operand: str) -> Callable[[], np.ndarray]:
        """What reads an address in brackets."""
        match = _ADDRESS.fullmatch(operand)
        if match is None:
            raise PtxError(f"cannot read the address {operand!r}")
        offset = int(match[2] or "0", 0)
        if match[1] in self._registers:
            base = self._registers[match[1]]
        else:
            base = self.source(match[1], "u64")
        if offset == 0:
            return lambda: base
        added = base.dtype.type(offset & ((1 << 8 * base.itemsize) - 1))
        return lambda: base + added

    # ---------------------------------------------------------------- steps

    def emit(self, destination: str, kind: str, function: Callable[..., np.ndarray], *sources: np.ndarray) -> Step:
        """A step that puts `function(*sources)` into a register."""
        target = self.target(destination, kind)
        if isinstance(function, np.ufunc) and target.dtype == np.dtype(dtype_of(kind)):
            ufunc = function

            def step(mask: Mask) -> None:
                ufunc(*sources, out=target, where=mask, casting="unsafe")

        else:

            def step(mask: Mask) -> None:
                np.copyto(target, function(*sources), where=mask, casting="unsafe")

        return step

    def chosen(self, mask: Mask) -> np.ndarray:
        """The numbers of the threads that execute."""
        return self.numbers if mask is True else np.flatnonzero(mask)

    def whole_warps(self, mask: Mask, instruction: Instruction) -> None:
        """
        Raises:
            PtxError: some threads of a warp are elsewhere.
        """
        if mask is not True:
            warps = mask.reshape(-1, 32)
            if (warps.any(1) != warps.all(1)).any():
                raise PtxError(f"not all threads of a warp came to {instruction.site}")
