"""Collectives made of sends and receives: those of Gloo's ranks and of threads, and of NCCL where it does the same.

Gloo has collectives of its own, but ends the *process* of a rank whose tensor is shorter than its peers'. Messages that
`Communicator.post` carries match by length, order and label instead, so ranks that disagree get `PeerTimeout`.

Each function is a generator for `thinwire.comm.work.Work`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from thinwire.comm.exact.reductions import Reduction
from thinwire.comm.exchange import Buffers, Exchange, Posted
from thinwire.comm.work import Step
from thinwire.octets import as_bytes

#: Up to this size a reduction takes one step, in which each rank sends its whole tensor to those that want the result.
ONE_STEP_BYTES = 2**16


def move(exchange: Exchange, sends: Buffers, receives: Buffers, label: str) -> Iterator[Step]:
    """`sends[r]` goes to rank r and `receives[r]` comes from there, this rank's own included; of any strides."""
    if _lands_on_what_leaves(exchange.rank, sends, receives):
        # What arrives early would be sent on, in place of what was there.
        sends = [None if buffer is None else buffer.clone() for buffer in sends]
    recv_buffer = [None if target is None else _recv_buffer(target) for target in receives]
    own, place = sends[exchange.rank], receives[exchange.rank]
    if own is not None and place is not None:
        place.copy_(own.reshape(place.shape))
    yield _post(exchange, sends, recv_buffer, label)
    for peer, (target, arrived) in enumerate(zip(receives, recv_buffer, strict=True)):
        if peer != exchange.rank and target is not None and arrived is not None and arrived is not target:
            target.copy_(arrived)


def _lands_on_what_leaves(rank: int, sends: Buffers, receives: Buffers) -> bool:
    """Whether some byte is received where one is sent from. A rank's own share may stay where it is."""
    own, place = sends[rank], receives[rank]
    stays = own is not None and place is not None and own.data_ptr() == place.data_ptr()
    sent = [extent(buffer) for buffer in sends if buffer is not None and buffer.numel()]
    received = [
        extent(buffer)
        for peer, buffer in enumerate(receives)
        if buffer is not None and buffer.numel() and not (peer == rank and stays)
    ]
    return any(start < stop and first < last for first, stop in sent for start, last in received)


def extent(tensor: Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and of the one behind its last; of any strides."""
    start = tensor.data_ptr()
    if tensor.is_contiguous() or not tensor.numel():
        return start, start + tensor.nbytes
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


def reduce_scatter(
    exchange: Exchange, reduction: Reduction, output: Tensor, inputs: Sequence[Tensor]
) -> Iterator[Step]:
    """`inputs[r]`, of the shape of rank r's output, goes there; what arrives is combined in rank order."""
    carried = [reduction.encode(tensor) for tensor in inputs]
    own = carried[exchange.rank]
    shares = [
        own if peer == exchange.rank else torch.empty_like(own, memory_format=torch.contiguous_format)
        for peer in range(exchange.size)
    ]
    label = f"reduce_scatter {reduction.label}"
    yield _post(exchange, carried, shares, label)
    output.copy_(reduction.combine([share.reshape(output.shape) for share in shares]))


def takes_two_steps(exchange: Exchange, tensor: Tensor) -> bool:
    """Whether `reduce` deals a tensor out before it is combined; the same on all ranks."""
    return exchange.size > 1 and tensor.nbytes > ONE_STEP_BYTES


def reduce(exchange: Exchange, reduction: Reduction, tensor: Tensor, dst: int | None) -> Iterator[Step]:
    """All ranks' tensors combined, at `dst`, or everywhere for None.

    Small ones go to every rank that wants the result, in one step. Of others every rank combines a slice of its own and
    hands it on: each rank sends and receives `2 (size - 1) / size` of the tensor, as in a ring, but in two steps. The
    result is the same to the last bit.
    """
    rank, size = exchange.rank, exchange.size
    carried = reduction.encode(tensor).contiguous().view(-1)
    # With the size: tensors that differ in it may have slices that do not.
    label = f"{'all_reduce' if dst is None else 'reduce'} {reduction.label} {carried.numel()}"
    # `carried` may be the tensor's own memory: only a rank that shall have the result may write to it.
    receiving = dst in (None, rank)
    if takes_two_steps(exchange, tensor):
        ends = [carried.numel() * peer // size for peer in range(size + 1)]
        slices = [carried[begin:end] for begin, end in itertools.pairwise(ends)]
        shares = [slices[rank] if peer == rank else torch.empty_like(slices[rank]) for peer in range(size)]
        yield _post(exchange, slices, shares, label)
        total = reduction.combine(shares)
        sending = [total if dst in (None, peer) else None for peer in range(size)]
        results = slices if receiving else [None] * size
        yield _post(exchange, sending, results, label)
        if receiving:
            slices[rank].copy_(total)
    else:
        sending = [carried if dst in (None, peer) else None for peer in range(size)]
        shares = [carried if peer == rank else torch.empty_like(carried) for peer in range(size if receiving else 0)]
        arriving = shares if receiving else [None] * size
        yield _post(exchange, sending, arriving, label)
        if receiving:
            carried.copy_(reduction.combine(shares))
    if receiving and (carried.data_ptr() != tensor.data_ptr() or carried.dtype != tensor.dtype):
        tensor.copy_(carried.view(tensor.shape))


def _recv_buffer(target: Tensor) -> Tensor:
    return target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)


def _post(exchange: Exchange, sends: Buffers, receives: Buffers, label: str) -> Posted:
    """Posts the bytes of all but this rank's own entries."""
    sent, received = (
        [None if peer == exchange.rank or t is None else as_bytes(t.contiguous()) for peer, t in enumerate(tensors)]
        for tensors in (sends, receives)
    )
    return exchange.post(sent, received, label)
