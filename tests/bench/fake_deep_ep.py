"""`deep_ep` for ranks that are threads on the CPU: its calls, what it asserts, and where it puts rows.

What its kernels assert on the device ends a CUDA context; here it is `DeviceTrap`, which nobody catches.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch

CHANNELS = 10


class DeviceTrap(BaseException):
    """An assertion of a kernel."""


class Group:
    """What a process group tells of itself; rows go through the communicator."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def rank(self) -> int:
        return self.comm.rank

    def size(self) -> int:
        return self.comm.size


@dataclass
class Config:
    recv_tokens: int = 256

    def slots(self, ranks: int) -> int:
        return CHANNELS * ranks * self.recv_tokens

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        size = self.slots(num_ranks) * (hidden_bytes + 128 * 16 + 16)
        return -(-size // 128) * 128


def _assert(condition: bool, text: str) -> None:
    if not condition:
        raise RuntimeError(f"Assertion exception (csrc/legacy/buffer.hpp:1): {text}")


class Buffer:
    alive = 0

    def __init__(
        self, group: Group, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, *, explicitly_destroy: bool
    ) -> None:
        _assert(num_nvl_bytes % 128 == 0, "num_nvl_bytes % LEGACY_NUM_BUFFER_ALIGNMENT_BYTES == 0")
        assert num_rdma_bytes == 0 and explicitly_destroy
        self.comm, self.nvl_bytes = group.comm, num_nvl_bytes
        self.comm.barrier()
        if group.rank() == 0:
            Buffer.alive += 1

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8), f"Unsupported number of EP ranks: {num_ranks}"
        return Config()

    get_combine_config = get_dispatch_config

    def destroy(self) -> None:
        self.comm.barrier()  # as its kernel does
        if self.comm.rank == 0:
            Buffer.alive -= 1

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        _assert(topk_idx.dim() == 2 and topk_idx.is_contiguous() and topk_idx.dtype == torch.int64, "topk_idx")
        size, each = self.comm.size, num_experts // self.comm.size
        owners = torch.where(topk_idx >= 0, topk_idx // max(1, each), -1)
        in_rank = torch.stack([(owners == rank).any(1) for rank in range(size)], 1)
        per_expert = topk_idx[topk_idx >= 0].bincount(minlength=num_experts)
        return in_rank.sum(0).int(), None, per_expert.int(), in_rank, None

    def dispatch(
        self,
        x: Any,
        *,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_tokens_per_rank: torch.Tensor,
        is_token_in_rank: torch.Tensor,
        num_tokens_per_expert: torch.Tensor,
    ) -> tuple[Any, ...]:
        rows, scales = x if isinstance(x, tuple) else (x, None)
        size, tokens = self.comm.size, len(rows)
        row_bytes = rows.shape[1] * rows.itemsize
        _assert(rows.dim() == 2 and rows.is_contiguous() and row_bytes % 16 == 0, "x")
        _assert(is_token_in_rank.dtype == torch.bool and is_token_in_rank.shape == (tokens, size), "is_token_in_rank")
        _assert(num_tokens_per_expert.dtype == num_tokens_per_rank.dtype == torch.int32, "counts")
        _assert(len(num_tokens_per_expert) % size == 0, "num_tokens_per_expert->size(0) % num_ranks == 0")
        _assert(num_tokens_per_rank.shape == (size,), "num_tokens_per_rank->size(0) == num_ranks")
        _assert(topk_idx.shape == topk_weights.shape == (tokens, topk_idx.shape[1]), "topk")
        _assert(topk_weights.dtype == torch.float32 and topk_weights.is_contiguous(), "topk_weights")
        num_scales = 0
        if scales is not None:
            _assert(rows.itemsize == 1 and scales.dtype == torch.float32 and len(scales) == tokens, "x_scales")
            num_scales = scales.shape[1]
        slot = row_bytes + 4 + topk_idx.shape[1] * 12 + num_scales * 4
        _assert(Config().slots(size) * slot <= self.nvl_bytes, "<= num_nvl_bytes")
        if row_bytes % 32 or row_bytes // 2 + 8 > 8192:
            raise DeviceTrap("hidden_int4 % 2 == 0 and half_hidden_bytes + 8 <= kNumTMABytesPerWarp")
        sent = rows.view(torch.uint8), scales, topk_idx, topk_weights  # torch does not pickle float8
        each = len(num_tokens_per_expert) // size
        first = self.comm.rank * each
        received, sources, numbers = [], [], []
        for source, (theirs, their_scales, ids, weights, in_rank) in enumerate(
            self.comm.all_gather_object((*sent, is_token_in_rank))
        ):
            here = in_rank[:, self.comm.rank].nonzero()[:, 0]
            local = torch.where((ids >= first) & (ids < first + each), ids - first, -1)[here]
            picked = None if their_scales is None else their_scales[here]
            received.append((theirs[here], picked, local, torch.where(local >= 0, weights[here], 0.0)))
            sources.append(torch.full_like(here, source))
            numbers.append(here)
        parts = [None if part[0] is None else torch.cat(part) for part in zip(*received, strict=True)]
        counts = parts[2][parts[2] >= 0].bincount(minlength=each).tolist()
        handle = (torch.cat(sources), torch.cat(numbers), tokens)
        out = parts[0].view(rows.dtype) if scales is None else (parts[0].view(rows.dtype), parts[1])
        return out, parts[2], parts[3], counts, handle, None

    def combine(self, x: torch.Tensor, handle: Any) -> tuple[Any, ...]:
        sources, numbers, tokens = handle
        _assert(x.dim() == 2 and x.is_contiguous() and len(x) == len(sources), "src_idx.size(0) == num_tokens")
        _assert(x.dtype == torch.bfloat16, 'false and "Unsupported type"')
        total = torch.zeros(tokens, x.shape[1])
        for theirs, their_sources, their_numbers in self.comm.all_gather_object((x, sources, numbers)):
            mine = their_sources == self.comm.rank
            total[their_numbers[mine]] += theirs[mine].float()
        return total.to(x.dtype), None, None


def module() -> types.ModuleType:
    """It, to be put into `sys.modules`."""
    made = types.ModuleType("deep_ep")
    made.Buffer, made.topk_idx_t = Buffer, torch.int64  # type: ignore[attr-defined]
    return made
