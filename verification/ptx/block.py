"""One program of a grid: its threads, which of them run next, and where they meet.

Threads that are at the lowest place in the code go on, together, and pass over what others are at: a warp whose threads
have taken different ways is whole again where these meet. With `order` the warps run one at a time, each up to a
barrier, in an order drawn anew there and now and then at an access: a warp that is late by a whole phase is as likely
as one that is early.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from verification.ptx.accesses import ACCESSES
from verification.ptx.bits import BITS
from verification.ptx.errors import PtxError
from verification.ptx.floats import FLOATS
from verification.ptx.integers import INTEGERS
from verification.ptx.meter import Clock
from verification.ptx.products import PRODUCTS
from verification.ptx.program import Instruction
from verification.ptx.state import Mask, State, Step
from verification.ptx.warps import WARPS

INSTRUCTIONS: dict[str, Callable[[State, Instruction], Step]] = FLOATS | INTEGERS | BITS | WARPS | PRODUCTS | ACCESSES
CONTROL = ("bra", "ret", "exit", "bar", "barrier")
_PREEMPTED = 1 / 16  # how often an access lets another warp run


class Block:
    """Runs one program of a grid.

    Attributes:
        executed: how often warps have executed each instruction of the code.
        clock: its time, where that is taken.
    """

    def __init__(self, state: State, order: random.Random | None = None, clock: Clock | None = None) -> None:
        self.state, self._order, self.clock = state, order, clock
        self._code = state.program.code
        self._steps: list[Step | None] = [None] * len(self._code)
        self.executed = [0] * len(self._code)
        size = state.size
        self._places = np.zeros(size, np.int64)
        self._barriers = np.full(size, -1)  # at which each thread waits
        self._barrier_sites = np.zeros(size, np.int64)
        self._counts_needed: dict[int, int] = {}
        self._arrived: Counter[int] = Counter()  # threads that did not wait, by barrier
        # The four warps of a `wgmma` go together.
        self._unit = 128 if any(instruction.name == "wgmma" for instruction in self._code) else 32
        self._priorities = list(range(size // self._unit))

    @property
    def counts(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for instruction, executed in zip(self._code, self.executed, strict=True):
            if executed:
                counts[instruction.name] += executed
        return counts

    def run(self) -> Iterator[None]:
        """Yields in front of everything that programs tell each other by, so that others may go on.

        Raises:
            PtxError: what the code does is not defined, or not built.
        """
        while (group := self._next_group()) is not None:
            yield from self._run_group(*group)

    # ---------------------------------------------------------------- which threads

    def _next_group(self) -> tuple[int, Mask, int] | None:
        """Where who goes on, and the next place at which somebody else is; None when all have ended."""
        end = len(self._code)
        running = (self._barriers < 0) & (self._places < end)
        if not running.any():
            if (self._barriers < 0).all():
                return None
            waiting = np.flatnonzero(self._barriers >= 0)
            raise PtxError(
                f"{len(waiting)} of {self.state.size} threads wait for ever at "
                f"{self._code[int(self._barrier_sites[waiting[0]])].site}"
            )
        if self._order is not None:
            ready = running.reshape(-1, self._unit).any(1)
            first = max(np.flatnonzero(ready).tolist(), key=self._priorities.__getitem__)
            running &= np.arange(len(running)) // self._unit == first
        places = self._places[running]
        at = int(places.min())
        others = places[places > at]
        group = running & (self._places == at)
        return at, True if group.all() else group, int(others.min()) if others.size else end

    def _shuffle(self) -> None:
        if self._order is not None:
            self._order.shuffle(self._priorities)

    # ---------------------------------------------------------------- what they do

    def _run_group(self, at: int, mask: Mask, stop: int) -> Iterator[None]:
        """Runs until the group parts, waits, ends, or comes to where others are."""
        code, end = self._code, len(self._code)
        warps = self.state.size // 32 if mask is True else int(mask.reshape(-1, 32).any(1).sum())
        while at < end:
            instruction = code[at]
            taken = self._taken(instruction, mask)
            if instruction.tells_others:
                yield
            self.executed[at] += warps
            if self.clock is not None:
                self.clock.before(at, instruction, mask, taken)
            name = instruction.name
            if name in CONTROL:
                if name in ("bar", "barrier") and instruction.opcode[1] != "warp":
                    self._set_places(at + 1, mask)
                    self._meet(at, instruction, taken)
                    return
                if name in ("bra", "ret", "exit"):
                    target = self.state.program.labels[instruction.operands[0]] if name == "bra" else end
                    if taken is not mask and not np.array_equal(taken, mask):
                        self._set_places(at + 1, mask)
                        self._set_places(target, taken)
                        return
                    if stop < end or target >= end:
                        self._set_places(target, mask)
                        return
                    at = target
                    continue
            if taken is True or taken.any():
                step = self._steps[at]
                if step is None:
                    step = self._steps[at] = self.decode(instruction)
                step(taken)
            at += 1
            if at >= stop:
                break
            if self._order is not None and name in ACCESSES and self._order.random() < _PREEMPTED:
                self._shuffle()
                break
        self._set_places(at, mask)

    def _taken(self, instruction: Instruction, mask: Mask) -> Mask:
        """Which threads of the group the predicate lets execute."""
        if instruction.predicate is None:
            return mask
        predicate = self.state.source(instruction.predicate, "pred")
        chosen = ~predicate if instruction.negated else predicate
        taken = chosen.copy() if mask is True else chosen & mask
        return mask if mask is True and taken.all() else taken

    def _set_places(self, at: int, mask: Mask) -> None:
        if mask is True:
            self._places[:] = at
        else:
            self._places[mask] = at

    def decode(self, instruction: Instruction) -> Step:
        """What executes an instruction for some threads.

        Raises:
            PtxError: it is not built.
        """
        if instruction.name in CONTROL:
            return lambda mask: self._meet_warps(instruction, mask)
        builder = INSTRUCTIONS.get(instruction.name)
        if builder is None:
            raise PtxError(f"not built: {instruction.site}")
        return builder(self.state, instruction)

    # ---------------------------------------------------------------- where they meet

    def _meet(self, at: int, instruction: Instruction, taken: Mask) -> None:
        """`bar.sync` and `bar.arrive`, by number and how many threads come, by default all."""
        state = self.state
        state.whole_warps(taken, instruction)
        mode = next((part for part in instruction.opcode if part in ("sync", "arrive")), None)
        if mode is None:
            raise PtxError(f"not built: {instruction.site}")
        operands = [int(state.source(operand, "u32")[0]) for operand in instruction.operands]
        number = operands[0] if operands else 0
        needed = operands[1] if len(operands) > 1 else state.size
        if self._counts_needed.setdefault(number, needed) != needed:
            raise PtxError(f"barrier {number} is for {self._counts_needed[number]} threads: {instruction.site}")
        threads = state.chosen(taken)
        if mode == "arrive":
            raise PtxError(f"not built: {instruction.site}")
        self._barriers[threads] = number
        self._barrier_sites[threads] = at
        waiting = np.flatnonzero(self._barriers == number)
        if len(waiting) > needed:
            raise PtxError(f"{len(waiting)} threads came to a barrier for {needed}: {instruction.site}")
        if len(waiting) < needed:
            return
        sites = np.unique(self._barrier_sites[waiting])
        if len(sites) > 1:
            places = " and ".join(self._code[int(site)].site for site in sites)
            raise PtxError(f"threads meet at different places: {places}")
        self._barriers[waiting] = -1
        del self._counts_needed[number]
        if state.clocks is not None:
            state.clocks.barrier(waiting)
        if self.clock is not None:
            self.clock.barrier(waiting)
        self._shuffle()

    def _meet_warps(self, instruction: Instruction, mask: Mask) -> None:
        """`bar.warp.sync`: the warps that execute it are whole, so each has met."""
        self.state.whole_warps(mask, instruction)
        if self.state.clocks is not None:
            for warp in self.state.chosen(mask).reshape(-1, 32):
                self.state.clocks.barrier(warp)
