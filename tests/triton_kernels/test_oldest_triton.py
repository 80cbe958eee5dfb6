"""What the oldest Triton that is supported cannot compile; the one that runs here can, so the source is looked at."""

from __future__ import annotations

import ast
from pathlib import Path

import thinwire.triton_kernels

FOLDER = Path(thinwire.triton_kernels.__file__).parent


def _is_kernel(function: ast.FunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_no_kernel_returns_none_beside_a_tensor() -> None:
    seen, found = 0, []
    for path in sorted(FOLDER.glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef) or not _is_kernel(function):
                continue
            seen += 1
            for node in ast.walk(function):
                parts = node.value.elts if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) else []
                if any(isinstance(part, ast.Constant) and part.value is None for part in parts):
                    found.append(f"{path.name}:{node.lineno}")
    assert seen > 100 and not found, found  # "cannot convert None of type <class 'NoneType'> to tensor"
