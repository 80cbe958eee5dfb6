"""How many cycles instructions of an H100 take until what depends on them can be issued, and what they read and write.

Measured: `benchmarks/results/h100/latency.txt`, in whose loads the sum of an address is included. Published: an
addition takes four cycles, by Abdelkhalik et al., "Demystifying the Nvidia Ampere Architecture through
Microbenchmarking and Instruction-level Analysis" (arXiv:2208.11174). All others are assumed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from verification.ptx.errors import PtxError
from verification.ptx.program import Instruction, Program

# Measured.
L1, L2, HBM = 40, 385, 697  # L2: between those of 4 and of 24 MiB
SHARED = 28  # less the two instructions for the address
L2_BYTES = 50 << 20
STRONG_LOAD = 322  # relaxed or acquire, at any scope
ATOMIC = 532
FENCES = {"cta": 20, "gpu": 664, "sys": 1413}  # the first is assumed
LINE = 1.15  # of each line of 128 bytes that a program stores to; it follows from fences behind 1 and 256 stores
BARRIER, BARRIER_WARP = 12, 2  # of any barrier, and more for each warp of it

# Assumed.
BYTES_A_CYCLE = 64  # between a multiprocessor and the L2 cache, each way
FLIGHT = 200  # until a flag that is stored can be loaded by another program
SAME_WORD = 4  # from one atomic on a word to the next
BRANCH = 8

_WORD = 4  # published; taken for all integers, logic and floats of 32 bits
_PREDICATE = 13  # until a predicate can be used
_BY_NAME = {
    "setp": _PREDICATE, "shfl": 24, "redux": 24, "popc": 14, "nanosleep": 40,
}  # fmt: skip
_FREE = ("mov", "cvta", "ret", "exit")  # registers are renamed, parameters are operands
_WITHOUT_TARGET = ("st", "red", "fence", "membar", "bar", "barrier", "bra", "ret", "exit", "nanosleep", "stmatrix")
_UNKNOWN = ("cp", "mma", "wgmma")
_ACCESSES = ("ld", "ldu", "st", "atom", "red", "ldmatrix", "stmatrix")
_REGISTER = re.compile(r"%?[A-Za-z_$][\w$@]*")


def cycles_of(instruction: Instruction) -> float:
    """Of an instruction that is not an access, until its result can be used; 0 where machine code has none for it.

    Raises:
        PtxError: it is not known.
    """
    name, kind, opcode = instruction.name, instruction.type, instruction.opcode
    if name in _UNKNOWN:
        raise PtxError(f"no latency is known of {instruction.site}")
    if name in _FREE:
        return 20 if "%tid" in instruction.text or "%ctaid" in instruction.text or "timer" in instruction.text else 0
    if name in _BY_NAME:
        return _BY_NAME[name]
    if kind == "pred":
        return _PREDICATE
    if name == "cvt":
        return _of_conversion(opcode)
    if name in ("div", "rem"):
        return {"f32": 120, "s64": 500, "u64": 500}.get(kind, 150)
    if name in ("mul", "mad") and kind in ("s64", "u64"):
        return 14
    # Two instructions for 64 bits, the second of which takes what the first carries.
    return 2 * _WORD if kind in ("s64", "u64", "b64") else _WORD


def _of_conversion(opcode: tuple[str, ...]) -> float:
    to, from_ = opcode[-2:]
    floats = [kind for kind in (to, from_) if kind[0] not in "sub" or kind.startswith("bf")]
    if not floats:
        return _WORD if from_[0] == "s" and int(to[1:]) > int(from_[1:]) else 0  # all others take a register's part
    return 14 if len(floats) == 1 else 6


@dataclass(frozen=True)
class Planned:
    """What times have to know of an instruction.

    Attributes:
        sources, targets: registers, by number; the predicate is a source.
        cycles: see `cycles_of`; 0 of accesses.
        begins: branches lead here.
        space: "global" or "shared", of an access to them; else "".
        stores, strong: of an access: it stores or is an atomic; other programs may wait for it.
        fence: scope of what orders the accesses before it, or None.
        acquires: accesses behind it wait for it.
    """

    sources: np.ndarray
    targets: np.ndarray
    cycles: float
    begins: bool
    space: str
    stores: bool
    strong: bool
    fence: str | None
    acquires: bool


@lru_cache(maxsize=64)
def planned(program: Program) -> tuple[Planned, ...]:
    """Of each instruction of a program."""
    numbers = {name: number for number, name in enumerate(program.registers)}
    targets = set(program.labels[each.operands[0]] for each in program.code if each.name == "bra")

    def registers(operands: tuple[str, ...]) -> np.ndarray:
        names = [name for operand in operands for name in _REGISTER.findall(operand)]
        return np.array([numbers[name] for name in names if name in numbers], np.int64)

    def of(at: int, instruction: Instruction) -> Planned:
        name, opcode = instruction.name, instruction.opcode
        access = name in _ACCESSES and opcode[1] != "param"
        scope = next((part for part in opcode if part in ("cta", "gpu", "sys")), "gpu")
        is_fence = name in ("fence", "membar") and opcode[1] != "proxy"
        ordering = is_fence or not {"release", "acq_rel"}.isdisjoint(opcode)
        written = 0 if name in _WITHOUT_TARGET else 1
        return Planned(
            registers((*instruction.operands[written:], instruction.predicate or "")),
            registers(instruction.operands[:written]),
            0 if name in (*_ACCESSES, "fence", "membar") else cycles_of(instruction),
            at in targets,
            "" if not access else "shared" if any(part.startswith("shared") for part in opcode) else "global",
            access and name in ("st", "atom", "red", "stmatrix"),
            access and instruction.tells_others,
            {"gl": "gpu"}.get(opcode[-1], scope) if ordering else None,
            is_fence or "acquire" in opcode or "acq_rel" in opcode,
        )

    return tuple(of(at, instruction) for at, instruction in enumerate(program.code))
