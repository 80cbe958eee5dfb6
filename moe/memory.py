"""What an ExpertParallel holds at a rank, to the byte, before it is constructed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.comm.memory.symmetric import HEAPS, held_bytes
from thinwire.comm.tensors import is_int
from thinwire.errors import ArgumentError, TransportUnavailable
from thinwire.moe.config import ParallelSettings
from thinwire.triton_kernels.round_layout import Lane
from thinwire.wire import WireFormat


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that one rank holds between calls.

    Attributes:
        transport: "direct" or "staged", and `reason` why.
        symmetric_bytes: that peers store into or read, with what its heap needs beside it.
        bookkeeping_bytes: what routing and kernels keep for themselves.
        backward_bytes: added by the first dispatch that wants gradients; both kinds in one.
    """

    transport: str
    reason: str
    symmetric_bytes: int
    bookkeeping_bytes: int
    backward_bytes: int

    @property
    def forward_bytes(self) -> int:
        """`ExpertParallel.memory_bytes` once it is constructed."""
        return self.symmetric_bytes + self.bookkeeping_bytes

    @property
    def training_bytes(self) -> int:
        """`ExpertParallel.memory_bytes` once a dispatch has wanted gradients."""
        return self.forward_bytes + self.backward_bytes


def plan_memory(
    ranks: int,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    max_tokens: int,
    *,
    rank: int = 0,
    heap: str = "cuda",
    wire: str | WireFormat | None = None,
    combine_wire: str | WireFormat | None = None,
    grad_wire: str | WireFormat | None = "none",
    transport: str = "auto",
    lanes: int = 1,
    align: int = 1,
    invariant: bool = False,
    dtype: torch.dtype | None = None,
) -> MemoryPlan:
    """What `thinwire.ExpertParallel` with these arguments will hold: `ep.memory_bytes`, to the byte.

    The sizes come from the functions that the constructor allocates by. What is not counted: a round's results and, on
    the staged transport, its messages, which last no longer than the round; what PyTorch rounds up on CUDA.

    Args:
        ranks: of the group; `num_experts` to `dtype` are ExpertParallel's own arguments, and mean what they mean there.
        rank: whose memory; the first `num_experts % ranks` own one expert more.
        heap: where symmetric memory comes from: "cuda" for GPUs, "posix" for CPU ranks that are processes, "threads"
            for CPU ranks that are threads. On the CPU with numba's kernels, which are those that are taken there.
        transport: with "auto" every rank is taken to be able to map every peer's memory.

    Raises:
        ArgumentError: `ranks`, `rank` or `heap` that cannot be.
        RoutingError, WireFormatError, TransportUnavailable: as the constructor.

    >>> plan = plan_memory(8, 256, 8, 7168, 128, wire="int8", dtype=torch.bfloat16)
    >>> plan.transport, plan.symmetric_bytes, plan.bookkeeping_bytes
    ('direct', 15009344, 172808)
    """
    settings = ParallelSettings.of(
        num_experts, top_k, hidden_size, max_tokens, wire=wire, combine_wire=combine_wire, grad_wire=grad_wire,
        transport=transport, lanes=lanes, align=align, invariant=invariant, num_programs=None, timeout=None,
        dtype=dtype,
    )  # fmt: skip
    if not is_int(ranks, 1):
        raise ArgumentError(f"ranks is {ranks!r}, expected an int of at least 1")
    if not is_int(rank, 0, ranks - 1):
        raise ArgumentError(f"rank is {rank!r}, expected an int from 0 to {ranks - 1}")
    if heap not in HEAPS:
        raise ArgumentError(f"heap is {heap!r}, expected one of {', '.join(HEAPS)}")
    reason = "as asked for" if transport == "staged" else settings.why_staged(ranks)
    if reason is not None:
        if transport == "direct":
            raise TransportUnavailable(f"ExpertParallel cannot take the direct transport: {reason}")
        return MemoryPlan("staged", reason, 0, 0, 0)
    symmetric, bookkeeping = _bytes_of_lanes(settings, False, ranks, rank, heap)
    return MemoryPlan(
        "direct",
        "as asked for" if transport == "direct" else "every rank is taken to map every peer's memory",
        symmetric,
        bookkeeping,
        sum(_bytes_of_lanes(settings.of_backward, True, ranks, rank, heap)),
    )


def _bytes_of_lanes(settings: ParallelSettings, backward: bool, ranks: int, rank: int, heap: str) -> tuple[int, int]:
    """Symmetric memory of lanes, with what its heap needs beside it; and what routing and kernels keep."""
    if heap == "cuda":
        layout = settings.lane_layout(ranks, weight_grads=backward)
        shared, beside = settings.lanes * layout.NUM_BYTES, Lane.bytes_beside(layout, rank, settings.align)
    else:
        from thinwire.moe.pulled import shared_bytes  # both load numba
        from thinwire.triton_kernels.cpu.lane import PulledLane

        of_cpus = settings.pulled_layout(ranks, weight_grads=backward)
        shared = shared_bytes(of_cpus, settings.lanes, ranks)
        beside = PulledLane.bytes_beside(of_cpus, rank, settings.align)
    return held_bytes(heap, shared, ranks), settings.lanes * beside
