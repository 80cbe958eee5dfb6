"""Changes of compiled kernels that each take away one piece of synchronisation, and where in the sources it is."""

from __future__ import annotations

import ast
import re
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import triton

from thinwire import triton_kernels

_SITE = re.compile(
    r"\b(?:atom|ld|st|red)(?:\.\w+)*?\.(?:acquire|release|acq_rel)\S*|\batom\S*|\bbar\.(?:warp\.)?sync\b[^;]*|\bfence\.[^;]*"
)
_LOCATION = re.compile(r"\.loc\s+\d+[^\n]*// (?P<chain>[^\n]*)")
_WEAKER = {
    "acquire": ("relaxed",),
    "release": ("relaxed",),
    "acq_rel": ("acquire", "release"),
}
_NARROWER = {"sys": "gpu", "gpu": "cta"}


@dataclass(frozen=True)
class Mutation:
    """One change of a kernel's PTX.

    Attributes:
        number: which site of the kernel, from 0.
        line: of the PTX, from 0.
        was, becomes: the instruction, without operands; nothing where it is taken out.
        place: functions of the sources, from the innermost on.
    """

    number: int
    line: int
    was: str
    becomes: str
    place: str

    def apply(self, ptx: str) -> str:
        """The kernel with this change."""
        lines = ptx.split("\n")
        before = lines[self.line]
        lines[self.line] = before.replace(self.was, self.becomes) if self.becomes else ""
        assert lines[self.line] != before
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.place}: {' '.join(self.was.split())} " + (
            f"becomes {self.becomes}" if self.becomes else "is taken out"
        )


def mutations_of(ptx: str) -> Iterator[Mutation]:
    """Every fence and barrier taken out; every acquire, release and scope weakened by one step."""
    place, number = "", 0
    for line, text in enumerate(ptx.split("\n")):
        if found := _LOCATION.search(text):
            place = _functions(found["chain"], ptx)
            continue
        if not (site := _SITE.search(text)):
            continue
        if site[0].startswith(("bar.", "fence.")):
            yield Mutation(number, line, site[0], "", place)
        else:
            for becomes in _weaker(site[0]):
                yield Mutation(number, line, site[0], becomes, place)
        number += 1


def is_site(instruction: str) -> bool:
    """Whether an instruction is one that `mutations_of` counts."""
    return _SITE.search(instruction) is not None


def _weaker(instruction: str) -> Iterator[str]:
    parts = instruction.split(".")
    for index, part in enumerate(parts):
        for weaker in _WEAKER.get(part, ()):
            yield ".".join([*parts[:index], weaker, *parts[index + 1 :]])
        if part in _NARROWER:
            yield ".".join([*parts[:index], _NARROWER[part], *parts[index + 1 :]])


def _functions(chain: str, ptx: str) -> str:
    """`file.py:line:column @[ file.py:line:column ]` as names of functions."""
    names = []
    for name, line in re.findall(r"([\w.]+\.py):(\d+):\d+", chain):
        path = re.search(rf'\.file\s+\d+ "([^"]*/{re.escape(name)})"', ptx)
        names.append(_function_at(path[1], int(line)) if path else name)
    return " < ".join(dict.fromkeys(names))


def _source(path: str) -> Path:
    """The file as it is here: Triton's cache may hold what was compiled in a folder that is gone."""
    for package in (triton_kernels, triton):
        name = package.__name__.rpartition(".")[2]
        _, found, within = path.rpartition(f"/{name}/")
        if found and (here := Path(str(package.__file__)).parent / within).exists():
            return here
    return Path(path)


@cache
def _definitions(path: str) -> list[tuple[int, str]]:
    tree = ast.parse(_source(path).read_text())
    return sorted((node.lineno, node.name) for node in tree.body if isinstance(node, ast.FunctionDef))


def _function_at(path: str, line: int) -> str:
    definitions = _definitions(path)
    return definitions[max(0, bisect(definitions, (line, "~")) - 1)][1]
