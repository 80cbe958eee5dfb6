"""Sums of tensors that are int8 already, with one scale for all ranks: all-to-all, sum, dequantise, all-gather.

Where a quantised matrix product leaves int8 with scales that were calibrated beforehand, quantising again would only
add an error. The numbers travel as they are; sums of int8 are exact in int32, in any order; and they are scaled once.
The second leg gathers the sums in 16 bits, or in a wire format.
"""

from __future__ import annotations

import math
import zlib

import torch

from thinwire.comm import Group, communicator_or_default, on_communicator
from thinwire.comm.tensors import require_dense
from thinwire.errors import ArgumentError, ConfigMismatch, CountsError, WireFormatError
from thinwire.fused.all_to_all import all_to_all_v
from thinwire.fused.codec import FLOAT_DTYPES
from thinwire.fused.ops import all_gather_v
from thinwire.wire import WireFormat


@on_communicator
def int8_all_to_all_reduce(
    x: torch.Tensor,
    scales: torch.Tensor | float,
    *,
    dtype: torch.dtype = torch.float16,
    gather_wire: str | WireFormat = "none",
    comm: Group | None = None,
    transport: str = "auto",
    check: bool = False,
) -> torch.Tensor:
    """The sum over the ranks of x * scales, for int8 x and scales that are the same on all ranks.

    Args:
        x: int8 [..., channels], the same shape on all ranks.
        scales: one number, or float32 [channels]. All ranks must pass the same ones: what is summed is x itself. For
            scales that differ from rank to rank, all_reduce takes x * scales.
        dtype: of the result: float16, bfloat16 or float32.
        gather_wire: how the sums travel on the second leg; "none" moves them as `dtype`.
        comm, transport: see `all_gather`.
        check: compare the scales with the other ranks', at the cost of one small exchange and, on CUDA, of waiting for
            the device.

    Returns:
        [..., channels] of `dtype`, the same bits on all ranks. Sums are exact in int32, then multiplied in float32,
        then rounded once, to the largest finite value at most.

    Raises:
        WireFormatError: x is not int8, or `dtype` none of the three.
        CountsError: a scalar, or scales that fit neither way.
        ArgumentError: x is no plain dense tensor, or scales are no numbers.
        ConfigMismatch: with check, on every rank, scales that differ.
        PeerTimeout, TransportUnavailable: see `all_gather`.

    Source: the int8 all-reduce of Ascend's quantised matrix products, whose quantised gather is this op's gather_wire.

    >>> import thinwire as tw
    >>> comm = tw.init()
    >>> int8_all_to_all_reduce(torch.tensor([[1, -2], [3, 4]], dtype=torch.int8), 0.5, comm=comm).tolist()
    [[0.5, -1.0], [1.5, 2.0]]
    >>> comm.close()
    """
    comm = communicator_or_default(comm)
    comm.check_device("x", x)
    if x.dtype != torch.int8:
        raise WireFormatError(f"int8_all_to_all_reduce takes int8; got {x.dtype}: all_reduce quantises by itself")
    if not isinstance(dtype, torch.dtype) or dtype not in FLOAT_DTYPES:
        raise WireFormatError(f"int8_all_to_all_reduce gives float16, bfloat16 or float32; asked for {dtype}")
    factors = _factors(x, scales)
    gather_wire = WireFormat.parse(gather_wire)
    with comm.call("int8_all_to_all_reduce", x.shape, x.dtype, gather_wire, transport), torch.no_grad():
        if check:
            digest = zlib.crc32(factors.cpu().numpy().tobytes())
            everyone = comm.all_gather_data(digest, int)
            other = next((rank for rank, found in enumerate(everyone) if found != everyone[0]), None)
            if other is not None:
                raise ConfigMismatch(f"int8_all_to_all_reduce: the scales of rank {other} are not those of rank 0")
        share = -(-x.numel() // comm.size)
        starts = [min(rank * share, x.numel()) for rank in range(comm.size + 1)]
        counts = [stop - start for start, stop in zip(starts, starts[1:], strict=False)]
        own = counts[comm.rank]
        flat = x.detach().contiguous().view(-1)
        received = all_to_all_v(flat, counts, [own] * comm.size, wire="none", comm=comm, transport=transport)
        assert isinstance(received, torch.Tensor)
        total = received.view(comm.size, own).sum(0, dtype=torch.int32).float()
        if factors.numel() > 1:
            channels = torch.arange(starts[comm.rank], starts[comm.rank] + own, device=x.device) % factors.numel()
            total *= factors[channels]
        else:
            total *= factors
        largest = torch.finfo(dtype).max
        sums = total.clamp_(-largest, largest).to(dtype)
        gathered = all_gather_v(sums, counts, wire=gather_wire, comm=comm, transport=transport)
        assert isinstance(gathered, torch.Tensor)
        return gathered.view(x.shape)


def _factors(x: torch.Tensor, scales: torch.Tensor | float) -> torch.Tensor:
    """The scales, float32 [1] or [channels], where x is."""
    if x.dim() < 1:
        raise CountsError("int8_all_to_all_reduce needs a tensor of at least 1 dimension; got a scalar")
    if isinstance(scales, torch.Tensor):
        require_dense("scales", scales)
        if scales.is_complex():
            raise ArgumentError(f"scales are {scales.dtype}, expected float32 [{x.shape[-1]}], or one number")
    try:
        factors = torch.as_tensor(scales, dtype=torch.float32, device=x.device).detach()
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(
            f"scales is {scales!r}, expected one number, or float32 [{x.shape[-1]}]: {error}"
        ) from error
    shape, factors = list(factors.shape), factors.reshape(-1)
    if math.prod(shape) not in (1, x.shape[-1]) or len(shape) > 1:
        raise CountsError(
            f"int8_all_to_all_reduce: scales have the shape {shape}, and x {list(x.shape)}; accepted: one number, or "
            f"[{x.shape[-1]}]"
        )
    return factors
