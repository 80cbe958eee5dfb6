"""The machine code of an NVIDIA GPU: its instructions, its loops, and the longest way through them.

Nothing here runs. A kernel's figures are of the *longest way* through the code that is executed once for each row: of
two branches the longer one, and a loop within it once. Slow paths that are called (of a division, for numbers that are
not normal) count as the call alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?(.*?)\s*;", re.MULTILINE)
_TARGET = re.compile(r"\b0x([0-9a-f]+)\s*$")
_ENDS = ("EXIT", "RET", "BRX", "JMX", "KILL", "BPT")


@dataclass(frozen=True)
class Instruction:
    """One instruction: where it is, its predicate if it has one, its name with modifiers, and its operands."""

    address: int
    predicate: str
    name: str
    operands: str

    @property
    def opcode(self) -> str:
        """The name without modifiers."""
        return self.name.split(".")[0]

    @cached_property
    def access_bytes(self) -> int:
        """What a thread of it reads or writes in memory, bytes; 0 where it is no access."""
        if self.opcode not in ("LDG", "LD", "STG", "ST", "LDS", "STS"):
            return 0
        widths = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
        return next((widths[part] for part in self.name.split(".")[1:] if part in widths), 4)


def instructions_of(text: str) -> list[Instruction]:
    """The instructions that `cuobjdump -sass` prints of one kernel, in order."""
    found = []
    for address, predicate, body in _LINE.findall(text):
        name, _, operands = body.partition(" ")
        found.append(Instruction(int(address, 16), predicate, name, operands.strip()))
    return found


def _reverse_postorder(successors: list[list[int]], start: int = 0) -> list[int]:
    """What is reached from `start`; but for edges that close a circle, each before its successors."""
    order, found, stack = [], {start}, [(start, 0)]
    while stack:
        node, edge = stack.pop()
        if edge < len(successors[node]):
            stack.append((node, edge + 1))
            if (successor := successors[node][edge]) not in found:
                found.add(successor)
                stack.append((successor, 0))
        else:
            order.append(node)
    return order[::-1]


class Code:
    """A kernel's control flow: instructions are known by their number."""

    def __init__(self, instructions: list[Instruction]) -> None:
        self.instructions = instructions
        self._at = {instruction.address: number for number, instruction in enumerate(instructions)}
        self.successors = [self._successors(number) for number in range(len(instructions))]
        for number, instruction in enumerate(instructions):
            if instruction.opcode == "CALL" and (target := self._target(number)) is not None:
                reached = _reverse_postorder(self.successors, target)
                # The assembler for sm_80 leaves loops by calls that never return.
                if not any(instructions[node].opcode == "RET" for node in reached):
                    self.successors[number] = [target, *(self.successors[number] if instruction.predicate else [])]
        self._order = _reverse_postorder(self.successors)

    def _target(self, number: int) -> int | None:
        target = _TARGET.search(self.instructions[number].operands)
        return self._at[int(target[1], 16)] if target else None

    def _successors(self, number: int) -> list[int]:
        instruction = self.instructions[number]
        following = [number + 1] if number + 1 < len(self.instructions) else []
        if instruction.opcode in _ENDS:
            return following if instruction.predicate else []
        if instruction.opcode != "BRA" or instruction.name.startswith(("BRA.DIV", "BRA.CONV")):
            return following  # what diverged threads do is left out
        target = self._target(number)
        conditional = instruction.predicate or "P" in instruction.operands
        return ([] if target is None else [target]) + (following if conditional else [])

    @cached_property
    def loops(self) -> dict[int, set[int]]:
        """The instructions of each loop, by its first one's number: natural loops, those of one head merged."""
        position = {node: place for place, node in enumerate(self._order)}
        dominator = {0: 0}
        predecessors: dict[int, list[int]] = {node: [] for node in self._order}
        for node in self._order:
            for successor in self.successors[node]:
                predecessors[successor].append(node)
        changed = True
        while changed:
            changed = False
            for node in self._order[1:]:
                known = [p for p in predecessors[node] if p in dominator]
                nearest = known[0]
                for other in known[1:]:
                    while nearest != other:
                        if position[nearest] > position[other]:
                            nearest = dominator[nearest]
                        else:
                            other = dominator[other]
                if dominator.get(node) != nearest:
                    dominator[node], changed = nearest, True
        found: dict[int, set[int]] = {}
        for node in self._order:
            for head in self.successors[node]:
                above = node
                while position[above] > position[head]:
                    above = dominator[above]
                if above == head:
                    body = found.setdefault(head, {head})
                    pending = [node]
                    while pending:
                        if (inner := pending.pop()) not in body:
                            body.add(inner)
                            pending += predecessors[inner]
        return found

    @cached_property
    def _onwards(self) -> list[list[int]]:
        """The successors of each instruction; but from where a loop repeats, the way goes on behind it."""
        exits = {
            head: [successor for node in body for successor in self.successors[node] if successor not in body]
            for head, body in self.loops.items()
        }
        return [
            [
                way
                for successor in successors
                for way in (exits[successor] if self._repeats(node, successor) else [successor])
            ]
            for node, successors in enumerate(self.successors)
        ]

    def _repeats(self, node: int, successor: int) -> bool:
        return successor in self.loops and node in self.loops[successor]

    def longest_way(self, head: int = 0, within: set[int] | None = None) -> list[Instruction]:
        """The instructions of the longest way from `head` on, each loop once; `within` a loop, to where it repeats."""
        following: dict[int, int] = {}
        length: dict[int, int] = {}
        onwards = [[way for way in ways if way != head and (within is None or way in within)] for ways in self._onwards]
        for node in reversed(_reverse_postorder(onwards, head)):
            best = max(onwards[node], key=lambda way: length[way], default=None)
            length[node] = (self.instructions[node].opcode != "NOP") + (0 if best is None else length[best])
            if best is not None:
                following[node] = best
        way, node = [], head
        while True:
            if self.instructions[node].opcode != "NOP":
                way.append(self.instructions[node])
            if node not in following:
                return way
            node = following[node]

    def row_loop(self) -> int | None:
        """The head of the loop that a program runs once for each row; None where there is no loop.

        Of the loop with the longest way, the innermost part that still moves as many bytes.
        """
        if not self.loops:
            return None
        ways = {head: self.longest_way(head, body) for head, body in self.loops.items()}
        best = max(ways, key=lambda head: (len(ways[head]), len(self.loops[head])))
        moved = bytes_moved(ways[best])
        for head, body in sorted(self.loops.items(), key=lambda item: -len(item[1])):
            if body < self.loops[best] and moved and bytes_moved(ways[head]) >= 0.95 * moved:
                best = head
        return best


def bytes_moved(way: Iterable[Instruction]) -> int:
    """What a thread reads and writes of global memory along a way, bytes."""
    return sum(i.access_bytes for i in way if i.opcode in ("LDG", "LD", "STG", "ST"))
