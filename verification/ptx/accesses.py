"""Loads, stores, atomics, fences and asynchronous copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from verification.ptx.errors import PtxError
from verification.ptx.memory import UNSIGNED
from verification.ptx.program import Instruction
from verification.ptx.races import SCOPES
from verification.ptx.state import Mask, State, Step, dtype_of, elements, width_of

Builder = Callable[[State, Instruction], Step]
_ORDERS = ("relaxed", "acquire", "release", "acq_rel", "volatile", "weak")
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}
#: What changes how fast an access is, and not what it does.
_HINTS = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc")


class _Place:
    """The memory of an access, and how the detector is told of it."""

    def __init__(self, state: State, instruction: Instruction, known: tuple[str, ...] = ()) -> None:
        parts = instruction.opcode[1:-1]
        self.order = next((part for part in parts if part in _ORDERS), None)
        self.scope: str | None = next((part for part in parts if part in SCOPES), None)
        if self.order == "volatile":
            self.order, self.scope = "relaxed", "sys"  # as the manual has it
        if self.order == "weak":
            self.order = None
        if (self.order is None) != (self.scope is None) and instruction.name in ("ld", "st"):
            raise PtxError(f"order without a scope, or a scope without one: {instruction.text}")
        space = next((part.split("::")[0] for part in parts if part.split("::")[0] in ("global", "shared")), "global")
        self.shared = space == "shared"
        self.count = next((_VECTORS[part] for part in parts if part in _VECTORS), 1)
        allowed = {*_ORDERS, *SCOPES, *_VECTORS, *_HINTS, *known}
        for part in parts:
            if part not in allowed and not part.startswith(("L1::", "L2::", "global", "shared")):
                raise PtxError(f"not built: .{part} in {instruction.text}")
        self.width = width_of(instruction.type)
        self.memory: Any = state.shared if self.shared else state.memory
        self.state, self.instruction = state, instruction

    def check(self, addresses: np.ndarray) -> np.ndarray:
        """The offsets of accesses.

        Raises:
            PtxError: one is out of bounds or misaligned.
        """
        try:
            return self.memory.offsets(addresses, self.width * self.count, self.instruction.name)
        except PtxError as error:
            raise PtxError(f"{error}; {self.instruction.site}") from None

    def touch(self, threads: np.ndarray, offsets: np.ndarray, written: np.ndarray | None = None) -> None:
        """Tells the detector; `written` are the bytes of a write, uint8 [threads, bytes]."""
        state = self.state
        if state.races is not None and state.clocks is not None and len(threads):
            state.races.access(
                self._shadow(), state.clocks, threads, offsets, self.width, self.count, self.scope,
                self.instruction.site, written,
            )  # fmt: skip

    def acquire(self, threads: np.ndarray, offsets: np.ndarray) -> None:
        state = self.state
        if state.races is not None and state.clocks is not None and self.order is not None:
            for thread, offset in zip(threads.tolist(), offsets.tolist(), strict=True):
                state.races.acquire(self._shadow(), state.clocks, thread, offset, self.scope or "", self.order)

    def release(self, threads: np.ndarray, offsets: np.ndarray, keeps: bool) -> None:
        state = self.state
        if state.races is not None and state.clocks is not None and self.order is not None:
            for thread, offset in zip(threads.tolist(), offsets.tolist(), strict=True):
                state.races.release(self._shadow(), state.clocks, thread, offset, self.scope or "", self.order, keeps)

    def _shadow(self) -> Any:
        return self.state.shared_shadow if self.shared else self.state.races.memory  # type: ignore[union-attr]


def _load(state: State, instruction: Instruction) -> Step:
    if instruction.opcode[1] == "param":
        return _load_parameter(state, instruction)
    kind = instruction.type
    place, address = _Place(state, instruction), state.address(instruction.operands[1])
    targets = [state.target(name, kind) for name in elements(instruction.operands[0])]
    dtype = dtype_of(kind)

    def step(mask: Mask) -> None:
        threads = state.chosen(mask)
        addresses = address()[threads]
        offsets = place.check(addresses)
        place.touch(threads, offsets)
        for number, target in enumerate(targets):
            values = place.memory.load(addresses + addresses.dtype.type(number * place.width), place.width).view(dtype)
            if mask is True:
                np.copyto(target, values, casting="unsafe")
            else:
                target[threads] = values
        place.acquire(threads, offsets)

    return step


def _load_parameter(state: State, instruction: Instruction) -> Step:
    name = instruction.operands[1].strip("[] ")
    if name not in state.arguments:
        raise PtxError(f"no parameter {name!r}")
    bits = state.arguments[name] & ((1 << 64) - 1)
    narrow = UNSIGNED[width_of(instruction.type)](bits & ((1 << 8 * width_of(instruction.type)) - 1))
    value = np.broadcast_to(np.asarray(narrow).view(dtype_of(instruction.type)), state.size)
    return state.emit(instruction.operands[0], instruction.type, np.positive, value)


def _store(state: State, instruction: Instruction) -> Step:
    place, address = _Place(state, instruction), state.address(instruction.operands[0])
    raw = f"b{8 * place.width}"
    sources = [state.source(name, raw) for name in elements(instruction.operands[1])]

    def step(mask: Mask) -> None:
        threads = state.chosen(mask)
        addresses = address()[threads]
        offsets = place.check(addresses)
        values = [np.ascontiguousarray(source[threads]) for source in sources]
        place.touch(threads, offsets, np.stack(values, 1).view(np.uint8).reshape(len(threads), -1))
        for number, value in enumerate(values):
            place.memory.store(addresses + addresses.dtype.type(number * place.width), place.width, value)
        place.release(threads, offsets, keeps=False)

    return step


_OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "exch": lambda old, new: new, "cas": lambda old, compare, new: np.where(old == compare, new, old),
}  # fmt: skip


def _atomic(state: State, instruction: Instruction) -> Step:
    """`atom` and `red`: threads one after the other where they meet at an address."""
    returns = instruction.name == "atom"
    operation = next((part for part in instruction.opcode if part in _OPERATIONS), None)
    kind = instruction.type
    if operation is None or kind[0] not in "sub" or kind.startswith("bf"):
        raise PtxError(f"not built: {instruction.text}")
    place = _Place(state, instruction, (operation,))
    place.order, place.scope = place.order or "relaxed", place.scope or "gpu"
    function = _OPERATIONS[operation]
    target = state.target(instruction.operands[0], kind) if returns else None
    address = state.address(instruction.operands[1 if returns else 0])
    values = [state.source(operand, kind) for operand in instruction.operands[2 if returns else 1 :]]
    values = values[: 2 if operation == "cas" else 1]  # a cache policy may follow
    unsigned = UNSIGNED[place.width]

    def together(threads: np.ndarray, addresses: np.ndarray, offsets: np.ndarray) -> None:
        old = place.memory.load(addresses, place.width).view(dtype_of(kind))
        operands = [value[threads] for value in values]
        new = function(old, *operands)
        written = old == operands[0] if operation == "cas" else np.ones(len(threads), bool)
        place.touch(threads[~written], offsets[~written])
        place.touch(threads[written], offsets[written], new.view(np.uint8).reshape(len(threads), -1)[written])
        place.acquire(threads, offsets)
        place.memory.store(addresses, place.width, new.view(unsigned))
        place.release(threads[written], offsets[written], keeps=True)
        if target is not None:
            target[threads] = old

    def step(mask: Mask) -> None:
        threads = state.chosen(mask)
        addresses = address()[threads]
        offsets = place.check(addresses)
        if len(np.unique(offsets)) == len(offsets):
            together(threads, addresses, offsets)
            return
        for one in range(len(threads)):
            together(threads[one : one + 1], addresses[one : one + 1], offsets[one : one + 1])

    return step


def _fence(state: State, instruction: Instruction) -> Step:
    """`fence` and `membar`. Those between proxies order nothing here, where there is one."""
    if instruction.opcode[1] == "proxy":
        return lambda mask: None
    scope = {"gl": "gpu"}.get(instruction.opcode[-1], instruction.opcode[-1])
    if scope not in SCOPES or (instruction.name == "fence" and instruction.opcode[1] not in ("acq_rel", "sc")):
        raise PtxError(f"not built: {instruction.text}")

    def step(mask: Mask) -> None:
        if state.clocks is not None:
            state.clocks.fence(state.chosen(mask), scope)

    return step


def _copy(state: State, instruction: Instruction) -> Step:
    """`cp.async`: shared memory holds the copy when its group is waited for, and not before.

    Nor may it hold anything that is still read when the copy is issued: the detector hears of the write both times.
    """
    if instruction.opcode[:2] != ("cp", "async") or len(instruction.opcode) < 3:
        raise PtxError(f"not built: {instruction.text}")
    if instruction.opcode[2] == "commit_group":
        return lambda mask: _commit(state, mask)
    if instruction.opcode[2] in ("wait_group", "wait_all"):
        pending = int(instruction.operands[0]) if instruction.operands else 0
        return lambda mask: _wait(state, mask, pending, everything=not instruction.operands)
    if instruction.opcode[2] not in ("ca", "cg"):
        raise PtxError(f"not built: {instruction.text}")
    size = int(instruction.operands[2], 0)
    source_size = state.source(instruction.operands[3], "u32") if len(instruction.operands) > 3 else None
    to, from_ = state.address(instruction.operands[0]), state.address(instruction.operands[1])

    def access(shared: bool) -> _Place:
        kind = "shared" if shared else "global"
        return _Place(state, Instruction(None, False, ("cp", kind, "b8"), (), instruction.text, instruction.site))

    reads, writes = access(shared=False), access(shared=True)
    reads.width = writes.width = size

    def of_warp(threads: np.ndarray) -> None:
        places, sources = to()[threads], from_()[threads]
        taken = np.full(len(threads), size) if source_size is None else source_size[threads].astype(np.int64)
        if ((taken != 0) & (taken != size)).any():
            raise PtxError(f"not built: a part of {size} bytes in {instruction.site}")
        real = taken > 0
        shared_offsets = writes.check(places)
        reads.touch(threads[real], reads.check(sources[real]))

        def octets() -> np.ndarray:
            copied = np.zeros((len(threads), size), np.uint8)
            for octet in range(size):
                copied[real, octet] = state.memory.load(sources[real] + np.uint64(octet), 1)
            return copied

        writes.touch(threads, shared_offsets, octets())

        def arrive() -> None:
            copied = octets()
            for octet in range(size):
                state.shared.store(places + places.dtype.type(octet), 1, copied[:, octet])
            writes.touch(threads, shared_offsets, copied)

        state.copies[int(threads[0]) // 32][-1].append(arrive)

    def step(mask: Mask) -> None:
        for warp in _warps(state, mask):
            of_warp(warp)

    return step


def _warps(state: State, mask: Mask) -> list[np.ndarray]:
    """The threads that execute, warp by warp."""
    threads = state.chosen(mask)
    return np.split(threads, np.flatnonzero(np.diff(threads // 32)) + 1) if len(threads) else []


def _commit(state: State, mask: Mask) -> None:
    for warp in _warps(state, mask):
        state.copies[int(warp[0]) // 32].append([])


def _wait(state: State, mask: Mask, pending: int, everything: bool) -> None:
    for warp in _warps(state, mask):
        groups = state.copies[int(warp[0]) // 32]
        closed = len(groups) if everything else len(groups) - 1
        for group in groups[: max(0, closed - pending)]:
            for arrive in group:
                arrive()
        del groups[: max(0, closed - pending)]
        if not groups:
            groups.append([])


ACCESSES: dict[str, Builder] = {
    "ld": _load,
    "ldu": _load,
    "st": _store,
    "atom": _atomic,
    "red": _atomic,
    "fence": _fence,
    "membar": _fence,
    "cp": _copy,
}
