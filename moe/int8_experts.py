"""Experts in int8, which read the records of a round where they arrived."""

from __future__ import annotations

import torch
from torch import nn

from thinwire.comm.tensors import is_int
from thinwire.compiler import opaque
from thinwire.errors import CapacityError, RoutingError
from thinwire.fused.counts import new_rows
from thinwire.fused.expert_gemm import select_expert_gemm
from thinwire.moe.compiled_round import uncompiled
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.experts import GroupedExperts
from thinwire.triton_kernels.expert_gemm import INNER_WIRE
from thinwire.triton_kernels.int8_weights import Int8Weights


class Int8Experts(nn.Module):
    """The experts of a `GroupedExperts` with SiLU, in int8: ``expert_out = experts(d)``; for inference alone.

    Weights have one scale for each output channel. Rows are multiplied as they arrived, and those between the two
    products are quantised by `INNER_WIRE`, 64 columns a scale. On Gaussian rows and weights the result is within
    0.025 (relative L2) of the float32 experts' on exact rows; the arithmetic is that of
    `thinwire.triton_kernels.expert_gemm`, the same bits on every device.

    Buffers: ``w_in`` int8 [experts, channels, hidden] (the gate's first, if gated; hidden rounded up to 16) and
    ``w_out`` int8 [experts, hidden, inner]; ``s_in`` and ``s_out``, float32, their scales.

    Raises:
        ValueError: experts with biases, or with another activation.
        WireFormatError: weights that are not finite.
    """

    w_in: torch.Tensor
    s_in: torch.Tensor
    w_out: torch.Tensor
    s_out: torch.Tensor

    def __init__(self, experts: GroupedExperts) -> None:
        super().__init__()
        if experts.activation != "silu" or experts.b_in is not None:
            raise ValueError(f"Int8Experts takes experts with silu and without biases, got {experts.extra_repr()}")
        self.hidden_size, self.ff_size = experts.hidden_size, experts.ff_size
        self.gated = experts.w_gate is not None
        inward = Int8Weights.of(experts.w_in, experts.w_gate)
        outward = Int8Weights.of(experts.w_out)
        for name, weights in (("in", inward), ("out", outward)):
            self.register_buffer(f"w_{name}", weights.payload)
            self.register_buffer(f"s_{name}", weights.scales)

    @property
    def num_experts(self) -> int:
        """Experts held here."""
        return self.w_in.shape[0]

    @opaque
    def forward(self, d: Dispatched, capacity: int | None = None) -> torch.Tensor:
        """The experts' outputs, for `combine`. Does not wait for the device.

        Args:
            d: an open round with an int8 wire.
            capacity: rows of the result, as for `d.gather`: those past it are dropped. None: on the CPU, as many as
                there are; on CUDA, as many as there could be, so as not to wait.

        Returns:
            [rows, hidden_size] in x's dtype, zero where a row is padding.

        Raises:
            LaneError, WireFormatError, RoutingError: as `d.quantized`; also for groups of 16 elements.
            RoutingError: a round of other experts or another hidden size.
            CapacityError: a negative capacity.
        """
        if not isinstance(d, Dispatched):
            raise RoutingError(f"d is a {type(d).__name__}; what dispatch returned is needed")
        d = uncompiled(d)
        rows = d.quantized
        hidden, num_experts = rows.payload.shape[1], d.expert_counts.shape[0]
        if (hidden, num_experts) != (self.hidden_size, self.num_experts):
            raise RoutingError(
                f"the round has {num_experts} experts here and rows of {hidden}; these are {self.num_experts} experts "
                f"for rows of {self.hidden_size}"
            )
        if capacity is not None:
            if not is_int(capacity, 0, 2**63 - 1):
                raise CapacityError(f"capacity is {capacity!r}; an int of at least 0 is needed")
            d._capacity = capacity
        most = rows.index.shape[0]
        count = min(most, capacity) if capacity is not None else d._read_num_rows() if rows.index.is_cpu else most
        product = select_expert_gemm(rows.records.device, rows.wire)
        index, offsets = rows.index[:count], d.expert_offsets
        memory, like = d._rounds.config.comm.result_memory, torch.empty(0, dtype=d._dtype, device=rows.records.device)
        inner = new_rows(rows.records, count, (INNER_WIRE.row_bytes(self.ff_size),), memory=memory)
        out = new_rows(like, count, (hidden,), memory=memory)
        # A model that is cast as a whole has scales of 16 bits; kernels read float32.
        inward = Int8Weights(self.w_in, self.s_in.float(), hidden, self.gated, activate=not self.gated)
        product(rows.records, rows.wire, index, offsets, inward, inner, INNER_WIRE)
        outward = Int8Weights(self.w_out, self.s_out.float(), self.ff_size)
        product(inner, INNER_WIRE, None, offsets, outward, out)
        if capacity is not None and capacity > most:
            out = nn.functional.pad(out, (0, 0, 0, capacity - most))
        return out

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts, {self.hidden_size} -> {self.ff_size}, silu{', gated' * self.gated}, int8"
