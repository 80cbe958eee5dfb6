"""Time and bytes of launches: how long programs must take by the latencies of their instructions, and what they move.

A result can be used its instruction's latency after the last of its operands. Within a basic block instructions are
issued in the best order, one a cycle and warp; a block begins when all of the one before it are issued, its branch
behind its predicate included, as the machine issues in order and the assembler seldom moves an instruction past a
branch. So a store is not waited for, but its data is. Loads of global memory stay behind the stores in front of them,
which might be to the same address. Barriers take the latest of their warps. Accesses of a program go one after the
other to and from the L2 cache at the rate of a multiprocessor, and fences wait for its stores.

What a program has loaded is in its L1 cache until it acquires something. What else it loads comes from the L2 cache, or
from memory if the tensor does not fit there. A word that another program of the launch has stored is loaded after that.

Not counted: how programs share a multiprocessor, conflicts of banks, misses of the instruction cache, and what the
assembler makes of the PTX.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verification.ptx import latencies
from verification.ptx.latencies import planned
from verification.ptx.program import Instruction
from verification.ptx.state import Mask, State, width_of

_SECTOR, _LINE = 32, 128
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}


@dataclass
class Bytes:
    """Bytes of global memory that a launch loads, or stores.

    Attributes:
        requested: by each instruction of a program, each byte once.
        by_program: by each program, each byte once.
        distinct: by the launch, each byte once.
    """

    requested: int = 0
    by_program: int = 0
    distinct: int = 0


def _merged(spans: list[np.ndarray]) -> np.ndarray:
    """Spans [n, 2] of addresses that overlap or touch become one."""
    every = np.concatenate([np.zeros((0, 2), np.int64), *spans])
    if not len(every):
        return every
    starts, ends = every[np.argsort(every[:, 0], kind="stable")].T
    ends = np.maximum.accumulate(ends)
    first = np.flatnonzero(np.concatenate([[True], starts[1:] > ends[:-1]]))
    return np.stack([starts[first], ends[np.append(first[1:], len(ends)) - 1]], 1)


@dataclass
class Launched:
    """A launch that was metered.

    Attributes:
        programs: of its grid.
        l2_bytes: larger tensors are not in the L2 cache.
        cycles: that each program takes which ran, by its number.
        path: of the longest one, by what the basic blocks on its way waited for last; longest first.
        instructions: that their warps issue.
        code: instructions of the kernel that the longest one comes to at least once.
        loaded, stored: bytes of those that ran; atomics that return something load.
        words: when what a program has stored at an address is there for the others.
    """

    kernel: str
    rank: int
    programs: int
    l2_bytes: int = latencies.L2_BYTES
    cycles: dict[int, float] = field(default_factory=dict)
    path: dict[str, float] = field(default_factory=dict)
    instructions: int = 0
    code: int = 0
    loaded: Bytes = field(default_factory=Bytes)
    stored: Bytes = field(default_factory=Bytes)
    words: dict[int, float] = field(default_factory=dict)

    def end(self, clocks: dict[int, Clock]) -> None:
        """Notes what all programs took."""
        self.cycles = {number: clock.cycles for number, clock in clocks.items()}
        longest = max(clocks.values(), key=lambda clock: clock.cycles)
        self.path, self.code = longest.path(), len(longest.code)
        self.instructions = sum(clock.instructions for clock in clocks.values())
        for what in ("loaded", "stored"):
            spans = [clock.spans[what] for clock in clocks.values()]
            merged = [_merged(each) for each in spans]
            requested, by_program, distinct = (
                sum(int((each[:, 1] - each[:, 0]).sum()) for each in parts)
                for parts in (itertools.chain(*spans), merged, [_merged(merged)])
            )
            setattr(self, what, Bytes(requested, by_program, distinct))


class Clock:
    """The time of one program, in cycles from its start.

    Attributes:
        instructions: that its warps have issued.
        code: where they are.
        spans: of addresses that its instructions have loaded and stored, [n, 2] each.
    """

    def __init__(self, state: State, launch: Launched) -> None:
        self._state, self._launch, self._plan = state, launch, planned(state.program)
        warps = state.size // 32
        self._every = np.arange(warps)
        self._ready = np.zeros((len(state.program.registers), warps))
        self._start = np.zeros(warps)  # of the basic block
        self._issued = np.zeros(warps)  # the last of its instructions, and which that is
        self._last = np.zeros(warps, np.int64)
        self._spent = np.zeros((len(state.program.code), warps))  # of the way until now, by those
        self._count = np.zeros(warps)  # of them
        self._stored = {space: np.zeros(warps) for space in ("global", "shared")}
        self._read = np.zeros(warps)  # when the last load of shared memory is done
        self._port = {"loaded": 0.0, "stored": 0.0}  # when the last access has passed it
        self._near: dict[int, float] = {}  # when a sector is in the L1 cache
        self._places: dict[int, Any] = {}
        self.instructions, self.code = 0, set[int]()
        self.spans: dict[str, list[np.ndarray]] = {"loaded": [], "stored": []}

    @property
    def cycles(self) -> float:
        """When all warps have ended and all stores are on their way."""
        return float(max(self._start.max(), self._port["stored"]))

    def path(self) -> dict[str, float]:
        """Cycles of the way of the last warp, by what basic blocks waited for last."""
        spent = self._spent[:, self._start.argmax()]
        order = [at for at in np.argsort(-spent, kind="stable").tolist() if spent[at]]
        return {self._state.program.code[at].site: float(spent[at]) for at in order}

    def barrier(self, threads: np.ndarray) -> None:
        """Lets the warps of these threads meet; each is at the end of a basic block."""
        warps = np.unique(threads // 32)
        here = np.maximum(self._start[warps], self._read[warps])  # as exchanges through shared memory were measured
        latest = warps[here.argmax()]
        self._start[warps], self._spent[:, warps] = self._start[latest], self._spent[:, [latest]]
        to = here.max() + latencies.BARRIER + latencies.BARRIER_WARP * len(warps)
        self._go_on(warps, to, self._last[latest])

    def before(self, at: int, instruction: Instruction, mask: Mask, taken: Mask) -> None:
        """Of an instruction that threads of `mask` have come to and those of `taken` are about to execute."""
        plan = self._plan[at]
        warps = self._every if mask is True else np.flatnonzero(mask.reshape(-1, 32).any(1))
        if plan.begins:
            self._close(warps)
        lanes = None if taken is True else taken.reshape(-1, 32)[warps]
        issue = self._start[warps] + self._count[warps]
        for source in plan.sources:
            issue = np.maximum(issue, self._ready[source, warps])
        active = np.ones(len(warps), bool) if lanes is None else lanes.any(1)
        done = issue + plan.cycles
        if plan.space and active.any():
            done = self._access(at, instruction, warps, active, taken, issue)
        if plan.fence and not plan.space:
            done = self._fenced(issue, plan.fence)
        self._last[warps] = np.where(issue >= self._issued[warps], at, self._last[warps])
        self._issued[warps] = np.maximum(self._issued[warps], issue)
        if plan.cycles or plan.space or plan.fence:
            self._count[warps] += 1
            self.instructions += len(warps)
            self.code.add(at)
        if lanes is None or lanes.all():
            self._ready[plan.targets[:, None], warps] = done
        else:  # a register keeps what is in it for who does not execute, and has waited for the predicate
            kept = np.maximum(self._ready[plan.targets[:, None], warps], done)
            self._ready[plan.targets[:, None], warps] = np.where(lanes.all(1), done, kept)
        if instruction.name in ("bra", "bar", "barrier", "ret", "exit"):
            self._close(warps)
            self._go_on(warps, self._start[warps] + latencies.BRANCH * (instruction.name == "bra"), at)
        elif plan.acquires or plan.fence:
            self._close(warps)
            self._go_on(warps, np.where(active, np.maximum(self._start[warps], done), self._start[warps]), at)
            self._near.clear()

    def _close(self, warps: np.ndarray) -> None:
        """Ends a basic block."""
        self._go_on(warps, np.maximum(self._start[warps] + self._count[warps], self._issued[warps]), self._last[warps])
        self._count[warps] = 0

    def _go_on(self, warps: np.ndarray, to: Any, at: Any) -> None:
        """Begins a basic block, later than the one before it because of the instruction at this place."""
        self._spent[at, warps] += to - self._start[warps]
        self._start[warps] = to

    def _fenced(self, issue: np.ndarray, scope: str) -> np.ndarray:
        return np.maximum(issue, self._port["stored"]) + latencies.FENCES[scope]

    def _access(
        self, at: int, instruction: Instruction, warps: np.ndarray, active: np.ndarray, taken: Mask, issue: np.ndarray
    ) -> np.ndarray:
        """When what is loaded can be used; `issue` becomes later for what is in the way."""
        plan, stored = self._plan[at], self._stored[self._plan[at].space]
        if not plan.stores or instruction.name == "atom":
            issue[active] = np.maximum(issue, stored[warps])[active]
        if plan.stores:
            stored[warps[active]] = np.maximum(stored[warps], issue)[active]
        if plan.space == "shared":
            if not plan.stores:
                self._read[warps[active]] = np.maximum(self._read[warps], issue + latencies.SHARED)[active]
            return issue + latencies.SHARED * active
        if at not in self._places:
            operand = 0 if instruction.name in ("st", "red") else 1
            count = next((_VECTORS[part] for part in instruction.opcode if part in _VECTORS), 1)
            self._places[at] = self._state.address(instruction.operands[operand]), count * width_of(instruction.type)
        place, size = self._places[at]
        threads = self._state.chosen(taken)
        addresses = place()[threads].astype(np.int64)
        distinct = np.unique(addresses)
        what = "stored" if instruction.name in ("st", "red") else "loaded"
        self.spans[what].append(np.stack([distinct, distinct + size], 1))
        done = issue.copy()
        for number in np.flatnonzero(active):
            own = np.unique(addresses[threads // 32 == warps[number]])
            done[number] = self._access_of_warp(plan, instruction.name, own, float(issue[number]))
        return done

    def _access_of_warp(self, plan: latencies.Planned, name: str, addresses: np.ndarray, issue: float) -> float:
        words = self._launch.words
        sectors = np.unique(addresses // _SECTOR)
        if name == "ld" and not plan.strong:
            missing = np.array([sector for sector in sectors.tolist() if sector not in self._near], np.int64)
            if len(missing):
                far = self._state.memory.sizes(missing * _SECTOR).max() > self._launch.l2_bytes
                arrived = self._pass("loaded", issue, missing) + (latencies.HBM if far else latencies.L2)
                self._near.update(dict.fromkeys(missing.tolist(), arrived))
            return max([issue + latencies.L1, *(self._near[sector] for sector in sectors.tolist())])
        at_l2 = self._fenced(np.array(issue), plan.fence) if plan.fence else issue
        if plan.strong and name != "st":
            at_l2 = max(at_l2, *(words.get(address, 0.0) for address in addresses.tolist()))
        if plan.stores:
            passed = self._pass("stored", at_l2, sectors)
            if plan.strong:
                step = latencies.FLIGHT if name == "st" else latencies.SAME_WORD
                words.update(dict.fromkeys(addresses.tolist(), float(passed) + step))
        return float(at_l2) + (0 if name == "st" else latencies.ATOMIC if plan.stores else latencies.STRONG_LOAD)

    def _pass(self, what: str, issue: float, sectors: np.ndarray) -> float:
        """When the last of these sectors has passed the port to the L2 cache."""
        lines = latencies.LINE * len(np.unique(sectors * _SECTOR // _LINE))
        cycles = max(lines, len(sectors) * _SECTOR / latencies.BYTES_A_CYCLE)
        self._port[what] = max(self._port[what], float(issue)) + cycles
        return self._port[what]
