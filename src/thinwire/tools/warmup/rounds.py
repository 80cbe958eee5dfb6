"""What a rank launches in rounds of expert parallelism, called with tensors that have no memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from thinwire.fused.backend import RoundKernels
from thinwire.fused.codec import FLOAT_DTYPES
from thinwire.moe.config import ParallelSettings
from thinwire.moe.direct import launch_each
from thinwire.moe.routing import expert_range
from thinwire.triton_kernels import combine, dispatch, pack, permute, sums
from thinwire.triton_kernels.expert_gemm import INNER_WIRE, expert_gemm
from thinwire.triton_kernels.int8_weights import Int8Weights
from thinwire.triton_kernels.round_layout import Lane
from thinwire.wire import WireFormat

META = torch.device("meta")
_ID_DTYPES = (torch.int32, torch.int64)


def launch_direct(settings: ParallelSettings, ranks: int, dtype: torch.dtype, backward: bool = False) -> None:
    """Kernels of a round on the direct transport, whose lanes are those of forward or of backward."""
    layout = settings.lane_layout(ranks, weight_grads=backward)
    kernels = RoundKernels(
        dispatch.send_tokens, dispatch.wait, permute.route, permute.gather, combine.send_sums, dispatch.close_round,
        combine.sum_home, dispatch.refuse,
    )  # fmt: skip
    buffer = torch.empty(layout.NUM_BYTES, dtype=torch.uint8, device=META)
    buffer_ptrs = torch.empty(ranks, dtype=torch.int64, device=META)
    x = torch.empty(1, layout.HIDDEN, dtype=dtype, device=META)
    for rank in _ranks_that_differ(settings, ranks):
        lane = Lane.of(layout, settings.wire, settings.combine_wire, rank, settings.align, buffer, buffer_ptrs)
        for id_dtype in _ID_DTYPES:
            ids = torch.empty(1, layout.TOP_K, dtype=id_dtype, device=META)
            launch_each(kernels, lane, x, ids, ids.float(), settings.num_programs)
        if settings.combine_wire.quantized and not backward:
            records = _records(settings.combine_wire, layout.HIDDEN, dtype)
            for as_they_are in (False, True):
                combine.send_sums(lane, records, dtype, settings.num_programs, None, as_they_are)


def _ranks_that_differ(settings: ParallelSettings, ranks: int) -> list[int]:
    """One rank for each number of experts that ranks own: kernels know it."""
    owned = {len(expert_range(settings.num_experts, ranks, rank)): rank for rank in range(ranks)}
    return list(owned.values())


def _records(wire: WireFormat, hidden: int, dtype: torch.dtype, message_bytes: int | None = None) -> torch.Tensor:
    """One record, with what travels behind it."""
    length = wire.row_bytes(hidden, dtype)
    return torch.empty(1, message_bytes or length, dtype=torch.uint8, device=META)[:, :length]


def launch_staged(settings: ParallelSettings, ranks: int, dtype: torch.dtype, gradients: bool) -> None:
    """Kernels of a round through the process group, and of its backward."""
    hidden, top_k = settings.hidden_size, settings.top_k
    index = torch.empty(1, dtype=torch.int64, device=META)
    row = torch.empty(1, hidden, dtype=dtype, device=META)
    for legs in (settings, settings.of_backward)[: 1 + gradients]:
        wire, back = legs.wire, legs.combine_wire
        terms, slots = (1, top_k) if legs.invariant else (top_k, min(top_k, ranks))
        positions = torch.empty(1, terms, dtype=torch.int64, device=META)
        weights = torch.empty(1, terms, device=META, dtype=torch.float32)
        home = torch.empty(1, slots, dtype=torch.int64, device=META)
        message, sent_back = _records(wire, hidden, dtype, settings.message_bytes(dtype)), _records(back, hidden, dtype)
        pack.pack_rows(row, wire, index, message)
        pack.unpack_rows(message, wire, index, index, row)
        for out_dtype in FLOAT_DTYPES:
            sums.pack_weighted_sums(row.to(out_dtype), positions, weights, back, dtype, sent_back, hidden)
        if back.quantized:
            sums.pack_weighted_sums(sent_back, positions, weights, back, dtype, sent_back, hidden)
        sums.sum_records(sent_back, home, back, row)


def launch_int8_experts(settings: ParallelSettings, ranks: int, dtype: torch.dtype, ff_size: int) -> None:
    """Products of `tw.Int8Experts` with rows of `ff_size` between them, with a gate and without, of few rows and many.

    Raises:
        WireFormatError: a dispatch wire that is not int8.
    """
    hidden, wire = settings.hidden_size, replace(settings.wire, rotated=False)
    columns = settings.wire.columns(hidden)
    for rank in _ranks_that_differ(settings, ranks):
        num_experts = len(expert_range(settings.num_experts, ranks, rank))
        offsets = torch.empty(num_experts + 1, dtype=torch.int64, device=META)
        for rows in (1, 1 << 20):
            index = torch.empty(rows, dtype=torch.int64, device=META)
            inner = torch.empty(rows, INNER_WIRE.row_bytes(ff_size), dtype=torch.uint8, device=META)
            out = torch.empty(rows, hidden, dtype=dtype, device=META)
            for gated in (True, False):
                inward = _weights(num_experts, columns, ff_size, gated)
                expert_gemm(_records(wire, columns, dtype), wire, index, offsets, inward, inner, INNER_WIRE)
            expert_gemm(inner, INNER_WIRE, None, offsets, _weights(num_experts, ff_size, hidden), out)


def _weights(num_experts: int, inward: int, outward: int, gated: bool | None = None) -> Int8Weights:
    channels = outward * (1 + bool(gated))
    payload = torch.empty(num_experts, channels, -(-inward // 16) * 16, dtype=torch.int8, device=META)
    scales = torch.empty(num_experts, channels, device=META, dtype=torch.float32)
    return Int8Weights(payload, scales, inward, bool(gated), activate=gated is False)
