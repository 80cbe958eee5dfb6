"""What reducing means: the operations by name, the dtypes that have them, and the sum of every rank's share, in order.

Sums and products go in rank order, rank 0 first, so that every rank and every transport gets the same bits. float16 and
bfloat16 are accumulated in float32 and rounded once, at the end; all else is accumulated in its own dtype, so integers
wrap and bool adds as *or* and multiplies as *and*, as in torch. The smaller or larger of a NaN and a number is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import ArgumentError

__all__ = ["TORCH_OPERATIONS", "Reduction"]

#: What torch.distributed calls the operations that it has.
TORCH_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_DTYPES = {
    "sum": (*_FLOATS, *_INTEGERS, torch.bool, *_COMPLEX),
    "prod": (*_FLOATS, *_INTEGERS, torch.bool),
    "min": (*_FLOATS, *_INTEGERS, torch.bool),
    "max": (*_FLOATS, *_INTEGERS, torch.bool),
    "avg": (*_FLOATS, *_COMPLEX),
    "logical_or": (*_FLOATS, *_INTEGERS, torch.bool, *_COMPLEX),
    "logical_and": (*_FLOATS, *_INTEGERS, torch.bool, *_COMPLEX),
}
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "avg": torch.add,
    "logical_or": torch.maximum,  # of 0 and 1
    "logical_and": torch.minimum,
}


@dataclass(frozen=True)
class Reduction:
    """One of the operations, for tensors of one dtype.

    Attributes:
        name: "sum", "prod", "min", "max", "avg", "logical_or" or "logical_and".
        dtype: of the tensors that the caller has.
    """

    name: str
    dtype: torch.dtype

    @classmethod
    def of(cls, op: object, dtype: torch.dtype) -> Reduction:
        """Looks `op` up, a name or a `torch.distributed.ReduceOp`.

        Raises:
            ArgumentError: an operation that is not there, or not for this dtype.

        >>> Reduction.of("sum", torch.float32) == Reduction.of(dist.ReduceOp.SUM, torch.float32)
        True
        """
        name = op if isinstance(op, str) else None
        if isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
            # The first equals the second, but neither hashes like it nor the other way round.
            name = next((name for name, known in TORCH_OPERATIONS.items() if op == known), None)
        if name not in _DTYPES:
            raise ArgumentError(f"op is {op!r}, expected one of {', '.join(_DTYPES)}, or torch's ReduceOp of that name")
        if dtype not in _DTYPES[name]:
            raise ArgumentError(
                f"op {name!r} does not take {dtype}; it takes {', '.join(str(known)[6:] for known in _DTYPES[name])}"
            )
        return cls(name, dtype)

    @property
    def label(self) -> str:
        """What ranks must agree on, as part of a message's label."""
        return f"{self.name} {self.dtype}"

    def encode(self, tensor: Tensor) -> Tensor:
        """What travels of a tensor: itself, or 0 and 1 where the operation only asks which elements are not zero."""
        return (tensor != 0).to(torch.uint8) if self.name.startswith("logical") else tensor

    def combine(self, shares: Sequence[Tensor]) -> Tensor:
        """The reduction of every rank's share, in rank order; encoded tensors in and out. None of them is changed.

        The result of a single share may be that share itself.
        """
        carried = shares[0].dtype
        function = _FUNCTIONS[self.name]
        total = shares[0].to(_WIDE.get(carried, carried))
        for turn, share in enumerate(shares[1:]):
            # The first turn makes a tensor, as `total` is the caller's still.
            total = function(total, share.to(total.dtype), out=total if turn else None)
        if self.name == "avg":
            total = torch.div(total, len(shares))
        return total.to(carried)
