"""Collectives that the backend does better itself than sends and receives could: those of NCCL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm.exchange import PeerExchange
from thinwire.comm.reductions import TORCH_OPERATIONS, Reduction
from thinwire.comm.work import Step
from thinwire.octets import as_bytes

__all__ = ["all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter"]


class _NativeStep:
    """A collective of torch.distributed, whose failure becomes the exchange's."""

    def __init__(self, exchange: PeerExchange, name: str, start: Callable[[], dist.Work | None]) -> None:
        nothing = [None] * exchange.size
        exchange.post(nothing, nothing)  # raises where the group failed before
        self._exchange, self._name = exchange, name
        self._work = self._guard(start)

    def wait(self) -> None:
        """See :class:`Step`."""
        if self._work is not None:
            self._guard(self._work.wait)
            self._work = None

    def _guard(self, call: Callable[[], dist.Work | bool | None]) -> dist.Work | None:
        try:
            result = call()
        except RuntimeError as error:
            raise self._exchange._fail(f"{self._name} failed", {self._exchange.rank: error}) from error
        return result if isinstance(result, dist.Work) else None


def broadcast(exchange: PeerExchange, tensor: Tensor, src: int) -> Iterator[Step]:
    """Its bytes travel, as NCCL does not know every dtype."""
    data = tensor.contiguous()
    row = as_bytes(data)
    yield _NativeStep(
        exchange,
        "broadcast",
        lambda: dist.broadcast(row, group=exchange.group, group_src=src, async_op=True),
    )
    _write_back(tensor, data)


def all_gather(exchange: PeerExchange, outputs: Sequence[Tensor], tensor: Tensor) -> Iterator[Step]:
    """As bytes, too."""
    recv_buffer = [output.contiguous() for output in outputs]
    rows = [as_bytes(output) for output in recv_buffer]
    sent = as_bytes(tensor.contiguous())
    yield _NativeStep(
        exchange,
        "all_gather",
        lambda: dist.all_gather(rows, sent, group=exchange.group, async_op=True),
    )
    for output, arrived in zip(outputs, recv_buffer, strict=True):
        _write_back(output, arrived)


def all_reduce(exchange: PeerExchange, reduction: Reduction, tensor: Tensor) -> Iterator[Step]:
    """In place, for a tensor of any strides."""
    carried = _carry(reduction, tensor)
    op = _operation(reduction)
    yield _NativeStep(exchange, "all_reduce", lambda: dist.all_reduce(carried, op, group=exchange.group, async_op=True))
    _write_back(tensor, carried)


def reduce(exchange: PeerExchange, reduction: Reduction, tensor: Tensor, dst: int) -> Iterator[Step]:
    """In place at `dst`. A copy travels, as some backends leave partial sums in what other ranks pass."""
    carried = _carry(reduction, tensor)
    carried = carried.clone() if carried.data_ptr() == tensor.data_ptr() else carried
    op = _operation(reduction)
    yield _NativeStep(
        exchange,
        "reduce",
        lambda: dist.reduce(carried, op=op, group=exchange.group, group_dst=dst, async_op=True),
    )
    if exchange.rank == dst:
        _write_back(tensor, carried)


def reduce_scatter(
    exchange: PeerExchange, reduction: Reduction, output: Tensor, inputs: Sequence[Tensor]
) -> Iterator[Step]:
    """`inputs[r]` has the shape of rank r's output."""
    rows = [_carry(reduction, tensor).reshape(-1) for tensor in inputs]
    total = torch.empty_like(rows[exchange.rank])
    op = _operation(reduction)
    yield _NativeStep(
        exchange,
        "reduce_scatter",
        lambda: dist.reduce_scatter(total, rows, op, group=exchange.group, async_op=True),
    )
    output.copy_(total.view(output.shape))


def _carry(reduction: Reduction, tensor: Tensor) -> Tensor:
    """What the backend reduces: contiguous, and of a dtype that it knows."""
    encoded = reduction.encode(tensor).contiguous()
    # NCCL has no int16. Sums of int32 wrap to the same 16 bits.
    return encoded.to(torch.int32) if encoded.dtype == torch.int16 else encoded


def _operation(reduction: Reduction) -> dist.ReduceOp.RedOpType:
    # Of 0 and 1, the largest says whether any is set, and the smallest whether all are.
    stand_in = {"logical_or": "max", "logical_and": "min"}.get(reduction.name, reduction.name)
    return TORCH_OPERATIONS[stand_in]


def _write_back(tensor: Tensor, carried: Tensor) -> None:
    if carried.data_ptr() != tensor.data_ptr():
        tensor.copy_(carried)
