"""What reducing means: the operations by name, the dtypes that have them, and the sum of every rank's share, in order.

Sums and products go in rank order, rank 0 first, so that every rank and every transport gets the same bits. float16 and
bfloat16 are accumulated in float32 and rounded once, at the end; all else is accumulated in its own dtype, so integers
wrap and bool adds as *or* and multiplies as *and*, as in torch. The smaller or larger of a NaN and a number is NaN.

Small sums are made at every rank. A library, or `torch.set_flush_denormal`, may have changed a thread's arithmetic at
some: so they are made in the arithmetic that a program starts with, in which subnormal numbers count, and results are
rounded to the nearest. Larger ones are made once, at one rank, where torch's own threads may help with what they have
set.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import ArgumentError

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)
_REAL = (*_FLOATS, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)


_LIBM = ctypes.CDLL(None)
_DEFAULT_ENVIRONMENT = ctypes.c_void_p(-1)  # FE_DFL_ENV of the C libraries of Linux
_ENVIRONMENT_BYTES = 256  # more than a fenv_t of any of them


@contextlib.contextmanager
def default_arithmetic() -> Iterator[None]:
    """What this thread has set of rounding and subnormal numbers is put aside meanwhile."""
    before = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    _LIBM.fegetenv(before)
    _LIBM.fesetenv(_DEFAULT_ENVIRONMENT)
    try:
        yield
    finally:
        _LIBM.fesetenv(before)


class _Operation(NamedTuple):
    native: dist.ReduceOp.RedOpType  # torch.distributed's, of what `encode` gives
    function: Callable[..., Tensor]
    dtypes: tuple[torch.dtype, ...]


_OPERATIONS = {
    "sum": _Operation(dist.ReduceOp.SUM, torch.add, (*_REAL, *_COMPLEX)),
    "prod": _Operation(dist.ReduceOp.PRODUCT, torch.mul, _REAL),
    "min": _Operation(dist.ReduceOp.MIN, torch.minimum, _REAL),
    "max": _Operation(dist.ReduceOp.MAX, torch.maximum, _REAL),
    "avg": _Operation(dist.ReduceOp.AVG, torch.add, (*_FLOATS, *_COMPLEX)),
    # Of 0 and 1, the largest says whether any is set, and the smallest whether all are.
    "logical_or": _Operation(dist.ReduceOp.MAX, torch.maximum, (*_REAL, *_COMPLEX)),
    "logical_and": _Operation(dist.ReduceOp.MIN, torch.minimum, (*_REAL, *_COMPLEX)),
}


@dataclass(frozen=True)
class Reduction:
    """One of the operations, for the caller's tensors of one dtype."""

    name: str
    dtype: torch.dtype

    @classmethod
    def of(cls, op: object, dtype: torch.dtype) -> Reduction:
        """Looks `op` up, a name or a `torch.distributed.ReduceOp`; or ArgumentError.

        >>> Reduction.of("sum", torch.float32) == Reduction.of(dist.ReduceOp.SUM, torch.float32)
        True
        """
        name = op if isinstance(op, str) else None
        if isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
            # The first equals the second, but neither hashes like it nor the other way round. Names whose operations
            # mean the same in torch.distributed come first in the table.
            name = next((name for name, known in _OPERATIONS.items() if op == known.native), None)
        if name not in _OPERATIONS:
            known = ", ".join(_OPERATIONS)
            raise ArgumentError(f"op is {op!r}, expected one of {known}, or torch's ReduceOp of that name")
        dtypes = _OPERATIONS[name].dtypes
        if dtype not in dtypes:
            raise ArgumentError(f"op {name!r} does not take {dtype}; it takes {', '.join(str(d)[6:] for d in dtypes)}")
        return cls(name, dtype)

    @property
    def native(self) -> dist.ReduceOp.RedOpType:
        """The operation of torch.distributed that does this to encoded tensors."""
        return _OPERATIONS[self.name].native

    @property
    def label(self) -> str:
        """What ranks must agree on, as part of a message's label."""
        return f"{self.name} {self.dtype}"

    @default_arithmetic()
    def encode(self, tensor: Tensor) -> Tensor:
        """What travels of a tensor: itself, or 0 and 1 where the operation only asks which elements are not zero."""
        return (tensor != 0).to(torch.uint8) if self.name.startswith("logical") else tensor

    @default_arithmetic()
    def combine(self, shares: Sequence[Tensor]) -> Tensor:
        """The reduction of encoded shares, in rank order. None is changed; the result of a single one may be itself."""
        carried = shares[0].dtype
        function = _OPERATIONS[self.name].function
        total = shares[0].to(_WIDE.get(carried, carried))
        for turn, share in enumerate(shares[1:]):
            # The first turn makes a tensor, as `total` is the caller's still.
            total = function(total, share.to(total.dtype), out=total if turn else None)
        if self.name == "avg":
            total = torch.div(total, len(shares))
        return total.to(carried)
