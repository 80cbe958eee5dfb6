"""Changes of a Python file, found in its syntax tree: each rewrites one expression or statement, on the lines it has.

Numba and Triton read a function's source, and numba's cache has the numbers of its lines.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

#: Operators, and what takes their place.
_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.MatMult: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd,
}  # fmt: skip
#: Calls that only tell people or type checkers something; and conditions of what only those read.
_TELLING = {"log", "warn", "info", "debug", "warning", "cast", "TypeVar", "ParamSpec"}
_NOT_RUN = ("TYPE_CHECKING", "LOGGER", "__name__")
_NOT_CHANGED = ("annotation", "returns", "decorator_list")


@dataclass(frozen=True)
class Change:
    """One place of a file, in bytes, and the text that it gets."""

    path: str
    line: int
    column: int
    before: str
    after: str
    begin: int

    def __str__(self) -> str:
        before, after = (" ".join(text.split())[:100] for text in (self.before, self.after))
        return f"{self.path}:{self.line}:{self.column}: {before} becomes {after}"

    def apply(self, source: str) -> str | None:
        """The file with the change; None if that is no Python, as a `return` outside of functions."""
        octets, end = source.encode(), self.begin + len(self.before.encode())
        changed = (octets[: self.begin] + self.after.encode() + octets[end:]).decode()
        try:
            compile(changed, self.path, "exec")
        except SyntaxError:
            return None
        return changed


def changes_of(path: str, source: str) -> list[Change]:
    """All changes of a file, in the order of its tree."""
    octets, found = source.encode(), []
    starts = [0, *accumulate(map(len, octets.splitlines(keepends=True)))]
    for node, after in _changed(ast.parse(source)):
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        after += "\n" * (node.end_lineno - node.lineno)  # later lines keep their numbers
        after = f"({after})" if isinstance(node, ast.expr) else after
        found.append(Change(path, node.lineno, node.col_offset, octets[begin:end].decode(), after, begin))
    return found


def _changed(node: Any) -> Iterator[tuple[Any, str]]:
    """This node and those below it, each with a text for its place."""
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        if any(name in ast.unparse(node.test) for name in _NOT_RUN):
            return
        yield from ((node.test, text) for text in ("True", "False")[isinstance(node, ast.While) :])
    if isinstance(node, ast.comprehension):
        yield from ((test, "True") for test in node.ifs)
    yield from ((node, text) for text in _texts(node))
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr) or _tells(node):
        return  # what is in it is text, or for type checkers
    for name, field in ast.iter_fields(node):
        children = [child for child in (field if isinstance(field, list) else [field]) if isinstance(child, ast.AST)]
        for child in children if name not in _NOT_CHANGED else ():
            if isinstance(child, ast.Expr) and child is not children[-1] and not _tells(child):
                yield child, "return"
            yield from _changed(child)


def _tells(node: Any) -> bool:
    """Whether it is a docstring, or tells something."""
    value = node.value if isinstance(node, ast.Expr) else node
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in _TELLING
    return isinstance(node, ast.Expr) and isinstance(value, ast.Constant)


def _texts(node: Any) -> Iterator[str]:
    """What may stand in the place of a node."""
    match node:
        case ast.Compare():
            for place, operator in enumerate(node.ops):
                yield _with(node, ops=[*node.ops[:place], _SWAPPED[type(operator)](), *node.ops[place + 1 :]])
        case ast.BinOp() | ast.BoolOp() | ast.AugAssign():
            yield _with(node, op=_SWAPPED[type(node.op)]())
        case ast.UnaryOp():
            yield ast.unparse(node.operand)
        case ast.Constant(value=bool()):
            yield str(not node.value)
        case ast.Constant(value=int() | float()):
            yield from (repr(node.value + 1), repr(node.value - 1))
        case ast.Return() if node.value is not None and ast.unparse(node.value) != "None":
            yield "return None"
        case ast.Assign() if not all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            return
    if isinstance(node, ast.Raise | ast.Break | ast.Continue | ast.Delete | ast.Expr | ast.Assign | ast.AugAssign):
        yield from () if _tells(node) or isinstance(getattr(node, "value", None), ast.Yield) else ("pass",)


def _with(node: ast.AST, **fields: object) -> str:
    changed = copy.copy(node)
    vars(changed).update(fields)
    return ast.unparse(changed)
