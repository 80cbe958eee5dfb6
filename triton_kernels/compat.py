"""Triton if it is installed; otherwise stand-ins that let kernel files import and say what is missing when launched.

Kernel files hold their plain-torch references too, and those must work without Triton.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from thinwire.errors import TransportUnavailable

HAS_TRITON = importlib.util.find_spec("triton") is not None

if HAS_TRITON:
    import triton
    import triton.language as tl
else:

    class _Missing:
        """Anything asked of it is missing too; launching a kernel says how to install it."""

        def __getattr__(self, name: str) -> _Missing:
            return self

        def __call__(self, *args: object, **kwargs: object) -> Any:
            return args[0] if len(args) == 1 and callable(args[0]) else self

    class _MissingKernel:
        def __init__(self, function: Callable[..., Any]) -> None:
            self.__name__ = function.__name__

        def __getitem__(self, grid: object) -> Any:
            raise TransportUnavailable(f"kernel {self.__name__} needs Triton: pip install triton")

    class _MissingTriton(_Missing):
        @staticmethod
        def jit(function: Callable[..., Any] | None = None, **options: object) -> Any:
            return _MissingKernel if function is None else _MissingKernel(function)

    triton = _MissingTriton()
    tl = _Missing()
