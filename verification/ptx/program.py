"""PTX as text to a list of instructions, of the subset that Triton writes: one kernel a file, no functions.

Inline assembly is part of it, with registers that its braces declare for themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from verification.ptx.errors import PtxError

_LABEL = re.compile(r"(\$?[A-Za-z_][\w$]*):\s*")
_INSTRUCTION = re.compile(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
_NAME = re.compile(r"%?[A-Za-z_$][\w$]*")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        predicate: the register that says which threads take part, or None; `negated`, which do not.
        opcode: the parts between dots, such as ("add", "rn", "f32").
        operands: as they are written, braces and brackets included.
        text: for messages.
        site: kernel, place in it and text, for messages.
    """

    predicate: str | None
    negated: bool
    opcode: tuple[str, ...]
    operands: tuple[str, ...]
    text: str
    site: str

    @cached_property
    def name(self) -> str:
        return self.opcode[0]

    @cached_property
    def type(self) -> str:
        return self.opcode[-1]

    @cached_property
    def tells_others(self) -> bool:
        """Whether other programs may wait for it, or it for them."""
        strong = {"relaxed", "acquire", "release", "volatile"}
        return self.name in ("atom", "red", "fence", "membar") or (
            self.name in ("ld", "st") and not strong.isdisjoint(self.opcode)
        )


@dataclass(frozen=True, eq=False)
class Program:
    """One kernel.

    Attributes:
        name: the kernel's.
        parameters: name and bytes of each, in order.
        threads: of a program of the grid; 1024 where the PTX says nothing.
        registers: type of each, "pred", or as "b32"; those of inner braces have names with an "@".
        shared: byte offset of each shared variable, and where what the launch adds begins, by its name.
        code: the instructions; `labels` are places in it.
    """

    name: str
    parameters: tuple[tuple[str, int], ...]
    threads: int
    registers: dict[str, str]
    shared: dict[str, int]
    static_shared: int
    code: tuple[Instruction, ...]
    labels: dict[str, int]


class _Scopes:
    """Registers by name, inner braces first."""

    def __init__(self) -> None:
        self.registers: dict[str, str] = {}
        self._names: list[dict[str, str]] = [{}]
        self._opened = 0

    def open(self) -> None:
        self._opened += 1
        self._names.append({})

    def close(self) -> None:
        self._names.pop()

    def declare(self, kind: str, names: str) -> None:
        for name in (name.strip() for name in names.split(",")):
            many = re.fullmatch(r"(%?\w+)<(\d+)>", name)
            for one in [f"{many[1]}{number}" for number in range(int(many[2]))] if many else [name]:
                unique = one if len(self._names) == 1 else f"{one}@{self._opened}"
                self._names[-1][one] = unique
                self.registers[unique] = kind

    def resolve(self, operand: str) -> str:
        """The operand with inner registers under their unique names."""
        if len(self._names) == 1:
            return operand
        known = {name: unique for scope in self._names for name, unique in scope.items()}
        return _NAME.sub(lambda match: known.get(match[0], match[0]), operand)


def _operands(text: str) -> list[str]:
    """What commas separate outside of braces and brackets."""
    found, depth = [""], 0
    for part in text.split(","):
        found[-1] += part
        depth += sum(part.count(each) for each in "{[(") - sum(part.count(each) for each in "}])")
        if depth:
            found[-1] += ","
        else:
            found.append("")
    return [operand.strip() for operand in found[:-1] if operand.strip()]


def _statements(body: str) -> Iterator[str]:
    """What semicolons end, labels, and braces that open and close a scope."""
    for statement in body.split(";"):
        statement = statement.strip()
        while statement:
            label = _LABEL.match(statement)
            end = label.end() if label else 1 if statement[0] in "{}" else len(statement)
            yield statement[:end].strip()
            statement = statement[end:].strip()


def _shared(head: str) -> tuple[dict[str, int], int]:
    """Where shared variables lie: those with a size one after the other, those without behind them."""
    offsets, size, dynamic = {}, 0, []
    for align, width, name, count in re.findall(r"\.shared\s+\.align\s+(\d+)\s+\.b(\d+)\s+(\w+)\[(\d*)\]", head):
        if not count:
            dynamic.append(name)
            continue
        size = -(-size // int(align)) * int(align)
        offsets[name] = size
        size += int(count) * int(width) // 8
    size = -(-size // 16) * 16
    return offsets | dict.fromkeys(dynamic, size), size


@lru_cache(maxsize=512)
def parse(ptx: str) -> Program:
    """The program in a PTX file that has one kernel.

    Raises:
        PtxError: a statement that is not understood.
    """
    # A `.loc` and a `.pragma` have no semicolon, or nothing to say.
    ptx = re.sub(r"//[^\n]*|/\*.*?\*/|^\s*\.(?:loc|file|pragma)\b[^\n]*", "", ptx, flags=re.S | re.M)
    entry = re.search(r"\.entry\s+(\w+)\s*\(", ptx)
    if entry is None:
        raise PtxError("no .entry in this PTX")
    close = ptx.index(")", entry.end())
    parameters = tuple(
        (name, int(bits) // 8)
        for bits, name in re.findall(r"\.param\s+\.[a-z](\d+)[^,]*?(\w+)\s*(?:,|$)", ptx[entry.end() : close].strip())
    )
    start = ptx.index("{", close)
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", ptx[close:start])
    end = ptx.find(".section", start)
    body = ptx[start + 1 : ptx.rindex("}", start, end if end >= 0 else len(ptx))]
    shared, static_shared = _shared(ptx[:start] + body)
    scopes, code, labels = _Scopes(), [], {}
    for statement in _statements(body):
        if statement == "{":
            scopes.open()
        elif statement == "}":
            scopes.close()
        elif registers := _REGISTERS.fullmatch(statement):
            scopes.declare(registers[1], registers[2])
        elif label := _LABEL.fullmatch(statement):
            labels[label[1]] = len(code)
        elif not statement.startswith("."):
            match = _INSTRUCTION.fullmatch(statement)
            if match is None:
                raise PtxError(f"{entry[1]}: cannot read {statement!r}")
            negated, predicate, opcode, rest = match.groups()
            code.append(
                Instruction(
                    predicate and scopes.resolve(predicate),
                    negated == "!",
                    tuple(opcode.split(".")),
                    tuple(scopes.resolve(operand) for operand in _operands(rest)),
                    text := " ".join(statement.split()),
                    f"{entry[1]}#{len(code)}: {text}",
                )
            )
    return Program(
        entry[1], parameters, int(threads[1]) if threads else 1024, scopes.registers, shared, static_shared,
        tuple(code), labels,
    )  # fmt: skip
