"""Experts in int8, which read the records of a round where they arrived."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from thinwire.compiler import opaque, require_flag
from thinwire.errors import ArgumentError, RoutingError, WireFormatError
from thinwire.fused.backend import select_expert_gemm
from thinwire.fused.counts import new_rows
from thinwire.moe.compiled_round import uncompiled
from thinwire.moe.dispatched import Dispatched
from thinwire.moe.experts import GroupedExperts, NamedByExperts
from thinwire.moe.received import check_capacity
from thinwire.triton_kernels.expert_gemm import INNER_WIRE
from thinwire.triton_kernels.int8_weights import Int8Weights


class Int8Experts(NamedByExperts):
    """The experts of a `GroupedExperts` with SiLU, in int8: ``expert_out = experts(d)``; for inference alone.

    Args:
        experts: whose weights are taken.
        rotated: for rounds whose wire has ``+h64``, as it has by default. The first product's weights are rotated as
            rows are, once and here, so rows are multiplied as they arrived. False: for `int8` without it, whose result
            is further from the float32 experts'.

    Weights have one scale for each output channel. Rows are multiplied as they arrived, and those between the two
    products are quantised by `INNER_WIRE`, 64 columns a scale. On Gaussian rows and weights the result is within
    0.025 (relative L2) of the float32 experts' on exact rows; the arithmetic is that of
    `thinwire.triton_kernels.expert_gemm`, the same bits on every device.

    Buffers: ``w_in`` int8 [experts, channels, hidden] (the gate's first, if gated; hidden rounded up to 16, or to 64 if
    rotated) and ``w_out`` int8 [experts, hidden, inner]; ``s_in`` and ``s_out``, float32, their scales.

    Raises:
        ArgumentError: something else than a `GroupedExperts`.
        ValueError: experts with biases, or with another activation.
        WireFormatError: weights that are not finite.
    """

    w_in: torch.Tensor
    s_in: torch.Tensor
    w_out: torch.Tensor
    s_out: torch.Tensor

    def __init__(self, experts: GroupedExperts, *, rotated: bool = True) -> None:
        super().__init__()
        require_flag("rotated", rotated)
        if not isinstance(experts, GroupedExperts):
            raise ArgumentError(f"experts is a {type(experts).__name__}; accepted: GroupedExperts")
        if experts.activation != "silu" or experts.b_in is not None:
            raise ValueError(f"Int8Experts takes experts with silu and without biases, got {experts.extra_repr()}")
        self.hidden_size, self.ff_size = experts.hidden_size, experts.ff_size
        self.gated, self.rotated = experts.w_gate is not None, rotated
        inward = Int8Weights.of(experts.w_in, experts.w_gate, rotated=rotated)
        outward = Int8Weights.of(experts.w_out)
        for name, weights in (("in", inward), ("out", outward)):
            self.register_buffer(f"w_{name}{experts.held}", weights.payload)
            self.register_buffer(f"s_{name}{experts.held}", weights.scales)
        self.held = experts.held

    def get_extra_state(self) -> torch.Tensor:
        """Whether the weights are rotated, which their shapes do not say."""
        return torch.tensor(self.rotated, dtype=torch.bool, device="cpu")

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Takes that over with the weights."""
        self.rotated = bool(state)

    @property
    def num_experts(self) -> int:
        """Experts held here."""
        return self.w_in.shape[0]

    @opaque
    def forward(self, d: Dispatched, capacity: int | None = None) -> torch.Tensor:
        """The experts' outputs, for `combine`. Does not wait for the device.

        Args:
            d: an open round with an int8 wire; one with ``+h64`` if these experts are `rotated`, else without.
            capacity: rows of the result, as for `d.gather`: those past it are dropped. None: on the CPU, as many as
                there are; on CUDA, as many as there could be, so as not to wait.

        Returns:
            [rows, hidden_size] in x's dtype, zero where a row is an expert's padding. Rows behind the last expert's
            hold anything: `combine` does not look at them.

        Raises:
            LaneError, WireFormatError, RoutingError: as `d.quantized`; also for groups of 16 elements.
            WireFormatError: rows are rotated and these experts are not, or the other way round.
            RoutingError: a round of other experts or another hidden size.
            CapacityError: a negative capacity, or more rows than there is memory for.
        """
        if not isinstance(d, Dispatched):
            raise RoutingError(f"d is a {type(d).__name__}; what dispatch returned is needed")
        d = uncompiled(d)
        rows = d.quantized
        hidden, num_experts = d._rounds.config.hidden_size, d.expert_counts.shape[0]
        if rows.wire.rotated != self.rotated:
            raise WireFormatError(
                f"rows arrived in {str(rows.wire)!r}, and these experts are Int8Experts(..., rotated={self.rotated}); "
                "accepted: rotated=True for wires with +h64, rotated=False for others"
            )
        if (hidden, num_experts) != (self.hidden_size, self.num_experts):
            raise RoutingError(
                f"the round has {num_experts} experts here and rows of {hidden}; these are {self.num_experts} experts "
                f"for rows of {self.hidden_size}"
            )
        if capacity is not None:
            check_capacity(capacity, d._row_bytes)
            d._capacity = capacity
        most = rows.index.shape[0]
        count = min(most, capacity) if capacity is not None else d._read_num_rows() if rows.index.is_cpu else most
        wire = replace(rows.wire, rotated=False)  # of what is multiplied: codes and scales of so many columns
        product = select_expert_gemm(rows.records.device, wire)
        index, offsets = rows.index[:count], d.expert_offsets
        memory, like = d._rounds.config.comm.result_memory, torch.empty(0, dtype=d._dtype, device=rows.records.device)
        inner = new_rows(rows.records, count, (INNER_WIRE.row_bytes(self.ff_size),), memory=memory)
        out = new_rows(like, count, (hidden,), memory=memory)
        # A model that is cast as a whole has scales of 16 bits; kernels read float32.
        columns = rows.payload.shape[1]
        inward = Int8Weights(self.w_in, self.s_in.float(), columns, self.gated, activate=not self.gated)
        product(rows.records, wire, index, offsets, inward, inner, INNER_WIRE)
        outward = Int8Weights(self.w_out, self.s_out.float(), self.ff_size)
        product(inner, INNER_WIRE, None, offsets, outward, out)
        if capacity is not None and capacity > most:
            out = nn.functional.pad(out, (0, 0, 0, capacity - most))
        return out

    def extra_repr(self) -> str:
        form = f"silu{', gated' * self.gated}, int8{'+h64' * self.rotated}"
        return f"{self.num_experts} experts, {self.hidden_size} -> {self.ff_size}, {form}"
