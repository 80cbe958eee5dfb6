"""What the quantised collectives must give, in plain torch, from every rank's tensor."""

from __future__ import annotations

from typing import Any

import torch

import thinwire as tw
from thinwire.fused.partition import gathered_parts, split_parts
from thinwire.triton_kernels.codec_reference import quantize_reference, round_reference, row_reference, scaled_reference
from thinwire.wire import WireFormat

#: Those that sum rows or move them, each of which has a case in `tests/fused/test_gradients.py`, too.
COLLECTIVES: tuple[Any, ...] = (tw.all_reduce, tw.reduce_scatter, tw.all_gather, tw.all_gather_v, tw.all_to_all_v)


def through(part: torch.Tensor, row: int, wire: WireFormat, dtype: torch.dtype) -> torch.Tensor:
    """What a part, 1-D, of rows of `row` elements, stands for on arrival, before any rounding: float32.

    `dtype` is what `none` keeps.
    """
    return row_reference(_scaled(part, row, wire, dtype), wire, row).reshape(-1)[: part.numel()]


def _scaled(part: torch.Tensor, row: int, wire: WireFormat, dtype: torch.dtype) -> torch.Tensor:
    rows = -(-part.numel() // row)
    padded = torch.cat((part, part.new_zeros(rows * row - part.numel()))).view(rows, row)
    padded = padded if wire.quantized else padded.to(dtype)
    return scaled_reference(quantize_reference(padded, wire), wire, row, dtype)


def summed(parts: list[torch.Tensor], row: int, wire: WireFormat) -> torch.Tensor:
    """The sum of what arrives, float32, in the order of the list, in whole rows."""
    total = torch.zeros(-(-parts[0].numel() // row), wire.columns(row))
    for part in parts:
        total = total + _scaled(part, row, wire, part.dtype)
    # What is past the end of a rotated row is not zero any more, and travels on.
    return row_reference(total, wire, row).reshape(-1)


def all_gathered(tensors: list[torch.Tensor], wire: WireFormat) -> torch.Tensor:
    dtype = tensors[0].dtype
    _, row = gathered_parts([tensor.numel() for tensor in tensors])
    parts = [through(tensor.reshape(-1), row, wire, dtype) for tensor in tensors]
    whole = round_reference(torch.cat(parts), dtype, saturate=wire.quantized)
    return whole.view(-1, *tensors[0].shape[1:])


def reduce_scattered(tensors: list[torch.Tensor], wire: WireFormat, rank: int, world: int = 0) -> torch.Tensor:
    """`world` is how many ranks there are, if that is not how many tensors."""
    x, world = tensors[0], world or len(tensors)
    segments, row = gathered_parts([x.numel() // world] * world)
    parts = [tensor.reshape(-1)[segments.displs[rank] :][: segments.counts[rank]] for tensor in tensors]
    total = summed(parts, row, wire)[: segments.counts[rank]]
    return round_reference(total, x.dtype, saturate=wire.quantized).view(-1, *x.shape[1:])


def all_reduced(tensors: list[torch.Tensor], wire: WireFormat, gather_wire: WireFormat, world: int = 0) -> torch.Tensor:
    x, world = tensors[0], world or len(tensors)
    segments, row = split_parts(x.numel(), world)
    whole = []
    for count, displ in zip(segments.counts, segments.displs, strict=True):
        total = summed([tensor.reshape(-1)[displ : displ + count] for tensor in tensors], row, wire)
        if gather_wire.quantized:
            # The sum is quantised as it is, in float32, and rounded on arrival.
            total = round_reference(total, torch.float32, saturate=wire.quantized)
            arrived = through(total, row, gather_wire, x.dtype) if count else total
            whole.append(round_reference(arrived, x.dtype, saturate=True)[:count])
        else:
            whole.append(round_reference(total, x.dtype, saturate=wire.quantized)[:count])
    return torch.cat(whole).view(x.shape)
