"""Collectives that the backend does better itself than sends and receives could: those of NCCL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm.exact.reductions import Reduction
from thinwire.comm.exchange import Exchange, PeerExchange
from thinwire.comm.work import Step
from thinwire.octets import as_bytes

_T = TypeVar("_T")


class _NativeStep:
    """A collective of torch.distributed, whose failure becomes the exchange's."""

    def __init__(
        self, exchange: Exchange, function: Callable[..., dist.Work | None], *args: object, **options: object
    ) -> None:
        assert isinstance(exchange, PeerExchange)
        nothing = [None] * exchange.size
        exchange.post(nothing, nothing)  # raises where the group failed before
        self._exchange, self._name = exchange, function.__name__
        self._work = self._guard(lambda: function(*args, group=exchange.group, async_op=True, **options))

    def wait(self) -> None:
        """See `Step`."""
        if self._work is not None:
            self._guard(self._work.wait)
            self._work = None

    def _guard(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except RuntimeError as error:
            raise self._exchange._fail(f"{self._name} failed", {self._exchange.rank: error}) from error


def broadcast(exchange: Exchange, tensor: Tensor, src: int) -> Iterator[Step]:
    """Its bytes travel, as NCCL does not know every dtype."""
    data = tensor.contiguous()
    yield _NativeStep(exchange, dist.broadcast, as_bytes(data), group_src=src)
    _write_back(tensor, data)


def all_gather(exchange: Exchange, outputs: Sequence[Tensor], tensor: Tensor) -> Iterator[Step]:
    """As bytes, too."""
    recv_buffer = [output.contiguous() for output in outputs]
    rows = [as_bytes(output) for output in recv_buffer]
    sent = as_bytes(tensor.contiguous())
    yield _NativeStep(exchange, dist.all_gather, rows, sent)
    for output, arrived in zip(outputs, recv_buffer, strict=True):
        _write_back(output, arrived)


def reduce(exchange: Exchange, reduction: Reduction, tensor: Tensor, dst: int | None) -> Iterator[Step]:
    """In place at `dst`, or everywhere for None, for a tensor of any strides."""
    carried, op = _carry(reduction, tensor), reduction.native
    if dst is None:
        yield _NativeStep(exchange, dist.all_reduce, carried, op)
    else:
        # A copy travels, as some backends leave partial sums in what other ranks pass.
        carried = carried.clone() if carried.data_ptr() == tensor.data_ptr() else carried
        yield _NativeStep(exchange, dist.reduce, carried, op=op, group_dst=dst)
    if dst in (None, exchange.rank):
        _write_back(tensor, carried)


def reduce_scatter(
    exchange: Exchange, reduction: Reduction, output: Tensor, inputs: Sequence[Tensor]
) -> Iterator[Step]:
    """`inputs[r]` has the shape of rank r's output."""
    rows = [_carry(reduction, tensor).reshape(-1) for tensor in inputs]
    total = torch.empty_like(rows[exchange.rank])
    yield _NativeStep(exchange, dist.reduce_scatter, total, rows, reduction.native)
    output.copy_(total.view(output.shape))


def _carry(reduction: Reduction, tensor: Tensor) -> Tensor:
    """What the backend reduces: contiguous, and of a dtype that it knows."""
    encoded = reduction.encode(tensor).contiguous()
    # NCCL has no int16. Sums of int32 wrap to the same 16 bits.
    return encoded.to(torch.int32) if encoded.dtype == torch.int16 else encoded


def _write_back(tensor: Tensor, carried: Tensor) -> None:
    if carried.data_ptr() != tensor.data_ptr():
        tensor.copy_(carried)
